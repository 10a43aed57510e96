//! From the KV caches of this rank to its regions.

use std::sync::Arc;

use kvx_core::{Error, ErrorKind, Result};

use super::geometry::{Geometry, KvRegion, MemoryType, RegionGroup};
use super::layout::KvLayout;
use super::names::natural_order;
use super::ranks::Heads;

/// Where the blocks of a layer start: addresses of this process, `Memory::address` and an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvTensors {
    /// K and V in the same blocks, moved as one: one region per layer. Also the latent of MLA.
    Together(u64),
    /// All blocks of K at one address, all of V at another: two regions per layer, K first.
    Apart {
        /// K's block 0.
        k: u64,
        /// V's block 0.
        v: u64,
    },
    /// K and V in the same blocks, K's half first, moved as two (FlashInfer up to vLLM 0.20): one region per layer.
    Halves(u64),
}

/// The KV cache of one layer on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerCache {
    /// The layer's name.
    pub name: Arc<str>,
    /// Where its blocks start.
    pub tensors: KvTensors,
    /// Kernel blocks.
    pub blocks: u32,
    /// Bytes of a block in each tensor, without padding.
    pub block_len: u64,
    /// Bytes from a block to the next; more than `block_len` for padded blocks and for rows that hold several layers.
    pub block_stride: u64,
    /// Its KV cache group.
    pub group: u32,
    /// How its heads are spread over ranks.
    pub heads: Heads,
    /// Where it lies.
    pub memory: MemoryType,
}

impl LayerCache {
    /// One whose blocks lie behind one another, keys and values of each together, in host memory and the first group.
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

/// The caches of this rank: its geometry, and what only their owner knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caches {
    geometry: Geometry,
    /// Per region.
    heads: Vec<Heads>,
}

impl Caches {
    /// The regions of these layers, in the natural order of their names. Layers that start at the same address share a
    /// region; if they are of several groups, the region is shared by all. `kernel_per_logical` is 1 unless a block is
    /// made of several of the kernels', `device` the number of the GPU, 0 in host memory.
    ///
    /// # Errors
    /// `Invalid` for a name given twice, layers that share an address but not their blocks or heads, and mixed styles
    /// of [`KvTensors::Halves`]; `Malformed` as [`Geometry::new`].
    pub fn of_layers(
        mut layers: Vec<LayerCache>,
        layout: KvLayout,
        block_tokens: u32,
        kernel_per_logical: u32,
        device: u64,
    ) -> Result<Self> {
        layers.sort_by(|a, b| natural_order(&a.name, &b.name).then_with(|| a.name.cmp(&b.name)));
        if let Some(pair) = layers.windows(2).find(|pair| pair[0].name == pair[1].name) {
            return Err(invalid(format!("layer {} is given twice", pair[0].name)));
        }
        let halves =
            layers.iter().filter(|layer| matches!(layer.tensors, KvTensors::Halves(_))).count();
        if halves != 0 && halves != layers.len() {
            return Err(invalid("some layers have K and V as halves of a block and some have not"));
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

    /// As [`Geometry::with_transposed_keys`].
    #[must_use]
    pub fn with_transposed_keys(self) -> Self {
        Caches { geometry: self.geometry.with_transposed_keys(), ..self }
    }

    /// The same regions in memory of the host: where each begins there, by where it begins here.
    #[doc(hidden)]
    pub fn in_host_memory(&self, there: impl Fn(u64) -> u64) -> Self {
        let mut geometry = Geometry { device: 0, ..self.geometry.clone() };
        for region in &mut geometry.regions {
            region.base = there(region.base);
            region.memory = MemoryType::Dram;
        }
        Caches { geometry, heads: self.heads.clone() }
    }

    /// The regions.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// How the heads of a region are spread over ranks.
    pub(super) fn heads(&self, region: usize) -> Heads {
        self.heads[region]
    }

    /// Whether any region has heads that ranks divide among them.
    pub(super) fn any_sharded(&self) -> bool {
        self.heads.iter().any(|heads| matches!(heads, Heads::Sharded(_)))
    }
}

fn share(region: &mut KvRegion, heads: Heads, other: KvRegion, others_heads: Heads) -> Result<()> {
    let same = (region.block_len, region.block_stride, region.blocks, region.memory, heads)
        == (other.block_len, other.block_stride, other.blocks, other.memory, others_heads);
    if !same {
        return Err(invalid(format!(
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

fn invalid(sentence: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Invalid, sentence)
}
