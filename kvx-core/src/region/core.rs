//! The shared state of a region, which outlives its handles, and its revocation.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::bound::{Bindings, KeepsBound};
use crate::completion::{Completion, Promise};
use crate::deadline::{Clock, Expire, Reason, Watch};
use crate::fault_injection::injected;
use crate::identity::{RegionId, RegionKey};
use crate::quarantine::{self, Quarantined};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::ticket::{Settle, Ticket};
use crate::transport::LocalRegion;
use crate::{Error, ErrorKind, Memory, Result};

/// The shared state of a region. It outlives the region's handles while transports still use it.
pub(crate) struct RegionCore {
    pub(crate) id: RegionId,
    pub(crate) key: RegionKey,
    pub(crate) name: Arc<str>,
    pub(crate) memory: Arc<Memory>,
    /// The region's registration with each transport, by position in the agent's list, or the
    /// reason why there is none.
    pub(crate) locals: Vec<Result<Arc<dyn LocalRegion>>>,
    /// The number of local transfers that use the region and have not settled.
    pins: AtomicUsize,
    revoking: AtomicBool,
    revocation: Mutex<RevocationState>,
    /// Plans whose bindings hold what transports prepared for the region.
    bindings: Mutex<Bindings>,
}

/// How long the memory of a dropped region may be held before a warning is logged.
const SOON: Duration = Duration::from_secs(1);

#[derive(Default)]
struct RevocationState {
    /// The number of transports that have not answered; `None` before they were asked.
    left: Option<usize>,
    failed: Option<Error>,
    waiting: Vec<Arc<Promise<Arc<Memory>>>>,
    held: Option<Quarantined>,
    /// Logs at its time that the memory is still held.
    warning: Option<Watch>,
    /// The result, once all transports have answered.
    ended: Option<Result<()>>,
}

pub(super) fn still_shared() -> Error {
    ErrorKind::StillShared.because(
        "remote access to the region is not proven to have ended: its memory stays quarantined \
         until every peer has confirmed or is known to be dead; call revoke again to continue to \
         wait",
    )
}

pub(super) fn revoked(name: &str) -> Error {
    ErrorKind::Revoked
        .because(format!("region {name} is revoked: register its memory again to use it"))
}

impl RegionCore {
    pub(crate) fn new(
        id: RegionId,
        key: RegionKey,
        name: Arc<str>,
        memory: Arc<Memory>,
        locals: Vec<Result<Arc<dyn LocalRegion>>>,
    ) -> Self {
        RegionCore {
            id,
            key,
            name,
            memory,
            locals,
            pins: AtomicUsize::new(0),
            revoking: AtomicBool::new(false),
            revocation: Mutex::default(),
            bindings: Mutex::default(),
        }
    }

    /// Counts a local transfer that uses the region.
    ///
    /// # Errors
    /// `Revoked` if the region is being revoked.
    pub(crate) fn pin(self: &Arc<Self>) -> Result<()> {
        self.pins.fetch_add(1, Ordering::SeqCst);
        if !self.is_revoking() {
            return Ok(());
        }
        self.unpin();
        Err(revoked(&self.name))
    }

    pub(crate) fn unpin(self: &Arc<Self>) {
        if self.pins.fetch_sub(1, Ordering::SeqCst) == 1 && self.is_revoking() {
            self.ask_transports();
        }
    }

    pub(crate) fn is_revoking(&self) -> bool {
        self.revoking.load(Ordering::SeqCst)
    }

    /// Records that a plan which uses the region was bound to a link.
    pub(crate) fn bound(&self, plan: Weak<dyn KeepsBound>) {
        self.bindings.lock().add(plan);
    }

    /// Starts the revocation, or joins it. With `dropped`, the region has no handle left, so the
    /// revocation keeps the memory alive.
    pub(super) fn revoke(
        self: &Arc<Self>,
        waiting: Option<Arc<Promise<Arc<Memory>>>>,
        dropped: bool,
    ) {
        let mut revocation = self.revocation.lock();
        let ended =
            if injected("revoke-at-once") { Some(Ok(())) } else { revocation.ended.clone() };
        if let Some(result) = ended {
            drop(revocation);
            waiting.map(|promise| promise.finish(result.map(|()| Arc::clone(&self.memory))));
            return;
        }
        revocation.waiting.extend(waiting);
        if dropped && revocation.held.is_none() {
            revocation.held = Some(quarantine::hold(Arc::clone(&self.memory)));
        }
        self.revoking.store(true, Ordering::SeqCst);
        drop(revocation);
        if self.pins.load(Ordering::SeqCst) == 0 {
            self.ask_transports();
        }
    }

