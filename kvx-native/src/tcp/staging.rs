//! Bounce buffers for device memory: one set of them per device.

use std::any::Any;
use std::sync::Arc;

use crate::staging::{Buffers, Stager};
use kvx_core::sync::Mutex;
use kvx_core::{Bound, DeviceAccess, Error, ErrorKind, Extents, Memory, Pair, Result};

use super::ending::{Concern, DeferredCompletions};
use super::link::TcpRemote;
use super::memory::{Served, TcpRegion};
use super::payload::{Sink, Source};

/// Small transfers have buffers of their own: bulk ones never keep them waiting.
const SMALL: Buffers = Buffers { len: 64 << 10, count: 16, depth: 4 };

/// The bounce buffers of one device.
#[derive(Debug)]
pub(super) struct DeviceStage {
    /// Its number, which peers are told: blocks of one request lie on one stage.
    pub(super) number: u32,
    small: Stager,
    bulk: Stager,
}

impl DeviceStage {
    /// The buffers for streams of this lane.
    pub(super) fn stager(&self, lane: u8) -> &Stager {
        if lane == 0 { &self.small } else { &self.bulk }
    }
}

/// The stages of an agent.
#[derive(Debug, Default)]
pub(super) struct DeviceStages(Mutex<Vec<Arc<DeviceStage>>>);

impl DeviceStages {
    /// The stage for this memory; `None` for host memory. Its buffers are made now: may block. Errors: the device's.
    pub(super) fn of(
        &self,
        memory: &Memory,
        ending: &Arc<DeferredCompletions>,
    ) -> Result<Option<Arc<DeviceStage>>> {
        let Some(access) = memory.device_access() else { return Ok(None) };
        let stage = self.find(access, ending);
        stage.small.prepare()?;
        stage.bulk.prepare()?;
        Ok(Some(stage))
    }

    /// A turn hangs, whose lane may keep buffers of each. Says whether there are any stages.
    pub(super) fn do_without_some(&self) -> bool {
        let stages = self.0.lock().clone();
        for stage in &stages {
            stage.small.do_without_some();
            stage.bulk.do_without_some();
        }
        !stages.is_empty()
    }

    fn find(
        &self,
        access: &Arc<dyn DeviceAccess>,
        ending: &Arc<DeferredCompletions>,
    ) -> Arc<DeviceStage> {
        let mut stages = self.0.lock();
        if let Some(known) = stages.iter().find(|stage| Arc::ptr_eq(stage.bulk.access(), access)) {
            return Arc::clone(known);
        }
        let stager = |buffers| {
            let ending = Arc::clone(ending);
            Stager::new(Arc::clone(access), buffers, move |token| ending.wake(token))
        };
        let (small, bulk) = (stager(SMALL), stager(Buffers::default()));
        // 0 stands for host memory.
        let stage = Arc::new(DeviceStage { number: stages.len() as u32 + 1, small, bulk });
        stages.push(Arc::clone(&stage));
        stage
    }
}

fn local_stage(plan: &Bound, region: u32) -> u32 {
    let any: &dyn Any = &*plan.local(region).region;
    let stage = any.downcast_ref::<TcpRegion>().and_then(|region| region.served.stage.as_ref());
    stage.map_or(0, |stage| stage.number)
}

fn remote_stage(plan: &Bound, region: u32) -> u32 {
    let any: &dyn Any = &*plan.remote(region).region;
    any.downcast_ref::<TcpRemote>().map_or(0, |remote| remote.stage)
}

/// Whether a plan has device memory on either side.
pub(super) fn is_staged(plan: &Bound) -> bool {
    // One kind of memory a side: the first speaks for all.
    let local = !plan.locals().is_empty() && local_stage(plan, 0) != 0;
    local || !plan.remotes().is_empty() && remote_stage(plan, 0) != 0
}

/// Whether a grid of a plan lies on the same stages as the one before it, so that one request may name both.
pub(super) fn share_stages(plan: &Bound, pair: &Pair, grid: usize) -> bool {
    let [before, now] = [grid - 1, grid].map(|grid| {
        (local_stage(plan, pair.local[grid].region), remote_stage(plan, pair.remote[grid].region))
    });
    before == now
}

/// Blocks on one device, to become a stream.
pub(super) struct Staged {
    stage: Arc<DeviceStage>,
    memories: Vec<Arc<Memory>>,
    extents: Extents,
}

impl Staged {
    /// The blocks of `extents` in these regions; `Err(extents)`: they are host memory.
    ///
    /// # Errors
    /// `Unsupported` for regions that do not lie on one stage.
    pub(super) fn of(regions: &[Arc<Served>], extents: Extents) -> Result<Result<Self, Extents>> {
        let mut numbers =
            regions.iter().map(|served| served.stage.as_ref().map(|stage| stage.number));
        let first = numbers.next().flatten();
        if numbers.any(|number| number != first) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "a request names memory of several devices: its initiator should have made several of it",
            ));
        }
        let Some(stage) = regions.first().and_then(|served| served.stage.clone()) else {
            return Ok(Err(extents));
        };
        let memories = regions.iter().map(|served| Arc::clone(&served.memory)).collect();
        Ok(Ok(Staged { stage, memories, extents }))
    }

    /// To be sent on this lane.
    pub(super) fn source(self, lane: u8, token: u64, concern: Concern) -> Result<Source> {
        let fetch = self.stage.stager(lane).fetch(token, self.memories, self.extents)?;
        Ok(Source::fetch(token, fetch, concern))
    }

    /// To be received on this lane.
    pub(super) fn sink(self, lane: u8, token: u64, concern: Concern) -> Result<Sink> {
        let store = self.stage.stager(lane).store(token, self.memories, self.extents)?;
        Ok(Sink::store(token, store, concern))
    }
}
