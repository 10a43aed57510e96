//! The calls of a driver for one device.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use kvx_core::backend::{Hop, Unavailable};
use kvx_core::{DeviceId, Error, ErrorKind, Result};

use super::functions::{CallResult, Failure};
use super::library::Library;
use super::types::{
    Context, CopyDirection, DeviceInfo, DeviceNumber, EventHandle, FunctionHandle, IpcMemoryHandle,
    MappedMemory, ModuleHandle, PointerInfo, Rows, StreamHandle, status,
};
use super::virtual_memory::VirtualMemory;
use crate::kernels::ENTRIES;

/// The driver of one device. Unless stated otherwise, calls require that the device is current on
/// the thread ([`Driver::enter`]). Errors carry the driver's own code and text ([`Error::native`]).
pub(crate) struct Driver {
    library: &'static Library,
    number: DeviceNumber,
    info: DeviceInfo,
    /// All devices of this process.
    all: Arc<[(DeviceId, DeviceNumber)]>,
    /// The device's context, once it has been needed.
    context: OnceLock<Context>,
    needs_flush: bool,
}

/// Keeps the device current on this thread until it is dropped.
pub(crate) struct CurrentDevice<'a> {
    driver: &'a Driver,
    previous: Context,
}

impl Drop for CurrentDevice<'_> {
    fn drop(&mut self) {
        if let Err(failure) = self.driver.library.calls.leave(self.previous) {
            let error = self.driver.error(failure);
            tracing::debug!(%error, "a device could not be made non-current");
        }
    }
}

impl Driver {
    /// Returns the drivers of all devices that the process sees. Does nothing on them.
    ///
    /// # Errors
    /// The reason why there are none, and what to do.
    pub(crate) fn all(library: &'static Library) -> Result<Vec<Driver>, Unavailable> {
        let found: Vec<_> = (0..library.device_count()?)
            .map(|ordinal| device_info(library, ordinal))
            .collect::<Result<_, _>>()?;
        let all: Arc<[_]> = found.iter().map(|(number, info)| (info.id, *number)).collect();
        let driver = |(number, info)| Driver::new(library, number, info, Arc::clone(&all));
        Ok(found.into_iter().map(driver).collect())
    }

    pub(crate) fn new(
        library: &'static Library,
        number: DeviceNumber,
        info: DeviceInfo,
        all: Arc<[(DeviceId, DeviceNumber)]>,
    ) -> Self {
        let needs_flush = library.calls.needs_flush(number);
        Driver { library, number, info, all, context: OnceLock::new(), needs_flush }
    }

    pub(crate) fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Returns whether the driver does no more work for the process after an error of this code.
    pub(crate) fn is_fatal(&self, code: i64) -> bool {
        self.library.is_fatal(code)
    }

    /// Returns an error for a feature that this driver or device lacks.
    pub(crate) fn lacks(&self, what: &str) -> Error {
        let DeviceInfo { driver, name, version, .. } = &self.info;
        ErrorKind::Unsupported.because(format!("{name} with {driver} {version} has {what}"))
    }

    fn error(&self, failure: Failure) -> Error {
        match failure {
            Failure::Status(function, status) => self.library.error(function, status),
            Failure::Missing(what) => self.lacks(&what),
            Failure::Other(error) => error,
        }
    }

    /// Converts a failure to an error.
    fn check<T>(&self, result: CallResult<T>) -> Result<T> {
        result.map_err(|failure| self.error(failure))
    }

