//! A maker's device, as the suites take it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvx_core::backend::{Hop, Unavailable};
use kvx_core::{Completion, DeviceAccess, Error, ErrorKind, Memory, Result};

use super::access::Device;

/// The first of a maker's devices, the same one at each call: what [`Suite::device`](crate::Suite)
/// is, with a name. A process asks for those of one maker: `devices` is `kvx_cuda::devices` or
/// `kvx_rocm::devices`, `allocate` makes a pool on one.
///
/// # Errors
/// `Unavailable`: why there is none.
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
    /// It has copied each way already: its threads, and its driver's, are none that a transport
    /// left behind.
    fn first(
        devices: fn() -> Result<Vec<Arc<D>>, Unavailable>,
        allocate: fn(&Arc<D>, usize) -> Result<Memory>,
    ) -> Result<Self> {
        let unavailable = |why: String| Error::new(ErrorKind::Unavailable, why);
        let devices = devices().map_err(|why| unavailable(why.to_string()))?;
        let device =
            devices.into_iter().next().ok_or_else(|| unavailable("there is no device".into()))?;
        let pool = allocate(&device, 2)?;
        pool.copy_in(0, &[1])?;
        let (moved, ticket) = Completion::with_ticket();
        // SAFETY: both bytes are the pool's, which outlives the wait.
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
