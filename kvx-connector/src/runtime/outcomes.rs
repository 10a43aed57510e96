//! Outcomes of loads and leases. Each goes to the task that waits for it, or to the queue that the
//! engine empties.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::task::Waker;

use super::slot::Slot;
use kvx_vllm::engine::{Kept, Outcome, RequestId};

/// The end of blocks that were leased to a decode or held by a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    /// The decode has read the leased blocks, or does not want them. The engine may reuse them. A
    /// block of several leases (a shared prefix) is free with the last of them: engines count its
    /// users.
    Fetched,
    /// No decode read the leased blocks in time, or not all ranks of one did. The engine may reuse
    /// the blocks. The log names the lease and the setting that makes it longer.
    Expired,
    /// The engine may reuse the blocks of a load, or leased blocks because the connector was shut
    /// down.
    Free,
    /// A peer or a transfer may touch the blocks at any later time. The engine must not use them
    /// again in the life of this process.
    Lost,
}

impl Released {
    /// Returns whether the engine may reuse the blocks.
    pub fn is_free(self) -> bool {
        self != Released::Lost
    }
}

/// The end of a load, with the release of the blocks that it still holds, for the task that waits.
pub(super) struct LoadEnd {
    pub(super) outcome: Outcome,
    pub(super) held: Option<Arc<Slot<Released>>>,
}

/// The outcomes of one engine, and the tasks that wait for them.
#[derive(Default)]
pub(super) struct Outcomes {
    /// Outcomes that no task waits for. The engine takes them.
    queue: VecDeque<Outcome>,
    loads: HashMap<RequestId, Arc<Slot<LoadEnd>>>,
    releases: HashMap<(RequestId, Kept), Arc<Slot<Released>>>,
    /// Expired leases whose blocks are not released yet.
    expired: HashSet<RequestId>,
    /// True while the connector is being shut down. Blocks that become free now were taken back.
    closing: bool,
    /// The end of all blocks, once the connector has ended.
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

    /// Forgets a slot that has no reader any more. A slot that was filled is not in the map, and
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

    /// Records that a lease has expired. Returns false if that is known.
    pub(super) fn expire(&mut self, request: &RequestId) -> bool {
        self.expired.insert(request.clone())
    }

    /// Forgets an expiry, because the engine took the lease back.
    pub(super) fn forget_expiry(&mut self, request: &RequestId) {
        self.expired.remove(request);
    }

    /// Delivers an outcome to the task that waits for it, or queues it for the engine. Returns the
    /// task to wake.
    ///
    /// The caller holds the lock under which the outcome arose, so that no task abandons a load
    /// between its end and this call.
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

    /// Returns the number of outcomes that the engine has not taken yet.
    pub(super) fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Takes the queued failure of a load that still holds blocks. Returns whether there was one.
    pub(super) fn take_held(&mut self, request: &RequestId) -> bool {
        let holds = |outcome: &Outcome| match outcome {
            Outcome::Failed { request: of, held, .. } => of == request && !held.is_empty(),
            _ => false,
        };
        let at = self.queue.iter().position(holds);
        at.is_some_and(|at| self.queue.remove(at).is_some())
    }

    /// Records that the outcomes that follow are those of a shutdown.
    pub(super) fn close(&mut self) {
        self.closing = true;
    }

    /// Ends all releases. No outcomes follow. Returns the tasks to wake.
    pub(super) fn end(&mut self, released: Released) -> Vec<Waker> {
        self.ended = Some(released);
        self.releases.drain().filter_map(|(_, slot)| slot.fill(released)).collect()
    }
}
