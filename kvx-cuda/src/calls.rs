//! The calls that differ between CUDA's driver and HIP.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ops::Range;
use std::os::fd::{FromRawFd, OwnedFd};

use kvx_backend::loader::NativeLibrary;
use kvx_core::DeviceId;
use kvx_core::backend::{Hop, Unavailable};
use kvx_gpu::driver::{
    Address, CallResult, Context, CopyDirection, DeviceNumber, Failure, Location, PointerInfo,
    PointerPlace, Rows, Status, StreamHandle, VendorCalls, status,
};

use crate::conflict;

type Batch = unsafe extern "C" fn(
    *mut Address,
    *mut Address,
    *mut usize,
    usize,
    *mut BatchAttributes,
    *mut usize,
    usize,
    StreamHandle,
) -> Status;

/// The first form of the function, which also stores the index of the copy that failed.
type FirstBatch = unsafe extern "C" fn(
    *mut Address,
    *mut Address,
    *mut usize,
    usize,
    *mut BatchAttributes,
    *mut usize,
    usize,
    *mut usize,
    StreamHandle,
) -> Status;

pub(crate) struct CudaCalls {
    version: c_int,
    initialize: unsafe extern "C" fn(c_uint) -> Status,
    error_name: unsafe extern "C" fn(Status, *mut *const c_char) -> Status,
    error_text: unsafe extern "C" fn(Status, *mut *const c_char) -> Status,
    attribute: unsafe extern "C" fn(*mut c_int, c_int, DeviceNumber) -> Status,
    retain_context: unsafe extern "C" fn(*mut Context, DeviceNumber) -> Status,
    push_context: unsafe extern "C" fn(Context) -> Status,
    pop_context: unsafe extern "C" fn(*mut Context) -> Status,
    pointer_attributes:
        unsafe extern "C" fn(c_uint, *mut c_int, *mut *mut c_void, Address) -> Status,
    to_device: unsafe extern "C" fn(Address, *const c_void, usize, StreamHandle) -> Status,
    to_host: unsafe extern "C" fn(*mut c_void, Address, usize, StreamHandle) -> Status,
    within: unsafe extern "C" fn(Address, Address, usize, StreamHandle) -> Status,
    copy_rows: unsafe extern "C" fn(*const Copy2d, StreamHandle) -> Status,
    /// Since CUDA 13.
    batch: Option<Batch>,
    /// Since CUDA 12.8.
    first_batch: Option<FirstBatch>,
    /// Since CUDA 11.3.
    flush: Option<unsafe extern "C" fn(c_int, c_int) -> Status>,
    /// Since CUDA 11.7.
    dma_buf: Option<unsafe extern "C" fn(*mut c_int, Address, usize, c_int, u64) -> Status>,
}

impl CudaCalls {
    /// Resolves the functions of the process's only driver. Errors: a function is missing, or the
    /// process has loaded another driver.
    ///
    /// # Safety
    /// The library is CUDA's driver.
    pub(crate) unsafe fn find(
        library: &NativeLibrary,
        version: c_int,
    ) -> Result<Box<dyn VendorCalls>, Unavailable> {
        conflict::check(library)?;
        // SAFETY: the driver never changes the function of a name and version, and the caller
        // guarantees that this is the driver.
        Ok(Box::new(unsafe {
            CudaCalls {
                version,
                initialize: library.symbol(c"cuInit")?,
                error_name: library.symbol(c"cuGetErrorName")?,
                error_text: library.symbol(c"cuGetErrorString")?,
                attribute: library.symbol(c"cuDeviceGetAttribute")?,
                retain_context: library.symbol(c"cuDevicePrimaryCtxRetain")?,
                push_context: library.symbol(c"cuCtxPushCurrent_v2")?,
                pop_context: library.symbol(c"cuCtxPopCurrent_v2")?,
                pointer_attributes: library.symbol(c"cuPointerGetAttributes")?,
                to_device: library.symbol(c"cuMemcpyHtoDAsync_v2")?,
                to_host: library.symbol(c"cuMemcpyDtoHAsync_v2")?,
                within: library.symbol(c"cuMemcpyDtoDAsync_v2")?,
                copy_rows: library.symbol(c"cuMemcpy2DAsync_v2")?,
                batch: library.optional_symbol(c"cuMemcpyBatchAsync_v2"),
                first_batch: library.optional_symbol(c"cuMemcpyBatchAsync"),
                flush: library.optional_symbol(c"cuFlushGPUDirectRDMAWrites"),
                dma_buf: library.optional_symbol(c"cuMemGetHandleForAddressRange"),
            }
        }))
    }

