//! The fleet of instances.

pub(crate) mod bootstrap;
pub(crate) mod cache_model;
pub(crate) mod choice;
mod explain;
pub(crate) mod instance;
pub(crate) mod knowledge;
pub(crate) mod missing;
pub(crate) mod models;
#[cfg(test)]
mod replay;
pub(crate) mod subscribe;
#[cfg(test)]
mod tests;
mod tokenizer_pause;
pub(crate) mod tokens;
pub(crate) mod watch;

use std::cell::OnceCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use choice::{Candidates, Requirements, RoundRobin};
use instance::{InFlight, Instance, Origin, Reason, Role, State};
use models::{ModelName, ModelNames};

use crate::setup::{Choice, Fallback, Health, InstanceSetup, PoolConnector, Setup};

/// A configured pool.
#[derive(Debug)]
pub(crate) struct FleetPool {
    pub(crate) name: String,
    pub(crate) connector: PoolConnector,
    pub(crate) bidirectional: bool,
    /// True if discovery finds prefill instances for it, without which it does not serve.
    discovers_prefill: bool,
}

/// All instances, in no particular order. A changed configuration creates a new fleet.
#[derive(Debug)]
pub(crate) struct Fleet {
    pub(crate) pools: Vec<FleetPool>,
    pub(crate) prefill: Vec<Arc<Instance>>,
    pub(crate) decode: Vec<Arc<Instance>>,
    pub(crate) names: Arc<ModelNames>,
    prefill_turns: Arc<RoundRobin>,
    decode_turns: Arc<RoundRobin>,
    choice: Choice,
    fallback: Fallback,
    eject_for: std::time::Duration,
    /// Held from the check for remaining instances until an ejection, so that no other instance is
    /// ejected in between.
    leaving_out: Arc<Mutex<()>>,
}

impl Fleet {
    /// Builds the fleet of a configuration. Instances of the fleet `before` keep their state. Those
    /// that were added through `/instances`, or discovered, stay as long as their pool exists.
    pub(crate) fn new(setup: &Setup, before: Option<&Fleet>) -> Self {
        let mut fleet = Fleet {
            pools: Vec::new(),
            prefill: Vec::new(),
            decode: Vec::new(),
            names: before.map(|before| Arc::clone(&before.names)).unwrap_or_default(),
            // A new instance begins at the turn of the others, and not at the first one.
            prefill_turns: before.map(|one| Arc::clone(&one.prefill_turns)).unwrap_or_default(),
            decode_turns: before.map(|one| Arc::clone(&one.decode_turns)).unwrap_or_default(),
            choice: setup.choice,
            fallback: setup.fallback,
            eject_for: setup.health.eject_for,
            leaving_out: before.map(|before| Arc::clone(&before.leaving_out)).unwrap_or_default(),
        };
        for (place, pool) in setup.pools().iter().enumerate() {
            fleet.pools.push(FleetPool {
                name: pool.name.clone(),
                connector: pool.connector.unwrap_or(setup.connector),
                bidirectional: pool.bidirectional,
                discovers_prefill: pool.prefill.iter().any(|one| one.records().is_some())
                    || setup.discovery.needs_prefill(&pool.name),
            });
            for (role, instances) in [(Role::Prefill, &pool.prefill), (Role::Decode, &pool.decode)]
            {
                for instance in instances.iter().filter(|one| one.records().is_none()) {
                    fleet.put(place, role, instance.clone(), Origin::Setup, before);
                }
            }
        }
        let added = |old: &&Arc<Instance>| old.origin != Origin::Setup;
        for old in before.into_iter().flat_map(Fleet::all).filter(added) {
            let place = fleet.pools.iter().position(|pool| pool.name == old.pool_name);
            if let Some(place) = place
                && fleet.find(place, old.role, old.name()).is_none()
            {
                fleet.put(place, old.role, old.setup.clone(), old.origin.clone(), before);
            }
        }
        fleet
    }

    /// Returns a copy with one instance added or changed by an operator. Discovery does not change
    /// its settings any more.
    pub(crate) fn with(&self, pool: usize, role: Role, setup: InstanceSetup) -> Self {
        let name = setup.name().to_owned();
        let mut fleet = self.without(pool, role, &name);
        let origin = match self.find(pool, role, &name).map(|known| &known.origin) {
            Some(Origin::Discovered { provider, identity, .. }) => {
                let (provider, identity) = (Arc::clone(provider), Arc::clone(identity));
                Origin::Discovered { provider, identity, is_changed: true }
            }
            Some(known) => known.clone(),
            None => Origin::Admin,
        };
        fleet.put(pool, role, setup, origin, Some(self));
        fleet
    }

    /// Returns a copy in which discovery changes the settings of a found instance again.
    pub(crate) fn handed_back(&self, pool: usize, role: Role, name: &str) -> Self {
        let mut fleet = self.without(pool, role, name);
        if let Some(known) = self.find(pool, role, name) {
            let mut origin = known.origin.clone();
            if let Origin::Discovered { is_changed, .. } = &mut origin {
                *is_changed = false;
            }
            fleet.put(pool, role, known.setup.clone(), origin, Some(self));
        }
        fleet
    }

