//! Outcomes in the terms of vLLM's `KVConnectorOutput`.
//!
//! After a failed load an engine keeps the blocks that a transfer may still write to. vLLM has no
//! such state: a request waits for its load until one report, after which its blocks may be reused.
//! So that report comes when the blocks are free.

use std::collections::HashMap;

use kvx_core::{ErrorKind, Result};
use serde_json::{Value, json};

use super::scheduler::Outcome;
use super::step::Kept;
use crate::ids::{BlockLists, RequestId};

/// The version of a report's encoding.
const FORMAT: u64 = 1;

/// The report of each worker of a vLLM to its scheduler after a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepReport {
    /// `finished_sending`: requests whose kept blocks may be reused.
    pub sent: Vec<RequestId>,
    /// `finished_recving`: requests whose load has ended.
    pub received: Vec<RequestId>,
    /// `failed_recving`: those of `received` whose load has failed as a whole.
    pub failed: Vec<RequestId>,
    /// `invalid_block_ids`: blocks of `received` without valid contents.
    pub invalid: Vec<u32>,
}

impl StepReport {
    /// Returns whether there is nothing to report.
    pub fn is_empty(&self) -> bool {
        self == &StepReport::default()
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
            "invalid": self.invalid,
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
        let number = |item: &Value| item.as_u64().and_then(|number| u32::try_from(number).ok());
        let report = || {
            let invalid = report["invalid"].as_array()?.iter().map(number);
            Some(StepReport {
                sent: names("sent")?,
                received: names("received")?,
                failed: names("failed")?,
                invalid: invalid.collect::<Option<_>>()?,
            })
        };
        report().ok_or_else(other)
    }
}

fn names(list: &[RequestId]) -> Vec<&str> {
    list.iter().map(RequestId::as_str).collect()
}

/// A load that vLLM waits for.
#[derive(Debug)]
struct AwaitedLoad {
    /// The blocks that it fills.
    fill: Vec<u32>,
    /// The blocks without valid contents, if the load has failed and a transfer may still write to
    /// some of its blocks.
    failed: Option<Vec<u32>>,
}

/// Collects outcomes until the next report. Each load that vLLM waits for is reported once.
#[derive(Debug)]
pub struct StepReports {
    /// True if a failed load is reported by its invalid blocks. With several KV cache groups vLLM
    /// accepts only whole requests.
    by_block: bool,
    loads: HashMap<RequestId, AwaitedLoad>,
    next: StepReport,
}

impl StepReports {
    /// Creates reports for an engine with this number of KV cache groups.
    pub fn new(groups: usize) -> Self {
        StepReports { by_block: groups == 1, loads: HashMap::new(), next: StepReport::default() }
    }

    /// Notes that vLLM waits for a load into these blocks.
    pub fn expect(&mut self, request: &RequestId, fill: &BlockLists) {
        let fill = fill.iter().collect();
        self.loads.insert(request.clone(), AwaitedLoad { fill, failed: None });
    }

    /// Reports an expected load that could not be ordered as failed.
    pub fn refuse(&mut self, request: &RequestId) {
        if let Some(load) = self.loads.remove(request) {
            self.fail(request, load.fill);
        }
    }