    /// Returns an attribute of an address that is a number of 64 bits; `None` if the driver does
    /// not know it.
    fn number_of(&self, attribute: c_int, address: u64) -> Option<u64> {
        let (mut asked, mut number) = (attribute, 0u64);
        let mut place: *mut c_void = (&raw mut number).cast();
        // SAFETY: one query, with a location of the answer's size.
        let status =
            unsafe { (self.pointer_attributes)(1, &raw mut asked, &raw mut place, address) };
        (status == status::SUCCESS && number != 0).then_some(number)
    }

    /// Returns an attribute of a device; 0 if the driver does not know it.
    fn attribute(&self, attribute: c_int, device: DeviceNumber) -> c_int {
        let mut value = 0;
        // SAFETY: a location for one number; the driver named the device.
        let status = unsafe { (self.attribute)(&raw mut value, attribute, device) };
        if status == status::SUCCESS { value } else { 0 }
    }
}

/// `CU_DEVICE_ATTRIBUTE_…`
mod attribute {
    pub(super) const COMPUTE_MAJOR: i32 = 75;
    pub(super) const COMPUTE_MINOR: i32 = 76;
    pub(super) const VIRTUAL_MEMORY: i32 = 102;
    pub(super) const FILE_DESCRIPTORS: i32 = 103;
    pub(super) const RDMA_WITH_VIRTUAL_MEMORY: i32 = 110;
    pub(super) const RDMA_FLUSH_OPTIONS: i32 = 117;
    pub(super) const RDMA_WRITES_ORDERING: i32 = 118;
    pub(super) const DMA_BUF: i32 = 124;
}

/// `CU_POINTER_ATTRIBUTE_…`
mod pointer {
    pub(super) const CONTEXT: i32 = 1;
    pub(super) const MEMORY_TYPE: i32 = 2;
    pub(super) const IS_MANAGED: i32 = 8;
    /// A number that is unique for each allocation of the process.
    pub(super) const BUFFER_ID: i32 = 7;
    pub(super) const DEVICE_ORDINAL: i32 = 9;
    pub(super) const IS_LEGACY_IPC_CAPABLE: i32 = 10;
    pub(super) const RANGE_START: i32 = 11;
    pub(super) const RANGE_SIZE: i32 = 12;
    pub(super) const MEMORY_POOL: i32 = 17;
}

/// `CU_MEMORYTYPE_…`
mod memory_type {
    pub(super) const HOST: u32 = 1;
    pub(super) const DEVICE: u32 = 2;
}

/// One side of a `CUDA_MEMCPY2D`.
#[repr(C)]
struct CopySide {
    x: usize,
    y: usize,
    memory_type: c_uint,
    host: u64,
    device: Address,
    array: usize,
    pitch: usize,
}

/// A `CUDA_MEMCPY2D`.
#[repr(C)]
struct Copy2d {
    source: CopySide,
    target: CopySide,
    width: usize,
    height: usize,
}

/// A `CUmemcpyAttributes`.
#[repr(C)]
struct BatchAttributes {
    /// 1: sources are read in stream order.
    order: c_int,
    source: Location,
    target: Location,
    flags: c_uint,
}

// The layouts of the driver's interface, which does not change, on 64-bit machines.
const _: () = {
    assert!(size_of::<Copy2d>() == 128);
    assert!(size_of::<BatchAttributes>() == 24);
};

impl CopySide {
    fn new(on_host: bool, address: u64, pitch: usize) -> Self {
        let (memory_type, host, device) = match on_host {
            true => (memory_type::HOST, address, 0),
            false => (memory_type::DEVICE, 0, address),
        };
        CopySide { x: 0, y: 0, memory_type, host, device, array: 0, pitch }
    }
}

// SAFETY: each method makes the documented call of the driver; when the driver reports an event as
// reached, all work before it on its stream has ended.
unsafe impl VendorCalls for CudaCalls {
    fn initialize(&self) -> Status {
        // SAFETY: the only argument must be 0.
        unsafe { (self.initialize)(0) }
    }

    fn describe(&self, status: Status) -> [*const c_char; 2] {
        [self.error_name, self.error_text].map(|function| {
            let mut text = std::ptr::null();
            // SAFETY: a location for one pointer, which the driver sets to its own string, or to
            // null.
            let known = unsafe { function(status, &raw mut text) } == status::SUCCESS;
            if known { text } else { std::ptr::null() }
        })
    }

    fn device_id(&self, uuid: CallResult<[u8; 16]>, _: &str) -> CallResult<DeviceId> {
        uuid.map(DeviceId)
    }

    /// Retains the primary context of a device, which the whole process shares.
    fn context(&self, device: DeviceNumber) -> CallResult<Context> {
        let mut context = Context(0);
        // SAFETY: the driver named the device; a location for one handle.
        let status = unsafe { (self.retain_context)(&raw mut context, device) };
        Failure::check(c"cuDevicePrimaryCtxRetain", status).map(|()| context)
    }

