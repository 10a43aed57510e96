//! The blocks that an instance has published as cached.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::BuildHasherDefault;

use kvx_vllm::events::{BlockHash, BlockStored, CacheEvent, is_in_pool};

use crate::fleet::cache_model::Unchanged;
use crate::fleet::tokens::{BlockKey, block_key};

/// The most blocks of an instance: 7 million tokens in blocks of 16, which take up to 52 MB, and
/// 80 MB while a table grows.
pub(crate) const MAX_BLOCKS: usize = 448 << 10;
/// The most tokens of a block: its key is computed in one go.
const MAX_BLOCK_TOKENS: u32 = 16 << 10;

/// The blocks that an instance has published as cached, by keys of their tokens.
#[derive(Debug, Default)]
pub(crate) struct EventIndex {
    /// The tokens of a block; 0 until one is known.
    block_size: u32,
    /// The key of each block, and the number of copies of it. Groups of layers have blocks with
    /// equal hashes, which are stored and removed one by one.
    by_hash: HashMap<(u32, BlockHash), (BlockKey, u32)>,
    /// True if the engine has several groups, and does not say which of them hold all tokens.
    has_unknown_groups: bool,
    /// The number of hashes with each key.
    keys: HashMap<BlockKey, u32, BuildHasherDefault<Unchanged>>,
    /// Blocks whose parent is not known.
    pub(crate) orphans: u64,
    /// Blocks that not every prompt with their tokens can use, or of another size, or too large.
    pub(crate) ignored: u64,
}

/// An instance has published more than [`MAX_BLOCKS`]. The index is empty now.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooManyBlocks;

