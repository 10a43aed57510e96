//! The regions that a peer may use, as the owner and as the importer record them.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::hash::Hash;

use kvx_core::backend::RegionKey;
use kvx_core::{Error, ErrorKind, RegionId, Result};

use super::errors::{malformed, revoked};

/// The number of revoked regions that the table remembers; older ones count as unregistered.
const REMEMBERED: usize = 4096;

/// Local regions that peers may request. Ids are never reused.
#[derive(Debug)]
pub struct RegionTable<R> {
    open: HashMap<RegionId, (RegionKey, R)>,
    revoked: HashSet<RegionId>,
    /// The revoked ids, the oldest first.
    order: VecDeque<RegionId>,
}

impl<R> Default for RegionTable<R> {
    fn default() -> Self {
        RegionTable { open: HashMap::new(), revoked: HashSet::new(), order: VecDeque::new() }
    }
}

impl<R> RegionTable<R> {
    /// Adds a region, for peers that know `key`.
    pub fn open(&mut self, id: RegionId, key: RegionKey, region: R) {
        self.open.insert(id, (key, region));
    }

    /// Revokes a region: no peer can obtain it any more. Returns `None` if it was already revoked.
    pub fn revoke(&mut self, id: RegionId) -> Option<R> {
        if self.revoked.insert(id) {
            self.order.push_back(id);
        }
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.revoked.remove(&oldest);
        }
        self.open.remove(&id).map(|(_, region)| region)
    }

    /// Returns the region with this id.
    pub fn get(&self, id: RegionId) -> Option<&R> {
        self.open.get(&id).map(|(_, region)| region)
    }

    /// Returns the region if `shown` is its key.
    ///
    /// # Errors
    /// `Unregistered`, `WrongKey` or `Revoked`.
    pub fn check(&self, id: RegionId, shown: &RegionKey) -> Result<&R> {
        match self.open.get(&id) {
            Some((key, region)) if key.matches(shown) => Ok(region),
            Some(_) => Err(ErrorKind::WrongKey.because(format!(
                "the key for region {id} is wrong: fetch the peer's metadata again"
            ))),
            None if self.revoked.contains(&id) => Err(revoked(id)),
            None => Err(ErrorKind::Unregistered.because(format!(
                "region {id} is not registered with this agent: fetch the peer's metadata again"
            ))),
        }
    }

    /// Iterates over the regions.
    pub fn iter(&self) -> impl Iterator<Item = &R> {
        self.open.values().map(|(_, region)| region)
    }

    /// Removes a region, as if it had never been added.
    pub fn take(&mut self, id: RegionId) -> Option<R> {
        self.open.remove(&id).map(|(_, region)| region)
    }

    /// Removes all regions and returns them.
    pub fn drain(&mut self) -> Vec<R> {
        self.open.drain().map(|(_, (_, region))| region).collect()
    }
}

/// Local regions that a peer was granted and has not released.
#[derive(Debug, Default)]
pub struct GrantedRegions(HashSet<RegionId>);

impl GrantedRegions {
    /// Grants a region. Returns false if the peer already holds it.
    pub fn grant(&mut self, id: RegionId) -> bool {
        self.0.insert(id)
    }

    /// Records that the peer has released a region.
    ///
    /// # Errors
    /// `Malformed` if the peer does not hold it.
    pub fn release(&mut self, id: RegionId) -> Result<()> {
        if self.0.remove(&id) {
            Ok(())
        } else {
            Err(malformed(format_args!("region {id} was not granted")))
        }
    }

    /// Returns true if the peer holds this region.
    pub fn holds(&self, id: RegionId) -> bool {
        self.0.contains(&id)
    }

    /// Returns true if the peer holds no region.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates over the regions that the peer holds.
    pub fn iter(&self) -> impl Iterator<Item = RegionId> {
        self.0.iter().copied()
    }

