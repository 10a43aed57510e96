//! Push: the grants by which a decode lets a prefill write for one request, and their end.
//!
//! A decode registers its caches once more for each request, under a separate key, and sends that
//! key to the prefill. So a fence is a revocation: once it has ended, no peer can write for this
//! request, even if a stopped prefill resumes or bytes are still on their way. A registration
//! carries the grants of all ranks. A rank in a process of its own asks its engine for them. The
//! engine asks every rank once for each request, after all of them have started the load.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Error, ErrorKind, Result};
use tokio::time::timeout;

use super::caches::RegisteredCaches;
use super::grants::{Grant, GrantedWrites, GrantsOfRanks, given_up};
use super::group::{PATIENCE, rank_name};
use super::link::PeerLink;
use super::notify;
use super::shared::Shared;
use super::state::{State, closed};
use kvx_vllm::engine::{Connection, RequestId, WorkerRank};
use kvx_vllm::group::ToHead;
use kvx_vllm::wire::{EngineNotification, PushGrant, PushRegistration};

/// How long blocks are held that a plain Mooncake agent may still write to. After that they are
/// lost.
const MAY_WRITE_FOR: Duration = Duration::from_secs(60);

/// Answers [`Action::Register`](kvx_vllm::engine::Action::Register).
pub(super) async fn register(
    shared: Arc<Shared>,
    rank: WorkerRank,
    request: RequestId,
    (connection, ranks): (Connection, Vec<WorkerRank>),
    mut registration: Box<PushRegistration>,
) {
    let sent = async {
        // Comes before the grants: with a plain NIXL agent as the writer, the end of a grant could
        // not be proven.
        let link = writers(&shared, rank, connection, &ranks)?;
        let granted = grants_of_all(&shared, &request).await;
        registration.kvx_grants =
            granted.map_err(|error| (ranks.first().copied().unwrap_or_default(), error))?;
        send(&link, &ranks, &EngineNotification::Registration(registration)).await
    };
    if let Err((at, error)) = sent.await {
        shared.report_nixl(rank, |worker, now| {
            worker.notification_failed(now, Some(&request), at, error.to_string());
        });
    }
}

/// Returns the connection to workers of a prefill, all of which write through grants.
fn writers(
    shared: &Shared,
    rank: WorkerRank,
    connection: Connection,
    ranks: &[WorkerRank],
) -> Result<Arc<PeerLink>, (WorkerRank, Error)> {
    let first = ranks.first().copied().unwrap_or_default();
    let link = shared.link(rank, connection).map_err(|error| (first, error))?;
    for at in ranks {
        let worker = link.worker(*at).map_err(|error| (*at, error))?;
        if worker.as_nixl.is_some() {
            let why = "a prefill that is a plain NIXL agent writes without a grant, so its writes \
                       cannot be ended: set kv_connector NixlConnector on both sides";
            return Err((*at, ErrorKind::Unsupported.because(why)));
        }
    }
    Ok(link)
}

/// Grants a request, once for all workers in this process. May block.
pub(super) fn grant(shared: &Shared, request: &RequestId) -> Result<Arc<GrantedWrites>> {
    let _one_at_a_time = shared.granting.lock();
    let (number, ranks) = {
        let mut state = shared.state.lock();
        match state.grants.get(request) {
            Some(Grant::Active(writes)) => return Ok(Arc::clone(writes)),
            Some(Grant::Fenced(_) | Grant::Foreign(_)) => return Err(given_up()),
            None => {}
        }
        let registered = |rank: WorkerRank, registered: &Option<Arc<RegisteredCaches>>| {
            registered.clone().map(|registered| (rank, registered)).ok_or_else(|| {
                let WorkerRank { pp, tp } = rank;
                let why =
                    format!("worker pp {pp} tp {tp} has no caches registered: call Rank::register");
                ErrorKind::Invalid.because(why)
            })
        };
        let here = state.ranks.iter().filter(|(_, held)| held.worker.remote().is_none());
        let ranks = here.map(|(rank, held)| registered(rank, &held.registered));
        let ranks = ranks.collect::<Result<Vec<_>>>()?;
        (state.grants.next_number(), ranks)
    };
    let regions = ranks.iter().map(|(rank, own)| Ok((*rank, own.grant(number)?)));
    let granted = Arc::new(GrantedWrites::new(regions.collect::<Result<_>>()?));
    let mut state = shared.state.lock();
    let still_has = |(rank, own): &(WorkerRank, Arc<RegisteredCaches>)| {
        state.ranks.registered(*rank).is_some_and(|now| Arc::ptr_eq(now, own))
    };
    let all_there = ranks.iter().all(still_has);
    if !all_there || !state.is_loading(request) || state.grants.get(request).is_some() {
        // Expected race: the load ended in the meantime, or its caches were given back. No peer
        // knows of this grant.
        state.grants.discard(granted);
        drop(state);
        shared.wake_up.notify_one();
        return Err(given_up());
    }
    ranks.iter().for_each(|(_, own)| own.has_granted(&granted));
    state.grants.activate(request, &granted);
    Ok(granted)
}

