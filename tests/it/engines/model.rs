//! A model whose bytes all encode their place: blocks hold `f(prompt, layer, head, token)`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvx::connector::{Caches, Heads, KvLayout, LayerCache, MemoryType, WorkerRank};
use kvx::{Memory, Result};
use kvx_testkit::TestDevice;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use serde::{Deserialize, Serialize};

use crate::engines::engine::refused;

/// Bytes of one token in one head.
const CONTENT: usize = 32;

/// The byte of blocks where nothing was computed.
const POISON: u8 = 0xee;

/// The shape of the model in an engine. Engines of one test differ only in `pp` and the fields
/// after it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Shape {
    pub(crate) layers: u32,
    /// The number of KV heads; `None` for a latent that all ranks hold (MLA).
    pub(crate) heads: Option<u32>,
    /// The number of pipeline stages, which divide the layers among them.
    pub(crate) pp: u32,
    pub(crate) tp: u32,
    /// Heads before tokens (HND) if true, else tokens before heads (NHD).
    pub(crate) heads_first: bool,
    /// Tokens per kernel block.
    pub(crate) block_tokens: u32,
    /// Kernel blocks per logical block.
    pub(crate) kernel_per_logical: u32,
    /// Logical blocks of the pool.
    pub(crate) blocks: u32,
}

impl Default for Shape {
    fn default() -> Self {
        Shape {
            layers: 3,
            heads: Some(4),
            pp: 1,
            tp: 1,
            heads_first: true,
            block_tokens: 16,
            kernel_per_logical: 1,
            blocks: 64,
        }
    }
}

impl Shape {
    /// Returns the tokens per logical block.
    pub(crate) fn logical(&self) -> u32 {
        self.block_tokens * self.kernel_per_logical
    }

    /// Returns all workers.
    pub(crate) fn ranks(&self) -> impl Iterator<Item = WorkerRank> {
        let tp = self.tp;
        (0..self.pp).flat_map(move |pp| (0..tp).map(move |tp| WorkerRank { pp, tp }))
    }

    /// Returns the layers of a stage.
    fn stage(&self, pp: u32) -> Range<u32> {
        self.layers * pp / self.pp..self.layers * (pp + 1) / self.pp
    }

    fn rank_heads(&self) -> u32 {
        self.heads.map_or(1, |heads| (heads / self.tp).max(1))
    }

    /// Returns the index in the whole model of a rank's head at `place`.
    fn head(&self, rank: WorkerRank, place: u32) -> u32 {
        match self.heads {
            None => 0,
            Some(heads) if heads >= self.tp => rank.tp * (heads / self.tp) + place,
            Some(heads) => rank.tp * heads / self.tp,
        }
    }

    fn block_len(&self) -> usize {
        (self.rank_heads() * self.block_tokens) as usize * CONTENT
    }

    fn kernel_blocks(&self) -> u32 {
        self.blocks * self.kernel_per_logical
    }
}

/// Returns the content of one token in one head.
fn content(prompt: u64, layer: u32, head: u32, token: u32) -> [u8; CONTENT] {
    let mut bytes = [0; CONTENT];
    let mut state = prompt ^ u64::from(layer) << 48 ^ u64::from(head) << 32 ^ u64::from(token);
    for chunk in bytes.chunks_exact_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        chunk.copy_from_slice(
            &(mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb).to_le_bytes(),
        );
    }
    bytes
}

/// The memory of one rank.
pub(crate) struct RankMemory {
    shape: Shape,
    rank: WorkerRank,
    pub(crate) memory: Arc<Memory>,
}

impl RankMemory {
    pub(crate) fn new(
        shape: &Shape,
        rank: WorkerRank,
        device: Option<&Arc<TestDevice>>,
    ) -> Result<Self> {
        let len = RankMemory::len(shape, rank);
        let memory = match device {
            Some(device) => device.allocate(len),
            None => Memory::pool(len).build()?,
        };
        Ok(RankMemory::over(shape, rank, memory))
    }

