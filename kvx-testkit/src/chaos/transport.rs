//! Opening, registering, linking.

use std::sync::Arc;

use kvx_core::transport::{
    Context, Factory, Link, LocalRegion, PeerSection, RegionSpec, RemoteRegion, Transport,
};
use kvx_core::{Capabilities, Identity, LinkId, Result, Ticket};

use super::events::ChaosEvents;
use super::gate::{Gate, Of};
use super::link::{ChaosLink, Inner};
use super::{Fault, link};

struct ChaosTransport {
    inner: Arc<dyn Transport>,
    fault: Option<Fault>,
    gate: Gate,
    /// The agent that it serves.
    agent: Identity,
    /// What its links share.
    turns: Arc<link::Turns>,
}

pub(super) fn open(
    factory: &dyn Factory,
    fault: Option<Fault>,
    gate: Gate,
    mut context: Context,
) -> Result<Arc<dyn Transport>> {
    let agent = context.agent.clone();
    context.events = Arc::new(ChaosEvents::new(Arc::clone(&context.events), fault));
    let inner = factory.open(context)?;
    Ok(Arc::new(ChaosTransport { inner, fault, gate, agent, turns: Arc::default() }))
}

// SAFETY: memory is touched by the inner transport, which keeps the contract, and by faults only while they hold the
// memory itself: what they break is the promise, never the program.
unsafe impl Transport for ChaosTransport {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn address(&self) -> Result<Vec<u8>> {
        self.inner.address()
    }

    fn register(&self, region: RegionSpec) -> Result<Arc<dyn LocalRegion>> {
        let inner = self.inner.register(region.clone())?;
        let export = inner.export().to_vec();
        Ok(Arc::new(ChaosRegion { inner, export, fault: self.fault, gate: self.gate.clone() }))
    }

    fn link(&self, id: LinkId, peer: PeerSection<'_>) -> Result<Arc<dyn Link>> {
        let _ = &self.agent;
        let inner = self.inner.link(id, peer)?;
        Ok(Arc::new(ChaosLink::new(inner, self.fault, self.gate.clone(), Arc::clone(&self.turns))))
    }

    fn link_foreign(&self, id: LinkId, blob: &[u8]) -> Result<Arc<dyn Link>> {
        let inner = self.inner.link_foreign(id, blob)?;
        Ok(Arc::new(ChaosLink::new(inner, self.fault, self.gate.clone(), Arc::clone(&self.turns))))
    }

    fn resume(&self) {
        self.inner.resume();
    }

    fn shutdown(&self, done: Ticket) {
        self.inner.shutdown(done);
    }
}

pub(super) struct ChaosRegion {
    inner: Arc<dyn LocalRegion>,
    export: Vec<u8>,
    fault: Option<Fault>,
    gate: Gate,
}

impl Inner for dyn LocalRegion {
    fn inner(self: &Arc<Self>) -> Arc<Self> {
        let any: &dyn std::any::Any = &**self;
        any.downcast_ref::<ChaosRegion>().map_or_else(|| Arc::clone(self), |region| Arc::clone(&region.inner))
    }
}

impl LocalRegion for ChaosRegion {
    fn export(&self) -> &[u8] {
        &self.export
    }

    fn revoke(&self, done: Ticket) {
        match self.fault {
            Some(Fault::IgnoreRevoke) => return done.settle(Ok(())),
            Some(Fault::BlockInRevoke) => std::thread::sleep(std::time::Duration::from_millis(500)),
            _ => {}
        }
        let gate = self.gate.clone();
        self.inner.revoke(Ticket::new(move |result| gate.pass(Of::Revocations, done, result)));
    }
}

/// A peer's region, as the inner link sees it.
pub(super) struct ChaosRemote {
    pub(super) inner: Arc<dyn RemoteRegion>,
}

impl RemoteRegion for ChaosRemote {}

impl Inner for dyn RemoteRegion {
    fn inner(self: &Arc<Self>) -> Arc<Self> {
        let any: &dyn std::any::Any = &**self;
        any.downcast_ref::<ChaosRemote>().map_or_else(|| Arc::clone(self), |region| Arc::clone(&region.inner))
    }
}