    /// Notes an outcome. Returns false if vLLM gets no report of it: it then never reuses the
    /// blocks, and a request that waits for them waits until it is aborted.
    #[must_use]
    pub fn note(&mut self, outcome: Outcome) -> bool {
        match outcome {
            Outcome::Loaded { request, .. } => self.receive(request),
            Outcome::Failed { request, invalid, held, .. } => {
                let Some(mut load) = self.loads.remove(&request) else { return true }; // aborted
                let invalid = if invalid.is_empty() { load.fill.clone() } else { invalid };
                if held.is_empty() {
                    self.fail(&request, invalid);
                } else {
                    load.failed = Some(invalid);
                    self.loads.insert(request, load);
                }
            }
            Outcome::Free { request, kept: Kept::Load } => {
                match self.loads.get_mut(&request).and_then(|load| load.failed.take()) {
                    Some(invalid) => {
                        self.loads.remove(&request);
                        self.fail(&request, invalid);
                    }
                    None => self.receive(request),
                }
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
        let waits = self.loads.get(request).is_some_and(|load| load.failed.is_none());
        if waits && !delay_free {
            self.receive(request.clone());
        }
    }

    /// Takes the report of a step.
    pub fn take(&mut self) -> StepReport {
        std::mem::take(&mut self.next)
    }

    fn receive(&mut self, request: RequestId) {
        if self.loads.remove(&request).is_some() {
            self.next.received.push(request);
        }
    }

    fn fail(&mut self, request: &RequestId, invalid: Vec<u32>) {
        self.next.received.push(request.clone());
        if self.by_block {
            self.next.invalid.extend(invalid);
        } else {
            self.next.failed.push(request.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::failure::LoadFailure;
    use crate::engine::scheduler::Then;

    fn failed(request: &str, invalid: &[u32], held: &[u32]) -> Outcome {
        let held = if held.is_empty() { BlockLists::default() } else { BlockLists::single(held) };
        Outcome::Failed {
            request: request.into(),
            failure: LoadFailure::Stale,
            then: Then::Fail,
            invalid: invalid.to_vec(),
            held,
        }
    }

    fn expecting(groups: usize, requests: &[&str]) -> StepReports {
        let mut reports = StepReports::new(groups);
        for request in requests {
            reports.expect(&(*request).into(), &BlockLists::single([4, 5, 6]));
        }
        reports
    }

    #[test]
    fn a_report_survives_its_encoding_and_an_empty_one_has_no_bytes() {
        let report = StepReport {
            sent: vec!["a".into()],
            received: vec!["b \"quoted\"".into(), "c".into()],
            failed: vec!["c".into()],
            invalid: vec![0, u32::MAX],
        };
        assert_eq!(StepReport::decode(&report.encode()).unwrap(), report);
        assert!(StepReport::default().encode().is_empty());
        assert_eq!(StepReport::decode(b"").unwrap(), StepReport::default());
        for wrong in [
            &b"x"[..],
            b"{}",
            br#"{"format":2,"sent":[],"received":[],"failed":[],"invalid":[]}"#,
            br#"{"format":1,"sent":[1],"received":[],"failed":[],"invalid":[]}"#,
        ] {
            assert_eq!(StepReport::decode(wrong).unwrap_err().kind(), ErrorKind::Malformed);
        }
    }

    #[test]
    fn each_load_is_reported_once() {
        let mut reports = expecting(1, &["a"]);
        assert!(reports.note(Outcome::Loaded { request: "a".into(), computed: 9 }));
        reports.finish(&"a".into(), false);
        assert!(reports.note(Outcome::Free { request: "a".into(), kept: Kept::Load }));
        assert_eq!(names(&reports.take().received), ["a"]);
        assert!(reports.take().is_empty());
    }

    #[test]
    fn a_failed_load_names_blocks_or_with_several_groups_the_request() {
        let mut reports = expecting(1, &["a", "b"]);
        assert!(reports.note(failed("a", &[5, 6], &[])));
        reports.refuse(&"b".into());
        let report = reports.take();
        assert_eq!(
            (names(&report.received), report.invalid),
            (vec!["a", "b"], vec![5, 6, 4, 5, 6])
        );
        assert!(report.failed.is_empty());
        let mut reports = expecting(2, &["a"]);
        assert!(reports.note(failed("a", &[], &[])));
        let report = reports.take();
        assert_eq!((names(&report.received), names(&report.failed)), (vec!["a"], vec!["a"]));
        assert!(report.invalid.is_empty());
    }

    #[test]
    fn a_failed_load_is_reported_when_no_transfer_can_write_to_its_blocks() {
        let mut reports = expecting(1, &["a", "b"]);
        assert!(reports.note(failed("a", &[6], &[5, 6])));
        assert!(reports.note(failed("b", &[6], &[6])));
        // vLLM aborts one of them meanwhile.
        reports.finish(&"b".into(), false);
        assert!(reports.take().is_empty());
        for request in ["a", "b"] {
            assert!(reports.note(Outcome::Free { request: request.into(), kept: Kept::Load }));
        }
        let report = reports.take();
        assert_eq!((names(&report.received), report.invalid), (vec!["a", "b"], vec![6, 6]));
    }

    #[test]
    fn an_aborted_load_is_reported_with_its_release_or_at_once() {
        let mut reports = expecting(1, &["running", "unordered"]);
        reports.finish(&"running".into(), true);
        reports.finish(&"unordered".into(), false);
        assert_eq!(names(&reports.take().received), ["unordered"]);
        assert!(reports.note(Outcome::Free { request: "running".into(), kept: Kept::Load }));
        assert_eq!(names(&reports.take().received), ["running"]);
    }

    #[test]
    fn kept_blocks_are_sent_and_lost_ones_never() {
        let mut reports = expecting(1, &["load"]);
        assert!(reports.note(Outcome::Free { request: "a".into(), kept: Kept::Request }));
        assert!(!reports.note(Outcome::Lost { request: "b".into(), kept: Kept::Request }));
        assert!(reports.note(failed("load", &[4], &[4])));
        assert!(!reports.note(Outcome::Lost { request: "load".into(), kept: Kept::Load }));
        let report = reports.take();
        assert_eq!((names(&report.sent), report.received.len()), (vec!["a"], 0));
    }
}
