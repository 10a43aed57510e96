//! The generations of an engine's blocks, and its leases, in registered memory.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvx_core::backend::random_number;
use kvx_core::{Error, Memory, Result};

use super::refusal_log::RefusalLog;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use kvx_vllm::engine::{BlockLists, BlockReference, Fresh, Generations, RequestId, WorkerRank};
use kvx_vllm::group::OwnWords;
use kvx_vllm::wire::nixl::{LEASE_TABLE_WORDS, LeaseKey, LeaseTable};

/// The size of a counter in bytes.
pub(super) const WORD: u64 = 8;

/// Returns the length in bytes of the generation counters of `blocks` logical blocks. `leases`:
/// with the leases behind them.
pub(super) fn len_of_words(blocks: u32, leases: bool) -> usize {
    (blocks as usize + 1 + if leases { LEASE_TABLE_WORDS } else { 0 }) * WORD as usize
}

/// The memory of generation counters, for the agent of a rank.
pub(super) struct WordsMemory {
    pub(super) memory: Arc<Memory>,
    /// True if the engine's leases lie behind the counters.
    pub(super) leases: bool,
}

/// Generation counters, or digests, in memory that peers read.
#[derive(Debug)]
pub(super) struct GenerationTable {
    memory: Arc<Memory>,
    /// The number of counters. The leases may follow them.
    count: usize,
}

impl GenerationTable {
    /// Wraps a pool that nothing else of this process touches.
    pub(super) fn of(pool: Arc<Memory>) -> Self {
        GenerationTable { count: pool.len() / WORD as usize, memory: pool }
    }

    /// Creates the counters of `blocks` logical blocks, with the leases behind them.
    fn with_leases(blocks: u32) -> Result<Self> {
        let memory = Arc::new(Memory::pool(len_of_words(blocks, true)).build()?);
        Ok(GenerationTable { memory, count: blocks as usize + 1 })
    }

    /// Creates the counters of a rank on another host, with the values that its engine sent.
    pub(super) fn made(OwnWords { pool, stamp, blocks }: OwnWords) -> Result<Self> {
        let memory = Memory::pool(len_of_words(blocks, false)).build()?;
        let words = GenerationTable::of(Arc::new(memory));
        for (at, word) in words.as_ref().iter().enumerate() {
            word.store(if at == 0 { pool } else { stamp }, Ordering::Relaxed);
        }
        Ok(words)
    }

    /// Returns the memory that peers read the counters from.
    pub(super) fn memory(&self) -> Arc<Memory> {
        Arc::clone(&self.memory)
    }

    /// Returns the counters and what follows them.
    fn all(&self) -> &[AtomicU64] {
        let words = self.memory.len() / WORD as usize;
        // SAFETY: the memory is a pool: page-aligned, zeroed, of that many words, and alive as long
        // as `self`. Callers of `of` hand it over, and the other constructors make it, so this
        // process touches it through these atomics only. Peers only read it.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast::<AtomicU64>(), words) }
    }

    /// Raises the counters of blocks that peers must not read any more.
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
        &self.all()[..self.count]
    }
}

/// The generation counters of an engine, and the blocks that peers may read.
///
/// Published parameters carry the current number. Blocks that no peer may read any more get the
/// next number before the engine learns that they are free, so the engine has nothing to do for it.
#[derive(Debug)]
pub(super) struct GenerationState {
    generations: Generations<GenerationTable>,
    requests: HashMap<RequestId, BlockLists>,
    /// The number of published requests that hold a block, by block.
    readers: HashMap<u32, u32>,
    /// Blocks of published requests that were whole when they were published. Later tokens go to
    /// other blocks.
    whole: HashSet<u32>,
    /// The counterpart of `readers` for the blocks of each group, if they have digests.
    digested: Option<HashMap<(u32, u32), u32>>,
    /// Blocks whose digests are not written yet.
    fresh: Vec<Fresh>,
    /// Copies of the counters, for ranks in other processes of this host.
    copies: BTreeMap<WorkerRank, CopiedWords>,
    full_table_log: RefusalLog,
}

impl GenerationState {
    /// Creates the counters of a pool of `blocks` logical blocks. `digests`: whether its blocks
    /// have digests.
    pub(super) fn new(blocks: u32, digests: bool) -> Result<Self> {
        let table = GenerationTable::with_leases(blocks)?;
        Ok(GenerationState {
            generations: Generations::new(table, random_number()?),
            requests: HashMap::new(),
            readers: HashMap::new(),
            whole: HashSet::new(),
            digested: digests.then(HashMap::new),
            fresh: Vec::new(),
            copies: BTreeMap::new(),
            full_table_log: RefusalLog::default(),
        })
    }

