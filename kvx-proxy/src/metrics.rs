//! Metrics in the text format of Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::discovery::status::DiscoveryStatus;
use crate::fleet::Fleet;
use crate::release::ReleaseCounts;

/// Counts by the values of two labels.
type Counts = Mutex<BTreeMap<(&'static str, &'static str), u64>>;

/// A histogram of durations in seconds.
#[derive(Debug)]
pub(crate) struct Histogram {
    bounds: &'static [f64],
    buckets: Vec<AtomicU64>,
    micros: AtomicU64,
}

const LONG: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0,
];
const SHORT: &[f64] =
    &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0];

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        let buckets = bounds.iter().map(|_| AtomicU64::new(0)).chain([AtomicU64::new(0)]).collect();
        Histogram { bounds, buckets, micros: AtomicU64::new(0) }
    }

    pub(crate) fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = self.bounds.partition_point(|bound| *bound < seconds);
        self.buckets[bucket].fetch_add(1, Relaxed);
        self.micros.fetch_add(time.as_micros() as u64, Relaxed);
    }

    fn write(&self, into: &mut String, name: &str, label: &str) {
        let comma = if label.is_empty() { "" } else { "," };
        let braced = if label.is_empty() { String::new() } else { format!("{{{label}}}") };
        let mut sum = 0;
        for (bound, bucket) in self.bounds.iter().zip(&self.buckets) {
            sum += bucket.load(Relaxed);
            let _ = writeln!(into, "{name}_bucket{{{label}{comma}le=\"{bound}\"}} {sum}");
        }
        sum += self.buckets[self.bounds.len()].load(Relaxed);
        let _ = writeln!(into, "{name}_bucket{{{label}{comma}le=\"+Inf\"}} {sum}");
        let _ = writeln!(into, "{name}_sum{braced} {}", self.micros.load(Relaxed) as f64 / 1e6);
        let _ = writeln!(into, "{name}_count{braced} {sum}");
    }
}

#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) started: Instant,
    pub(crate) discovery: DiscoveryStatus,
    requests: Counts,
    routes: Counts,
    legs: Counts,
    retries: Counts,
    ejections: Counts,
    fallbacks: Counts,
    pub(crate) releases: Arc<ReleaseCounts>,
    tokenizations: Counts,
    pub(crate) drifts: AtomicU64,
    pub(crate) retries_denied: AtomicU64,
    pub(crate) without_transfer: AtomicU64,
    pub(crate) log_lines_dropped: AtomicU64,
    /// The recorder's counter.
    pub(crate) recording_lines_dropped: Arc<AtomicU64>,
    pub(crate) in_flight: AtomicI64,
    pub(crate) queued: AtomicI64,
    pub(crate) connections: AtomicI64,
    pub(crate) queue: Histogram,
    pub(crate) ttft: Histogram,
    pub(crate) per_token: Histogram,
    pub(crate) prefill_leg: Histogram,
    pub(crate) decode_leg: Histogram,
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestOutcome {
    Ok,
    ClientError,
    UpstreamError,
    Timeout,
    ClientGone,
    BrokenOff,
    Refused,
}

impl RequestOutcome {
    const ALL: [RequestOutcome; 7] = [
        RequestOutcome::Ok,
        RequestOutcome::ClientError,
        RequestOutcome::UpstreamError,
        RequestOutcome::Timeout,
        RequestOutcome::ClientGone,
        RequestOutcome::BrokenOff,
        RequestOutcome::Refused,
    ];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            RequestOutcome::Ok => "ok",
            RequestOutcome::ClientError => "client_error",
            RequestOutcome::UpstreamError => "upstream_error",
            RequestOutcome::Timeout => "timeout",
            RequestOutcome::ClientGone => "client_gone",
            RequestOutcome::BrokenOff => "broken_off",
            RequestOutcome::Refused => "refused",
        }
    }

    /// Returns true if the client is not the reason for the outcome.
    pub(crate) fn is_failure(self) -> bool {
        !matches!(
            self,
            RequestOutcome::Ok | RequestOutcome::ClientError | RequestOutcome::ClientGone
        )
    }
}

