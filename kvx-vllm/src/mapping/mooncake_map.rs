//! The writes of a Mooncake producer's rank into a consumer's worker, region by region, from the
//! layout in that worker's request.

use std::collections::HashMap;

use kvx_core::{Error, ErrorKind, Grid, Result};

use super::caches::Caches;
use super::geometry::{RegionGroup, shown};
use super::lanes::RegionGrid;
use super::mooncake::SenderPair;
use super::ranks::{Heads, Tp};
use crate::wire::mooncake::PullRequest;

/// A local grid and its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendLane {
    /// The blocks that are written, relative to the region's base.
    pub local: RegionGrid,
    /// The consumer's region, by its position in the request.
    pub remote_region: u32,
    /// The destination; `base` is an address of the consumer. The producer does not know the
    /// consumer's number of blocks: `count` is the number that addresses can reach.
    pub remote: Grid,
    /// The group of the blocks.
    pub group: u32,
}

/// The writes of one rank of a producer into one worker of a consumer. It is computed once for each
/// layout of the worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendMap {
    lanes: Vec<SendLane>,
    blocks: u32,
}

impl SendMap {
    /// Creates the map of a rank with these caches to the worker that sent this request.
    ///
    /// Layers are paired by name if both sides name them. A name that occurs several times is
    /// paired in order, and layers of another pipeline stage are left to that stage. Otherwise
    /// regions are paired by position.
    ///
    /// # Errors
    /// `Malformed` for lists that do not match each other and invalid addresses; `Incompatible`,
    /// with both sides' numbers, if layers, groups or block lengths do not match, or heads cannot
    /// be divided.
    pub fn new(local: &Caches, tp: Tp, told: &PullRequest) -> Result<Self> {
        check(told)?;
        let consumer = Tp::new(told.remote_tp_rank, told.remote_tp_size)?;
        let geometry = local.geometry();
        let mut lanes = Vec::new();
        for (at, place) in pairs(local, told)? {
            let region = &geometry.regions()[at];
            let context = |error: Error| {
                let name = region.layers.first().map_or("", |layer| layer);
                Error::new(error.kind(), format!("region {at} ({name}): {error}"))
            };
            let RegionGroup::Of(group) = region.group else {
                return Err(context(
                    ErrorKind::Incompatible.because("layers of several KV cache groups share it"),
                ));
            };
            let theirs = told.registered_group_indices.get(place);
            if let Some(theirs) = theirs.filter(|theirs| **theirs != i64::from(group)) {
                let sentence =
                    format!("it is in KV cache group {group} here and {theirs} at the peer");
                return Err(context(ErrorKind::Incompatible.because(sentence)));
            }
            let (stride, len) = (told.block_lens[place], told.kv_block_lens[place]);
            let (kv_heads, producer_replicated) = match local.heads(at) {
                Heads::Replicated => (None, true),
                Heads::Sharded(heads) => (Some(heads), tp.size() > heads),
            };
            let divided = kv_heads.is_some() && tp.size() != consumer.size();
            if divided && !geometry.layout().has_contiguous_heads() {
                let sentence = "ranks divide its blocks by heads, which only a layout with heads before tokens allows: \
                                use LBHNC";
                return Err(context(ErrorKind::Incompatible.because(sentence)));
            }
            if divided && (region.block_stride != region.block_len || stride != len) {
                let sentence = "ranks divide its blocks by heads, but they are padded: use the same tensor-parallel \
                                size";
                return Err(context(ErrorKind::Incompatible.because(sentence)));
            }
            let parts = if divided { u64::from(geometry.parts()) } else { 1 };
            let (own_part, their_part) = (region.block_len / parts, len / parts);
            let pair = SenderPair {
                producer: tp,
                consumer,
                producer_len: own_part,
                consumer_len: their_part,
                kv_heads,
                producer_replicated,
            };
            let plan = pair.plan().map_err(context)?;
            check_heads(&pair).map_err(context)?;
            if !plan.sends {
                continue;
            }
            for part in 0..parts {
                let own = part * own_part + plan.source_offset;
                let base =
                    told.kv_caches_base_addr[place] + part * their_part + plan.destination_offset;
                let count = (u64::MAX - base - plan.len) / stride + 1;
                let grid = Grid { base: own, length: plan.len, ..region.grid() };
                lanes.push(SendLane {
                    local: RegionGrid { region: at as u32, grid },
                    remote_region: place as u32,
                    remote: Grid {
                        base,
                        stride,
                        length: plan.len,
                        count: u32::try_from(count).unwrap_or(u32::MAX),
                    },
                    group,
                });
            }
        }
        let blocks = lanes.iter().map(|lane| lane.remote.count).min().unwrap_or(0);
        Ok(SendMap { lanes, blocks })
    }

    /// Returns the writes. Empty if another rank writes the same bytes, or other stages have the
    /// layers.
    pub fn lanes(&self) -> &[SendLane] {
        &self.lanes
    }

    /// Returns the number of the consumer's blocks that addresses can reach.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }
}

