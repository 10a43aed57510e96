//! Work of this process on the blocks of registered caches: finishing, hashing, and copies between
//! device and host.

use std::sync::Arc;

use kvx_core::{Deadline, Memory, Result};

use super::caches::{RegisteredCaches, caches_are_gone};
use super::host_copies::{LIMIT, SavePoint};
use super::ranks::{DeviceFill, FilledBlocks};
use super::shared::Shared;
use super::slot::Slot;
use super::state::State;
use kvx_vllm::engine::{
    BlockLists, Connection, Ending, Fresh, MoveLists, RequestId, Unsaved, WorkerRank,
};
use kvx_vllm::mapping::{BlockPairs, Finishing, PeerMap};

/// Answers [`Action::Finish`](kvx_vllm::engine::Action::Finish). Blocks while it copies.
pub(super) fn finish(
    shared: &Shared,
    rank: WorkerRank,
    request: &RequestId,
    connection: Connection,
    lists: &MoveLists,
) {
    let result = finish_blocks(shared, rank, connection, lists).map_err(|error| error.to_string());
    shared.report_nixl(rank, |worker, now| worker.finished(now, request, result));
}

fn finish_blocks(
    shared: &Shared,
    rank: WorkerRank,
    connection: Connection,
    lists: &MoveLists,
) -> Result<()> {
    let own = shared.registered(rank).ok_or_else(caches_are_gone)?;
    let link = shared.link(rank, connection).map_err(|_| caches_are_gone())?;
    shared.with_caches(rank, &own, |own| {
        let finishing = link.map.finishing();
        finishing.map_or(Ok(()), |finishing| reorder(own, &link.map, finishing, lists))
    })
}

/// Reorders the blocks that were read for these caches, and clears the rest of them.
fn reorder(
    own: &RegisteredCaches,
    map: &PeerMap,
    finishing: &Finishing,
    lists: &MoveLists,
) -> Result<()> {
    let indices = |lists: &BlockLists| lists.groups().iter().cloned().map(Into::into).collect();
    let (local, remote): (Vec<_>, Vec<_>) = (indices(&lists.local), indices(&lists.remote));
    let moves = map.moves(&BlockPairs { local: &local, remote: &remote, tokens: lists.tokens })?;
    let (mut block, mut scratch) = (Vec::new(), Vec::new());
    for covered in
        moves.covered.iter().filter(|covered| finishing.reorders() || !covered.is_complete())
    {
        for region in finishing.regions_of(covered.group) {
            let held = &own.geometry().regions()[region as usize];
            let (memory, offset) = own.place(region)?;
            block.resize(usize::try_from(held.block_len).unwrap_or(usize::MAX), 0);
            for (index, filled) in covered.blocks() {
                let at = offset + held.grid().offset(index);
                let at = usize::try_from(at).unwrap_or(usize::MAX);
                let memory: &Memory = memory.memory();
                memory.copy_out(at, &mut block)?;
                finishing.finish(region, &mut block, filled, &mut scratch)?;
                memory.copy_in(at, &block)?;
            }
        }
    }
    Ok(())
}

/// Writes the digests of blocks that no peer knows of yet, if the worker still has these caches.
pub(super) fn publish_digests(
    shared: &Shared,
    rank: WorkerRank,
    own: &Arc<RegisteredCaches>,
    fresh: &[Fresh],
) {
    // Expected race: a call that gives the caches back waits for the lock, so no peer will load
    // these blocks.
    let Ok(_hashing) = own.finishing.try_read() else { return };
    if shared.still_has(rank, own) {
        own.publish_digests(fresh);
    }
}

/// Copies loaded blocks to the device, and lets the worker report them. Blocks the thread.
pub(super) fn fill(shared: &Shared, fill: DeviceFill) {
    let DeviceFill { rank, request, filled: FilledBlocks { own, blocks } } = fill;
    let result = shared.with_caches(rank, &own, |own| own.copies()?.fill(&blocks));
    shared.with_state(|state, _| {
        if let Some(held) = state.ranks.get_mut(rank) {
            held.filled(request, blocks, result);
        }
    });
}

/// Waits until all copies to the host have ended that were ordered before the loads that the worker
/// has started. Errors: `TimedOut` at the deadline; `StillShared` if one may never end.
pub(super) async fn idle(shared: &Shared, rank: WorkerRank, deadline: Deadline) -> Result<()> {
    match shared.registered(rank).as_ref().and_then(|own| own.host_copies.as_ref()) {
        Some(copies) => copies.idle(deadline).await,
        None => Ok(()),
    }
}

