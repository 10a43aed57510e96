//! Statistics of the answers of an endpoint.

use std::collections::BTreeMap;
use std::time::Duration;

use kvx_proxy::replay::{CacheCounts, PlayedEndpoint, PlayedRequest};
use serde::Serialize;

/// The limits within which clients expect an answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ServiceLevel {
    /// The longest time until the first token.
    pub(crate) first_token: Duration,
    /// The longest mean time between two tokens.
    pub(crate) per_token: Duration,
}

impl ServiceLevel {
    /// Returns true if an answer is complete and in time.
    pub(crate) fn is_met_by(&self, request: &PlayedRequest) -> bool {
        request.error.is_none()
            && request.first_token.is_some_and(|time| time <= self.first_token)
            // An answer of one token has no time between tokens.
            && request.per_token.is_none_or(|time| time <= self.per_token)
    }
}

/// Percentiles of times in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Percentiles {
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
}

/// Returns the smallest value that is not below this part of the sorted values.
pub(crate) fn percentile(sorted: &[f64], part: f64) -> Option<f64> {
    let rank = (sorted.len() as f64 * part).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

/// Returns times in milliseconds, the shortest first.
pub(crate) fn sorted(times: impl Iterator<Item = Duration>) -> Vec<f64> {
    let mut millis: Vec<f64> = times.map(|time| time.as_secs_f64() * 1e3).collect();
    millis.sort_by(f64::total_cmp);
    millis
}

impl Percentiles {
    fn of(times: impl Iterator<Item = Duration>) -> Option<Self> {
        let sorted = sorted(times);
        let at = |part| percentile(&sorted, part);
        Some(Percentiles { p50: at(0.5)?, p90: at(0.9)?, p99: at(0.99)? })
    }
}

/// The statistics of the answers of an endpoint.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub(crate) url: String,
    pub(crate) requests: usize,
    /// Requests whose time came and that were not sent.
    pub(crate) not_sent: usize,
    /// Failed requests by their kind.
    pub(crate) errors: BTreeMap<String, usize>,
    pub(crate) seconds: f64,
    pub(crate) prompt_tokens: u64,
    pub(crate) answer_tokens: u64,
    /// From the planned time of the request until the first token, of all answers that have one.
    pub(crate) ttft_ms: Option<Percentiles>,
    /// Between two tokens, of all answers with several.
    pub(crate) per_token_ms: Option<Percentiles>,
    /// From the planned time of the request until the end of complete answers.
    pub(crate) total_ms: Option<Percentiles>,
    /// Complete answers per second.
    pub(crate) answers_per_second: f64,
    /// Generated tokens per second.
    pub(crate) tokens_per_second: f64,
    /// Answers per second that met the service level.
    pub(crate) goodput_per_second: f64,
    /// The part of requests, also of those that were not sent, that met it.
    pub(crate) within_level: f64,
    /// The part of prompts that servers reported as cached, and the answers that had a report.
    pub(crate) cached_part: Option<f64>,
    pub(crate) cached_reports: usize,
    /// The part of prompts that the observed caches had.
    pub(crate) cache_hit_part: Option<f64>,
    /// The delays of sending requests, and the greatest.
    pub(crate) late_ms: Option<Percentiles>,
    pub(crate) most_late_ms: f64,
}

impl Summary {
    pub(crate) fn of(played: &PlayedEndpoint, level: &ServiceLevel) -> Self {
        let requests = &played.requests;
        let whole = || requests.iter().filter(|request| request.error.is_none());
        let mut errors = BTreeMap::new();
        for error in requests.iter().filter_map(|request| request.error.as_ref()) {
            *errors.entry(error.kind.clone()).or_default() += 1;
        }
        let seconds = played.took.as_secs_f64();
        let per_second = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        let good = requests.iter().filter(|request| level.is_met_by(request)).count();
        let answer_tokens: u64 = requests.iter().map(|request| request.answer_tokens).sum();
        let (mut asked, mut cached, mut cached_reports) = (0, 0, 0);
        for (prompt, part) in requests.iter().filter_map(|request| request.cached) {
            (asked, cached) = (asked + prompt, cached + part);
            cached_reports += 1;
        }
        let part = |some: f64, all: f64| (all > 0.0).then(|| some / all);
        Summary {
            url: played.url.clone(),
            requests: requests.len(),
            not_sent: played.not_sent,
            errors,
            seconds,
            prompt_tokens: requests.iter().map(|request| request.prompt_tokens as u64).sum(),
            answer_tokens,
            ttft_ms: Percentiles::of(requests.iter().filter_map(|request| request.first_token)),
            per_token_ms: Percentiles::of(requests.iter().filter_map(|request| request.per_token)),
            total_ms: Percentiles::of(whole().map(|request| request.total)),
            answers_per_second: per_second(whole().count() as f64),
            tokens_per_second: per_second(answer_tokens as f64),
            goodput_per_second: per_second(good as f64),
            within_level: part(good as f64, (requests.len() + played.not_sent) as f64)
                .unwrap_or(0.0),
            cached_part: part(cached as f64, asked as f64),
            cached_reports,
            cache_hit_part: played
                .caches
                .as_ref()
                .and_then(|counts| counts.as_ref().ok())
                .and_then(|CacheCounts { queries, hits, .. }| part(*hits, *queries)),
            late_ms: Percentiles::of(requests.iter().map(|request| request.late)),
            most_late_ms: sorted(requests.iter().map(|request| request.late)).pop().unwrap_or(0.0),
        }
    }

