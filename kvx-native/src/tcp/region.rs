//! Registered regions: the handles that core holds.

use std::any::Any;
use std::sync::Arc;

use kvx_core::backend::{BoundPlan, LocalRegion, PlacedGrid, RegionSpec, Ticket};
use kvx_core::{ErrorKind, RegionId, Result};

use crate::tcp::context::AgentContext;
use crate::tcp::memory::deferred::Concern;
use crate::tcp::memory::regions::{ServedRegion, export};

/// A function that makes the machine end all access to a region, and then settle the ticket.
type Revoke = Box<dyn Fn(RegionId, Ticket) + Send + Sync>;

/// A registered region.
pub(crate) struct TcpRegion {
    pub(crate) served: Arc<ServedRegion>,
    context: Arc<AgentContext>,
    revoke: Revoke,
    export: Vec<u8>,
}

impl TcpRegion {
    /// Registers a region. May block, because a device's first region allocates its bounce buffers.
    /// Returns the device's error.
    pub(crate) fn register(
        spec: RegionSpec,
        context: Arc<AgentContext>,
        revoke: impl Fn(RegionId, Ticket) + Send + Sync + 'static,
    ) -> Result<Self> {
        let deferred = Arc::clone(&context.deferred);
        let stage = context.stages.of(&spec.memory, move |token| deferred.wake(token))?;
        let export = export(stage.as_deref());
        let served = context.regions.add(spec, stage);
        Ok(TcpRegion { served, context, revoke: Box::new(revoke), export })
    }

    /// Returns the regions of these grids of a plan, and the grids on them. Returns `Invalid` for
    /// regions of another transport.
    pub(crate) fn of(
        plan: &BoundPlan,
        grids: &[PlacedGrid],
    ) -> Result<(Vec<Arc<ServedRegion>>, Arc<[PlacedGrid]>)> {
        let mut order: Vec<u32> = Vec::new();
        let grids = grids.iter().map(|placed| {
            let known = order.iter().position(|region| *region == placed.region);
            let region = known.unwrap_or_else(|| {
                order.push(placed.region);
                order.len() - 1
            });
            PlacedGrid { region: region as u32, grid: placed.grid }
        });
        let grids = grids.collect();
        let served = |region: u32| {
            let any: &dyn Any = &*plan.local(region).region;
            let region = any.downcast_ref::<TcpRegion>().map(|region| Arc::clone(&region.served));
            region.ok_or_else(|| {
                ErrorKind::Invalid.because("a plan over TCP contains a region of another transport")
            })
        };
        Ok((order.into_iter().map(served).collect::<Result<_>>()?, grids))
    }
}

impl LocalRegion for TcpRegion {
    fn export(&self) -> &[u8] {
        &self.export
    }

    fn revoke(&self, done: Ticket) {
        self.context.regions.remove(&self.served);
        let region = self.served.id;
        let deferred = Arc::clone(&self.context.deferred);
        // No new access begins then, but copies that a device has begun, and a turn that hangs, may
        // still touch the region.
        let done = Ticket::new(move |result| {
            let concerns = |concern: &Concern| concern.touches(region);
            if let Some((done, result)) = deferred.hold(concerns, done, result) {
                done.settle(result);
            }
        });
        (self.revoke)(region, done);
    }
}

impl Drop for TcpRegion {
    fn drop(&mut self) {
        // A forked child may have inherited a lock that another thread held.
        if self.context.is_owner_process() {
            self.context.regions.remove(&self.served);
        }
    }
}
