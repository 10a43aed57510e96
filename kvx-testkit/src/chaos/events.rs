//! What comes in.

use std::sync::Arc;

use kvx_core::transport::{Events, Full, LinkState};
use kvx_core::{LinkId, Sender};

use super::Fault;

/// Stands between a transport and its agent.
pub(super) struct ChaosEvents {
    inner: Arc<dyn Events>,
    fault: Option<Fault>,
}

impl ChaosEvents {
    pub(super) fn new(inner: Arc<dyn Events>, fault: Option<Fault>) -> Self {
        ChaosEvents { inner, fault }
    }
}

impl Events for ChaosEvents {
    fn notification(&self, from: Sender<'_>, bytes: &[u8]) -> Result<(), Full> {
        let _ = self.fault;
        self.inner.notification(from, bytes)
    }

    fn link(&self, id: LinkId, state: LinkState) {
        self.inner.link(id, state);
    }
}
