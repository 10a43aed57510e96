//! The trait that a crate for one maker's devices implements: its driver's calls for one device, as thin as they can
//! be.

use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};

use kvx_core::memory::Hop;
use kvx_core::{DeviceId, Error, ErrorKind, MemoryKind, Result};

/// What is known of a device before it is used.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Its memory's kind.
    pub kind: MemoryKind,
    /// The driver, as errors name it: `CUDA`, `HIP`.
    pub driver: &'static str,
    /// The same in every process.
    pub id: DeviceId,
    /// What this process calls it: differs from process to process.
    pub ordinal: u32,
    /// Its maker's name for it.
    pub name: String,
    /// Its address on the bus, as `lspci` writes it.
    pub bus: String,
    /// The driver's version and the file it was loaded from.
    pub version: String,
}

/// A stream of the driver: a `CUstream` or a `hipStream_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamHandle(pub usize);

/// An event of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventHandle(pub usize);

/// A kernel that is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionHandle(pub usize);

/// What a thread had current before [`Driver::enter`].
#[derive(Clone, Copy, Debug)]
pub struct Current(pub usize);

/// Which way bytes go.
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
    /// Where the first is read.
    pub from: u64,
    /// From each to the next; not less than `width`.
    pub from_pitch: usize,
    /// Where the first is written.
    pub to: u64,
    /// From each to the next; not less than `width`.
    pub to_pitch: usize,
    /// Bytes of one.
    pub width: usize,
    /// How many.
    pub count: usize,
}

/// Where a pointer leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PointerPlace {
    /// To memory that the driver does not know: the host's, or nobody's.
    Unknown,
    /// To host memory that the driver has pinned.
    Pinned,
    /// To memory that the driver moves between host and devices.
    Managed,
    /// To a device.
    Device,
}

/// What the driver knows of a pointer.
#[derive(Clone, Copy, Debug)]
pub struct Pointer {
    /// Where it leads.
    pub place: PointerPlace,
    /// The device's number in this process.
    pub ordinal: i32,
    /// Whether it is memory of a pool of the driver's, which no other process or card can be given.
    pub pooled: bool,
}

/// Virtual memory of a device with physical memory behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// Where it begins.
    pub address: u64,
    /// Its length, a multiple of what the driver maps.
    pub len: usize,
    /// The driver's handle of the physical memory.
    pub handle: u64,
}

