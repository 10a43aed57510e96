//! Aggregation of workers' reports: a request ends when all workers have reported it.

use std::collections::{BTreeMap, BTreeSet};

use super::failure::{LoadFailure, TransferFailure};
use super::stats::TransferStats;
use super::step::Kept;
use super::step::{FailedLoad, WorkerOutput};
use crate::ids::{EngineId, RequestId};
use crate::time::{ClockOffset, Time};

/// The combined report of all workers for the scheduler.
#[derive(Clone, Debug, Default)]
pub struct EngineOutput {
    /// As in [`WorkerOutput`], reported by all workers.
    pub finished_sending: Vec<RequestId>,
    /// As in [`WorkerOutput`], reported by all workers.
    pub finished_recving: Vec<RequestId>,
    /// The loads of `finished_recving` that failed on at least one worker.
    pub failed_recving: Vec<FailedLoad>,
    /// As in [`WorkerOutput`], reported by any worker.
    pub failing: Vec<(RequestId, LoadFailure)>,
    /// Requests of `finished_sending` and `finished_recving` whose blocks are lost on at least one
    /// worker.
    pub lost: Vec<(RequestId, Kept)>,
    /// Clocks of peers, each with the time on the clock of the worker that compared them.
    pub clocks: Vec<(Time, EngineId, ClockOffset)>,
    /// Failures to log.
    pub failures: Vec<TransferFailure>,
    /// Statistics of all workers.
    pub stats: TransferStats,
    /// As in [`WorkerOutput`], summed over all workers.
    pub unknown_requests: u64,
}

/// The workers that have reported the end of a request, one bit each.
#[derive(Clone, Debug, Default)]
struct Votes {
    workers: Vec<u64>,
    count: usize,
}

impl Votes {
    /// Counts a worker once.
    fn add(&mut self, worker: usize) {
        let (word, bit) = (worker / 64, 1 << (worker % 64));
        if self.workers.len() <= word {
            self.workers.resize(word + 1, 0);
        }
        self.count += usize::from(self.workers[word] & bit == 0);
        self.workers[word] |= bit;
    }
}

/// An aggregator of the reports of an engine's workers.
#[derive(Clone, Debug)]
pub struct OutputAggregator {
    world_size: usize,
    sending: BTreeMap<RequestId, Votes>,
    recving: BTreeMap<RequestId, (Votes, Option<FailedLoad>)>,
    lost: BTreeSet<(RequestId, Kept)>,
}

impl OutputAggregator {
    /// Creates an aggregator for an engine with `world_size` workers: all tensor- and
    /// pipeline-parallel ranks.
    pub fn new(world_size: usize) -> Self {
        OutputAggregator {
            world_size: world_size.max(1),
            sending: BTreeMap::new(),
            recving: BTreeMap::new(),
            lost: BTreeSet::new(),
        }
    }

    /// Changes the number of reports that complete a request. Earlier reports still count. The next
    /// output contains the requests that are complete with the new number.
    pub fn set_world_size(&mut self, world_size: usize) {
        self.world_size = world_size.max(1);
    }

