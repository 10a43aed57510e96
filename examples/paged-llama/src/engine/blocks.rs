//! The blocks of the pool: how many holders each has, and which contain tokens that another request
//! may begin with.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use sha2::{Digest as _, Sha256};

use crate::events::CacheChanges;

/// A hash of a full block's tokens and of all tokens before them. Blocks with the same hash are
/// interchangeable.
pub(crate) type Hash = [u8; 32];

/// Returns the hash of a block of `tokens` that follows a block with hash `before`.
pub(crate) fn hash(before: Option<&Hash>, tokens: &[u32]) -> Hash {
    let mut hasher = Sha256::new();
    hasher.update(before.unwrap_or(&[0; 32]));
    for token in tokens {
        hasher.update(token.to_le_bytes());
    }
    hasher.finalize().into()
}

/// The state of each block: free, held, or cached. It contains no bytes; those are in the pool.
#[derive(Debug)]
pub(crate) struct Blocks {
    /// The number of holders of each block. A block that a peer may still read or write counts as
    /// held.
    holders: Vec<u32>,
    hashes: Vec<Option<Hash>>,
    /// Cached blocks by hash, held or free.
    known: HashMap<Hash, u32>,
    /// Free blocks without cached tokens.
    empty: Vec<u32>,
    /// Free blocks with cached tokens, in the order in which they are evicted.
    idle: BTreeMap<u64, u32>,
    idle_since: Vec<u64>,
    clock: u64,
    /// Blocks that no request may use again.
    lost: BTreeSet<u32>,
    remembers: bool,
    /// The changes to publish, if they are published.
    changes: Option<CacheChanges>,
}

impl Blocks {
    /// Returns `count` free blocks. With `remembers`, requests share blocks with the same prefix.
    pub(crate) fn new(count: usize, remembers: bool) -> Self {
        Blocks {
            holders: vec![0; count],
            hashes: vec![None; count],
            known: HashMap::new(),
            empty: (0..count as u32).rev().collect(),
            idle: BTreeMap::new(),
            idle_since: vec![0; count],
            clock: 0,
            lost: BTreeSet::new(),
            remembers,
            changes: None,
        }
    }

    /// Records changes of the cache, for [`changes`](Self::changes).
    pub(crate) fn record_changes(&mut self) {
        self.changes = Some(CacheChanges::default());
    }

    /// Returns the recorded changes, if they are recorded.
    pub(crate) fn changes(&mut self) -> Option<&mut CacheChanges> {
        self.changes.as_mut()
    }

    /// Returns the number of blocks that requests can use.
    pub(crate) fn usable(&self) -> usize {
        self.holders.len() - self.lost.len()
    }

    /// Returns the number of free blocks.
    pub(crate) fn free(&self) -> usize {
        self.empty.len() + self.idle.len()
    }

    /// Returns the fraction of usable blocks that are held.
    pub(crate) fn usage(&self) -> f64 {
        match self.usable() {
            0 => 1.0,
            usable => 1.0 - self.free() as f64 / usable as f64,
        }
    }

    /// Returns the longest run of cached blocks for these hashes, and holds them for the caller
    /// too.
    pub(crate) fn find(&mut self, hashes: &[Hash]) -> Vec<u32> {
        let found: Vec<u32> =
            hashes.iter().map_while(|hash| self.known.get(hash).copied()).collect();
        for block in &found {
            self.hold(*block);
        }
        found
    }

    /// Takes `count` free blocks: first those without cached tokens, then the least recently used.
    /// Returns `None` if there are too few.
    pub(crate) fn take(&mut self, count: usize) -> Option<Vec<u32>> {
        if count > self.free() {
            return None;
        }
        let mut taken = Vec::with_capacity(count);
        while taken.len() < count {
            let block = match self.empty.pop() {
                Some(block) => block,
                None => self.idle.pop_first()?.1,
            };
            self.forget(block);
            self.holders[block as usize] = 1;
            taken.push(block);
        }
        Some(taken)
    }

    /// Caches a held block that is full, under its hash. Its tokens follow the block with the hash
    /// `before`.
    pub(crate) fn remember(
        &mut self,
        block: u32,
        hash: Hash,
        before: Option<&Hash>,
        tokens: &[u32],
    ) {
        // Of two blocks with the same hash, only the first is cached.
        if self.remembers
            && self.hashes[block as usize].is_none()
            && !self.known.contains_key(&hash)
        {
            self.known.insert(hash, block);
            self.hashes[block as usize] = Some(hash);
            if let Some(changes) = &mut self.changes {
                changes.stored(&hash, before, tokens);
            }
        }
    }

    /// Removes a block from the cache.
    pub(crate) fn forget(&mut self, block: u32) {
        if let Some(hash) = self.hashes[block as usize].take() {
            self.known.remove(&hash);
            if let Some(changes) = &mut self.changes {
                changes.removed(&hash);
            }
        }
    }

