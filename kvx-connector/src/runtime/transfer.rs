//! Moves of blocks between this engine and its peers, and checks of the blocks that were read.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{
    Deadline, Error, ErrorKind, Grid, Indices, Op, PeerRegion, Plan, Report, Result, Transfer,
};
use tokio::sync::Notify;
use tracing::Span;

use super::caches::{RegisteredCaches, caches_are_gone};
use super::copies;
use super::generations::WORD;
use super::link::{LinkedWorker, WriteGrant};
use super::mooncake::RoutePairs;
use super::peer_regions::ImportedRegions;
use super::scratch::AT_ONCE;
use super::shared::Shared;
use super::trace::Phase;
use kvx_vllm::engine::{
    Connection, FailureKind, GroupMove, Move, MoveFailure, MoveId, ReadBlocks, Transferred,
    WorkerRank,
};

/// The time limit for a read of generations or digests.
const LIMIT: Duration = Duration::from_secs(10);

/// Answers [`Action::Read`](kvx_vllm::engine::Action::Read) and
/// [`Action::Write`](kvx_vllm::engine::Action::Write).
pub(super) async fn run(
    shared: Arc<Shared>,
    rank: WorkerRank,
    op: Op,
    order: Move,
    cancel: Arc<Notify>,
) {
    let id = order.id;
    let resolve = |result| shared.report(rank, |worker, now| worker.move_resolved(now, id, result));
    let failed = |kind, settled, error: &Error| {
        let (peer_is_gone, error) = (is_gone(op, error), error.to_string());
        resolve(Err(MoveFailure { kind, settled, peer_is_gone, error }));
    };
    let idle = match op {
        Op::Read => copies::idle(&shared, rank, shared.deadline(order.deadline)).await,
        Op::Write => Ok(()),
    };
    let posted = match idle {
        Ok(()) => post(&shared, rank, op, order).await,
        Err(error) => Err(error),
    };
    match posted {
        Err(error) => failed(FailureKind::TransferSetupFailed, true, &error),
        Ok((mut transfer, _imported)) => match until_end(&mut transfer, &cancel).await {
            Ok(report) => {
                Phase::Post.took(report.post_time);
                Phase::Transfer.took(report.transfer_time);
                Span::current().record("backend", report.backend);
                resolve(Ok(Transferred {
                    time: report.transfer_time,
                    post: report.post_time,
                    bytes: report.bytes,
                    descriptors: report.segments,
                }));
            }
            Err(error) => {
                let settled = transfer.is_settled();
                failed(FailureKind::TransferFailed, settled, &error);
                if !settled {
                    let settled = transfer.settled().await;
                    shared.report(rank, |worker, now| match settled {
                        Ok(()) => worker.move_settled(now, id),
                        Err(_) => worker.move_forgotten(now, id),
                    });
                }
            }
        },
    }
    shared.forget_move(rank, id);
}

/// Waits for a transfer, and cancels it when the worker asks for that.
async fn until_end(transfer: &mut Transfer, cancel: &Notify) -> Result<Report> {
    let mut cancelled = std::pin::pin!(cancel.notified());
    let mut over = false;
    std::future::poll_fn(|context| {
        if !over && cancelled.as_mut().poll(context).is_ready() {
            over = true;
            transfer.cancel();
        }
        Pin::new(&mut *transfer).poll(context)
    })
    .await
}

/// Posts a move. The imported grants of its peer have to be kept until it has ended.
async fn post(
    shared: &Shared,
    rank: WorkerRank,
    op: Op,
    order: Move,
) -> Result<(Transfer, Option<ImportedRegions>)> {
    let mooncake = shared.setup.settings.mooncake.is_some();
    let route = mooncake.then(|| shared.mooncake.route(rank, order.connection)).flatten();
    if let Some(route) = route {
        let RoutePairs { peer, pairs, imported } = route.pairs(&order)?;
        let plan = Plan::of(op, pairs)?;
        let posting = peer.transfer(&plan).deadline(shared.deadline(order.deadline));
        return Ok((posting.post_wait().await?, imported));
    }
    let link = shared.link(rank, order.connection)?;
    let worker = link.worker(order.part.rank)?;
    let missing = || ErrorKind::Invalid.because("no blocks move between these workers");
    let grant = match op {
        Op::Read => None,
        Op::Write => {
            let (source, _) = link.map.part(order.part).ok_or_else(missing)?;
            WriteGrant::of(&order, worker, source)?
        }
    };
    let mut pairs = Vec::new();
    for group in order.groups.iter() {
        pairs.extend(link.pairs(order.part, group, grant.as_ref())?);
    }
    let plan = Plan::of(op, pairs)?;
    if let Some(why) = &worker.as_nixl {
        Span::current().record("nixl", &**why);
    }
    let mut posting = worker.peer.transfer(&plan).deadline(shared.deadline(order.deadline));
    if let Some(bytes) = &order.notification {
        posting = posting.notify(&bytes[..]);
    }
    Ok((posting.post_wait().await?, grant.map(|grant| grant.imported)))
}

/// Answers [`Action::ReadGenerations`](kvx_vllm::engine::Action::ReadGenerations).
pub(super) async fn read_generations(
    shared: Arc<Shared>,
    rank: WorkerRank,
    id: MoveId,
    at: (Connection, WorkerRank),
    blocks: Arc<[Indices]>,
) {
    let began = Instant::now();
    let result = words(&shared, rank, at, &blocks).await.map_err(|error| error.to_string());
    Phase::Check.took(began.elapsed());
    shared.report_nixl(rank, |worker, now| {
        let words = result.as_ref().map(|(pool, words)| (*pool, &words[..])).map_err(String::clone);
        worker.generations_read(now, id, words);
    });
}

