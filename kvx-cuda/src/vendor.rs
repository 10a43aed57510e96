//! NVIDIA's driver, as data.

use std::ffi::c_int;

use kvx_core::MemoryKind;
use kvx_gpu::driver::{
    CompilerLibrary, CompilerNames, FunctionNames, LibraryFile, Status, Vendor, VirtualMemoryNames,
    status,
};
use kvx_gpu::kernels::PTX;

use crate::calls::CudaCalls;

/// The library is the toolkit's stub, not the driver.
const STUB_LIBRARY: Status = 34;
/// NVIDIA's fabric manager is not running.
const SYSTEM_NOT_READY: Status = 802;
/// Library and kernel module are from different releases.
const SYSTEM_DRIVER_MISMATCH: Status = 803;

pub(crate) static NVIDIA: Vendor = Vendor {
    kind: MemoryKind::Cuda,
    name: "CUDA",
    noun: "driver",
    kernel_log: "NVRM",
    device_list: "nvidia-smi",
    library: LibraryFile {
        variable: "KVX_CUDA_LIB",
        names: &["libcuda.so.1"],
        file: Some("/usr/lib/wsl/lib/libcuda.so.1"),
        cure: "install NVIDIA's driver, which brings libcuda.so.1; in a container, pass the GPUs in (docker run \
               --gpus all, with NVIDIA's container toolkit); or set KVX_CUDA_LIB to the file",
    },
    // CUDA 11.4: the first release that identifies a part of a device (MIG) by its own UUID.
    oldest: 11_040,
    format_version,
    advice,
    version: c"cuDriverGetVersion",
    functions: FunctionNames {
        device_count: c"cuDeviceGetCount",
        device: c"cuDeviceGet",
        device_name: c"cuDeviceGetName",
        device_uuid: c"cuDeviceGetUuid_v2",
        device_bus: c"cuDeviceGetPCIBusId",
        can_access_peer: c"cuDeviceCanAccessPeer",
        allocate: c"cuMemAlloc_v2",
        free: c"cuMemFree_v2",
        allocate_pinned: c"cuMemHostAlloc",
        free_pinned: c"cuMemFreeHost",
        fill: c"cuMemsetD8Async",
        allocation: c"cuMemGetAddressRange_v2",
        share: c"cuIpcGetMemHandle",
        open: c"cuIpcOpenMemHandle_v2",
        close: c"cuIpcCloseMemHandle",
        create_stream: c"cuStreamCreate",
        destroy_stream: c"cuStreamDestroy_v2",
        create_event: c"cuEventCreate",
        destroy_event: c"cuEventDestroy_v2",
        record_event: c"cuEventRecord",
        query_event: c"cuEventQuery",
        load_module: c"cuModuleLoadData",
        module_function: c"cuModuleGetFunction",
        launch: c"cuLaunchKernel",
    },
    virtual_memory: VirtualMemoryNames {
        granularity: c"cuMemGetAllocationGranularity",
        reserve: c"cuMemAddressReserve",
        free_addresses: c"cuMemAddressFree",
        create: c"cuMemCreate",
        release: c"cuMemRelease",
        map: c"cuMemMap",
        unmap: c"cuMemUnmap",
        set_access: c"cuMemSetAccess",
        export: c"cuMemExportToShareableHandle",
        import: c"cuMemImportFromShareableHandle",
    },
    imports_descriptors: 0,
    fatal: &[
        4..=4,     // deinitialized
        214..=214, // uncorrectable ECC
        220..=220, // uncorrectable NVLink
        226..=226, // contained
        700..=700, // illegal address
        702..=702, // launch timeout
        709..=710, // context destroyed, assert
        714..=719, // illegal instructions, addresses and launches
        810..=810, // MPS client terminated
    ],
    // The driver compiles this text, unless it is in a container without its compiler, or older
    // than CUDA 12.0.
    kernels: Some(PTX),
    compiler: CompilerLibrary {
        name: "NVRTC",
        library: LibraryFile {
            variable: "KVX_NVRTC_LIB",
            names: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so"],
            file: None,
            cure: "install a driver of CUDA 12.0 or newer; or NVRTC of CUDA's toolkit, and set KVX_NVRTC_LIB if it is \
                   not found",
        },
        // A binary for this device, which needs neither a PTX version nor the driver's compiler.
        functions: CompilerNames {
            create: c"nvrtcCreateProgram",
            compile: c"nvrtcCompileProgram",
            log_size: c"nvrtcGetProgramLogSize",
            log: c"nvrtcGetProgramLog",
            code_size: c"nvrtcGetCUBINSize",
            code: c"nvrtcGetCUBIN",
            destroy: c"nvrtcDestroyProgram",
        },
    },
    calls: CudaCalls::find,
};

fn format_version(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn advice(status: Status) -> (String, &'static str) {
    let cure = match status {
        status::NO_DEVICE => {
            let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
            let visible = visible.map(|value| format!("; CUDA_VISIBLE_DEVICES={value}"));
            return (
                visible.unwrap_or_default(),
                "check the list of nvidia-smi; in a container, pass the GPUs in; CUDA_VISIBLE_DEVICES must name one",
            );
        }
        STUB_LIBRARY => {
            "this is the toolkit's stub: remove its folder from LD_LIBRARY_PATH, or set KVX_CUDA_LIB"
        }
        SYSTEM_DRIVER_MISMATCH => {
            "the library and the kernel module are from different releases: load the new module (reboot), or in a \
             container take the host's library"
        }
        SYSTEM_NOT_READY => "start NVIDIA's fabric manager, and check nvidia-smi",
        _ => "check whether nvidia-smi works, and the lines of NVRM in dmesg",
    };
    (String::new(), cure)
}
