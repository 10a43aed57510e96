//! kvx-rocm over the stand-in: a library with HIP's functions, made of host memory.

#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

#[path = "../../kvx-cuda/tests/device/mod.rs"]
mod device;

use std::process::ExitCode;

use device::{Maker, Names};
use kvx_core::MemoryKind;

static MAKER: Maker = Maker {
    kind: MemoryKind::Rocm,
    devices: kvx_rocm::devices,
    variables: &["KVX_HIP_LIB", "KVX_HSA_LIB"],
    visible: "HIP_VISIBLE_DEVICES",
    too_old: "hip-version 40500000",
    releases: &["hip-version 50221153", "hip-version 60340000", "hip-version 70051831"],
    names: Names {
        to_device: "hipMemcpyAsync",
        rows: "hipMemcpy2DAsync",
        batch: None,
        launch: "hipModuleLaunchKernel",
        record: "hipEventRecord",
        query: "hipEventQuery",
        allocate: "hipMalloc",
        open: "hipIpcOpenMemHandle",
        close: "hipIpcCloseMemHandle",
        load: "hipModuleLoadData",
    },
};

fn main() -> ExitCode {
    device::run(&MAKER, &[], &[])
}