    /// Returns a copy without one of its instances.
    pub(crate) fn without(&self, pool: usize, role: Role, name: &str) -> Self {
        self.only(|one| one.pool != pool || one.role != role || one.name() != name)
    }

    /// Returns a copy with the instances to keep.
    pub(crate) fn only(&self, mut keep: impl FnMut(&Instance) -> bool) -> Self {
        let pools = self.pools.iter().map(|pool| FleetPool { name: pool.name.clone(), ..*pool });
        let mut kept = |of: &[Arc<Instance>]| of.iter().filter(|one| keep(one)).cloned().collect();
        Fleet {
            pools: pools.collect(),
            prefill: kept(&self.prefill),
            decode: kept(&self.decode),
            names: Arc::clone(&self.names),
            prefill_turns: Arc::clone(&self.prefill_turns),
            decode_turns: Arc::clone(&self.decode_turns),
            leaving_out: Arc::clone(&self.leaving_out),
            ..*self
        }
    }

    /// Adds an instance, with the state that it has in the fleet `before`.
    pub(crate) fn put(
        &mut self,
        pool: usize,
        role: Role,
        setup: InstanceSetup,
        origin: Origin,
        before: Option<&Fleet>,
    ) {
        let pool_name = self.pools[pool].name.clone();
        let known = before.into_iter().flat_map(Fleet::all).find(|old| {
            old.pool_name == pool_name && old.role == role && old.name() == setup.name()
        });
        let state =
            known.map_or_else(|| Arc::new(State::default()), |known| Arc::clone(&known.state));
        let hash = choice::hash(setup.name().as_bytes());
        let shared_name = setup.name().into();
        let instance =
            Arc::new(Instance { setup, role, pool, pool_name, origin, shared_name, hash, state });
        self.of_mut(role).push(instance);
    }

    fn of_mut(&mut self, role: Role) -> &mut Vec<Arc<Instance>> {
        match role {
            Role::Prefill => &mut self.prefill,
            Role::Decode => &mut self.decode,
        }
    }

    pub(crate) fn of(&self, role: Role) -> &[Arc<Instance>] {
        match role {
            Role::Prefill => &self.prefill,
            Role::Decode => &self.decode,
        }
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<Instance>> {
        self.prefill.iter().chain(&self.decode)
    }

    pub(crate) fn find(&self, pool: usize, role: Role, name: &str) -> Option<&Arc<Instance>> {
        self.of(role).iter().find(|one| one.pool == pool && one.name() == name)
    }

    fn candidates(&self, role: Role) -> Candidates<'_> {
        let turns = match role {
            Role::Prefill => &self.prefill_turns,
            Role::Decode => &self.decode_turns,
        };
        Candidates {
            instances: self.of(role),
            turns,
            choice: self.choice,
            eject_for: self.eject_for,
        }
    }

    /// Chooses a prefill instance that can be paired with a decode instance.
    pub(crate) fn choose_prefill(&self, wanted: &Requirements<'_>) -> Option<InFlight> {
        self.choose_prefill_if(wanted, false).or_else(|| self.choose_prefill_if(wanted, true))
    }

    /// Chooses among open instances; with `usable`, also among usable ejected ones.
    fn choose_prefill_if(&self, wanted: &Requirements<'_>, usable: bool) -> Option<InFlight> {
        let decodes = |one: &Instance| {
            !one.setup.draining
                && (one.state.is_open(wanted.now) || (usable && one.state.is_usable()))
                && wanted.model.is_none_or(|model| one.state.models.serve(model))
        };
        // Most pools name no compatibility and serve the same models everywhere: one decode
        // instance is enough to check.
        let of_first_decode: Vec<Option<u64>> = (0..self.pools.len())
            .map(|pool| self.decode.iter().find(|one| one.pool == pool && decodes(one)))
            .map(|one| Some(one?.state.models.bits()))
            .collect();
        // Otherwise check the models of all decode instances of each pool together.
        let of_all_decodes = OnceCell::new();
        let served_by_all = || {
            let mut served = vec![0; self.pools.len()];
            for decode in self.decode.iter().filter(|one| decodes(one)) {
                served[decode.pool] |= decode.state.models.bits();
            }
            served
        };
        let fits = |one: &Instance| {
            let Some(of_first) = of_first_decode[one.pool] else { return false };
            let (bits, goes_with_all) =
                (one.state.models.bits(), one.setup.compatibility.is_none());
            if goes_with_all && models::owned(bits & of_first) {
                return true;
            }
            let both = bits & of_all_decodes.get_or_init(served_by_all)[one.pool];
            (goes_with_all && models::owned(both))
                || (both != 0
                    && self.decode.iter().any(|decode| one.pairs_with(decode) && decodes(decode)))
        };
        let prefills = self.candidates(Role::Prefill);
        if usable { prefills.choose(wanted, fits) } else { prefills.choose_open(wanted, fits) }
    }

