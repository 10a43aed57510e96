//! A prompt's tokens, and the keys of its blocks.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use super::cache_model::CHUNK_TOKENS;

/// The block sizes of a fleet whose keys are kept for a prompt.
const SIZES: usize = 8;

/// The key of this process's hashes: clients cannot choose prompts with equal ones.
static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// A key of a block: a hash of its tokens and of all before them. Unlike the engines' hashes it is
/// the same for all of them.
pub(crate) type BlockKey = u64;

/// Returns the key of the block of `tokens` that follows another, or begins a prompt.
pub(crate) fn block_key(parent: Option<BlockKey>, tokens: &[u32]) -> BlockKey {
    let mut hasher = KEY.build_hasher();
    hasher.write_u64(parent.unwrap_or(0));
    tokens.iter().for_each(|token| hasher.write_u32(*token));
    hasher.finish()
}

/// A prompt's tokens.
#[derive(Debug)]
pub(crate) struct PromptTokens {
    ids: Box<[u32]>,
    /// The keys of its full blocks, by block size.
    keys: Mutex<Vec<(u32, Arc<BlockKeys>)>>,
    /// The number of its blocks that the latest instance had cached. Instances often have the same
    /// part of a prompt.
    guess: AtomicUsize,
}

impl PartialEq for PromptTokens {
    fn eq(&self, other: &Self) -> bool {
        self.ids == other.ids
    }
}

impl PromptTokens {
    pub(crate) fn new(ids: Vec<u32>) -> Self {
        PromptTokens { ids: ids.into(), keys: Mutex::default(), guess: AtomicUsize::new(0) }
    }

    /// Returns how many blocks of the prompt an instance may have cached.
    pub(crate) fn guess(&self) -> usize {
        self.guess.load(Relaxed)
    }

    pub(crate) fn set_guess(&self, blocks: usize) {
        self.guess.store(blocks, Relaxed);
    }

    pub(crate) fn count(&self) -> u64 {
        self.ids.len() as u64
    }

    /// Returns the keys of the prompt's full blocks. An engine computes the last token in any case,
    /// so a block that ends with it is not among them.
    pub(crate) fn keys(&self, block_size: u32) -> Arc<BlockKeys> {
        let mut known = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, keys)) = known.iter().find(|(size, _)| *size == block_size) {
            return Arc::clone(keys);
        }
        let useful = self.ids.len().saturating_sub(1);
        let tokens_per_block = block_size.max(1) as usize;
        let mut parent = None;
        let blocks: Box<[BlockKey]> = self.ids[..useful]
            .chunks_exact(tokens_per_block)
            .map(|tokens| *parent.insert(block_key(parent, tokens)))
            .collect();
        let blocks_per_chunk = (CHUNK_TOKENS / tokens_per_block).max(1);
        let ends = blocks.iter().skip(blocks_per_chunk - 1).step_by(blocks_per_chunk);
        let keys =
            Arc::new(BlockKeys { chunks: ends.copied().collect(), blocks, blocks_per_chunk });
        if known.len() < SIZES {
            known.push((block_size, Arc::clone(&keys)));
        }
        keys
    }
}

/// The keys of a prompt's blocks.
#[derive(Debug)]
pub(crate) struct BlockKeys {
    pub(crate) blocks: Box<[BlockKey]>,
    /// The keys of the last block of each chunk of [`CHUNK_TOKENS`], or of each larger block.
    pub(crate) chunks: Box<[BlockKey]>,
    pub(crate) blocks_per_chunk: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_covers_all_tokens_before_the_block() {
        let keys = |ids: &[u32]| PromptTokens::new(ids.to_vec()).keys(2).blocks.clone();
        let [one, other] = [keys(&[1, 2, 3, 4, 5]), keys(&[9, 2, 3, 4, 5])];
        assert_eq!(one.len(), 2);
        assert!(one[0] != other[0] && one[1] != other[1]);
        assert_eq!(keys(&[1, 2, 3, 4])[..], one[..1], "the last token is computed");
        assert_eq!(one[1], block_key(Some(block_key(None, &[1, 2])), &[3, 4]));
        assert!(keys(&[]).is_empty());
    }

    #[test]
    fn chunks_end_with_every_so_many_blocks() {
        let keys = |size| PromptTokens::new((0..1000).collect()).keys(size);
        let small = keys(16);
        assert_eq!((small.blocks.len(), small.blocks_per_chunk), (62, 16));
        assert_eq!(small.chunks[..], [small.blocks[15], small.blocks[31], small.blocks[47]]);
        let large = keys(400);
        assert_eq!((&large.chunks, large.blocks_per_chunk), (&large.blocks, 1));
    }
}
