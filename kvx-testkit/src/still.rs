//! A backend that moves nothing.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::{
    AutoOpen, Availability, BoundPlan, Context, Events, Factory, Link, LinkId, LocalRegion,
    PeerSection, Placement, RegionSpec, RemoteRegion, RemoteSpec, Ticket, Transport, Unavailable,
};
use kvx_core::{
    Capabilities, HungPageScope, Idle, Isolation, MemoryKinds, Options, PerOp, Result, Revocation,
    TransferId,
};

type OnLink = dyn Fn(LinkId, Arc<dyn Events>) + Send + Sync;
type OnPost = dyn Fn(Arc<BoundPlan>) + Send + Sync;

/// A backend whose operations succeed at once and move nothing, to test or measure the core alone.
#[derive(Clone)]
pub struct StillBackend {
    name: &'static str,
    on_link: Arc<OnLink>,
    on_post: Arc<OnPost>,
}

impl StillBackend {
    /// Creates a backend. `on_link` receives each link and reports its states; `on_post` receives
    /// each plan.
    pub fn new(
        name: &'static str,
        on_link: impl Fn(LinkId, Arc<dyn Events>) + Send + Sync + 'static,
        on_post: impl Fn(Arc<BoundPlan>) + Send + Sync + 'static,
    ) -> Self {
        StillBackend { name, on_link: Arc::new(on_link), on_post: Arc::new(on_post) }
    }
}

impl fmt::Debug for StillBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StillBackend({})", self.name)
    }
}

const CAPABILITIES: Capabilities = Capabilities {
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
};

impl Factory for StillBackend {
    fn name(&self) -> &'static str {
        self.name
    }

    fn placement(&self) -> Placement {
        Placement { order: 0, auto_open: AutoOpen::Open, speaks_for: &[] }
    }

    fn available(&self, _: &Options) -> Result<Availability, Unavailable> {
        Ok(Availability::embedded("0", CAPABILITIES))
    }

    fn open(&self, context: Context) -> Result<Arc<dyn Transport>> {
        Ok(Arc::new(StillTransport { backend: self.clone(), events: context.events }))
    }
}

struct StillTransport {
    backend: StillBackend,
    events: Arc<dyn Events>,
}

// SAFETY: this transport never accesses memory.
unsafe impl Transport for StillTransport {
    fn capabilities(&self) -> &Capabilities {
        &CAPABILITIES
    }

    fn address(&self) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn register(&self, _: RegionSpec) -> Result<Arc<dyn LocalRegion>> {
        Ok(Arc::new(StillRegion))
    }

    fn link(&self, id: LinkId, _: PeerSection<'_>) -> Result<Arc<dyn Link>> {
        (self.backend.on_link)(id, Arc::clone(&self.events));
        Ok(Arc::new(StillLink(Arc::clone(&self.backend.on_post))))
    }

    fn shutdown(&self, done: Ticket) {
        done.settle(Ok(()));
    }
}

struct StillRegion;

impl LocalRegion for StillRegion {
    fn export(&self) -> &[u8] {
        &[]
    }

    fn revoke(&self, done: Ticket) {
        done.settle(Ok(()));
    }
}

impl RemoteRegion for StillRegion {}

struct StillLink(Arc<OnPost>);

// SAFETY: this link never accesses memory.
unsafe impl Link for StillLink {
    fn capabilities(&self) -> Arc<Capabilities> {
        Arc::new(CAPABILITIES)
    }

    fn describe(&self) -> String {
        "moves nothing".into()
    }

    fn update(&self, _: PeerSection<'_>) -> Result<()> {
        Ok(())
    }

    fn import(&self, _: RemoteSpec<'_>) -> Result<Arc<dyn RemoteRegion>> {
        Ok(Arc::new(StillRegion))
    }

    fn post(&self, plan: Arc<BoundPlan>, _: TransferId, done: Ticket) {
        (self.0)(plan);
        done.settle(Ok(()));
    }

    fn notify(&self, _: &[u8], done: Ticket) {
        done.settle(Ok(()));
    }

    fn cancel(&self, _: TransferId) {}

    fn close(&self) {}
}