    /// Adds a copy of the counters for a rank in a process of its own, which registers the copy's
    /// file. Later changes go to all copies.
    pub(super) fn share(&mut self, rank: WorkerRank, copy: CopiedWords) {
        for (word, copied) in self.generations.words().iter().zip(copy.words()) {
            copied.store(word.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.copies.insert(rank, copy);
    }

    /// Returns the memory that peers read the generations and leases from.
    pub(super) fn memory(&self) -> WordsMemory {
        WordsMemory { memory: self.generations.table().memory(), leases: true }
    }

    /// Returns the tables of leases: that of this process, and those of ranks in other processes of
    /// this host.
    fn leases(&self) -> impl Iterator<Item = LeaseTable<'_>> {
        let own = self.generations.table().all();
        std::iter::once(own)
            .chain(self.copies.values().map(CopiedWords::words))
            .filter_map(LeaseTable::at_end_of)
    }

    pub(super) fn reference(&self) -> BlockReference {
        self.generations.reference()
    }

    /// Lets peers read the blocks of a request. The first `whole` blocks of each list are whole.
    pub(super) fn publish(&mut self, request: RequestId, blocks: BlockLists, whole: usize) {
        for block in blocks.iter() {
            *self.readers.entry(block).or_default() += 1;
        }
        self.whole.extend(blocks.groups().iter().flat_map(|list| list.iter().take(whole)));
        // A block that peers may read already keeps its digest, so that a reader notices if it was
        // overwritten since.
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
        let key = LeaseKey::of(request.as_str());
        let full = self.leases().filter(|table| !table.add(&key)).count();
        if full > 0
            && let Some(suppressed) = self.full_table_log.count()
        {
            tracing::warn!(
                %request,
                suppressed,
                "the table of leases is full: a decode that loads this request through NIXL will \
                 fail"
            );
        }
        self.requests.insert(request, blocks);
    }

    /// Returns whether peers may read a block, of any group, that was whole when it was published.
    pub(super) fn has_whole(&self, block: u32) -> bool {
        self.whole.contains(&block)
    }

    /// Takes the blocks that were published since the last call and have no digests yet.
    pub(super) fn take_fresh(&mut self) -> Vec<Fresh> {
        std::mem::take(&mut self.fresh)
    }

    /// Releases all requests, because caches of a worker are given back and no published block is
    /// whole any more.
    pub(super) fn release_all(&mut self) -> Vec<StaleBlocks> {
        let requests: Vec<RequestId> = self.requests.keys().cloned().collect();
        requests.iter().filter_map(|request| self.release(request)).collect()
    }

    /// Releases the blocks of a request. Those that no other request has are stale from now on, for
    /// readers of this host's ranks. The caller has to raise the returned blocks in ranks on other
    /// hosts.
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
        let key = LeaseKey::of(request.as_str());
        self.leases().for_each(|table| table.remove(&key));
        // Before the engine learns that these blocks are free, and without any help of the ranks'
        // processes.
        let next = self.generations.reference().stamp + 1;
        for copy in self.copies.values() {
            free.iter().for_each(|block| copy.raise(*block, next));
        }
        self.generations.reuse(free.iter().copied());
        (!free.is_empty()).then_some(StaleBlocks { blocks: free, stamp: next })
    }
}

/// Blocks that peers must not read any more, and the new value of their counters.
#[must_use = "ranks on other hosts have to raise these blocks too"]
pub(super) struct StaleBlocks {
    pub(super) blocks: Vec<u32>,
    pub(super) stamp: u64,
}

/// Counters that another process registers. This process maps them before the other one seals the
/// file against further writers.
#[derive(Debug)]
pub(super) struct CopiedWords {
    base: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: the mapping is shared memory that `words` lends as atomics only, so threads may share it.
unsafe impl Send for CopiedWords {}
// SAFETY: `words` lends the shared memory as atomics only, so any thread may use it.
unsafe impl Sync for CopiedWords {}

impl CopiedWords {
    /// Creates counters for a pool of `blocks` logical blocks, with the leases behind them. Returns
    /// them with the file that holds them.
    pub(super) fn new(blocks: u32) -> Result<(Self, OwnedFd)> {
        let failed = |error| {
            Error::os(
                "the generation counters of a rank could not be shared with its process",
                error,
            )
        };
        let len = len_of_words(blocks, true);
        let count = len / WORD as usize;
        let file = memfd_create("kvx-words", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(failed)?;
        ftruncate(&file, len as u64).map_err(failed)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).map_err(failed)?;
        // SAFETY: this is a new mapping at an address of the kernel's choice, so it changes no
        // memory of the program.
        let base = unsafe {
            mmap(null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)
        };
        let base = NonNull::new(base.map_err(failed)?.cast()).expect("a mapping is somewhere");
        Ok((CopiedWords { base, count }, file))
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: `new` made the mapping: it begins at a page, has that many words and lives as
        // long as `self`. The file is sealed against shrinking. Both processes touch it through
        // atomics or copies of kvx only.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.count) }
    }

    fn raise(&self, block: u32, stamp: u64) {
        let counters = &self.words()[..self.count - LEASE_TABLE_WORDS];
        if let Some(word) = counters.get(block as usize + 1) {
            word.store(stamp, Ordering::Release);
        }
    }
}

impl Drop for CopiedWords {
    fn drop(&mut self) {
        // SAFETY: `new` made the mapping, and references into it borrow from `self`, so none is
        // left.
        unsafe { munmap(self.base.as_ptr().cast(), self.count * WORD as usize) }.ok();
    }
}

/// Yields all blocks with their groups.
fn grouped(blocks: &BlockLists) -> impl Iterator<Item = (u32, u32)> {
    let groups = (0..).zip(blocks.groups());
    groups.flat_map(|(group, list)| list.iter().map(move |block| (group, *block)))
}
