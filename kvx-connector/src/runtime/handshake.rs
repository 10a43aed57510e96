//! The handshake with a peer, and the connection that follows from it. Built once for each
//! connection.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::Metadata;
use kvx_core::{Completion, Error, ErrorKind, Op, Peer, Result};

use super::caches::RegisteredCaches;
use super::digests::PeerDigests;
use super::link::{Grids, LinkedWorker, PeerLink};
use super::metrics::{HANDSHAKE, count_handshake_failure};
use super::peer_regions::PeerRegions;
use super::setup::RIXL;
use super::shared::Shared;
use super::side::handshake_failure;
use crate::nixl::NixlPeer;
use kvx_vllm::engine::{Connection, HandshakeFailure, PeerPlan, RemoteEngine, WorkerRank};
use kvx_vllm::mapping::{Geometry, PeerMap, Remote, Source, Tp};
use kvx_vllm::params::TransferMode;
use kvx_vllm::wire::{Expectation, HandshakenPeer, NixlAgentMetadata};

/// The time limit for the first link to a worker of a peer.
const LINK_LIMIT: Duration = Duration::from_secs(10);

/// The result of a handshake.
struct PeerConnection {
    plan: PeerPlan,
    link: PeerLink,
}

/// Answers [`Action::Handshake`](kvx_vllm::engine::Action::Handshake).
pub(super) async fn run(
    shared: Arc<Shared>,
    rank: WorkerRank,
    connection: Connection,
    peer: Arc<RemoteEngine>,
    ranks: Vec<WorkerRank>,
) {
    let result = match ask(&shared, &peer, ranks).await {
        Ok(answer) => connect(&shared, rank, &peer, answer).await.map_err(|error| {
            count_handshake_failure(error.kind());
            HandshakeFailure { setup: true, error: error.to_string() }
        }),
        Err(failure) => Err(failure),
    };
    let result = result.map(|PeerConnection { plan, link }| {
        for peer in link.peers() {
            let lost = peer.loss(Duration::MAX);
            tokio::spawn(watch_loss(Arc::clone(&shared), rank, connection, lost));
        }
        if let Some(held) = shared.state.lock().ranks.get_mut(rank) {
            held.links.insert(connection, Arc::new(link));
        }
        plan
    });
    shared.report_nixl(rank, |worker, now| worker.connected(now, connection, result));
}

/// Waits for the loss of a peer, or until its connection is closed.
async fn watch_loss(
    shared: Arc<Shared>,
    rank: WorkerRank,
    connection: Connection,
    lost: Completion<Error>,
) {
    if let Ok(why) = lost.await {
        tracing::info!(%why, "the connection to a peer was lost");
        shared.report_nixl(rank, |worker, now| worker.connection_lost(now, connection));
    }
}

async fn connect(
    shared: &Shared,
    rank: WorkerRank,
    peer: &RemoteEngine,
    answer: HandshakenPeer,
) -> Result<PeerConnection> {
    let own = shared.registered(rank).ok_or_else(|| {
        let sentence = format!(
            "worker pp {} tp {} of this engine has no caches registered: call Rank::register",
            rank.pp, rank.tp
        );
        ErrorKind::Invalid.because(sentence)
    })?;
    let settings = &shared.setup.settings;
    let mut geometries = Vec::with_capacity(answer.workers.len());
    for (rank, metadata) in &answer.workers {
        if metadata.dcp_size != peer.dcp_size {
            return Err(ErrorKind::Unsupported.because(format!(
                "the peer's handshake names a decode-context-parallel size of {}, and {} was \
                 expected: set the same size on both engines",
                metadata.dcp_size, peer.dcp_size
            )));
        }
        geometries.push((WorkerRank { pp: rank.pp, tp: rank.tp }, Geometry::advertised(metadata)?));
    }
    let tp = Tp::new(rank.tp, settings.tp_size)?.with_dcp(settings.dcp_size)?;
    let remote = Remote {
        tp_size: peer.tp_size,
        pp_size: peer.pp_size,
        dcp_size: peer.dcp_size,
        ranks: &geometries,
    };
    let map_for = |op| PeerMap::new(op, &own.caches, tp, &remote, &shared.setup.mapping);
    // In push the producer writes. The read map says how many completions this engine may expect of
    // the peer.
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
            link_worker(shared, &own, source, metadata, &geometries[&source.rank()], peer).await?,
        );
    }
    let (_, any) = geometries.first_key_value().expect("a map has ranks");
    let mut plan = PeerPlan::of(&map, own.geometry(), any);
    plan.clock = answer.clock;
    if settings.mode == TransferMode::Push {
        plan.completions = completions;
        if map.op() == Op::Read {
            // This engine cannot write to the peer, but can register with it what the peer is to
            // write here.
            plan.told.extend(plan.lanes.drain(..).map(|lane| (lane.rank, lane.readers)));
        }
    }
    // Blocks are checked if every worker that they are read from has generations.
    plan.generations =
        workers.iter().all(|worker| worker.words.is_some() || worker.sets.is_empty())
            && workers.iter().any(|worker| worker.words.is_some());
    plan.digests = shared.digests();
    if plan.digests {
        if let Some(worker) = workers.iter().find(|worker| worker.digests.is_none()) {
            return Err(no_digests(peer, worker));
        }
        if !plan.generations {
            return Err(ErrorKind::Malformed
                .because("the peer has digests of its blocks, but no generations"));
        }
    }
    Ok(PeerConnection { plan, link: PeerLink { map, workers } })
}

