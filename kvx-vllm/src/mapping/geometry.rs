//! The regions of one rank: where its KV caches lie and how they are divided into blocks.

use std::sync::Arc;

use kvx_core::{Error, ErrorKind, Grid, Result};

use super::layout::KvLayout;

/// The most regions that one rank may describe.
pub const MAX_REGIONS: usize = 65_536;

/// The most kernel blocks per logical block; index arithmetic relies on it.
const MAX_KERNEL_PER_LOGICAL: u32 = 65_536;

/// Which KV cache group a region belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RegionGroup {
    /// All groups: their layers share the memory, and the block ids keep them apart.
    Shared,
    /// This group.
    Of(u32),
}

impl RegionGroup {
    /// From the wire, where -1 means shared. Errors: `Malformed`.
    pub fn from_wire(id: i64) -> Result<Self> {
        match id {
            -1 => Ok(RegionGroup::Shared),
            id => u32::try_from(id).map(RegionGroup::Of).map_err(|_| {
                malformed(format!(
                    "a region of KV cache group {id}: groups count from 0, and -1 means shared"
                ))
            }),
        }
    }

    /// The number on the wire.
    pub fn to_wire(self) -> i64 {
        match self {
            RegionGroup::Shared => -1,
            RegionGroup::Of(group) => i64::from(group),
        }
    }

    /// Whether blocks of `group` lie in such a region.
    pub fn covers(self, group: u32) -> bool {
        self == RegionGroup::Shared || self == RegionGroup::Of(group)
    }
}

/// NIXL's names for kinds of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MemoryType {
    /// Device memory.
    Vram,
    /// Host memory.
    Dram,
}

impl MemoryType {
    /// The memory of a `kv_buffer_device`: `cpu` is host memory, `cuda` and `xpu` are device memory. Errors: `Invalid`.
    pub fn of_buffer_device(device: &str) -> Result<Self> {
        match device {
            "cpu" => Ok(MemoryType::Dram),
            "cuda" | "xpu" => Ok(MemoryType::Vram),
            other => Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "kv_buffer_device \"{other}\": its memory can be registered for cpu, cuda and xpu"
                ),
            )),
        }
    }

    /// From the wire. Errors: `Malformed`.
    pub fn from_wire(name: &str) -> Result<Self> {
        match name {
            "VRAM" => Ok(MemoryType::Vram),
            "DRAM" => Ok(MemoryType::Dram),
            other => Err(malformed(format!(
                "memory of type {:?}: VRAM and DRAM are known",
                shown(other)
            ))),
        }
    }

    /// The name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            MemoryType::Vram => "VRAM",
            MemoryType::Dram => "DRAM",
        }
    }
}

/// One region: the blocks of a layer, or of layers that share memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvRegion {
    /// Address of block 0.
    pub base: u64,
    /// Bytes of a kernel block that are data; padding behind them is never moved.
    pub block_len: u64,
    /// Bytes from a block to the next; at least `block_len`.
    pub block_stride: u64,
    /// Kernel blocks.
    pub blocks: u32,
    /// The group whose block ids speak of it.
    pub group: RegionGroup,
    /// Where it lies.
    pub memory: MemoryType,
    /// The layers in it, in natural order; empty where the peer's version does not tell.
    pub layers: Vec<Arc<str>>,
    /// Layers whose blocks are a part of this region's blocks: offset and length of the part.
    pub packed: Vec<(Arc<str>, u64, u64)>,
}

impl KvRegion {
    /// The first address after the last block; `None` when it is not a number.
    pub fn end(&self) -> Option<u64> {
        self.grid().end()?.checked_add(self.base)
    }

    /// Its blocks as a grid from its base.
    pub fn grid(&self) -> Grid {
        Grid { base: 0, stride: self.block_stride, length: self.block_len, count: self.blocks }
    }

    fn check(&self, position: usize) -> Result<()> {
        let fault = if self.block_len == 0 {
            "has blocks of 0 bytes"
        } else if self.block_stride < self.block_len {
            "has a block stride below its block length"
        } else if self.blocks == 0 {
            "has no blocks"
        } else if self.end().is_none() {
            "ends beyond the address space"
        } else if self.packed.iter().any(|(_, offset, len)| {
            *len == 0 || offset.checked_add(*len).is_none_or(|end| end > self.block_len)
        }) {
            "has a packed layer that escapes its block"
        } else {
            return Ok(());
        };
        Err(malformed(format!(
            "region {position} {fault} ({} blocks of {} bytes, stride {}, from {:#x})",
            self.blocks, self.block_len, self.block_stride, self.base
        )))
    }
}

/// Memory that holds regions: what is registered with a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySpan {
    /// Its first address.
    pub address: u64,
    /// Its bytes.
    pub len: u64,
    /// Where it lies.
    pub memory: MemoryType,
}

