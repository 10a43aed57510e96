//! The generations of an engine's blocks in registered memory.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvx_core::backend::random_number;
use kvx_core::{Error, Memory, Result};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use kvx_vllm::engine::{BlockLists, BlockReference, Fresh, Generations, RequestId, WorkerRank};
use kvx_vllm::group::OwnWords;

/// The name of the region that holds the words: the pool's first, then one for each logical block.
pub(super) const WORDS: &str = "generations";
/// Bytes of a word.
pub(super) const WORD: u64 = 8;

/// Words in memory that peers read.
#[derive(Debug)]
pub(super) struct GenerationTable(Arc<Memory>);

impl GenerationTable {
    /// In a pool that nothing else of this process touches.
    pub(super) fn of(pool: Arc<Memory>) -> Self {
        GenerationTable(pool)
    }

    /// Of a rank on another host, whose engine says what they are.
    pub(super) fn made(OwnWords { pool, stamp, blocks }: OwnWords) -> Result<Self> {
        let words =
            GenerationTable(Arc::new(Memory::pool((blocks as usize + 1) * WORD as usize).build()?));
        for (at, word) in words.as_ref().iter().enumerate() {
            word.store(if at == 0 { pool } else { stamp }, Ordering::Relaxed);
        }
        Ok(words)
    }

    /// The memory that peers read them from.
    pub(super) fn memory(&self) -> Arc<Memory> {
        Arc::clone(&self.0)
    }

    /// Peers may not read these blocks any more.
    pub(super) fn raise(&self, blocks: &[u32], stamp: u64) {
        for block in blocks {
            if let Some(word) = self.as_ref().get(*block as usize + 1) {
                word.store(stamp, Ordering::Release);
            }
        }
    }
}

impl AsRef<[AtomicU64]> for GenerationTable {
    fn as_ref(&self) -> &[AtomicU64] {
        let words = self.0.len() / WORD as usize;
        // SAFETY: the memory is a pool of whole pages, so aligned, zeroed, of that many words and
        // alive as long as `self`; this process touches it by these atomics only, and peers only
        // read it.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast::<AtomicU64>(), words) }
    }
}

/// The words of an engine, and which blocks are with peers.
///
/// What is published names the number of that moment. Blocks that no peer may read any more get the
/// next number, before the engine hears that they are free: so an engine has nothing to do for it.
#[derive(Debug)]
pub(super) struct GenerationState {
    generations: Generations<GenerationTable>,
    memory: Arc<Memory>,
    requests: HashMap<RequestId, BlockLists>,
    /// How many requests of those have a block.
    readers: HashMap<u32, u32>,
    /// Those of them that were whole: what is computed later is in others.
    whole: HashSet<u32>,
    /// The same as `readers` for blocks of a group, where they have digests.
    digested: Option<HashMap<(u32, u32), u32>>,
    /// Blocks whose digests are still to be written.
    fresh: Vec<Fresh>,
    /// The same words once more, for ranks in other processes of this host.
    copies: BTreeMap<WorkerRank, CopiedWords>,
}

impl GenerationState {
    /// Words for a pool of so many logical blocks, with `digests` or without.
    pub(super) fn new(blocks: u32, digests: bool) -> Result<Self> {
        let memory = Arc::new(Memory::pool((blocks as usize + 1) * WORD as usize).build()?);
        let generations = Generations::new(GenerationTable(Arc::clone(&memory)), random_number()?);
        Ok(GenerationState {
            generations,
            memory,
            requests: HashMap::new(),
            readers: HashMap::new(),
            whole: HashSet::new(),
            digested: digests.then(HashMap::new),
            fresh: Vec::new(),
            copies: BTreeMap::new(),
        })
    }

