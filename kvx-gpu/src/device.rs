//! A device, as agents and programs use it.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::{Arc, OnceLock};

use super::calls::{BlockingCalls, CallThread};
use super::copies::merge;
use super::exports;
use super::imports::{AllocationName, Imports, SharedHandle};
use super::kernels::{DeviceGrid, Swap};
use super::memory::{DevicePoolBuilder, ExportedFiles, adopt, mapped_error, pool_error};
use super::pinned::{PinnedRanges, pin};
use super::strided::{DevicePtr, StridedBlocks};
use super::thread::{DeviceJob, DeviceThread, DeviceWork};
use crate::driver::{CopyDirection, DeviceInfo, Driver, StreamHandle};
use kvx_backend::process::{ProcessId, ProcessWatch};
use kvx_core::backend::sync::Mutex;
use kvx_core::backend::{
    Direction, DmaBuf, Hop, IpcHandle, LinkProcess, MemoryReceiver, Piece, Ticket,
};
use kvx_core::{DeviceAccess, DeviceId, ErrorKind, Memory, MemoryKind, Result};

/// A GPU, with kvx's thread and state for it. Pass it to an agent with
/// [`AgentBuilder::device`](kvx_core::AgentBuilder::device).
///
/// Creating it does nothing on the device. The first use creates the device's context, which takes
/// time and memory.
pub struct Device {
    driver: Arc<Driver>,
    pinned: Arc<PinnedRanges>,
    exported: ExportedFiles,
    imports: Arc<Imports>,
    calls: CallThread,
    thread: OnceLock<DeviceThread>,
    starting: Mutex<()>,
}

impl Device {
    /// Creates the device of a driver. There must be only one for each device and process: memory
    /// belongs to the one that created it.
    pub(crate) fn new(driver: Driver) -> Arc<Self> {
        let driver = Arc::new(driver);
        Arc::new(Device {
            driver,
            imports: Arc::default(),
            calls: CallThread::default(),
            pinned: Arc::default(),
            exported: ExportedFiles::default(),
            thread: OnceLock::new(),
            starting: Mutex::default(),
        })
    }

    /// Returns the description of the device.
    pub fn info(&self) -> &DeviceInfo {
        self.driver.info()
    }

    /// Builds a pool for KV cache on this device. Other processes can open it and other cards can
    /// access it, as far as the device supports that. Call `build` to create it.
    pub fn pool(self: &Arc<Self>, len: usize) -> DevicePoolBuilder {
        DevicePoolBuilder::new(self, len)
    }

    /// Adopts memory that the program, or a framework in it, has allocated on this device.
    ///
    /// Errors: `Invalid` for addresses of the host or of other devices; `Unsupported` for managed
    /// memory and for memory from the driver's own pools, which cannot be shared with other
    /// processes and cards. The message says what to do.
    ///
    /// # Safety
    /// The memory stays valid until `owner` is dropped. kvx drops it once no copy and no peer can
    /// access the memory, or never (quarantine).
    pub unsafe fn adopt(
        self: &Arc<Self>,
        address: DevicePtr,
        len: usize,
        owner: impl Any + Send + Sync,
    ) -> Result<Memory> {
        // SAFETY: guaranteed by the caller.
        unsafe { adopt(self, address, len, owner) }
    }

