//! Creates the lanes between this rank and each rank of a peer, region by region.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use kvx_core::{Error, ErrorKind, Grid, Op, Result};

use super::caches::Caches;
use super::geometry::{Geometry, RegionGroup};
use super::lanes::{Lane, RegionGrid, SetKey, Source};
use super::pairing::{Match, pair_regions};
use super::peer::{MappingOptions, Remote};
use super::ranks::{Heads, Mapping, Tp};
use super::slices::{RegionPair, Slice};
use crate::ids::WorkerRank;

/// The inputs for all lanes of a map.
pub(super) struct Drawing<'a> {
    pub(super) op: Op,
    pub(super) local: &'a Caches,
    pub(super) tp: Tp,
    pub(super) remote: &'a Remote<'a>,
    /// The number of the producer's blocks in one of the consumer's.
    pub(super) ratio: u32,
    /// True if a range of heads is a range of bytes on the wire.
    pub(super) contiguous: bool,
}

/// The lanes and sets of one pipeline stage.
#[derive(Clone, Default)]
struct StageDrawing {
    lanes: Vec<Lane>,
    sets: Vec<(SetKey, Vec<u32>)>,
}

impl StageDrawing {
    fn add(&mut self, lane: Lane, keys: impl Iterator<Item = SetKey>) {
        let number = self.lanes.len() as u32;
        self.lanes.push(lane);
        for key in keys {
            match self.sets.iter_mut().find(|(known, _)| *known == key) {
                Some((_, members)) => members.push(number),
                None => self.sets.push((key, vec![number])),
            }
        }
    }
}

impl Drawing<'_> {
    /// Adds the sources of one tensor-parallel rank of the peer, one for each pipeline stage.
    pub(super) fn sources(
        &self,
        rank: u32,
        stages: &[&Geometry],
        options: &MappingOptions,
        sources: &mut Vec<Source>,
    ) -> Result<()> {
        let ours = self.local.geometry();
        let matches = pair_regions(ours, stages, self.op == Op::Read)?;
        let peer = Tp::new(rank, self.remote.tp_size)?.with_dcp(self.remote.dcp_size)?;
        let (consumer, producer) = match self.op {
            Op::Read => (self.tp, peer),
            Op::Write => (peer, self.tp),
        };
        let mut mappings: HashMap<Heads, Mapping> = HashMap::new();
        let mut drawn = vec![StageDrawing::default(); stages.len()];
        for (at, found) in matches.iter().enumerate() {
            let Some(found) = found else { continue };
            let heads = self.local.heads(at);
            let mapping = match mappings.entry(heads) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => {
                    refuse_copies(heads, consumer, producer)?;
                    new.insert(Mapping::new(consumer, producer.size(), producer.dcp(), heads)?)
                }
            };
            let (own, theirs) = (&ours.regions()[at], &stages[found.stage].regions()[found.region]);
            let context = |error: Error| {
                let name = own.layers.first().map_or("", |layer| layer);
                Error::new(error.kind(), format!("region {at} ({name}): {error}"))
            };
            let pair =
                self.pair(at, found, stages[found.stage], (consumer.size(), producer.size()));
            let slices = pair.slices(mapping, producer.rank()).map_err(context)?;
            let groups = groups_of(ours, at, options.groups.len())?;
            let memory = (own.memory, theirs.memory);
            for Slice { phase, consumer, producer } in slices {
                let (local, remote) = match self.op {
                    Op::Read => (consumer, producer),
                    Op::Write => (producer, consumer),
                };
                let lane = Lane {
                    local: RegionGrid { region: at as u32, grid: local },
                    remote: RegionGrid { region: found.region as u32, grid: remote },
                };
                drawn[found.stage]
                    .add(lane, groups.iter().map(|group| SetKey { group: *group, phase, memory }));
            }
        }
        for (pp, stage) in drawn.into_iter().enumerate() {
            let rank = WorkerRank { pp: pp as u32, tp: rank };
            sources.push(Source::new(rank, stage.lanes, stage.sets));
        }
        Ok(())
    }

    fn pair(&self, at: usize, found: &Match, stage: &Geometry, sizes: (u32, u32)) -> RegionPair {
        let own = self.local.geometry().regions()[at].grid();
        let their =
            Grid { base: found.offset, length: found.len, ..stage.regions()[found.region].grid() };
        let (consumer, producer) = match self.op {
            Op::Read => (own, their),
            Op::Write => (their, own),
        };
        RegionPair {
            consumer,
            producer,
            sizes,
            heads: self.local.heads(at),
            parts: self.local.geometry().parts(),
            ratio: self.ratio,
            contiguous: self.contiguous,
        }
    }
}

/// Rejects a producer with copies of heads that has more ranks than the consumer, as vLLM does.
fn refuse_copies(heads: Heads, consumer: Tp, producer: Tp) -> Result<()> {
    match heads {
        Heads::Sharded(heads) if producer.size() > consumer.size() && producer.size() > heads => {
            Err(ErrorKind::Incompatible.because(format!(
                "{} producer ranks hold copies of {heads} KV heads, but the consumer has {} ranks: the producer \
                 may have at most {}",
                producer.size(),
                consumer.size(),
                heads.max(consumer.size())
            )))
        }
        _ => Ok(()),
    }
}

/// Returns the groups whose blocks use a region, or one `None` if all regions take the blocks of
/// all groups.
fn groups_of(geometry: &Geometry, region: usize, groups: usize) -> Result<Vec<Option<u32>>> {
    let regions = geometry.regions();
    if regions.iter().all(|other| other.group == regions[0].group) {
        return Ok(vec![None]);
    }
    match regions[region].group {
        RegionGroup::Of(group) if (group as usize) < groups => Ok(vec![Some(group)]),
        RegionGroup::Of(group) => Err(ErrorKind::Invalid.because(format!(
            "region {region} belongs to KV cache group {group}, but there are {groups} groups"
        ))),
        RegionGroup::Shared => Ok((0..groups as u32).map(Some).collect()),
    }
}
