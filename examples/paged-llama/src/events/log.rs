//! The latest batches, and the blocks that are cached after them.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::SystemTime;

use kvx_vllm::events::{BlockHash, CacheEvent, EventBatch, MAX_BATCH};

/// The most bytes of batches that are kept.
const MAX_BYTES: usize = 64 << 20;
/// The most bytes and events of a batch of a snapshot: readers accept twice as many.
const SNAPSHOT_BYTES: usize = MAX_BATCH / 2;
const SNAPSHOT_EVENTS: usize = 32 << 10;
/// The encoded bytes of an event without tokens and hashes, of a hash, and of a token; at most.
const EVENT_BYTES: usize = 256;
const HASH_BYTES: usize = 9;
const TOKEN_BYTES: usize = 5;

/// An encoded batch and its number.
pub(super) type NumberedBatch = (u64, Arc<[u8]>);

/// A cached block.
#[derive(Clone, Debug)]
struct CachedBlock {
    parent: Option<BlockHash>,
    tokens: Arc<[u32]>,
}

/// The blocks that are cached at some time.
#[derive(Debug)]
pub(super) struct Snapshot {
    rank: u32,
    /// The number of the batch after it.
    next: u64,
    cached: HashMap<BlockHash, CachedBlock>,
}

/// The latest batches, and the blocks that are cached after them.
#[derive(Debug)]
pub(super) struct Log {
    rank: u32,
    steps: usize,
    /// The number of the next batch.
    next: u64,
    batches: VecDeque<Arc<[u8]>>,
    bytes: usize,
    cached: HashMap<BlockHash, CachedBlock>,
}

impl Log {
    pub(super) fn new(rank: u32, steps: usize) -> Self {
        let (batches, cached) = (VecDeque::new(), HashMap::new());
        Log { rank, steps: steps.max(1), next: 0, batches, bytes: 0, cached }
    }

    /// Adds a batch. Returns the number of all batches.
    pub(super) fn append(&mut self, events: Vec<CacheEvent>) -> u64 {
        events.iter().for_each(|event| self.apply(event));
        let batch = encode(self.rank, events);
        self.bytes += batch.len();
        self.batches.push_back(batch);
        while self.batches.len() > self.steps || (self.bytes > MAX_BYTES && self.batches.len() > 1)
        {
            self.bytes -= self.batches.pop_front().map_or(0, |oldest| oldest.len());
        }
        self.next += 1;
        self.next
    }

    fn apply(&mut self, event: &CacheEvent) {
        match event {
            CacheEvent::Stored(stored) => {
                let mut parent = stored.parent;
                for (hash, tokens) in stored.plain_blocks().into_iter().flatten() {
                    self.cached.insert(hash, CachedBlock { parent, tokens: tokens.into() });
                    parent = Some(hash);
                }
            }
            CacheEvent::Removed(removed) => {
                removed.hashes.iter().for_each(|hash| _ = self.cached.remove(hash));
            }
            CacheEvent::Cleared => self.cached.clear(),
        }
    }

    /// Returns the number of the next batch.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Returns the first batch from this number on that is kept.
    pub(super) fn from(&self, number: u64) -> Option<NumberedBatch> {
        let oldest = self.next - self.batches.len() as u64;
        let number = number.max(oldest);
        let batch = self.batches.get((number - oldest) as usize)?;
        Some((number, Arc::clone(batch)))
    }

    /// Returns true if the batch with this number existed and is not kept any more.
    pub(super) fn is_lost(&self, number: u64) -> bool {
        number < self.next - self.batches.len() as u64
    }

    /// Returns the blocks that are cached now.
    pub(super) fn snapshot(&self) -> Snapshot {
        Snapshot { rank: self.rank, next: self.next, cached: self.cached.clone() }
    }
}

fn encode(rank: u32, events: Vec<CacheEvent>) -> Arc<[u8]> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let timestamp = now.map_or(0.0, |now| now.as_secs_f64());
    EventBatch { timestamp, events, rank: Some(rank), unknown: 0 }.encode().into()
}

impl Snapshot {
    /// Returns batches that lead an empty index to these blocks, with the latest numbers: the first
    /// one begins with the removal of all blocks.
    pub(super) fn batches(&self) -> Vec<NumberedBatch> {
        let mut children: HashMap<Option<BlockHash>, Vec<BlockHash>> = HashMap::new();
        for (hash, block) in &self.cached {
            children.entry(block.parent).or_default().push(*hash);
        }
        let mut batches = vec![vec![CacheEvent::Cleared]];
        let mut bytes = EVENT_BYTES;
        // A block follows its parent, because readers know it by that. Blocks whose parent is not
        // cached are left out.
        let mut pending: Vec<BlockHash> = children.remove(&None).unwrap_or_default();
        while let Some(hash) = pending.pop() {
            let Some(block) = self.cached.get(&hash) else { continue };
            bytes += EVENT_BYTES + HASH_BYTES + TOKEN_BYTES * block.tokens.len();
            let is_full = batches.last().is_some_and(|events| events.len() >= SNAPSHOT_EVENTS);
            if bytes > SNAPSHOT_BYTES || is_full {
                batches.push(Vec::new());
                bytes = EVENT_BYTES + HASH_BYTES + TOKEN_BYTES * block.tokens.len();
            }
            if let Some(events) = batches.last_mut() {
                super::add_stored(events, hash, block.parent, &block.tokens);
            }
            pending.extend(children.remove(&Some(hash)).unwrap_or_default());
        }
        let first = self.next.saturating_sub(batches.len() as u64);
        let encoded = batches.into_iter().map(|events| encode(self.rank, events));
        (first..).zip(encoded).collect()
    }
}

#[cfg(test)]
mod tests {
    use kvx_vllm::events::BlockStored;

    use super::*;

    #[test]
    fn a_snapshot_of_many_blocks_is_readable() {
        // Chains of 4 blocks, and more blocks than a batch may have events.
        let mut log = Log::new(0, 1);
        let blocks = 80_000;
        for chain in 0..blocks / 4 {
            let hashes: Vec<_> = (0..4).map(|at| BlockHash(4 * chain + at)).collect();
            log.append(vec![CacheEvent::Stored(Box::new(BlockStored {
                hashes,
                tokens: (0..64).map(|at| u32::MAX - at).collect(),
                block_size: 16,
                ..BlockStored::default()
            }))]);
        }
        let batches = log.snapshot().batches();
        assert!(batches.len() > 1);
        assert_eq!(batches.last().unwrap().0, log.next - 1);
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
