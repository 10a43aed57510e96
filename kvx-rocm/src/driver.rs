//! One device, as `kvx_gpu` drives it.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use kvx_core::memory::Hop;
use kvx_core::{DeviceId, Error, ErrorKind, Result};
use kvx_gpu::{
    CopyDirection, Current, DeviceInfo, Driver, EventHandle, FunctionHandle, Mapped, Pointer,
    PointerPlace, Rows, StreamHandle,
};

use crate::ffi::{self, Address, Handle, HipIpcHandle, PointerAttributes, Status};
use crate::library::{Library, ends_all_work};
use crate::{dma_buf, kernels, virtual_memory};

/// A device of HIP.
pub(crate) struct Hip {
    pub(crate) library: &'static Library,
    number: i32,
    about: DeviceInfo,
    /// All devices of this process.
    all: Arc<[(DeviceId, i32)]>,
}

impl Hip {
    pub(crate) fn new(
        library: &'static Library,
        number: i32,
        about: DeviceInfo,
        all: Arc<[(DeviceId, i32)]>,
    ) -> Self {
        Hip { library, number, about, all }
    }

    fn table(&self) -> &ffi::Functions {
        &self.library.table
    }

    /// What this process calls it.
    pub(crate) fn number(&self) -> i32 {
        self.number
    }

    pub(crate) fn check(&self, call: &'static str, status: Status) -> Result<()> {
        self.library.check(call, status)
    }

    /// Whether the runtime says that memory belongs to a pool of its own; older ones cannot say.
    fn is_pooled(&self, address: u64) -> bool {
        const MEMORY_POOL: i32 = 17;
        let Some(ask) = self.table().hipPointerGetAttribute else { return false };
        let mut pool: Handle = std::ptr::null_mut();
        // SAFETY: a place for one handle.
        let status = unsafe { ask((&raw mut pool).cast(), MEMORY_POOL, address as Address) };
        status == ffi::SUCCESS && !pool.is_null()
    }
}

/// What a kind of memory is called by the runtime, whose numbers changed with HIP 6.
fn place(kind: i32, new_kinds: bool) -> PointerPlace {
    match (new_kinds, kind) {
        (true, 1) | (false, 0) => PointerPlace::Pinned,
        (true, 2) | (false, 1) => PointerPlace::Device,
        (true, 3) | (false, 4) => PointerPlace::Managed,
        _ => PointerPlace::Unknown,
    }
}

// SAFETY: each method is the runtime's call of that meaning; an event that the runtime says is reached has all before
// it on its stream behind it.
unsafe impl Driver for Hip {
    fn about(&self) -> &DeviceInfo {
        &self.about
    }

    fn enter(&self) -> Result<Current> {
        let mut before = 0;
        // SAFETY: a place for one number; the device is one that the runtime named.
        unsafe {
            self.check("hipGetDevice", (self.table().hipGetDevice)(&raw mut before))?;
            self.check("hipSetDevice", (self.table().hipSetDevice)(self.number))?;
        }
        Ok(Current(before.cast_unsigned() as usize))
    }

    fn leave(&self, Current(before): Current) {
        // SAFETY: the device is one that the runtime named.
        let status = unsafe { (self.table().hipSetDevice)(before as i32) };
        if let Err(error) = self.check("hipSetDevice", status) {
            tracing::debug!(%error, "a device stayed current");
        }
    }

    fn allocate(&self, len: usize) -> Result<u64> {
        let mut address = std::ptr::null_mut();
        // SAFETY: a place for one address.
        let status = unsafe { (self.table().hipMalloc)(&raw mut address, len) };
        self.check("hipMalloc", status).map(|()| address as u64)
    }

    unsafe fn free(&self, address: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("hipFree", unsafe { (self.table().hipFree)(address as Address) })
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
        const PORTABLE: u32 = 1; // for all devices
        let mut base = std::ptr::null_mut();
        // SAFETY: a place for one pointer.
        let status = unsafe { (self.table().hipHostMalloc)(&raw mut base, len, PORTABLE) };
        self.check("hipHostMalloc", status).map(|()| base.cast())
    }