/// The calls of one maker's driver, for one device. Core calls them on any thread, between
/// [`enter`](Driver::enter) and [`leave`](Driver::leave). Errors carry the driver's own code and text
/// ([`Error::native`]).
///
/// # Safety
/// The calls do what they say: memory is valid from `allocate` to `free`, and what was copied is untouched once an
/// event behind it is [`reached`](Driver::reached).
pub unsafe trait Driver: Send + Sync + 'static {
    /// The device.
    fn about(&self) -> &DeviceInfo;

    /// Makes the device current on this thread. The first call makes its context, which takes time and memory.
    fn enter(&self) -> Result<Current>;

    /// Makes current again what was before.
    fn leave(&self, before: Current);

    /// Memory that other processes can open and other cards can reach, where the device has such.
    fn allocate(&self, len: usize) -> Result<u64>;

    /// Gives it back.
    ///
    /// # Safety
    /// It came from `allocate`, and nobody uses it any more.
    unsafe fn free(&self, address: u64) -> Result<()>;

    /// Virtual memory with physical memory behind it, which [`export`](Driver::export) can share.
    fn map(&self, len: usize) -> Result<Mapped> {
        _ = len;
        Err(self.cannot("no virtual memory"))
    }

    /// Gives it back.
    ///
    /// # Safety
    /// It came from `map` or `import`, and nobody uses it any more.
    unsafe fn unmap(&self, mapped: Mapped) -> Result<()> {
        _ = mapped;
        Err(self.cannot("no virtual memory"))
    }

    /// A descriptor of the physical memory.
    fn export(&self, mapped: Mapped) -> Result<OwnedFd> {
        _ = mapped;
        Err(self.cannot("no virtual memory"))
    }

    /// Maps what another process has exported.
    fn import(&self, file: BorrowedFd<'_>, len: usize) -> Result<Mapped> {
        _ = (file, len);
        Err(self.cannot("no virtual memory"))
    }

    /// Pinned host memory, which kernels reach at the same address, and which the CPU reads as fast as any other.
    fn pin(&self, len: usize) -> Result<*mut u8>;

    /// Gives it back.
    ///
    /// # Safety
    /// It came from `pin`, and nobody uses it any more.
    unsafe fn unpin(&self, base: *mut u8) -> Result<()>;

    /// What the driver knows of a pointer.
    fn classify(&self, address: u64) -> Result<Pointer>;

    /// The allocation that an address of a device lies in.
    fn allocation(&self, address: u64) -> Result<Range<u64>>;

    /// Whether this device reaches the memory of another. `None`: this process does not see the other one, and only a
    /// try can tell.
    fn reaches(&self, other: DeviceId) -> Result<Option<bool>>;

    /// What another process needs to open an allocation, which begins at `base`.
    fn share(&self, base: u64) -> Result<Vec<u8>>;

    /// Opens what another process has shared; once for each allocation. The bytes come from a peer.
    fn open(&self, handle: &[u8]) -> Result<u64>;

    /// Closes it.
    ///
    /// # Safety
    /// It came from `open`, and nobody uses it any more.
    unsafe fn close(&self, address: u64) -> Result<()>;

    /// A descriptor of a range for cards of other makers, and where in it the range begins. Both ends of the range are
    /// multiples of the host's page.
    fn dma_buf(&self, range: Range<u64>) -> Result<(OwnedFd, u64)>;

    /// A stream that waits for no other.
    fn stream(&self) -> Result<StreamHandle>;

    /// Ends it, once its work is done.
    ///
    /// # Safety
    /// It came from `stream` and is not used any more.
    unsafe fn end_stream(&self, stream: StreamHandle) -> Result<()>;

    /// An event.
    fn event(&self) -> Result<EventHandle>;

    /// Ends it.
    ///
    /// # Safety
    /// It came from `event` and is not used any more.
    unsafe fn end_event(&self, event: EventHandle) -> Result<()>;

    /// Puts an event behind what is on the stream.
    ///
    /// # Safety
    /// Both live.
    unsafe fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()>;

    /// Whether all that was on the stream before the event is done.
    ///
    /// # Safety
    /// It lives and was recorded.
    unsafe fn reached(&self, event: EventHandle) -> Result<bool>;

    /// Whether an error of this code says that the driver has ended all work of this process on the device, and will do
    /// no more.
    fn ends_all_work(&self, code: i64) -> bool;

    /// Starts one copy.
    ///
    /// # Safety
    /// Both sides are valid until an event behind it is reached.
    unsafe fn copy(&self, way: CopyDirection, line: Hop, stream: StreamHandle) -> Result<()>;

    /// Starts a copy of rows.
    ///
    /// # Safety
    /// As [`copy`](Driver::copy).
    unsafe fn copy_rows(&self, way: CopyDirection, rows: Rows, stream: StreamHandle) -> Result<()>;

    /// Whether there is [`copy_batch`](Driver::copy_batch).
    fn has_batches(&self) -> bool {
        false
    }

    /// Starts many copies by one call. An error: some may have been started.
    ///
    /// # Safety
    /// As [`copy`](Driver::copy), for each.
    unsafe fn copy_batch(
        &self,
        way: CopyDirection,
        lines: &[Hop],
        stream: StreamHandle,
    ) -> Result<()> {
        _ = (way, lines, stream);
        Err(self.cannot("no batched copies"))
    }

    /// Fills memory with zeros.
    ///
    /// # Safety
    /// As [`copy`](Driver::copy).
    unsafe fn zero(&self, address: u64, len: usize, stream: StreamHandle) -> Result<()>;

    /// Loads the [kernels](super::kernels), in the order of their [entries](super::kernels::ENTRIES).
    fn load(&self) -> Result<Vec<FunctionHandle>>;

    /// Starts a kernel.
    ///
    /// # Safety
    /// The parameters are what the kernel takes, and name memory that is valid until an event behind it is reached.
    unsafe fn launch(
        &self,
        function: FunctionHandle,
        grid: [u32; 3],
        threads: u32,
        parameters: &[u64],
        stream: StreamHandle,
    ) -> Result<()>;

    /// An error for what this driver or device has not.
    fn cannot(&self, what: &str) -> Error {
        let DeviceInfo { driver, name, version, .. } = self.about();
        Error::new(ErrorKind::Unsupported, format!("{name} with {driver} {version} has {what}"))
    }
}

/// The device is current on this thread while this lives.
pub(super) struct Inside<'a> {
    driver: &'a dyn Driver,
    before: Current,
}

impl<'a> Inside<'a> {
    pub(super) fn of(driver: &'a dyn Driver) -> Result<Self> {
        kvx_core::fork::check()?;
        Ok(Inside { before: driver.enter()?, driver })
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.driver.leave(self.before);
    }
}