    /// Settles `done` when the work that the program has put on its own stream so far has ended.
    /// kvx's copies do not wait for that work.
    ///
    /// # Safety
    /// The stream belongs to this device, and lives until `done` has settled.
    pub unsafe fn after(&self, stream: StreamHandle, done: Ticket) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.ask(DeviceWork::Behind(stream), std::iter::empty(), done) };
    }

    /// Collects the blocks that the indices select of each grid into the packed bytes at `packed`.
    /// All of them are on this device or accessible from it.
    ///
    /// # Safety
    /// All blocks and the packed bytes are valid memory until `done` has settled.
    pub unsafe fn gather(
        &self,
        packed: DevicePtr,
        grids: &[DeviceGrid],
        indices: &Arc<[u32]>,
        done: Ticket,
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.grids(true, packed, grids, indices, done) };
    }

    /// Spreads the packed bytes at `packed` over blocks: the reverse of [`gather`](Device::gather).
    ///
    /// # Safety
    /// As for [`gather`](Device::gather).
    pub unsafe fn scatter(
        &self,
        packed: DevicePtr,
        grids: &[DeviceGrid],
        indices: &Arc<[u32]>,
        done: Ticket,
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.grids(false, packed, grids, indices, done) };
    }

    /// Copies blocks and swaps two of their dimensions; not in place. Settles with `Unsupported` if
    /// the device has no kernels, and with `Invalid` if the sides have different numbers of blocks.
    ///
    /// # Safety
    /// All blocks are valid memory until `done` has settled, and those that are written do not
    /// overlap others.
    pub unsafe fn permute(
        &self,
        to: &StridedBlocks,
        from: &StridedBlocks,
        swap: Swap,
        done: Ticket,
    ) {
        if to.count() != from.count() {
            return done.settle(Err(ErrorKind::Invalid.because(format!(
                "{} blocks cannot become {}: give as many indices on both sides",
                from.count(),
                to.count()
            ))));
        }
        let work = DeviceWork::Permute { to: to.clone(), from: from.clone(), swap };
        // SAFETY: guaranteed by the caller.
        unsafe { self.ask(work, [to.base.0, from.base.0].into_iter(), done) };
    }

    /// # Safety
    /// As for [`gather`](Device::gather).
    unsafe fn grids(
        &self,
        gather: bool,
        DevicePtr(packed): DevicePtr,
        grids: &[DeviceGrid],
        indices: &Arc<[u32]>,
        done: Ticket,
    ) {
        let work = DeviceWork::Grids {
            gather,
            packed,
            grids: grids.to_vec(),
            indices: Arc::clone(indices),
        };
        let addresses = grids.iter().map(|grid| grid.base).chain([packed]);
        // SAFETY: guaranteed by the caller.
        unsafe { self.ask(work, addresses, done) };
    }

    pub(super) fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// Returns the queue for calls that may block.
    pub(super) fn calls(&self) -> Result<BlockingCalls> {
        self.calls.get(&self.driver)
    }

    pub(super) fn exported(&self) -> &ExportedFiles {
        &self.exported
    }

    /// Passes work to the device's thread. `addresses` has one address in each allocation that may
    /// belong to another process.
    ///
    /// # Safety
    /// All memory that the work names is valid until `done` has settled.
    pub(super) unsafe fn ask(
        &self,
        work: DeviceWork,
        addresses: impl Iterator<Item = u64>,
        done: Ticket,
    ) {
        match self.thread() {
            Ok(thread) => {
                let owners = self.imports.owners(addresses);
                // SAFETY: guaranteed by the caller.
                unsafe { thread.ask(DeviceJob { work, owners, done }) }
            }
            Err(error) => done.settle(Err(error)),
        }
    }

    /// Returns the thread, which is started on first use.
    fn thread(&self) -> Result<&DeviceThread> {
        kvx_core::backend::fork::check()?;
        if let Some(thread) = self.thread.get() {
            return Ok(thread);
        }
        let _one = self.starting.lock();
        if let Some(thread) = self.thread.get() {
            return Ok(thread);
        }
        let thread = DeviceThread::start(Arc::clone(&self.driver), Arc::clone(&self.pinned))?;
        Ok(self.thread.get_or_init(|| thread))
    }

    /// Returns the allocation that contains the start of a range, and whether it contains all of
    /// it.
    fn around(&self, address: u64, len: usize) -> Result<(Range<u64>, bool)> {
        let allocation = self.driver.allocation(address)?;
        let end = address.checked_add(len as u64).filter(|_| len > 0).ok_or_else(|| {
            ErrorKind::Invalid.because(format!("{len} bytes at {address:#x}: share at least one"))
        })?;
        let whole = end <= allocation.end;
        Ok((allocation, whole))
    }
}

/// Memory that a peer's handle names.
enum PeerMemory {
    /// Memory of this process.
    Shared(Memory),
    /// Memory of another process.
    Unopened(OpenRequest),
}

/// Memory of another process to open.
struct OpenRequest {
    owner: DeviceId,
    watch: ProcessWatch,
    handle: IpcHandle,
    named: SharedHandle,
    len: usize,
}

impl OpenRequest {
    /// Checks that the memory lies within `all` bytes of the peer's allocation. Errors:
    /// `Malformed`.
    fn check(handle: &IpcHandle, len: usize, all: u64) -> Result<()> {
        let end = handle.offset.checked_add(len as u64);
        if len > 0 && end.is_some_and(|end| end <= all) {
            return Ok(());
        }
        Err(ErrorKind::Malformed.because(format!(
            "bytes {}..+{len} lie outside the device memory that the peer shares",
            handle.offset
        )))
    }
}

