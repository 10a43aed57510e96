//! A backend that moves nothing.

use std::sync::Arc;

use kvx_core::backend::{
    Availability, Context, Factory, Link, LinkId, LocalRegion, PeerSection, Placement, RegionSpec,
    Ticket, Transport, Unavailable,
};
use kvx_core::{
    Capabilities, Error, ErrorKind, HungPageScope, Idle, Isolation, MemoryKinds, Options, PerOp,
    Result, Revocation,
};

const CAPABILITIES: Capabilities = Capabilities {
    isolation: PerOp::same(Isolation::Owner),
    idle: Idle::Asleep,
    target_cpu: PerOp::BOTH,
    revocation: Revocation::Owner,
    peer_loss_within: None,
    settles_without_peer: PerOp::NEITHER,
    hung_page: HungPageScope::Agent,
    ordered: false,
    local: MemoryKinds::HOST,
    remote: MemoryKinds::HOST,
};

pub(crate) fn availability() -> Availability {
    Availability::embedded("1", CAPABILITIES)
}

/// A backend that can be opened, and does no more than its fields say.
#[derive(Clone)]
pub(crate) struct Still {
    pub(crate) name: &'static str,
    pub(crate) placement: Placement,
    /// The metadata that it gives to foreign agents; `None` if it connects to kvx agents only.
    pub(crate) foreign_metadata: Option<&'static str>,
    /// Closes the transport and settles the ticket.
    pub(crate) shutdown: Arc<dyn Fn(Ticket) + Send + Sync>,
}

impl Factory for Still {
    fn name(&self) -> &'static str {
        self.name
    }

    fn placement(&self) -> Placement {
        self.placement
    }

    fn available(&self, _: &Options) -> Result<Availability, Unavailable> {
        Ok(availability())
    }

    fn open(&self, _: Context) -> Result<Arc<dyn Transport>> {
        Ok(Arc::new(Opened(self.clone())))
    }
}

struct Opened(Still);

fn nothing<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Unsupported, "it moves nothing"))
}

// SAFETY: it touches no memory.
unsafe impl Transport for Opened {
    fn capabilities(&self) -> &Capabilities {
        &CAPABILITIES
    }

    fn address(&self) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn register(&self, _: RegionSpec) -> Result<Arc<dyn LocalRegion>> {
        nothing()
    }

    fn link(&self, _: LinkId, _: PeerSection<'_>) -> Result<Arc<dyn Link>> {
        nothing()
    }

    fn foreign_metadata(&self) -> Result<Vec<u8>> {
        self.0.foreign_metadata.map_or_else(nothing, |told| Ok(told.as_bytes().to_vec()))
    }

    fn shutdown(&self, done: Ticket) {
        (self.0.shutdown)(done);
    }
}
