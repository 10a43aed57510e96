//! The wrapper of a transport: opening, registration and links.

use std::sync::{Arc, Weak};

use kvx_core::backend::sync::Mutex;
use kvx_core::backend::{
    Context, Factory, Link, LinkId, LocalRegion, PeerSection, RegionSpec, Ticket, Transport,
};
use kvx_core::{Capabilities, ErrorKind, Identity, Result};

use super::events::ChaosEvents;
use super::fault::Fault;
use super::gate::Gate;
use super::link::{ChaosLink, SharedState};
use super::regions::{ChaosRegion, FAT};

/// Every link of this process, for [`Fault::GlobalStop`].
static LINKS: Mutex<Vec<Weak<ChaosLink>>> = Mutex::new(Vec::new());

struct ChaosTransport {
    inner: Arc<dyn Transport>,
    fault: Option<Fault>,
    gate: Gate,
    /// The agent that it serves.
    agent: Identity,
    state: Arc<SharedState>,
    /// The thread that spins ends when this is dropped.
    _alive: Arc<()>,
}

pub(super) fn open(
    factory: &dyn Factory,
    fault: Option<Fault>,
    gate: Gate,
    mut context: Context,
) -> Result<Arc<dyn Transport>> {
    let agent = context.agent.clone();
    let alive = Arc::new(());
    context.events = Arc::new(ChaosEvents::new(Arc::clone(&context.events), fault));
    let inner = factory.open(context)?;
    match fault {
        Some(Fault::Spin) => spin(Arc::downgrade(&alive)),
        Some(Fault::TakeSignal) => take_signal(),
        _ => {}
    }
    Ok(Arc::new(ChaosTransport { inner, fault, gate, agent, state: Arc::default(), _alive: alive }))
}

/// Keeps a core busy as long as the transport lives.
fn spin(alive: Weak<()>) {
    std::thread::spawn(move || {
        while alive.strong_count() > 0 {
            std::hint::spin_loop();
        }
    });
}

extern "C" fn do_nothing(_: libc::c_int) {}

fn take_signal() {
    // SAFETY: the handler does nothing, which a signal handler may do, and the signal is ignored by
    // default.
    unsafe {
        libc::signal(libc::SIGURG, do_nothing as extern "C" fn(libc::c_int) as libc::sighandler_t)
    };
}

impl ChaosTransport {
    fn wrapped(&self, inner: Arc<dyn Link>) -> Arc<dyn Link> {
        let link =
            Arc::new(ChaosLink::new(inner, self.fault, self.gate.clone(), Arc::clone(&self.state)));
        if self.fault == Some(Fault::GlobalStop) {
            LINKS.lock().push(Arc::downgrade(&link));
        }
        link
    }
}

// SAFETY: the inner transport accesses memory and upholds the contract. Faults access memory only
// while they hold a handle to it, so they break a promise but never the program's memory safety.
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
            return Err(ErrorKind::Unsupported.because("chaos: an agent cannot link to itself"));
        }
        Ok(self.wrapped(self.inner.link(id, peer)?))
    }

    fn link_foreign(&self, id: LinkId, blob: &[u8]) -> Result<Arc<dyn Link>> {
        Ok(self.wrapped(self.inner.link_foreign(id, blob)?))
    }

    fn resume(&self) {
        self.inner.resume();
    }

    fn shutdown(&self, done: Ticket) {
        self.inner.shutdown(done);
        let links = std::mem::take(&mut *LINKS.lock());
        links.iter().filter_map(Weak::upgrade).for_each(|link| link.close());
    }
}
