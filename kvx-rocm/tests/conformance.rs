//! SHM and TCP keep the contract over AMD devices: those of the stand-in, or, if `KVX_HIP_LIB` names a library, its
//! own.

#[path = "../../kvx-cuda/tests/native/mod.rs"]
mod native;

use std::process::ExitCode;
use std::sync::Arc;

use kvx_testkit::{Device, device};

fn first_device() -> kvx_core::Result<Arc<dyn Device>> {
    device::first(kvx_rocm::devices, |device, len| device.pool(len).build())
}

fn main() -> ExitCode {
    // The machine over both makers' drivers is one: the mixed suites run over CUDA's.
    kvx_stand_in::start_again(&["KVX_HIP_LIB"], env!("CARGO_TARGET_TMPDIR"));
    native::run(first_device, false)
}
