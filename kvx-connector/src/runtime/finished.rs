//! Requests that end: with blocks for a peer, given up, or taken back.

use std::sync::Arc;

use super::awaited::LoadEnd;
use super::group::{Away, await_digests};
use super::prefill::Released;
use super::slot::Slot;
use super::state::{Shared, State};
use super::words::Published;
use crate::engine::{Ending, Finished, Kept, Outcome, RequestId, Settings, Status, Time};
use crate::params::TransferMode;

/// A load that nobody awaits any more.
pub(super) enum Abandoned {
    /// It had ended already.
    Ended(LoadEnd),
    /// Workers still have its blocks: this hears of their release.
    Held(Arc<Slot<Released>>),
    /// It had not begun.
    Nothing,
}

impl Shared {
    pub(super) fn request_finished(
        self: &Arc<Self>,
        request: &RequestId,
        mut ending: Ending,
    ) -> Finished {
        let saved = self.save_the_rest(request, &ending);
        if !saved {
            ending.status = Status::Failed;
        }
        // Whoever publishes a block that another call is hashing waits for its digest.
        let publishes = self.digests() && !ending.blocks.is_empty();
        let _digesting = publishes.then(|| self.digesting.lock());
        let mut state = self.state.lock();
        let mut finished =
            state.request_finished(self.clock.now(), request, ending, &self.setup.settings);
        if !saved {
            finished.withheld =
                Some("its blocks could not be copied to the host: the log says why");
        }
        let fresh = state.published.as_mut().map(Published::take_fresh).unwrap_or_default();
        let ranks = state.ranks.iter().filter(|_| !fresh.is_empty());
        let ranks: Vec<_> =
            ranks.filter_map(|(rank, held)| Some((*rank, held.registered.clone()?))).collect();
        let elsewhere = state.digest_elsewhere(&fresh);
        drop(state);
        ranks.iter().for_each(|(rank, own)| self.publish_digests(*rank, own, &fresh));
        await_digests(elsewhere);
        self.wake_up.notify_one();
        finished
    }

    /// Ends a load that nobody awaits any more. In one step: its outcome has come before that, or never comes.
    pub(super) fn abandon(&self, request: &RequestId, slot: &Slot<LoadEnd>) -> Abandoned {
        let mut state = self.state.lock();
        let end = slot.take();
        state.awaited.forget_load(request);
        let now = self.clock.now();
        let finished =
            state.request_finished(now, request, Ending::aborted(), &self.setup.settings);
        let abandoned = match end {
            Some(end) => Abandoned::Ended(end),
            None if finished.delay_free => {
                Abandoned::Held(state.awaited.release(request, Kept::Load))
            }
            None => Abandoned::Nothing,
        };
        drop(state);
        self.wake_up.notify_one();
        abandoned
    }

    /// Takes a request's blocks back from under its peers; nobody awaits their release any more. In push this engine
    /// itself may be reading them, and ranks on other hosts have to raise their words: it hears of their release by an
    /// outcome then.
    pub(super) fn withdraw(&self, request: &RequestId, slot: &Arc<Slot<Released>>) {
        let kept = Kept::Request;
        let mut state = self.state.lock();
        let told = self.setup.settings.mode == TransferMode::Push || state.has_distant_ranks();
        let released = slot.take();
        state.awaited.forget_release(request, kept, slot);
        // What has been released was taken back then, and its name may be another request's by now.
        let at_once = released.is_none() && state.scheduler.withdraw(request);
        if at_once {
            // Before the blocks are the engine's: a write that reads them and ends later has failed.
            let now = self.clock.now();
            let ready = state.scheduler.take_ready(now, None);
            state.pass_on(now, ready);
            state.aggregator.forget_sending(request);
            state.awaited.forget_expiry(request);
            state.release(request);
        }
        let request = request.clone();
        let outcome = match released {
            _ if !told => None,
            Some(Released::Lost) => Some(Outcome::Lost { request, kept }),
            Some(_) => Some(Outcome::Free { request, kept }),
            None if at_once => state.unless_read(Outcome::Free { request, kept }),
            None => None,
        };
        drop(state);
        outcome.into_iter().for_each(|outcome| self.tell(outcome));
        self.wake_up.notify_one();
    }
}

impl State {
    fn request_finished(
        &mut self,
        now: Time,
        request: &RequestId,
        mut ending: Ending,
        settings: &Settings,
    ) -> Finished {
        self.saving.forget(request);
        let blocks = ending.blocks.clone();
        let whole = (ending.computed / settings.block_size.max(1)) as usize;
        let wrong = self.check_blocks(&blocks, settings.groups.len()).is_err();
        if wrong && !blocks.is_empty() {
            ending.status = Status::Failed;
        }
        let given = ending.status;
        ending.reference =
            ending.reference.or_else(|| self.published.as_ref().map(Published::reference));
        self.traces.finished(request);
        let mut finished = self.scheduler.request_finished(now, request, ending);
        if wrong && given == Status::Failed && !blocks.is_empty() {
            finished.withheld.get_or_insert(match self.published {
                _ if self.ranks.values().filter_map(|held| held.worker.away()).any(Away::has_given_back) => {
                    "a rank of this engine has given its caches back: call JoinedRank::register there"
                }
                _ if self.missing().is_some() => {
                    "a rank of this engine is not there: Connector::group says which"
                }
                None => "no caches are registered: call Rank::register first",
                Some(_) => "its blocks are not those of the registered caches: a number is beyond them",
            });
        }
        if finished.params.is_some()
            && let Some(published) = &mut self.published
        {
            published.publish(request.clone(), blocks, whole);
        }
        // The engine has not heard that some of its blocks are held: it hears it now.
        let holds = |outcome: &Outcome| match outcome {
            Outcome::Failed { request: of, held, .. } => of == request && !held.is_empty(),
            _ => false,
        };
        if let Some(at) = self.outcomes.iter().position(holds) {
            self.outcomes.remove(at);
            finished.delay_free = true;
        }
        finished
    }
}
