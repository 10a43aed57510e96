//! From a peer's handshake to links and grids: drawn up once for each connection.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::{
    Completion, Error, ErrorKind, GridSet, Metadata, Op, Peer, PeerRegion, Region, Result,
};

use super::builder::RIXL;
use super::digests::PeerDigests;
use super::metrics::HANDSHAKE;
use super::push::WriteGrant;
use super::rank::{PeerRegions, Registered};
use super::side::handshake_failure;
use super::state::Shared;
use crate::engine::{Connection, HandshakeFailure, Part, PeerPlan, RemoteEngine, WorkerRank};
use crate::mapping::{Geometry, Pairing, PeerMap, Remote, RemoteRank, Source, Tp};
use crate::nixl::NixlPeer;
use crate::params::TransferMode;
use crate::wire::{Expectation, HandshakenPeer, NixlAgentMetadata};

/// How long the first link to a worker of a peer may take.
const LINK_LIMIT: Duration = Duration::from_secs(10);

/// A connection to an engine, as one worker of this engine uses it.
#[derive(Debug)]
pub(super) struct PeerLink {
    map: PeerMap,
    /// In the order of the map's sources.
    workers: Vec<LinkedWorker>,
}

/// A worker of a peer: its agent, and the grids that blocks move between.
#[derive(Debug)]
pub(super) struct LinkedWorker {
    rank: WorkerRank,
    pub(super) peer: Peer,
    pub(super) words: Option<PeerRegion>,
    pub(super) digests: Option<Arc<PeerDigests>>,
    /// Why it is reached as a plain NIXL agent, if it is.
    pub(super) as_nixl: Option<String>,
    pub(super) geometry: Geometry,
    sets: Vec<Option<(Grids<Region>, Grids<PeerRegion>)>>,
}

/// A grid set without its words.
pub(super) struct Grids<R>(pub(super) GridSet<R>);

impl<R> std::fmt::Debug for Grids<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Grids")
    }
}

impl PeerLink {
    pub(super) fn map(&self) -> &PeerMap {
        &self.map
    }

    pub(super) fn worker(&self, rank: WorkerRank) -> Option<&LinkedWorker> {
        self.workers.iter().find(|worker| worker.rank == rank)
    }

    /// The agents that it leads to.
    pub(super) fn peers(&self) -> impl Iterator<Item = &Peer> {
        self.workers.iter().map(|worker| &worker.peer)
    }

    /// The pairs of a plan that moves these units of a group, of one part; by what the peer has granted, if it has.
    pub(super) fn pairs(
        &self,
        part: Part,
        group: &crate::engine::GroupMove,
        grant: Option<&WriteGrant>,
    ) -> Result<Vec<(kvx_core::Blocks<Region>, kvx_core::Blocks<PeerRegion>)>> {
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

    /// Which units of which sets that plan moves.
    pub(super) fn pairings(
        &self,
        part: Part,
        group: &crate::engine::GroupMove,
    ) -> Result<(&LinkedWorker, Vec<Pairing>)> {
        let missing = || Error::new(ErrorKind::Invalid, "nothing moves between these workers");
        let at =
            self.workers.iter().position(|worker| worker.rank == part.rank).ok_or_else(missing)?;
        let (_, sets) = self.map.part(part).ok_or_else(missing)?;
        let mut pairings = self.map.pairings(at, group.group, &group.local, &group.remote)?;
        pairings.retain(|pairing| sets.contains(&pairing.set));
        Ok((&self.workers[at], pairings))
    }
}

/// What there is between two engines once their handshake is over.
struct Connected {
    plan: PeerPlan,
    link: PeerLink,
}

impl Shared {
    /// Answers [`Action::Handshake`](crate::engine::Action::Handshake).
    pub(super) async fn shake_hands(
        self: Arc<Self>,
        rank: WorkerRank,
        connection: Connection,
        peer: Arc<RemoteEngine>,
        ranks: Vec<WorkerRank>,
    ) {
        let result = match self.ask(&peer, ranks).await {
            Ok(answer) => self
                .connect(rank, &peer, answer)
                .await
                .map_err(|error| HandshakeFailure { setup: true, error: error.to_string() }),
            Err(failure) => Err(failure),
        };
        let result = result.map(|Connected { plan, link }| {
            for peer in link.peers() {
                let lost = peer.loss(Duration::MAX);
                tokio::spawn(Arc::clone(&self).hear_of_loss(rank, connection, lost));
            }
            self.linked(rank, connection, Arc::new(link));
            plan
        });
        self.tell_worker(rank, |worker, now| worker.connected(now, connection, result));
    }