    /// Records that the peer certainly holds no region any more.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

struct Recall<P, R> {
    id: RegionId,
    holders: HashSet<P>,
    what: R,
}

/// Revocations that wait until peers release a region. `P` identifies a peer, `R` is the value that
/// the end of the revocation returns.
pub struct Recalls<P, R>(Vec<Recall<P, R>>);

impl<P, R> Default for Recalls<P, R> {
    fn default() -> Self {
        Recalls(Vec::new())
    }
}

impl<P: Hash + Eq, R> Recalls<P, R> {
    /// Begins a revocation of a region that these peers hold.
    pub fn begin(&mut self, id: RegionId, holders: HashSet<P>, what: R) {
        self.0.push(Recall { id, holders, what });
    }

    /// Records that a peer has released one region, or all of them.
    pub fn release(&mut self, peer: &P, id: Option<RegionId>) {
        for recall in self.0.iter_mut().filter(|recall| id.is_none_or(|id| recall.id == id)) {
            recall.holders.remove(peer);
        }
    }

    /// Removes and returns the revocations that no longer wait for a peer, except of regions that
    /// are still `in_use` at this end.
    pub fn take_done(&mut self, in_use: impl Fn(RegionId) -> bool) -> Vec<R> {
        let done = self.0.extract_if(.., |recall| recall.holders.is_empty() && !in_use(recall.id));
        done.map(|recall| recall.what).collect()
    }

    /// Removes and returns the revocations of these regions, whose ends will never be known.
    pub fn abandon(&mut self, which: impl Fn(RegionId) -> bool) -> Vec<R> {
        self.0.extract_if(.., |recall| which(recall.id)).map(|recall| recall.what).collect()
    }
}

/// The state of a region that this end requested.
#[derive(Debug)]
pub enum ImportState<W, H> {
    /// The owner has not answered.
    Pending(W),
    /// The owner granted the region.
    Granted(H),
    /// The owner denied or revoked the region.
    Refused(Error),
}

/// A peer's regions, by import number. Every transfer looks them up.
#[derive(Debug)]
pub struct ImportedRegions<W, H> {
    by_number: BTreeMap<u64, ImportState<W, H>>,
    wanted: usize,
}

impl<W, H> Default for ImportedRegions<W, H> {
    fn default() -> Self {
        ImportedRegions { by_number: BTreeMap::new(), wanted: 0 }
    }
}

impl<W, H> ImportedRegions<W, H> {
    /// Records that this end requested the region from its owner.
    pub fn want(&mut self, import: u64, what: W) {
        self.by_number.insert(import, ImportState::Pending(what));
        self.wanted += 1;
    }

    /// Takes the value of an import that the owner has answered;
    /// [`settle`](ImportedRegions::settle) must follow.
    ///
    /// # Errors
    ///
    /// `Malformed` if this end did not request it.
    pub fn take_answer(&mut self, import: u64) -> Result<W> {
        match self.by_number.remove(&import) {
            Some(ImportState::Pending(what)) => {
                self.wanted -= 1;
                Ok(what)
            }
            _ => Err(malformed("an answer for a region that was not requested")),
        }
    }

    /// Records the owner's answer.
    pub fn settle(&mut self, import: u64, result: Result<H>) {
        self.by_number
            .insert(import, result.map_or_else(ImportState::Refused, ImportState::Granted));
    }

    /// Returns the state of an import, or `None` if it was not requested while this link was up.
    pub fn get(&self, import: u64) -> Option<&ImportState<W, H>> {
        self.by_number.get(&import)
    }

    /// Iterates over the granted regions.
    pub fn held(&self) -> impl Iterator<Item = &H> {
        self.by_number.values().filter_map(|imported| match imported {
            ImportState::Granted(held) => Some(held),
            ImportState::Pending(_) | ImportState::Refused(_) => None,
        })
    }

    /// Marks regions that the owner revokes as refused.
    pub fn recall(&mut self, which: impl Fn(&H) -> bool, why: &Error) {
        for imported in self.by_number.values_mut() {
            if matches!(imported, ImportState::Granted(held) if which(held)) {
                *imported = ImportState::Refused(why.clone());
            }
        }
    }

    /// Returns true if the owner owes an answer.
    pub fn awaits_answer(&self) -> bool {
        self.wanted > 0
    }

