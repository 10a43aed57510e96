//! Outcomes in the terms of vLLM's `KVConnectorOutput`.
//!
//! After a failed load an engine keeps the blocks that a transfer may still write to. In vLLM a
//! request waits for its load until one report, after which its blocks may be reused. So that report
//! comes when the blocks are free.
//!
//! A failed load is reported as a whole, never by its invalid blocks: with several KV cache groups
//! vLLM accepts nothing else, and with sliding windows the tokens before the first invalid block may
//! have no blocks.

use std::collections::HashMap;

use kvx_core::{ErrorKind, Result};
use serde_json::{Value, json};

use super::scheduler::Outcome;
use super::step::Kept;
use crate::ids::RequestId;

/// The version of a report's encoding.
const FORMAT: u64 = 2;
/// The most requests in one report, whose names have at most [`MAX_NAME`](StepReports::MAX_NAME)
/// bytes.
const MOST: usize = 256;

/// The report of each worker of a vLLM to its scheduler after a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepReport {
    /// `finished_sending`: requests whose kept blocks may be reused.
    pub sent: Vec<RequestId>,
    /// `finished_recving`: requests whose load has ended.
    pub received: Vec<RequestId>,
    /// `failed_recving`: those of `received` whose load has failed.
    pub failed: Vec<RequestId>,
}

impl StepReport {
    /// Returns whether there is nothing to report.
    pub fn is_empty(&self) -> bool {
        self == &StepReport::default()
    }

    /// Adds another report after this one.
    pub fn append(&mut self, other: StepReport) {
        self.sent.extend(other.sent);
        self.received.extend(other.received);
        self.failed.extend(other.failed);
    }

    /// Encodes the report for a worker. An empty report has no bytes.
    pub fn encode(&self) -> Vec<u8> {
        if self.is_empty() {
            return Vec::new();
        }
        let report = json!({
            "format": FORMAT,
            "sent": names(&self.sent),
            "received": names(&self.received),
            "failed": names(&self.failed),
        });
        report.to_string().into_bytes()
    }

    /// Decodes a report.
    ///
    /// # Errors
    /// `Malformed`: the bytes come from another version of kvx.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if bytes.is_empty() {
            return Ok(StepReport::default());
        }
        let other = || {
            ErrorKind::Malformed.because(
                "the scheduler's report is in another format: all processes of this engine need \
                 one version of kvx",
            )
        };
        let report: Value = serde_json::from_slice(bytes).map_err(|_| other())?;
        if report["format"].as_u64() != Some(FORMAT) {
            return Err(other());
        }
        let names = |name: &str| {
            let list = report[name].as_array()?.iter();
            list.map(|item| item.as_str().map(RequestId::from)).collect::<Option<Vec<_>>>()
        };
        let report = || {
            Some(StepReport {
                sent: names("sent")?,
                received: names("received")?,
                failed: names("failed")?,
            })
        };
        report().ok_or_else(other)
    }
}

fn names(list: &[RequestId]) -> Vec<&str> {
    list.iter().map(RequestId::as_str).collect()
}

/// A load that vLLM waits for.
#[derive(Debug, PartialEq)]
enum AwaitedLoad {
    Running,
    /// The load has failed, and a transfer may still write to some of its blocks.
    Failed,
}

/// Collects outcomes until the next report. Each load that vLLM waits for is reported once.
#[derive(Debug, Default)]
pub struct StepReports {
    loads: HashMap<RequestId, AwaitedLoad>,
    next: StepReport,
}

impl StepReports {
    /// The longest name of a request, in bytes.
    pub const MAX_NAME: usize = 1024;

    /// Notes that vLLM waits for a load.
    pub fn expect(&mut self, request: &RequestId) {
        self.loads.insert(request.clone(), AwaitedLoad::Running);
    }

    /// Reports an expected load that could not be ordered as failed.
    pub fn refuse(&mut self, request: &RequestId) {
        self.end(request, true);
    }

    /// Notes an outcome. Returns false if vLLM gets no report of it: it then never reuses the
    /// blocks, and a request that waits for them waits until it is aborted.
    #[must_use]
    pub fn note(&mut self, outcome: Outcome) -> bool {
        match outcome {
            Outcome::Loaded { request, .. } => self.end(&request, false),
            Outcome::Failed { request, held, .. } => match self.loads.get_mut(&request) {
                Some(load) if !held.is_empty() => *load = AwaitedLoad::Failed,
                _ => self.end(&request, true),
            },
            Outcome::Free { request, kept: Kept::Load } => {
                let failed = self.loads.get(&request) == Some(&AwaitedLoad::Failed);
                self.end(&request, failed);
            }
            Outcome::Free { request, kept: Kept::Request } => self.next.sent.push(request),
            Outcome::Lost { .. } => return false,
        }
        true
    }

    /// Returns whether vLLM waits for a load of this request.
    pub fn waits(&self, request: &RequestId) -> bool {
        self.loads.contains_key(request)
    }

    /// Notes that a request has ended, and whether an outcome for its blocks follows.
    pub fn finish(&mut self, request: &RequestId, delay_free: bool) {
        if self.loads.get(request) == Some(&AwaitedLoad::Running) && !delay_free {
            self.end(request, false);
        }
    }

