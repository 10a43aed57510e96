//! Outcomes of loads, and of blocks that were kept for a peer.

use std::collections::BTreeSet;

use crate::config::LoadFailurePolicy;

use super::super::aggregate::EngineOutput;
use super::super::failure::LoadFailure;
use super::super::recovery::valid_prefix;
use super::super::step::{FailedLoad, Kept};
use super::{Allocation, LoadSource, LoadStage, Scheduler};
use crate::ids::{BlockLists, RequestId};
use crate::time::{ClockOffset, Time};

/// The engine's next step for a request whose load has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// The request ends with an error for the client.
    Fail,
    /// The request continues on this engine, which computes all tokens but the first `computed`.
    Recompute {
        /// The number of tokens before the first invalid block. It counts the tokens that the
        /// engine had before the load. 0 if the request had no blocks yet.
        computed: u32,
    },
}

/// A report to the engine.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// A load has filled all its blocks. If it loaded the whole prompt, the engine computes the
    /// last token again for its output.
    Loaded {
        /// The request.
        request: RequestId,
        /// The number of tokens that count as computed.
        computed: u32,
    },
    /// A load has failed.
    Failed {
        /// The request.
        request: RequestId,
        /// The reason.
        failure: LoadFailure,
        /// The next step for the request.
        then: Then,
        /// Blocks without valid contents. They must never be found in a prefix cache.
        invalid: Vec<u32>,
        /// Blocks that a transfer may still access. The engine takes them from the request, and
        /// gives it others if it continues. It keeps these blocks until [`Outcome::Free`] or
        /// [`Outcome::Lost`] names the request.
        held: BlockLists,
    },
    /// The engine may free blocks: those kept for a finished request, or those that a failed load
    /// held.
    Free {
        /// The request.
        request: RequestId,
        /// The blocks of the request.
        kept: Kept,
    },
    /// Replaces [`Free`](Outcome::Free) if a transfer may access the blocks until the process
    /// exits. The engine must not give these blocks to any request while the process lives.
    Lost {
        /// The request.
        request: RequestId,
        /// The blocks of the request.
        kept: Kept,
    },
}

impl Outcome {
    /// Returns the request of a load that has ended completely: no worker has its blocks any more.
    #[doc(hidden)]
    pub fn ends_load(&self) -> Option<&RequestId> {
        match self {
            Outcome::Failed { held, .. } if !held.is_empty() => None,
            Outcome::Loaded { request, .. } | Outcome::Failed { request, .. } => Some(request),
            Outcome::Free { request, kept } | Outcome::Lost { request, kept } => {
                (*kept == Kept::Load).then_some(request)
            }
        }
    }
}

impl Scheduler {
    /// Takes the combined report of the workers. Ignores reports about unknown requests.
    pub fn update_connector_output(&mut self, now: Time, output: EngineOutput) -> Vec<Outcome> {
        for (at, engine, offset) in output.clocks {
            // The offset is relative to the worker's clock, which showed `at` just now.
            let seconds = offset.seconds + at.seconds() - now.seconds();
            self.clocks.insert(engine, ClockOffset { seconds, ..offset });
        }
        let mut failed = output.failed_recving;
        let mut outcomes = Vec::new();
        for (request, failure) in output.failing {
            outcomes.extend(self.load_failing(now, &request, failure));
        }
        for request in output.finished_recving {
            let at = failed.iter().position(|failed| failed.request == request);
            let failed = at.map(|at| failed.swap_remove(at));
            let lost = output.lost.contains(&(request.clone(), Kept::Load));
            if let Some(held) = self.held.remove(&request) {
                self.lost += if lost { held.len() } else { 0 };
                outcomes.push(over(request, Kept::Load, lost));
            } else if let Some(outcome) = self.load_ended(now, request.clone(), failed, lost) {
                if let Outcome::Failed { held, .. } = &outcome {
                    self.lost += if lost { held.len() } else { 0 };
                }
                outcomes.push(outcome);
                outcomes.extend(lost.then(|| over(request, Kept::Load, true)));
            }
        }
        for request in output.finished_sending {
            if self.sending.remove(&request) {
                let lost = output.lost.contains(&(request.clone(), Kept::Request));
                outcomes.push(over(request, Kept::Request, lost));
            }
        }
        outcomes
    }

    fn load_ended(
        &mut self,
        now: Time,
        request: RequestId,
        failed: Option<FailedLoad>,
        lost: bool,
    ) -> Option<Outcome> {
        let load = self.requests.get_mut(&request)?.load.as_mut()?;
        let allocation = match std::mem::replace(&mut load.stage, LoadStage::Over) {
            LoadStage::Loading(allocation) => allocation,
            // Expected race: the load ended before the workers' report.
            other => {
                load.stage = other;
                return None;
            }
        };
        let end = load.end;
        self.over(&request);
        let Some(FailedLoad { failure, invalid, .. }) = failed else {
            return Some(Outcome::Loaded { request, computed: end });
        };
        let (valid, held) = match lost {
            true => (allocation.computed, allocation.fill),
            false => (self.valid(&allocation, &invalid), BlockLists::default()),
        };
        let then = self.then(now, &request, &failure, valid);
        Some(Outcome::Failed { request, failure, then, invalid, held })
    }

