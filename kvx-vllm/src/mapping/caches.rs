//! Conversion of this rank's KV caches to regions.

use std::sync::Arc;

use kvx_core::{ErrorKind, Result};

use super::geometry::{Geometry, KvRegion, MemoryType, RegionGroup};
use super::layout::KvLayout;
use super::names::natural_order;
use super::ranks::Heads;

/// The start addresses of a layer's blocks in this process: `Memory::address` and an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvTensors {
    /// K and V in the same blocks, moved together: one region per layer. Also for the latent of
    /// MLA.
    Together(u64),
    /// All blocks of K at one address and all of V at another: two regions per layer, K first.
    Apart {
        /// The address of K's block 0.
        k: u64,
        /// The address of V's block 0.
        v: u64,
    },
    /// K and V in the same blocks, K's half first, moved separately (FlashInfer up to vLLM 0.20):
    /// one region per layer.
    Halves(u64),
}

/// The KV cache of one layer on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerCache {
    /// The layer's name.
    pub name: Arc<str>,
    /// The start of the layer's blocks.
    pub tensors: KvTensors,
    /// The number of kernel blocks.
    pub blocks: u32,
    /// The bytes of a block in each tensor, without padding.
    pub block_len: u64,
    /// The bytes from one block to the next. More than `block_len` for padded blocks and for rows
    /// of several layers.
    pub block_stride: u64,
    /// The layer's KV cache group.
    pub group: u32,
    /// The distribution of the layer's heads over ranks.
    pub heads: Heads,
    /// The type of the layer's memory.
    pub memory: MemoryType,
}

impl LayerCache {
    /// Creates a layer with adjacent blocks that hold keys and values together, in host memory and
    /// in the first group.
    pub fn packed(
        name: impl Into<Arc<str>>,
        address: u64,
        blocks: u32,
        block_len: u64,
        heads: Heads,
    ) -> Self {
        LayerCache {
            name: name.into(),
            tensors: KvTensors::Together(address),
            blocks,
            block_len,
            block_stride: block_len,
            group: 0,
            heads,
            memory: MemoryType::Dram,
        }
    }
}

/// The caches of this rank: their geometry, and properties that handshakes do not carry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caches {
    geometry: Geometry,
    /// For each region.
    heads: Vec<Heads>,
}

impl Caches {
    /// Creates the regions of these layers, in the natural order of their names. Layers with the
    /// same start address share a region; if they belong to several groups, all groups share it.
    /// `block_tokens` is the number of tokens in a block of the caches. `kernel_per_logical` is 1
    /// unless a logical block, which the engine's lists count, consists of several of these.
    /// `device` is the number of the GPU, 0 for host memory.
    ///
    /// # Errors
    /// `Invalid` for a duplicate name, for layers that share an address but not their blocks or
    /// heads, and if only some layers use [`KvTensors::Halves`]; `Malformed` as [`Geometry::new`].
    pub fn of_layers(
        mut layers: Vec<LayerCache>,
        layout: KvLayout,
        block_tokens: u32,
        kernel_per_logical: u32,
        device: u64,
    ) -> Result<Self> {
        layers.sort_by(|a, b| natural_order(&a.name, &b.name).then_with(|| a.name.cmp(&b.name)));
        if let Some(pair) = layers.windows(2).find(|pair| pair[0].name == pair[1].name) {
            return Err(
                ErrorKind::Invalid.because(format!("layer {} is given twice", pair[0].name))
            );
        }
        let halves =
            layers.iter().filter(|layer| matches!(layer.tensors, KvTensors::Halves(_))).count();
        if halves != 0 && halves != layers.len() {
            return Err(ErrorKind::Invalid
                .because("some layers have K and V as halves of a block and some do not"));
        }
        let mut regions: Vec<KvRegion> = Vec::new();
        let mut heads: Vec<Heads> = Vec::new();
        let mut by_base = std::collections::HashMap::new();
        for layer in &layers {
            let (first, second) = match layer.tensors {
                KvTensors::Together(base) | KvTensors::Halves(base) => (base, None),
                KvTensors::Apart { k, v } => (k, Some(v)),
            };
            for base in [Some(first), second].into_iter().flatten() {
                let new = KvRegion {
                    base,
                    block_len: layer.block_len,
                    block_stride: layer.block_stride,
                    blocks: layer.blocks,
                    group: RegionGroup::Of(layer.group),
                    memory: layer.memory,
                    layers: vec![Arc::clone(&layer.name)],
                    packed: Vec::new(),
                };
                match by_base.entry(base) {
                    std::collections::hash_map::Entry::Vacant(vacant) => {
                        vacant.insert(regions.len());
                        regions.push(new);
                        heads.push(layer.heads);
                    }
                    std::collections::hash_map::Entry::Occupied(at) => {
                        share(&mut regions[*at.get()], heads[*at.get()], new, layer.heads)?;
                    }
                }
            }
        }
        let geometry = Geometry::new(regions, layout, block_tokens, kernel_per_logical, device)?;
        let geometry = if halves > 0 { geometry.with_halves()? } else { geometry };
        Ok(Caches { geometry, heads })
    }

    /// Sets [`Geometry::with_transposed_keys`].
    #[must_use]
    pub fn with_transposed_keys(self) -> Self {
        Caches { geometry: self.geometry.with_transposed_keys(), ..self }
    }

    /// Returns the same regions in host memory. `there` maps the start of a region here to its
    /// start there.
    #[doc(hidden)]
    pub fn in_host_memory(&self, there: impl Fn(u64) -> u64) -> Self {
        let mut geometry = Geometry { device: 0, ..self.geometry.clone() };
        for region in &mut geometry.regions {
            region.base = there(region.base);
            region.memory = MemoryType::Dram;
        }
        Caches { geometry, heads: self.heads.clone() }
    }

    /// Returns the regions.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Returns the distribution of a region's heads over ranks.
    pub(super) fn heads(&self, region: usize) -> Heads {
        self.heads[region]
    }

    /// Returns whether the ranks divide the heads of any region.
    pub(super) fn any_sharded(&self) -> bool {
        self.heads.iter().any(|heads| matches!(heads, Heads::Sharded(_)))
    }
}

fn share(region: &mut KvRegion, heads: Heads, other: KvRegion, others_heads: Heads) -> Result<()> {
    let same = (region.block_len, region.block_stride, region.blocks, region.memory, heads)
        == (other.block_len, other.block_stride, other.blocks, other.memory, others_heads);
    if !same {
        return Err(ErrorKind::Invalid.because(format!(
            "layers {} and {} start at the same address but differ in blocks, memory or heads",
            region.layers[0], other.layers[0]
        )));
    }
    if region.group != other.group {
        region.group = RegionGroup::Shared;
    }
    region.layers.extend(other.layers);
    Ok(())
}
