//! The blocks that an instance keeps for other instances, with their leases.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The reason why blocks are not handed over.
#[derive(Debug, PartialEq)]
pub(crate) enum Refusal {
    /// No blocks are kept under this name: they were read, their lease has ended, or they never
    /// existed.
    Unknown,
    /// Another engine keeps the blocks.
    OtherEngine,
}

struct Kept {
    cache: u64,
    engine: String,
    until: Instant,
}

pub(crate) struct KeptBlocks {
    lease: Duration,
    kept: HashMap<String, Kept>,
    next: u32,
    read: u64,
    expired: u64,
}

impl KeptBlocks {
    pub(crate) fn new(lease: Duration) -> Self {
        KeptBlocks { lease, kept: HashMap::new(), next: 1, read: 0, expired: 0 }
    }

    /// Keeps the blocks of a request until they are read or their lease ends, and returns their
    /// ids.
    pub(crate) fn keep(
        &mut self,
        name: &str,
        engine: String,
        cache: u64,
        blocks: usize,
    ) -> Vec<u32> {
        self.sweep();
        self.kept
            .insert(name.to_owned(), Kept { cache, engine, until: Instant::now() + self.lease });
        let first = self.next;
        self.next = (first + blocks as u32) % 1_000_000;
        (0..blocks as u32).map(|block| first + block).collect()
    }

    /// Hands blocks over, once.
    pub(crate) fn take(&mut self, name: &str, engine: &str) -> Result<u64, Refusal> {
        self.sweep();
        let kept = self.kept.get(name).ok_or(Refusal::Unknown)?;
        if kept.engine != engine {
            return Err(Refusal::OtherEngine);
        }
        let cache = kept.cache;
        self.kept.remove(name);
        self.read += 1;
        Ok(cache)
    }

    /// Frees blocks whose lease has ended.
    pub(crate) fn sweep(&mut self) {
        let (now, before) = (Instant::now(), self.kept.len());
        self.kept.retain(|_, kept| kept.until > now);
        self.expired += (before - self.kept.len()) as u64;
    }

    /// Returns the numbers of read, kept and expired prompts.
    pub(crate) fn counts(&self) -> (u64, u64, u64) {
        (self.read, self.kept.len() as u64, self.expired)
    }
}
