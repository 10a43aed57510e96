//! Faults in notifications and events that come in.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvx_core::transport::{Events, Full, LinkState};
use kvx_core::{LinkId, Sender};

use super::Fault;
use super::transport::Again;

/// Stands between a transport and its agent.
pub(super) struct ChaosEvents {
    inner: Arc<dyn Events>,
    fault: Option<Fault>,
    again: Arc<Again>,
    was_full: AtomicBool,
}

impl ChaosEvents {
    pub(super) fn new(inner: Arc<dyn Events>, fault: Option<Fault>, again: Arc<Again>) -> Self {
        ChaosEvents { inner, fault, again, was_full: AtomicBool::new(false) }
    }
}

impl Events for ChaosEvents {
    fn notification(&self, from: Sender<'_>, bytes: &[u8]) -> Result<(), Full> {
        if self.fault != Some(Fault::DropOnFull) {
            return self.inner.notification(from, bytes);
        }
        if !self.was_full.load(Ordering::Relaxed) && self.inner.notification(from, bytes).is_err() {
            self.was_full.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    fn link(&self, id: LinkId, state: LinkState) {
        match (self.fault, state) {
            (Some(Fault::DropPeerLoss), LinkState::Lost(_)) => {}
            (Some(Fault::AnyIncarnation), LinkState::Restarted(incarnation)) => {
                Again::link(&self.again, id, incarnation);
            }
            (_, state) => self.inner.link(self.again.first(id), state),
        }
    }
}