    fn enter(&self, context: Context) -> CallResult<Context> {
        // SAFETY: the context is retained for the life of the process.
        let status = unsafe { (self.push_context)(context) };
        Failure::check(c"cuCtxPushCurrent", status).map(|()| context)
    }

    fn leave(&self, _: Context) -> CallResult {
        let mut context = Context(0);
        // SAFETY: removes what `enter` pushed onto this thread's stack of contexts.
        let status = unsafe { (self.pop_context)(&raw mut context) };
        Failure::check(c"cuCtxPopCurrent", status)
    }

    fn classify(&self, address: u64) -> CallResult<PointerInfo> {
        let (mut kind, mut managed, mut ordinal, mut pool) = (0u32, 0u32, -2i32, 0usize);
        let (mut legacy, mut context) = (0u32, Context(0));
        let mut asked = [
            pointer::MEMORY_TYPE,
            pointer::IS_MANAGED,
            pointer::DEVICE_ORDINAL,
            pointer::MEMORY_POOL,
            pointer::IS_LEGACY_IPC_CAPABLE,
            pointer::CONTEXT,
        ];
        let mut answers: [*mut c_void; 6] = [
            (&raw mut kind).cast(),
            (&raw mut managed).cast(),
            (&raw mut ordinal).cast(),
            (&raw mut pool).cast(),
            (&raw mut legacy).cast(),
            (&raw mut context).cast(),
        ];
        // SAFETY: for each query, a location of the answer's size.
        let status = unsafe {
            let count = asked.len() as c_uint;
            (self.pointer_attributes)(count, asked.as_mut_ptr(), answers.as_mut_ptr(), address)
        };
        if status != status::INVALID_VALUE {
            // Otherwise the driver does not know the memory.
            Failure::check(c"cuPointerGetAttributes", status)?;
        }
        let place = match kind {
            _ if managed & 0xff != 0 => PointerPlace::Managed,
            memory_type::DEVICE => PointerPlace::Device,
            memory_type::HOST => PointerPlace::Pinned,
            _ => PointerPlace::Unknown,
        };
        Ok(PointerInfo {
            place,
            ordinal,
            is_pooled: pool != 0,
            is_mapped: place == PointerPlace::Device && pool == 0 && legacy & 0xff == 0,
            context: (context != Context(0)).then_some(context),
        })
    }

    /// Returns true for devices on which writes of network cards are not ordered for the device
    /// itself, if the host can flush them. All devices since Hopper order them.
    fn needs_flush(&self, device: DeviceNumber) -> bool {
        const BY_HOST: i32 = 1;
        const ORDERED_FOR_OWNER: i32 = 100;
        self.flush.is_some()
            && self.attribute(attribute::RDMA_WRITES_ORDERING, device) < ORDERED_FOR_OWNER
            && self.attribute(attribute::RDMA_FLUSH_OPTIONS, device) & BY_HOST != 0
    }

    fn flush(&self) -> CallResult {
        const CURRENT_CONTEXT: c_int = 0;
        const FOR_OWNER: c_int = 100;
        let Some(flush) = self.flush else {
            return Err(Failure::Missing("no flush of writes of network cards".into()));
        };
        // SAFETY: plain numbers; the device is current.
        let status = unsafe { flush(CURRENT_CONTEXT, FOR_OWNER) };
        Failure::check(c"cuFlushGPUDirectRDMAWrites", status)
    }

    fn opened_len(&self, address: u64, claimed: u64) -> CallResult<Option<u64>> {
        let (start, len) = (
            self.number_of(pointer::RANGE_START, address),
            self.number_of(pointer::RANGE_SIZE, address),
        );
        if let (Some(start), Some(len)) = (start, len)
            && (start..start.saturating_add(len)).contains(&address)
        {
            return Ok(Some(start.saturating_add(len) - address));
        }
        // Both ends in one allocation: at least the claimed bytes.
        let last = claimed.checked_sub(1).and_then(|more| address.checked_add(more));
        let ids = last.map(|last| [address, last].map(|at| self.number_of(pointer::BUFFER_ID, at)));
        let is_one = ids.is_some_and(|[first, last]| first.is_some() && first == last);
        Ok(is_one.then_some(claimed))
    }

