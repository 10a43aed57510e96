//! Outcomes of loads and leases: each goes to whoever waits for it, or to the queue that the engine
//! empties.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::task::Waker;

use super::slot::Slot;
use kvx_vllm::engine::{Kept, Outcome, RequestId};

/// The end of blocks that were leased to a decode, or held by a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    /// The decode has read the leased blocks, or does not want them. They are the engine's again. A
    /// block of several leases (a shared prefix) is free with the last of them: engines count its
    /// users.
    Fetched,
    /// No decode read the leased blocks in time, or not all ranks of it did. They are the engine's
    /// again. The log names the lease and the setting that makes it longer.
    Expired,
    /// Blocks of a load are the engine's again; leased ones, as the connector was shut down.
    Free,
    /// A peer or a transfer may touch the blocks for ever: no request gets one of them again as
    /// long as the process lives.
    Lost,
}

impl Released {
    /// Returns whether the blocks are the engine's again.
    pub fn is_free(self) -> bool {
        self != Released::Lost
    }
}

/// The end of a load that somebody waits for, with the release of the blocks that it still holds.
pub(super) struct LoadEnd {
    pub(super) outcome: Outcome,
    pub(super) held: Option<Arc<Slot<Released>>>,
}

/// Outcomes of one engine, and those who wait for one.
#[derive(Default)]
pub(super) struct Outcomes {
    /// Those that nobody waits for: the engine asks for them.
    queue: VecDeque<Outcome>,
    loads: HashMap<RequestId, Arc<Slot<LoadEnd>>>,
    releases: HashMap<(RequestId, Kept), Arc<Slot<Released>>>,
    /// Leases that have expired, until their blocks are released.
    expired: HashSet<RequestId>,
    /// The connector is being shut down: blocks that are free now were taken back.
    closing: bool,
    /// What has become of all blocks, once the connector has ended.
    ended: Option<Released>,
}

impl Outcomes {
    /// Sends the outcome of a load to `slot`.
    pub(super) fn wait_for_load(&mut self, request: &RequestId, slot: &Arc<Slot<LoadEnd>>) {
        self.loads.insert(request.clone(), Arc::clone(slot));
    }

    /// Returns the slot that receives the release of blocks.
    pub(super) fn wait_for_release(
        &mut self,
        request: &RequestId,
        kept: Kept,
    ) -> Arc<Slot<Released>> {
        let slot = Slot::new();
        match self.ended {
            Some(released) => slot.set(released),
            None => drop(self.releases.insert((request.clone(), kept), Arc::clone(&slot))),
        }
        slot
    }

    pub(super) fn forget_load(&mut self, request: &RequestId) {
        self.loads.remove(request);
    }

    /// Forgets a slot that nobody reads any more. A slot that was filled is not known here, and
    /// another request may have its name by now.
    pub(super) fn forget_release(
        &mut self,
        request: &RequestId,
        kept: Kept,
        slot: &Arc<Slot<Released>>,
    ) {
        if let Entry::Occupied(known) = self.releases.entry((request.clone(), kept))
            && Arc::ptr_eq(known.get(), slot)
        {
            known.remove();
        }
    }

    /// Notes that a lease has expired. False: that is known.
    pub(super) fn expire(&mut self, request: &RequestId) -> bool {
        self.expired.insert(request.clone())
    }

    /// The engine has taken a lease back itself.
    pub(super) fn forget_expiry(&mut self, request: &RequestId) {
        self.expired.remove(request);
    }

    /// Delivers an outcome to whoever waits for it, or queues it for the engine. Returns the task
    /// to wake.
    ///
    /// This happens under the lock under which the outcome arose, so that nobody gives up in
    /// between on what has ended already.
    pub(super) fn deliver(&mut self, outcome: Outcome) -> Option<Waker> {
        match &outcome {
            Outcome::Loaded { request, .. } | Outcome::Failed { request, .. } => {
                let Some(slot) = self.loads.remove(request) else { return self.push(outcome) };
                let holds = matches!(&outcome, Outcome::Failed { held, .. } if !held.is_empty());
                let request = request.clone();
                let held = holds.then(|| self.wait_for_release(&request, Kept::Load));
                slot.fill(LoadEnd { outcome, held })
            }
            Outcome::Free { request, kept } | Outcome::Lost { request, kept } => {
                let expired = *kept == Kept::Request && self.expired.remove(request);
                let Some(slot) = self.releases.remove(&(request.clone(), *kept)) else {
                    return self.push(outcome);
                };
                slot.fill(match (&outcome, kept) {
                    (Outcome::Lost { .. }, _) => Released::Lost,
                    (_, Kept::Load) => Released::Free,
                    (_, Kept::Request) if self.closing => Released::Free,
                    (_, Kept::Request) if expired => Released::Expired,
                    (_, Kept::Request) => Released::Fetched,
                })
            }
        }
    }

    /// Queues an outcome for the engine.
    pub(super) fn push(&mut self, outcome: Outcome) -> Option<Waker> {
        self.queue.push_back(outcome);
        None
    }

    /// Takes the queued outcomes.
    pub(super) fn take(&mut self) -> Vec<Outcome> {
        self.queue.drain(..).collect()
    }

    /// The number of outcomes that the engine has not asked for yet.
    pub(super) fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Takes the queued failure of a load that still holds blocks. True: there was one.
    pub(super) fn take_held(&mut self, request: &RequestId) -> bool {
        let holds = |outcome: &Outcome| match outcome {
            Outcome::Failed { request: of, held, .. } => of == request && !held.is_empty(),
            _ => false,
        };
        let at = self.queue.iter().position(holds);
        at.is_some_and(|at| self.queue.remove(at).is_some())
    }

    /// The outcomes that follow are those of a shutdown.
    pub(super) fn close(&mut self) {
        self.closing = true;
    }

    /// No outcomes follow. Returns the tasks to wake.
    pub(super) fn end(&mut self, released: Released) -> Vec<Waker> {
        self.ended = Some(released);
        self.releases.drain().filter_map(|(_, slot)| slot.fill(released)).collect()
    }
}
