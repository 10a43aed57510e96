//! Publishes what the prefix cache has, in the format of vLLM's KV cache events.
//!
//! The engine's thread appends batches to a bounded log. Each subscriber reads it at its own
//! pace, so no subscriber delays the engine: one that falls too far behind misses batches, which
//! their numbers show, and can ask for a replay.

mod log;
mod publish;
mod snapshot;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::Duration;

use kvx_vllm::events::{BlockHash, BlockRemoved, BlockStored, CacheEvent, MEDIUM_GPU};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::timeout;

use self::log::Log;
pub use self::publish::{EventsConfig, listen};
use self::snapshot::{CachedBlocks, Snapshot};

/// The snapshots in memory. A reader that needs another one waits until others have sent theirs.
const SNAPSHOTS: usize = 2;
/// The longest wait for that.
const SNAPSHOT_WAIT: Duration = Duration::from_secs(10);

/// The events of one engine's prefix cache. Clones share them.
#[derive(Clone, Debug)]
pub struct CachePublisher(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    log: Mutex<Log>,
    /// The number of batches so far.
    published: watch::Sender<u64>,
    /// The blocks that are cached after the batches whose events were taken from the log. This is
    /// locked for long, but never by the engine's thread. The log is locked after this.
    cached: Mutex<CachedBlocks>,
    /// The latest snapshot, which readers share. Snapshots are encoded one at a time.
    snapshot: tokio::sync::Mutex<Weak<Snapshot>>,
    snapshot_places: Arc<Semaphore>,
}

impl CachePublisher {
    /// Creates a publisher of this data parallel rank, which keeps this many batches.
    pub fn new(rank: usize, steps: usize) -> Self {
        let log = Mutex::new(Log::new(rank as u32, steps));
        CachePublisher(Arc::new(Shared {
            log,
            published: watch::Sender::new(0),
            cached: Mutex::default(),
            snapshot: tokio::sync::Mutex::default(),
            snapshot_places: Arc::new(Semaphore::new(SNAPSHOTS)),
        }))
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.0.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes the events of a step.
    pub(crate) fn publish(&self, events: Vec<CacheEvent>) {
        if !events.is_empty() {
            let published = self.log().append(events);
            self.0.published.send_replace(published);
            // While a snapshot is encoded, the log keeps the events.
            let cached = match self.0.cached.try_lock() {
                Ok(cached) => Some(cached),
                Err(TryLockError::Poisoned(cached)) => Some(cached.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            };
            if let Some(mut cached) = cached {
                let events = self.log().take_events();
                events.iter().for_each(|event| cached.apply(event));
            }
        }
    }

    /// Returns a snapshot after which the log has all batches; `None` if that takes too long.
    async fn snapshot(&self) -> Option<Arc<Snapshot>> {
        let mut latest = self.0.snapshot.lock().await;
        if let Some(snapshot) = latest.upgrade()
            && !self.log().is_lost(snapshot.next)
        {
            return Some(snapshot);
        }
        let place = Arc::clone(&self.0.snapshot_places).acquire_owned();
        let place = timeout(SNAPSHOT_WAIT, place).await.ok()?.ok()?;
        let publisher = self.clone();
        // An error: it has panicked, which the log shows.
        let encoded = tokio::task::spawn_blocking(move || publisher.encode_snapshot(place)).await;
        let snapshot = Arc::new(encoded.ok()?);
        *latest = Arc::downgrade(&snapshot);
        Some(snapshot)
    }

    fn encode_snapshot(&self, place: OwnedSemaphorePermit) -> Snapshot {
        let mut cached = self.0.cached.lock().unwrap_or_else(PoisonError::into_inner);
        let (rank, next, events) = {
            let mut log = self.log();
            (log.rank(), log.next(), log.take_events())
        };
        events.iter().for_each(|event| cached.apply(event));
        cached.snapshot(rank, next, place)
    }
}

/// Adds a new block after `parent`, to the last event if that ends with `parent`.
fn add_stored(
    events: &mut Vec<CacheEvent>,
    hash: BlockHash,
    parent: Option<BlockHash>,
    tokens: &[u32],
) {
    if let Some(CacheEvent::Stored(last)) = events.last_mut()
        && last.hashes.last().copied() == parent
    {
        last.hashes.push(hash);
        last.tokens.extend(tokens);
        return;
    }
    let stored = BlockStored {
        hashes: vec![hash],
        parent,
        tokens: tokens.to_vec(),
        block_size: tokens.len() as u32,
        medium: medium(),
        ..BlockStored::default()
    };
    events.push(CacheEvent::Stored(Box::new(stored)));
}

/// The changes of a prefix cache since they were last published.
#[derive(Debug, Default)]
pub(crate) struct CacheChanges(Vec<CacheEvent>);

/// Returns the published form of a block's hash.
fn published(hash: &[u8; 32]) -> BlockHash {
    let [.., a, b, c, d, e, f, g, h] = *hash;
    BlockHash(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
}

/// Returns the medium of blocks, which vLLM names so on CPUs too.
fn medium() -> Option<String> {
    Some(MEDIUM_GPU.to_owned())
}

impl CacheChanges {
    /// Records a new block after `parent`.
    pub(crate) fn stored(&mut self, hash: &[u8; 32], parent: Option<&[u8; 32]>, tokens: &[u32]) {
        add_stored(&mut self.0, published(hash), parent.map(published), tokens);
    }

    /// Records that a block is not cached any more.
    pub(crate) fn removed(&mut self, hash: &[u8; 32]) {
        if let Some(CacheEvent::Removed(last)) = self.0.last_mut() {
            last.hashes.push(published(hash));
            return;
        }
        let hashes = vec![published(hash)];
        let removed = BlockRemoved { hashes, medium: medium(), ..BlockRemoved::default() };
        self.0.push(CacheEvent::Removed(Box::new(removed)));
    }

    /// Removes and returns the changes.
    pub(crate) fn take(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.0)
    }
}
