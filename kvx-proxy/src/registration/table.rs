//! The valid entries of a fleet.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::entry::{check_expiry, decode, now};
use super::refusal::Refusals;
use super::{Refusal, Registration};
use crate::etcd::{Change, KeyValue};
use crate::log::shown;
use crate::setup::{FleetAddress, FleetSecret};

/// The most registrations of a fleet.
pub(super) const MOST: usize = 4096;

/// A valid entry.
#[derive(Clone, Debug)]
pub(super) struct ValidEntry {
    value: Vec<u8>,
    created: u64,
    registration: Registration,
}

/// The valid entries by their keys.
pub(super) type Entries = BTreeMap<Vec<u8>, Arc<ValidEntry>>;

#[derive(Debug)]
pub(super) struct Table {
    fleet: FleetAddress,
    secret: Option<FleetSecret>,
    entries: Entries,
    refusals: Arc<Refusals>,
}

impl Table {
    pub(super) fn new(
        fleet: FleetAddress,
        secret: Option<FleetSecret>,
        refusals: Arc<Refusals>,
    ) -> Self {
        Table { fleet, secret, entries: Entries::new(), refusals }
    }

    /// Begins a list that replaces the table. One that is not strict keeps every valid entry that
    /// the new list does not contain.
    pub(super) fn begin(&self, strict: bool) -> Entries {
        if strict { Entries::new() } else { self.entries.clone() }
    }

    /// Adds an entry to a new list. One that is not strict may have valid entries that have expired
    /// meanwhile: their instances could not renew them.
    pub(super) fn add(&self, entries: &mut Entries, entry: KeyValue, strict: bool) {
        match self.read(entries, &entry, strict) {
            Ok(valid) => _ = entries.insert(entry.key, Arc::new(valid)),
            Err(refusal) => {
                entries.remove(&entry.key);
                // An attacker who can write to etcd must not fill the log.
                if self.refusals.add(&refusal).is_power_of_two() {
                    let key = shown(&String::from_utf8_lossy(&entry.key));
                    let why = shown(&refusal.to_string());
                    tracing::warn!("refused the registration {key}: {why}");
                }
            }
        }
    }

    fn read(
        &self,
        entries: &Entries,
        entry: &KeyValue,
        strict: bool,
    ) -> Result<ValidEntry, Refusal> {
        let known = entries.get(&entry.key).filter(|known| known.value == entry.value);
        if let Some(known) = known.filter(|_| !strict) {
            return Ok(ValidEntry { created: entry.created, ..ValidEntry::clone(known) });
        }
        let (registration, expires) =
            decode(&self.fleet, &entry.key, &entry.value, self.secret.as_ref())?;
        check_expiry(expires, now())?;
        match entries.len() >= MOST && !entries.contains_key(&entry.key) {
            true => Err(Refusal::Full),
            false => {
                Ok(ValidEntry { value: entry.value.clone(), created: entry.created, registration })
            }
        }
    }

    /// Replaces the table by a complete list.
    pub(super) fn replace(&mut self, entries: Entries) {
        self.entries = entries;
    }

    /// Applies a change. One that is not strict leaves deletions to the next strict list: they may
    /// be those of leases that instances could not renew.
    pub(super) fn apply(&mut self, change: Change, strict: bool) {
        match change {
            Change::Put(entry) => {
                let mut entries = std::mem::take(&mut self.entries);
                self.add(&mut entries, entry, true);
                self.entries = entries;
            }
            Change::Deleted(key) if strict => _ = self.entries.remove(&key),
            Change::Deleted(_) => {}
        }
    }

