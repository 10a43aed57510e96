//! One device, as `kvx_gpu` drives it.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use kvx_core::memory::Hop;
use kvx_core::{DeviceId, Error, ErrorKind, Result};
use kvx_gpu::{
    CopyDirection, Current, DeviceInfo, Driver, EventHandle, FunctionHandle, Mapped, Pointer,
    PointerPlace, Rows, StreamHandle,
};

use crate::ffi::{
    self, BatchAttributes, Copy2d, CudaIpcHandle, DeviceNumber, Handle, Location, Status,
    attribute, pointer,
};
use crate::library::{Library, ends_all_work};
use crate::{context, kernels, virtual_memory};

/// A device of CUDA.
pub(crate) struct Cuda {
    pub(crate) library: &'static Library,
    pub(crate) number: DeviceNumber,
    about: DeviceInfo,
    /// All devices of this process.
    all: Arc<[(DeviceId, DeviceNumber)]>,
    /// The primary context, once it was needed.
    context: OnceLock<usize>,
}

impl Cuda {
    pub(crate) fn new(
        library: &'static Library,
        number: DeviceNumber,
        about: DeviceInfo,
        all: Arc<[(DeviceId, DeviceNumber)]>,
    ) -> Self {
        Cuda { library, number, about, all, context: OnceLock::new() }
    }

    fn table(&self) -> &ffi::Functions {
        &self.library.table
    }

    pub(crate) fn check(&self, call: &'static str, status: Status) -> Result<()> {
        self.library.check(call, status)
    }

    /// What the device says of itself; 0 for what the driver does not know.
    pub(crate) fn attribute(&self, attribute: i32) -> i32 {
        let mut value = 0;
        // SAFETY: a place for one number; the device is one that the driver named.
        let status =
            unsafe { (self.table().cuDeviceGetAttribute)(&raw mut value, attribute, self.number) };
        if status == ffi::SUCCESS { value } else { 0 }
    }

    /// A range as a descriptor.
    fn descriptor(&self, range: &Range<u64>, flags: u64) -> Result<OwnedFd> {
        const DMA_BUF: i32 = 1;
        let Some(export) = self.table().cuMemGetHandleForAddressRange else {
            return Err(
                self.cannot("no dma-buf descriptors: they need a driver of CUDA 11.7 or newer")
            );
        };
        let mut file = -1;
        let len = (range.end - range.start) as usize;
        // SAFETY: a place for one descriptor; what the range is the driver looks at.
        let status = unsafe { export(&raw mut file, range.start, len, DMA_BUF, flags) };
        self.check("cuMemGetHandleForAddressRange", status)?;
        // SAFETY: the driver made it for this call, and nobody else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(file) })
    }
}

// SAFETY: each method is the driver's call of that meaning; an event that the driver says is reached has all before it
// on its stream behind it.
unsafe impl Driver for Cuda {
    fn about(&self) -> &DeviceInfo {
        &self.about
    }

    fn enter(&self) -> Result<Current> {
        let context = match self.context.get() {
            Some(context) => *context,
            None => {
                let made = context::primary(self.library, self.number)?;
                *self.context.get_or_init(|| made)
            }
        };
        // SAFETY: the context is retained for the life of the process.
        let status = unsafe { (self.table().cuCtxPushCurrent_v2)(context as Handle) };
        self.check("cuCtxPushCurrent", status).map(|()| Current(0))
    }

    fn leave(&self, _: Current) {
        let mut context: Handle = std::ptr::null_mut();
        // SAFETY: takes away what `enter` put on this thread's stack of contexts.
        let status = unsafe { (self.table().cuCtxPopCurrent_v2)(&raw mut context) };
        if let Err(error) = self.check("cuCtxPopCurrent", status) {
            tracing::debug!(%error, "a context stayed current");
        }
    }

