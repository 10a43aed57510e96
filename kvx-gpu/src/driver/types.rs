//! Plain data of drivers: handles, addresses, and the numbers that CUDA and HIP share.

use std::ffi::{c_int, c_uchar, c_void};

use kvx_core::backend::Hop;
use kvx_core::{DeviceId, MemoryKind};

/// A `CUresult` or a `hipError_t`: a plain number, because newer drivers have additional ones.
pub type Status = c_int;
/// An address on a device. HIP declares it as a pointer, which is passed like a 64-bit number.
pub type Address = u64;
/// A `CUdevice`, or the number that HIP has for a device.
pub type DeviceNumber = c_int;

/// Statuses, which HIP has taken from CUDA.
pub mod status {
    use super::Status;

    /// No error.
    pub const SUCCESS: Status = 0;
    /// An argument is invalid; for a query about a pointer: the driver does not know it.
    pub const INVALID_VALUE: Status = 1;
    /// The device does not have enough memory.
    pub const OUT_OF_MEMORY: Status = 2;
    /// The driver was shut down with the process.
    pub const DEINITIALIZED: Status = 4;
    /// The process sees no device.
    pub const NO_DEVICE: Status = 100;
    /// An event is not reached yet.
    pub const NOT_READY: Status = 600;
    /// This release does not support it.
    pub const NOT_SUPPORTED: Status = 801;
}

/// The description of a device, available before it is used.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// The kind of the device's memory.
    pub kind: MemoryKind,
    /// The driver, as errors name it: `CUDA`, `HIP`.
    pub driver: &'static str,
    /// The device's identity, equal in all processes.
    pub id: DeviceId,
    /// The device's number in this process; it may differ in other processes.
    pub ordinal: u32,
    /// The vendor's name of the device.
    pub name: String,
    /// The device's PCI address, as `lspci` prints it.
    pub bus: String,
    /// The driver's version and the file it was loaded from.
    pub version: String,
}

/// A stream of the driver: a `CUstream` or a `hipStream_t`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamHandle(pub usize);

/// An event of the driver: a `CUevent` or a `hipEvent_t`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventHandle(pub usize);

/// A loaded module: a `CUmodule` or a `hipModule_t`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModuleHandle(pub usize);

/// A loaded kernel: a `CUfunction` or a `hipFunction_t`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionHandle(pub usize);

/// A device's context, made current on a thread: a `CUcontext`, or the device's number in HIP.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context(pub usize);

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDirection {
    /// From the host to the device.
    ToDevice,
    /// From the device to the host.
    ToHost,
    /// Within the device, or between devices.
    Within,
}

/// Equal pieces at equal distances, on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The address at which the first is read.
    pub from: u64,
    /// The distance from one to the next; at least `width`.
    pub from_pitch: usize,
    /// The address at which the first is written.
    pub to: u64,
    /// The distance from one to the next; at least `width`.
    pub to_pitch: usize,
    /// The number of bytes per piece.
    pub width: usize,
    /// The number of pieces.
    pub count: usize,
}

impl Rows {
    /// Returns the rows as copies.
    pub(crate) fn lines(self) -> impl Iterator<Item = Hop> {
        let Rows { from, from_pitch, to, to_pitch, width, count } = self;
        (0..count).map(move |row| Hop {
            from: from + (row * from_pitch) as u64,
            to: to + (row * to_pitch) as u64,
            len: width,
        })
    }
}

/// The kind of memory that a pointer refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PointerPlace {
    /// Memory that the driver does not know: host memory, or an invalid address.
    Unknown,
    /// Host memory that the driver has pinned.
    Pinned,
    /// Memory that the driver migrates between host and devices.
    Managed,
    /// Memory of a device.
    Device,
}

/// The driver's information about a pointer.
#[derive(Clone, Copy, Debug)]
pub struct PointerInfo {
    /// The kind of memory.
    pub place: PointerPlace,
    /// The device's number in this process.
    pub ordinal: i32,
    /// True if the memory belongs to a pool of the driver, which cannot be shared with other
    /// processes or cards.
    pub is_pooled: bool,
    /// True if it is virtual memory that the program has mapped, of which the driver makes no
    /// handle for other processes.
    pub is_mapped: bool,
    /// The context that it was allocated in; `None` if it belongs to no context, or is not known.
    pub context: Option<Context>,
}

/// Virtual memory of a device that is mapped to physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MappedMemory {
    pub(crate) address: Address,
    /// A multiple of the driver's granularity.
    pub(crate) len: usize,
    /// The driver's handle of the physical memory.
    pub(crate) handle: u64,
}

/// A `CUipcMemHandle` or a `hipIpcMemHandle_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcMemoryHandle(pub(crate) [u8; 64]);

/// A `CUmemLocation` or a `hipMemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    /// 1: a device; 0: not specified.
    pub kind: c_int,
    /// The device's number.
    pub id: c_int,
}

/// A `CUmemAllocationProp` or a `hipMemAllocationProp`.
#[repr(C)]
pub(crate) struct PhysicalMemory {
    /// 1: pinned, as all device memory is.
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

/// A `CUmemAccessDesc` or a `hipMemAccessDesc`.
#[repr(C)]
pub(crate) struct Access {
    pub(crate) location: Location,
    /// 3: reading and writing.
    pub(crate) flags: c_int,
}

// The layouts of the drivers' interfaces on 64-bit machines.
const _: () = {
    assert!(size_of::<PhysicalMemory>() == 32);
    assert!(size_of::<Access>() == 12);
    assert!(size_of::<StreamHandle>() == size_of::<*mut c_void>());
};