    /// Words of its own for a rank in a process of its own, which registers their file. They change
    /// with these.
    pub(super) fn share(&mut self, rank: WorkerRank, copy: CopiedWords) {
        for (word, copied) in self.generations.words().iter().zip(copy.words()) {
            copied.store(word.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.copies.insert(rank, copy);
    }

    /// The memory that peers read the generations from.
    pub(super) fn memory(&self) -> Arc<Memory> {
        Arc::clone(&self.memory)
    }

    pub(super) fn reference(&self) -> BlockReference {
        self.generations.reference()
    }

    /// Peers may read these from now on. So many of each list are whole.
    pub(super) fn publish(&mut self, request: RequestId, blocks: BlockLists, whole: usize) {
        for block in blocks.iter() {
            *self.readers.entry(block).or_default() += 1;
        }
        self.whole.extend(blocks.groups().iter().flat_map(|list| list.iter().take(whole)));
        // A block that peers may read already keeps its digest: what has spoilt it since is
        // noticed.
        if let Some(digested) = &mut self.digested {
            let pool = self.generations.reference().pool;
            for (group, block) in grouped(&blocks) {
                let count = digested.entry((group, block)).or_default();
                *count += 1;
                let word = self.generations.words().get(block as usize + 1);
                if let Some(word) = word.filter(|_| *count == 1) {
                    let generation = word.load(Ordering::Relaxed);
                    self.fresh.push(Fresh { group, block, pool, generation });
                }
            }
        }
        self.requests.insert(request, blocks);
    }

    /// Returns whether peers may read a block, of any group, that was whole when it was published.
    pub(super) fn has_whole(&self, block: u32) -> bool {
        self.whole.contains(&block)
    }

    /// The blocks that have been published since the last call and had no digests.
    pub(super) fn take_fresh(&mut self) -> Vec<Fresh> {
        std::mem::take(&mut self.fresh)
    }

    /// Releases all requests: caches of a worker go, and none of what was published is whole any
    /// more.
    pub(super) fn release_all(&mut self) -> Vec<StaleBlocks> {
        let requests: Vec<RequestId> = self.requests.keys().cloned().collect();
        requests.iter().filter_map(|request| self.release(request)).collect()
    }

    /// No peer may read the blocks of this request any more; those that are in no other request are
    /// stale from now on, on this host: ranks on others are still to hear of what is given.
    pub(super) fn release(&mut self, request: &RequestId) -> Option<StaleBlocks> {
        let blocks = self.requests.remove(request)?;
        if let Some(digested) = &mut self.digested {
            for block in grouped(&blocks) {
                if let Entry::Occupied(mut count) = digested.entry(block) {
                    *count.get_mut() -= 1;
                    if *count.get() == 0 {
                        count.remove();
                    }
                }
            }
        }
        let readers = &mut self.readers;
        let free = blocks.iter().filter(|block| {
            let Some(count) = readers.get_mut(block) else {
                debug_assert!(false, "each published block is counted");
                return false;
            };
            *count -= 1;
            let last = *count == 0;
            if last {
                readers.remove(block);
                self.whole.remove(block);
            }
            last
        });
        let free: Vec<u32> = free.collect();
        // Before anybody hears that these blocks are free: whatever the ranks' processes do, or do
        // no more.
        let next = self.generations.reference().stamp + 1;
        for copy in self.copies.values() {
            free.iter().for_each(|block| copy.raise(*block, next));
        }
        self.generations.reuse(free.iter().copied());
        (!free.is_empty()).then_some(StaleBlocks { blocks: free, stamp: next })
    }
}

/// Blocks that peers may not read any more, and what their words have become.
#[must_use = "ranks on other hosts are still to hear of it"]
pub(super) struct StaleBlocks {
    pub(super) blocks: Vec<u32>,
    pub(super) stamp: u64,
}

/// Words that another process registers. This one has its own mapping of them, made before that one
/// seals the file against further writers.
#[derive(Debug)]
pub(super) struct CopiedWords {
    base: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: it is shared memory that is touched by atomics only.
unsafe impl Send for CopiedWords {}
// SAFETY: as above.
unsafe impl Sync for CopiedWords {}

impl CopiedWords {
    /// For a pool of so many logical blocks; and the file that they are in.
    pub(super) fn new(blocks: u32) -> Result<(Self, OwnedFd)> {
        let failed =
            |error| Error::os("the words of a rank's blocks could not be shared with it", error);
        let count = blocks as usize + 1;
        let len = count * WORD as usize;
        let file = memfd_create("kvx-words", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(failed)?;
        ftruncate(&file, len as u64).map_err(failed)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).map_err(failed)?;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs no memory of the
        // program.
        let base = unsafe {
            mmap(null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)
        };
        let base = NonNull::new(base.map_err(failed)?.cast()).expect("a mapping is somewhere");
        Ok((CopiedWords { base, count }, file))
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping begins at a page, has that many words and lives as long as `self`;
        // the file is sealed against getting shorter, and both processes touch it by atomics or by
        // copies of kvx only.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.count) }
    }

    fn raise(&self, block: u32, stamp: u64) {
        if let Some(word) = self.words().get(block as usize + 1) {
            word.store(stamp, Ordering::Release);
        }
    }
}

impl Drop for CopiedWords {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `new`, and nobody has a reference into it any more.
        unsafe { munmap(self.base.as_ptr().cast(), self.count * WORD as usize) }.ok();
    }
}

/// All blocks, with their groups.
fn grouped(blocks: &BlockLists) -> impl Iterator<Item = (u32, u32)> {
    let groups = (0..).zip(blocks.groups());
    groups.flat_map(|(group, list)| list.iter().map(move |block| (group, *block)))
}
