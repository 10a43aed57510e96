//! A vendor's driver: its data, and the calls that differ between drivers.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ops::{Range, RangeInclusive};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use kvx_backend::loader::{NativeLibrary, Search};
use kvx_core::backend::{Hop, Unavailable};
use kvx_core::{DeviceId, MemoryKind};

use super::functions::{CallResult, CompilerNames, Failure, FunctionNames, VirtualMemoryNames};
use super::types::{
    Context, CopyDirection, DeviceNumber, PointerInfo, Rows, Status, StreamHandle, status,
};

/// A vendor's driver, as data.
pub struct Vendor {
    /// The kind of the vendor's device memory.
    pub kind: MemoryKind,
    /// The driver, as errors name it: `CUDA`, `HIP`.
    pub name: &'static str,
    /// The noun that errors use for the driver: `driver`, `runtime`.
    pub noun: &'static str,
    /// The prefix of the driver's lines in the kernel's log: `NVRM`, `amdgpu`.
    pub kernel_log: &'static str,
    /// The command that lists devices: `nvidia-smi`, `rocminfo`.
    pub device_list: &'static str,
    /// The file of the driver's library.
    pub library: LibraryFile,
    /// The oldest supported version.
    pub oldest: c_int,
    /// Formats a version.
    pub format_version: fn(c_int) -> String,
    /// Returns details on why no device is usable after `status`, beginning with `; ` or empty, and
    /// what to do.
    pub advice: fn(Status) -> (String, &'static str),
    /// The function that returns the driver's version.
    pub version: &'static CStr,
    /// The names of the driver's functions.
    pub functions: FunctionNames,
    /// The names of the driver's functions for virtual memory, which older drivers do not have.
    pub virtual_memory: VirtualMemoryNames,
    /// The first version whose import of virtual memory takes a descriptor; older ones take a
    /// pointer to it.
    pub imports_descriptors: c_int,
    /// The statuses after which the driver does no more work for the process and all work on its
    /// streams has ended.
    pub fatal: &'static [RangeInclusive<i64>],
    /// The kernels as text, if the driver compiles it.
    pub kernels: Option<&'static str>,
    /// The run-time compiler of its kernels.
    pub compiler: CompilerLibrary,
    /// Resolves the functions for [`VendorCalls`] in its library, which has the given version.
    ///
    /// # Safety
    /// The library is this vendor's.
    pub calls: unsafe fn(&NativeLibrary, c_int) -> Result<Box<dyn VendorCalls>, Unavailable>,
}

/// How to find a library.
pub struct LibraryFile {
    /// The variable that names the library.
    pub variable: &'static str,
    /// The library's names for the dynamic linker.
    pub names: &'static [&'static str],
    /// A file to try after the names.
    pub file: Option<&'static str>,
    /// How to install the library.
    pub cure: &'static str,
}

impl LibraryFile {
    /// Loads the library. Errors: everything that was tried, and the remedy.
    pub fn open(&self) -> Result<NativeLibrary, Unavailable> {
        let files = self.file.map(PathBuf::from);
        Search::new(self.variable, self.names, self.cure).files(files).open()
    }
}

/// A run-time compiler of kernels, as data.
pub struct CompilerLibrary {
    /// The compiler's name in errors.
    pub name: &'static str,
    /// The compiler's own library, used unless the driver's contains the functions.
    pub library: LibraryFile,
    /// The names of the compiler's functions.
    pub functions: CompilerNames,
}

/// The calls that differ between drivers.
///
/// # Safety
/// The calls have the documented effects. Copies do not access memory once an event after them on
/// their stream is reached.
pub unsafe trait VendorCalls: Send + Sync {
    /// Initialises the driver.
    fn initialize(&self) -> Status {
        status::SUCCESS
    }

    /// Returns the driver's name and text for a status: C strings that live as long as the driver,
    /// or null.
    fn describe(&self, status: Status) -> [*const c_char; 2];

    /// Returns the identity of a device from its UUID, or from its PCI address for devices that may
    /// have no UUID.
    fn device_id(&self, uuid: CallResult<[u8; 16]>, bus: &str) -> CallResult<DeviceId>;

    /// Creates the context of a device. It lives as long as the process.
    fn context(&self, device: DeviceNumber) -> CallResult<Context>;

    /// Makes a device current on this thread, and returns the context that was current before.
    fn enter(&self, context: Context) -> CallResult<Context>;

    /// Restores the context that [`enter`](VendorCalls::enter) returned.
    fn leave(&self, previous: Context) -> CallResult;

    /// Returns the driver's information about an address.
    fn classify(&self, address: u64) -> CallResult<PointerInfo>;

    /// Returns whether a device sees writes of network cards only after a
    /// [`flush`](VendorCalls::flush).
    fn needs_flush(&self, device: DeviceNumber) -> bool {
        _ = device;
        false
    }

    /// Makes writes of network cards that have arrived so far visible to the current device.
    fn flush(&self) -> CallResult {
        Ok(())
    }

    /// Returns the number of bytes from the start of opened memory to its end, for which the owner
    /// claims `claimed` bytes, by attributes of its address; `None` if they do not tell.
    fn opened_len(&self, address: u64, claimed: u64) -> CallResult<Option<u64>> {
        _ = (address, claimed);
        Ok(None)
    }

    /// Exports a range as a descriptor for cards of other vendors, and returns the offset of the
    /// range in it. Both ends are multiples of the host's page size.
    fn dma_buf(&self, device: DeviceNumber, range: Range<u64>) -> CallResult<(OwnedFd, u64)>;

    /// Returns whether other cards can access a device's virtual memory; `None` if it cannot be
    /// shared.
    fn virtual_memory_for_rdma(&self, device: DeviceNumber) -> Option<bool> {
        _ = device;
        Some(false)
    }

    /// Starts a copy.
    ///
    /// # Safety
    /// The memory on both sides stays valid until an event after the copy is reached.
    unsafe fn copy(&self, way: CopyDirection, line: Hop, stream: StreamHandle) -> CallResult;

    /// Starts a copy of rows.
    ///
    /// # Safety
    /// The memory on both sides stays valid until an event after the copy is reached.
    unsafe fn copy_rows(&self, way: CopyDirection, rows: Rows, stream: StreamHandle) -> CallResult;

    /// Returns whether [`copy_batch`](VendorCalls::copy_batch) works.
    fn has_batches(&self) -> bool {
        false
    }

    /// Starts many copies with one call. After an error some may have been started.
    ///
    /// # Safety
    /// The memory on both sides of each copy stays valid until an event after the copy is reached.
    unsafe fn copy_batch(&self, lines: &[Hop], stream: StreamHandle) -> CallResult {
        _ = (lines, stream);
        Err(Failure::Missing("no batched copies".into()))
    }

    /// Returns the compiler's options for a device.
    fn compiler_options(&self, device: DeviceNumber) -> Vec<CString> {
        _ = device;
        Vec::new()
    }
}