    /// Takes a part of the report of a step, which is empty if nothing is left.
    pub fn take(&mut self) -> StepReport {
        let some = |list: &mut Vec<RequestId>| {
            let rest = list.split_off(list.len().min(MOST));
            std::mem::replace(list, rest)
        };
        let next = &mut self.next;
        let (sent, received) = (some(&mut next.sent), some(&mut next.received));
        // A failed load is reported with its end.
        let (failed, rest) =
            std::mem::take(&mut next.failed).into_iter().partition(|name| received.contains(name));
        next.failed = rest;
        StepReport { sent, received, failed }
    }

    /// Reports the end of a load, if vLLM waits for it.
    fn end(&mut self, request: &RequestId, failed: bool) {
        if self.loads.remove(request).is_some() {
            self.next.received.push(request.clone());
            if failed {
                self.next.failed.push(request.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::failure::LoadFailure;
    use crate::engine::scheduler::Then;
    use crate::ids::BlockLists;

    fn failed(request: &str, held: &[u32]) -> Outcome {
        let held = if held.is_empty() { BlockLists::default() } else { BlockLists::single(held) };
        Outcome::Failed {
            request: request.into(),
            failure: LoadFailure::Stale,
            then: Then::Fail,
            invalid: vec![4],
            held,
        }
    }

    fn expecting(requests: &[&str]) -> StepReports {
        let mut reports = StepReports::default();
        requests.iter().for_each(|request| reports.expect(&(*request).into()));
        reports
    }

    #[test]
    fn a_report_survives_its_encoding_and_an_empty_one_has_no_bytes() {
        let report = StepReport {
            sent: vec!["a".into()],
            received: vec!["b \"quoted\"".into(), "c".into()],
            failed: vec!["c".into()],
        };
        assert_eq!(StepReport::decode(&report.encode()).unwrap(), report);
        assert!(StepReport::default().encode().is_empty());
        assert_eq!(StepReport::decode(b"").unwrap(), StepReport::default());
        for wrong in [
            &b"x"[..],
            b"{}",
            br#"{"format":1,"sent":[],"received":[],"failed":[]}"#,
            br#"{"format":2,"sent":[1],"received":[],"failed":[]}"#,
        ] {
            assert_eq!(StepReport::decode(wrong).unwrap_err().kind(), ErrorKind::Malformed);
        }
    }

    #[test]
    fn each_load_is_reported_once() {
        let mut reports = expecting(&["a"]);
        assert!(reports.note(Outcome::Loaded { request: "a".into(), computed: 9 }));
        reports.finish(&"a".into(), false);
        assert!(reports.note(Outcome::Free { request: "a".into(), kept: Kept::Load }));
        let report = reports.take();
        assert_eq!((names(&report.received), report.failed.len()), (vec!["a"], 0));
        assert!(reports.take().is_empty());
    }

    #[test]
    fn a_failed_load_is_reported_when_no_transfer_can_write_to_its_blocks() {
        let mut reports = expecting(&["at once", "unordered", "held", "aborted"]);
        assert!(reports.note(failed("at once", &[])));
        reports.refuse(&"unordered".into());
        assert_eq!(names(&reports.take().failed), ["at once", "unordered"]);
        for request in ["held", "aborted"] {
            assert!(reports.note(failed(request, &[6])));
        }
        // vLLM aborts one of them meanwhile.
        reports.finish(&"aborted".into(), false);
        assert!(reports.take().is_empty());
        for request in ["held", "aborted"] {
            assert!(reports.note(Outcome::Free { request: request.into(), kept: Kept::Load }));
        }
        let report = reports.take();
        assert_eq!(
            (names(&report.received), report.failed),
            (vec!["held", "aborted"], report.received.clone())
        );
    }

    #[test]
    fn an_aborted_load_is_reported_with_its_release_or_at_once() {
        let mut reports = expecting(&["running", "unordered"]);
        reports.finish(&"running".into(), true);
        reports.finish(&"unordered".into(), false);
        assert_eq!(names(&reports.take().received), ["unordered"]);
        assert!(reports.note(Outcome::Free { request: "running".into(), kept: Kept::Load }));
        assert_eq!(names(&reports.take().received), ["running"]);
    }

    #[test]
    fn kept_blocks_are_sent_and_lost_ones_never() {
        let mut reports = expecting(&["load"]);
        assert!(reports.note(Outcome::Free { request: "a".into(), kept: Kept::Request }));
        assert!(!reports.note(Outcome::Lost { request: "b".into(), kept: Kept::Request }));
        assert!(reports.note(failed("load", &[4])));
        assert!(!reports.note(Outcome::Lost { request: "load".into(), kept: Kept::Load }));
        let report = reports.take();
        assert_eq!((names(&report.sent), report.received.len()), (vec!["a"], 0));
    }

    #[test]
    fn a_long_report_comes_in_parts() {
        let requests: Vec<_> = (0..3 * MOST / 2).map(|number| format!("r{number}")).collect();
        let mut reports = StepReports::default();
        for request in &requests {
            reports.expect(&request.as_str().into());
            reports.refuse(&request.as_str().into());
            assert!(
                reports
                    .note(Outcome::Free { request: request.as_str().into(), kept: Kept::Request })
            );
        }
        let mut whole = StepReport::default();
        for part in [reports.take(), reports.take()] {
            assert!(part.received.len() <= MOST && part.failed == part.received);
            whole.append(part);
        }
        assert_eq!(
            (names(&whole.sent), names(&whole.failed)),
            (names(&whole.received), requests.iter().map(String::as_str).collect())
        );
        assert!(reports.take().is_empty());
    }
}
