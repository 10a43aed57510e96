//! Bounce buffers for device memory: one set per device.

use std::sync::Arc;

use crate::staging::{Buffers, Stager};
use kvx_core::backend::sync::Mutex;
use kvx_core::{DeviceAccess, Memory, Result};

/// The buffers of small transfers, which are separate so that bulk ones never delay them.
const SMALL: Buffers = Buffers { len: 64 << 10, count: 16, depth: 4 };

/// The bounce buffers of one device.
#[derive(Debug)]
pub(crate) struct DeviceStage {
    /// The stage's number, which peers receive: all blocks of one request lie on one stage.
    pub(crate) number: u32,
    small: Stager,
    bulk: Stager,
}

impl DeviceStage {
    /// Returns the buffers for streams of this lane.
    pub(crate) fn stager(&self, lane: u8) -> &Stager {
        if lane == 0 { &self.small } else { &self.bulk }
    }
}

/// The stages of an agent.
#[derive(Debug, Default)]
pub(crate) struct DeviceStages(Mutex<Vec<Arc<DeviceStage>>>);

impl DeviceStages {
    /// Returns the stage for this memory; `None` for host memory. Allocates its buffers now, and so
    /// may block. Returns the device's error.
    pub(crate) fn of(
        &self,
        memory: &Memory,
        wake: impl Fn(u64) + Clone + Send + Sync + 'static,
    ) -> Result<Option<Arc<DeviceStage>>> {
        let Some(access) = memory.device_access() else { return Ok(None) };
        let stage = self.find(access, wake);
        stage.small.prepare()?;
        stage.bulk.prepare()?;
        Ok(Some(stage))
    }

    /// Allows additional buffers, because a hung turn's lane may keep some of each stage. Returns
    /// true if there are any stages.
    pub(crate) fn do_without_some(&self) -> bool {
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
        wake: impl Fn(u64) + Clone + Send + Sync + 'static,
    ) -> Arc<DeviceStage> {
        let mut stages = self.0.lock();
        if let Some(known) = stages.iter().find(|stage| Arc::ptr_eq(stage.bulk.access(), access)) {
            return Arc::clone(known);
        }
        let stager = |buffers| Stager::new(Arc::clone(access), buffers, wake.clone());
        let (small, bulk) = (stager(SMALL), stager(Buffers::default()));
        // 0 stands for host memory.
        let stage = Arc::new(DeviceStage { number: stages.len() as u32 + 1, small, bulk });
        stages.push(Arc::clone(&stage));
        stage
    }
}