impl Device {
    /// Checks a peer's handle without calling the driver. Errors: those of
    /// [`open`](DeviceAccess::open).
    fn check_handle(
        self: &Arc<Self>,
        owner: DeviceId,
        process: LinkProcess<'_>,
        handle: &IpcHandle,
        len: usize,
    ) -> Result<PeerMemory> {
        let named = SharedHandle::decode(&handle.bytes)?;
        OpenRequest::check(handle, len, named.len)?;
        if named.owner == ProcessId::current() {
            if process.number != std::process::id() {
                return Err(ErrorKind::PermissionDenied
                    .because("a peer in another process shares device memory of this one"));
            }
            let address = named.base.checked_add(handle.offset);
            let shared = address.and_then(|address| exports::find(owner, address, len));
            let shared = shared.ok_or_else(|| {
                ErrorKind::Revoked.because(
                    "the device memory is not shared, or has been freed: fetch the peer's metadata \
                     again",
                )
            })?;
            let access = Arc::clone(self) as Arc<dyn DeviceAccess>;
            let address = shared.address();
            // SAFETY: the range lies in shared memory, which lives as long as `shared`.
            let memory = unsafe { Memory::adopt_device(address, len, owner, access, shared) };
            return Ok(PeerMemory::Shared(memory));
        }
        if !named.owner.is_local()? {
            return Err(ErrorKind::Unsupported.because(
                "sharing device memory requires that both processes are in one PID namespace (one \
                 container or pod, or docker --pid=host): otherwise the transfer goes through the \
                 host (TCP)",
            ));
        }
        let watch = named.owner.watch_peer(process)?;
        let handle = handle.clone();
        Ok(PeerMemory::Unopened(OpenRequest { owner, watch, handle, named, len }))
    }

    /// Opens memory of another process, on the thread for calls that may block.
    fn import(
        self: Arc<Self>,
        driver: &Driver,
        calls: BlockingCalls,
        request: OpenRequest,
    ) -> Result<Memory> {
        let OpenRequest { owner, watch, handle, named, len } = request;
        if owner != driver.info().id && driver.reaches(owner)? == Some(false) {
            return Err(
                driver.lacks("no access to the peer's device: the transfer goes through the host")
            );
        }
        let (address, all, held) =
            self.imports.open(driver, calls, &handle.bytes, &named, watch)?;
        OpenRequest::check(&handle, len, all)?;
        let address = address + handle.offset;
        // SAFETY: the range is inside the opened memory, which stays open until `held` is dropped.
        Ok(unsafe { Memory::adopt_device(address, len, owner, self as _, held) })
    }
}

// SAFETY: only the device's thread copies, and it settles a ticket when an event after its copies
// is reached.
unsafe impl DeviceAccess for Device {
    fn kind(&self) -> MemoryKind {
        self.info().kind
    }

    fn device(&self) -> DeviceId {
        self.info().id
    }

    fn ordinal(&self) -> u32 {
        self.info().ordinal
    }

    fn pinned(&self, len: usize) -> Result<Memory> {
        self.thread()?; // loads the kernels meanwhile
        let pinned = Arc::clone(&self.pinned);
        let calls = self.calls()?;
        calls.clone().wait(move |driver| pin(driver, calls, pinned, len))
    }

    fn pinned_later(self: Arc<Self>, len: usize, done: MemoryReceiver) {
        let calls = match self.thread().and_then(|_| self.calls()) {
            Ok(calls) => calls,
            Err(error) => return done(Err(error)),
        };
        let (pinned, again) = (Arc::clone(&self.pinned), calls.clone());
        calls.later(move |driver| {
            let inside = driver.enter();
            done(inside.and_then(|_inside| pin(driver, again, pinned, len)));
        });
    }

    unsafe fn copy(&self, direction: Direction, pieces: &[Piece], done: Ticket) {
        let (way, lines) = match direction {
            Direction::ToDevice => {
                let hop = |piece: &Piece| Hop {
                    from: piece.host as u64,
                    to: piece.device,
                    len: piece.len,
                };
                (CopyDirection::ToDevice, merge(pieces.iter().map(hop)))
            }
            Direction::ToHost => {
                let hop = |piece: &Piece| Hop {
                    from: piece.device,
                    to: piece.host as u64,
                    len: piece.len,
                };
                (CopyDirection::ToHost, merge(pieces.iter().map(hop)))
            }
        };
        if lines.is_empty() {
            return done.settle(Ok(()));
        }
        let addresses = pieces.iter().map(|piece| piece.device);
        // SAFETY: guaranteed by the caller.
        unsafe { self.ask(DeviceWork::Lines { way, lines }, addresses, done) };
    }

