//! The functions of HIP that kvx calls. Whatever differs between its releases 5, 6 and 7 is asked by functions that do
//! not: no structure of device properties, and no constant whose number has changed.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};

/// A `hipError_t`.
pub(crate) type Status = c_int;
/// A `hipStream_t`, `hipEvent_t`, `hipModule_t`, `hipFunction_t` or `hipMemGenericAllocationHandle_t`.
pub(crate) type Handle = *mut c_void;
/// Memory, on whichever side.
pub(crate) type Address = *mut c_void;

/// A `hipIpcMemHandle_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct HipIpcHandle(pub(crate) [u8; 64]);

/// A `hipPointerAttribute_t`, the same in all releases; what the numbers of `kind` mean is not.
#[repr(C)]
pub(crate) struct PointerAttributes {
    pub(crate) kind: c_int,
    pub(crate) device: c_int,
    pub(crate) device_pointer: Address,
    pub(crate) host_pointer: Address,
    pub(crate) is_managed: c_int,
    pub(crate) flags: c_uint,
}

/// A `hipMemLocation`.
#[repr(C)]
pub(crate) struct Location {
    /// 1: a device.
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

/// A `hipMemAllocationProp`.
#[repr(C)]
pub(crate) struct Physical {
    /// 1: pinned, which all memory of devices is.
    pub(crate) kind: c_int,
    /// 1: file descriptors.
    pub(crate) handles: c_int,
    pub(crate) location: Location,
    pub(crate) windows: *mut c_void,
    pub(crate) compression: c_uchar,
    pub(crate) for_rdma: c_uchar,
    pub(crate) usage: u16,
}

/// A `hipMemAccessDesc`.
#[repr(C)]
pub(crate) struct Access {
    pub(crate) location: Location,
    /// 3: reading and writing.
    pub(crate) flags: c_int,
}

// On machines of 64 bits.
const _: () = {
    assert!(size_of::<PointerAttributes>() == 32);
    assert!(size_of::<Physical>() == 32);
    assert!(size_of::<Access>() == 12);
};

pub(crate) const SUCCESS: Status = 0;
pub(crate) const INVALID_VALUE: Status = 1;
pub(crate) const OUT_OF_MEMORY: Status = 2;
pub(crate) const DEINITIALIZED: Status = 4;
pub(crate) const NO_DEVICE: Status = 100;
pub(crate) const NOT_READY: Status = 600;
pub(crate) const NOT_SUPPORTED: Status = 801;

/// `hipMemcpyHostToDevice` and so on.
pub(crate) const TO_DEVICE: c_int = 1;
/// See [`TO_DEVICE`].
pub(crate) const TO_HOST: c_int = 2;
/// See [`TO_DEVICE`].
pub(crate) const WITHIN: c_int = 3;

kvx_gpu::symbols! {
    /// The runtime's functions.
    pub(crate) struct Functions {
        hipGetDeviceCount: fn(*mut c_int) -> Status,
        hipRuntimeGetVersion: fn(*mut c_int) -> Status,
        hipGetErrorName: fn(Status) -> *const c_char,
        hipGetErrorString: fn(Status) -> *const c_char,
        hipDeviceGet: fn(*mut c_int, c_int) -> Status,
        hipDeviceGetName: fn(*mut c_char, c_int, c_int) -> Status,
        hipDeviceGetUuid: fn(*mut [u8; 16], c_int) -> Status,
        hipDeviceGetPCIBusId: fn(*mut c_char, c_int, c_int) -> Status,
        hipDeviceCanAccessPeer: fn(*mut c_int, c_int, c_int) -> Status,
        hipSetDevice: fn(c_int) -> Status,
        hipGetDevice: fn(*mut c_int) -> Status,
        hipMalloc: fn(*mut Address, usize) -> Status,
        hipFree: fn(Address) -> Status,
        hipHostMalloc: fn(*mut *mut c_void, usize, c_uint) -> Status,
        hipHostFree: fn(*mut c_void) -> Status,
        hipMemsetAsync: fn(Address, c_int, usize, Handle) -> Status,
        hipMemGetAddressRange: fn(*mut Address, *mut usize, Address) -> Status,
        hipPointerGetAttributes: fn(*mut PointerAttributes, *const c_void) -> Status,
        hipStreamCreateWithFlags: fn(*mut Handle, c_uint) -> Status,
        hipStreamDestroy: fn(Handle) -> Status,
        hipEventCreateWithFlags: fn(*mut Handle, c_uint) -> Status,
        hipEventDestroy: fn(Handle) -> Status,
        hipEventRecord: fn(Handle, Handle) -> Status,
        hipEventQuery: fn(Handle) -> Status,
        hipMemcpyAsync: fn(*mut c_void, *const c_void, usize, c_int, Handle) -> Status,
        hipMemcpy2DAsync: fn(*mut c_void, usize, *const c_void, usize, usize, usize, c_int, Handle) -> Status,
        hipIpcGetMemHandle: fn(*mut HipIpcHandle, Address) -> Status,
        hipIpcOpenMemHandle: fn(*mut Address, HipIpcHandle, c_uint) -> Status,
        hipIpcCloseMemHandle: fn(Address) -> Status,
        hipModuleLoadData: fn(*mut Handle, *const c_void) -> Status,
        hipModuleGetFunction: fn(*mut Handle, Handle, *const c_char) -> Status,
        hipModuleLaunchKernel: fn(
            Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void,
        ) -> Status,
    }
    optional {
        hipPointerGetAttribute: fn(*mut c_void, c_int, Address) -> Status,
        hipMemGetHandleForAddressRange: fn(*mut c_int, Address, usize, c_int, u64) -> Status,
    }
}

kvx_gpu::symbols! {
    /// Virtual memory management.
    pub(crate) struct VirtualMemory {
        hipMemGetAllocationGranularity: fn(*mut usize, *const Physical, c_int) -> Status,
        hipMemAddressReserve: fn(*mut Address, usize, usize, Address, u64) -> Status,
        hipMemAddressFree: fn(Address, usize) -> Status,
        hipMemCreate: fn(*mut Handle, usize, *const Physical, u64) -> Status,
        hipMemRelease: fn(Handle) -> Status,
        hipMemMap: fn(Address, usize, usize, Handle, u64) -> Status,
        hipMemUnmap: fn(Address, usize) -> Status,
        hipMemSetAccess: fn(Address, usize, *const Access, usize) -> Status,
        hipMemExportToShareableHandle: fn(*mut c_int, Handle, c_int, u64) -> Status,
        hipMemImportFromShareableHandle: fn(*mut Handle, *mut c_void, c_int) -> Status,
    }
    optional {}
}

kvx_gpu::symbols! {
    /// hipRTC.
    pub(crate) struct Hiprtc {
        hiprtcCreateProgram: fn(
            *mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        ) -> c_int,
        hiprtcCompileProgram: fn(Handle, c_int, *const *const c_char) -> c_int,
        hiprtcGetProgramLogSize: fn(Handle, *mut usize) -> c_int,
        hiprtcGetProgramLog: fn(Handle, *mut c_char) -> c_int,
        hiprtcGetCodeSize: fn(Handle, *mut usize) -> c_int,
        hiprtcGetCode: fn(Handle, *mut c_char) -> c_int,
        hiprtcDestroyProgram: fn(*mut Handle) -> c_int,
    }
    optional {}
}

kvx_gpu::symbols! {
    /// The layer below HIP, for what HIP has only since 7.0.
    pub(crate) struct Hsa {
        hsa_amd_portable_export_dmabuf: fn(*const c_void, usize, *mut c_int, *mut u64) -> c_int,
    }
    optional {}
}
