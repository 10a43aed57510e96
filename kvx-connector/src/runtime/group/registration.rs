//! The caches of ranks in processes of their own, as the engine's process sees them: registrations
//! and returns.

use kvx_core::{Error, ErrorKind, Result};

use super::super::generations::{CopiedWords, GenerationState};
use super::super::listening::PeerSockets;
use super::super::shared::Shared;
use super::super::state::{State, closed};
use super::gathering::GatheringEnd;
use super::remote_rank::{RemoteRank, out_of_turn, rank_name};
use kvx_vllm::engine::{BlockReference, PoolBlocks, WorkerRank};
use kvx_vllm::group::{OwnWords, ToRank};
use kvx_vllm::wire::NixlAgentMetadata;

/// Gives a rank the generation counters that it registers with its caches: a shared file, or their
/// first values. The first rank with caches determines the number of blocks.
pub(super) fn give_generations(
    shared: &Shared,
    rank: WorkerRank,
    blocks: PoolBlocks,
) -> Result<()> {
    // Ranks register one after the other. The first one creates what they share.
    let _listening = shared.listening.lock();
    let (first, distant) = {
        let state = shared.state.lock();
        let remote = state.ranks.get(rank).and_then(|held| held.worker.remote());
        (!state.others_have_caches(rank), remote.is_some_and(RemoteRank::is_distant))
    };
    // Allocated before the lock is taken, because they may be large.
    let fresh = first.then(|| GenerationState::new(blocks.most(), shared.digests())).transpose()?;
    let most = blocks.most();
    let copied = (!distant).then(|| CopiedWords::new(most)).transpose()?;
    let mut guard = shared.state.lock();
    let state = &mut *guard;
    let publication = &mut state.publication;
    let remote = state.ranks.remote_at(rank).ok_or_else(closed)?;
    let known = publication.pool.as_ref().map(PoolBlocks::most).filter(|_| !first);
    if let Some(known) = known.filter(|known| *known != blocks.most()) {
        return Err(ErrorKind::Invalid.because(format!(
            "{} has {} logical blocks, another rank of this engine {known}: give all of them the \
             same",
            rank_name(rank),
            blocks.most()
        )));
    }
    remote.expect_caches()?;
    if let Some(fresh) = fresh {
        (publication.published, publication.pool) = (Some(fresh), Some(blocks));
    }
    let published = publication.published.as_mut().ok_or_else(closed)?;
    let (own, file) = match copied {
        Some((copy, file)) => {
            published.share(rank, copy);
            (None, Some(file))
        }
        // Blocks that were published before are stale, because none of them lies in these caches.
        None => {
            let BlockReference { pool, stamp } = published.reference();
            (Some(OwnWords { pool, stamp, blocks: most }), None)
        }
    };
    // Sent under the lock under which blocks are raised, so that the rank receives both in order.
    remote.send(ToRank::Words(own), file);
    Ok(())
}

/// Takes the registration of a rank's caches. With the last one, peers learn of all ranks.
pub(super) fn take_registration(
    shared: &Shared,
    rank: WorkerRank,
    metadata: &[u8],
    host_copies: bool,
) -> Result<()> {
    let metadata = NixlAgentMetadata::decode(metadata, shared.setup.settings.version)?;
    let listening = shared.listening.lock();
    let mut guard = shared.state.lock();
    let state = &mut *guard;
    let Some(remote) = state.ranks.remote_at(rank) else {
        debug_assert!(false, "a rank that has joined stays in a process of its own");
        return Ok(());
    };
    remote.registered(metadata, host_copies)?;
    let missing = state.ranks.missing().is_some();
    let Some(PeerSockets::Nixl(side)) = listening.as_ref().filter(|_| !missing) else {
        return Ok(()); // other ranks have not registered yet, or the connector is shutting down
    };
    for (rank, remote) in state.ranks.remote() {
        if let Some(metadata) = remote.metadata() {
            let generation = side.publish(rank, metadata);
            state.scheduler.registered(generation);
        }
    }
    let whole = settle_gathering(state, Ok(()));
    drop((guard, listening));
    whole.settle();
    shared.wake_up.notify_one();
    Ok(())
}

/// Handles the release of a rank's caches. Peers cannot find the rank any more, and nothing is
/// published or loaded until it has registered others. Its counters stay until then, because peers
/// may still read them. May block.
pub(super) fn take_back(shared: &Shared, rank: WorkerRank) -> Result<()> {
    let listening = shared.listening.lock();
    shared.with_state(|state, now| {
        state.ranks.remote_at(rank).ok_or_else(out_of_turn)?.release_caches()?;
        state.publication.release_all(&mut state.ranks);
        // Orders for published blocks go to the ranks before they register other caches.
        state.pass_on_ready(now, None);
        Ok::<_, Error>(())
    })?;
    if let Some(PeerSockets::Nixl(side)) = &*listening {
        side.withdraw(rank);
    }
    tracing::info!(pp = rank.pp, tp = rank.tp, "a rank has given its caches back");
    Ok(())
}

/// Settles the gathering, because all ranks have joined or one never will. The caller notifies the
/// waiting task after it has released the lock.
pub(super) fn settle_gathering(state: &mut State, result: Result<()>) -> GatheringEnd {
    match &mut state.gathering {
        Some(gathering) => gathering.settle(result),
        None => GatheringEnd::default(),
    }
}
