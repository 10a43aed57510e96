//! The functions of CUDA's driver that kvx calls: a table of its own, with statuses as plain numbers, because a newer
//! driver has newer ones.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};

/// A `CUresult`.
pub(crate) type Status = c_int;
/// A `CUdeviceptr`.
pub(crate) type Address = u64;
/// A `CUdevice`.
pub(crate) type DeviceNumber = c_int;
/// A `CUcontext`, `CUstream`, `CUevent`, `CUmodule` or `CUfunction`.
pub(crate) type Handle = *mut c_void;

/// A `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CudaIpcHandle(pub(crate) [u8; 64]);

/// A `CUDA_MEMCPY2D`.
#[repr(C)]
pub(crate) struct Copy2d {
    pub(crate) source_x: usize,
    pub(crate) source_y: usize,
    pub(crate) source_kind: c_uint,
    pub(crate) source_host: *const c_void,
    pub(crate) source_device: Address,
    pub(crate) source_array: Handle,
    pub(crate) source_pitch: usize,
    pub(crate) target_x: usize,
    pub(crate) target_y: usize,
    pub(crate) target_kind: c_uint,
    pub(crate) target_host: *mut c_void,
    pub(crate) target_device: Address,
    pub(crate) target_array: Handle,
    pub(crate) target_pitch: usize,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

/// A `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Location {
    /// 1: a device; 0: unsaid.
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

/// A `CUmemcpyAttributes`.
#[repr(C)]
pub(crate) struct BatchAttributes {
    /// 1: sources are read in the order of the stream.
    pub(crate) order: c_int,
    pub(crate) source: Location,
    pub(crate) target: Location,
    pub(crate) flags: c_uint,
}

/// A `CUmemAllocationProp`.
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
    pub(crate) reserved: [c_uchar; 4],
}

/// A `CUmemAccessDesc`.
#[repr(C)]
pub(crate) struct Access {
    pub(crate) location: Location,
    /// 3: reading and writing.
    pub(crate) flags: c_int,
}

// The layouts of the driver's interface, which does not change; on machines of 64 bits.
const _: () = {
    assert!(size_of::<Copy2d>() == 128);
    assert!(size_of::<BatchAttributes>() == 24);
    assert!(size_of::<Physical>() == 32);
    assert!(size_of::<Access>() == 12);
};

pub(crate) const SUCCESS: Status = 0;
pub(crate) const INVALID_VALUE: Status = 1;
pub(crate) const OUT_OF_MEMORY: Status = 2;
pub(crate) const DEINITIALIZED: Status = 4;
pub(crate) const STUB_LIBRARY: Status = 34;
pub(crate) const NO_DEVICE: Status = 100;
pub(crate) const NOT_READY: Status = 600;
pub(crate) const SYSTEM_NOT_READY: Status = 802;
pub(crate) const SYSTEM_DRIVER_MISMATCH: Status = 803;

/// `CU_MEMORYTYPE_…`
pub(crate) const HOST: c_uint = 1;
/// See [`HOST`].
pub(crate) const DEVICE: c_uint = 2;

/// `CU_DEVICE_ATTRIBUTE_…`
pub(crate) mod attribute {
    pub(crate) const COMPUTE_MAJOR: i32 = 75;
    pub(crate) const COMPUTE_MINOR: i32 = 76;
    pub(crate) const VIRTUAL_MEMORY: i32 = 102;
    pub(crate) const FILE_DESCRIPTORS: i32 = 103;
    pub(crate) const RDMA_WITH_VIRTUAL_MEMORY: i32 = 110;
    pub(crate) const DMA_BUF: i32 = 124;
}

/// `CU_POINTER_ATTRIBUTE_…`
pub(crate) mod pointer {
    pub(crate) const MEMORY_TYPE: i32 = 2;
    pub(crate) const IS_MANAGED: i32 = 8;
    pub(crate) const DEVICE_ORDINAL: i32 = 9;
    pub(crate) const MEMORY_POOL: i32 = 17;
}