/// The memory of one rank: its regions, and what is the same for all of them. Always checked: see [`Geometry::new`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    pub(super) regions: Vec<KvRegion>,
    pub(super) layout: KvLayout,
    pub(super) block_tokens: u32,
    pub(super) kernel_per_logical: u32,
    pub(super) device: u64,
    pub(super) halves: bool,
    pub(super) transposed_keys: bool,
}

impl Geometry {
    /// Checked regions. `block_tokens` are the tokens of a kernel block, `kernel_per_logical` the kernel blocks of a
    /// logical one, `device` the number of the device that the regions lie on.
    ///
    /// # Errors
    /// `Malformed`, in words, for no or too many regions, empty or overlapping blocks, addresses that are no numbers,
    /// and parts that escape their block.
    pub fn new(
        regions: Vec<KvRegion>,
        layout: KvLayout,
        block_tokens: u32,
        kernel_per_logical: u32,
        device: u64,
    ) -> Result<Self> {
        if regions.is_empty() || regions.len() > MAX_REGIONS {
            return Err(malformed(format!(
                "{} regions: there are 1 to {MAX_REGIONS}",
                regions.len()
            )));
        }
        if block_tokens == 0 {
            return Err(malformed("blocks of 0 tokens"));
        }
        if kernel_per_logical == 0 || kernel_per_logical > MAX_KERNEL_PER_LOGICAL {
            return Err(malformed(format!(
                "{kernel_per_logical} kernel blocks per logical block: there are 1 to {MAX_KERNEL_PER_LOGICAL}"
            )));
        }
        for (position, region) in regions.iter().enumerate() {
            region.check(position)?;
        }
        Ok(Geometry {
            regions,
            layout,
            block_tokens,
            kernel_per_logical,
            device,
            halves: false,
            transposed_keys: false,
        })
    }

    /// Each block is a K half and then a V half that are moved apart (FlashInfer up to vLLM 0.20). Errors: `Malformed`
    /// for blocks of an odd number of bytes.
    pub fn with_halves(self) -> Result<Self> {
        match self.regions.iter().position(|region| region.block_len % 2 != 0) {
            None => Ok(Geometry { halves: true, ..self }),
            Some(position) => Err(malformed(format!(
                "region {position} has blocks of {} bytes, which cannot be a K half and a V half",
                self.regions[position].block_len
            ))),
        }
    }

    /// The K of a head lies with its dimensions before its tokens, as vLLM's CPU_ATTN has it: a token is no range of
    /// bytes.
    #[must_use]
    pub fn with_transposed_keys(self) -> Self {
        Geometry { transposed_keys: true, ..self }
    }

    /// The regions, in their order on the wire.
    pub fn regions(&self) -> &[KvRegion] {
        &self.regions
    }

    /// The layout of a block.
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Tokens of a kernel block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Kernel blocks of a logical block.
    pub fn kernel_per_logical(&self) -> u32 {
        self.kernel_per_logical
    }

    /// The device's number.
    pub fn device(&self) -> u64 {
        self.device
    }

    /// Parts that a block is moved in: 2 where K and V are halves of it, else 1.
    pub fn parts(&self) -> u32 {
        if self.halves { 2 } else { 1 }
    }

    /// The fewest memory ranges that hold all regions, by address. Regions whose blocks interleave, as in a cache with
    /// the block outermost, lie in one span.
    pub fn spans(&self) -> Vec<MemorySpan> {
        let mut spans: Vec<MemorySpan> = Vec::new();
        let mut by_address: Vec<&KvRegion> = self.regions.iter().collect();
        by_address.sort_by_key(|region| (region.memory, region.base));
        for region in by_address {
            let end = region.end().expect("checked when the geometry was made");
            match spans.last_mut() {
                Some(last)
                    if last.memory == region.memory && region.base <= last.address + last.len =>
                {
                    last.len = last.len.max(end - last.address);
                }
                _ => spans.push(MemorySpan {
                    address: region.base,
                    len: end - region.base,
                    memory: region.memory,
                }),
            }
        }
        spans
    }

    /// The span that a region lies in, and the region's offset in it: where the grids of its lanes start there.
    pub fn place(&self, region: u32, spans: &[MemorySpan]) -> Option<(usize, u64)> {
        let region = self.regions.get(region as usize)?;
        let within = |span: &MemorySpan| {
            span.memory == region.memory
                && (span.address..=span.address.saturating_add(span.len)).contains(&region.base)
        };
        spans.iter().position(within).map(|span| (span, region.base - spans[span].address))
    }

    /// Whether blocks of a group lie in one of its regions.
    #[doc(hidden)]
    pub fn covers(&self, region: &KvRegion, group: u32) -> bool {
        self.names_no_groups() || region.group.covers(group)
    }

    /// Whether nothing is said of groups: versions that do not tell them count as all of group 0.
    pub(crate) fn names_no_groups(&self) -> bool {
        self.regions.iter().all(|region| region.group == RegionGroup::Of(0))
    }
}

pub(super) fn malformed(sentence: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Malformed, sentence)
}

/// A peer's text, cut to a length that fits into a sentence.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}
