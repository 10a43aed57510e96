//! Real block pools: the owner, content and users of each block.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;

use kvx_vllm::engine::{BlockReference, Generations, RequestId};

/// The content of a block: KV of a conversation's tokens, or the content of a later request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Content {
    pub(crate) conversation: u32,
    pub(crate) index: u32,
    /// The filled tokens of the block.
    pub(crate) filled: u32,
    /// The number of the write that produced it.
    pub(crate) version: u32,
    /// Whether it still has a peer's layout, which the engine cannot read.
    pub(crate) unfinished: bool,
}

/// The two halves of a block: two ranks of a peer may fill one half each.
pub(crate) type Block = [Content; 2];

/// The memory of one worker.
pub(crate) struct Memory {
    pub(crate) blocks: Vec<Block>,
    pub(crate) generations: Generations<Vec<AtomicU64>>,
    /// The number of transfers that may write into each block.
    pub(crate) writers: Vec<u32>,
    /// The number of this worker's own transfers that read each block.
    pub(crate) readers: Vec<u32>,
}

impl Memory {
    fn new(blocks: u32, random: u64) -> Self {
        let words = (0..=blocks).map(|_| AtomicU64::new(0)).collect();
        Memory {
            blocks: vec![Block::default(); blocks as usize],
            generations: Generations::new(words, random),
            writers: vec![0; blocks as usize],
            readers: vec![0; blocks as usize],
        }
    }
}

/// The pool of an engine, with the same block numbers on each worker.
pub(crate) struct Pool {
    pub(crate) workers: Vec<Memory>,
    owners: Vec<Option<RequestId>>,
    free: Vec<u32>,
    version: u32,
    /// Blocks that a forgotten transfer may access forever.
    lost: BTreeSet<u32>,
    /// The number of reads of other engines for each request. They began while the request had its
    /// blocks.
    pub(crate) read_by_peers: BTreeMap<RequestId, u32>,
}

impl Pool {
    pub(crate) fn new(workers: usize, blocks: u32, random: u64) -> Self {
        Pool {
            workers: (0..workers).map(|_| Memory::new(blocks, random)).collect(),
            owners: vec![None; blocks as usize],
            free: (0..blocks).rev().collect(),
            version: 0,
            lost: BTreeSet::new(),
            read_by_peers: BTreeMap::new(),
        }
    }

    pub(crate) fn available(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn size(&self) -> usize {
        self.owners.len()
    }

    /// Gives blocks to a request. Their content is new from now on.
    pub(crate) fn take(&mut self, request: &RequestId, count: usize) -> Result<Vec<u32>, String> {
        let taken = self.free.split_off(self.free.len() - count);
        self.version += 1;
        for memory in &mut self.workers {
            memory.generations.reuse(taken.iter().copied());
            for block in &taken {
                if memory.writers[*block as usize] > 0 || memory.readers[*block as usize] > 0 {
                    return Err(format!(
                        "block {block} is given to {request} while a transfer uses it"
                    ));
                }
                let junk =
                    Content { conversation: u32::MAX, version: self.version, ..Content::default() };
                memory.blocks[*block as usize] = [junk; 2];
            }
        }
        for block in &taken {
            self.owners[*block as usize] = Some(request.clone());
        }
        Ok(taken)
    }

    pub(crate) fn give_back(&mut self, request: &RequestId, blocks: &[u32]) -> Result<(), String> {
        for block in blocks {
            if self.owners[*block as usize].as_ref() != Some(request) {
                return Err(format!("block {block} is freed by {request}, which does not have it"));
            }
            for memory in &self.workers {
                if memory.writers[*block as usize] > 0 || memory.readers[*block as usize] > 0 {
                    return Err(format!(
                        "block {block} of {request} is freed while a transfer uses it"
                    ));
                }
            }
            self.owners[*block as usize] = None;
            self.free.push(*block);
        }
        Ok(())
    }

    /// Computes tokens of a conversation up to `tokens`, into blocks that start at block `first` of
    /// the conversation.
    pub(crate) fn compute(
        &mut self,
        conversation: u32,
        blocks: &[u32],
        first: u32,
        tokens: u32,
        size: u32,
    ) {
        self.version += 1;
        for (at, block) in blocks.iter().enumerate() {
            let index = first + at as u32;
            let filled = tokens.saturating_sub(index * size).min(size);
            let content =
                Content { conversation, index, filled, version: self.version, unfinished: false };
            for memory in &mut self.workers {
                memory.blocks[*block as usize] = [content; 2];
            }
        }
    }

    /// Checks that blocks hold the tokens of a conversation before `tokens`, on every worker.
    pub(crate) fn check(
        &self,
        conversation: u32,
        blocks: &[u32],
        tokens: u32,
        size: u32,
    ) -> Result<(), String> {
        for (worker, memory) in self.workers.iter().enumerate() {
            for (index, block) in blocks.iter().enumerate().take(tokens.div_ceil(size) as usize) {
                let needed = (tokens - index as u32 * size).min(size);
                for half in memory.blocks[*block as usize] {
                    let right = half.conversation == conversation && half.index == index as u32;
                    if !right || half.unfinished || half.filled < needed {
                        return Err(format!(
                            "block {block} on worker {worker} should hold {needed} tokens of block {index} of \
                             conversation {conversation}, and holds {half:?}"
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the owner of a block.
    pub(crate) fn owner(&self, block: u32) -> Option<&RequestId> {
        self.owners.get(block as usize)?.as_ref()
    }

    pub(crate) fn reference(&self) -> BlockReference {
        self.workers[0].generations.reference()
    }

    /// Removes blocks from the pool forever.
    pub(crate) fn lose(&mut self, request: &RequestId, blocks: &[u32]) -> Result<(), String> {
        for block in blocks {
            if self.owners[*block as usize].as_ref() != Some(request) {
                return Err(format!("block {block} is lost by {request}, which does not have it"));
            }
            self.lost.insert(*block);
        }
        Ok(())
    }

    /// Returns blocks that are neither released nor lost.
    pub(crate) fn leaked(&self) -> Vec<(usize, Option<RequestId>)> {
        let free: BTreeSet<u32> = self.free.iter().copied().collect();
        let leaked = (0..self.size() as u32)
            .filter(|block| !free.contains(block) && !self.lost.contains(block));
        leaked.map(|block| (block as usize, self.owners[block as usize].clone())).collect()
    }
}
