//! SHM and TCP keep the contract over NVIDIA devices: those of the stand-in, or, if `KVX_CUDA_LIB` names a driver, its own.

mod native;

use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use kvx_testkit::Device;
use native::{Gpu, again};

/// The one device of this process.
fn device() -> kvx_core::Result<Arc<dyn Device>> {
    static DEVICE: OnceLock<kvx_core::Result<Arc<Gpu>>> = OnceLock::new();
    let device = DEVICE.get_or_init(|| Gpu::first(kvx_cuda::devices()).map(Arc::new)).clone()?;
    Ok(device)
}

fn main() -> ExitCode {
    again::with_the_stand_in(&["KVX_CUDA_LIB"]);
    native::run(device, true)
}
