//! The blocks of the pool: who holds them, and which of them hold tokens that another request may
//! begin with.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use sha2::{Digest as _, Sha256};

/// What a full block holds, and everything before it: two blocks of one hash are interchangeable.
pub(crate) type Hash = [u8; 32];

/// The hash of a block of `tokens` behind a block of hash `before`.
pub(crate) fn hash(before: Option<&Hash>, tokens: &[u32]) -> Hash {
    let mut hasher = Sha256::new();
    hasher.update(before.unwrap_or(&[0; 32]));
    for token in tokens {
        hasher.update(token.to_le_bytes());
    }
    hasher.finalize().into()
}

/// Which blocks are free, held, or remembered. It holds no bytes: those are the pool's.
#[derive(Debug)]
pub(crate) struct Blocks {
    /// How many hold each block. One that a peer may still read or write is held for that peer.
    holders: Vec<u32>,
    hashes: Vec<Option<Hash>>,
    /// Blocks by what they hold, held or not.
    known: HashMap<Hash, u32>,
    /// Nobody holds these, and nothing in them is remembered.
    empty: Vec<u32>,
    /// Nobody holds these: in the order in which they are forgotten.
    idle: BTreeMap<u64, u32>,
    idle_since: Vec<u64>,
    clock: u64,
    /// Blocks that no request ever gets again.
    lost: BTreeSet<u32>,
    remembers: bool,
}

impl Blocks {
    /// So many free blocks. `remembers`: requests share blocks that begin alike.
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
        }
    }

    /// Blocks that a request may ever have.
    pub(crate) fn usable(&self) -> usize {
        self.holders.len() - self.lost.len()
    }

    /// Blocks that nobody holds.
    pub(crate) fn free(&self) -> usize {
        self.empty.len() + self.idle.len()
    }

    /// The share of usable blocks that somebody holds.
    pub(crate) fn usage(&self) -> f64 {
        match self.usable() {
            0 => 1.0,
            usable => 1.0 - self.free() as f64 / usable as f64,
        }
    }

    /// The longest run of remembered blocks that these hashes begin with, now held by the caller
    /// too.
    pub(crate) fn find(&mut self, hashes: &[Hash]) -> Vec<u32> {
        let found: Vec<u32> =
            hashes.iter().map_while(|hash| self.known.get(hash).copied()).collect();
        for block in &found {
            self.hold(*block);
        }
        found
    }

    /// `count` blocks, those first that hold nothing of use and then those unused for the longest
    /// time; or none.
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

    /// A held block is full, and holds this.
    pub(crate) fn remember(&mut self, block: u32, hash: Hash) {
        // Of two blocks that hold the same the first is remembered.
        if self.remembers
            && self.hashes[block as usize].is_none()
            && !self.known.contains_key(&hash)
        {
            self.known.insert(hash, block);
            self.hashes[block as usize] = Some(hash);
        }
    }

    /// The block does not hold what it did.
    pub(crate) fn forget(&mut self, block: u32) {
        if let Some(hash) = self.hashes[block as usize].take() {
            self.known.remove(&hash);
        }
    }

    /// Gives a request's blocks back. Its last ones are the first to be forgotten: more requests
    /// share the first ones.
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

    /// These are never given back: something outside may still touch them, for ever.
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
    fn a_block_means_what_came_before_it_too() {
        let (one, other) = (chain(&[&[1, 2], &[3, 4]]), chain(&[&[9, 2], &[3, 4]]));
        assert_ne!(one[1], other[1]);
        assert_eq!(one, chain(&[&[1, 2], &[3, 4]]));
    }

    #[test]
    fn what_was_given_back_is_found_again_until_its_block_is_needed() {
        let mut blocks = Blocks::new(3, true);
        let hashes = chain(&[&[1], &[2]]);
        let held = blocks.take(2).unwrap();
        blocks.remember(held[0], hashes[0]);
        blocks.remember(held[1], hashes[1]);
        blocks.release(&held);
        assert_eq!(blocks.free(), 3);
        assert_eq!(blocks.find(&hashes), held);
        blocks.release(&held);
        // The empty block goes first, then the end of the chain, at last its beginning.
        let taken = blocks.take(2).unwrap();
        assert!(taken.contains(&held[1]) && !taken.contains(&held[0]));
        assert_eq!(blocks.find(&hashes), [held[0]]);
        assert_eq!(blocks.take(1), None, "all are held");
    }

    #[test]
    fn a_shared_block_is_free_when_its_last_holder_has_gone() {
        let mut blocks = Blocks::new(1, true);
        let hashes = chain(&[&[1]]);
        let held = blocks.take(1).unwrap();
        blocks.remember(held[0], hashes[0]);
        assert_eq!(blocks.find(&hashes), held);
        blocks.release(&held);
        assert_eq!(blocks.take(1), None);
        blocks.release(&held);
        assert_eq!(blocks.take(1), Some(held));
    }

    #[test]
    fn lost_blocks_are_never_free_again_and_nothing_is_found_in_them() {
        let mut blocks = Blocks::new(2, true);
        let hashes = chain(&[&[1]]);
        let held = blocks.take(1).unwrap();
        blocks.remember(held[0], hashes[0]);
        blocks.lose(&held);
        assert_eq!((blocks.usable(), blocks.free()), (1, 1));
        assert!(blocks.find(&hashes).is_empty());
    }

    #[test]
    fn without_the_cache_nothing_is_found() {
        let mut blocks = Blocks::new(1, false);
        let hashes = chain(&[&[1]]);
        let held = blocks.take(1).unwrap();
        blocks.remember(held[0], hashes[0]);
        assert!(blocks.find(&hashes).is_empty());
    }
}
