//! The latest batches.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::SystemTime;

use kvx_vllm::events::{CacheEvent, EventBatch};

/// The most bytes of batches that are kept.
const MAX_BYTES: usize = 64 << 20;
/// An encoded batch and its number.
pub(super) type NumberedBatch = (u64, Arc<[u8]>);

/// The latest batches.
#[derive(Debug)]
pub(super) struct Log {
    rank: u32,
    steps: usize,
    /// The number of the next batch.
    next: u64,
    batches: VecDeque<Arc<[u8]>>,
    bytes: usize,
    /// The events of all batches since they were last [taken](Log::take_events).
    events: Vec<CacheEvent>,
}

impl Log {
    pub(super) fn new(rank: u32, steps: usize) -> Self {
        let (batches, events) = (VecDeque::new(), Vec::new());
        Log { rank, steps: steps.max(1), next: 0, batches, bytes: 0, events }
    }

    /// Adds a batch. Returns the number of all batches.
    pub(super) fn append(&mut self, events: Vec<CacheEvent>) -> u64 {
        let (batch, events) = encode(self.rank, events);
        self.events.extend(events);
        self.bytes += batch.len();
        self.batches.push_back(batch);
        while self.batches.len() > self.steps || (self.bytes > MAX_BYTES && self.batches.len() > 1)
        {
            self.bytes -= self.batches.pop_front().map_or(0, |oldest| oldest.len());
        }
        self.next += 1;
        self.next
    }

    /// Removes and returns the events since the last call.
    pub(super) fn take_events(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.events)
    }

    pub(super) fn rank(&self) -> u32 {
        self.rank
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
}

/// Encodes the events of a batch, and returns them too.
pub(super) fn encode(rank: u32, events: Vec<CacheEvent>) -> (Arc<[u8]>, Vec<CacheEvent>) {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let timestamp = now.map_or(0.0, |now| now.as_secs_f64());
    let batch = EventBatch { timestamp, events, rank: Some(rank), unknown: 0 };
    (batch.encode().into(), batch.events)
}