    /// Releases a request's blocks. Its last blocks are evicted first, because more requests share
    /// the first ones.
    pub(crate) fn release(&mut self, blocks: &[u32]) {
        for block in blocks.iter().rev() {
            let at = *block as usize;
            self.holders[at] -= 1;
            if self.holders[at] > 0 {
                continue;
            }
            if self.hashes[at].is_some() {
                self.clock += 1;
                self.idle_since[at] = self.clock;
                self.idle.insert(self.clock, *block);
            } else {
                self.empty.push(*block);
            }
        }
    }

    /// Withdraws blocks that something outside may access forever.
    pub(crate) fn lose(&mut self, blocks: &[u32]) {
        for block in blocks {
            self.forget(*block);
        }
        self.lost.extend(blocks);
    }

    fn hold(&mut self, block: u32) {
        let at = block as usize;
        if self.holders[at] == 0 {
            self.idle.remove(&self.idle_since[at]);
        }
        self.holders[at] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(blocks: &[&[u32]]) -> Vec<Hash> {
        let mut hashes: Vec<Hash> = Vec::new();
        for tokens in blocks {
            hashes.push(hash(hashes.last(), tokens));
        }
        hashes
    }

    #[test]
    fn a_hash_covers_all_tokens_before_the_block() {
        let (one, other) = (chain(&[&[1, 2], &[3, 4]]), chain(&[&[9, 2], &[3, 4]]));
        assert_ne!(one[1], other[1]);
        assert_eq!(one, chain(&[&[1, 2], &[3, 4]]));
    }

    #[test]
    fn a_released_block_stays_cached_until_it_is_needed() {
        let mut blocks = Blocks::new(3, true);
        let hashes = chain(&[&[1], &[2]]);
        let held = blocks.take(2).unwrap();
        blocks.remember(held[0], hashes[0], None, &[1]);
        blocks.remember(held[1], hashes[1], Some(&hashes[0]), &[2]);
        blocks.release(&held);
        assert_eq!(blocks.free(), 3);
        assert_eq!(blocks.find(&hashes), held);
        blocks.release(&held);
        // The empty block is taken first, then the end of the chain, and its beginning last.
        let taken = blocks.take(2).unwrap();
        assert!(taken.contains(&held[1]) && !taken.contains(&held[0]));
        assert_eq!(blocks.find(&hashes), [held[0]]);
        assert_eq!(blocks.take(1), None, "all are held");
    }

    #[test]
    fn a_shared_block_is_free_when_its_last_holder_releases_it() {
        let mut blocks = Blocks::new(1, true);
        let hashes = chain(&[&[1]]);
        let held = blocks.take(1).unwrap();
        blocks.remember(held[0], hashes[0], None, &[1]);
        assert_eq!(blocks.find(&hashes), held);
        blocks.release(&held);
        assert_eq!(blocks.take(1), None);
        blocks.release(&held);
        assert_eq!(blocks.take(1), Some(held));
    }

    #[test]
    fn lost_blocks_are_never_free_again_and_not_cached() {
        let mut blocks = Blocks::new(2, true);
        let hashes = chain(&[&[1]]);
        let held = blocks.take(1).unwrap();
        blocks.remember(held[0], hashes[0], None, &[1]);
        blocks.lose(&held);
        assert_eq!((blocks.usable(), blocks.free()), (1, 1));
        assert!(blocks.find(&hashes).is_empty());
    }

    #[test]
    fn without_the_cache_no_block_is_found() {
        let mut blocks = Blocks::new(1, false);
        let hashes = chain(&[&[1]]);
        let held = blocks.take(1).unwrap();
        blocks.remember(held[0], hashes[0], None, &[1]);
        assert!(blocks.find(&hashes).is_empty());
    }

    #[test]
    fn changes_of_the_cache_are_recorded_in_their_order() {
        use kvx_vllm::events::{BlockHash, CacheEvent};
        let mut blocks = Blocks::new(2, true);
        blocks.record_changes();
        let hashes = chain(&[&[1], &[2]]);
        let held = blocks.take(2).unwrap();
        blocks.remember(held[0], hashes[0], None, &[1]);
        blocks.remember(held[1], hashes[1], Some(&hashes[0]), &[2]);
        blocks.remember(held[1], hashes[1], Some(&hashes[0]), &[2]);
        blocks.release(&held);
        blocks.take(2).unwrap();
        let changes = blocks.changes().unwrap().take();
        let name = |at: usize| BlockHash(u64::from_be_bytes(*hashes[at].last_chunk().unwrap()));
        let [CacheEvent::Stored(stored), CacheEvent::Removed(removed)] = &changes[..] else {
            panic!("{changes:?}")
        };
        assert_eq!((&stored.hashes[..], stored.parent), (&[name(0), name(1)][..], None));
        assert_eq!((&stored.tokens[..], stored.block_size), (&[1, 2][..], 1));
        assert_eq!(removed.hashes, [name(1), name(0)], "the end of the chain first");
        assert!(blocks.changes().unwrap().take().is_empty());
    }
}