    /// Makes the device current on this thread. The first call creates its context, which takes
    /// time and memory.
    pub(crate) fn enter(&self) -> Result<CurrentDevice<'_>> {
        kvx_core::backend::fork::check()?;
        let calls = &self.library.calls;
        let context = match self.context.get() {
            Some(context) => *context,
            None => {
                let context = self.check(calls.context(self.number))?;
                *self.context.get_or_init(|| context)
            }
        };
        let previous = self.check(calls.enter(context))?;
        Ok(CurrentDevice { driver: self, previous })
    }

    /// Allocates memory that other processes can open and other cards can access, if the device
    /// supports that.
    pub(crate) fn allocate(&self, len: usize) -> Result<u64> {
        let mut address = 0;
        // SAFETY: a location for one address.
        self.check(unsafe { self.library.functions.allocate(&raw mut address, len) })?;
        Ok(address)
    }

    /// Frees an allocation.
    ///
    /// # Safety
    /// `address` came from `allocate`, and nobody uses it afterwards.
    pub(crate) unsafe fn free(&self, address: u64) -> Result<()> {
        // SAFETY: the caller promises that nobody uses it.
        self.check(unsafe { self.library.functions.free(address) })
    }

    fn virtual_memory(&self) -> Result<VirtualMemory<'_>> {
        let rdma = self.library.calls.virtual_memory_for_rdma(self.number);
        match (&self.library.virtual_memory, rdma) {
            (Some(functions), Some(for_rdma)) => {
                Ok(VirtualMemory { functions, device: self.number, for_rdma })
            }
            _ => Err(self.lacks("no virtual memory that can be shared: make the pool without")),
        }
    }

    /// Maps virtual memory to new physical memory, which [`export`](Driver::export) can share.
    pub(crate) fn map(&self, len: usize) -> Result<MappedMemory> {
        self.check(self.virtual_memory()?.map(len))
    }

    /// Unmaps and releases mapped memory.
    ///
    /// # Safety
    /// `mapped` came from `map` or `import`, and nobody uses it afterwards.
    pub(crate) unsafe fn unmap(&self, mapped: MappedMemory) -> Result<()> {
        // SAFETY: the caller promises that nobody uses it.
        self.check(unsafe { self.virtual_memory()?.unmap(mapped) })
    }

    /// Exports the physical memory as a descriptor.
    pub(crate) fn export(&self, mapped: MappedMemory) -> Result<OwnedFd> {
        self.check(self.virtual_memory()?.export(mapped))
    }

    /// Maps physical memory that another process has exported.
    pub(crate) fn import(&self, file: BorrowedFd<'_>, len: usize) -> Result<MappedMemory> {
        let by_pointer = self.library.version < self.library.vendor.imports_descriptors;
        self.check(self.virtual_memory()?.import(file, len, by_pointer))
    }

    /// Allocates pinned host memory, which kernels access at the same address, and which the CPU
    /// reads as fast as other memory.
    pub(crate) fn pin(&self, len: usize) -> Result<*mut u8> {
        const PORTABLE: u32 = 1; // for all devices; not write-combined, which the CPU reads slowly
        let mut base = std::ptr::null_mut();
        let functions = &self.library.functions;
        // SAFETY: a location for one pointer.
        self.check(unsafe { functions.allocate_pinned(&raw mut base, len, PORTABLE) })?;
        Ok(base.cast())
    }

    /// Frees pinned memory.
    ///
    /// # Safety
    /// `base` came from `pin`, and nobody uses it afterwards.
    pub(crate) unsafe fn unpin(&self, base: *mut u8) -> Result<()> {
        // SAFETY: the caller promises that nobody uses it.
        self.check(unsafe { self.library.functions.free_pinned(base.cast()) })
    }

    /// Returns whether the device sees writes of network cards only after a
    /// [`flush`](Driver::flush).
    pub(crate) fn needs_flush(&self) -> bool {
        self.needs_flush
    }

    /// Makes writes of network cards that have arrived so far visible to the device.
    pub(crate) fn flush(&self) -> Result<()> {
        self.check(self.library.calls.flush())
    }

    /// Returns whether memory belongs to another context than the one that kvx uses. The device is
    /// current, so that its context exists.
    pub(crate) fn is_of_other_context(&self, pointer: &PointerInfo) -> bool {
        pointer.context.is_some_and(|context| self.context.get() != Some(&context))
    }

    /// Returns the driver's information about an address.
    pub(crate) fn classify(&self, address: u64) -> Result<PointerInfo> {
        self.check(self.library.calls.classify(address))
    }

    /// Returns the allocation that contains an address on a device.
    pub(crate) fn allocation(&self, address: u64) -> Result<Range<u64>> {
        let (mut base, mut len) = (0, 0);
        let functions = &self.library.functions;
        // SAFETY: a location for each of the two numbers.
        self.check(unsafe { functions.allocation(&raw mut base, &raw mut len, address) })?;
        Ok(base..base.saturating_add(len as u64))
    }

    /// Returns the number of bytes at the start of an opened allocation, for which its owner claims
    /// `claimed` bytes. A driver need not know the range of memory of another process by the usual
    /// function; then attributes of the address tell. Errors: `Unsupported` if none tells.
    pub(crate) fn opened_len(&self, address: u64, claimed: u64) -> Result<u64> {
        let refused = match self.allocation(address) {
            Ok(range) => return Ok(range.end.saturating_sub(address)),
            Err(error) => error,
        };
        match self.check(self.library.calls.opened_len(address, claimed))? {
            Some(len) => Ok(len),
            None => Err(ErrorKind::Unsupported
                .because(format!(
                    "{} does not tell the size of the peer's device memory, so that its bounds \
                     cannot be checked: the transfer goes through the host (TCP)",
                    self.info.driver
                ))
                .with_source(refused)),
        }
    }

    /// Returns whether this device can access the memory of another; `None` if this process does
    /// not see the other one, so that only an attempt can tell.
    pub(crate) fn reaches(&self, other: DeviceId) -> Result<Option<bool>> {
        let Some((_, other)) = self.all.iter().find(|(id, _)| *id == other) else {
            return Ok(None);
        };
        let mut answer = 0;
        let functions = &self.library.functions;
        // SAFETY: a location for one number; the driver named both devices.
        self.check(unsafe { functions.can_access_peer(&raw mut answer, self.number, *other) })?;
        Ok(Some(answer != 0 || *other == self.number))
    }

    /// Returns the handle with which another process opens the allocation that begins at `base`.
    pub(crate) fn share(&self, base: u64) -> Result<Vec<u8>> {
        let mut handle = IpcMemoryHandle([0; 64]);
        // SAFETY: a location for one handle.
        self.check(unsafe { self.library.functions.share(&raw mut handle, base) })?;
        Ok(handle.0.to_vec())
    }

    /// Opens memory that another process has shared, once for each allocation. The bytes come from
    /// a peer.
    pub(crate) fn open(&self, handle: &[u8]) -> Result<u64> {
        const LAZY_PEER_ACCESS: u32 = 1;
        let bytes = handle.try_into().map_err(|_| {
            let (driver, len) = (self.info.driver, handle.len());
            let sentence = format!("a handle of {driver} has 64 bytes, and the peer's {len}");
            ErrorKind::Malformed.because(sentence)
        })?;
        let (mut address, functions) = (0, &self.library.functions);
        // SAFETY: a location for one address; the driver validates the handle.
        self.check(unsafe {
            functions.open(&raw mut address, IpcMemoryHandle(bytes), LAZY_PEER_ACCESS)
        })?;
        Ok(address)
    }

    /// Closes opened memory.
    ///
    /// # Safety
    /// `address` came from `open`, and nobody uses it afterwards.
    pub(crate) unsafe fn close(&self, address: u64) -> Result<()> {
        // SAFETY: the caller promises that nobody uses it.
        self.check(unsafe { self.library.functions.close(address) })
    }

    /// Exports a range as a descriptor for cards of other vendors, and returns the offset of the
    /// range in it. Both ends of the range are multiples of the host's page size. Errors:
    /// `Unsupported`.
    pub(crate) fn dma_buf(&self, range: Range<u64>) -> Result<(OwnedFd, u64)> {
        let exported = self.check(self.library.calls.dma_buf(self.number, range));
        exported.map_err(|error| error.with_kind(ErrorKind::Unsupported))
    }

    /// Creates a stream that does not wait for others.
    pub(crate) fn create_stream(&self) -> Result<StreamHandle> {
        const NON_BLOCKING: u32 = 1;
        let mut stream = StreamHandle(0);
        // SAFETY: a location for one handle.
        self.check(unsafe { self.library.functions.create_stream(&raw mut stream, NON_BLOCKING) })?;
        Ok(stream)
    }

    /// Destroys a stream, once its work is done.
    ///
    /// # Safety
    /// `stream` came from `create_stream`, and nobody uses it afterwards.
    pub(crate) unsafe fn destroy_stream(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller promises that it is not used.
        self.check(unsafe { self.library.functions.destroy_stream(stream) })
    }

    /// Creates an event.
    pub(crate) fn create_event(&self) -> Result<EventHandle> {
        const NO_TIMES: u32 = 2;
        let mut event = EventHandle(0);
        // SAFETY: a location for one handle.
        self.check(unsafe { self.library.functions.create_event(&raw mut event, NO_TIMES) })?;
        Ok(event)
    }

    /// Destroys an event.
    ///
    /// # Safety
    /// `event` came from `create_event`, and nobody uses it afterwards.
    pub(crate) unsafe fn destroy_event(&self, event: EventHandle) -> Result<()> {
        // SAFETY: the caller promises that it is not used.
        self.check(unsafe { self.library.functions.destroy_event(event) })
    }

    /// Records an event after the work that is on the stream.
    ///
    /// # Safety
    /// The event and the stream are alive.
    pub(crate) unsafe fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller guarantees that both are alive.
        self.check(unsafe { self.library.functions.record_event(event, stream) })
    }

    /// Returns whether all work on the stream before the event is done.
    ///
    /// # Safety
    /// The event is alive and was recorded.
    pub(crate) unsafe fn is_reached(&self, event: EventHandle) -> Result<bool> {
        // SAFETY: the caller guarantees that it is alive.
        match unsafe { self.library.functions.query_event(event) } {
            Err(Failure::Status(_, status::NOT_READY)) => Ok(false),
            result => self.check(result).map(|()| true),
        }
    }

    /// Starts one copy.
    ///
    /// # Safety
    /// The memory on both sides stays valid until an event after the copy is reached.
    pub(crate) unsafe fn copy(
        &self,
        way: CopyDirection,
        line: Hop,
        stream: StreamHandle,
    ) -> Result<()> {
        // SAFETY: the caller promises valid sides.
        self.check(unsafe { self.library.calls.copy(way, line, stream) })
    }

    /// Starts a copy of rows.
    ///
    /// # Safety
    /// As for [`copy`](Driver::copy).
    pub(crate) unsafe fn copy_rows(
        &self,
        way: CopyDirection,
        rows: Rows,
        stream: StreamHandle,
    ) -> Result<()> {
        // SAFETY: the caller promises valid sides.
        self.check(unsafe { self.library.calls.copy_rows(way, rows, stream) })
    }

    /// Returns whether [`copy_batch`](Driver::copy_batch) works.
    pub(crate) fn has_batches(&self) -> bool {
        self.library.calls.has_batches()
    }

    /// Starts many copies with one call. After an error some may have been started.
    ///
    /// # Safety
    /// As for [`copy`](Driver::copy), for each copy.
    pub(crate) unsafe fn copy_batch(&self, lines: &[Hop], stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller promises valid sides.
        self.check(unsafe { self.library.calls.copy_batch(lines, stream) })
    }

    /// Fills memory with zeros.
    ///
    /// # Safety
    /// The memory stays valid until an event after the call is reached.
    pub(crate) unsafe fn zero(&self, address: u64, len: usize, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller promises valid memory.
        self.check(unsafe { self.library.functions.fill(address, 0, len, stream) })
    }

    /// Loads the [kernels](crate::kernels), in the order of their [`ENTRIES`]: as text if the
    /// driver compiles it, otherwise as compiled from source by the run-time compiler.
    pub(crate) fn load_kernels(&self) -> Result<Vec<FunctionHandle>> {
        let compiled = || self.load_module(&self.library.compile_kernels(self.number)?);
        let module = match self.library.vendor.kernels {
            None => compiled()?,
            Some(text) => self.load_module(c_string(text)?.as_bytes_with_nul()).or_else(|refused| {
                tracing::debug!(error = %refused, "the driver rejects kvx's kernels: compiling them from source");
                compiled().map_err(|error| error.with_source(refused))
            })?,
        };
        ENTRIES.iter().map(|entry| self.module_function(module, entry)).collect()
    }

    /// Loads an image: text that ends in NUL, or a binary, which contains its own length. It stays
    /// loaded for the life of the process.
    fn load_module(&self, image: &[u8]) -> Result<ModuleHandle> {
        let mut module = ModuleHandle(0);
        // SAFETY: a location for one handle; the image contains its own end.
        self.check(unsafe {
            self.library.functions.load_module(&raw mut module, image.as_ptr().cast())
        })?;
        Ok(module)
    }

    fn module_function(&self, module: ModuleHandle, entry: &str) -> Result<FunctionHandle> {
        let name = c_string(entry)?;
        let (mut function, functions) = (FunctionHandle(0), &self.library.functions);
        // SAFETY: a location for one handle; the module is alive, and the name ends in NUL.
        self.check(unsafe { functions.module_function(&raw mut function, module, name.as_ptr()) })?;
        Ok(function)
    }

    /// Starts a kernel.
    ///
    /// # Safety
    /// The parameters have the types that the kernel takes, and refer to memory that stays valid
    /// until an event after the launch is reached.
    pub(crate) unsafe fn launch(
        &self,
        function: FunctionHandle,
        [x, y, z]: [u32; 3],
        threads: u32,
        parameters: &[u64],
        stream: StreamHandle,
    ) -> Result<()> {
        let mut places: Vec<_> =
            parameters.iter().map(|value| (&raw const *value).cast_mut().cast()).collect();
        // SAFETY: the caller guarantees the parameters, which the driver reads before it returns.
        self.check(unsafe {
            let (places, none) = (places.as_mut_ptr(), std::ptr::null_mut());
            let functions = &self.library.functions;
            functions.launch(function, x, y, z, threads, 1, 1, 0, stream, places, none)
        })
    }
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|error| {
        ErrorKind::Invalid.because("kvx's kernels contain a NUL").with_source(error)
    })
}

