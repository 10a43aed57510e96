//! The current instances.

pub(crate) mod choice;
pub(crate) mod instance;
pub(crate) mod models;
pub(crate) mod watch;

use std::cell::OnceCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use choice::{Candidates, Requirements, RoundRobin};
use instance::{InFlight, Instance, Reason, Role, State};
use models::{ModelName, ModelNames};

use crate::setup::{Choice, Health, InstanceSetup, PoolConnector, Setup};

/// A pool of the set-up.
#[derive(Debug)]
pub(crate) struct FleetPool {
    pub(crate) name: String,
    pub(crate) connector: PoolConnector,
    pub(crate) bidirectional: bool,
}

/// All instances, in an order that does not matter. A changed set-up makes another one.
#[derive(Debug)]
pub(crate) struct Fleet {
    pub(crate) pools: Vec<FleetPool>,
    pub(crate) prefill: Vec<Arc<Instance>>,
    pub(crate) decode: Vec<Arc<Instance>>,
    pub(crate) names: Arc<ModelNames>,
    prefill_turns: RoundRobin,
    decode_turns: RoundRobin,
    choice: Choice,
    eject_for: std::time::Duration,
    /// Held by whoever leaves an instance out: nobody else does between the look at who is left and
    /// that.
    leaving_out: Arc<Mutex<()>>,
}

impl Fleet {
    /// The fleet of a set-up. Instances that were there `before` keep their state, and those that
    /// came over `/instances` stay as long as their pool does.
    pub(crate) fn new(setup: &Setup, before: Option<&Fleet>) -> Self {
        let mut fleet = Fleet {
            pools: Vec::new(),
            prefill: Vec::new(),
            decode: Vec::new(),
            names: before.map(|before| Arc::clone(&before.names)).unwrap_or_default(),
            prefill_turns: RoundRobin::default(),
            decode_turns: RoundRobin::default(),
            choice: setup.choice,
            eject_for: setup.health.eject_for,
            leaving_out: before.map(|before| Arc::clone(&before.leaving_out)).unwrap_or_default(),
        };
        for (place, pool) in setup.pools.iter().enumerate() {
            fleet.pools.push(FleetPool {
                name: pool.name.clone(),
                connector: pool.connector.unwrap_or(setup.connector),
                bidirectional: pool.bidirectional,
            });
            for (role, instances) in [(Role::Prefill, &pool.prefill), (Role::Decode, &pool.decode)]
            {
                for instance in instances {
                    fleet.put(place, role, instance.clone(), false, before);
                }
            }
        }
        for old in before.into_iter().flat_map(Fleet::all).filter(|old| old.added) {
            let place = fleet.pools.iter().position(|pool| pool.name == old.pool_name);
            if let Some(place) = place
                && fleet.find(place, old.role, old.name()).is_none()
            {
                fleet.put(place, old.role, old.setup.clone(), true, before);
            }
        }
        fleet
    }

    /// This fleet with one instance added or changed.
    pub(crate) fn with(&self, pool: usize, role: Role, setup: InstanceSetup) -> Self {
        let mut fleet = self.copy();
        let name = setup.name().to_owned();
        let added = self.find(pool, role, &name).is_none_or(|known| known.added);
        fleet.of_mut(role).retain(|one| one.pool != pool || one.name() != name);
        fleet.put(pool, role, setup, added, Some(self));
        fleet
    }

    /// This fleet without one of its instances.
    pub(crate) fn without(&self, pool: usize, role: Role, name: &str) -> Self {
        let mut fleet = self.copy();
        fleet.of_mut(role).retain(|one| one.pool != pool || one.name() != name);
        fleet
    }

    fn copy(&self) -> Self {
        let pools = self.pools.iter().map(|pool| FleetPool { name: pool.name.clone(), ..*pool });
        Fleet {
            pools: pools.collect(),
            prefill: self.prefill.clone(),
            decode: self.decode.clone(),
            names: Arc::clone(&self.names),
            prefill_turns: RoundRobin::default(),
            decode_turns: RoundRobin::default(),
            leaving_out: Arc::clone(&self.leaving_out),
            ..*self
        }
    }