    /// Returns the number of failed requests.
    pub(crate) fn failed(&self) -> usize {
        self.errors.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use kvx_proxy::replay::PlayError;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn request(first: u32, per_token: Option<u32>, error: Option<&str>) -> PlayedRequest {
        let mut request = PlayedRequest::default();
        request.prompt_tokens = 100;
        request.answer_tokens = 10;
        request.first_token = Some(first * MS);
        request.per_token = per_token.map(|time| time * MS);
        request.total = 2 * first * MS;
        request.error = error.map(|kind| {
            let mut error = PlayError::default();
            error.kind = kind.to_owned();
            error
        });
        request
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let values: Vec<f64> = (1..=10).map(f64::from).collect();
        let at = |part| percentile(&values, part).unwrap();
        assert_eq!((at(0.0), at(0.1), at(0.5), at(0.51), at(0.9)), (1.0, 1.0, 5.0, 6.0, 9.0));
        assert_eq!((at(0.99), at(1.0)), (10.0, 10.0));
        assert_eq!(percentile(&[7.0], 0.5), Some(7.0));
        assert_eq!(percentile(&[], 0.5), None);
    }

    #[test]
    fn goodput_counts_complete_answers_within_both_limits() {
        let level = ServiceLevel { first_token: 100 * MS, per_token: 20 * MS };
        let mut played = PlayedEndpoint::default();
        played.took = Duration::from_secs(4);
        played.requests = vec![
            request(100, Some(20), None),          // both limits just met
            request(101, Some(20), None),          // the first token is late
            request(100, Some(21), None),          // the others are slow
            request(50, None, None),               // a single token
            request(50, Some(5), Some("timeout")), // incomplete
            request(50, Some(5), Some("timeout")),
            request(50, Some(5), Some("status 503")),
        ];
        let mut unanswered = PlayedRequest::default();
        unanswered.error = Some(PlayError::default());
        played.requests.push(unanswered);
        played.requests[0].cached = Some((100, 40));
        played.requests[1].cached = Some((100, 20));
        played.requests[1].late = 3 * MS;
        played.not_sent = 2;
        let summary = Summary::of(&played, &level);
        assert_eq!((summary.requests, summary.not_sent, summary.failed()), (8, 2, 4));
        assert_eq!((summary.errors["timeout"], summary.errors["status 503"]), (2, 1));
        assert_eq!((summary.goodput_per_second, summary.within_level), (0.5, 0.2));
        assert_eq!((summary.answers_per_second, summary.tokens_per_second), (1.0, 17.5));
        let ttft = summary.ttft_ms.unwrap();
        assert_eq!((ttft.p50, ttft.p90, ttft.p99), (50.0, 101.0, 101.0));
        assert_eq!(summary.per_token_ms.unwrap().p50, 5.0);
        assert_eq!(summary.total_ms.unwrap().p50, 200.0);
        assert_eq!((summary.cached_part, summary.cached_reports), (Some(0.3), 2));
        assert_eq!((summary.cache_hit_part, summary.most_late_ms), (None, 3.0));
        assert_eq!(summary.late_ms.unwrap(), Percentiles { p50: 0.0, p90: 3.0, p99: 3.0 });
        assert_eq!((summary.prompt_tokens, summary.answer_tokens), (700, 70));
    }

    #[test]
    fn without_requests_nothing_is_divided_by_zero() {
        let level = ServiceLevel { first_token: MS, per_token: MS };
        let summary = Summary::of(&PlayedEndpoint::default(), &level);
        assert_eq!((summary.requests, summary.goodput_per_second, summary.ttft_ms), (0, 0.0, None));
        let json = serde_json::to_string(&summary).unwrap();
        assert!(!json.contains("NaN") && json.contains("\"ttft_ms\":null"), "{json}");
    }
}