    unsafe fn unpin(&self, base: *mut u8) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("hipHostFree", unsafe { (self.table().hipHostFree)(base.cast()) })
    }

    fn classify(&self, address: u64) -> Result<Pointer> {
        let none = std::ptr::null_mut();
        let mut told = PointerAttributes {
            kind: -1,
            device: -1,
            device_pointer: none,
            host_pointer: none,
            is_managed: 0,
            flags: 0,
        };
        // SAFETY: a place for one structure.
        let status = unsafe {
            (self.table().hipPointerGetAttributes)(&raw mut told, address as *const c_void)
        };
        if status == ffi::INVALID_VALUE {
            // What HIP 5 says of memory that it does not know.
            return Ok(Pointer { place: PointerPlace::Unknown, ordinal: -1, pooled: false });
        }
        self.check("hipPointerGetAttributes", status)?;
        let place = match told.is_managed {
            0 => place(told.kind, self.library.has_new_kinds()),
            _ => PointerPlace::Managed,
        };
        let pooled = place == PointerPlace::Device && self.is_pooled(address);
        Ok(Pointer { place, ordinal: told.device, pooled })
    }

    fn allocation(&self, address: u64) -> Result<Range<u64>> {
        let (mut base, mut len) = (std::ptr::null_mut(), 0);
        // SAFETY: a place for each of the two.
        let status = unsafe {
            (self.table().hipMemGetAddressRange)(&raw mut base, &raw mut len, address as Address)
        };
        let range = base as u64..(base as u64).saturating_add(len as u64);
        self.check("hipMemGetAddressRange", status).map(|()| range)
    }

    fn reaches(&self, other: DeviceId) -> Result<Option<bool>> {
        let Some((_, other)) = self.all.iter().find(|(id, _)| *id == other) else {
            return Ok(None);
        };
        let mut reaches = 0;
        // SAFETY: a place for one number; both devices are ones that the runtime named.
        let status =
            unsafe { (self.table().hipDeviceCanAccessPeer)(&raw mut reaches, self.number, *other) };
        self.check("hipDeviceCanAccessPeer", status)
            .map(|()| Some(reaches != 0 || *other == self.number))
    }

    fn share(&self, base: u64) -> Result<Vec<u8>> {
        let mut handle = HipIpcHandle([0; 64]);
        // SAFETY: a place for one handle.
        let status = unsafe { (self.table().hipIpcGetMemHandle)(&raw mut handle, base as Address) };
        self.check("hipIpcGetMemHandle", status).map(|()| handle.0.to_vec())
    }

    fn open(&self, handle: &[u8]) -> Result<u64> {
        const LAZY_PEER_ACCESS: u32 = 1;
        let bytes = handle.try_into().map_err(|_| {
            Error::new(
                ErrorKind::Malformed,
                format!("a handle of HIP has 64 bytes, and the peer's {}", handle.len()),
            )
        })?;
        let mut address = std::ptr::null_mut();
        // SAFETY: a place for one address; the runtime judges the handle.
        let status = unsafe {
            (self.table().hipIpcOpenMemHandle)(
                &raw mut address,
                HipIpcHandle(bytes),
                LAZY_PEER_ACCESS,
            )
        };
        self.check("hipIpcOpenMemHandle", status).map(|()| address as u64)
    }

    unsafe fn close(&self, address: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("hipIpcCloseMemHandle", unsafe {
            (self.table().hipIpcCloseMemHandle)(address as Address)
        })
    }

    fn dma_buf(&self, range: Range<u64>) -> Result<(OwnedFd, u64)> {
        dma_buf::export(self, range)
    }

    fn stream(&self) -> Result<StreamHandle> {
        const NON_BLOCKING: u32 = 1;
        let mut stream = std::ptr::null_mut();
        // SAFETY: a place for one handle.
        let status =
            unsafe { (self.table().hipStreamCreateWithFlags)(&raw mut stream, NON_BLOCKING) };
        self.check("hipStreamCreate", status).map(|()| StreamHandle(stream as usize))
    }

    unsafe fn end_stream(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("hipStreamDestroy", unsafe {
            (self.table().hipStreamDestroy)(stream.0 as Handle)
        })
    }

    fn event(&self) -> Result<EventHandle> {
        const NO_TIMES: u32 = 2;
        let mut event = std::ptr::null_mut();
        // SAFETY: a place for one handle.
        let status = unsafe { (self.table().hipEventCreateWithFlags)(&raw mut event, NO_TIMES) };
        self.check("hipEventCreate", status).map(|()| EventHandle(event as usize))
    }

    unsafe fn end_event(&self, event: EventHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("hipEventDestroy", unsafe { (self.table().hipEventDestroy)(event.0 as Handle) })
    }

    unsafe fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("hipEventRecord", unsafe {
            (self.table().hipEventRecord)(event.0 as Handle, stream.0 as Handle)
        })
    }

    unsafe fn reached(&self, event: EventHandle) -> Result<bool> {
        // SAFETY: the caller's promise.
        match unsafe { (self.table().hipEventQuery)(event.0 as Handle) } {
            ffi::NOT_READY => Ok(false),
            status => self.check("hipEventQuery", status).map(|()| true),
        }
    }

    fn ends_all_work(&self, code: i64) -> bool {
        ends_all_work(code)
    }

    unsafe fn copy(&self, way: CopyDirection, line: Hop, stream: StreamHandle) -> Result<()> {
        let (to, from) = (line.to as *mut c_void, line.from as *const c_void);
        // SAFETY: the caller's promise.
        self.check("hipMemcpyAsync", unsafe {
            (self.table().hipMemcpyAsync)(to, from, line.len, kind(way), stream.0 as Handle)
        })
    }

    unsafe fn copy_rows(&self, way: CopyDirection, rows: Rows, stream: StreamHandle) -> Result<()> {
        let Rows { from, from_pitch, to, to_pitch, width, count } = rows;
        let (to, from, stream) = (to as *mut c_void, from as *const c_void, stream.0 as Handle);
        // SAFETY: the caller's promise.
        self.check("hipMemcpy2DAsync", unsafe {
            (self.table().hipMemcpy2DAsync)(
                to,
                to_pitch,
                from,
                from_pitch,
                width,
                count,
                kind(way),
                stream,
            )
        })
    }

    unsafe fn zero(&self, address: u64, len: usize, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("hipMemsetAsync", unsafe {
            (self.table().hipMemsetAsync)(address as Address, 0, len, stream.0 as Handle)
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
        let (function, stream) = (function.0 as Handle, stream.0 as Handle);
        // SAFETY: the caller's promise; the runtime reads the parameters before it returns.
        let status = unsafe {
            let (places, none) = (places.as_mut_ptr(), std::ptr::null_mut());
            (self.table().hipModuleLaunchKernel)(
                function, x, y, z, threads, 1, 1, 0, stream, places, none,
            )
        };
        self.check("hipModuleLaunchKernel", status)
    }
}

fn kind(way: CopyDirection) -> i32 {
    match way {
        CopyDirection::ToDevice => ffi::TO_DEVICE,
        CopyDirection::ToHost => ffi::TO_HOST,
        CopyDirection::Within => ffi::WITHIN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_memory_is_no_host_memory_in_any_release() {
        assert_eq!([0, 1, 2, 3].map(|kind| place(kind, true)), {
            use PointerPlace::*;
            [Unknown, Pinned, Device, Managed]
        });
        assert_eq!([0, 1, 4].map(|kind| place(kind, false)), {
            use PointerPlace::*;
            [Pinned, Device, Managed]
        });
    }
}
