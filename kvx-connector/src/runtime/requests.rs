//! The end of requests: with blocks for a peer, abandoned, or withdrawn.

use std::sync::Arc;

use super::copies;
use super::generations::GenerationState;
use super::group::RemoteRank;
use super::group::await_digests;
use super::outcomes::{LoadEnd, Released};
use super::shared::Shared;
use super::slot::Slot;
use super::state::State;
use kvx_core::ErrorKind;
use kvx_vllm::engine::{
    Ending, Finished, Kept, Outcome, RequestId, Settings, Status, Time, Withheld,
};
use kvx_vllm::params::TransferMode;

/// Ends a request, in whatever state it is. May block while blocks are hashed or copied.
pub(super) fn finish(shared: &Arc<Shared>, request: &RequestId, mut ending: Ending) -> Finished {
    let saved = copies::save_rest(shared, request, &ending);
    if !saved {
        ending.status = Status::Failed;
    }
    // If another call is hashing a block, a call that publishes it too waits for its digest.
    let publishes = shared.digests() && !ending.blocks.is_empty();
    let _digesting = publishes.then(|| shared.digesting.lock());
    let (mut finished, ranks, fresh, remote) = shared.with_state(|state, now| {
        let finished = end(state, now, request, ending, &shared.setup.settings);
        let published = state.publication.published.as_mut();
        let fresh = published.map(GenerationState::take_fresh).unwrap_or_default();
        let ranks = state.ranks.iter().filter(|_| !fresh.is_empty());
        let ranks: Vec<_> =
            ranks.filter_map(|(rank, held)| Some((rank, held.registered.clone()?))).collect();
        let remote = state.ranks.digest(&fresh);
        (finished, ranks, fresh, remote)
    });
    if !saved {
        finished.withheld = Some(Withheld {
            kind: ErrorKind::Native,
            reason: "its blocks could not be copied to the host: see the log",
        });
    }
    ranks.iter().for_each(|(rank, own)| copies::publish_digests(shared, *rank, own, &fresh));
    await_digests(remote);
    finished
}

/// The state of a load whose fetch is dropped or cancelled.
pub(super) enum AbandonedLoad {
    /// The load had ended already.
    Ended(LoadEnd),
    /// Workers still have the load's blocks. The slot receives their release.
    Held(Arc<Slot<Released>>),
    /// The load had not started.
    NotBegun,
}

/// Ends a load whose fetch is dropped or cancelled, in one step: its outcome has arrived before, or
/// never will.
pub(super) fn abandon(shared: &Shared, request: &RequestId, slot: &Slot<LoadEnd>) -> AbandonedLoad {
    shared.with_state(|state, now| {
        let ended = slot.take();
        state.outcomes.forget_load(request);
        let finished = end(state, now, request, Ending::aborted(), &shared.setup.settings);
        match ended {
            Some(ended) => AbandonedLoad::Ended(ended),
            None if finished.delay_free => {
                AbandonedLoad::Held(state.outcomes.wait_for_release(request, Kept::Load))
            }
            None => AbandonedLoad::NotBegun,
        }
    })
}

/// Withdraws the blocks of a request that peers may read. Its lease is gone, so no task waits for
/// their release. In push this engine itself may be reading them, and ranks on other hosts have to
/// raise their generations: the engine then gets an outcome.
pub(super) fn withdraw(shared: &Shared, request: &RequestId, slot: &Arc<Slot<Released>>) {
    let kept = Kept::Request;
    let outcome = shared.with_state(|state, now| {
        let reports = shared.setup.settings.mode == TransferMode::Push || state.ranks.has_distant();
        let released = slot.take();
        state.outcomes.forget_release(request, kept, slot);
        // If the blocks were released before, they are free already, and another request may have
        // the name by now.
        let at_once = released.is_none() && state.scheduler.withdraw(request);
        if at_once {
            // Comes before the engine reuses the blocks, so that a write fails if it reads them and
            // ends later.
            state.pass_on_ready(now, None);
            state.aggregator.forget_sending(request);
            state.outcomes.forget_expiry(request);
            state.publication.release(request, &mut state.ranks);
        }
        let request = request.clone();
        match released {
            _ if !reports => None,
            Some(Released::Lost) => Some(Outcome::Lost { request, kept }),
            Some(_) => Some(Outcome::Free { request, kept }),
            None if at_once => {
                state.publication.delay(Outcome::Free { request, kept }, &state.ranks)
            }
            None => None,
        }
    });
    outcome.into_iter().for_each(|outcome| shared.queue(outcome));
}

fn end(
    state: &mut State,
    now: Time,
    request: &RequestId,
    mut ending: Ending,
    settings: &Settings,
) -> Finished {
    state.saves.forget(request);
    let blocks = ending.blocks.clone();
    let whole = (ending.computed / settings.block_size.max(1)) as usize;
    let groups = settings.groups.len();
    let wrong = state.check_blocks(&blocks, groups).is_err();
    if wrong && !blocks.is_empty() {
        ending.status = Status::Failed;
    }
    let given = ending.status;
    let published = state.publication.published.as_ref();
    ending.reference = ending.reference.or_else(|| published.map(GenerationState::reference));
    state.traces.finished(request);
    let mut finished = state.scheduler.request_finished(now, request, ending);
    if wrong && given == Status::Failed && !blocks.is_empty() {
        let given_back = state.ranks.remote().any(|(_, remote)| RemoteRank::has_given_back(remote));
        let lacks_rank = state.ranks.missing().is_some();
        let reason = match state.publication.published {
            _ if given_back => {
                "a rank of this engine has given its caches back: call JoinedRank::register in \
                 its process"
            }
            _ if lacks_rank => {
                "a rank of this engine is missing: the result of Connector::group names it"
            }
            None => "no caches are registered: call Rank::register first",
            Some(_) if blocks.groups().len() != groups => {
                "it does not have one list of blocks for each KV cache group: see \
                 ConnectorBuilder::groups"
            }
            Some(_) => "one of its blocks lies beyond the registered caches",
        };
        let kind = if lacks_rank && !given_back { ErrorKind::PeerLost } else { ErrorKind::Invalid };
        finished.withheld.get_or_insert(Withheld { kind, reason });
    }
    if finished.params.is_some()
        && let Some(published) = &mut state.publication.published
    {
        published.publish(request.clone(), blocks, whole);
    }
    // The engine may not know yet that some of its blocks are held. It learns it from this result.
    finished.delay_free |= state.outcomes.take_held(request);
    finished
}
