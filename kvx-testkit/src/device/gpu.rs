//! A maker's device, as the suites take it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvx_core::memory::Hop;
use kvx_core::{Completion, DeviceAccess, Error, Kind, Memory, Result, Unavailable, gpu};

use super::Device;

/// What gives a maker's devices: `kvx_cuda::devices` or `kvx_rocm::devices`.
pub type Devices = fn() -> Result<Vec<Arc<gpu::Device>>, Unavailable>;

/// The first of a maker's devices, the same one at each call: what [`Suite::device`](crate::Suite) is, with a name. A process
/// asks for those of one maker.
///
/// # Errors
/// `Unavailable`: why there is none.
pub fn first(devices: Devices) -> Result<Arc<dyn Device>> {
    static FIRST: OnceLock<Result<Arc<Gpu>>> = OnceLock::new();
    let first = FIRST.get_or_init(|| Gpu::first(devices).map(Arc::new)).clone()?;
    Ok(first)
}

struct Gpu(Arc<gpu::Device>);

impl Gpu {
    /// It has copied each way already: its threads, and its driver's, are none that a transport left behind.
    fn first(devices: Devices) -> Result<Self> {
        let unavailable = |why: String| Error::new(Kind::Unavailable, why);
        let devices = devices().map_err(|why| unavailable(why.to_string()))?;
        let device = devices.into_iter().next().ok_or_else(|| unavailable("there is no device".into()))?;
        let pool = device.pool(2).build()?;
        pool.copy_in(0, &[1])?;
        let (moved, ticket) = Completion::with_ticket();
        // SAFETY: both bytes are the pool's, which outlives the wait.
        unsafe { device.hop(&[Hop { from: pool.address(), to: pool.address() + 1, len: 1 }], ticket) };
        moved.wait(Duration::from_secs(10))?;
        pool.copy_out(1, &mut [0])?;
        Ok(Gpu(device))
    }
}

impl Device for Gpu {
    fn access(&self) -> Arc<dyn DeviceAccess> {
        Arc::clone(&self.0) as _
    }

    fn allocate(&self, len: usize) -> Result<Memory> {
        self.0.pool(len).build()
    }
}