/// Connects to a worker of a peer: through kvx's own metadata if both have a backend for it, else
/// through kvx in its NIXL, else as a plain NIXL agent.
async fn link_worker(
    shared: &Shared,
    own: &RegisteredCaches,
    source: &Source,
    metadata: &NixlAgentMetadata,
    geometry: &Geometry,
    engine: &RemoteEngine,
) -> Result<LinkedWorker> {
    let rank = WorkerRank { pp: source.rank().pp, tp: source.rank().tp };
    let (peer, why_not) = match &metadata.kvx_metadata {
        None => (None, "the answer has no metadata of kvx".to_owned()),
        Some(bytes) => match link(own.agent.connect(bytes)).await {
            Ok(peer) => (Some((peer, Metadata::decode(bytes)?)), String::new()),
            Err(error) => (None, format!("the connection to its kvx agent failed: {error}")),
        },
    };
    let no_way = |other: &str| {
        format!(
            "worker pp {} tp {} of engine {} cannot be reached: {why_not}; {other}",
            rank.pp, rank.tp, engine.engine
        )
    };
    let (peer, regions) = match peer {
        Some((peer, metadata)) => {
            let regions = PeerRegions::named(&peer, &metadata)?;
            (peer, regions)
        }
        None if metadata.agent_metadata.is_empty() => {
            return Err(ErrorKind::NoRoute.because(no_way("it has no NIXL agent to fall back on")));
        }
        None if NixlPeer::is_offered(&metadata.agent_metadata) => {
            let known = NixlPeer::connect(&own.agent, &metadata.agent_metadata);
            let peer =
                link(known.as_ref().map(|known| known.peer().clone()).map_err(Clone::clone)).await;
            let failed = |error: Error| {
                Error::new(error.kind(), no_way(&format!("no link to kvx in its NIXL: {error}")))
            };
            let (known, peer) = (known.map_err(failed)?, peer.map_err(failed)?);
            (peer, PeerRegions::in_nixl(&known))
        }
        None => {
            let peer = link(own.agent.connect_foreign(RIXL, &metadata.agent_metadata)).await;
            let failed = |error: Error| {
                Error::new(
                    error.kind(),
                    no_way(&format!("no link to it as a plain NIXL agent: {error}")),
                )
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
        as_nixl = (!why_not.is_empty()).then(|| tracing::field::display(&why_not)),
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
    let digests = regions.digests.filter(|_| shared.digests());
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

/// Asks the side channel of a peer for these workers.
async fn ask(
    shared: &Shared,
    peer: &RemoteEngine,
    ranks: Vec<WorkerRank>,
) -> Result<HandshakenPeer, HandshakeFailure> {
    let settings = &shared.setup.settings;
    let expectation = Expectation {
        enforce_handshake_compat: shared.setup.config.nixl().enforce_handshake_compat,
        dcp_size: settings.dcp_size,
        factors: Some(shared.setup.factors.clone()),
        ..Expectation::new(settings.version, peer.engine.as_str(), shared.setup.hash.clone())
    };
    let began = std::time::Instant::now();
    let asked = shared.side_client.ask(peer, &ranks, expectation).await;
    metrics::histogram!(HANDSHAKE).record(began.elapsed());
    let asked = asked.map_err(|error| {
        count_handshake_failure(error.kind());
        handshake_failure(&error)
    })?;
    tracing::debug!(engine = %peer.engine, standing = ?asked.standing, "a handshake was answered");
    Ok(asked.peer)
}

/// Returns the error of a peer without digests, where blocks are to be compared with them.
fn no_digests(peer: &RemoteEngine, worker: &LinkedWorker) -> Error {
    let why = worker
        .as_nixl
        .as_ref()
        .map_or_else(String::new, |why| format!(" (reached as a NIXL agent: {why})"));
    ErrorKind::Incompatible.because(format!(
        "kvx_digest is set here, and engine {} publishes no digests of its blocks{why}: set \
         kvx_digest in its kv_connector_extra_config too if it runs kvx, or remove it here",
        peer.engine
    ))
}

/// Waits until the link of a peer is up.
pub(super) async fn link(peer: Result<Peer>) -> Result<Peer> {
    let peer = peer?;
    peer.ready(LINK_LIMIT).await?;
    Ok(peer)
}