    /// Adds the reports of some workers, each with its number in the engine. Returns what all
    /// workers have reported.
    pub fn add(
        &mut self,
        outputs: impl IntoIterator<Item = (usize, WorkerOutput)>,
    ) -> EngineOutput {
        let mut whole = EngineOutput::default();
        for (worker, output) in outputs {
            for request in output.finished_sending {
                self.sending.entry(request).or_default().add(worker);
            }
            for request in output.finished_recving {
                self.recving.entry(request).or_default().0.add(worker);
            }
            for failed in output.failed_recving {
                let (_, so_far) = self.recving.entry(failed.request.clone()).or_default();
                match so_far {
                    None => *so_far = Some(failed),
                    Some(so_far) => {
                        so_far.invalid.extend(failed.invalid);
                        so_far.invalid.sort_unstable();
                        so_far.invalid.dedup();
                    }
                }
            }
            whole.failing.extend(output.failing);
            self.lost.extend(output.lost);
            whole.clocks.extend(
                output.clocks.into_iter().map(|(engine, offset)| (output.at, engine, offset)),
            );
            whole.failures.extend(output.failures);
            whole.stats.aggregate(output.stats);
            whole.unknown_requests += output.unknown_requests;
        }
        let enough = |votes: &Votes| votes.count >= self.world_size;
        let sent = self
            .sending
            .iter()
            .filter(|(_, votes)| enough(votes))
            .map(|(request, _)| request.clone());
        whole.finished_sending = sent.collect();
        let received = self
            .recving
            .iter()
            .filter(|(_, (votes, _))| enough(votes))
            .map(|(request, _)| request.clone());
        whole.finished_recving = received.collect();
        let mut lost =
            |request: &RequestId, kept| whole.lost.extend(self.lost.take(&(request.clone(), kept)));
        for request in &whole.finished_sending {
            self.sending.remove(request);
            lost(request, Kept::Request);
        }
        for request in &whole.finished_recving {
            let failed = self.recving.remove(request).and_then(|(_, failed)| failed);
            whole.failed_recving.extend(failed);
            lost(request, Kept::Load);
        }
        whole
    }

    /// Forgets the reports about a finished request after the engine has revoked its blocks.
    pub fn forget_sending(&mut self, request: &RequestId) {
        self.sending.remove(request);
        self.lost.remove(&(request.clone(), Kept::Request));
    }

    /// Returns the number of requests that some workers, but not all, have reported.
    pub fn incomplete(&self) -> usize {
        self.sending.len() + self.recving.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::LoadFailure;

    fn received(request: &str) -> WorkerOutput {
        WorkerOutput { finished_recving: vec![request.into()], ..Default::default() }
    }

    fn failed(request: &str, invalid: &[u32]) -> WorkerOutput {
        let failed = FailedLoad {
            request: request.into(),
            failure: LoadFailure::Stale,
            invalid: invalid.to_vec(),
        };
        WorkerOutput { failed_recving: vec![failed], ..received(request) }
    }

    // vLLM 39: a request is finished when all workers have reported, each counted once
    #[test]
    fn a_request_is_over_when_every_worker_has_said_so() {
        let mut aggregator = OutputAggregator::new(3);
        assert!(
            aggregator.add([(0, received("a")), (1, received("a"))]).finished_recving.is_empty()
        );
        assert!(
            aggregator.add([(1, received("a"))]).finished_recving.is_empty(),
            "a worker counts once"
        );
        assert_eq!(aggregator.incomplete(), 1);
        assert_eq!(aggregator.add([(2, received("a"))]).finished_recving, ["a".into()]);
        assert_eq!(aggregator.incomplete(), 0);
    }

    // vLLM 39: one failed worker fails the request
    #[test]
    fn one_failed_worker_fails_the_request_with_all_their_invalid_blocks() {
        let mut aggregator = OutputAggregator::new(3);
        assert!(aggregator.add([(0, failed("a", &[4, 7]))]).failed_recving.is_empty());
        let whole = aggregator.add([(1, received("a")), (2, failed("a", &[2, 4]))]);
        assert_eq!(whole.failed_recving.len(), 1);
        assert_eq!(whole.failed_recving[0].invalid, [2, 4, 7]);
    }

    // vLLM 39: reports of workers are kept when the number of workers changes
    #[test]
    fn votes_outlive_a_change_of_the_world_size() {
        let mut aggregator = OutputAggregator::new(4);
        assert!(
            aggregator
                .add([(0, received("a")), (1, failed("a", &[1]))])
                .finished_recving
                .is_empty()
        );
        aggregator.set_world_size(2);
        let whole = aggregator.add([]);
        assert_eq!((whole.finished_recving.len(), whole.failed_recving.len()), (1, 1));
    }
}