    /// Removes all imports when the link has ended.
    pub fn clear(&mut self) {
        (self.wanted, self.by_number) = (0, BTreeMap::new());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: RegionKey = RegionKey([8; 16]);

    #[test]
    fn a_region_needs_its_key_and_ends_with_its_revocation() {
        let (mut table, other) = (RegionTable::default(), RegionKey([0; 16]));
        let (one, two) = (RegionId(1), RegionId(2));
        table.open(one, KEY, "memory");
        let check = |table: &RegionTable<_>, id, key| {
            table.check(id, key).copied().map_err(|why| why.kind())
        };
        assert_eq!(check(&table, one, &KEY), Ok("memory"));
        assert_eq!(check(&table, one, &other), Err(ErrorKind::WrongKey));
        assert_eq!(check(&table, two, &KEY), Err(ErrorKind::Unregistered));
        assert_eq!((table.revoke(one), table.revoke(one)), (Some("memory"), None));
        assert_eq!(check(&table, one, &KEY), Err(ErrorKind::Revoked));
        assert!(table.take(one).is_none() && table.get(one).is_none() && table.drain().is_empty());
        table.open(two, KEY, "more");
        assert_eq!((table.iter().count(), table.drain()), (1, vec!["more"]));
        assert_eq!(check(&table, one, &KEY), Err(ErrorKind::Revoked), "it stays known");
        for id in 0..2 * REMEMBERED as u64 {
            table.revoke(RegionId(100 + id));
            assert!(table.order.len() <= REMEMBERED && table.revoked.len() == table.order.len());
        }
        assert_eq!(
            check(&table, one, &KEY),
            Err(ErrorKind::Unregistered),
            "the table remembers only the newest"
        );
    }

    #[test]
    fn a_revocation_ends_when_every_holder_and_this_end_have_released_the_region() {
        let (mut recalls, id) = (Recalls::default(), RegionId(1));
        recalls.begin(id, HashSet::from(["a", "b"]), "first");
        recalls.begin(RegionId(2), HashSet::from(["a"]), "second");
        recalls.release(&"a", Some(id));
        assert!(recalls.take_done(|_| false).is_empty());
        recalls.release(&"a", None);
        assert_eq!(recalls.take_done(|_| false), ["second"]);
        recalls.release(&"b", Some(id));
        assert!(recalls.take_done(|used| used == id).is_empty());
        assert_eq!(recalls.take_done(|_| false), ["first"]);
        recalls.begin(id, HashSet::from(["c"]), "third");
        assert!(recalls.abandon(|given_up| given_up != id).is_empty());
        assert_eq!(recalls.abandon(|given_up| given_up == id), ["third"]);
    }

    #[test]
    fn a_release_without_a_grant_and_an_answer_without_a_request_are_malformed() {
        let (mut granted, id) = (GrantedRegions::default(), RegionId(1));
        assert!(granted.grant(id) && !granted.grant(id) && granted.holds(id));
        assert!(granted.release(id).is_ok());
        assert_eq!(granted.release(id).unwrap_err().kind(), ErrorKind::Malformed);

        let mut imports = ImportedRegions::default();
        imports.want(7, "region");
        assert!(imports.awaits_answer() && imports.take_answer(8).is_err());
        assert_eq!(imports.take_answer(7).unwrap(), "region");
        imports.settle(7, Ok(id));
        assert!(!imports.awaits_answer() && imports.take_answer(7).is_err());
    }

    #[test]
    fn a_recalled_region_is_refused_with_the_reason() {
        let (mut imports, id) = (ImportedRegions::<(), _>::default(), RegionId(1));
        for import in [1, 2] {
            imports.want(import, ());
            imports.take_answer(import).unwrap();
            imports.settle(import, Ok(RegionId(import)));
        }
        imports.recall(|held| *held == id, &revoked(id));
        assert!(
            matches!(imports.get(1), Some(ImportState::Refused(why)) if why.kind() == ErrorKind::Revoked)
        );
        assert!(matches!(imports.get(2), Some(ImportState::Granted(_))));
        assert_eq!(imports.held().count(), 1);
        imports.clear();
        assert!(imports.get(2).is_none());
    }
}
