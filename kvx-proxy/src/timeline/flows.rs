//! Which instances served the last requests, and how fast.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::{Leg, Timeline};
use crate::fleet::instance::Role;

/// The role and the name of an instance.
pub(crate) type LegKey = (&'static str, Arc<str>);

/// The requests that went from a prefill to a decode instance, or to a decode instance alone.
#[derive(Debug, Serialize, PartialEq)]
pub(crate) struct Flow {
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill: Option<String>,
    decode: String,
    requests: u64,
    failed: u64,
    /// The median time to the first byte.
    #[serde(skip_serializing_if = "Option::is_none")]
    ttft_ms: Option<f64>,
}

/// The legs of an instance among the last requests.
#[derive(Clone, Copy, Debug, Default, Serialize, PartialEq)]
pub(crate) struct InstanceLegs {
    pub(crate) legs: usize,
    pub(crate) failed: usize,
    /// The median time of those that did not fail: a prefill until its end, a decode until its
    /// first byte.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) p50_ms: Option<f64>,
}

/// The traffic of the last requests.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    pub(crate) flows: Vec<Flow>,
    pub(crate) instances: BTreeMap<LegKey, InstanceLegs>,
}

fn median(times: &mut [Duration]) -> Option<f64> {
    let middle = times.len().checked_sub(1)? / 2;
    let (_, median, _) = times.select_nth_unstable(middle);
    Some((median.as_secs_f64() * 1e5).round() / 1e2)
}

#[derive(Default)]
struct Times {
    all: usize,
    failed: usize,
    times: Vec<Duration>,
}

impl Traffic {
    /// Counts the legs of the completions among these requests.
    pub(crate) fn of(requests: &[Arc<Timeline>]) -> Self {
        let mut pairs: BTreeMap<(Option<Arc<str>>, Arc<str>), Times> = BTreeMap::new();
        let mut instances: BTreeMap<LegKey, Times> = BTreeMap::new();
        for request in requests.iter().filter(|request| request.is_completion()) {
            let legs = request.legs.list();
            for leg in &legs {
                let times =
                    instances.entry((leg.role.as_str(), Arc::clone(&leg.instance))).or_default();
                times.all += 1;
                times.failed += usize::from(leg.failed);
                // A rejection or a cancelled request takes less time than an answer.
                times.times.extend(leg.answer_time().filter(|_| leg.outcome == "ok"));
            }
            // Earlier legs are attempts that another instance replaced.
            let last = |role: Role| legs.iter().rev().find(|leg: &&Leg| leg.role == role);
            let Some(decode) = last(Role::Decode) else { continue };
            let prefill = last(Role::Prefill).map(|leg| Arc::clone(&leg.instance));
            let times = pairs.entry((prefill, Arc::clone(&decode.instance))).or_default();
            times.all += 1;
            times.failed += usize::from(request.outcome.is_failure());
            times.times.extend(request.first_byte.filter(|_| request.status < 400));
        }
        let flow = |((prefill, decode), mut times): ((Option<Arc<str>>, Arc<str>), Times)| Flow {
            prefill: prefill.map(|name| name.to_string()),
            decode: decode.to_string(),
            requests: times.all as u64,
            failed: times.failed as u64,
            ttft_ms: median(&mut times.times),
        };
        let legs = |(key, mut times): (_, Times)| {
            let p50_ms = median(&mut times.times);
            (key, InstanceLegs { legs: times.all, failed: times.failed, p50_ms })
        };
        Traffic {
            flows: pairs.into_iter().map(flow).collect(),
            instances: instances.into_iter().map(legs).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::timeline;
    use super::super::{LegEnd, LegLog};
    use super::*;
    use crate::metrics::RequestOutcome;

    #[test]
    fn requests_are_counted_for_their_last_pair_and_legs_for_their_instances() {
        let request = |legs: &[(Role, &str, &'static str)], outcome| {
            let mut one = timeline("a", Duration::ZERO, Duration::from_millis(40));
            one.legs = Arc::new(LegLog::new(one.arrived));
            for (role, name, outcome) in legs {
                let at = one.legs.begin(*role, &(*name).into());
                let (goes_on, failed) = (*role == Role::Decode, *outcome != "ok");
                let told = crate::timeline::Told::default();
                one.legs.end(at, LegEnd { outcome, failed, goes_on, told });
            }
            one.outcome = outcome;
            Arc::new(one)
        };
        let (p, d) = (Role::Prefill, Role::Decode);
        let requests = [
            request(&[(p, "p:1", "ok"), (d, "d:1", "ok")], RequestOutcome::Ok),
            request(
                &[(p, "p:1", "timeout"), (p, "p:2", "ok"), (d, "d:1", "ok")],
                RequestOutcome::Ok,
            ),
            request(&[(p, "p:2", "ok"), (d, "d:1", "failed")], RequestOutcome::UpstreamError),
            request(&[(d, "d:2", "ok")], RequestOutcome::Ok),
            request(&[], RequestOutcome::Refused),
        ];
        let Traffic { flows, instances } = Traffic::of(&requests);
        let flow = |prefill: Option<&str>, decode: &str, requests, failed| Flow {
            prefill: prefill.map(Into::into),
            decode: decode.into(),
            requests,
            failed,
            ttft_ms: Some(40.0),
        };
        let wanted = [
            flow(None, "d:2", 1, 0),
            flow(Some("p:1"), "d:1", 1, 0),
            flow(Some("p:2"), "d:1", 2, 1),
        ];
        assert_eq!(flows, wanted);
        let legs = |role: &'static str, name: &str| {
            let legs = instances[&(role, name.into())];
            (legs.legs, legs.failed)
        };
        assert_eq!([legs("prefill", "p:1"), legs("prefill", "p:2")], [(2, 1), (2, 0)]);
        assert_eq!([legs("decode", "d:1"), legs("decode", "d:2")], [(3, 1), (1, 0)]);
    }
}
