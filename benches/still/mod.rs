//! A transport that moves nothing, so that benchmarks measure the core alone.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvx_core::backend::{
    AutoOpen, Availability, BoundPlan, Context, Events, Factory, Link, LinkId, LinkState,
    LocalRegion, PeerSection, Placement, RegionSpec, RemoteRegion, RemoteSpec, Ticket, Transport,
    Unavailable,
};
use kvx_core::{
    Capabilities, HungPageScope, Idle, Isolation, MemoryKinds, Options, PerOp, Result, Revocation,
    TransferId,
};

/// The plan that was posted last.
static LAST: Mutex<Option<Arc<BoundPlan>>> = Mutex::new(None);

/// Returns the plan that was posted last, as transports receive it.
pub(crate) fn last_posted() -> Arc<BoundPlan> {
    let last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(last.as_ref().expect("a plan was posted"))
}

/// The factory of the transport, under the name `STILL`.
pub(crate) struct Still;

fn capabilities() -> Capabilities {
    Capabilities {
        isolation: PerOp::same(Isolation::Owner),
        idle: Idle::Asleep,
        target_cpu: PerOp::NEITHER,
        revocation: Revocation::Owner,
        peer_loss_within: Some(Duration::from_secs(1)),
        settles_without_peer: PerOp::BOTH,
        hung_page: HungPageScope::Agent,
        ordered: true,
        local: MemoryKinds::HOST,
        remote: MemoryKinds::HOST,
    }
}

impl Factory for Still {
    fn name(&self) -> &'static str {
        "STILL"
    }

    fn placement(&self) -> Placement {
        Placement { order: 0, auto_open: AutoOpen::Skip, speaks_for: &[] }
    }

    fn available(&self, _: &Options) -> Result<Availability, Unavailable> {
        Ok(Availability::embedded("0", capabilities()))
    }

    fn open(&self, context: Context) -> Result<Arc<dyn Transport>> {
        Ok(Arc::new(Opened { events: context.events, capabilities: capabilities() }))
    }
}

struct Opened {
    events: Arc<dyn Events>,
    capabilities: Capabilities,
}

// SAFETY: this transport never accesses memory.
unsafe impl Transport for Opened {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn address(&self) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn register(&self, _: RegionSpec) -> Result<Arc<dyn LocalRegion>> {
        Ok(Arc::new(Nothing))
    }

    fn link(&self, id: LinkId, _: PeerSection<'_>) -> Result<Arc<dyn Link>> {
        self.events.link(id, LinkState::Up);
        Ok(Arc::new(Nothing))
    }

    fn shutdown(&self, done: Ticket) {
        done.settle(Ok(()));
    }
}

struct Nothing;

impl LocalRegion for Nothing {
    fn export(&self) -> &[u8] {
        &[]
    }

    fn revoke(&self, done: Ticket) {
        done.settle(Ok(()));
    }
}

impl RemoteRegion for Nothing {}

// SAFETY: this link never accesses memory.
unsafe impl Link for Nothing {
    fn capabilities(&self) -> Arc<Capabilities> {
        Arc::new(capabilities())
    }

    fn describe(&self) -> String {
        "moves nothing".into()
    }

    fn update(&self, _: PeerSection<'_>) -> Result<()> {
        Ok(())
    }

    fn import(&self, _: RemoteSpec<'_>) -> Result<Arc<dyn RemoteRegion>> {
        Ok(Arc::new(Nothing))
    }

    fn post(&self, plan: Arc<BoundPlan>, _: TransferId, done: Ticket) {
        *LAST.lock().unwrap_or_else(PoisonError::into_inner) = Some(plan);
        done.settle(Ok(()));
    }

    fn notify(&self, _: &[u8], done: Ticket) {
        done.settle(Ok(()));
    }

    fn cancel(&self, _: TransferId) {}

    fn close(&self) {}
}