    /// Asks the transports to revoke, once the local transfers have settled. Several threads may
    /// call it at once.
    fn ask_transports(self: &Arc<Self>) {
        let locals: Vec<_> = self.locals.iter().flatten().cloned().collect();
        {
            let mut revocation = self.revocation.lock();
            if revocation.left.is_some() {
                return;
            }
            // One more than there are transports, so that the last answer cannot come before all
            // are asked.
            revocation.left = Some(locals.len() + 1);
        }
        let bindings = self.bindings.lock().release_all();
        drop(bindings); // prepared lists are dropped before the regions that they name
        for local in locals {
            local.revoke(Ticket::of(Arc::clone(self) as Arc<dyn Settle>));
        }
        self.answered(Ok(()));
    }

    /// Starts the revocation for an agent that shuts down.
    pub(crate) fn revoke_at_shutdown(self: &Arc<Self>) -> Completion<Arc<Memory>> {
        let promise = Promise::new();
        self.revoke(Some(Arc::clone(&promise)), false);
        Completion::of(promise)
    }

    /// Quarantines the memory until the revocation has ended, if it has not.
    pub(crate) fn quarantine(&self, why: &str) {
        let mut revocation = self.revocation.lock();
        if revocation.ended.is_none() && revocation.held.is_none() {
            revocation.held = Some(quarantine::hold(Arc::clone(&self.memory)));
            drop(revocation);
            quarantine::warn(&self.memory, &self.name, why);
        }
    }

    /// Logs a warning if the memory of a dropped region is still held after [`SOON`]. Most is freed
    /// within a millisecond.
    pub(super) fn warn_if_held(self: &Arc<Self>, clock: &Clock) {
        if self.revocation.lock().held.is_none() {
            return;
        }
        let watch = clock.watch(Instant::now() + SOON, Arc::clone(self) as Arc<dyn Expire>);
        let mut revocation = self.revocation.lock();
        let unused =
            if revocation.held.is_some() { revocation.warning.replace(watch) } else { Some(watch) };
        drop(revocation);
        drop(unused);
    }

    fn answered(self: &Arc<Self>, result: Result<()>) {
        let mut revocation = self.revocation.lock();
        if let Err(error) = result {
            revocation.failed.get_or_insert(error);
        }
        let left = revocation.left.map_or(0, |left| left.saturating_sub(1));
        revocation.left = Some(left);
        if left > 0 {
            return;
        }
        let waiting = std::mem::take(&mut revocation.waiting);
        let result = match revocation.failed.clone() {
            None => Ok(()),
            Some(cause) => Err(still_shared().with_source(cause)),
        };
        revocation.ended = Some(result.clone());
        let (mut held, warning) = (revocation.held.take(), revocation.warning.take());
        drop(revocation);
        drop(warning);
        if result.is_err() {
            // Nothing will ever prove that the access has ended.
            let held = held.take();
            std::mem::forget(held.unwrap_or_else(|| quarantine::hold(Arc::clone(&self.memory))));
            quarantine::warn(&self.memory, &self.name, "its revocation failed");
        }
        drop(held);
        for promise in waiting {
            promise.finish(result.clone().map(|()| Arc::clone(&self.memory)));
        }
    }
}

impl Expire for RegionCore {
    fn expire(self: Arc<Self>) {
        if self.revocation.lock().held.is_some() {
            quarantine::warn(&self.memory, &self.name, "dropped without a finished revocation");
        }
    }

    fn interrupt(self: Arc<Self>, _: &Reason) {}
}

/// Receives a transport's answer to a revocation.
impl Settle for RegionCore {
    fn settled(self: Arc<Self>, result: Result<()>) {
        self.answered(result);
    }

    fn forgotten(self: Arc<Self>) {
        self.answered(Err(ErrorKind::Forgotten
            .because("a transport lost the revocation: report this as a bug in the transport")));
    }
}

/// Creates a region that one transport has registered.
#[cfg(all(test, kvx_loom))]
pub(crate) fn core_of(local: Arc<dyn LocalRegion>) -> RegionCore {
    let memory = Arc::new(Memory::owned(vec![0; 64]));
    RegionCore::new(RegionId(1), RegionKey([1; 16]), "modelled".into(), memory, vec![Ok(local)])
}
