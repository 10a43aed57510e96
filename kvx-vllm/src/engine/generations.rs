//! Generations of blocks: how a reader finds out, after the data, that a block was no longer the one it was told of.
//!
//! The owner of a pool keeps one word per block beside it, in registered memory, and one word in front that names the
//! pool's life. Whenever a block is about to get new contents, the next number of the pool goes into its word,
//! *before* the first byte is written. What an engine publishes carries the number of that moment
//! ([`BlockReference`]). A reader reads the blocks, then their words: a word above the reference says that the block
//! was reused in between or before, and another first word that the pool is another one. Either way what was read is
//! refused.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// What the owner of blocks says of the moment it published them. As text 32 hexadecimal digits, of which the first
/// 16 are the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockReference {
    /// Which life of the pool: random, never 0.
    pub pool: u64,
    /// The pool's number when the blocks were published.
    pub stamp: u64,
}

impl fmt::Display for BlockReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.pool, self.stamp)
    }
}

/// A logical block that nobody could read before: its digest is still to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fresh {
    /// Its KV cache group.
    pub group: u32,
    /// Its number.
    pub block: u32,
    /// The owner's word for its pool.
    pub pool: u64,
    /// The word of the block.
    pub generation: u64,
}

/// A logical block that is computed on a device, and to be copied to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsaved {
    /// Its KV cache group.
    pub group: u32,
    /// Its number.
    pub block: u32,
    /// Its place in the request. Two contents of one block differ in this or in the request.
    pub place: u32,
}

impl Unsaved {
    /// Group and number.
    pub fn key(self) -> (u32, u32) {
        (self.group, self.block)
    }
}

/// Not 32 hexadecimal digits.
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
    /// Which of the blocks are not those that were published, as positions in the list that was read.
    ///
    /// `pool` is the pool's first word and `words` those of the blocks, in the order of the list, both read after the
    /// data.
    pub fn stale(&self, pool: u64, words: &[u64]) -> Vec<u32> {
        let stale = |word: u64| pool != self.pool || word > self.stamp;
        words.iter().zip(0..).filter(|(word, _)| stale(**word)).map(|(_, at)| at).collect()
    }
}

/// The owner's side: the words of one pool. `W` is registered memory, one word more than there are blocks.
#[derive(Debug)]
pub struct Generations<W> {
    words: W,
    pool: u64,
    stamp: u64,
}

impl<W: AsRef<[AtomicU64]>> Generations<W> {
    /// Starts the life of a pool. `random` names it; the words of all blocks become 0.
    pub fn new(words: W, random: u64) -> Self {
        let pool = random.max(1);
        for (at, word) in words.as_ref().iter().enumerate() {
            word.store(if at == 0 { pool } else { 0 }, Ordering::Release);
        }
        Generations { words, pool, stamp: 0 }
    }

    /// How many blocks have a word.
    pub fn blocks(&self) -> u32 {
        u32::try_from(self.words.as_ref().len().saturating_sub(1)).unwrap_or(u32::MAX)
    }

    /// These blocks get new contents from now on; to be called before the first byte is written. Blocks that only
    /// grow, or are found again in the prefix cache, keep their word. Numbers beyond the pool are ignored.
    pub fn reuse(&mut self, blocks: impl IntoIterator<Item = u32>) {
        self.stamp += 1;
        for block in blocks {
            if let Some(word) = self.words.as_ref().get(block as usize + 1) {
                word.store(self.stamp, Ordering::Relaxed);
            }
        }
        // Writes of data that follow must not be seen before the words.
        fence(Ordering::SeqCst);
    }

    /// What to publish with blocks that now hold what they shall.
    pub fn reference(&self) -> BlockReference {
        BlockReference { pool: self.pool, stamp: self.stamp }
    }

    /// The registered words, the pool's first.
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
            "what is published now names the new contents"
        );
    }

    #[test]
    fn every_block_of_another_life_of_the_pool_is_stale() {
        let mut old = pool(2, 7);
        old.reuse([0, 1]);
        let (life, words) = read(&pool(2, 8), &[0, 1]);
        assert_eq!(old.reference().stale(life, &words), [0, 1]);
        assert_eq!(
            pool(2, 0).reference().pool,
            1,
            "0 is what memory holds that nobody has written"
        );
    }

    #[test]
    fn a_reference_is_read_back_from_its_text() {
        let reference = BlockReference { pool: 0xfeed, stamp: 12 };
        assert_eq!(reference.to_string(), "000000000000feed000000000000000c");
        assert_eq!(reference.to_string().parse(), Ok(reference));
        for bad in ["", "000000000000feed000000000000000", "+00000000000feed000000000000000c", "é"]
        {
            assert_eq!(bad.parse::<BlockReference>(), Err(NoReference));
        }
    }
}
