//! A vendor's device, for the suites.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvx_core::backend::{Hop, Unavailable};
use kvx_core::{Completion, DeviceAccess, ErrorKind, Memory, Result};

use super::access::Device;

/// Returns a vendor's first device, the same one at each call. [`Suite::device`](crate::Suite) is
/// this, with a name. A process uses the devices of one vendor: `devices` is `kvx_cuda::devices` or
/// `kvx_rocm::devices`, and `allocate` creates a pool on one.
///
/// # Errors
/// `Unavailable`, with the reason, if there is no device.
pub fn first<D: DeviceAccess + 'static>(
    devices: fn() -> Result<Vec<Arc<D>>, Unavailable>,
    allocate: fn(&Arc<D>, usize) -> Result<Memory>,
) -> Result<Arc<dyn Device>> {
    static FIRST: OnceLock<Result<Arc<dyn Device>>> = OnceLock::new();
    FIRST.get_or_init(|| Gpu::first(devices, allocate).map(|gpu| Arc::new(gpu) as _)).clone()
}

struct Gpu<D> {
    device: Arc<D>,
    allocate: fn(&Arc<D>, usize) -> Result<Memory>,
}

impl<D: DeviceAccess> Gpu<D> {
    /// Opens the first device and copies once in each direction, so that its threads and those of
    /// its driver exist before a test checks which threads a transport leaves behind.
    fn first(
        devices: fn() -> Result<Vec<Arc<D>>, Unavailable>,
        allocate: fn(&Arc<D>, usize) -> Result<Memory>,
    ) -> Result<Self> {
        let unavailable = |why: String| ErrorKind::Unavailable.because(why);
        let devices = devices().map_err(|why| unavailable(why.to_string()))?;
        let device =
            devices.into_iter().next().ok_or_else(|| unavailable("there is no device".into()))?;
        let pool = allocate(&device, 2)?;
        pool.copy_in(0, &[1])?;
        let (moved, ticket) = Completion::with_ticket();
        // SAFETY: both bytes belong to the pool, which outlives the wait.
        unsafe {
            device.hop(&[Hop { from: pool.address(), to: pool.address() + 1, len: 1 }], ticket)
        };
        moved.wait_blocking(Duration::from_secs(10))?;
        pool.copy_out(1, &mut [0])?;
        Ok(Gpu { device, allocate })
    }
}

impl<D: DeviceAccess + 'static> Device for Gpu<D> {
    fn access(&self) -> Arc<dyn DeviceAccess> {
        Arc::clone(&self.device) as _
    }

    fn allocate(&self, len: usize) -> Result<Memory> {
        (self.allocate)(&self.device, len)
    }
}
