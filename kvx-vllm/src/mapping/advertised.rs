//! Conversion between the geometry of a rank and the metadata that its handshake carries.

use std::sync::Arc;

use kvx_core::{ErrorKind, Result};

use super::caches::Caches;
use super::geometry::{Geometry, KvRegion, MemoryType, RegionGroup, shown};
use super::layout::KvLayout;
use crate::Version;
use crate::wire::NixlAgentMetadata;

/// The attention backend that stores K with dimensions before tokens.
const TRANSPOSES_KEYS: &str = "CPU_ATTN";

impl Geometry {
    /// Reads the geometry that a peer's rank advertises, and checks every number. Metadata of
    /// versions without groups, names or memory types gets one group, unnamed layers and device
    /// memory.
    ///
    /// # Errors
    /// `Malformed` for lists of different lengths and impossible numbers; `Unsupported` for
    /// state-space layers, extra per-layer pages and prefill context parallelism, which kvx cannot
    /// transfer.
    pub fn advertised(metadata: &NixlAgentMetadata) -> Result<Self> {
        metadata.check_regions()?;
        let fault = if metadata.ssm_sizes != (0, 0) {
            "state-space (Mamba) layers"
        } else if metadata.ple_block_len.is_some() {
            "pages of per-layer embeddings"
        } else if metadata.pcp_size != 1 {
            "prefill context parallelism"
        } else {
            ""
        };
        if !fault.is_empty() {
            return Err(ErrorKind::Unsupported
                .because(format!("the peer has {fault}, which kvx cannot transfer")));
        }
        let mut regions = Vec::with_capacity(metadata.regions());
        for (at, base) in metadata.kv_caches_base_addr.iter().enumerate() {
            let blocks = metadata.blocks_of(at).unwrap_or(0);
            let group = metadata
                .region_group_ids
                .as_ref()
                .map_or(Ok(RegionGroup::Of(0)), |ids| RegionGroup::from_wire(ids[at]));
            let memory = metadata
                .region_mem_types
                .as_ref()
                .map_or(Ok(MemoryType::Vram), |types| MemoryType::from_wire(&types[at]));
            regions.push(KvRegion {
                base: *base,
                block_len: metadata.block_lens[at],
                block_stride: metadata.block_strides[at],
                blocks: small(blocks, "blocks in a region")?,
                group: group?,
                memory: memory?,
                layers: layers(metadata, at),
                packed: Vec::new(),
            });
        }
        place_packed(metadata, &mut regions)?;
        let geometry = Geometry::new(
            regions,
            KvLayout::from_wire(&metadata.kv_cache_layout)?,
            small(metadata.block_size, "tokens in a block")?,
            metadata.physical_blocks_per_logical_kv_block,
            metadata.device_id,
        )?;
        Ok(match metadata.attn_backend_name == TRANSPOSES_KEYS {
            true => geometry.with_transposed_keys(),
            false => geometry,
        })
    }
}

