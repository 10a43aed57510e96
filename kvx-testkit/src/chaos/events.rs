//! Faults in received notifications and link events.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvx_core::Sender;
use kvx_core::backend::{Events, LinkId, LinkState, QueueFull};

use super::fault::Fault;

/// Passes events from a transport to its agent, with faults.
pub(super) struct ChaosEvents {
    inner: Arc<dyn Events>,
    fault: Option<Fault>,
    was_full: AtomicBool,
}

impl ChaosEvents {
    pub(super) fn new(inner: Arc<dyn Events>, fault: Option<Fault>) -> Self {
        ChaosEvents { inner, fault, was_full: AtomicBool::new(false) }
    }
}

impl Events for ChaosEvents {
    fn notification(&self, from: Sender<'_>, bytes: &[u8]) -> Result<(), QueueFull> {
        if self.fault != Some(Fault::DropOnFull) {
            return self.inner.notification(from, bytes);
        }
        if !self.was_full.load(Ordering::Relaxed) && self.inner.notification(from, bytes).is_err() {
            self.was_full.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    fn link(&self, id: LinkId, state: LinkState) {
        if self.fault == Some(Fault::DropPeerLoss) && matches!(state, LinkState::Lost(_)) {
            return;
        }
        self.inner.link(id, state);
    }
}