    /// Chooses a decode instance that can be paired with `prefill`.
    pub(crate) fn choose_partner(
        &self,
        prefill: &Instance,
        wanted: &Requirements<'_>,
    ) -> Option<InFlight> {
        self.partners().choose(wanted, |one| one.pairs_with(prefill))
    }

    /// Returns the decode instances, for a request that a prefill instance begins.
    fn partners(&self) -> Candidates<'_> {
        // Affinity applies to the prefill side, which caches the prompt.
        let choice = match self.choice {
            Choice::Cached | Choice::Prefix => Choice::LeastTokens,
            other => other,
        };
        Candidates { choice, ..self.candidates(Role::Decode) }
    }

    /// Chooses a decode instance that serves the request alone.
    pub(crate) fn choose_alone(&self, wanted: &Requirements<'_>) -> Option<InFlight> {
        self.choose_alone_that(wanted, |_| true)
    }

    /// Chooses a decode instance that `fits`.
    pub(crate) fn choose_alone_that(
        &self,
        wanted: &Requirements<'_>,
        fits: impl Fn(&Instance) -> bool,
    ) -> Option<InFlight> {
        self.candidates(Role::Decode).choose(wanted, fits)
    }

    /// Assigns the request to the decode instance `name`, if it is open.
    pub(crate) fn take_decode(&self, name: &str, wanted: &Requirements<'_>) -> Option<InFlight> {
        self.candidates(Role::Decode).choose_open(wanted, |one| one.name() == name)
    }

    /// Records a failed request. Returns true if its instance is ejected now. The last instance of
    /// its pool and role is never ejected for how it answers.
    pub(crate) fn failed(
        &self,
        instance: &Instance,
        reason: Reason,
        words: &str,
        health: &Health,
        now: Instant,
    ) -> bool {
        let _one_at_a_time = self.leave_out();
        instance.state.failed(reason, words, health, self.is_last(instance), now)
    }

    /// Records a failed health check; `late` means that it timed out. Returns true if this failure
    /// took the instance down. A timeout never takes down the last instance of its pool and role.
    pub(crate) fn unhealthy(
        &self,
        instance: &Instance,
        words: &str,
        health: &Health,
        late: bool,
    ) -> bool {
        let _one_at_a_time = self.leave_out();
        instance.state.unhealthy(words, health, late && self.is_last(instance))
    }

    fn leave_out(&self) -> MutexGuard<'_, ()> {
        self.leaving_out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if no other instance of the same pool and role could take over its requests.
    fn is_last(&self, instance: &Instance) -> bool {
        !self.of(instance.role).iter().any(|other| {
            other.pool == instance.pool
                && other.state.is_sound()
                && !other.setup.draining
                && !std::ptr::eq(&raw const *other.state, &raw const *instance.state)
        })
    }

    /// Returns true if a prefill instance that serves the model is up, besides those that the
    /// request avoids.
    pub(crate) fn has_other_prefill(&self, wanted: &Requirements<'_>) -> bool {
        self.prefill.iter().any(|one| {
            !one.setup.draining
                && one.state.is_usable()
                && wanted.model.is_none_or(|model| one.state.models.serve(model))
                && !wanted.avoid.iter().any(|avoid| Arc::ptr_eq(&avoid.state, &one.state))
        })
    }

    /// Returns the tokens that are outstanding at the decode instances of a pool.
    pub(crate) fn decode_load(&self, pool: usize) -> u64 {
        let of_pool = self.decode.iter().filter(|one| one.pool == pool);
        of_pool.map(|one| one.state.outstanding()).sum()
    }

    /// Returns true if a request could be served: a prefill and a decode instance of one pool are
    /// usable, or a decode instance that serves without a prefill instance.
    pub(crate) fn is_ready(&self) -> bool {
        let up = |one: &&Arc<Instance>, pool| {
            one.pool == pool && one.state.is_usable() && !one.setup.draining
        };
        (0..self.pools.len()).any(|pool| {
            let alone = self.fallback == Fallback::Decode || !self.needs_prefill(pool);
            self.decode.iter().any(|one| up(&one, pool))
                && (alone || self.prefill.iter().any(|one| up(&one, pool)))
        })
    }

    /// Returns true if prefill instances compute the prompts of this pool, whether or not one is
    /// known now.
    fn needs_prefill(&self, pool: usize) -> bool {
        self.pools[pool].discovers_prefill || self.prefill.iter().any(|one| one.pool == pool)
    }

    /// Returns true if a prefill and a decode instance for this model can be paired, whether or not
    /// they are up, or a prefill instance may still be discovered.
    pub(crate) fn has_pair(&self, model: Option<ModelName<'_>>) -> bool {
        let serves = |one: &Instance| model.is_none_or(|model| one.state.models.serve(model));
        let waits = |pool: usize| {
            self.pools[pool].discovers_prefill && !self.prefill.iter().any(|one| one.pool == pool)
        };
        if self.decode.iter().any(|one| waits(one.pool) && serves(one)) {
            return true;
        }
        self.prefill.iter().any(|prefill| {
            serves(prefill)
                && self.decode.iter().any(|decode| serves(decode) && prefill.pairs_with(decode))
        })
    }
}
