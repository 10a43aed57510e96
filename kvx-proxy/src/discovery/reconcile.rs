//! The comparison of the providers' lists with the registry, without I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Discovered;
use crate::fleet::Fleet;
use crate::fleet::instance::{Origin, Place, Role};
use crate::setup::InstanceSetup;

/// The most instances of a provider.
pub(super) const MAX_INSTANCES: usize = 4096;
/// The number of empty lists in a row that empty the fleet of an instance, at least: an empty list
/// is more often a fault than the truth.
const EMPTY_LISTS: u32 = 3;

/// The instances of a provider that the registry should have: those of its last list, and those
/// that it has not lacked for long.
#[derive(Debug, Default)]
pub(super) struct WantedInstances {
    /// See [`Provider::absences`](super::Provider::absences).
    pub(super) absences: u32,
    /// See [`Provider::every`](super::Provider::every).
    pub(super) every: Duration,
    /// The time of the last empty list that counted.
    empty_at: Option<Instant>,
    instances: BTreeMap<Place, WantedInstance>,
}

#[derive(Debug)]
pub(super) struct WantedInstance {
    identity: Arc<str>,
    setup: InstanceSetup,
    /// The number of last lists without the instance.
    missing: u32,
}

impl WantedInstances {
    /// Takes a full list. Returns the places whose instance is back after an absence.
    ///
    /// # Errors
    ///
    /// Fails, and changes nothing, if the list is too long.
    pub(super) fn observe(
        &mut self,
        list: Vec<Discovered>,
        now: Instant,
    ) -> Result<Vec<Place>, String> {
        if list.len() > MAX_INSTANCES {
            return Err(format!(
                "it lists {} instances, and a provider may have {MAX_INSTANCES}: divide them \
                 among several names",
                list.len()
            ));
        }
        // Each change may send a list, and several empty ones at once say no more than one.
        if list.is_empty() {
            if self.empty_at.is_some_and(|at| now < at + self.every / 2) {
                return Ok(Vec::new());
            }
            self.empty_at = Some(now);
        }
        let absences = if list.is_empty() { self.absences.max(EMPTY_LISTS) } else { self.absences };
        self.instances.values_mut().for_each(|one| one.missing += 1);
        let mut returned = Vec::new();
        for Discovered { identity, pool, role, setup } in list {
            let place = (pool, role, setup.name().to_owned());
            match self.instances.get(&place) {
                // An address may be used again while its former instance still ends.
                Some(known) if known.missing == 0 && setup.draining => continue,
                Some(known) if known.missing > 1 => returned.push(place.clone()),
                _ => {}
            }
            self.instances.insert(place, WantedInstance { identity, setup, missing: 0 });
        }
        self.instances.retain(|_, one| one.missing < absences);
        if self.instances.len() > MAX_INSTANCES {
            self.instances.retain(|_, one| one.missing == 0);
        }
        Ok(returned)
    }

    /// Keeps the instances of these pools and roles.
    pub(super) fn keep(&mut self, places: &BTreeSet<(String, Role)>) {
        self.instances.retain(|(pool, role, _), _| places.contains(&(pool.clone(), *role)));
    }

    /// Returns the number of instances in the last list.
    pub(super) fn present(&self) -> usize {
        self.instances.values().filter(|one| one.missing == 0).count()
    }

    /// Returns the number of instances that the last list lacked.
    pub(super) fn absent(&self) -> usize {
        self.instances.len() - self.present()
    }
}

/// The wanted instance at a place, and its provider.
type Goals<'a> = BTreeMap<&'a Place, (&'a Arc<str>, &'a WantedInstance)>;

/// Returns what all providers want. If two want the same place, the first gets it.
pub(super) fn goals<'a>(
    wanted: impl Iterator<Item = (&'a Arc<str>, &'a WantedInstances)>,
) -> Goals<'a> {
    let mut goals = Goals::new();
    for (provider, wanted) in wanted {
        for (place, one) in &wanted.instances {
            goals.entry(place).or_insert((provider, one));
        }
    }
    goals
}

/// Returns a fleet whose discovered instances are the wanted ones, or `None` if they are already.
/// Other instances stay, and keep their places.
pub(super) fn reconciled(fleet: &Fleet, goals: &Goals<'_>) -> Option<Fleet> {
    let mut missing = goals.clone();
    let mut stale = BTreeMap::new();
    let mut next = fleet.only(|one| {
        let place = one.place();
        match (&one.origin, goals.get(&place)) {
            (Origin::Discovered { provider, identity, is_changed }, goal) => {
                let is_right = goal.is_some_and(|(by, wanted)| {
                    // An instance that ends is drained, whatever an operator has set.
                    let ends = wanted.setup.draining && !one.setup.draining;
                    let has_settings = (*is_changed && !ends) || wanted.setup == one.setup;
                    *by == provider && wanted.identity == *identity && has_settings
                });
                match is_right {
                    true => _ = missing.remove(&place),
                    false => _ = stale.insert(place, Arc::clone(identity)),
                }
                is_right
            }
            _ => {
                missing.remove(&place);
                true
            }
        }
    });
    let mut added = 0;
    for (place, (provider, wanted)) in missing {
        let (pool, role, _) = place;
        // Instances of a pool that does not exist wait for it.
        let Some(pool) = fleet.pools.iter().position(|one| one.name == *pool) else { continue };
        // An instance keeps its state if its identity is the same. Another one does not inherit it.
        let same = stale.remove(place).is_some_and(|identity| identity == wanted.identity);
        let (provider, identity) = (Arc::clone(provider), Arc::clone(&wanted.identity));
        let origin = Origin::Discovered { provider, identity, is_changed: false };
        next.put(pool, *role, wanted.setup.clone(), origin, same.then_some(fleet));
        added += 1;
    }
    // Replaced instances are not stale any more.
    let removed = stale.len();
    if added + removed == 0 {
        return None;
    }
    tracing::info!(changed = added, removed, "discovery changes the fleet");
    Some(next)
}
