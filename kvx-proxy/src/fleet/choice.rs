//! Chooses an instance for a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::instance::{InFlight, Instance};
use super::knowledge::PromptParts;
use super::knowledge::drift::Prediction;
use super::models::ModelName;
use super::tokens::PromptTokens;
use crate::setup::Choice;

/// The load, relative to its fair share, above which prefix affinity skips an instance.
pub(super) const BOUND: f64 = 1.25;

/// The requirements of a request on an instance.
pub(crate) struct Requirements<'a> {
    /// The estimated number of tokens.
    pub(crate) tokens: u64,
    /// A hash of the beginning of the request's prompt.
    pub(crate) prefix: u64,
    /// Hashes of the prompt up to the end of each of its chunks, if the instance is to compute it.
    pub(crate) chunks: &'a [u64],
    /// The tokens of the prompt, if they are known.
    pub(crate) token_ids: Option<&'a PromptTokens>,
    /// The model, if the request names one.
    pub(crate) model: Option<ModelName<'a>>,
    /// Instances that have failed this request: chosen only if no other one is left.
    pub(crate) avoid: &'a [Arc<Instance>],
    pub(crate) now: Instant,
}

impl<'a> Requirements<'a> {
    /// Returns the prompt, as far as caches depend on it.
    pub(crate) fn prompt(&self) -> PromptParts<'a> {
        PromptParts { chunks: self.chunks, tokens: self.token_ids }
    }
}

/// The positions of round robin and of tie-breaking.
#[derive(Debug, Default)]
pub(crate) struct RoundRobin {
    pub(super) next: AtomicU64,
    pass: AtomicU64,
}

const STRIDE: f64 = 65536.0;

/// The instances of one role, and the policy that chooses one of them.
pub(super) struct Candidates<'a> {
    pub(super) instances: &'a [Arc<Instance>],
    pub(super) turns: &'a RoundRobin,
    pub(super) choice: Choice,
    /// The time between two trial requests to an ejected instance.
    pub(super) eject_for: Duration,
}

impl<'a> Candidates<'a> {
    /// Assigns the request to an open instance that `fits`, or else to a usable ejected one.
    pub(super) fn choose(
        &self,
        wanted: &Requirements<'_>,
        fits: impl Fn(&Instance) -> bool,
    ) -> Option<InFlight> {
        self.choose_open(wanted, &fits).or_else(|| {
            let usable = |one: &Arc<Instance>| one.state.is_usable() && fits(one);
            let best = self.best_for(wanted, usable)?;
            let (tokens, predicted) = self.tokens_for(best, wanted);
            self.add_to_cache(best, wanted);
            Some(best.take_anyway(tokens, predicted))
        })
    }

    /// Assigns the request to an open instance that `fits`.
    pub(super) fn choose_open(
        &self,
        wanted: &Requirements<'_>,
        fits: impl Fn(&Instance) -> bool,
    ) -> Option<InFlight> {
        let open = |one: &Arc<Instance>| one.state.is_open(wanted.now) && fits(one);
        // A concurrent request may take an instance's only trial: choose again, a bounded number of
        // times.
        for _ in 0..4 {
            let best = self.best_for(wanted, open)?;
            let (tokens, predicted) = self.tokens_for(best, wanted);
            if let Some(taken) = best.take(tokens, predicted, wanted.now, self.eject_for) {
                self.add_to_cache(best, wanted);
                return Some(taken);
            }
        }
        None
    }

