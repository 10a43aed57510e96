//! The end of requests: with blocks for a peer, given up, or taken back.

use std::sync::Arc;

use super::copies;
use super::generations::GenerationState;
use super::group::RemoteRank;
use super::group::await_digests;
use super::outcomes::{LoadEnd, Released};
use super::shared::Shared;
use super::slot::Slot;
use super::state::State;
use kvx_vllm::engine::{Ending, Finished, Kept, Outcome, RequestId, Settings, Status, Time};
use kvx_vllm::params::TransferMode;

/// A request has ended, in whatever state it was. May wait for blocks to be hashed or copied.
pub(super) fn finish(shared: &Arc<Shared>, request: &RequestId, mut ending: Ending) -> Finished {
    let saved = copies::save_rest(shared, request, &ending);
    if !saved {
        ending.status = Status::Failed;
    }
    // A call that publishes a block which another call is hashing waits for its digest.
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
        finished.withheld = Some("its blocks could not be copied to the host: the log says why");
    }
    ranks.iter().for_each(|(rank, own)| copies::publish_digests(shared, *rank, own, &fresh));
    await_digests(remote);
    finished
}

/// The state of a load when its fetch is dropped or cancelled.
pub(super) enum AbandonedLoad {
    /// It had ended already.
    Ended(LoadEnd),
    /// Workers still have its blocks: this receives their release.
    Held(Arc<Slot<Released>>),
    /// It had not begun.
    NotBegun,
}

/// Ends a load whose fetch is dropped or cancelled. In one step: its outcome arrived before, or
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

/// Takes a request's blocks back from its peers; nobody waits for their release any more. In push
/// this engine itself may be reading them, and ranks on other hosts have to raise their
/// generations: then the engine gets an outcome.
pub(super) fn withdraw(shared: &Shared, request: &RequestId, slot: &Arc<Slot<Released>>) {
    let kept = Kept::Request;
    let outcome = shared.with_state(|state, now| {
        let reports = shared.setup.settings.mode == TransferMode::Push || state.ranks.has_distant();
        let released = slot.take();
        state.outcomes.forget_release(request, kept, slot);
        // Blocks that were released before were taken back then, and the name may be another
        // request's by now.
        let at_once = released.is_none() && state.scheduler.withdraw(request);
        if at_once {
            // Before the blocks are the engine's: a write that reads them and ends later has
            // failed.
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
    let wrong = state.check_blocks(&blocks, settings.groups.len()).is_err();
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
        finished.withheld.get_or_insert(match state.publication.published {
            _ if given_back => {
                "a rank of this engine has given its caches back: call JoinedRank::register there"
            }
            _ if state.ranks.missing().is_some() => {
                "a rank of this engine is not there: Connector::group says which"
            }
            None => "no caches are registered: call Rank::register first",
            Some(_) => "its blocks are not those of the registered caches: a number is beyond them",
        });
    }
    if finished.params.is_some()
        && let Some(published) = &mut state.publication.published
    {
        published.publish(request.clone(), blocks, whole);
    }
    // The engine has not learned that some of its blocks are held: it learns it now.
    finished.delay_free |= state.outcomes.take_held(request);
    finished
}
