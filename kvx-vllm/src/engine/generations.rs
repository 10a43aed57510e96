//! Generations of blocks: how a reader detects that the owner reused a block before or during the
//! read.
//!
//! The owner of a pool keeps one generation counter per block in registered memory, behind the
//! random identifier of the pool's incarnation. Before it writes the first byte of new contents
//! into a block, it increments the pool's stamp and stores it in the block's counter. What an
//! engine publishes carries the stamp of that moment ([`BlockReference`]).
//!
//! A reader reads the blocks, then the counters. A counter above the published stamp means that the
//! owner has reused the block. A different identifier means that the pool is another one. In both
//! cases the reader discards what it has read.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// The pool and its stamp at the moment when the owner published blocks. Its text form is 32
/// hexadecimal digits, the first 16 of which are the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockReference {
    /// The identifier of the pool's incarnation: random, never 0.
    pub pool: u64,
    /// The pool's stamp when the owner published the blocks.
    pub stamp: u64,
}

impl fmt::Display for BlockReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.pool, self.stamp)
    }
}

/// A logical block that no peer could read before, and whose digest is not written yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fresh {
    /// The block's KV cache group.
    pub group: u32,
    /// The block's number.
    pub block: u32,
    /// The identifier of the block's pool.
    pub pool: u64,
    /// The block's generation counter.
    pub generation: u64,
}

/// A logical block that was computed on a device and has to be copied to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsaved {
    /// The block's KV cache group.
    pub group: u32,
    /// The block's number.
    pub block: u32,
    /// The block's position in the request. Two contents of one block differ in their position or
    /// in their request.
    pub place: u32,
}

impl Unsaved {
    /// Returns the group and the number.
    pub fn key(self) -> (u32, u32) {
        (self.group, self.block)
    }
}

/// The error for text that is not 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoReference;

impl fmt::Display for NoReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a reference to blocks is 32 hexadecimal digits")
    }
}

impl std::error::Error for NoReference {}

impl FromStr for BlockReference {
    type Err = NoReference;

    fn from_str(text: &str) -> Result<Self, NoReference> {
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(NoReference);
        }
        let word = |text: &str| u64::from_str_radix(text, 16).map_err(|_| NoReference);
        Ok(BlockReference { pool: word(&text[..16])?, stamp: word(&text[16..])? })
    }
}

impl BlockReference {
    /// Returns the blocks that are no longer the published ones, as positions in the list that was
    /// read.
    ///
    /// `pool` is the pool's identifier, and `words` are the generation counters of the blocks in
    /// the order of the list. The caller reads both after the data.
    pub fn stale(&self, pool: u64, words: &[u64]) -> Vec<u32> {
        let stale = |word: u64| pool != self.pool || word > self.stamp;
        words.iter().zip(0..).filter(|(word, _)| stale(**word)).map(|(_, at)| at).collect()
    }
}

/// The owner's side: the pool's identifier and the generation counters of its blocks. `W` is
/// registered memory for one `u64` more than there are blocks.
#[derive(Debug)]
pub struct Generations<W> {
    words: W,
    pool: u64,
    stamp: u64,
}

impl<W: AsRef<[AtomicU64]>> Generations<W> {
    /// Starts an incarnation of a pool with the identifier `random`. Sets all counters to 0.
    pub fn new(words: W, random: u64) -> Self {
        let pool = random.max(1);
        for (at, word) in words.as_ref().iter().enumerate() {
            word.store(if at == 0 { pool } else { 0 }, Ordering::Release);
        }
        Generations { words, pool, stamp: 0 }
    }

    /// Returns the number of blocks that have a counter.
    pub fn blocks(&self) -> u32 {
        u32::try_from(self.words.as_ref().len().saturating_sub(1)).unwrap_or(u32::MAX)
    }

    /// Starts a new generation of blocks that are about to get new contents. Call it before the
    /// first byte is written. Blocks that only grow, or that the engine finds again in the prefix
    /// cache, keep their generation. Ignores numbers beyond the pool.
    pub fn reuse(&mut self, blocks: impl IntoIterator<Item = u32>) {
        self.stamp += 1;
        for block in blocks {
            if let Some(word) = self.words.as_ref().get(block as usize + 1) {
                word.store(self.stamp, Ordering::Relaxed);
            }
        }
        // Readers must see the counters before any data that is written after them.
        fence(Ordering::SeqCst);
    }

    /// Returns the reference to publish with blocks whose contents are complete.
    pub fn reference(&self) -> BlockReference {
        BlockReference { pool: self.pool, stamp: self.stamp }
    }

    /// Returns the memory that was given to [`new`](Self::new).
    pub fn table(&self) -> &W {
        &self.words
    }

    /// Returns the registered memory: the pool's identifier, then the counters.
    pub fn words(&self) -> &[AtomicU64] {
        self.words.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(blocks: usize, random: u64) -> Generations<Vec<AtomicU64>> {
        Generations::new((0..=blocks).map(|_| AtomicU64::new(99)).collect(), random)
    }

    fn read(pool: &Generations<Vec<AtomicU64>>, blocks: &[usize]) -> (u64, Vec<u64>) {
        let word = |at: usize| pool.words()[at].load(Ordering::Acquire);
        (word(0), blocks.iter().map(|block| word(block + 1)).collect())
    }

    #[test]
    fn a_block_that_was_reused_after_it_was_published_is_stale() {
        let mut pool = pool(4, 7);
        pool.reuse([0, 1, 2]);
        let reference = pool.reference();
        let (life, words) = read(&pool, &[2, 0, 1]);
        assert!(reference.stale(life, &words).is_empty());
        pool.reuse([0, 3, 1000]);
        let (life, words) = read(&pool, &[2, 0, 1]);
        assert_eq!(reference.stale(life, &words), [1]);
        assert!(
            pool.reference().stale(life, &words).is_empty(),
            "a reference that is published now covers the new contents"
        );
    }

    #[test]
    fn every_block_of_another_incarnation_of_the_pool_is_stale() {
        let mut old = pool(2, 7);
        old.reuse([0, 1]);
        let (life, words) = read(&pool(2, 8), &[0, 1]);
        assert_eq!(old.reference().stale(life, &words), [0, 1]);
        assert_eq!(pool(2, 0).reference().pool, 1, "0 is the value of unwritten memory");
    }

    #[test]
    fn a_reference_is_parsed_from_its_text() {
        let reference = BlockReference { pool: 0xfeed, stamp: 12 };
        assert_eq!(reference.to_string(), "000000000000feed000000000000000c");
        assert_eq!(reference.to_string().parse(), Ok(reference));
        for bad in ["", "000000000000feed000000000000000", "+00000000000feed000000000000000c", "é"]
        {
            assert_eq!(bad.parse::<BlockReference>(), Err(NoReference));
        }
    }
}
