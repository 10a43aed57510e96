//! AMD's HIP runtime, as data.

use std::ffi::c_int;
use std::path::Path;

use kvx_core::MemoryKind;
use kvx_gpu::driver::{
    CompilerLibrary, CompilerNames, FunctionNames, LibraryFile, Status, Vendor, VirtualMemoryNames,
    status,
};

use crate::calls::HipCalls;

pub(crate) static AMD: Vendor = Vendor {
    kind: MemoryKind::Rocm,
    name: "HIP",
    noun: "runtime",
    kernel_log: "amdgpu",
    device_list: "rocminfo",
    library: LibraryFile {
        variable: "KVX_HIP_LIB",
        names: &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"],
        // AMD's packages install it there, which is not in the dynamic linker's path.
        file: Some("/opt/rocm/lib/libamdhip64.so"),
        cure: "install ROCm's HIP runtime (AMD: hip-runtime-amd; Debian: libamdhip64-5), or set KVX_HIP_LIB to its \
               libamdhip64.so",
    },
    oldest: 50_000_000,
    format_version,
    advice,
    version: c"hipRuntimeGetVersion",
    functions: FunctionNames {
        device_count: c"hipGetDeviceCount",
        device: c"hipDeviceGet",
        device_name: c"hipDeviceGetName",
        device_uuid: c"hipDeviceGetUuid",
        device_bus: c"hipDeviceGetPCIBusId",
        can_access_peer: c"hipDeviceCanAccessPeer",
        allocate: c"hipMalloc",
        free: c"hipFree",
        allocate_pinned: c"hipHostMalloc",
        free_pinned: c"hipHostFree",
        fill: c"hipMemsetAsync",
        allocation: c"hipMemGetAddressRange",
        share: c"hipIpcGetMemHandle",
        open: c"hipIpcOpenMemHandle",
        close: c"hipIpcCloseMemHandle",
        create_stream: c"hipStreamCreateWithFlags",
        destroy_stream: c"hipStreamDestroy",
        create_event: c"hipEventCreateWithFlags",
        destroy_event: c"hipEventDestroy",
        record_event: c"hipEventRecord",
        query_event: c"hipEventQuery",
        load_module: c"hipModuleLoadData",
        module_function: c"hipModuleGetFunction",
        launch: c"hipModuleLaunchKernel",
    },
    virtual_memory: VirtualMemoryNames {
        granularity: c"hipMemGetAllocationGranularity",
        reserve: c"hipMemAddressReserve",
        free_addresses: c"hipMemAddressFree",
        create: c"hipMemCreate",
        release: c"hipMemRelease",
        map: c"hipMemMap",
        unmap: c"hipMemUnmap",
        set_access: c"hipMemSetAccess",
        export: c"hipMemExportToShareableHandle",
        import: c"hipMemImportFromShareableHandle",
    },
    imports_descriptors: 70_100_000,
    fatal: &[
        4..=4,     // deinitialized
        214..=214, // uncorrectable ECC
        700..=700, // illegal address
        702..=702, // launch timeout
        709..=710, // context destroyed, assert
        719..=719, // launch failure
    ],
    kernels: None,
    // In HIP 5 and 6 it is in the same file as the runtime.
    compiler: CompilerLibrary {
        name: "hipRTC",
        library: LibraryFile {
            variable: "KVX_HIPRTC_LIB",
            names: &["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5", "libhiprtc.so"],
            file: Some("/opt/rocm/lib/libhiprtc.so"),
            cure: "install ROCm's hipRTC (AMD: hip-runtime-amd), or set KVX_HIPRTC_LIB to its libhiprtc.so",
        },
        functions: CompilerNames {
            create: c"hiprtcCreateProgram",
            compile: c"hiprtcCompileProgram",
            log_size: c"hiprtcGetProgramLogSize",
            log: c"hiprtcGetProgramLog",
            code_size: c"hiprtcGetCodeSize",
            code: c"hiprtcGetCode",
            destroy: c"hiprtcDestroyProgram",
        },
    },
    calls: HipCalls::find,
};

fn format_version(version: c_int) -> String {
    format!("{}.{}", version / 10_000_000, version / 100_000 % 100)
}

fn advice(status: Status) -> (String, &'static str) {
    match (std::fs::File::open(Path::new("/dev/kfd")), status) {
        (Err(error), _) if error.kind() == std::io::ErrorKind::NotFound => (
            "; /dev/kfd is not there".to_owned(),
            "load the kernel's module amdgpu on a machine with an AMD GPU; in a container, pass /dev/kfd and /dev/dri in",
        ),
        (Err(error), _) => (
            format!("; /dev/kfd: {error}"),
            "allow this user to open /dev/kfd and /dev/dri/renderD*: add it to the groups render and video",
        ),
        (Ok(_), status::NO_DEVICE) => {
            let set = |name| std::env::var(name).ok().map(|value| format!("; {name}={value}"));
            let visible = ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"];
            (
                visible.into_iter().filter_map(set).collect(),
                "check the list of rocminfo; ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES must name one",
            )
        }
        (Ok(_), _) => {
            (String::new(), "check whether rocminfo works, and the lines of amdgpu in dmesg")
        }
    }
}
