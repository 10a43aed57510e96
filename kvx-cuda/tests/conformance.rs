//! SHM and TCP keep the contract over NVIDIA devices: those of the stand-in, or, if `KVX_CUDA_LIB` names a driver, its
//! own.

mod native;

use std::process::ExitCode;
use std::sync::Arc;

use kvx_testkit::{Device, device};

fn first_device() -> kvx_core::Result<Arc<dyn Device>> {
    device::first(kvx_cuda::devices, |device, len| device.pool(len).build())
}

fn main() -> ExitCode {
    kvx_stand_in::start_again(&["KVX_CUDA_LIB"], env!("CARGO_TARGET_TMPDIR"));
    native::run(first_device, true)
}
