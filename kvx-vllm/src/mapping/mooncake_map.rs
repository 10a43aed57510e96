//! What a Mooncake producer's rank writes into a consumer's worker, region by region, drawn from what that has told.

use std::collections::HashMap;

use kvx_core::{Error, ErrorKind, Grid, Result};

use super::caches::Caches;
use super::geometry::{RegionGroup, shown};
use super::lanes::RegionGrid;
use super::mooncake::SenderPair;
use super::ranks::{Heads, Tp};
use crate::wire::mooncake::PullRequest;

/// A grid here and where its blocks go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendLane {
    /// What is written, from the region's base.
    pub local: RegionGrid,
    /// The consumer's region, by its place in what it has told.
    pub remote_region: u32,
    /// Where it goes: `base` is an address of the consumer. How many blocks it has, only the consumer knows; `count` is
    /// what addresses can name.
    pub remote: Grid,
    /// The group whose blocks these are.
    pub group: u32,
}

/// What one rank of a producer writes into one worker of a consumer: drawn up once for each layout that one tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendMap {
    lanes: Vec<SendLane>,
    blocks: u32,
}

impl SendMap {
    /// The map of a rank with these caches to a worker that has told this of itself.
    ///
    /// By the names of layers, where both sides tell them: a name that comes several times is paired in order, and a
    /// layer that is another pipeline stage's is left to that. Else by position.
    ///
    /// # Errors
    /// `Malformed` for lists that do not fit each other and addresses that are none; `Incompatible`, with both sides'
    /// numbers, where layers, groups or block lengths do not fit, or heads cannot be divided.
    pub fn new(local: &Caches, tp: Tp, told: &PullRequest) -> Result<Self> {
        check(told)?;
        let consumer = Tp::new(told.remote_tp_rank, told.remote_tp_size)?;
        let geometry = local.geometry();
        let mut lanes = Vec::new();
        for (at, place) in pairs(local, told)? {
            let region = &geometry.regions()[at];
            let in_words = |error: Error| {
                let name = region.layers.first().map_or("", |layer| layer);
                Error::new(error.kind(), format!("region {at} ({name}): {error}"))
            };
            let RegionGroup::Of(group) = region.group else {
                return Err(in_words(incompatible(
                    "layers of several KV cache groups share it".into(),
                )));
            };
            let theirs = told.registered_group_indices.get(place).copied();
            if theirs.is_some_and(|theirs| theirs != i64::from(group)) {
                let sentence = format!("KV cache group {group} here and {theirs:?} there");
                return Err(in_words(incompatible(sentence)));
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
                return Err(in_words(incompatible(sentence.into())));
            }
            if divided && (region.block_stride != region.block_len || stride != len) {
                let sentence = "ranks divide its blocks by heads, and they are padded: use the same tensor-parallel \
                                size";
                return Err(in_words(incompatible(sentence.into())));
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
            let plan = pair.plan().map_err(in_words)?;
            check_heads(&pair).map_err(in_words)?;
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

    /// What is written. Nothing: another rank with the same bytes does it, or other stages have the layers.
    pub fn lanes(&self) -> &[SendLane] {
        &self.lanes
    }

    /// How many blocks of the consumer addresses can name.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }
}

/// The lengths that both sides' ranks must have for their numbers of heads.
fn check_heads(pair: &SenderPair) -> Result<()> {
    let per_rank = |tp: Tp| match pair.kv_heads {
        Some(heads) => u64::from(Heads::Sharded(heads).per_rank(tp.size())),
        None => 1,
    };
    let (own, theirs) = (per_rank(pair.producer), per_rank(pair.consumer));
    if pair.producer_len.checked_mul(theirs) == pair.consumer_len.checked_mul(own) {
        return Ok(());
    }
    Err(incompatible(format!(
        "blocks of {} bytes for {own} heads here and of {} for {theirs} there",
        pair.producer_len, pair.consumer_len
    )))
}

/// Places of regions here and in what a consumer has told that hold the same layer.
fn pairs(local: &Caches, told: &PullRequest) -> Result<Vec<(usize, usize)>> {
    let regions = local.geometry().regions();
    if told.registered_layer_names.is_empty()
        || regions.iter().any(|region| region.layers.is_empty())
    {
        if regions.len() != told.kv_caches_base_addr.len() {
            return Err(incompatible(format!(
                "{} regions here and {} there, and without layer names they cannot be told apart",
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
        // Layers that share memory are told by any of their names.
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
        return Err(incompatible(format!(
            "layer {} lies in {count} regions here and {} there",
            shown(name),
            offered[name].len()
        )));
    }
    Ok(found)
}

/// What a consumer tells must make sense by itself.
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
            "{name} is of {len} regions, kv_caches_base_addr of {regions}"
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

/// Writes the layout of these caches into what a worker tells of itself.
///
/// # Errors
/// `Unsupported` for regions that layers of several KV cache groups share.
pub fn tell_layout(local: &Caches, told: &mut PullRequest) -> Result<()> {
    told.forget_layout();
    for region in local.geometry().regions() {
        let RegionGroup::Of(group) = region.group else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "layers of several KV cache groups share memory: a MooncakeConnector of kvx does not move them",
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

/// The number in a layer's name, as vLLM finds it: it refuses a consumer that tells another. Its names have one number.
fn number_of_layer(name: &str) -> i64 {
    name.split('.').find_map(|part| part.parse().ok()).unwrap_or(0)
}

fn incompatible(sentence: String) -> Error {
    Error::new(ErrorKind::Incompatible, sentence)
}

fn malformed(why: String) -> Error {
    Error::new(ErrorKind::Malformed, format!("malformed layout of a decode's worker: {why}"))
}
