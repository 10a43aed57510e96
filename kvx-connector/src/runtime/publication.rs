//! The blocks of an engine that peers may read, and releases that wait for ranks on other hosts.

use super::generations::{GenerationState, StaleBlocks};
use super::ranks::Ranks;
use kvx_vllm::engine::{Kept, Outcome, PoolBlocks, RequestId, WorkerRank};

/// The pool of an engine's workers, its published blocks, and releases that some rank does not know
/// of yet.
#[derive(Default)]
pub(super) struct Publication {
    pub(super) pool: Option<PoolBlocks>,
    pub(super) published: Option<GenerationState>,
    /// Kept blocks that become free once ranks on other hosts have raised their generations. Each
    /// rank comes with the number of the last raise that it was asked for.
    delayed: Vec<(Vec<(WorkerRank, u64)>, Outcome)>,
}

impl Publication {
    /// Stops peers from reading the blocks of a request.
    pub(super) fn release(&mut self, request: &RequestId, ranks: &mut Ranks) {
        let raised = self.published.as_mut().and_then(|published| published.release(request));
        raised.iter().for_each(|raised| ranks.raise(raised));
    }

    /// Stops peers from reading any block.
    pub(super) fn release_all(&mut self, ranks: &mut Ranks) {
        let raised: Vec<StaleBlocks> =
            self.published.as_mut().map(GenerationState::release_all).unwrap_or_default();
        raised.iter().for_each(|raised| ranks.raise(raised));
    }

    /// Returns the outcome if the engine may have it now. Returns `None` if peers of a rank on
    /// another host may still read the blocks as unchanged. The outcome then follows from
    /// [`take_raised`](Self::take_raised).
    pub(super) fn delay(&mut self, outcome: Outcome, ranks: &Ranks) -> Option<Outcome> {
        if !matches!(outcome, Outcome::Free { kept: Kept::Request, .. }) {
            return Some(outcome);
        }
        let behind: Vec<_> = ranks
            .remote()
            .filter_map(|(rank, remote)| Some((rank, remote.last_unraised()?)))
            .collect();
        if behind.is_empty() {
            return Some(outcome);
        }
        self.delayed.push((behind, outcome));
        None
    }

    /// Takes the delayed outcomes whose ranks have raised their generations. An outcome turns into
    /// `Lost` if one of its ranks may never raise them.
    pub(super) fn take_raised(&mut self, ranks: &Ranks) -> Vec<Outcome> {
        let mut over = Vec::new();
        for (behind, outcome) in std::mem::take(&mut self.delayed) {
            let raised = |(rank, number): &(WorkerRank, u64)| {
                let remote = ranks.get(*rank).and_then(|held| held.worker.remote());
                remote.map_or(Some(true), |remote| remote.is_raised(*number))
            };
            match behind.iter().map(raised).collect::<Option<Vec<bool>>>() {
                None => over.push(lost(outcome)),
                Some(raised) if raised.iter().all(|raised| *raised) => over.push(outcome),
                Some(_) => self.delayed.push((behind, outcome)),
            }
        }
        over
    }

    /// Returns whether outcomes are delayed.
    pub(super) fn has_delayed(&self) -> bool {
        !self.delayed.is_empty()
    }

    /// Takes all delayed outcomes at the end of the connector. `proven`: nothing touches any block
    /// any more.
    pub(super) fn end(&mut self, proven: bool) -> Vec<Outcome> {
        let rest = std::mem::take(&mut self.delayed).into_iter().map(|(_, outcome)| outcome);
        rest.map(|outcome| if proven { outcome } else { lost(outcome) }).collect()
    }
}

/// Replaces `Free` by `Lost`, because `Free` cannot be proven.
fn lost(outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::Free { request, kept } => Outcome::Lost { request, kept },
        other => other,
    }
}
