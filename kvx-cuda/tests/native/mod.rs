//! The contract's suites over a maker's devices and the embedded transports.

pub(crate) mod again;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::memory::Hop;
use kvx_core::{Completion, DeviceAccess, Error, Kind, Memory, Registry, Result, Unavailable, gpu};
use kvx_testkit::{Backing, Device, DeviceSource, Suite, conformance_main};

/// A device as the suites take it.
pub(crate) struct Gpu(Arc<gpu::Device>);

impl Gpu {
    /// The first one. It has copied each way already: its threads, and its driver's, are none that a transport left behind.
    pub(crate) fn first(devices: Result<Vec<Arc<gpu::Device>>, Unavailable>) -> Result<Self> {
        let unavailable = |why: String| Error::new(Kind::Unavailable, why);
        let devices = devices.map_err(|why| unavailable(why.to_string()))?;
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

fn registry(_: &str) -> Registry {
    let mut registry = Registry::new();
    registry.add(kvx_native::Shm).and_then(|registry| registry.add(kvx_native::Tcp)).expect("two names");
    registry
}

/// Every clause, in one process and in two, with device memory on both sides and, the whole way through, on one.
pub(crate) fn run(device: DeviceSource, all: bool) -> ExitCode {
    use Backing::{Device, Owned, Pool};
    let over =
        |backend, label, near, far| Suite { label, near, far, device: Some(device), ..Suite::over(backend) };
    let mut suites =
        vec![over("SHM", "SHM-device", Device, Device), over("TCP", "TCP-device", Device, Device)];
    if all {
        suites.extend([
            over("SHM", "SHM-from-device", Pool, Device),
            over("SHM", "SHM-to-device", Device, Pool),
            over("TCP", "TCP-from-device", Pool, Device),
            over("TCP", "TCP-to-device", Device, Owned),
        ]);
    }
    conformance_main(registry, &suites)
}