    /// Ends with the loss of a peer, or when its connection is given up.
    async fn hear_of_loss(
        self: Arc<Self>,
        rank: WorkerRank,
        connection: Connection,
        lost: Completion<Error>,
    ) {
        if let Ok(why) = lost.await {
            tracing::info!(%why, "a peer is lost");
            self.tell_worker(rank, |worker, now| worker.connection_lost(now, connection));
        }
    }

    async fn connect(
        &self,
        rank: WorkerRank,
        peer: &RemoteEngine,
        answer: HandshakenPeer,
    ) -> Result<Connected> {
        let own = self.registered(rank).ok_or_else(|| {
            let sentence = format!(
                "worker pp {} tp {} of this engine has no caches registered: call Rank::register",
                rank.pp, rank.tp
            );
            Error::new(ErrorKind::Invalid, sentence)
        })?;
        let settings = &self.setup.settings;
        let mut geometries = Vec::with_capacity(answer.workers.len());
        for (rank, metadata) in &answer.workers {
            if metadata.dcp_size != peer.dcp_size {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "the peer's handshake says a decode-context-parallel size of {}, and {} was expected: give \
                         both engines the same",
                        metadata.dcp_size, peer.dcp_size
                    ),
                ));
            }
            geometries
                .push((RemoteRank { pp: rank.pp, tp: rank.tp }, Geometry::advertised(metadata)?));
        }
        let tp = Tp::new(rank.tp, settings.tp_size)?.with_dcp(settings.dcp_size)?;
        let remote = Remote {
            tp_size: peer.tp_size,
            pp_size: peer.pp_size,
            dcp_size: peer.dcp_size,
            ranks: &geometries,
        };
        let map_for = |op| PeerMap::new(op, &own.caches, tp, &remote, &self.setup.mapping);
        // In push the producer writes; whether this engine can read from the peer says what it may expect of it.
        let (map, completions) = match (settings.mode, map_for(Op::Read)) {
            (TransferMode::Pull, read) => (read?, 0),
            (TransferMode::Push, read) => {
                let completions = read.as_ref().map_or(0, PeerMap::completions);
                (map_for(Op::Write).or(read)?, completions)
            }
        };
        let geometries: BTreeMap<_, _> = geometries.into_iter().collect();
        let mut workers = Vec::with_capacity(map.sources().len());
        for source in map.sources() {
            let at = WorkerRank { pp: source.rank().pp, tp: source.rank().tp };
            let metadata = &answer.workers[&at];
            workers.push(
                self.link_worker(&own, source, metadata, &geometries[&source.rank()], peer).await?,
            );
        }
        let (_, any) = geometries.first_key_value().expect("a map has ranks");
        let mut plan = PeerPlan::of(&map, own.geometry(), any);
        plan.clock = answer.clock;
        if settings.mode == TransferMode::Push {
            plan.completions = completions;
            if map.op() == Op::Read {
                // Nothing can be written there; but what is to be written here can be said.
                plan.told.extend(plan.lanes.drain(..).map(|lane| (lane.rank, lane.readers)));
            }
        }
        // Blocks are checked where every worker that they are read from can be asked.
        plan.generations =
            workers.iter().all(|worker| worker.words.is_some() || worker.sets.is_empty())
                && workers.iter().any(|worker| worker.words.is_some());
        plan.digests = self.digests();
        if plan.digests {
            if let Some(worker) = workers.iter().find(|worker| worker.digests.is_none()) {
                return Err(no_digests(peer, worker));
            }
            if !plan.generations {
                return Err(Error::new(
                    ErrorKind::Malformed,
                    "the peer has digests of blocks and no generations",
                ));
            }
        }
        Ok(Connected { plan, link: PeerLink { map, workers } })
    }

    /// By kvx's own metadata where a backend of both serves, by kvx within its NIXL, else as a plain NIXL agent.
    async fn link_worker(
        &self,
        own: &Registered,
        source: &Source,
        metadata: &NixlAgentMetadata,
        geometry: &Geometry,
        engine: &RemoteEngine,
    ) -> Result<LinkedWorker> {
        let rank = WorkerRank { pp: source.rank().pp, tp: source.rank().tp };
        let (peer, why_not) = match &metadata.kvx_metadata {
            None => (None, "it says nothing of kvx".to_owned()),
            Some(bytes) => match link(own.agent.connect(bytes)).await {
                Ok(peer) => (Some((peer, Metadata::decode(bytes)?)), String::new()),
                Err(error) => (None, format!("by kvx's own metadata: {error}")),
            },
        };
        let no_way = |other: &str| {
            format!(
                "no way to worker pp {} tp {} of engine {}: {why_not}; {other}",
                rank.pp, rank.tp, engine.engine
            )
        };
        let (peer, regions) = match peer {
            Some((peer, metadata)) => {
                let regions = PeerRegions::named(&peer, &metadata)?;
                (peer, regions)
            }
            None if metadata.agent_metadata.is_empty() => {
                return Err(Error::new(ErrorKind::NoRoute, no_way("and it tells nothing of NIXL")));
            }
            None if NixlPeer::is_offered(&metadata.agent_metadata) => {
                let known = NixlPeer::connect(&own.agent, &metadata.agent_metadata);
                let peer =
                    link(known.as_ref().map(|known| known.peer().clone()).map_err(Clone::clone))
                        .await;
                let failed = |error: Error| {
                    Error::new(error.kind(), no_way(&format!("by kvx in its NIXL: {error}")))
                };
                let (known, peer) = (known.map_err(failed)?, peer.map_err(failed)?);
                (peer, PeerRegions::in_nixl(&known))
            }
            None => {
                let peer = link(own.agent.connect_foreign(RIXL, &metadata.agent_metadata)).await;
                let failed = |error: Error| {
                    Error::new(error.kind(), no_way(&format!("as a NIXL agent: {error}")))
                };
                let peer = peer.map_err(failed)?;
                let regions = PeerRegions::foreign(&peer, geometry, own.device_kind())?;
                (peer, regions)
            }
        };
        tracing::info!(
            engine = %engine.engine,
            pp = rank.pp,
            tp = rank.tp,
            route = %peer.route(),
            as_nixl = %why_not,
            "connected to a worker of a peer"
        );
        let sets = (0..source.sets().len()).map(|set| {
            let (ours, theirs): (Vec<_>, Vec<_>) = source.grids(set).unzip();
            if ours.is_empty() {
                return Ok(None);
            }
            let ours = own.grids(ours.into_iter())?;
            Ok(Some((Grids(ours), Grids(regions.grids(geometry, theirs.into_iter())?))))
        });
        let sets = sets.collect::<Result<_>>()?;
        let as_nixl = (!why_not.is_empty()).then_some(why_not);
        let digests = regions.digests.filter(|_| self.digests());
        let digests = digests
            .map(|region| PeerDigests::new(region, source, geometry).map(Arc::new))
            .transpose()?;
        Ok(LinkedWorker {
            rank,
            peer,
            words: regions.words,
            digests,
            as_nixl,
            geometry: geometry.clone(),
            sets,
        })
    }

    /// What the side channel of a peer answers for these workers of it.
    async fn ask(
        &self,
        peer: &RemoteEngine,
        ranks: Vec<WorkerRank>,
    ) -> Result<HandshakenPeer, HandshakeFailure> {
        let settings = &self.setup.settings;
        let expectation = Expectation {
            enforce_handshake_compat: self.setup.config.nixl().enforce_handshake_compat,
            dcp_size: settings.dcp_size,
            factors: Some(self.setup.factors.clone()),
            ..Expectation::new(settings.dialect, peer.engine.as_str(), self.setup.hash.clone())
        };
        let began = std::time::Instant::now();
        let asked = self.asker.ask(peer, &ranks, expectation).await;
        metrics::histogram!(HANDSHAKE).record(began.elapsed());
        let asked = asked.map_err(|error| handshake_failure(&error))?;
        tracing::debug!(engine = %peer.engine, standing = ?asked.standing, "a handshake was answered");
        Ok(asked.peer)
    }
}

/// Blocks that are to be held against digests, and a peer that has none.
fn no_digests(peer: &RemoteEngine, worker: &LinkedWorker) -> Error {
    let why = worker
        .as_nixl
        .as_ref()
        .map_or_else(String::new, |why| format!(" (reached as a NIXL agent: {why})"));
    Error::new(
        ErrorKind::Incompatible,
        format!(
            "kvx_digest is set here, and engine {} publishes no digests of its blocks{why}: set kvx_digest in its \
             kv_connector_extra_config too, if it is one of kvx, or take it out here",
            peer.engine
        ),
    )
}

/// A peer whose link is up.
pub(super) async fn link(peer: Result<Peer>) -> Result<Peer> {
    let peer = peer?;
    peer.ready(LINK_LIMIT).await?;
    Ok(peer)
}