    fn allocate(&self, len: usize) -> Result<u64> {
        let mut address = 0;
        // SAFETY: a place for one address.
        let status = unsafe { (self.table().cuMemAlloc_v2)(&raw mut address, len) };
        self.check("cuMemAlloc", status).map(|()| address)
    }

    unsafe fn free(&self, address: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuMemFree", unsafe { (self.table().cuMemFree_v2)(address) })
    }

    fn map(&self, len: usize) -> Result<Mapped> {
        virtual_memory::map(self, len)
    }

    unsafe fn unmap(&self, mapped: Mapped) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { virtual_memory::unmap(self, mapped) }
    }

    fn export(&self, mapped: Mapped) -> Result<OwnedFd> {
        virtual_memory::export(self, mapped)
    }

    fn import(&self, file: BorrowedFd<'_>, len: usize) -> Result<Mapped> {
        virtual_memory::import(self, file, len)
    }

    fn pin(&self, len: usize) -> Result<*mut u8> {
        const PORTABLE: u32 = 1; // for all contexts; not write-combined, which the CPU reads slowly
        let mut base = std::ptr::null_mut();
        // SAFETY: a place for one pointer.
        let status = unsafe { (self.table().cuMemHostAlloc)(&raw mut base, len, PORTABLE) };
        self.check("cuMemHostAlloc", status).map(|()| base.cast())
    }

    unsafe fn unpin(&self, base: *mut u8) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuMemFreeHost", unsafe { (self.table().cuMemFreeHost)(base.cast()) })
    }

    fn classify(&self, address: u64) -> Result<Pointer> {
        let (mut kind, mut managed, mut ordinal) = (0u32, 0u32, -2i32);
        let mut pool: Handle = std::ptr::null_mut();
        let mut asked = [
            pointer::MEMORY_TYPE,
            pointer::IS_MANAGED,
            pointer::DEVICE_ORDINAL,
            pointer::MEMORY_POOL,
        ];
        let mut answers: [*mut c_void; 4] = [
            (&raw mut kind).cast(),
            (&raw mut managed).cast(),
            (&raw mut ordinal).cast(),
            (&raw mut pool).cast(),
        ];
        // SAFETY: a place of its size for the answer to each question.
        let status = unsafe {
            let (asked, answers) = (asked.as_mut_ptr(), answers.as_mut_ptr());
            (self.table().cuPointerGetAttributes)(4, asked, answers, address)
        };
        if status != ffi::INVALID_VALUE {
            self.check("cuPointerGetAttributes", status)?; // else it is memory that the driver does not know
        }
        let place = match kind {
            _ if managed & 0xff != 0 => PointerPlace::Managed,
            ffi::DEVICE => PointerPlace::Device,
            ffi::HOST => PointerPlace::Pinned,
            _ => PointerPlace::Unknown,
        };
        Ok(Pointer { place, ordinal, pooled: !pool.is_null() })
    }

    fn allocation(&self, address: u64) -> Result<Range<u64>> {
        let (mut base, mut len) = (0, 0);
        // SAFETY: a place for each of the two numbers.
        let status =
            unsafe { (self.table().cuMemGetAddressRange_v2)(&raw mut base, &raw mut len, address) };
        self.check("cuMemGetAddressRange", status).map(|()| base..base.saturating_add(len as u64))
    }

    fn reaches(&self, other: DeviceId) -> Result<Option<bool>> {
        let Some((_, other)) = self.all.iter().find(|(id, _)| *id == other) else {
            return Ok(None);
        };
        let mut reaches = 0;
        // SAFETY: a place for one number; both devices are ones that the driver named.
        let status =
            unsafe { (self.table().cuDeviceCanAccessPeer)(&raw mut reaches, self.number, *other) };
        self.check("cuDeviceCanAccessPeer", status)
            .map(|()| Some(reaches != 0 || *other == self.number))
    }

    fn share(&self, base: u64) -> Result<Vec<u8>> {
        let mut handle = CudaIpcHandle([0; 64]);
        // SAFETY: a place for one handle.
        let status = unsafe { (self.table().cuIpcGetMemHandle)(&raw mut handle, base) };
        self.check("cuIpcGetMemHandle", status).map(|()| handle.0.to_vec())
    }

    fn open(&self, handle: &[u8]) -> Result<u64> {
        const LAZY_PEER_ACCESS: u32 = 1;
        let bytes = handle.try_into().map_err(|_| {
            Error::new(
                ErrorKind::Malformed,
                format!("a handle of CUDA has 64 bytes, and the peer's {}", handle.len()),
            )
        })?;
        let mut address = 0;
        // SAFETY: a place for one address; the driver judges the handle.
        let status = unsafe {
            (self.table().cuIpcOpenMemHandle_v2)(
                &raw mut address,
                CudaIpcHandle(bytes),
                LAZY_PEER_ACCESS,
            )
        };
        self.check("cuIpcOpenMemHandle", status).map(|()| address)
    }

    unsafe fn close(&self, address: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuIpcCloseMemHandle", unsafe { (self.table().cuIpcCloseMemHandle)(address) })
    }

    fn dma_buf(&self, range: Range<u64>) -> Result<(OwnedFd, u64)> {
        /// Addresses as the bus has them, where the CPU and the device are joined otherwise (GB200).
        const OVER_PCIE: u64 = 1;
        if self.attribute(attribute::DMA_BUF) == 0 {
            return Err(self.cannot(
                "no dma-buf descriptors: they need the open kernel modules (nvidia-open)",
            ));
        }
        let file = match self.library.version >= 12_080 {
            true => self.descriptor(&range, OVER_PCIE).or_else(|_| self.descriptor(&range, 0)),
            false => self.descriptor(&range, 0),
        };
        file.map(|file| (file, 0)).map_err(|error| error.with_kind(ErrorKind::Unsupported))
    }

    fn stream(&self) -> Result<StreamHandle> {
        context::stream(self.library)
    }

    unsafe fn end_stream(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { context::end_stream(self.library, stream) }
    }

    fn event(&self) -> Result<EventHandle> {
        context::event(self.library)
    }

    unsafe fn end_event(&self, event: EventHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { context::end_event(self.library, event) }
    }

    unsafe fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuEventRecord", unsafe {
            (self.table().cuEventRecord)(event.0 as Handle, stream.0 as Handle)
        })
    }

    unsafe fn reached(&self, event: EventHandle) -> Result<bool> {
        // SAFETY: the caller's promise.
        match unsafe { (self.table().cuEventQuery)(event.0 as Handle) } {
            ffi::NOT_READY => Ok(false),
            status => self.check("cuEventQuery", status).map(|()| true),
        }
    }

    fn ends_all_work(&self, code: i64) -> bool {
        ends_all_work(code)
    }

    unsafe fn copy(&self, way: CopyDirection, line: Hop, stream: StreamHandle) -> Result<()> {
        let Hop { from, to, len } = line;
        let (table, stream) = (self.table(), stream.0 as Handle);
        // SAFETY: the caller's promise.
        let (call, status) = unsafe {
            match way {
                CopyDirection::ToDevice => (
                    "cuMemcpyHtoDAsync",
                    (table.cuMemcpyHtoDAsync_v2)(to, from as *const c_void, len, stream),
                ),
                CopyDirection::ToHost => (
                    "cuMemcpyDtoHAsync",
                    (table.cuMemcpyDtoHAsync_v2)(to as *mut c_void, from, len, stream),
                ),
                CopyDirection::Within => {
                    ("cuMemcpyDtoDAsync", (table.cuMemcpyDtoDAsync_v2)(to, from, len, stream))
                }
            }
        };
        self.check(call, status)
    }

    unsafe fn copy_rows(&self, way: CopyDirection, rows: Rows, stream: StreamHandle) -> Result<()> {
        let Rows { from, from_pitch, to, to_pitch, width, count } = rows;
        let (from_host, to_host) = (way == CopyDirection::ToDevice, way == CopyDirection::ToHost);
        let kind = |host| if host { ffi::HOST } else { ffi::DEVICE };
        let copy = Copy2d {
            source_x: 0,
            source_y: 0,
            source_kind: kind(from_host),
            source_host: if from_host { from as *const c_void } else { std::ptr::null() },
            source_device: if from_host { 0 } else { from },
            source_array: std::ptr::null_mut(),
            source_pitch: from_pitch,
            target_x: 0,
            target_y: 0,
            target_kind: kind(to_host),
            target_host: if to_host { to as *mut c_void } else { std::ptr::null_mut() },
            target_device: if to_host { 0 } else { to },
            target_array: std::ptr::null_mut(),
            target_pitch: to_pitch,
            width,
            height: count,
        };
        // SAFETY: the caller's promise; the driver reads the description before it returns.
        self.check("cuMemcpy2DAsync", unsafe {
            (self.table().cuMemcpy2DAsync_v2)(&raw const copy, stream.0 as Handle)
        })
    }

    fn has_batches(&self) -> bool {
        self.table().cuMemcpyBatchAsync_v2.is_some() || self.table().cuMemcpyBatchAsync.is_some()
    }

    unsafe fn copy_batch(
        &self,
        _: CopyDirection,
        lines: &[Hop],
        stream: StreamHandle,
    ) -> Result<()> {
        let mut to: Vec<_> = lines.iter().map(|line| line.to).collect();
        let mut from: Vec<_> = lines.iter().map(|line| line.from).collect();
        let mut lens: Vec<_> = lines.iter().map(|line| line.len).collect();
        let unsaid = Location { kind: 0, id: 0 };
        let mut attributes = BatchAttributes { order: 1, source: unsaid, target: unsaid, flags: 0 };
        let (mut first, mut failed) = (0, 0);
        let (count, stream) = (lines.len(), stream.0 as Handle);
        let (to, from, lens) = (to.as_mut_ptr(), from.as_mut_ptr(), lens.as_mut_ptr());
        let (attributes, first) = (&raw mut attributes, &raw mut first);
        // SAFETY: lists of as many entries as is said, one set of attributes for all, which the driver reads before it
        // returns; else the caller's promise.
        let status = unsafe {
            match (self.table().cuMemcpyBatchAsync_v2, self.table().cuMemcpyBatchAsync) {
                (Some(batch), _) => batch(to, from, lens, count, attributes, first, 1, stream),
                (None, Some(batch)) => {
                    batch(to, from, lens, count, attributes, first, 1, &raw mut failed, stream)
                }
                (None, None) => return Err(self.cannot("no batched copies")),
            }
        };
        self.check("cuMemcpyBatchAsync", status)
    }

    unsafe fn zero(&self, address: u64, len: usize, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuMemsetD8Async", unsafe {
            (self.table().cuMemsetD8Async)(address, 0, len, stream.0 as Handle)
        })
    }

    fn load(&self) -> Result<Vec<FunctionHandle>> {
        kernels::load(self)
    }

    unsafe fn launch(
        &self,
        function: FunctionHandle,
        [x, y, z]: [u32; 3],
        threads: u32,
        parameters: &[u64],
        stream: StreamHandle,
    ) -> Result<()> {
        let mut places: Vec<_> =
            parameters.iter().map(|value| (&raw const *value).cast_mut().cast()).collect();
        let function = function.0 as Handle;
        // SAFETY: the caller's promise; the driver reads the parameters before it returns.
        let status = unsafe {
            let (places, none) = (places.as_mut_ptr(), std::ptr::null_mut());
            (self.table().cuLaunchKernel)(
                function,
                x,
                y,
                z,
                threads,
                1,
                1,
                0,
                stream.0 as Handle,
                places,
                none,
            )
        };
        self.check("cuLaunchKernel", status)
    }
}