    /// Returns the best instance that `may` serve the request, preferring those that the request
    /// does not avoid.
    fn best_for(
        &self,
        wanted: &Requirements<'_>,
        may: impl Fn(&Arc<Instance>) -> bool,
    ) -> Option<&'a Arc<Instance>> {
        let avoided = |one: &Arc<Instance>| {
            wanted.avoid.iter().any(|avoid| Arc::ptr_eq(&avoid.state, &one.state))
        };
        let may = |one: &Arc<Instance>| {
            !one.setup.draining
                && wanted.model.is_none_or(|model| one.state.models.serve(model))
                && may(one)
        };
        let first = self.best(wanted, |one| may(one) && !avoided(one));
        first.or_else(|| match wanted.avoid {
            [] => None,
            _ => self.best(wanted, may),
        })
    }

    /// Returns the tokens for which an instance is busy with the request, and those that it has
    /// cached.
    pub(super) fn tokens_for(
        &self,
        one: &Instance,
        wanted: &Requirements<'_>,
    ) -> (u64, Prediction) {
        match self.choice {
            Choice::Cached => {
                let predicted = one.predict(wanted.prompt());
                (one.uncached(wanted.tokens, predicted), predicted)
            }
            Choice::LeastTokens | Choice::RoundRobin | Choice::Prefix => {
                (wanted.tokens, Prediction::default())
            }
        }
    }

    /// Returns the tokens that an instance has to compute until it is done with the request, for
    /// its weight.
    pub(super) fn cost(&self, one: &Instance, wanted: &Requirements<'_>) -> f64 {
        (one.state.outstanding() + self.tokens_for(one, wanted).0) as f64 / one.setup.weight
    }

    fn add_to_cache(&self, one: &Instance, wanted: &Requirements<'_>) {
        if self.choice == Choice::Cached {
            one.state.cache().sent(wanted.prompt(), wanted.now);
        }
    }

    fn best(
        &self,
        wanted: &Requirements<'_>,
        may: impl Fn(&Arc<Instance>) -> bool,
    ) -> Option<&'a Arc<Instance>> {
        let turns = self.turns;
        let turn = match self.choice {
            Choice::Cached | Choice::LeastTokens => turns.next.fetch_add(1, Relaxed),
            Choice::RoundRobin | Choice::Prefix => 0,
        };
        let best = self.best_at(turn, wanted, may)?;
        if self.choice == Choice::RoundRobin {
            // An instance that was away does not catch up: it joins at the current pass.
            let pass = best.state.pass.load(Relaxed).max(turns.pass.load(Relaxed));
            turns.pass.store(pass, Relaxed);
            best.state.pass.store(pass + (STRIDE / best.setup.weight) as u64, Relaxed);
        }
        Some(best)
    }

    /// Returns the best instance that `may` serve the request, and changes nothing. Instances that
    /// are otherwise equal take turns, of which this is one.
    pub(super) fn best_at(
        &self,
        turn: u64,
        wanted: &Requirements<'_>,
        may: impl Fn(&Arc<Instance>) -> bool,
    ) -> Option<&'a Arc<Instance>> {
        let Candidates { instances, choice, .. } = *self;
        let load = |one: &Instance| self.cost(one, wanted);
        let in_turn = || {
            let (before, after) = instances.split_at(turn as usize % instances.len().max(1));
            after.iter().chain(before)
        };
        match choice {
            Choice::Cached => {
                let cost = |one: &Instance| {
                    // Of instances that would be done at the same time, the less busy one.
                    (self.cost(one, wanted), one.state.outstanding() as f64 / one.setup.weight)
                };
                least(in_turn().filter(|one| may(one)), cost)
            }
            Choice::LeastTokens => least(in_turn().filter(|one| may(one)), load),
            Choice::RoundRobin => least(instances.iter().filter(|one| may(one)), |one| {
                one.state.pass.load(Relaxed) as f64
            }),
            Choice::Prefix => {
                let (mut tokens, mut weights) = (wanted.tokens, 0.0);
                for one in instances.iter().filter(|one| may(one)) {
                    tokens += one.state.outstanding();
                    weights += one.setup.weight;
                }
                let bound = (tokens as f64 / weights * BOUND).max(0.0);
                // An idle instance accepts a request of any size.
                let within = |one: &Arc<Instance>| {
                    may(one) && (one.state.outstanding() == 0 || load(one) <= bound)
                };
                let near = |one: &Instance| distance(wanted.prefix ^ one.hash, one);
                least(instances.iter().filter(|one| within(one)), near)
                    // All instances have so little load that this request alone exceeds a fair
                    // share.
                    .or_else(|| least(instances.iter().filter(|one| may(one)), load))
            }
        }
    }
}

/// Returns the distance for rendezvous hashing: each prefix orders the instances differently, and
/// the order changes little when an instance joins or leaves.
fn distance(mixed: u64, one: &Instance) -> f64 {
    // From 2^-53 to 1, so that the logarithm is finite.
    let uniform = ((mix(mixed) >> 11) + 1) as f64 / (1u64 << 53) as f64;
    -uniform.ln() / one.setup.weight
}

/// Applies the last steps of splitmix64, so that every output bit depends on every input bit.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Returns a hash that is the same in every build and process, so that several proxies agree.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    mix(bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    }))
}

fn least<'a, Score: PartialOrd>(
    of: impl Iterator<Item = &'a Arc<Instance>>,
    by: impl Fn(&Instance) -> Score,
) -> Option<&'a Arc<Instance>> {
    let mut best: Option<(Score, &Arc<Instance>)> = None;
    for one in of {
        let score = by(one);
        if best.as_ref().is_none_or(|(least, _)| score < *least) {
            best = Some((score, one));
        }
    }
    best.map(|(_, one)| one)
}