async fn words(
    shared: &Shared,
    rank: WorkerRank,
    (connection, at): (Connection, WorkerRank),
    blocks: &[Indices],
) -> Result<(u64, Vec<u64>)> {
    let link = shared.link(rank, connection)?;
    let worker = link.worker(at)?;
    let own = shared
        .registered(rank)
        .ok_or_else(|| ErrorKind::Revoked.because("the caches were given back"))?;
    let region = worker
        .words
        .as_ref()
        .ok_or_else(|| ErrorKind::Unregistered.because("the peer has no generation counters"))?;
    let count = u32::try_from(kvx_core::Place::len(region) / WORD).unwrap_or(u32::MAX);
    let theirs = (region, Grid::packed(WORD, count));
    // The generation of the pool, then those of the blocks.
    let each =
        blocks.iter().flat_map(|list| (0..list.len()).map(|at| list.at(at).saturating_add(1)));
    let wanted: Vec<u32> = std::iter::once(0).chain(each).collect();
    let mut words = read_words(&own, worker, theirs, &wanted).await?;
    Ok((words[0], words.split_off(1)))
}

/// Answers [`Action::CheckDigests`](kvx_vllm::engine::Action::CheckDigests).
pub(super) async fn check_digests(
    shared: Arc<Shared>,
    rank: WorkerRank,
    id: MoveId,
    connection: Connection,
    blocks: Arc<ReadBlocks>,
) {
    let began = Instant::now();
    let result =
        wrong_blocks(&shared, rank, connection, &blocks).await.map_err(|error| error.to_string());
    Phase::Check.took(began.elapsed());
    shared.report_nixl(rank, |worker, now| worker.digests_checked(now, id, result));
}

/// Returns the local blocks whose bytes differ from what the peer has published.
async fn wrong_blocks(
    shared: &Arc<Shared>,
    rank: WorkerRank,
    connection: Connection,
    blocks: &ReadBlocks,
) -> Result<Vec<u32>> {
    let link = shared.link(rank, connection)?;
    let worker = link.worker(blocks.part.rank)?;
    let own = shared.registered(rank).ok_or_else(caches_are_gone)?;
    let missing = || ErrorKind::Unregistered.because("the peer has no digests");
    let peer = Arc::clone(worker.digests.as_ref().ok_or_else(missing)?);
    let remote = |group: &GroupMove| {
        (0..group.remote.len()).map(|at| group.remote.at(at)).collect::<Vec<_>>()
    };
    let wanted: Vec<u32> = blocks.groups.iter().flat_map(remote).collect();
    let words = read_words(&own, worker, peer.grid(), &wanted).await?;
    let rows = words.chunks(peer.width()).map(<[u64]>::to_vec);
    let rows = peer.rows(blocks.pool, &blocks.words, wanted.iter().copied().zip(rows).collect());
    let mut read = Vec::new();
    for group in blocks.groups.iter() {
        read.extend(link.pairings(blocks.part, group)?.1);
    }
    let shared = Arc::clone(shared);
    let hash = move || shared.with_caches(rank, &own, |own| own.wrong(&peer, &read, &rows));
    let wrong = tokio::task::spawn_blocking(hash).await;
    let wrong = wrong.map_err(|error| {
        ErrorKind::Closed.because(format!("blocks were not checked: {error}"))
    })??;
    let each = link.map.units().consumer();
    let mut here: Vec<u32> = Vec::new();
    for group in blocks.groups.iter() {
        let of_wrong = (0..group.remote.len()).filter(|at| wrong.contains(&group.remote.at(*at)));
        here.extend(of_wrong.map(|at| group.local.at(at) / each));
    }
    here.sort_unstable();
    here.dedup();
    Ok(here)
}

/// Reads 64-bit words of a peer through the scratch memory. The limit covers all of them.
async fn read_words(
    own: &RegisteredCaches,
    worker: &LinkedWorker,
    (region, grid): (&PeerRegion, Grid),
    wanted: &[u32],
) -> Result<Vec<u64>> {
    let width = (grid.length / WORD) as usize;
    let deadline = Deadline::from(LIMIT);
    let theirs = region.grid(grid)?;
    let mut words = Vec::with_capacity(wanted.len() * width);
    for wanted in wanted.chunks(AT_ONCE / width) {
        let place = own.scratch.take(deadline.left()).await?;
        let ours = place.region().grid(place.grid(width))?;
        let plan = Plan::read(ours.blocks(0..wanted.len() as u32), theirs.blocks(wanted))?;
        let mut transfer = worker.peer.transfer(&plan).deadline(deadline).post_wait().await?;
        if let Err(error) = (&mut transfer).await {
            if !transfer.is_settled() {
                // The task keeps the slot until nothing writes to it any more, and the caller
                // returns at once.
                tokio::spawn(async move {
                    if transfer.settled().await.is_err() {
                        place.lose();
                    }
                });
            }
            return Err(error);
        }
        words.extend(place.words(wanted.len() * width)?);
    }
    Ok(words)
}

/// Returns whether the state that a handshake described is gone. A revoked region shows that for a
/// read only: the grant of a write may end at any time.
fn is_gone(op: Op, error: &Error) -> bool {
    match error.kind() {
        ErrorKind::PeerLost | ErrorKind::PeerRestarted => true,
        ErrorKind::Unregistered | ErrorKind::WrongKey | ErrorKind::Revoked => op == Op::Read,
        // The peer has registered its caches elsewhere by now.
        ErrorKind::Malformed => op == Op::Write,
        _ => false,
    }
}