    unsafe fn hop(&self, hops: &[Hop], done: Ticket) {
        let lines = merge(hops.iter().copied());
        if lines.is_empty() {
            return done.settle(Ok(()));
        }
        let addresses = hops.iter().flat_map(|hop| [hop.from, hop.to]);
        // SAFETY: guaranteed by the caller.
        unsafe {
            self.ask(DeviceWork::Lines { way: CopyDirection::Within, lines }, addresses, done)
        };
    }

    fn needs_flush(&self) -> bool {
        self.driver.needs_flush()
    }

    fn flush(&self, done: Ticket) {
        // SAFETY: the work names no memory.
        unsafe { self.ask(DeviceWork::Flush, std::iter::empty(), done) };
    }

    fn share(&self, memory: &Arc<Memory>) -> Result<IpcHandle> {
        let (address, len) = (memory.address(), memory.len());
        let _inside = self.driver.enter()?;
        let (allocation, whole) = self.around(address, len)?;
        if !whole {
            return Err(ErrorKind::Unsupported.because(format!(
                "{len} bytes at {address:#x} are several allocations to {}: share them one by one, \
                 make the pool with Device::pool, or set \
                 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False (PyTorch)",
                self.info().driver
            )));
        }
        let exported = self.exported.lock().get(&allocation.start).map(AsRawFd::as_raw_fd);
        let name =
            match exported {
                Some(file) => AllocationName::Descriptor(file),
                None => AllocationName::Driver(self.driver.share(allocation.start).map_err(
                    |error| match self.driver.classify(address) {
                        Ok(pointer) if pointer.is_pooled => {
                            pool_error(address, self.info().driver).with_source(error)
                        }
                        Ok(pointer) if pointer.is_mapped => {
                            mapped_error(address, self.info().driver).with_source(error)
                        }
                        _ => error.with_kind(ErrorKind::Unsupported),
                    },
                )?),
            };
        let handle = SharedHandle {
            owner: ProcessId::current(),
            base: allocation.start,
            len: allocation.end - allocation.start,
            name,
        };
        exports::add(memory);
        Ok(IpcHandle { bytes: handle.encode(), offset: address - allocation.start })
    }

    fn open(
        self: Arc<Self>,
        owner: DeviceId,
        process: LinkProcess<'_>,
        handle: &IpcHandle,
        len: usize,
    ) -> Result<Memory> {
        match self.check_handle(owner, process, handle, len)? {
            PeerMemory::Shared(memory) => Ok(memory),
            PeerMemory::Unopened(request) => {
                let calls = self.calls()?;
                calls.clone().wait(move |driver| self.import(driver, calls, request))
            }
        }
    }

    fn open_later(
        self: Arc<Self>,
        owner: DeviceId,
        process: LinkProcess<'_>,
        handle: &IpcHandle,
        len: usize,
        done: MemoryReceiver,
    ) {
        let checked = self.check_handle(owner, process, handle, len);
        let (request, calls) = match checked.and_then(|found| Ok((found, self.calls()?))) {
            Ok((PeerMemory::Unopened(request), calls)) => (request, calls),
            Ok((PeerMemory::Shared(memory), _)) => return done(Ok(memory)),
            Err(error) => return done(Err(error)),
        };
        let again = calls.clone();
        calls.later(move |driver| {
            let inside = driver.enter();
            done(inside.and_then(|_inside| self.import(driver, again, request)));
        });
    }

    fn after_closes(&self, done: Ticket) {
        match self.calls.started() {
            Some(calls) => calls.later(move |_| done.settle(Ok(()))),
            None => done.settle(Ok(())), // nothing was opened
        }
    }

    fn dma_buf(&self, address: u64, len: usize) -> Result<DmaBuf> {
        let _inside = self.driver.enter()?;
        let (allocation, whole) = self.around(address, len)?;
        let page = rustix::param::page_size() as u64;
        let start = address - address % page;
        let end = (address + len as u64).next_multiple_of(page);
        // Memory with several consecutive mappings ends after its first mapping: the driver decides
        // whether that works.
        if start < allocation.start || (whole && end > allocation.end) {
            return Err(ErrorKind::Unsupported.because(format!(
                "{len} bytes at {address:#x} share a page with other memory: a descriptor contains \
                 whole pages of {page} bytes; make the pool with Device::pool"
            )));
        }
        let (file, offset) = self.driver.dma_buf(start..end)?;
        Ok(DmaBuf { file, offset: offset + (address - start) })
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceInfo { driver, name, bus, ordinal, .. } = self.info();
        write!(f, "Device({driver} {ordinal}: {name} at {bus})")
    }
}
