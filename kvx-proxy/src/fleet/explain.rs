//! Describes which instance would be chosen for a request, and why, without a change of state.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::Fleet;
use super::choice::{Candidates, Requirements};
use super::instance::Instance;
use crate::explain::{CandidateReport, SideReport};
use crate::setup::Choice;

/// Which instances are considered: open ones alone, or also usable ejected ones, on the side that
/// is chosen and on the other side of its pairs.
#[derive(Clone, Copy)]
struct Stage {
    usable: bool,
    usable_partners: bool,
}

/// The stages of [`Fleet::choose_prefill`], and of the choice of a decode instance.
const PREFILL: [Stage; 3] = [
    Stage { usable: false, usable_partners: false },
    Stage { usable: false, usable_partners: true },
    Stage { usable: true, usable_partners: true },
];
const DECODE: [Stage; 2] = [PREFILL[0], PREFILL[2]];

/// An instance that gets requests and fails this many in a row is called `failing`, not `up`.
const FAILING: u32 = 3;

/// An instance that would be chosen, and the report about all candidates.
pub(crate) type Ranking = (Option<Arc<Instance>>, SideReport);

impl Fleet {
    /// Ranks the prefill instances as [`choose_prefill`](Self::choose_prefill) does.
    pub(crate) fn rank_prefill(&self, wanted: &Requirements<'_>) -> Ranking {
        let candidates = self.candidates(super::Role::Prefill);
        candidates.rank(wanted, &PREFILL, |one, stage| {
            let pairs = self.decode.iter().any(|decode| {
                why_closed(decode, wanted, stage.usable_partners).is_none()
                    && one.pairs_with(decode)
            });
            (!pairs).then(|| "no decode instance that is up pairs with it".to_owned())
        })
    }

    /// Ranks the decode instances as [`choose_partner`](Self::choose_partner) does.
    pub(crate) fn rank_partner(&self, prefill: &Instance, wanted: &Requirements<'_>) -> Ranking {
        self.partners().rank(wanted, &DECODE, |one, _| {
            (!one.pairs_with(prefill)).then(|| "it does not pair with the prefill".to_owned())
        })
    }

    /// Ranks the decode instances as [`choose_alone`](Self::choose_alone) does.
    pub(crate) fn rank_alone(&self, wanted: &Requirements<'_>) -> Ranking {
        self.candidates(super::Role::Decode).rank(wanted, &DECODE, |_, _| None)
    }
}

/// Returns why an instance gets no request now, if that is so.
fn why_closed(one: &Instance, wanted: &Requirements<'_>, usable: bool) -> Option<String> {
    let state = &one.state;
    if one.setup.draining {
        return Some("it is draining".to_owned());
    }
    if wanted.model.is_some_and(|model| !state.models.serve(model)) {
        return Some("it does not serve this model".to_owned());
    }
    if state.is_open(wanted.now) || (usable && state.is_usable()) {
        return None;
    }
    let fault = state.last_fault().map_or_else(String::new, |fault| format!(": {fault}"));
    Some(format!("it is {}{fault}", one.standing()))
}

impl Instance {
    /// Returns a short name of the state of the instance.
    pub(crate) fn standing(&self) -> &'static str {
        let state = &self.state;
        match () {
            () if self.setup.draining => "draining",
            () if state.is_sound() && state.failed_in_a_row() >= FAILING => "failing",
            () if state.is_sound() => "up",
            () if !state.is_checked() => "not checked yet",
            () if state.is_down() => "down",
            () => "left out",
        }
    }
}

impl Candidates<'_> {
    /// Finds the winner at the first stage that has one. Other rules than those of every choice
    /// return `why_not` an instance fits.
    fn rank(
        &self,
        wanted: &Requirements<'_>,
        stages: &[Stage],
        why_not: impl Fn(&Instance, Stage) -> Option<String>,
    ) -> Ranking {
        let excluded = |one: &Instance, stage: Stage| {
            why_closed(one, wanted, stage.usable).or_else(|| why_not(one, stage))
        };
        let turn = self.turns.next.load(Relaxed);
        let winner_at =
            |stage: Stage| self.best_at(turn, wanted, |one| excluded(one, stage).is_none());
        let found = stages.iter().find_map(|stage| Some((winner_at(*stage)?, *stage)));
        // Without a winner, what excludes an instance from all stages is the reason.
        let stage = found.map_or(stages[stages.len() - 1], |(_, stage)| stage);
        let candidates: Vec<_> = self
            .instances
            .iter()
            .map(|one| self.report(one, wanted, excluded(one, stage)))
            .collect();
        let winner = found.map(|(winner, _)| Arc::clone(winner));
        let index = winner
            .as_ref()
            .and_then(|winner| self.instances.iter().position(|one| Arc::ptr_eq(one, winner)));
        let why = match index {
            Some(index) => self.why(&candidates, index),
            None => "no instance may serve it".to_owned(),
        };
        let name = winner.as_ref().map(|winner| winner.name().to_owned());
        (winner, SideReport::new(self.choice.as_str(), name, why, candidates))
    }

    fn report(
        &self,
        one: &Instance,
        wanted: &Requirements<'_>,
        why_not: Option<String>,
    ) -> CandidateReport {
        let by_cache = self.choice == Choice::Cached;
        let (tokens_to_compute, predicted) = self.tokens_for(one, wanted);
        let has_cost = why_not.is_none() && self.choice != Choice::RoundRobin;
        CandidateReport {
            instance: one.name().to_owned(),
            pool: one.pool_name.clone(),
            state: one.standing().to_owned(),
            queued_tokens: one.state.outstanding(),
            cached_tokens: by_cache.then(|| predicted.with_pending.min(wanted.tokens)),
            knowledge: by_cache.then(|| predicted.by.as_str().to_owned()),
            tokens_to_compute,
            weight: one.setup.weight,
            cost: has_cost.then(|| self.cost(one, wanted)),
            why_not,
        }
    }

    /// Describes why the candidate at this index wins.
    fn why(&self, candidates: &[CandidateReport], index: usize) -> String {
        let others = candidates.iter().enumerate().filter(|(at, _)| *at != index);
        let others = others.map(|(_, one)| one).filter(|one| one.why_not.is_none());
        let next = others.clone().filter_map(|one| one.cost).min_by(f64::total_cmp);
        if others.count() == 0 {
            return "no other instance may serve it".to_owned();
        }
        let (cost, next) = (candidates[index].cost.unwrap_or(0.0), next.unwrap_or(0.0));
        let least = match self.choice {
            Choice::Cached => "it would finish first",
            Choice::LeastTokens => "it has the fewest tokens to work on",
            Choice::RoundRobin => return "it is its turn".to_owned(),
            Choice::Prefix => {
                return "its number is that of the prompt's beginning, or the instance with that \
                        number is overloaded and this one has the least load"
                    .to_owned();
            }
        };
        match cost < next {
            true => format!("{least}: its cost is {cost:.0}, the next best has {next:.0}"),
            false => format!("{least}, as others do at cost {cost:.0}: such instances take turns"),
        }
    }
}