impl Caches {
    /// Writes this rank's regions into the metadata of its handshake, in the form of `version`.
    /// Names of layouts and regions, groups and memory types changed between versions.
    ///
    /// # Errors
    /// `Incompatible` for a layout, padding, groups or counts that the version's metadata cannot
    /// describe.
    pub fn advertise(&self, metadata: &mut NixlAgentMetadata, version: Version) -> Result<()> {
        let geometry = self.geometry();
        let regions = geometry.regions();
        let of = |field: fn(&KvRegion) -> u64| regions.iter().map(field).collect::<Vec<u64>>();
        let counts = of(|region| region.blocks.into());
        check_words(geometry, version)?;
        metadata.kv_caches_base_addr = of(|region| region.base);
        metadata.block_lens = of(|region| region.block_len);
        metadata.block_strides = of(|region| region.block_stride);
        metadata.device_id = geometry.device();
        metadata.num_blocks = counts.iter().copied().max().unwrap_or(0);
        metadata.block_size = geometry.block_tokens().into();
        metadata.physical_blocks_per_logical_kv_block = geometry.kernel_per_logical();
        let layout = geometry.layout();
        let old_name = layout.old_name().filter(|_| !version.names_layouts_by_axes());
        metadata.kv_cache_layout = old_name.unwrap_or(layout.as_str()).to_owned();
        let names = |region: &KvRegion| {
            region.layers.iter().map(|layer| layer.to_string()).collect::<Vec<_>>()
        };
        if version.describes_regions() {
            metadata.region_num_blocks = Some(counts);
            metadata.region_group_ids =
                Some(regions.iter().map(|region| region.group.to_wire()).collect());
            metadata.region_names = Some(
                regions
                    .iter()
                    .map(|region| names(region).into_iter().next().unwrap_or_default())
                    .collect(),
            );
            metadata.region_mem_types =
                Some(regions.iter().map(|region| region.memory.as_str().to_owned()).collect());
        }
        if version.lists_region_members() {
            let shared = regions.iter().any(|region| region.layers.len() > 1);
            metadata.region_members =
                if shared { regions.iter().map(names).collect() } else { Vec::new() };
        }
        Ok(())
    }
}

/// Checks that the version's metadata can describe this geometry.
fn check_words(geometry: &Geometry, version: Version) -> Result<()> {
    let regions = geometry.regions();
    let padded = regions.iter().any(|region| region.block_stride != region.block_len);
    let uneven = regions.iter().any(|region| region.blocks != regions[0].blocks);
    let needs = [
        (
            geometry.kernel_per_logical() != 1,
            Version::V0_21,
            "several kernel blocks per logical block",
        ),
        (geometry.layout().old_name().is_none(), Version::V0_29, "this layout"),
        (padded, Version::V0_29, "padded blocks"),
        (uneven, Version::V0_30, "regions of different numbers of blocks"),
    ];
    match needs.into_iter().find(|(needed, since, _)| *needed && !version.speaks(*since)) {
        None => Ok(()),
        Some((_, since, what)) => Err(ErrorKind::Incompatible.because(format!(
            "the metadata of {version} cannot describe {what}; use {since} or later"
        ))),
    }
}

/// Adds packed layers to their region: the one that lists the layer as a member, otherwise the one
/// that is named after one of the packed layers.
fn place_packed(metadata: &NixlAgentMetadata, regions: &mut [KvRegion]) -> Result<()> {
    let has = |region: &KvRegion, name: &str| region.layers.iter().any(|layer| **layer == *name);
    let packed = &metadata.packed_member_layouts;
    let row =
        regions.iter().position(|region| packed.iter().any(|layer| has(region, &layer.layer)));
    for layer in packed {
        let own = regions.iter().position(|region| has(region, &layer.layer));
        let Some(region) = own.or(row).map(|at| &mut regions[at]) else {
            return Err(ErrorKind::Malformed
                .because(format!("packed layer {} is in no region", shown(&layer.layer))));
        };
        let name: Arc<str> = layer.layer.as_str().into();
        if own.is_none() {
            region.layers.push(Arc::clone(&name));
        }
        region.packed.push((name, layer.offset, layer.len));
    }
    Ok(())
}

fn layers(metadata: &NixlAgentMetadata, region: usize) -> Vec<Arc<str>> {
    let text = |name: &String| Arc::from(name.as_str());
    match (metadata.region_members.get(region), &metadata.region_names) {
        (Some(members), _) if !members.is_empty() => members.iter().map(text).collect(),
        (_, Some(names)) => names.get(region).map(text).into_iter().collect(),
        _ => Vec::new(),
    }
}

fn small(number: u64, what: &str) -> Result<u32> {
    u32::try_from(number).map_err(|_| {
        ErrorKind::Malformed.because(format!("{number} {what} exceed the limit of {}", u32::MAX))
    })
}
