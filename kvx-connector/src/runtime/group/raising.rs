//! Blocks that peers may not read any more, where ranks are on other hosts: those raise words of their own, and say so
//! before the engine hears that the blocks are free.

use super::super::state::State;
use super::super::words::{Published, Raised};
use super::Away;
use crate::engine::{Kept, Outcome, RequestId, WorkerRank};

impl State {
    /// Whether ranks may be on other hosts.
    pub(in crate::runtime) fn has_distant_ranks(&self) -> bool {
        self.away().any(|(_, away)| away.is_distant())
    }

    fn away(&self) -> impl Iterator<Item = (WorkerRank, &Away)> {
        self.ranks.iter().filter_map(|(rank, held)| Some((*rank, held.worker.away()?)))
    }

    /// No peer may read the blocks of a request any more.
    pub(in crate::runtime) fn release(&mut self, request: &RequestId) {
        let raised = self.published.as_mut().and_then(|published| published.release(request));
        self.raise_elsewhere(raised);
    }

    /// The same of all requests.
    pub(in crate::runtime) fn release_all(&mut self) {
        let raised = self.published.as_mut().map(Published::release_all).unwrap_or_default();
        self.raise_elsewhere(raised);
    }

    fn raise_elsewhere(&mut self, raised: impl IntoIterator<Item = Raised>) {
        for raised in raised {
            let away = self.ranks.values_mut().filter_map(|held| held.worker.away_mut());
            away.for_each(|away| away.raise(&raised));
        }
    }

    /// What has become of blocks, for the engine; nothing, where a rank's words may still tell peers that they are as
    /// they were: then it comes later.
    pub(in crate::runtime) fn unless_read(&mut self, outcome: Outcome) -> Option<Outcome> {
        if !matches!(outcome, Outcome::Free { kept: Kept::Request, .. }) {
            return Some(outcome);
        }
        let behind: Vec<_> =
            self.away().filter_map(|(rank, away)| Some((rank, away.last_unraised()?))).collect();
        if behind.is_empty() {
            return Some(outcome);
        }
        self.raising.push((behind, outcome));
        None
    }

    /// What has waited for words that are raised by now, or never will be for all that is known.
    pub(in crate::runtime) fn take_raised(&mut self) -> Vec<Outcome> {
        let mut over = Vec::new();
        for (behind, outcome) in std::mem::take(&mut self.raising) {
            let raised = |(rank, number): &(WorkerRank, u64)| {
                let away = self.ranks.get(rank).and_then(|held| held.worker.away());
                away.map_or(Some(true), |away| away.is_raised(*number))
            };
            match behind.iter().map(raised).collect::<Option<Vec<bool>>>() {
                None => over.push(lost(outcome)),
                Some(raised) if raised.iter().all(|raised| *raised) => over.push(outcome),
                Some(_) => self.raising.push((behind, outcome)),
            }
        }
        over
    }

    /// The same at the end of the connector. `proven`: nothing touches any block any more.
    pub(in crate::runtime) fn end_raising(&mut self, proven: bool) -> Vec<Outcome> {
        let rest = std::mem::take(&mut self.raising).into_iter().map(|(_, outcome)| outcome);
        rest.map(|outcome| if proven { outcome } else { lost(outcome) }).collect()
    }
}

/// What is said instead of `Free` where that is not known.
fn lost(outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::Free { request, kept } => Outcome::Lost { request, kept },
        other => other,
    }
}
