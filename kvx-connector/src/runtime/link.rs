//! Connections to a peer's workers: their agents, and the grids that blocks move between.

use std::sync::Arc;

use kvx_core::{Blocks, ErrorKind, GridSet, Peer, PeerRegion, Region, Result};

use super::digests::PeerDigests;
use super::peer_regions::{ImportedRegions, PeerRegions};
use kvx_vllm::engine::{GroupMove, Move, Part, WorkerRank};
use kvx_vllm::mapping::{Geometry, Pairing, PeerMap, Source};

/// A connection of one local worker to an engine.
#[derive(Debug)]
pub(super) struct PeerLink {
    pub(super) map: PeerMap,
    /// The workers, in the order of the map's sources.
    pub(super) workers: Vec<LinkedWorker>,
}

/// A worker of a peer, with its agent and the grids that blocks move between.
#[derive(Debug)]
pub(super) struct LinkedWorker {
    pub(super) rank: WorkerRank,
    pub(super) peer: Peer,
    pub(super) words: Option<PeerRegion>,
    pub(super) digests: Option<Arc<PeerDigests>>,
    /// The reason why the worker is reached as a plain NIXL agent, if it is.
    pub(super) as_nixl: Option<String>,
    pub(super) geometry: Geometry,
    pub(super) sets: Vec<Option<(Grids<Region>, Grids<PeerRegion>)>>,
}

/// A grid set with a short `Debug`.
pub(super) struct Grids<R>(pub(super) GridSet<R>);

impl<R> std::fmt::Debug for Grids<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Grids")
    }
}

impl PeerLink {
    /// Returns a worker of the peer. Errors: `Invalid` if this connection does not lead to it.
    pub(super) fn worker(&self, rank: WorkerRank) -> Result<&LinkedWorker> {
        let unknown = || {
            ErrorKind::Invalid.because("this connection does not lead to that worker of the peer")
        };
        self.workers.iter().find(|worker| worker.rank == rank).ok_or_else(unknown)
    }

    /// Returns the agents of the connected workers.
    pub(super) fn peers(&self) -> impl Iterator<Item = &Peer> {
        self.workers.iter().map(|worker| &worker.peer)
    }

    /// Returns the pairs of blocks for a plan that moves units of a group in one part. With a
    /// `grant` they use the regions that the peer granted.
    pub(super) fn pairs(
        &self,
        part: Part,
        group: &GroupMove,
        grant: Option<&WriteGrant>,
    ) -> Result<Vec<(Blocks<Region>, Blocks<PeerRegion>)>> {
        let (worker, pairings) = self.pairings(part, group)?;
        let pair = |Pairing { set, local, remote }: Pairing| {
            let (ours, theirs) = worker.sets[set].as_ref()?;
            let theirs = match grant {
                None => theirs,
                Some(grant) => grant.sets[set].as_ref()?,
            };
            Some((ours.0.blocks(local), theirs.0.blocks(remote)))
        };
        Ok(pairings.into_iter().filter_map(pair).collect())
    }

    /// Returns which units of which sets that plan moves.
    pub(super) fn pairings(
        &self,
        part: Part,
        group: &GroupMove,
    ) -> Result<(&LinkedWorker, Vec<Pairing>)> {
        let missing = || ErrorKind::Invalid.because("no blocks move between these workers");
        let at =
            self.workers.iter().position(|worker| worker.rank == part.rank).ok_or_else(missing)?;
        let (_, sets) = self.map.part(part).ok_or_else(missing)?;
        let mut pairings = self.map.pairings(at, group.group, &group.local, &group.remote)?;
        pairings.retain(|pairing| sets.contains(&pairing.set));
        Ok((&self.workers[at], pairings))
    }
}

/// The regions that a decode has granted to a write, as grids.
pub(super) struct WriteGrant {
    pub(super) imported: ImportedRegions,
    pub(super) sets: Vec<Option<Grids<PeerRegion>>>,
}

impl WriteGrant {
    /// Imports the grants for one part of a write. Returns `None` if the decode grants nothing,
    /// because it is not a kvx engine.
    pub(super) fn of(order: &Move, worker: &LinkedWorker, source: &Source) -> Result<Option<Self>> {
        let Some(imported) = ImportedRegions::of(order, &worker.peer)? else { return Ok(None) };
        let regions = PeerRegions::granted(&imported.regions)?;
        let grids = |set: usize| -> Result<Option<Grids<PeerRegion>>> {
            let (_, theirs): (Vec<_>, Vec<_>) = source.grids(set).unzip();
            let made = |grids: GridSet<PeerRegion>| Some(Grids(grids));
            if theirs.is_empty() {
                Ok(None)
            } else {
                regions.grids(&worker.geometry, theirs.into_iter()).map(made)
            }
        };
        let sets = (0..source.sets().len()).map(grids).collect::<Result<_>>()?;
        Ok(Some(WriteGrant { imported, sets }))
    }
}