    fn put(
        &mut self,
        pool: usize,
        role: Role,
        setup: InstanceSetup,
        added: bool,
        before: Option<&Fleet>,
    ) {
        let pool_name = self.pools[pool].name.clone();
        let known = before.into_iter().flat_map(Fleet::all).find(|old| {
            old.pool_name == pool_name && old.role == role && old.name() == setup.name()
        });
        let state =
            known.map_or_else(|| Arc::new(State::default()), |known| Arc::clone(&known.state));
        let hash = choice::hash(setup.name().as_bytes());
        let instance = Arc::new(Instance { setup, role, pool, pool_name, added, hash, state });
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

    /// A prefill instance that some decode instance goes with.
    pub(crate) fn choose_prefill(&self, wanted: &Requirements<'_>) -> Option<InFlight> {
        self.choose_prefill_if(wanted, false).or_else(|| self.choose_prefill_if(wanted, true))
    }

    /// The same of instances that are open, or of those that were left out and are usable, too.
    fn choose_prefill_if(&self, wanted: &Requirements<'_>, usable: bool) -> Option<InFlight> {
        let decodes = |one: &Instance| {
            !one.setup.draining
                && (one.state.is_open(wanted.now) || (usable && one.state.is_usable()))
                && wanted.model.is_none_or(|model| one.state.models.serve(model))
        };
        // Most pools name no compatibility and have the same models everywhere: one decode instance
        // says it for all.
        let of_first_decode: Vec<Option<u64>> = (0..self.pools.len())
            .map(|pool| self.decode.iter().find(|one| one.pool == pool && decodes(one)))
            .map(|one| Some(one?.state.models.bits()))
            .collect();
        // Where it does not, those of each pool do together.
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

    /// A decode instance that goes with a prefill instance.
    pub(crate) fn choose_partner(
        &self,
        prefill: &Instance,
        wanted: &Requirements<'_>,
    ) -> Option<InFlight> {
        // Affinity is the business of whoever has the prompt's cache: the prefill side.
        let choice = match self.choice {
            Choice::Prefix => Choice::LeastTokens,
            other => other,
        };
        Candidates { choice, ..self.candidates(Role::Decode) }
            .choose(wanted, |one| one.pairs_with(prefill))
    }

    /// A decode instance that does everything.
    pub(crate) fn choose_alone(&self, wanted: &Requirements<'_>) -> Option<InFlight> {
        self.choose_alone_that(wanted, |_| true)
    }

    /// Takes a decode instance that `fits`.
    pub(crate) fn choose_alone_that(
        &self,
        wanted: &Requirements<'_>,
        fits: impl Fn(&Instance) -> bool,
    ) -> Option<InFlight> {
        self.candidates(Role::Decode).choose(wanted, fits)
    }

    /// Takes a decode instance by its name, if it is open.
    pub(crate) fn take_decode(&self, name: &str, wanted: &Requirements<'_>) -> Option<InFlight> {
        self.candidates(Role::Decode).choose_open(wanted, |one| one.name() == name)
    }

    /// A request failed. Returns whether its instance is left out now: the last one of its pool and
    /// role never is for how it answers.
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

    /// A health check failed; `late` says that no answer came in time. Returns whether its instance
    /// is down for it now: the last one of its pool and role never is for being late.
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

    /// Whether no other instance of the same pool and role could take what this one gets.
    fn is_last(&self, instance: &Instance) -> bool {
        !self.of(instance.role).iter().any(|other| {
            other.pool == instance.pool
                && other.state.is_sound()
                && !other.setup.draining
                && !std::ptr::eq(&raw const *other.state, &raw const *instance.state)
        })
    }

    /// Whether a request could be served: some prefill and some decode instance of one pool are
    /// usable, or a pool has no prefill instance at all.
    pub(crate) fn is_ready(&self) -> bool {
        let up = |one: &&Arc<Instance>, pool| {
            one.pool == pool && one.state.is_usable() && !one.setup.draining
        };
        (0..self.pools.len()).any(|pool| {
            let alone = !self.prefill.iter().any(|one| one.pool == pool);
            self.decode.iter().any(|one| up(&one, pool))
                && (alone || self.prefill.iter().any(|one| up(&one, pool)))
        })
    }

    /// Whether a prefill and a decode instance for this model go together, be they up or not.
    pub(crate) fn has_pair(&self, model: Option<ModelName<'_>>) -> bool {
        let serves = |one: &Instance| model.is_none_or(|model| one.state.models.serve(model));
        self.prefill.iter().any(|prefill| {
            serves(prefill)
                && self.decode.iter().any(|decode| serves(decode) && prefill.pairs_with(decode))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet(text: &str) -> Fleet {
        let fleet = Fleet::new(&Setup::from_toml(text).unwrap(), None);
        fleet.all().for_each(|one| _ = one.state.healthy());
        fleet
    }

    fn wanted(tokens: u64, prefix: u64) -> Requirements<'static> {
        Requirements { tokens, prefix, model: None, avoid: &[], now: Instant::now() }
    }

    fn decodes(choice: &str, weights: &[f64]) -> Fleet {
        let list: Vec<String> = weights
            .iter()
            .enumerate()
            .map(|(i, weight)| format!("{{ url = 'http://d{i}:1', weight = {weight:?} }}"))
            .collect();
        fleet(&format!("choice = '{choice}'\n[[pool]]\ndecode = [{}]", list.join(", ")))
    }

    fn counts(fleet: &Fleet) -> Vec<u64> {
        fleet.decode.iter().map(|one| one.state.requests()).collect()
    }

    #[test]
    fn the_least_outstanding_tokens_for_the_weight_win() {
        let fleet = decodes("least-tokens", &[1.0, 3.0]);
        let held: Vec<_> = (0..40).map(|_| fleet.choose_alone(&wanted(100, 0)).unwrap()).collect();
        assert_eq!(counts(&fleet), [10, 30]);
        let big = fleet.choose_alone(&wanted(100_000, 0)).unwrap();
        let other = fleet.choose_alone(&wanted(1, 0)).unwrap();
        assert_ne!(big.instance.name(), other.instance.name());
        drop((held, big, other));
        assert!(fleet.decode.iter().all(|one| one.state.outstanding() == 0), "all is given back");
    }

    #[test]
    fn equal_instances_take_turns() {
        let fleet = decodes("least-tokens", &[1.0; 4]);
        for _ in 0..40 {
            fleet.choose_alone(&wanted(10, 0)).unwrap();
        }
        let totals: Vec<u64> = fleet
            .decode
            .iter()
            .map(|one| one.state.requests_total.load(std::sync::atomic::Ordering::Relaxed))
            .collect();
        assert_eq!(totals, [10; 4]);
    }

    #[test]
    fn round_robin_keeps_to_the_weights_and_floods_nobody_that_was_away() {
        let fleet = decodes("round-robin", &[1.0, 2.0, 1.0]);
        fleet.decode[2].state.unhealthy("x", &Default::default(), false);
        fleet.decode[2].state.unhealthy("x", &Default::default(), false);
        let _held: Vec<_> = (0..30).map(|_| fleet.choose_alone(&wanted(1, 0)).unwrap()).collect();
        assert_eq!(counts(&fleet), [10, 20, 0]);
        fleet.decode[2].state.healthy();
        let _more: Vec<_> = (0..40).map(|_| fleet.choose_alone(&wanted(1, 0)).unwrap()).collect();
        let counts = counts(&fleet);
        assert!((9..=11).contains(&counts[2]) && (39..=41).contains(&counts[1]), "{counts:?}");
    }

    #[test]
    fn a_prefix_keeps_its_instance_until_the_bound() {
        let fleet = decodes("prefix", &[1.0; 8]);
        let home = fleet.choose_alone(&wanted(1, 7)).unwrap().instance.name().to_owned();
        for _ in 0..10 {
            assert_eq!(fleet.choose_alone(&wanted(1, 7)).unwrap().instance.name(), home);
        }
        let _held: Vec<_> = (0..80).map(|_| fleet.choose_alone(&wanted(100, 7)).unwrap()).collect();
        let most = counts(&fleet).into_iter().max().unwrap();
        assert!((10..=14).contains(&most), "one hot prefix spreads: {:?}", counts(&fleet));
    }

    #[test]
    fn prefixes_spread_and_move_little_when_an_instance_goes() {
        let fleet = decodes("prefix", &[1.0; 8]);
        let homes = |fleet: &Fleet| -> Vec<String> {
            (0..800u64)
                .map(|prefix| {
                    let prefix = choice::hash(&prefix.to_le_bytes());
                    fleet.choose_alone(&wanted(1, prefix)).unwrap().instance.name().to_owned()
                })
                .collect()
        };
        let before = homes(&fleet);
        for one in &fleet.decode {
            let share = before.iter().filter(|home| *home == one.name()).count();
            assert!((60..=140).contains(&share), "{} has {share}", one.name());
        }
        let after = homes(&fleet.without(0, Role::Decode, "d3:1"));
        let moved = before.iter().zip(&after).filter(|(before, after)| before != after).count();
        assert_eq!(
            moved,
            before.iter().filter(|home| *home == "d3:1").count(),
            "only its own move"
        );
    }

    #[test]
    fn affinity_takes_no_instance_beyond_its_bound() {
        let weights = [1.0, 2.0, 1.0, 4.0];
        let fleet = decodes("prefix", &weights);
        let load = |one: &Instance| one.state.outstanding() as f64 / one.setup.weight;
        let mut held = Vec::new();
        for step in 0..4000u64 {
            let bits = choice::hash(&step.to_le_bytes());
            let tokens = 1 + bits % 1000;
            // Three prefixes that everybody asks for.
            let chosen = fleet
                .choose_alone(&wanted(tokens, choice::hash(&[(bits >> 40) as u8 % 3])))
                .unwrap();
            let total: u64 = fleet.decode.iter().map(|one| one.state.outstanding()).sum();
            let bound = total as f64 / weights.iter().sum::<f64>() * choice::BOUND;
            if held.len() >= 100 {
                let most = load(&chosen.instance);
                assert!(
                    most <= bound,
                    "{} has {most}, its bound is {bound}",
                    chosen.instance.name()
                );
            }
            held.push(chosen);
            if held.len() > 200 {
                held.swap_remove(bits as usize % 200);
            }
        }
    }

    #[test]
    fn only_compatible_instances_of_one_pool_are_paired() {
        let fleet = fleet(
            "[[pool]]\nname = 'a'\nprefill = [{ url = 'http://p1:1', compatibility = 'x' }]
             decode = [{ url = 'http://d1:1', compatibility = 'y' }, { url = 'http://d2:1', compatibility = 'x' }]
             [[pool]]\nname = 'b'\nprefill = ['http://p2:1']\ndecode = ['http://d3:1']",
        );
        for _ in 0..20 {
            let prefill = fleet.choose_prefill(&wanted(1, 0)).unwrap();
            let decode = fleet.choose_partner(&prefill.instance, &wanted(1, 0)).unwrap();
            let pair = (prefill.instance.name().to_owned(), decode.instance.name().to_owned());
            assert!(
                matches!((&*pair.0, &*pair.1), ("p1:1", "d2:1") | ("p2:1", "d3:1")),
                "{pair:?}"
            );
        }
        let fleet = fleet.without(0, Role::Decode, "d2:1");
        for _ in 0..20 {
            assert_eq!(fleet.choose_prefill(&wanted(1, 0)).unwrap().instance.name(), "p2:1");
        }
    }

    #[test]
    fn without_a_model_only_instances_with_a_common_one_are_paired() {
        let fleet = fleet(
            "[[pool]]\nprefill = ['http://p1:1', 'http://p2:1', 'http://p3:1']
             decode = ['http://d1:1', 'http://d2:1', 'http://d3:1']",
        );
        // The third of each have one of so many names that they share a bit with another one's.
        let models = |number: u32| -> Vec<String> {
            let range = if number == 3 { 0..99 } else { 100 * number..100 * number + 1 };
            range.map(|model| format!("model-{model}")).collect()
        };
        for (one, number) in
            fleet.prefill.iter().zip([3, 1, 2]).chain(fleet.decode.iter().zip([2, 3, 1]))
        {
            let cards: Vec<_> =
                models(number).iter().map(|id| serde_json::json!({ "id": id })).collect();
            one.state.models.learn(&serde_json::json!({ "data": cards }), &fleet.names);
        }
        for _ in 0..20 {
            let prefill = fleet.choose_prefill(&wanted(1, 0)).unwrap();
            let decode = fleet.choose_partner(&prefill.instance, &wanted(1, 0)).unwrap();
            let pair = (prefill.instance.name().to_owned(), decode.instance.name().to_owned());
            let right = [("p1:1", "d2:1"), ("p2:1", "d3:1"), ("p3:1", "d1:1")];
            assert!(right.contains(&(&*pair.0, &*pair.1)), "{pair:?}");
        }
        let fleet = fleet.without(0, Role::Decode, "d2:1").without(0, Role::Decode, "d3:1");
        for _ in 0..20 {
            assert_eq!(fleet.choose_prefill(&wanted(1, 0)).unwrap().instance.name(), "p3:1");
        }
        assert!(fleet.has_pair(None) && fleet.has_pair(Some(fleet.names.named("model-200"))));
        let fleet = fleet.without(0, Role::Prefill, "p3:1");
        assert!(!fleet.has_pair(None) && fleet.choose_prefill(&wanted(1, 0)).is_none());
    }

    #[test]
    fn whoever_failed_a_request_gets_it_again_only_if_alone() {
        let fleet = decodes("least-tokens", &[1.0; 2]);
        let avoid = [Arc::clone(&fleet.decode[0])];
        for _ in 0..10 {
            let wanted = Requirements { avoid: &avoid, ..wanted(1, 0) };
            assert_eq!(fleet.choose_alone(&wanted).unwrap().instance.name(), "d1:1");
        }
        let alone = fleet.without(0, Role::Decode, "d1:1");
        let wanted = Requirements { avoid: &avoid, ..wanted(1, 0) };
        assert_eq!(alone.choose_alone(&wanted).unwrap().instance.name(), "d0:1");
    }

    #[test]
    fn a_reread_keeps_states_and_what_came_over_the_admin_endpoint() {
        let text = "[[pool]]\ndecode = ['http://a:1', 'http://b:1']";
        let fleet = fleet(text);
        let held = fleet.choose_alone(&wanted(5, 0)).unwrap();
        let fleet = fleet.with(0, Role::Decode, InstanceSetup::new("http://c:1").unwrap());
        let setup = Setup::from_toml("[[pool]]\ndecode = ['http://b:1', 'http://a:1']").unwrap();
        let fleet = Fleet::new(&setup, Some(&fleet));
        let names: Vec<&str> = fleet.decode.iter().map(|one| one.name()).collect();
        assert_eq!(names, ["b:1", "a:1", "c:1"]);
        let same = fleet.decode.iter().find(|one| one.name() == held.instance.name()).unwrap();
        assert_eq!(same.state.outstanding(), 5);
    }

    #[test]
    fn draining_and_closed_instances_get_nothing() {
        let fleet = decodes("least-tokens", &[1.0; 2]);
        let drained =
            InstanceSetup { draining: true, ..InstanceSetup::new("http://d0:1").unwrap() };
        let fleet = fleet.with(0, Role::Decode, drained);
        for _ in 0..5 {
            assert_eq!(fleet.choose_alone(&wanted(1, 0)).unwrap().instance.name(), "d1:1");
        }
        let last = fleet.decode.iter().find(|one| one.name() == "d1:1").unwrap();
        assert!(fleet.is_last(last) && fleet.is_ready());
        (0..2).for_each(|_| _ = last.state.unhealthy("x", &Default::default(), false));
        assert!(fleet.choose_alone(&wanted(1, 0)).is_none() && !fleet.is_ready());
    }

    #[test]
    fn whoever_was_slow_is_asked_again_once_nobody_else_is_left() {
        let fleet = fleet(
            "[health]\neject_after = 1\n[[pool]]\nprefill = ['http://p0:1', 'http://p1:1']
             decode = ['http://d0:1', 'http://d1:1']",
        );
        let health = Health { eject_after: 1, ..Health::default() };
        let failed =
            |one: &Instance, reason| fleet.failed(one, reason, "x", &health, Instant::now());
        let pair = || {
            let prefill = fleet.choose_prefill(&wanted(1, 0))?;
            let decode = fleet.choose_partner(&prefill.instance, &wanted(1, 0))?;
            Some([prefill.instance.name().to_owned(), decode.instance.name().to_owned()])
        };
        for (role, others) in [(Role::Prefill, &fleet.decode), (Role::Decode, &fleet.prefill)] {
            let [slow, last] = fleet.of(role) else { panic!("two instances") };
            assert!(failed(slow, Reason::Slow));
            for _ in 0..5 {
                assert_ne!(
                    fleet.choose_prefill(&wanted(1, 0)).unwrap().instance.name(),
                    slow.name()
                );
                let decode = fleet.choose_partner(&others[0], &wanted(1, 0)).unwrap();
                assert_ne!(decode.instance.name(), slow.name(), "another one is there");
            }
            // The last one says that it is ill.
            (0..2).for_each(|_| _ = fleet.unhealthy(last, "500", &health, false));
            for _ in 0..5 {
                let pair = pair().expect("a slow one is better than none");
                assert!(pair.contains(&slow.name().to_owned()), "{pair:?}");
            }
            assert!(fleet.is_ready() && !slow.state.is_sound());
            assert!(!failed(slow, Reason::Slow), "it stays as it is");
            assert!(pair().is_some());
            assert!(failed(slow, Reason::Refused) && pair().is_none() && !fleet.is_ready());
            slow.state.succeeded();
            last.state.healthy();
        }
    }

    #[test]
    fn two_that_fail_at_once_are_not_both_left_out() {
        let fleet = decodes("least-tokens", &[1.0; 2]);
        let health = Health { eject_after: 1, down_after: 1, ..Health::default() };
        let begin = std::sync::Barrier::new(2);
        // To keep them takes a while, in which the other one may look who is left.
        let words = "late ".repeat(1 << 20);
        for round in 0..40 {
            std::thread::scope(|scope| {
                for one in &fleet.decode {
                    let (fleet, health, begin, words) = (&fleet, &health, &begin, &words);
                    scope.spawn(move || {
                        begin.wait();
                        match round % 2 {
                            0 => fleet.failed(one, Reason::Slow, words, health, Instant::now()),
                            _ => fleet.unhealthy(one, words, health, true),
                        }
                    });
                }
            });
            let sound = fleet.decode.iter().filter(|one| one.state.is_sound()).count();
            assert_eq!(sound, 1, "round {round}");
            fleet.decode.iter().for_each(|one| {
                one.state.healthy();
                one.state.succeeded();
            });
        }
    }

    /// The bar is 5 us; this only says that it is not off by orders of magnitude on a busy machine.
    #[test]
    fn a_choice_among_256_is_quick() {
        for choice in ["least-tokens", "round-robin", "prefix"] {
            let fleet = decodes(choice, &[1.0; 256]);
            let started = Instant::now();
            for prefix in 0..1000 {
                fleet.choose_alone(&wanted(1, prefix)).unwrap();
            }
            assert!(
                started.elapsed().as_millis() < 1000,
                "{choice}: {:?} for 1000",
                started.elapsed()
            );
        }
    }
}
