//! Which regions a peer may use: what its owner keeps of that, and what its reader does.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::hash::Hash;

use kvx_core::{Error, ErrorKind, RegionId, RegionKey, Result};

use super::errors::{malformed, revoked};

/// The most regions that are known as revoked; of older ones it is said that there is no such
/// region.
const REMEMBERED: usize = 4096;

/// Regions of ours that peers may ask for. Numbers are never used twice.
#[derive(Debug)]
pub struct RegionTable<R> {
    open: HashMap<RegionId, (RegionKey, R)>,
    revoked: HashSet<RegionId>,
    /// The same, the oldest first.
    order: VecDeque<RegionId>,
}

impl<R> Default for RegionTable<R> {
    fn default() -> Self {
        RegionTable { open: HashMap::new(), revoked: HashSet::new(), order: VecDeque::new() }
    }
}

impl<R> RegionTable<R> {
    /// Peers that show `key` may use it from now on.
    pub fn open(&mut self, id: RegionId, key: RegionKey, region: R) {
        self.open.insert(id, (key, region));
    }

    /// Nobody is granted it from now on. `None`: it was revoked before.
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

    /// What is open under this number.
    pub fn get(&self, id: RegionId) -> Option<&R> {
        self.open.get(&id).map(|(_, region)| region)
    }

    /// The region, if who shows this key may use it. Errors: `Unregistered`, `WrongKey`, `Revoked`.
    pub fn check(&self, id: RegionId, shown: &RegionKey) -> Result<&R> {
        match self.open.get(&id) {
            Some((key, region)) if key.matches(shown) => Ok(region),
            Some(_) => Err(Error::new(
                ErrorKind::WrongKey,
                format!(
                    "the key shown for region {id} is not its key: take the peer's metadata again"
                ),
            )),
            None if self.revoked.contains(&id) => Err(revoked(id)),
            None => Err(Error::new(
                ErrorKind::Unregistered,
                format!(
                    "region {id} is not registered with this agent: take the peer's metadata again"
                ),
            )),
        }
    }

    /// All that are open.
    pub fn iter(&self) -> impl Iterator<Item = &R> {
        self.open.values().map(|(_, region)| region)
    }

    /// Takes one out that is open, as if it had never been.
    pub fn take(&mut self, id: RegionId) -> Option<R> {
        self.open.remove(&id).map(|(_, region)| region)
    }

    /// Takes out all that are open.
    pub fn drain(&mut self) -> Vec<R> {
        self.open.drain().map(|(_, (_, region))| region).collect()
    }
}

/// Regions of ours that a peer was granted, and has not released.
#[derive(Debug, Default)]
pub struct GrantedRegions(HashSet<RegionId>);

impl GrantedRegions {
    /// The peer may use it. False: it might before.
    pub fn grant(&mut self, id: RegionId) -> bool {
        self.0.insert(id)
    }

    /// The peer says that it has let go. Errors: `Malformed` for what it did not hold.
    pub fn release(&mut self, id: RegionId) -> Result<()> {
        if self.0.remove(&id) {
            Ok(())
        } else {
            Err(malformed(format_args!("region {id} was not granted")))
        }
    }

    /// Whether it holds this one.
    pub fn holds(&self, id: RegionId) -> bool {
        self.0.contains(&id)
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All that it holds.
    pub fn iter(&self) -> impl Iterator<Item = RegionId> {
        self.0.iter().copied()
    }

    /// It is certain that it holds none.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

struct Recall<P, R> {
    id: RegionId,
    holders: HashSet<P>,
    what: R,
}

/// Revocations that wait for peers to let go. `P` names a peer, `R` is what ends with the
/// revocation.
pub struct Recalls<P, R>(Vec<Recall<P, R>>);

impl<P, R> Default for Recalls<P, R> {
    fn default() -> Self {
        Recalls(Vec::new())
    }
}

impl<P: Hash + Eq, R> Recalls<P, R> {
    /// These hold it.
    pub fn begin(&mut self, id: RegionId, holders: HashSet<P>, what: R) {
        self.0.push(Recall { id, holders, what });
    }

    /// A peer has let go of one region, or of all.
    pub fn release(&mut self, peer: &P, id: Option<RegionId>) {
        for recall in self.0.iter_mut().filter(|recall| id.is_none_or(|id| recall.id == id)) {
            recall.holders.remove(peer);
        }
    }

    /// Takes out those that nobody holds up any more; `in_use`: this end itself still works on the
    /// region.
    pub fn take_done(&mut self, in_use: impl Fn(RegionId) -> bool) -> Vec<R> {
        let done = self.0.extract_if(.., |recall| recall.holders.is_empty() && !in_use(recall.id));
        done.map(|recall| recall.what).collect()
    }

    /// Takes out those of these regions, whose ends will never be known.
    pub fn abandon(&mut self, which: impl Fn(RegionId) -> bool) -> Vec<R> {
        self.0.extract_if(.., |recall| which(recall.id)).map(|recall| recall.what).collect()
    }
}

/// What became of a region that a reader asked for.
#[derive(Debug)]
pub enum ImportState<W, H> {
    /// The owner has not answered.
    Pending(W),
    /// It was granted.
    Granted(H),
    /// It was denied, or recalled.
    Refused(Error),
}

/// Regions of a peer, by the numbers under which its owner was asked for them: looked up for each
/// transfer.
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
    /// The owner is asked.
    pub fn want(&mut self, import: u64, what: W) {
        self.by_number.insert(import, ImportState::Pending(what));
        self.wanted += 1;
    }

    /// The owner has answered; [`settle`](ImportedRegions::settle) follows. Errors: `Malformed` for
    /// what it was not asked.
    pub fn take_answer(&mut self, import: u64) -> Result<W> {
        match self.by_number.remove(&import) {
            Some(ImportState::Pending(what)) => {
                self.wanted -= 1;
                Ok(what)
            }
            _ => Err(malformed("an answer about a region that was not asked for")),
        }
    }

    /// Notes what became of it.
    pub fn settle(&mut self, import: u64, result: Result<H>) {
        self.by_number
            .insert(import, result.map_or_else(ImportState::Refused, ImportState::Granted));
    }

    /// What became of it. `None`: nobody asked while this link was up.
    pub fn get(&self, import: u64) -> Option<&ImportState<W, H>> {
        self.by_number.get(&import)
    }

    /// All that are held.
    pub fn held(&self) -> impl Iterator<Item = &H> {
        self.by_number.values().filter_map(|imported| match imported {
            ImportState::Granted(held) => Some(held),
            ImportState::Pending(_) | ImportState::Refused(_) => None,
        })
    }

    /// The owner takes regions back.
    pub fn recall(&mut self, which: impl Fn(&H) -> bool, why: &Error) {
        for imported in self.by_number.values_mut() {
            if matches!(imported, ImportState::Granted(held) if which(held)) {
                *imported = ImportState::Refused(why.clone());
            }
        }
    }

    /// Whether an answer is awaited.
    pub fn awaits_answer(&self) -> bool {
        self.wanted > 0
    }

    /// The link has ended.
    pub fn clear(&mut self) {
        (self.wanted, self.by_number) = (0, BTreeMap::new());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: RegionKey = RegionKey([8; 16]);

    #[test]
    fn only_who_shows_the_key_may_use_a_region_until_it_is_revoked() {
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
        assert_eq!(check(&table, one, &KEY), Err(ErrorKind::Unregistered), "so many are not kept");
    }

    #[test]
    fn a_revocation_ends_when_every_holder_and_this_end_have_let_go() {
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
    fn nobody_releases_what_was_not_granted_or_answers_what_was_not_asked() {
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
