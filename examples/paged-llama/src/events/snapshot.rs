//! The blocks that are cached, for readers that have missed their batches.

use std::collections::HashMap;

use kvx_vllm::events::{BlockHash, CacheEvent, MAX_BATCH};
use tokio::sync::OwnedSemaphorePermit;

use super::log::{NumberedBatch, encode};

/// The most bytes and events of a batch of a snapshot: readers accept twice as many.
const MAX_BYTES: usize = MAX_BATCH / 2;
const MAX_EVENTS: usize = 32 << 10;
/// The encoded bytes of an event without tokens and hashes, of a hash, and of a token; at most.
const EVENT_BYTES: usize = 256;
const HASH_BYTES: usize = 9;
const TOKEN_BYTES: usize = 5;

/// The blocks that are cached after a batch.
#[derive(Debug, Default)]
pub(super) struct CachedBlocks(HashMap<BlockHash, CachedBlock>);

#[derive(Debug)]
struct CachedBlock {
    parent: Option<BlockHash>,
    tokens: Box<[u32]>,
}

/// Batches that lead an empty index to the blocks that were cached at some time.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) batches: Vec<NumberedBatch>,
    /// The number of the batch after it.
    pub(super) next: u64,
    /// Bounds the snapshots in memory.
    _place: OwnedSemaphorePermit,
}

impl CachedBlocks {
    /// Applies an event.
    pub(super) fn apply(&mut self, event: &CacheEvent) {
        match event {
            CacheEvent::Stored(stored) => {
                let mut parent = stored.parent;
                for (hash, tokens) in stored.plain_blocks().into_iter().flatten() {
                    self.0.insert(hash, CachedBlock { parent, tokens: tokens.into() });
                    parent = Some(hash);
                }
            }
            CacheEvent::Removed(removed) => {
                removed.hashes.iter().for_each(|hash| _ = self.0.remove(hash));
            }
            CacheEvent::Cleared => self.0.clear(),
        }
    }

    /// Encodes the blocks, before the batch `next`. The batches have the latest numbers, and the
    /// first one begins with the removal of all blocks.
    pub(super) fn snapshot(&self, rank: u32, next: u64, place: OwnedSemaphorePermit) -> Snapshot {
        let batches = self.batches();
        let first = next.saturating_sub(batches.len() as u64);
        let encoded = batches.into_iter().map(|events| encode(rank, events).0);
        Snapshot { batches: (first..).zip(encoded).collect(), next, _place: place }
    }

    fn batches(&self) -> Vec<Vec<CacheEvent>> {
        let mut children: HashMap<Option<BlockHash>, Vec<BlockHash>> = HashMap::new();
        for (hash, block) in &self.0 {
            children.entry(block.parent).or_default().push(*hash);
        }
        let mut batches = vec![vec![CacheEvent::Cleared]];
        let mut bytes = EVENT_BYTES;
        // A block follows its parent, because readers know it by that. Blocks whose parent is not
        // cached are left out.
        let mut pending: Vec<BlockHash> = children.remove(&None).unwrap_or_default();
        while let Some(hash) = pending.pop() {
            let Some(block) = self.0.get(&hash) else { continue };
            bytes += EVENT_BYTES + HASH_BYTES + TOKEN_BYTES * block.tokens.len();
            let is_full = batches.last().is_some_and(|events| events.len() >= MAX_EVENTS);
            if bytes > MAX_BYTES || is_full {
                batches.push(Vec::new());
                bytes = EVENT_BYTES + HASH_BYTES + TOKEN_BYTES * block.tokens.len();
            }
            if let Some(events) = batches.last_mut() {
                super::add_stored(events, hash, block.parent, &block.tokens);
            }
            pending.extend(children.remove(&Some(hash)).unwrap_or_default());
        }
        batches
    }
}

#[cfg(test)]
mod tests {
    use kvx_vllm::events::{BlockStored, EventBatch};

    use super::*;

    #[test]
    fn a_snapshot_of_many_blocks_is_readable() {
        // Chains of 4 blocks, and more blocks than a batch may have events.
        let mut cached = CachedBlocks::default();
        let blocks = 80_000;
        for chain in 0..blocks / 4 {
            let hashes: Vec<_> = (0..4).map(|at| BlockHash(4 * chain + at)).collect();
            cached.apply(&CacheEvent::Stored(Box::new(BlockStored {
                hashes,
                tokens: (0..64).map(|at| u32::MAX - at).collect(),
                block_size: 16,
                ..BlockStored::default()
            })));
        }
        let places = std::sync::Arc::new(tokio::sync::Semaphore::new(1));
        let batches = cached.snapshot(0, 1000, places.try_acquire_owned().unwrap()).batches;
        assert!(batches.len() > 1);
        assert_eq!(batches.last().unwrap().0, 999);
        let mut seen = std::collections::HashSet::new();
        for (number, (_, batch)) in batches.iter().enumerate() {
            let events = EventBatch::decode(batch).unwrap().events;
            assert_eq!(events[0] == CacheEvent::Cleared, number == 0);
            for event in events {
                let CacheEvent::Stored(stored) = event else { continue };
                assert!(stored.parent.is_none_or(|parent| seen.contains(&parent)));
                assert!(stored.plain_blocks().is_some());
                seen.extend(stored.hashes);
            }
        }
        assert_eq!(seen.len() as u64, blocks);
    }
}