/// Answers [`Action::Fence`](kvx_vllm::engine::Action::Fence): revokes the grants of all workers
/// for a request.
pub(super) async fn fence(shared: Arc<Shared>, rank: WorkerRank, request: RequestId) {
    let fenced = shared.state.lock().grants.fence(&request);
    let granted = match fenced {
        Ok(granted) => granted,
        Err(foreign) => return lose_foreign(&shared, rank, &request, &foreign).await,
    };
    match granted.revoked().await {
        Ok(()) => shared.report(rank, |worker, now| worker.fenced(now, &request)),
        // The blocks stay held until the shutdown decides what becomes of them.
        Err(error) => {
            tracing::warn!(
                %request,
                %error,
                "the blocks of a push stay held, because writes to them cannot be ended"
            )
        }
    }
}

/// Handles the end of a load whose blocks a plain Mooncake agent may write to. That agent cannot
/// report that it has stopped.
async fn lose_foreign(
    shared: &Shared,
    rank: WorkerRank,
    request: &RequestId,
    writes: &Arc<GrantedWrites>,
) {
    shared.report_mooncake(rank, |worker, _| worker.fence_is_slow(request));
    tokio::time::sleep(MAY_WRITE_FOR).await;
    // A later load may have the same name.
    let is_same =
        |grant: &Grant| matches!(grant, Grant::Foreign(granted) if Arc::ptr_eq(granted, writes));
    if !shared.state.lock().grants.get(request).is_some_and(is_same) {
        return;
    }
    let mut lost = false;
    shared.report_mooncake(rank, |worker, now| lost = worker.fence_forgotten(now, request));
    if lost {
        tracing::warn!(
            %request,
            "the blocks of a load are lost: a Mooncake agent other than kvx may still write to \
             them, and cannot be asked"
        );
    }
}

async fn send(
    link: &PeerLink,
    ranks: &[WorkerRank],
    registration: &EngineNotification,
) -> Result<(), (WorkerRank, Error)> {
    let bytes = registration.encode();
    for at in ranks {
        let failed = |error| (*at, error);
        let worker = link.worker(*at).map_err(failed)?;
        notify::send(&worker.peer, &bytes, notify::LIMIT).await.map_err(failed)?;
    }
    Ok(())
}

/// Collects the grants of all workers of this engine for a request, in whichever process.
async fn grants_of_all(shared: &Arc<Shared>, request: &RequestId) -> GrantsOfRanks {
    let asked = {
        let mut state = shared.state.lock();
        let State { head, grants, .. } = &mut *state;
        head.as_ref().map(|head| {
            let answer = grants.ask(request);
            head.send(ToHead::GrantsOfAll(request.clone()));
            answer
        })
    };
    match asked {
        // The load's end drops the question, and the answer is then `given_up`.
        Some(answer) => answer.await.unwrap_or_else(|_| Err(given_up())),
        None => grants_of_ranks(shared, request).await,
    }
}

/// Collects the grants of all workers, once for each request.
pub(super) async fn grants_of_ranks(shared: &Arc<Shared>, request: &RequestId) -> GrantsOfRanks {
    let cell = {
        let mut state = shared.state.lock();
        if !state.scheduler.is_loading(request) {
            return Err(given_up());
        }
        state.grants.collected(request)
    };
    cell.get_or_init(|| collect(shared, request)).await.clone()
}

async fn collect(shared: &Arc<Shared>, request: &RequestId) -> GrantsOfRanks {
    let asked: Vec<_> = {
        let mut state = shared.state.lock();
        state.ranks.remote_mut().map(|(rank, remote)| (rank, remote.grant(request))).collect()
    };
    let mut all = grants_here(shared, request).await?;
    for (rank, answer) in asked {
        let WorkerRank { pp, tp } = rank;
        let regions = match timeout(PATIENCE, answer).await {
            Ok(Ok(regions)) => regions?,
            Ok(Err(_)) => {
                return Err(ErrorKind::PeerLost.because(format!("{} has left", rank_name(rank))));
            }
            Err(_) => {
                let why = format!("{} has not granted memory within {PATIENCE:?}", rank_name(rank));
                return Err(ErrorKind::TimedOut.because(why));
            }
        };
        all.push(PushGrant { pp, tp, regions });
    }
    Ok(all)
}

/// Grants a request on the workers of this process.
pub(super) async fn grants_here(shared: &Arc<Shared>, request: &RequestId) -> GrantsOfRanks {
    let (to_grant, request) = (Arc::clone(shared), request.clone());
    let granting = shared.runtime.spawn_blocking(move || grant(&to_grant, &request)?.metadata());
    granting.await.unwrap_or_else(|_| Err(closed()))
}