fn add(counts: &Counts, one: &'static str, other: &'static str) {
    *counts.lock().unwrap_or_else(PoisonError::into_inner).entry((one, other)).or_default() += 1;
}

fn by_first_label(counts: &Counts) -> BTreeMap<&'static str, u64> {
    let counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
    counts.iter().map(|((label, _), count)| (*label, *count)).collect()
}

impl Default for Metrics {
    fn default() -> Self {
        let zeros = |labels: &[(&'static str, &'static str)]| -> Counts {
            Mutex::new(labels.iter().map(|label| (*label, 0)).collect())
        };
        Metrics {
            started: Instant::now(),
            discovery: DiscoveryStatus::default(),
            requests: zeros(&RequestOutcome::ALL.map(|outcome| (outcome.as_str(), ""))),
            routes: Counts::default(),
            legs: Counts::default(),
            retries: zeros(&[("prefill", ""), ("decode", "")]),
            ejections: zeros(&[("refused", ""), ("errors", ""), ("slow", ""), ("health", "")]),
            fallbacks: zeros(&[("served", ""), ("refused", "")]),
            releases: Arc::default(),
            tokenizations: zeros(&[("ok", ""), ("refused", ""), ("failed", "")]),
            drifts: AtomicU64::new(0),
            retries_denied: AtomicU64::new(0),
            without_transfer: AtomicU64::new(0),
            log_lines_dropped: AtomicU64::new(0),
            recording_lines_dropped: Arc::default(),
            in_flight: AtomicI64::new(0),
            queued: AtomicI64::new(0),
            connections: AtomicI64::new(0),
            queue: Histogram::new(LONG),
            ttft: Histogram::new(LONG),
            per_token: Histogram::new(SHORT),
            prefill_leg: Histogram::new(LONG),
            decode_leg: Histogram::new(LONG),
        }
    }
}

impl Metrics {
    /// Returns metrics that show this counter of a recorder.
    pub(crate) fn new(recording_lines_dropped: Arc<AtomicU64>) -> Self {
        Metrics { recording_lines_dropped, ..Metrics::default() }
    }

    pub(crate) fn request(&self, outcome: RequestOutcome) {
        add(&self.requests, outcome.as_str(), "");
    }

    pub(crate) fn route(&self, route: &'static str, reason: &'static str) {
        add(&self.routes, route, reason);
    }

    pub(crate) fn leg(&self, leg: &'static str, outcome: &'static str, time: Duration) {
        add(&self.legs, leg, outcome);
        match leg {
            "prefill" => self.prefill_leg.observe(time),
            _ => self.decode_leg.observe(time),
        }
    }

    pub(crate) fn retry(&self, leg: &'static str) {
        add(&self.retries, leg, "");
    }

    pub(crate) fn ejection(&self, reason: &'static str) {
        add(&self.ejections, reason, "");
    }

    pub(crate) fn fallback(&self, result: &'static str) {
        add(&self.fallbacks, result, "");
    }

    pub(crate) fn tokenization(&self, result: &'static str) {
        add(&self.tokenizations, result, "");
    }