fn device_info(
    library: &Library,
    ordinal: c_int,
) -> Result<(DeviceNumber, DeviceInfo), Unavailable> {
    let functions = &library.functions;
    let (mut number, mut uuid) = (0, [0; 16]);
    // SAFETY: a location for one number.
    let named = unsafe { functions.device(&raw mut number, ordinal) };
    // SAFETY: `text` passes a buffer with its length.
    let bus = text(|text, len| unsafe { functions.device_bus(text, len, number) });
    let id = named.and_then(|()| {
        // SAFETY: a location for one UUID of a device that the driver has named.
        let asked = unsafe { functions.device_uuid(&raw mut uuid, number) };
        library.calls.device_id(asked.map(|()| uuid), &bus)
    });
    let id = id.map_err(|failure| {
        let vendor = library.vendor;
        let reason = match failure {
            Failure::Status(function, status) => {
                format!("{}: {}", function.to_string_lossy(), library.describe(status))
            }
            Failure::Missing(what) => what,
            Failure::Other(error) => error.to_string(),
        };
        Unavailable::because(
            format!("{} does not describe device {ordinal}: {reason}", library.path.display()),
            format!("check the list of {}", vendor.device_list),
        )
    })?;
    // SAFETY: `text` passes a buffer with its length.
    let name = text(|text, len| unsafe { functions.device_name(text, len, number) });
    let info = DeviceInfo {
        kind: library.vendor.kind,
        driver: library.vendor.name,
        id,
        ordinal: ordinal.cast_unsigned(),
        name,
        bus,
        version: library.version(),
    };
    Ok((number, info))
}

/// Returns a text that the driver writes, or an empty text if it writes none.
fn text(write: impl FnOnce(*mut c_char, c_int) -> CallResult) -> String {
    let mut text = [0u8; 256];
    // The driver writes at most the given number of bytes, and the last one stays NUL.
    write(text.as_mut_ptr().cast(), text.len() as c_int - 1).ok();
    CStr::from_bytes_until_nul(&text).unwrap_or_default().to_string_lossy().into_owned()
}
