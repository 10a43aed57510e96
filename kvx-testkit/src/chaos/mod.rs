//! The chaos transport: wraps a transport and breaks one of its promises on purpose.
//!
//! Each fault is in the module of the call that it breaks: posts in `link`, registration and links
//! in `transport`, incoming notifications and link states in `events`. `bytes` contains the effects
//! of faults on bytes. A [`Gate`] is not a fault: it lets a clause decide when a transport settles
//! its tickets.

mod bytes;
mod events;
mod fault;
mod gate;
mod link;
mod regions;
mod transport;

use std::sync::Arc;

use kvx_core::backend::{
    Admission, Availability, Context, Factory, Placement, Transport, Unavailable,
};
use kvx_core::{Options, Registry, Result};

pub use fault::Fault;
pub use gate::Gate;

/// A factory that wraps another one. It breaks a promise of the inner transports, or holds back
/// their tickets.
pub struct Chaos {
    inner: Arc<dyn Factory>,
    fault: Option<Fault>,
    gate: Gate,
}

impl Chaos {
    /// Wraps `factory` so that its transports have this fault.
    pub fn over(factory: Arc<dyn Factory>, fault: Fault) -> Self {
        Chaos { inner: factory, fault: Some(fault), gate: Gate::new() }
    }

    /// Wraps `factory` so that its transports settle their tickets only as the gate allows.
    pub fn gated(factory: Arc<dyn Factory>, gate: &Gate) -> Self {
        Chaos { inner: factory, fault: None, gate: gate.clone() }
    }

    /// Adds this fault to every backend of the registry.
    pub fn registry(registry: Registry, fault: Fault) -> Registry {
        registry.wrapped(|factory| Arc::new(Chaos::over(factory, fault)))
    }
}

impl Factory for Chaos {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn placement(&self) -> Placement {
        self.inner.placement()
    }

    fn admission(&self) -> Admission {
        self.inner.admission()
    }

    fn available(&self, options: &Options) -> Result<Availability, Unavailable> {
        self.inner.available(options)
    }

    fn open(&self, context: Context) -> Result<Arc<dyn Transport>> {
        transport::open(&*self.inner, self.fault, self.gate.clone(), context)
    }
}
