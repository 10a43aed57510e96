//! Opening, registering, linking.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use kvx_core::transport::{
    Context, Factory, Link, LocalRegion, PeerSection, RegionSpec, RemoteRegion, Transport,
};
use kvx_core::{Capabilities, Error, Generation, Identity, Incarnation, Kind, LinkId, Result, Ticket};

use super::Fault;
use super::events::ChaosEvents;
use super::gate::{Gate, Of};
use super::link::{ChaosLink, Inner, Slot, Turns, later};

/// What [`Fault::FatExport`] adds.
pub(super) const FAT: usize = 48 << 10;

/// Every link of this process, for [`Fault::GlobalStop`].
static LINKS: Mutex<Vec<Weak<ChaosLink>>> = Mutex::new(Vec::new());

struct ChaosTransport {
    inner: Arc<dyn Transport>,
    fault: Option<Fault>,
    gate: Gate,
    /// The agent that it serves.
    agent: Identity,
    turns: Arc<Turns>,
    again: Arc<Again>,
    /// Ends the thread that spins.
    _alive: Arc<()>,
}

pub(super) fn open(
    factory: &dyn Factory,
    fault: Option<Fault>,
    gate: Gate,
    mut context: Context,
) -> Result<Arc<dyn Transport>> {
    let agent = context.agent.clone();
    let (again, alive) = (Arc::new(Again::default()), Arc::new(()));
    context.events = Arc::new(ChaosEvents::new(Arc::clone(&context.events), fault, Arc::clone(&again)));
    let inner = factory.open(context)?;
    again.transport.set(Arc::downgrade(&inner)).ok(); // set once, here
    match fault {
        Some(Fault::Spin) => spin(Arc::downgrade(&alive)),
        Some(Fault::TakeSignal) => take_signal(),
        _ => {}
    }
    Ok(Arc::new(ChaosTransport { inner, fault, gate, agent, turns: Arc::default(), again, _alive: alive }))
}

/// Keeps a core busy for as long as the transport lives.
fn spin(alive: Weak<()>) {
    std::thread::spawn(move || {
        while alive.strong_count() > 0 {
            std::hint::spin_loop();
        }
    });
}

extern "C" fn do_nothing(_: libc::c_int) {}

fn take_signal() {
    // SAFETY: the handler does nothing, which is allowed in a handler; the signal is ignored by default.
    unsafe { libc::signal(libc::SIGURG, do_nothing as extern "C" fn(libc::c_int) as libc::sighandler_t) };
}

impl ChaosTransport {
    fn wrapped(&self, inner: Slot) -> Arc<dyn Link> {
        let link = Arc::new(ChaosLink::new(inner, self.fault, self.gate.clone(), Arc::clone(&self.turns)));
        if self.fault == Some(Fault::GlobalStop) {
            LINKS.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&link));
        }
        link
    }
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
        let inner = self.inner.register(region)?;
        let mut export = inner.export().to_vec();
        if self.fault == Some(Fault::FatExport) {
            export.resize(export.len() + FAT, 0);
        }
        Ok(Arc::new(ChaosRegion { inner, export, fault: self.fault, gate: self.gate.clone() }))
    }

    fn stages_devices(&self) -> bool {
        self.inner.stages_devices()
    }

    fn link(&self, id: LinkId, peer: PeerSection<'_>) -> Result<Arc<dyn Link>> {
        if self.fault == Some(Fault::NoLoopback) && *peer.identity == self.agent {
            return Err(Error::new(Kind::Unsupported, "chaos: no link to the own agent"));
        }
        let slot = self.again.note(id, peer);
        Ok(self.wrapped(slot.fill(self.inner.link(id, peer)?)))
    }

    fn link_foreign(&self, id: LinkId, blob: &[u8]) -> Result<Arc<dyn Link>> {
        Ok(self.wrapped(Slot::default().fill(self.inner.link_foreign(id, blob)?)))
    }

    fn resume(&self) {
        self.inner.resume();
    }

    fn shutdown(&self, done: Ticket) {
        self.inner.shutdown(done);
        let links = std::mem::take(&mut *LINKS.lock().unwrap_or_else(PoisonError::into_inner));
        links.iter().filter_map(Weak::upgrade).for_each(|link| link.close());
    }
}

/// Links anew to whoever answers, for [`Fault::AnyIncarnation`].
#[derive(Default)]
pub(super) struct Again {
    transport: OnceLock<Weak<dyn Transport>>,
    links: Mutex<HashMap<LinkId, Asked>>,
    /// The ids of second links, and those of the first ones, by which the agent knows them.
    second: Mutex<HashMap<LinkId, LinkId>>,
}

/// What a link was asked for.
#[derive(Clone)]
struct Asked {
    name: Arc<str>,
    generation: Generation,
    address: Vec<u8>,
    slot: Slot,
}

impl Again {
    fn note(&self, id: LinkId, peer: PeerSection<'_>) -> Slot {
        let (name, generation, address) =
            (Arc::clone(&peer.identity.name), peer.generation, peer.address.to_vec());
        let asked = Asked { name, generation, address, slot: Slot::default() };
        let slot = asked.slot.clone();
        self.links.lock().unwrap_or_else(PoisonError::into_inner).insert(id, asked);
        slot
    }

    /// The id by which the agent knows a link.
    pub(super) fn first(&self, id: LinkId) -> LinkId {
        *self.second.lock().unwrap_or_else(PoisonError::into_inner).get(&id).unwrap_or(&id)
    }

    /// The transport is reporting: what it is asked next comes from another thread.
    pub(super) fn link(again: &Arc<Self>, id: LinkId, incarnation: Incarnation) {
        let again = Arc::clone(again);
        later(Duration::ZERO, move || {
            let asked = again.links.lock().unwrap_or_else(PoisonError::into_inner).get(&id).cloned();
            let transport = again.transport.get().and_then(Weak::upgrade);
            let Some((asked, transport)) = asked.zip(transport) else { return };
            let identity = Identity { name: asked.name, incarnation };
            let section =
                PeerSection { identity: &identity, generation: asked.generation, address: &asked.address };
            let second = LinkId(u64::MAX - id.0);
            again.second.lock().unwrap_or_else(PoisonError::into_inner).insert(second, id);
            if let Ok(link) = transport.link(second, section) {
                asked.slot.fill(link);
            }
        });
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
            Some(Fault::BlockInRevoke) => std::thread::sleep(Duration::from_secs(2)),
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
