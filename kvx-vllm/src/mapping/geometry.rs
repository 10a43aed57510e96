//! The regions of one rank: the memory of its KV caches and its division into blocks.

use std::sync::Arc;

use kvx_core::{ErrorKind, Grid, Result};

use super::layout::KvLayout;

/// The most regions of one rank.
pub const MAX_REGIONS: usize = 65_536;

/// The most kernel blocks in a logical block. Index arithmetic relies on it.
const MAX_KERNEL_PER_LOGICAL: u32 = 65_536;

/// The KV cache group of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RegionGroup {
    /// All groups: their layers share the memory and use different block ids.
    Shared,
    /// This group only.
    Of(u32),
}

impl RegionGroup {
    /// Reads a group from the wire, where -1 means shared. Errors: `Malformed`.
    pub fn from_wire(id: i64) -> Result<Self> {
        match id {
            -1 => Ok(RegionGroup::Shared),
            id => u32::try_from(id).map(RegionGroup::Of).map_err(|_| {
                ErrorKind::Malformed.because(format!(
                    "invalid KV cache group {id}: groups count from 0, and -1 means shared"
                ))
            }),
        }
    }

    /// Returns the number on the wire.
    pub fn to_wire(self) -> i64 {
        match self {
            RegionGroup::Shared => -1,
            RegionGroup::Of(group) => i64::from(group),
        }
    }

    /// Returns whether blocks of `group` are in a region of this group.
    pub fn covers(self, group: u32) -> bool {
        self == RegionGroup::Shared || self == RegionGroup::Of(group)
    }
}

/// A memory type, in NIXL's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MemoryType {
    /// Device memory.
    Vram,
    /// Host memory.
    Dram,
}

impl MemoryType {
    /// Reads a type from the wire. Errors: `Malformed`.
    pub fn from_wire(name: &str) -> Result<Self> {
        match name {
            "VRAM" => Ok(MemoryType::Vram),
            "DRAM" => Ok(MemoryType::Dram),
            other => Err(ErrorKind::Malformed
                .because(format!("unknown memory type {:?}: expected VRAM or DRAM", shown(other)))),
        }
    }

    /// Returns the name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            MemoryType::Vram => "VRAM",
            MemoryType::Dram => "DRAM",
        }
    }
}

/// The blocks of one layer, or of several layers that share memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvRegion {
    /// The address of block 0.
    pub base: u64,
    /// The bytes of data in a kernel block. Padding after them is never moved.
    pub block_len: u64,
    /// The bytes from one block to the next; at least `block_len`.
    pub block_stride: u64,
    /// The number of kernel blocks.
    pub blocks: u32,
    /// The group whose block ids refer to the region.
    pub group: RegionGroup,
    /// The memory type.
    pub memory: MemoryType,
    /// The layers in the region, in natural order. Empty if the peer's version does not name them.
    pub layers: Vec<Arc<str>>,
    /// Layers that occupy a part of each block of this region: name, offset and length of the part.
    pub packed: Vec<(Arc<str>, u64, u64)>,
}

impl KvRegion {
    /// Returns the first address after the last block, or `None` on overflow.
    pub fn end(&self) -> Option<u64> {
        self.grid().end()?.checked_add(self.base)
    }

    /// Returns the region's blocks as a grid relative to its base.
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
            "has a packed layer that exceeds its block"
        } else {
            return Ok(());
        };
        Err(ErrorKind::Malformed.because(format!(
            "region {position} {fault} ({} blocks of {} bytes, stride {}, from {:#x})",
            self.blocks, self.block_len, self.block_stride, self.base
        )))
    }
}

/// Memory that holds regions and is registered with a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySpan {
    /// The first address.
    pub address: u64,
    /// The length in bytes.
    pub len: u64,
    /// The memory type.
    pub memory: MemoryType,
}