    /// Returns the number of finished requests by outcome.
    pub(crate) fn outcomes(&self) -> BTreeMap<&'static str, u64> {
        by_first_label(&self.requests)
    }

    /// Returns the number of ejections by reason.
    pub(crate) fn ejections(&self) -> BTreeMap<&'static str, u64> {
        by_first_label(&self.ejections)
    }

    /// Renders the metrics in the text format of Prometheus.
    pub(crate) fn text(&self, fleet: &Fleet) -> String {
        let mut text = String::with_capacity(16 << 10);
        let into = &mut text;
        let counters = [
            ("requests", "Requests by outcome.", ["outcome", ""], &self.requests),
            ("routes", "Routes of requests, by reason.", ["route", "reason"], &self.routes),
            ("legs", "Requests to instances by outcome.", ["leg", "outcome"], &self.legs),
            ("retries", "Retried legs.", ["leg", ""], &self.retries),
            ("ejections", "Ejections of instances, by reason.", ["reason", ""], &self.ejections),
            (
                "fallbacks",
                "Requests that arrived while no prefill instance was up, by result.",
                ["result", ""],
                &self.fallbacks,
            ),
            (
                "tokenizations",
                "Prompts whose tokens were asked for, to compare them with KV events.",
                ["result", ""],
                &self.tokenizations,
            ),
        ];
        for (name, help, labels, counts) in counters {
            head(into, &format!("kvx_proxy_{name}_total"), "counter", help);
            for ((one, other), count) in
                counts.lock().unwrap_or_else(PoisonError::into_inner).iter()
            {
                let second = match labels[1] {
                    "" => String::new(),
                    label => format!(",{label}=\"{other}\""),
                };
                let _ = writeln!(
                    into,
                    "kvx_proxy_{name}_total{{{}=\"{one}\"{second}}} {count}",
                    labels[0]
                );
            }
        }
        let name = "kvx_proxy_releases_total";
        head(into, name, "counter", "Releases of blocks that no decode fetches, by result.");
        for (result, count) in self.releases.iter() {
            let _ = writeln!(into, "{name}{{result=\"{result}\"}} {count}");
        }
        let plain = [
            (
                "cache_drifts_total",
                "counter",
                "Times that KV events of an instance disagreed with its answers.",
                &self.drifts,
            ),
            (
                "retries_denied_total",
                "counter",
                "Retries that the budget did not allow.",
                &self.retries_denied,
            ),
            (
                "prefills_without_transfer_total",
                "counter",
                "Prefills that handed over no blocks: decode computed the prompt again.",
                &self.without_transfer,
            ),
            (
                "log_lines_dropped_total",
                "counter",
                "Access log lines that could not be written in time.",
                &self.log_lines_dropped,
            ),
            (
                "recording_lines_dropped_total",
                "counter",
                "Requests that the recording lacks: the disk was slow or full, or its limit reached.",
                &*self.recording_lines_dropped,
            ),
        ];
        for (name, kind, help, value) in plain {
            head(into, &format!("kvx_proxy_{name}"), kind, help);
            let _ = writeln!(into, "kvx_proxy_{name} {}", value.load(Relaxed));
        }
        let gauges = [
            ("in_flight", "Requests in progress.", &self.in_flight),
            ("queued", "Requests that wait for admission.", &self.queued),
            ("connections", "Client connections.", &self.connections),
        ];
        for (name, help, value) in gauges {
            head(into, &format!("kvx_proxy_{name}"), "gauge", help);
            let _ = writeln!(into, "kvx_proxy_{name} {}", value.load(Relaxed));
        }
        let histograms = [
            ("queue_seconds", "Time from a request to its admission.", &self.queue),
            ("ttft_seconds", "Time from a request to the first byte of its answer.", &self.ttft),
            (
                "time_per_token_seconds",
                "Mean time between events of a stream, per request.",
                &self.per_token,
            ),
        ];
        for (name, help, histogram) in histograms {
            head(into, &format!("kvx_proxy_{name}"), "histogram", help);
            histogram.write(into, &format!("kvx_proxy_{name}"), "");
        }
        head(
            into,
            "kvx_proxy_leg_seconds",
            "histogram",
            "Time of a leg: a prefill until its answer, a decode until its first byte.",
        );
        self.prefill_leg.write(into, "kvx_proxy_leg_seconds", "leg=\"prefill\"");
        self.decode_leg.write(into, "kvx_proxy_leg_seconds", "leg=\"decode\"");
        self.discovery.write(into, head);
        instances(into, fleet);
        text
    }
}

