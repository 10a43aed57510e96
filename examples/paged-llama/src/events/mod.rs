//! Publishes what the prefix cache has, in the format of vLLM's KV cache events.
//!
//! The engine's thread appends batches to a bounded log. Each subscriber reads it at its own
//! pace, so no subscriber delays the engine: one that falls too far behind misses batches, which
//! their numbers show, and can ask for a replay.

mod log;
mod publish;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvx_vllm::events::{BlockHash, BlockRemoved, BlockStored, CacheEvent, MEDIUM_GPU};
use tokio::sync::watch;

use self::log::Log;
pub use self::publish::{EventsConfig, listen};

/// The events of one engine's prefix cache. Clones share them.
#[derive(Clone, Debug)]
pub struct CachePublisher(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    log: Mutex<Log>,
    /// The number of batches so far.
    published: watch::Sender<u64>,
    /// Snapshots are encoded one at a time.
    snapshots: tokio::sync::Mutex<()>,
}

impl CachePublisher {
    /// Creates a publisher of this data parallel rank, which keeps this many batches.
    pub fn new(rank: usize, steps: usize) -> Self {
        let log = Mutex::new(Log::new(rank as u32, steps));
        CachePublisher(Arc::new(Shared {
            log,
            published: watch::Sender::new(0),
            snapshots: tokio::sync::Mutex::default(),
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
        }
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