kvx_gpu::symbols! {
    /// The driver's functions.
    pub(crate) struct Functions {
        cuInit: fn(c_uint) -> Status,
        cuDriverGetVersion: fn(*mut c_int) -> Status,
        cuGetErrorName: fn(Status, *mut *const c_char) -> Status,
        cuGetErrorString: fn(Status, *mut *const c_char) -> Status,
        cuDeviceGetCount: fn(*mut c_int) -> Status,
        cuDeviceGet: fn(*mut DeviceNumber, c_int) -> Status,
        cuDeviceGetName: fn(*mut c_char, c_int, DeviceNumber) -> Status,
        cuDeviceGetUuid_v2: fn(*mut [u8; 16], DeviceNumber) -> Status,
        cuDeviceGetPCIBusId: fn(*mut c_char, c_int, DeviceNumber) -> Status,
        cuDeviceGetAttribute: fn(*mut c_int, c_int, DeviceNumber) -> Status,
        cuDeviceCanAccessPeer: fn(*mut c_int, DeviceNumber, DeviceNumber) -> Status,
        cuDevicePrimaryCtxRetain: fn(*mut Handle, DeviceNumber) -> Status,
        cuDevicePrimaryCtxRelease_v2: fn(DeviceNumber) -> Status,
        cuCtxPushCurrent_v2: fn(Handle) -> Status,
        cuCtxPopCurrent_v2: fn(*mut Handle) -> Status,
        cuMemAlloc_v2: fn(*mut Address, usize) -> Status,
        cuMemFree_v2: fn(Address) -> Status,
        cuMemHostAlloc: fn(*mut *mut c_void, usize, c_uint) -> Status,
        cuMemFreeHost: fn(*mut c_void) -> Status,
        cuMemsetD8Async: fn(Address, c_uchar, usize, Handle) -> Status,
        cuMemGetAddressRange_v2: fn(*mut Address, *mut usize, Address) -> Status,
        cuPointerGetAttributes: fn(c_uint, *mut c_int, *mut *mut c_void, Address) -> Status,
        cuStreamCreate: fn(*mut Handle, c_uint) -> Status,
        cuStreamDestroy_v2: fn(Handle) -> Status,
        cuEventCreate: fn(*mut Handle, c_uint) -> Status,
        cuEventDestroy_v2: fn(Handle) -> Status,
        cuEventRecord: fn(Handle, Handle) -> Status,
        cuEventQuery: fn(Handle) -> Status,
        cuMemcpyHtoDAsync_v2: fn(Address, *const c_void, usize, Handle) -> Status,
        cuMemcpyDtoHAsync_v2: fn(*mut c_void, Address, usize, Handle) -> Status,
        cuMemcpyDtoDAsync_v2: fn(Address, Address, usize, Handle) -> Status,
        cuMemcpy2DAsync_v2: fn(*const Copy2d, Handle) -> Status,
        cuIpcGetMemHandle: fn(*mut CudaIpcHandle, Address) -> Status,
        cuIpcOpenMemHandle_v2: fn(*mut Address, CudaIpcHandle, c_uint) -> Status,
        cuIpcCloseMemHandle: fn(Address) -> Status,
        cuModuleLoadData: fn(*mut Handle, *const c_void) -> Status,
        cuModuleGetFunction: fn(*mut Handle, Handle, *const c_char) -> Status,
        cuLaunchKernel: fn(
            Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void,
        ) -> Status,
    }
    optional {
        cuMemGetHandleForAddressRange: fn(*mut c_int, Address, usize, c_int, u64) -> Status,
        cuMemcpyBatchAsync: fn(
            *mut Address, *mut Address, *mut usize, usize, *mut BatchAttributes, *mut usize, usize, *mut usize, Handle,
        ) -> Status,
        cuMemcpyBatchAsync_v2: fn(
            *mut Address, *mut Address, *mut usize, usize, *mut BatchAttributes, *mut usize, usize, Handle,
        ) -> Status,
    }
}

kvx_gpu::symbols! {
    /// Virtual memory management.
    pub(crate) struct VirtualMemory {
        cuMemGetAllocationGranularity: fn(*mut usize, *const Physical, c_int) -> Status,
        cuMemAddressReserve: fn(*mut Address, usize, usize, Address, u64) -> Status,
        cuMemAddressFree: fn(Address, usize) -> Status,
        cuMemCreate: fn(*mut u64, usize, *const Physical, u64) -> Status,
        cuMemRelease: fn(u64) -> Status,
        cuMemMap: fn(Address, usize, usize, u64, u64) -> Status,
        cuMemUnmap: fn(Address, usize) -> Status,
        cuMemSetAccess: fn(Address, usize, *const Access, usize) -> Status,
        cuMemExportToShareableHandle: fn(*mut c_int, u64, c_int, u64) -> Status,
        cuMemImportFromShareableHandle: fn(*mut u64, *mut c_void, c_int) -> Status,
    }
    optional {}
}

kvx_gpu::symbols! {
    /// NVRTC.
    pub(crate) struct Nvrtc {
        nvrtcCreateProgram: fn(
            *mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        ) -> c_int,
        nvrtcCompileProgram: fn(Handle, c_int, *const *const c_char) -> c_int,
        nvrtcGetProgramLogSize: fn(Handle, *mut usize) -> c_int,
        nvrtcGetProgramLog: fn(Handle, *mut c_char) -> c_int,
        nvrtcGetCUBINSize: fn(Handle, *mut usize) -> c_int,
        nvrtcGetCUBIN: fn(Handle, *mut c_char) -> c_int,
        nvrtcDestroyProgram: fn(*mut Handle) -> c_int,
    }
    optional {}
}