    fn dma_buf(&self, device: DeviceNumber, range: Range<u64>) -> CallResult<(OwnedFd, u64)> {
        const DMA_BUF: i32 = 1;
        /// Requests PCIe addresses, on systems where CPU and device have another connection
        /// (GB200).
        const OVER_PCIE: u64 = 1;
        if self.attribute(attribute::DMA_BUF, device) == 0 {
            return Err(Failure::Missing(
                "no dma-buf descriptors: they need the open kernel modules (nvidia-open)".into(),
            ));
        }
        let Some(export) = self.dma_buf else {
            return Err(Failure::Missing(
                "no dma-buf descriptors: they need a driver of CUDA 11.7 or newer".into(),
            ));
        };
        let export = |flags| {
            let (mut file, len) = (-1, (range.end - range.start) as usize);
            // SAFETY: a location for one descriptor; the driver validates the range.
            let status = unsafe { export(&raw mut file, range.start, len, DMA_BUF, flags) };
            Failure::check(c"cuMemGetHandleForAddressRange", status)?;
            // SAFETY: the driver created it for this call, and nobody else has it.
            Ok((unsafe { OwnedFd::from_raw_fd(file) }, 0))
        };
        match self.version >= 12_080 {
            true => export(OVER_PCIE).or_else(|_| export(0)),
            false => export(0),
        }
    }

    fn virtual_memory_for_rdma(&self, device: DeviceNumber) -> Option<bool> {
        let has = |attribute| self.attribute(attribute, device) != 0;
        (has(attribute::VIRTUAL_MEMORY) && has(attribute::FILE_DESCRIPTORS))
            .then(|| has(attribute::RDMA_WITH_VIRTUAL_MEMORY))
    }

    unsafe fn copy(&self, way: CopyDirection, line: Hop, stream: StreamHandle) -> CallResult {
        let Hop { from, to, len } = line;
        // SAFETY: guaranteed by the caller: both sides are valid.
        let (function, status) = unsafe {
            match way {
                CopyDirection::ToDevice => {
                    (c"cuMemcpyHtoDAsync", (self.to_device)(to, from as *const c_void, len, stream))
                }
                CopyDirection::ToHost => {
                    (c"cuMemcpyDtoHAsync", (self.to_host)(to as *mut c_void, from, len, stream))
                }
                CopyDirection::Within => {
                    (c"cuMemcpyDtoDAsync", (self.within)(to, from, len, stream))
                }
            }
        };
        Failure::check(function, status)
    }

    unsafe fn copy_rows(&self, way: CopyDirection, rows: Rows, stream: StreamHandle) -> CallResult {
        let Rows { from, from_pitch, to, to_pitch, width, count } = rows;
        let copy = Copy2d {
            source: CopySide::new(way == CopyDirection::ToDevice, from, from_pitch),
            target: CopySide::new(way == CopyDirection::ToHost, to, to_pitch),
            width,
            height: count,
        };
        // SAFETY: guaranteed by the caller: both sides are valid; the driver reads the description
        // before it returns.
        let status = unsafe { (self.copy_rows)(&raw const copy, stream) };
        Failure::check(c"cuMemcpy2DAsync", status)
    }

    fn has_batches(&self) -> bool {
        self.batch.is_some() || self.first_batch.is_some()
    }

    unsafe fn copy_batch(&self, lines: &[Hop], stream: StreamHandle) -> CallResult {
        let mut to: Vec<_> = lines.iter().map(|line| line.to).collect();
        let mut from: Vec<_> = lines.iter().map(|line| line.from).collect();
        let mut lens: Vec<_> = lines.iter().map(|line| line.len).collect();
        let any = Location { kind: 0, id: 0 };
        let mut attributes = BatchAttributes { order: 1, source: any, target: any, flags: 0 };
        let (mut first, mut failed, count) = (0, 0, lines.len());
        let (to, from, lens) = (to.as_mut_ptr(), from.as_mut_ptr(), lens.as_mut_ptr());
        let (attributes, first) = (&raw mut attributes, &raw mut first);
        // SAFETY: lists of the given length and one set of attributes for all, which the driver
        // reads before it returns; the caller guarantees that both sides are valid.
        let status = unsafe {
            match (self.batch, self.first_batch) {
                (Some(batch), _) => batch(to, from, lens, count, attributes, first, 1, stream),
                (None, Some(batch)) => {
                    batch(to, from, lens, count, attributes, first, 1, &raw mut failed, stream)
                }
                (None, None) => return Err(Failure::Missing("no batched copies".into())),
            }
        };
        Failure::check(c"cuMemcpyBatchAsync", status)
    }

    fn compiler_options(&self, device: DeviceNumber) -> Vec<CString> {
        let [major, minor] = [attribute::COMPUTE_MAJOR, attribute::COMPUTE_MINOR]
            .map(|attribute| self.attribute(attribute, device));
        let option = format!("--gpu-architecture=sm_{major}{minor}");
        vec![CString::new(option).expect("letters and digits have no NUL")]
    }
}