/// Checks that the block lengths of both sides match their numbers of heads.
fn check_heads(pair: &SenderPair) -> Result<()> {
    let per_rank = |tp: Tp| match pair.kv_heads {
        Some(heads) => u64::from(Heads::Sharded(heads).per_rank(tp.size())),
        None => 1,
    };
    let (own, theirs) = (per_rank(pair.producer), per_rank(pair.consumer));
    if pair.producer_len.checked_mul(theirs) == pair.consumer_len.checked_mul(own) {
        return Ok(());
    }
    Err(ErrorKind::Incompatible.because(format!(
        "blocks of {} bytes for {own} heads here, but of {} for {theirs} heads at the peer",
        pair.producer_len, pair.consumer_len
    )))
}

/// Returns the pairs of a local region and a region of the consumer that hold the same layer, by
/// position.
fn pairs(local: &Caches, told: &PullRequest) -> Result<Vec<(usize, usize)>> {
    let regions = local.geometry().regions();
    if told.registered_layer_names.is_empty()
        || regions.iter().any(|region| region.layers.is_empty())
    {
        if regions.len() != told.kv_caches_base_addr.len() {
            return Err(ErrorKind::Incompatible.because(format!(
                "{} regions here but {} at the peer, and no layer names to pair them by",
                regions.len(),
                told.kv_caches_base_addr.len()
            )));
        }
        return Ok((0..regions.len()).map(|at| (at, at)).collect());
    }
    let mut offered: HashMap<&str, Vec<usize>> = HashMap::new();
    for (at, name) in told.registered_layer_names.iter().enumerate() {
        offered.entry(name).or_default().push(at);
    }
    let mut taken: HashMap<&str, usize> = HashMap::new();
    let mut found = Vec::with_capacity(regions.len());
    for (at, region) in regions.iter().enumerate() {
        // A region of several layers goes by any of their names.
        let Some((name, places)) =
            region.layers.iter().find_map(|layer| Some((&**layer, offered.get(&**layer)?)))
        else {
            continue;
        };
        let count = taken.entry(name).or_default();
        if let Some(place) = places.get(*count) {
            found.push((at, *place));
        }
        *count += 1;
    }
    if let Some((name, count)) =
        taken.into_iter().find(|(name, count)| offered[name].len() != *count)
    {
        return Err(ErrorKind::Incompatible.because(format!(
            "layer {} is in {count} regions here but in {} at the peer",
            shown(name),
            offered[name].len()
        )));
    }
    Ok(found)
}

/// Checks that a consumer's layout is consistent.
fn check(told: &PullRequest) -> Result<()> {
    let regions = told.kv_caches_base_addr.len();
    let lists = [
        ("block_lens", told.block_lens.len(), false),
        ("kv_block_lens", told.kv_block_lens.len(), false),
        ("registered_layer_names", told.registered_layer_names.len(), true),
        ("registered_layer_indices", told.registered_layer_indices.len(), true),
        ("registered_group_indices", told.registered_group_indices.len(), true),
        ("registered_shared_group_ids", told.registered_shared_group_ids.len(), true),
        ("registered_row_offsets", told.registered_row_offsets.len(), true),
    ];
    let wrong = lists
        .into_iter()
        .find(|(_, len, may_be_absent)| *len != regions && !(*may_be_absent && *len == 0));
    if let Some((name, len, _)) = wrong {
        return Err(malformed(format!(
            "{name} has {len} entries, but kv_caches_base_addr has {regions}"
        )));
    }
    let mut seen = HashMap::new();
    for (at, base) in told.kv_caches_base_addr.iter().enumerate() {
        let (stride, len) = (told.block_lens[at], told.kv_block_lens[at]);
        if len == 0 || len > stride || base.checked_add(stride).is_none() {
            return Err(malformed(format!(
                "region {at} has blocks of {len} bytes, stride {stride}, from {base:#x}"
            )));
        }
        if let Some(other) = seen.insert(*base, at) {
            return Err(malformed(format!("regions {other} and {at} start at the same address")));
        }
    }
    Ok(())
}

/// Writes the layout of these caches into a worker's request.
///
/// # Errors
/// `Unsupported` for regions that layers of several KV cache groups share.
pub fn tell_layout(local: &Caches, told: &mut PullRequest) -> Result<()> {
    told.forget_layout();
    for region in local.geometry().regions() {
        let RegionGroup::Of(group) = region.group else {
            return Err(ErrorKind::Unsupported.because(
                "layers of several KV cache groups share memory: kvx's MooncakeConnector does \
                 not support that",
            ));
        };
        told.kv_caches_base_addr.push(region.base);
        told.block_lens.push(region.block_stride);
        told.kv_block_lens.push(region.block_len);
        let name = region.layers.first().map_or("", |layer| layer);
        told.registered_layer_names.push(name.to_owned());
        told.registered_layer_indices.push(number_of_layer(name));
        told.registered_group_indices.push(i64::from(group));
        told.registered_shared_group_ids.push(vec![i64::from(group)]);
    }
    Ok(())
}

/// Returns the number in a layer's name, as vLLM finds it: it rejects a consumer with another
/// number. vLLM's layer names have one number.
fn number_of_layer(name: &str) -> i64 {
    name.split('.').find_map(|part| part.parse().ok()).unwrap_or(0)
}

fn malformed(why: String) -> Error {
    ErrorKind::Malformed.because(format!("malformed layout of a decode worker: {why}"))
}