    /// Allocates the memory of a rank in another process, which [adopts](RankMemory::adopt) the
    /// returned file.
    pub(crate) fn shared(shape: &Shape, rank: WorkerRank) -> Result<(Self, OwnedFd)> {
        let len = RankMemory::len(shape, rank);
        let file = memfd_create("kv-cache", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let file =
            file.and_then(|file| ftruncate(&file, len as u64).map(|()| file)).map_err(refused)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the place of the new mapping, so it replaces no other one.
        let base =
            unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, &file, 0) };
        // SAFETY: no code unmaps the memory while this process lives, and only kvx accesses it
        // here.
        let memory = unsafe { Memory::adopt(base.map_err(refused)?.cast(), len, ()) };
        Ok((RankMemory::over(shape, rank, memory), file))
    }

    /// Adopts the memory of this rank, whose engine is in another process.
    pub(crate) fn adopt(shape: &Shape, rank: WorkerRank, file: OwnedFd) -> Result<Self> {
        Ok(RankMemory::over(shape, rank, Memory::adopt_file(file, RankMemory::len(shape, rank))?))
    }

    fn over(shape: &Shape, rank: WorkerRank, memory: Memory) -> Self {
        RankMemory { shape: shape.clone(), rank, memory: Arc::new(memory) }
    }

    fn len(shape: &Shape, rank: WorkerRank) -> usize {
        shape.block_len() * shape.kernel_blocks() as usize * shape.stage(rank.pp).len()
    }

    pub(crate) fn caches(&self) -> Result<Caches> {
        let shape = &self.shape;
        let layer = |at: u32| {
            let address = self.memory.address() + self.offset(at, 0, 0, 0) as u64;
            let heads = shape.heads.map_or(Heads::Replicated, Heads::Sharded);
            let (name, len) = (format!("model.layers.{at}.attn"), shape.block_len() as u64);
            let layer = LayerCache::packed(name, address, shape.kernel_blocks(), len, heads);
            let on_host = self.memory.kind().is_host();
            LayerCache {
                memory: if on_host { MemoryType::Dram } else { MemoryType::Vram },
                ..layer
            }
        };
        let layout = if shape.heads_first { KvLayout::Lbhnc } else { KvLayout::Lbnhc };
        Caches::of_layers(
            self.layers().map(layer).collect(),
            layout,
            shape.block_tokens,
            shape.kernel_per_logical,
            0,
        )
    }

    /// Returns the layers of this rank's stage.
    fn layers(&self) -> Range<u32> {
        self.shape.stage(self.rank.pp)
    }

    /// Returns the offset of a head and token in a kernel block.
    fn offset(&self, layer: u32, block: u32, head: u32, token: u32) -> usize {
        let shape = &self.shape;
        let place = match shape.heads_first {
            true => head * shape.block_tokens + token,
            false => token * shape.rank_heads() + head,
        };
        let block = ((layer - self.layers().start) * shape.kernel_blocks() + block) as usize;
        block * shape.block_len() + place as usize * CONTENT
    }

    /// Calls `each` with the offset and the content of every head and token of these tokens of a
    /// prompt.
    fn walk(
        &self,
        prompt: u64,
        blocks: &[u32],
        tokens: Range<u32>,
        mut each: impl FnMut(usize, [u8; CONTENT]) -> Result<()>,
    ) -> Result<()> {
        let shape = &self.shape;
        for layer in self.layers() {
            for token in tokens.clone() {
                let within = token % shape.logical();
                let logical = blocks[(token / shape.logical()) as usize];
                let block = logical * shape.kernel_per_logical + within / shape.block_tokens;
                for head in 0..shape.rank_heads() {
                    let at = self.offset(layer, block, head, within % shape.block_tokens);
                    each(at, content(prompt, layer, shape.head(self.rank, head), token))?;
                }
            }
        }
        Ok(())
    }

    /// Computes the KV of these tokens.
    pub(crate) fn fill(&self, prompt: u64, blocks: &[u32], tokens: Range<u32>) -> Result<()> {
        self.walk(prompt, blocks, tokens, |at, content| self.memory.copy_in(at, &content))
    }

    /// Counts the heads and tokens whose content is wrong.
    pub(crate) fn wrong(&self, prompt: u64, blocks: &[u32], tokens: Range<u32>) -> Result<u64> {
        let mut wrong = 0;
        self.walk(prompt, blocks, tokens, |at, content| {
            let mut is = [0; CONTENT];
            self.memory.copy_out(at, &mut is)?;
            wrong += u64::from(is != content);
            Ok(())
        })?;
        Ok(wrong)
    }

    /// Returns the offset of each kernel block of these logical blocks, and its content at a
    /// prefill.
    pub(crate) fn expected(
        &self,
        prompt: u64,
        blocks: &[u32],
        tokens: u32,
    ) -> Result<Vec<(usize, Vec<u8>)>> {
        let (each, len) = (self.shape.kernel_per_logical, self.shape.block_len());
        let mut expected = BTreeMap::new();
        for layer in self.layers() {
            for block in blocks.iter().flat_map(|logical| logical * each..(logical + 1) * each) {
                expected.insert(self.offset(layer, block, 0, 0), vec![POISON; len]);
            }
        }
        self.walk(prompt, blocks, 0..tokens, |at, content| {
            if let Some(bytes) = expected.get_mut(&(at / len * len)) {
                bytes[at % len..][..CONTENT].copy_from_slice(&content);
            }
            Ok(())
        })?;
        Ok(expected.into_iter().collect())
    }

    /// Returns the offset of the last of these blocks in the last layer.
    pub(crate) fn last(&self, blocks: &[u32]) -> usize {
        let each = self.shape.kernel_per_logical;
        let last = blocks.last().map_or(0, |logical| logical * each + each - 1);
        self.offset(self.layers().end - 1, last, 0, 0)
    }

    /// Flips a bit in a block of the last layer.
    pub(crate) fn spoil(&self, logical: u32) -> Result<()> {
        let last = self.layers().end - 1;
        let at = self.offset(last, logical * self.shape.kernel_per_logical, 0, 0);
        let mut byte = [0];
        self.memory.copy_out(at, &mut byte)?;
        self.memory.copy_in(at, &[byte[0] ^ 1])
    }

    /// Overwrites whole blocks, as another request would.
    pub(crate) fn poison(&self, blocks: &[u32]) -> Result<()> {
        let shape = &self.shape;
        let bytes = vec![POISON; shape.block_len()];
        for layer in self.layers() {
            for logical in blocks {
                for kernel in 0..shape.kernel_per_logical {
                    let at = self.offset(layer, logical * shape.kernel_per_logical + kernel, 0, 0);
                    self.memory.copy_in(at, &bytes)?;
                }
            }
        }
        Ok(())
    }
}
