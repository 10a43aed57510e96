//! Regions of the chaos transport, and access to those of the inner transport.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::{LocalRegion, RemoteRegion, Ticket};

use super::fault::Fault;
use super::gate::{Gate, TicketKind};

/// The number of bytes that [`Fault::FatExport`] adds.
pub(super) const FAT: usize = 48 << 10;

/// A handle that may belong to the chaos transport and wrap one of the inner transport.
pub(super) trait Unwrap {
    fn inner(self: &Arc<Self>) -> Arc<Self>;
}

/// A local region that wraps one of the inner transport.
pub(super) struct ChaosRegion {
    pub(super) inner: Arc<dyn LocalRegion>,
    pub(super) export: Vec<u8>,
    pub(super) fault: Option<Fault>,
    pub(super) gate: Gate,
}

impl Unwrap for dyn LocalRegion {
    fn inner(self: &Arc<Self>) -> Arc<Self> {
        let any: &dyn std::any::Any = &**self;
        any.downcast_ref::<ChaosRegion>()
            .map_or_else(|| Arc::clone(self), |region| Arc::clone(&region.inner))
    }
}

impl LocalRegion for ChaosRegion {
    fn export(&self) -> &[u8] {
        &self.export
    }

    fn revoke(&self, done: Ticket) {
        match self.fault {
            Some(Fault::IgnoreRevoke) => return done.settle(Ok(())),
            Some(Fault::BlockInRevoke) => std::thread::sleep(Duration::from_secs(2)),
            _ => {}
        }
        let gate = self.gate.clone();
        self.inner
            .revoke(Ticket::new(move |result| gate.pass(TicketKind::Revocation, done, result)));
    }
}

/// A peer's region as the inner link knows it.
pub(super) struct ChaosRemote {
    pub(super) inner: Arc<dyn RemoteRegion>,
}

impl RemoteRegion for ChaosRemote {}

impl Unwrap for dyn RemoteRegion {
    fn inner(self: &Arc<Self>) -> Arc<Self> {
        let any: &dyn std::any::Any = &**self;
        any.downcast_ref::<ChaosRemote>()
            .map_or_else(|| Arc::clone(self), |region| Arc::clone(&region.inner))
    }
}