impl EventIndex {
    /// Returns the number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.by_hash.len()
    }

    /// Returns the tokens of a block, if they are known.
    pub(crate) fn block_size(&self) -> Option<u32> {
        (self.block_size > 0).then_some(self.block_size)
    }

    pub(crate) fn contains(&self, key: BlockKey) -> bool {
        self.keys.contains_key(&key)
    }

    /// Applies an event.
    pub(crate) fn apply(&mut self, event: &CacheEvent) -> Result<(), TooManyBlocks> {
        match event {
            CacheEvent::Stored(stored) => self.store(stored),
            CacheEvent::Removed(removed) => {
                if is_in_pool(removed.medium.as_deref(), removed.locality.as_deref()) {
                    let group = removed.group.unwrap_or(0);
                    removed.hashes.iter().for_each(|hash| self.remove((group, *hash)));
                }
                Ok(())
            }
            CacheEvent::Cleared => {
                self.clear();
                Ok(())
            }
        }
    }

    /// Removes all blocks, and returns their memory.
    pub(crate) fn clear(&mut self) {
        self.by_hash = HashMap::default();
        self.keys = HashMap::default();
    }

    fn store(&mut self, stored: &BlockStored) -> Result<(), TooManyBlocks> {
        if !is_in_pool(stored.medium.as_deref(), stored.locality.as_deref()) {
            return Ok(());
        }
        let count = stored.hashes.len() as u64;
        let group = stored.group.unwrap_or(0);
        // vLLM 0.20 and 0.21 number the groups, and do not name their kinds.
        if stored.kind.is_none() && group > 0 && !self.has_unknown_groups {
            self.has_unknown_groups = true;
            self.clear();
        }
        let fits = stored.block_size <= MAX_BLOCK_TOKENS
            && (self.by_hash.is_empty() || stored.block_size == self.block_size);
        let is_known = stored.kind.is_some() || !self.has_unknown_groups;
        let Some(blocks) = stored.plain_blocks().filter(|_| fits && is_known) else {
            self.ignored += count;
            return Ok(());
        };
        let mut parent = match stored.parent {
            None => None,
            Some(hash) => match self.by_hash.get(&(group, hash)) {
                Some((key, _)) => Some(*key),
                None => {
                    self.orphans += count;
                    return Ok(());
                }
            },
        };
        self.block_size = stored.block_size;
        for (hash, tokens) in blocks {
            let key = block_key(parent, tokens);
            parent = Some(key);
            let is_full = self.by_hash.len() >= MAX_BLOCKS;
            match self.by_hash.entry((group, hash)) {
                // An engine may have several copies, each of which it removes.
                Entry::Occupied(mut known) => {
                    let copies = &mut known.get_mut().1;
                    *copies = copies.saturating_add(1);
                }
                Entry::Vacant(_) if is_full => {
                    self.clear();
                    return Err(TooManyBlocks);
                }
                Entry::Vacant(new) => {
                    new.insert((key, 1));
                    *self.keys.entry(key).or_default() += 1;
                }
            }
        }
        Ok(())
    }

    fn remove(&mut self, hash: (u32, BlockHash)) {
        let Some((key, copies)) = self.by_hash.get_mut(&hash) else { return };
        *copies -= 1;
        if *copies > 0 {
            return;
        }
        let key = *key;
        self.by_hash.remove(&hash);
        if let Some(hashes) = self.keys.get_mut(&key) {
            *hashes -= 1;
            if *hashes == 0 {
                self.keys.remove(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvx_vllm::events::BlockRemoved;

    use super::*;
    use crate::fleet::tokens::PromptTokens;

    fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[u32]) -> BlockStored {
        BlockStored {
            hashes: hashes.iter().copied().map(BlockHash).collect(),
            parent: parent.map(BlockHash),
            tokens: tokens.to_vec(),
            block_size: 2,
            ..BlockStored::default()
        }
    }

    fn store(index: &mut EventIndex, stored: BlockStored) {
        index.apply(&CacheEvent::Stored(Box::new(stored))).unwrap();
    }

    fn remove(index: &mut EventIndex, hashes: &[u64], medium: Option<&str>) {
        let hashes = hashes.iter().copied().map(BlockHash).collect();
        let medium = medium.map(str::to_owned);
        let removed = BlockRemoved { hashes, medium, ..BlockRemoved::default() };
        index.apply(&CacheEvent::Removed(Box::new(removed))).unwrap();
    }

    /// Returns the number of cached blocks of a prompt.
    fn cached(index: &EventIndex, ids: &[u32]) -> usize {
        let prompt = PromptTokens::new([ids, &[0]].concat());
        let keys = prompt.keys(2);
        keys.blocks.iter().take_while(|key| index.contains(**key)).count()
    }

    #[test]
    fn blocks_are_found_by_their_tokens_and_their_parents() {
        let mut index = EventIndex::default();
        store(&mut index, stored(&[1, 2], None, &[1, 2, 3, 4]));
        store(&mut index, stored(&[3], Some(2), &[5, 6]));
        assert_eq!(cached(&index, &[1, 2, 3, 4, 5, 6, 7, 8]), 3);
        assert_eq!(cached(&index, &[1, 2, 9, 9]), 1);
        assert_eq!(cached(&index, &[3, 4]), 0, "it is not the beginning of a prompt");
        store(&mut index, stored(&[9], Some(8), &[5, 6]));
        assert_eq!((index.len(), index.orphans), (3, 1));
        remove(&mut index, &[3, 77], None);
        assert_eq!(cached(&index, &[1, 2, 3, 4, 5, 6]), 2);
        index.apply(&CacheEvent::Cleared).unwrap();
        assert_eq!((cached(&index, &[1, 2]), index.len()), (0, 0));
    }

    #[test]
    fn a_block_stays_until_its_last_copy_is_removed() {
        let mut index = EventIndex::default();
        store(&mut index, stored(&[1], None, &[1, 2]));
        store(&mut index, stored(&[1], None, &[1, 2]));
        remove(&mut index, &[1], None);
        assert_eq!(cached(&index, &[1, 2]), 1);
        // Another hash for the same tokens, as of another process with another seed.
        store(&mut index, stored(&[5], None, &[1, 2]));
        remove(&mut index, &[1], None);
        assert_eq!(cached(&index, &[1, 2]), 1);
        remove(&mut index, &[5], None);
        assert_eq!((cached(&index, &[1, 2]), index.len(), index.keys.len()), (0, 0, 0));
    }

    #[test]
    fn blocks_elsewhere_or_with_more_than_tokens_get_no_credit() {
        let mut index = EventIndex::default();
        let block = || stored(&[1], None, &[1, 2]);
        let text = |text: &str| Some(text.to_owned());
        store(&mut index, BlockStored { medium: text("CPU"), ..block() });
        store(&mut index, BlockStored { locality: text("REMOTE"), ..block() });
        store(&mut index, BlockStored { lora_name: text("sql"), ..block() });
        store(&mut index, BlockStored { extra_keys: vec![true], ..block() });
        store(&mut index, BlockStored { kind: text("mamba"), ..block() });
        assert_eq!((index.len(), index.ignored), (0, 3));
        store(&mut index, BlockStored { medium: text("GPU"), ..block() });
        remove(&mut index, &[1], Some("CPU"));
        assert_eq!(cached(&index, &[1, 2]), 1, "the copy on the GPU is still there");
        store(
            &mut index,
            BlockStored { block_size: 1, tokens: vec![1], ..stored(&[4], None, &[]) },
        );
        assert_eq!((index.block_size(), index.ignored), (Some(2), 4), "one size");
    }

    #[test]
    fn groups_of_layers_remove_their_own_blocks_and_unnamed_ones_get_no_credit() {
        let mut index = EventIndex::default();
        let of = |group, kind: Option<&str>| BlockStored {
            group: Some(group),
            kind: kind.map(str::to_owned),
            ..stored(&[1], None, &[1, 2])
        };
        let remove_of = |index: &mut EventIndex, group| {
            let hashes = vec![BlockHash(1)];
            let removed = BlockRemoved { hashes, group: Some(group), ..BlockRemoved::default() };
            index.apply(&CacheEvent::Removed(Box::new(removed))).unwrap();
        };
        store(&mut index, of(0, Some("full_attention")));
        store(&mut index, of(1, Some("sliding_window")));
        remove_of(&mut index, 1);
        assert_eq!(cached(&index, &[1, 2]), 1, "the other group's block");
        remove_of(&mut index, 0);
        assert_eq!(cached(&index, &[1, 2]), 0);

        store(&mut index, of(0, None));
        assert_eq!(cached(&index, &[1, 2]), 1, "there seems to be one group");
        store(&mut index, of(1, None));
        store(&mut index, of(0, None));
        assert_eq!((cached(&index, &[1, 2]), index.len()), (0, 0));
    }

    #[test]
    fn the_number_of_blocks_is_bounded() {
        let mut index = EventIndex::default();
        let hashes: Vec<u64> = (0..MAX_BLOCKS as u64).collect();
        let tokens: Vec<u32> = (0..2 * hashes.len() as u32).collect();
        store(&mut index, stored(&hashes, None, &tokens));
        // Another copy of a block needs no place.
        store(&mut index, stored(&[0], None, &tokens[..2]));
        assert_eq!(index.len(), MAX_BLOCKS);
        let new = CacheEvent::Stored(Box::new(stored(&[u64::MAX], None, &[1, 2])));
        assert_eq!(index.apply(&new), Err(TooManyBlocks));
        assert_eq!((index.len(), index.keys.capacity()), (0, 0));
    }
}