    /// Returns the number of valid tokens after a failed load. Invalid blocks determine it only
    /// with one KV cache group, and if the failure names any.
    fn valid(&self, allocation: &Allocation, invalid: &[u32]) -> u32 {
        let [fill] = allocation.fill.groups() else { return allocation.computed };
        let invalid: BTreeSet<u32> = invalid.iter().copied().collect();
        let size = self.settings.block_size;
        let whole = allocation.computed / size.max(1) * size;
        match valid_prefix(fill, &invalid, size) {
            Some(0) | None => allocation.computed,
            Some(prefix) => whole.saturating_add(prefix),
        }
    }

    fn then(&self, now: Time, request: &RequestId, failure: &LoadFailure, computed: u32) -> Then {
        let load = self.requests.get(request).and_then(|entry| entry.load.as_ref());
        let ended = load.is_some_and(|load| load.is_too_late(now));
        // A decode only offers its blocks. Without them, the engine computes the prompt as usual.
        let offer = load.is_some_and(|load| load.source == LoadSource::Decode)
            || *failure == LoadFailure::Expiring;
        match self.settings.policy {
            _ if ended => Then::Fail,
            LoadFailurePolicy::Fail if !offer => Then::Fail,
            _ => Then::Recompute { computed },
        }
    }

    /// Ends loads whose deadline has passed.
    pub fn poll(&mut self, now: Time) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        while let Some(request) = self.deadlines.take_reached(now) {
            outcomes.extend(self.load_timed_out(now, &request));
        }
        outcomes
    }

    fn load_timed_out(&mut self, now: Time, request: &RequestId) -> Option<Outcome> {
        self.give_up(now, request, LoadFailure::Deadline)
    }

    /// Fails a load at once, although a peer may still access its blocks.
    fn load_failing(
        &mut self,
        now: Time,
        request: &RequestId,
        failure: LoadFailure,
    ) -> Option<Outcome> {
        match self.requests.get(request)?.load.as_ref()?.stage {
            LoadStage::Loading(_) => self.give_up(now, request, failure),
            _ => None,
        }
    }

    /// Ends a load before its workers do. Its blocks are held until the workers have ended it.
    fn give_up(&mut self, now: Time, request: &RequestId, failure: LoadFailure) -> Option<Outcome> {
        let by = now + self.settings.load_timeout;
        let load = self.requests.get_mut(request)?.load.as_mut()?;
        let stage = std::mem::replace(&mut load.stage, LoadStage::Over);
        let release = load.release(request, by);
        let (computed, held) = match stage {
            LoadStage::Over => return None,
            LoadStage::Arrived => {
                self.next.receive.extend(release);
                (0, BlockLists::default())
            }
            LoadStage::Ordered(allocation) => {
                self.next.receive.retain(|order| order.request != *request);
                self.next.receive.extend(release);
                (allocation.computed, BlockLists::default())
            }
            LoadStage::Loading(allocation) => {
                self.next.cancel.push(request.clone());
                self.held.insert(request.clone(), allocation.fill.clone());
                (allocation.computed, allocation.fill)
            }
        };
        self.over(request);
        let then = self.then(now, request, &failure, computed);
        Some(Outcome::Failed {
            request: request.clone(),
            failure,
            then,
            invalid: held.iter().collect(),
            held,
        })
    }

    /// Ends and forgets all requests after the engine's workers have ended. `proven` means that
    /// nothing accesses a block any more.
    pub fn end(&mut self, proven: bool) -> Vec<Outcome> {
        let ended = std::mem::replace(self, Scheduler::new(self.settings.clone()));
        self.lost = ended.lost;
        let mut outcomes = Vec::new();
        for (request, entry) in ended.requests {
            let (given, touched) = match entry.load.map(|load| load.stage) {
                None | Some(LoadStage::Over) => continue,
                Some(LoadStage::Arrived) => (BlockLists::default(), false),
                Some(LoadStage::Ordered(allocation)) => (allocation.fill, false),
                Some(LoadStage::Loading(allocation)) => (allocation.fill, !proven),
            };
            outcomes.push(Outcome::Failed {
                request: request.clone(),
                failure: LoadFailure::Transfer("the connector was shut down".into()),
                then: Then::Fail,
                invalid: given.ascending(),
                held: if touched { given.clone() } else { BlockLists::default() },
            });
            if touched {
                self.lost += given.len();
                outcomes.push(over(request, Kept::Load, true));
            }
        }
        for (request, blocks) in ended.held {
            self.lost += if proven { 0 } else { blocks.len() };
            outcomes.push(over(request, Kept::Load, !proven));
        }
        outcomes
            .extend(ended.sending.into_iter().map(|request| over(request, Kept::Request, !proven)));
        outcomes
    }
}

/// Returns the outcome for blocks that were kept.
fn over(request: RequestId, kept: Kept, lost: bool) -> Outcome {
    match lost {
        true => Outcome::Lost { request, kept },
        false => Outcome::Free { request, kept },
    }
}