fn head(into: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(into, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn instances(into: &mut String, fleet: &Fleet) {
    type Read = fn(&crate::fleet::instance::State) -> u64;
    let rows: [(&str, &str, &str, Read); 12] = [
        ("up", "gauge", "1 if the instance accepts requests, else 0.", |state| {
            u64::from(state.is_open(Instant::now()))
        }),
        ("outstanding_tokens", "gauge", "Estimated tokens in progress.", |state| {
            state.outstanding()
        }),
        ("requests", "gauge", "Requests in progress.", |state| state.requests()),
        ("requests_total", "counter", "Requests sent to the instance.", |state| {
            state.requests_total.load(Relaxed)
        }),
        ("failures_total", "counter", "Requests that the instance failed.", |state| {
            state.failures_total.load(Relaxed)
        }),
        (
            "cache_knowledge",
            "gauge",
            "Knowledge of the prefix cache: 2 by all KV events, 1 by some, 0 by history.",
            |state| state.cache().level() as u64,
        ),
        ("event_blocks", "gauge", "Cached blocks by KV events.", |state| {
            state.cache().blocks() as u64
        }),
        ("event_batches_total", "counter", "Batches of KV events.", |state| {
            state.cache().counts().batches
        }),
        ("event_gaps_total", "counter", "Gaps in the numbers of KV events.", |state| {
            state.cache().counts().gaps
        }),
        ("event_orphans_total", "counter", "Blocks in events whose parent is unknown.", |state| {
            state.cache().counts().orphans
        }),
        (
            "predicted_cached_tokens_total",
            "counter",
            "Cached tokens that the router predicted for prompts with a report.",
            |state| state.cache().drift.predicted,
        ),
        (
            "reported_cached_tokens_total",
            "counter",
            "Cached tokens that answers reported.",
            |state| state.cache().drift.reported,
        ),
    ];
    for (name, kind, help, read) in rows {
        let name = format!("kvx_proxy_instance_{name}");
        head(into, &name, kind, help);
        for one in fleet.all() {
            let pool =
                one.pool_name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let (role, value) = (one.role.as_str(), read(&one.state));
            let _ = writeln!(
                into,
                "{name}{{pool=\"{pool}\",role=\"{role}\",instance=\"{}\"}} {value}",
                one.name()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::Setup;

    #[test]
    fn the_text_is_well_formed_and_counts() {
        let setup = Setup::from_toml("[[pool]]\nname = 'a\"b'\ndecode = ['http://d:1']").unwrap();
        let metrics = Metrics::default();
        metrics.request(RequestOutcome::Ok);
        metrics.route("decode_alone", "n");
        metrics.leg("decode", "ok", Duration::from_millis(3));
        metrics.ttft.observe(Duration::from_millis(40));
        let text = metrics.text(&Fleet::new(&setup, None));
        for line in [
            "kvx_proxy_requests_total{outcome=\"ok\"} 1",
            "kvx_proxy_requests_total{outcome=\"timeout\"} 0",
            "kvx_proxy_routes_total{route=\"decode_alone\",reason=\"n\"} 1",
            "kvx_proxy_legs_total{leg=\"decode\",outcome=\"ok\"} 1",
            "kvx_proxy_ttft_seconds_bucket{le=\"0.025\"} 0",
            "kvx_proxy_ttft_seconds_bucket{le=\"0.05\"} 1",
            "kvx_proxy_ttft_seconds_count 1",
            "kvx_proxy_leg_seconds_bucket{leg=\"decode\",le=\"0.005\"} 1",
            "kvx_proxy_leg_seconds_sum{leg=\"decode\"} 0.003",
            "kvx_proxy_instance_up{pool=\"a\\\"b\",role=\"decode\",instance=\"d:1\"} 0",
        ] {
            assert!(text.lines().any(|one| one == line), "{line}\n{text}");
        }
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            assert!(
                line.rsplit_once(' ').is_some_and(|(_, value)| value.parse::<f64>().is_ok()),
                "{line}"
            );
        }
    }
}
