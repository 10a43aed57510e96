//! Who awaits which outcome: what nobody awaits is the engine's to ask for.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::task::Waker;

use super::prefill::Released;
use super::slot::Slot;
use crate::engine::{Kept, Outcome, RequestId};

/// The end of a load that somebody awaits, with the release of what it still holds.
pub(super) struct LoadEnd {
    pub(super) outcome: Outcome,
    pub(super) held: Option<Arc<Slot<Released>>>,
}

/// Those who wait.
#[derive(Default)]
pub(super) struct Awaited {
    loads: HashMap<RequestId, Arc<Slot<LoadEnd>>>,
    kept: HashMap<(RequestId, Kept), Arc<Slot<Released>>>,
    /// Leases that have expired, until their blocks are released.
    expired: HashSet<RequestId>,
    /// The connector is being shut down: what is free now was taken back.
    closing: bool,
    /// What has become of all blocks, once the connector has ended.
    ended: Option<Released>,
}

impl Awaited {
    /// The outcome of a load goes to `slot`.
    pub(super) fn load(&mut self, request: &RequestId, slot: &Arc<Slot<LoadEnd>>) {
        self.loads.insert(request.clone(), Arc::clone(slot));
    }

    /// The release of blocks goes to this slot.
    pub(super) fn release(&mut self, request: &RequestId, kept: Kept) -> Arc<Slot<Released>> {
        let slot = Slot::new();
        match self.ended {
            Some(released) => slot.set(released),
            None => drop(self.kept.insert((request.clone(), kept), Arc::clone(&slot))),
        }
        slot
    }

    pub(super) fn forget_load(&mut self, request: &RequestId) {
        self.loads.remove(request);
    }

    /// Nobody waits at this slot any more. One that has been filled is not known here, and its name may be another's.
    pub(super) fn forget_release(
        &mut self,
        request: &RequestId,
        kept: Kept,
        slot: &Arc<Slot<Released>>,
    ) {
        if let Entry::Occupied(known) = self.kept.entry((request.clone(), kept))
            && Arc::ptr_eq(known.get(), slot)
        {
            known.remove();
        }
    }

    /// An outcome goes to whoever awaits it: under the same lock under which it has come about, so that nobody gives up
    /// in between what has ended already. Gives who is to be woken. `Err`: nobody awaits it.
    pub(super) fn hear(&mut self, outcome: Outcome) -> Result<Option<Waker>, Outcome> {
        match &outcome {
            Outcome::Loaded { request, .. } | Outcome::Failed { request, .. } => {
                let Some(slot) = self.loads.remove(request) else { return Err(outcome) };
                let holds = matches!(&outcome, Outcome::Failed { held, .. } if !held.is_empty());
                let request = request.clone();
                let held = holds.then(|| self.release(&request, Kept::Load));
                Ok(slot.fill(LoadEnd { outcome, held }))
            }
            Outcome::Free { request, kept } | Outcome::Lost { request, kept } => {
                let expired = *kept == Kept::Request && self.expired.remove(request);
                let Some(slot) = self.kept.remove(&(request.clone(), *kept)) else {
                    return Err(outcome);
                };
                Ok(slot.fill(match (&outcome, kept) {
                    (Outcome::Lost { .. }, _) => Released::Lost,
                    (_, Kept::Load) => Released::Free,
                    (_, Kept::Request) if self.closing => Released::Free,
                    (_, Kept::Request) if expired => Released::Expired,
                    (_, Kept::Request) => Released::Fetched,
                }))
            }
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

    /// The outcomes that follow are those of a shutdown.
    pub(super) fn close(&mut self) {
        self.closing = true;
    }

    /// There will be no outcomes any more.
    pub(super) fn end(&mut self, released: Released) -> Vec<Waker> {
        self.ended = Some(released);
        self.kept.drain().filter_map(|(_, slot)| slot.fill(released)).collect()
    }
}
