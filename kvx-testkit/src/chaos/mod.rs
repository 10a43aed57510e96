//! The chaos transport: wraps any transport and breaks one promise of it, on purpose.
//!
//! Each fault acts in the module of the call that it breaks: posts in `link`, registration and
//! links in `transport`, incoming notifications and states in `events`. What faults do to bytes is
//! in `bytes`. A [`Gate`] is no fault: it lets a clause decide when a transport settles its
//! tickets.

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

/// A factory inside another one, which breaks a promise of the inner one's transports or holds
/// their tickets back.
pub struct Chaos {
    inner: Arc<dyn Factory>,
    fault: Option<Fault>,
    gate: Gate,
}

impl Chaos {
    /// The transports of `factory`, with this fault.
    pub fn over(factory: Arc<dyn Factory>, fault: Fault) -> Self {
        Chaos { inner: factory, fault: Some(fault), gate: Gate::new() }
    }

    /// The transports of `factory`, which give their tickets back as the gate allows.
    pub fn gated(factory: Arc<dyn Factory>, gate: &Gate) -> Self {
        Chaos { inner: factory, fault: None, gate: gate.clone() }
    }

    /// A registry in which every backend has this fault.
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