/// Handles the engine's report that tokens of a request are computed.
pub(super) fn computed(
    shared: &Arc<Shared>,
    request: &RequestId,
    blocks: &BlockLists,
    tokens: u32,
) {
    let settings = &shared.setup.settings;
    let mut state = shared.state.lock();
    if state.is_closing()
        || !state.ranks.have_host_copies()
        || !state.scheduler.may_publish(request)
        || state.check_blocks(blocks, settings.groups.len()).is_err()
    {
        return;
    }
    let whole = tokens / settings.block_size.max(1);
    let (of, ordered) = state.saves.number(request, whole);
    // The list of a window may begin anywhere, so its blocks have no known place. They are saved at
    // the end.
    let groups =
        (0..).zip(blocks.groups()).zip(&settings.groups).filter(|(_, window)| window.is_none());
    let unsaved: Vec<_> = groups
        .flat_map(|((group, list), _)| {
            let new = (ordered..whole).zip(list.iter().skip(ordered as usize));
            new.map(move |(place, block)| Unsaved { group, block: *block, place })
        })
        .collect();
    // A copy that fails is repeated when the request ends.
    drop(save(shared, &mut state, of, &unsaved, SavePoint::Early));
}

/// Copies the remaining blocks of a request that ends to the host, if they are to be published.
/// Blocks the thread. Returns false if the copies failed: the request must not be published.
pub(super) fn save_rest(shared: &Arc<Shared>, request: &RequestId, ending: &Ending) -> bool {
    let saving = {
        let mut state = shared.state.lock();
        let (of, _) = state.saves.number(request, 0);
        let groups = shared.setup.settings.groups.len();
        if !state.ranks.have_host_copies()
            || ending.blocks.is_empty()
            || !state.scheduler.would_publish(request, ending.status)
            || state.check_blocks(&ending.blocks, groups).is_err()
        {
            return true;
        }
        let windows = &shared.setup.settings.groups;
        let lists = (0..).zip(ending.blocks.groups()).zip(windows);
        let unsaved = lists.flat_map(|((group, list), window)| {
            let place = |place| if window.is_none() { place } else { u32::MAX };
            (0..).zip(list.iter()).map(move |(at, block)| Unsaved {
                group,
                block: *block,
                place: place(at),
            })
        });
        // Whole blocks that peers may read already have been copied.
        let published = state.publication.published.as_ref().filter(|_| windows[..] == [None]);
        let is_new = |unsaved: &Unsaved| published.is_none_or(|all| !all.has_whole(unsaved.block));
        let unsaved: Vec<_> = unsaved.filter(is_new).collect();
        save(shared, &mut state, of, &unsaved, SavePoint::AtEnd)
    };
    let deadline = Deadline::from(LIMIT);
    let mut all = true;
    for saved in saving {
        let why = match saved.wait(deadline) {
            Some(Ok(())) => continue,
            Some(Err(why)) => why,
            None => format!("it took longer than {LIMIT:?}"),
        };
        tracing::error!(
            %request,
            why,
            "blocks could not be copied to the host, so they are not published"
        );
        all = false;
    }
    all
}

/// Copies blocks to the host on all workers, in whichever process.
fn save(
    shared: &Arc<Shared>,
    state: &mut State,
    of: u64,
    blocks: &[Unsaved],
    when: SavePoint,
) -> Vec<Arc<Slot<Result<(), String>>>> {
    let mut saving = Vec::new();
    if blocks.is_empty() {
        return saving;
    }
    for (rank, held) in state.ranks.iter_mut() {
        if let Some(remote) = held.worker.remote_mut() {
            saving.extend(remote.save(of, blocks, when));
        } else if let Some(own) = &held.registered {
            let slot = Slot::new();
            let done = Arc::clone(&slot);
            save_here(shared, rank, own, (of, blocks.to_vec(), when), move |result| {
                done.set(result)
            });
            saving.push(slot);
        }
    }
    saving
}

/// Copies blocks to the host on a worker of this process, in the order of its steps.
pub(super) fn save_here(
    shared: &Arc<Shared>,
    rank: WorkerRank,
    own: &Arc<RegisteredCaches>,
    (of, blocks, when): (u64, Vec<Unsaved>, SavePoint),
    done: impl FnOnce(Result<(), String>) + Send + 'static,
) {
    let Some(copies) = &own.host_copies else { return done(Ok(())) };
    copies.order(of, &blocks);
    let (to_save, own) = (Arc::clone(shared), Arc::clone(own));
    shared.runtime.spawn_blocking(move || {
        let result = to_save.with_caches(rank, &own, |own| own.copies()?.save(of, &blocks, when));
        done(result.map_err(|error| error.to_string()));
    });
}