    /// Returns the registrations. Of those that name the same server in the same role and pool, the
    /// latest: the entry of a process that died stays until its lease ends.
    pub(super) fn registrations(&self) -> Vec<Registration> {
        let mut latest = BTreeMap::new();
        for entry in self.entries.values() {
            let one = &entry.registration;
            let place = (&one.pool, one.role, one.setup.name());
            let held = latest.entry(place).or_insert(entry);
            if held.created < entry.created {
                *held = entry;
            }
        }
        latest.into_values().map(|entry| entry.registration.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::entry::OwnEntry;
    use super::*;
    use crate::setup::Role;

    fn fleet() -> FleetAddress {
        FleetAddress::new("etcd://a:1/f").unwrap()
    }

    fn secret() -> FleetSecret {
        FleetSecret::new([1; 32])
    }

    fn table() -> (Table, Arc<Refusals>) {
        let refusals = Arc::<Refusals>::default();
        (Table::new(fleet(), Some(secret()), refusals.clone()), refusals)
    }

    fn entry(id: u64, port: u16, created: u64, expires: u64) -> KeyValue {
        let instance = format!(r#"{{"role":"decode","url":"http://a:{port}"}}"#);
        let own = OwnEntry::new(&fleet(), id, &instance, Some(&secret())).unwrap();
        KeyValue { key: own.key.clone().into(), value: own.value_until(expires).into(), created }
    }

    fn soon() -> u64 {
        now() + 100
    }

    fn ids(table: &Table) -> Vec<u64> {
        table.registrations().iter().map(|one| one.id).collect()
    }

    fn list(table: &mut Table, entries: &[KeyValue], strict: bool) {
        let mut new = table.begin(strict);
        entries.iter().for_each(|entry| table.add(&mut new, entry.clone(), strict));
        table.replace(new);
    }

    #[test]
    fn changes_and_lists_make_the_same_table() {
        let (mut table, _) = table();
        table.apply(Change::Put(entry(1, 1, 1, soon())), true);
        table.apply(Change::Put(entry(2, 2, 2, soon())), true);
        assert_eq!(ids(&table), [1, 2]);
        let key = fleet().key(Role::Decode, 1);
        table.apply(Change::Deleted(key.into()), true);
        assert_eq!(ids(&table), [2]);
        list(&mut table, &[entry(3, 3, 3, soon())], true);
        assert_eq!(ids(&table), [3]);
    }

    #[test]
    fn after_an_outage_nothing_leaves_before_instances_could_register_again() {
        let (mut table, refusals) = table();
        let old = now() - 1000;
        let mut known = entry(1, 1, 1, soon());
        table.apply(Change::Put(known.clone()), true);
        list(&mut table, &[], false);
        assert_eq!(ids(&table), [1], "etcd has lost its data");
        table.apply(Change::Deleted(known.key.clone()), false);
        assert_eq!(ids(&table), [1], "a lease ended that the instance could not renew");
        // It expires while etcd is away.
        known = entry(1, 1, 1, old);
        let held = ValidEntry {
            value: known.value.clone(),
            created: 1,
            registration: table.registrations().remove(0),
        };
        table.replace(Entries::from([(known.key.clone(), Arc::new(held))]));
        list(&mut table, &[known.clone(), entry(2, 2, 2, old)], false);
        assert_eq!(ids(&table), [1], "only entries that were valid before");
        list(&mut table, &[known], true);
        assert_eq!(ids(&table), [0; 0]);
        assert!(refusals.counts().any(|count| count == ("expired", 2)));
    }

    #[test]
    fn of_two_processes_at_an_address_the_later_one_counts() {
        let (mut table, _) = table();
        table.apply(Change::Put(entry(9, 1, 5, soon())), true);
        table.apply(Change::Put(entry(3, 1, 7, soon())), true);
        table.apply(Change::Put(entry(4, 1, 6, soon())), true);
        assert_eq!(ids(&table), [3]);
    }

    #[test]
    fn an_entry_that_becomes_invalid_leaves_and_is_counted() {
        let (mut table, refusals) = table();
        let valid = entry(1, 1, 1, soon());
        table.apply(Change::Put(valid.clone()), true);
        table.apply(Change::Put(KeyValue { value: b"{}".into(), ..valid }), true);
        assert_eq!(ids(&table), [0; 0]);
        assert_eq!(refusals.counts().map(|(_, count)| count).sum::<u64>(), 1);
        assert!(refusals.counts().any(|count| count == ("malformed", 1)));
    }

    #[test]
    fn entries_are_limited() {
        let (mut table, refusals) = table();
        let entries: Vec<_> =
            (0..=MOST).map(|at| entry(at as u64, 1 + at as u16, 1, soon())).collect();
        list(&mut table, &entries, true);
        assert_eq!(table.registrations().len(), MOST);
        table.apply(Change::Put(entries[0].clone()), true);
        assert!(refusals.counts().any(|count| count == ("full", 1)), "known entries stay");
    }
}
