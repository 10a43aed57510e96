//! SHM and TCP keep the contract over AMD devices: those of the stand-in, or, if `KVX_HIP_LIB` names a library, its own.

#[path = "../../kvx-cuda/tests/native/mod.rs"]
mod native;

use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use kvx_testkit::Device;
use native::{Gpu, again};

/// The one device of this process.
fn device() -> kvx_core::Result<Arc<dyn Device>> {
    static DEVICE: OnceLock<kvx_core::Result<Arc<Gpu>>> = OnceLock::new();
    let device = DEVICE.get_or_init(|| Gpu::first(kvx_rocm::devices()).map(Arc::new)).clone()?;
    Ok(device)
}

fn main() -> ExitCode {
    // The machine over both makers' drivers is one: the mixed suites run over CUDA's.
    again::with_the_stand_in(&["KVX_HIP_LIB"]);
    native::run(device, false)
}