/// The memory of one rank: its regions and their common properties. Always valid: see
/// [`Geometry::new`].
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
    /// Checks regions. `block_tokens` is the number of tokens in a kernel block,
    /// `kernel_per_logical` the number of kernel blocks in a logical one, `device` the number of
    /// the regions' device.
    ///
    /// # Errors
    /// `Malformed`, with the reason, for no or too many regions, empty or overlapping blocks,
    /// addresses that overflow, and parts that exceed their block.
    pub fn new(
        regions: Vec<KvRegion>,
        layout: KvLayout,
        block_tokens: u32,
        kernel_per_logical: u32,
        device: u64,
    ) -> Result<Self> {
        if regions.is_empty() || regions.len() > MAX_REGIONS {
            return Err(ErrorKind::Malformed
                .because(format!("{} regions: expected 1 to {MAX_REGIONS}", regions.len())));
        }
        if block_tokens == 0 {
            return Err(ErrorKind::Malformed.because("blocks of 0 tokens"));
        }
        if kernel_per_logical == 0 || kernel_per_logical > MAX_KERNEL_PER_LOGICAL {
            return Err(ErrorKind::Malformed.because(format!(
                "{kernel_per_logical} kernel blocks per logical block: expected 1 to {MAX_KERNEL_PER_LOGICAL}"
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

    /// Marks each block as a K half and then a V half that are moved separately (FlashInfer up to
    /// vLLM 0.20). Errors: `Malformed` for blocks of an odd number of bytes.
    pub fn with_halves(self) -> Result<Self> {
        match self.regions.iter().position(|region| region.block_len % 2 != 0) {
            None => Ok(Geometry { halves: true, ..self }),
            Some(position) => Err(ErrorKind::Malformed.because(format!(
                "region {position} has blocks of {} bytes, which cannot be a K half and a V half",
                self.regions[position].block_len
            ))),
        }
    }

    /// Marks K as stored with dimensions before tokens within a head, as in vLLM's CPU_ATTN: a
    /// token is not a range of bytes.
    #[must_use]
    pub fn with_transposed_keys(self) -> Self {
        Geometry { transposed_keys: true, ..self }
    }

    /// Returns the regions, in their order on the wire.
    pub fn regions(&self) -> &[KvRegion] {
        &self.regions
    }

    /// Returns the layout of a block.
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Returns the tokens in a kernel block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Returns the kernel blocks in a logical block.
    pub fn kernel_per_logical(&self) -> u32 {
        self.kernel_per_logical
    }

    /// Returns the device's number.
    pub fn device(&self) -> u64 {
        self.device
    }

    /// Returns the number of parts that a block is moved in: 2 if K and V are halves of it, else 1.
    pub fn parts(&self) -> u32 {
        if self.halves { 2 } else { 1 }
    }

    /// Returns the smallest set of memory ranges that holds all regions, ordered by address.
    /// Regions whose blocks interleave, as in a cache with blocks outermost, share one span.
    pub fn spans(&self) -> Vec<MemorySpan> {
        let mut spans: Vec<MemorySpan> = Vec::new();
        let mut by_address: Vec<&KvRegion> = self.regions.iter().collect();
        by_address.sort_by_key(|region| (region.memory, region.base));
        for region in by_address {
            let end = region.end().expect("checked when the geometry was created");
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

    /// Returns the span that holds a region, and the region's offset in it: the offset of its
    /// lanes' grids there.
    pub fn place(&self, region: u32, spans: &[MemorySpan]) -> Option<(usize, u64)> {
        let region = self.regions.get(region as usize)?;
        let within = |span: &MemorySpan| {
            span.memory == region.memory
                && (span.address..=span.address.saturating_add(span.len)).contains(&region.base)
        };
        spans.iter().position(within).map(|span| (span, region.base - spans[span].address))
    }

    /// Returns whether blocks of a group are in one of its regions.
    #[doc(hidden)]
    pub fn covers(&self, region: &KvRegion, group: u32) -> bool {
        self.names_no_groups() || region.group.covers(group)
    }

    /// Returns whether the geometry names no groups: versions without groups count as all of group
    /// 0.
    pub(crate) fn names_no_groups(&self) -> bool {
        self.regions.iter().all(|region| region.group == RegionGroup::Of(0))
    }
}

/// Cuts a peer's text to a length that fits into an error message.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}
