//! A device for tests: host memory behind addresses that the host cannot access, copied by a
//! separate thread.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvx_core::backend::sync::{Condvar, Mutex, MutexGuard};
use kvx_core::backend::{Direction, Hop, IpcHandle, LinkProcess, MemoryReceiver, Piece, Ticket};
use kvx_core::{DeviceAccess, DeviceId, ErrorKind, Memory, MemoryKind, Result};

use super::access::Device;
use super::allocation::{Allocation, FAR};

/// A device made of host memory, which takes the place of a GPU. Its addresses are not pointers,
/// its copies are asynchronous, and other processes can open what it shares. A test can choose the
/// outcomes of the next copies. Devices of one kind are the same device in all processes, unless
/// they are [`numbered`](TestDevice::numbered).
///
/// ```
/// use kvx_testkit::TestDevice;
/// let device = TestDevice::new(kvx_core::MemoryKind::Cuda);
/// let memory = device.allocate(4096);
/// memory.copy_in(100, b"hello")?;
/// let mut back = [0; 5];
/// memory.copy_out(100, &mut back)?;
/// assert_eq!(&back, b"hello");
/// # Ok::<(), kvx_core::Error>(())
/// ```
pub struct TestDevice {
    kind: MemoryKind,
    id: DeviceId,
    shared: Arc<Shared>,
}

/// The outcome of a copy or a hop; see [`TestDevice::next`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyOutcome {
    /// The bytes are copied.
    Copy,
    /// The bytes are copied after this time; later copies wait.
    CopyAfter(Duration),
    /// The bytes are not copied, and the ticket settles with an error.
    Fail,
    /// The bytes are copied, and the ticket is dropped without being settled.
    Forget,
}

/// The order in which waiting copies are performed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyOrder {
    /// In the order of their requests.
    Oldest,
    /// The newest of the waiting copies first.
    Newest,
    /// A random one of the waiting copies. The order is the same for the same seed, if equally many
    /// wait each time.
    Shuffled(u64),
}

struct Shared {
    state: Mutex<DeviceState>,
    changed: Condvar,
}

struct DeviceState {
    /// Live allocations by device address.
    allocations: BTreeMap<u64, Allocation>,
    waiting: VecDeque<PendingCopy>,
    next: VecDeque<CopyOutcome>,
    order: CopyOrder,
    held: bool,
    ended: bool,
    /// The reasons why the device shares nothing, and why it opens nothing.
    refusal: [Option<&'static str>; 2],
    /// The openings that are held back, if they are.
    held_openings: Option<Vec<MemoryReceiver>>,
    counters: CopyCounters,
}

/// Counters of the copies of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyCounters {
    /// Copies performed, including hops.
    pub copies: u64,
    /// Hops performed: copies from device to device.
    pub hops: u64,
    /// The maximum number of copies that waited at one time.
    pub most_waiting: usize,
    /// Copies of memory that was never allocated or is freed, which are bugs of the caller.
    pub faults: u64,
}

struct PendingCopy {
    work: CopyWork,
    done: Ticket,
    outcome: CopyOutcome,
}

enum CopyWork {
    Pieces(Direction, Vec<Piece>),
    Hops(Vec<Hop>),
}

impl TestDevice {
    /// Creates a device with memory of `kind`: [`MemoryKind::Cuda`] or [`MemoryKind::Rocm`].
    ///
    /// # Panics
    /// For host memory, and if no thread can be started.
    pub fn new(kind: MemoryKind) -> Arc<Self> {
        TestDevice::numbered(kind, 0)
    }

    /// Creates a device with a number. Devices with different numbers do not reach each other.
    ///
    /// # Panics
    /// As [`new`](TestDevice::new).
    pub fn numbered(kind: MemoryKind, number: u8) -> Arc<Self> {
        assert!(!kind.is_host(), "a device has no {kind} memory");
        let shared = Arc::new(Shared {
            state: Mutex::new(DeviceState {
                allocations: BTreeMap::new(),
                waiting: VecDeque::new(),
                next: VecDeque::new(),
                order: CopyOrder::Oldest,
                held: false,
                ended: false,
                refusal: [None, None],
                held_openings: None,
                counters: CopyCounters::default(),
            }),
            changed: Condvar::new(),
        });
        let ours = Arc::clone(&shared);
        let started =
            std::thread::Builder::new().name("kvx-test-device".into()).spawn(move || ours.run());
        started.expect("a test can start a thread");
        let mut id = [kind as u8 + 1; 16];
        id[15] = number;
        Arc::new(TestDevice { kind, id: DeviceId(id), shared })
    }

    /// Allocates zeroed memory on this device.
    ///
    /// # Panics
    /// If there is no memory left.
    pub fn allocate(self: &Arc<Self>, len: usize) -> Memory {
        let allocation = Allocation::new(len).expect("the machine has enough memory");
        let base = allocation.address();
        self.adopt(allocation, base, len, self.id)
    }

    fn adopt(
        self: &Arc<Self>,
        allocation: Allocation,
        address: u64,
        len: usize,
        device: DeviceId,
    ) -> Memory {
        let base = allocation.address();
        self.shared.lock().allocations.insert(base, allocation);
        let owner = AllocationGuard { base, device: Arc::downgrade(&self.shared) };
        // SAFETY: the device copies at these addresses until the owner is dropped, and nothing else
        // knows the bytes.
        unsafe {
            Memory::adopt_device(
                address,
                len,
                device,
                Arc::clone(self) as Arc<dyn DeviceAccess>,
                owner,
            )
        }
    }

    /// Refuses to share anything with other processes from now on, for this reason.
    pub fn refuse_to_share(&self, why: &'static str) {
        self.shared.lock().refusal[0] = Some(why);
    }

    /// Refuses to open anything of other processes from now on, for this reason.
    pub fn refuse_to_open(&self, why: &'static str) {
        self.shared.lock().refusal[1] = Some(why);
    }

    /// Holds back openings by [`open_later`](DeviceAccess::open_later) from now on, as a driver does
    /// during a long kernel. Returns those that were held back so far.
    pub fn hold_openings(&self) -> Vec<MemoryReceiver> {
        self.shared.lock().held_openings.replace(Vec::new()).unwrap_or_default()
    }

    /// Returns the number of openings that are held back.
    pub fn held_openings(&self) -> usize {
        self.shared.lock().held_openings.as_ref().map_or(0, Vec::len)
    }

    /// Returns the number of its allocations, including those that it opened from other processes.
    pub fn allocations(&self) -> usize {
        self.shared.lock().allocations.len()
    }

    /// Sets the outcomes of the next copies, in order. Later ones are performed.
    pub fn next(&self, outcomes: impl IntoIterator<Item = CopyOutcome>) {
        self.shared.lock().next.extend(outcomes);
    }

    /// Sets the order in which waiting copies are performed.
    pub fn order(&self, order: CopyOrder) {
        self.shared.lock().order = order;
    }

    /// Holds all copies back until [`release`](TestDevice::release).
    pub fn hold(&self) {
        self.shared.lock().held = true;
    }

    /// Performs the copies that were held back.
    pub fn release(&self) {
        self.shared.lock().held = false;
        self.shared.changed.notify_all();
    }

    /// Returns the number of copies that wait.
    pub fn waiting(&self) -> usize {
        self.shared.lock().waiting.len()
    }

    /// Returns the counters of its copies.
    pub fn counters(&self) -> CopyCounters {
        self.shared.lock().counters
    }
}

// SAFETY: only `PendingCopy::perform` accesses the pieces, before the copy's ticket settles or is
// dropped.
unsafe impl DeviceAccess for TestDevice {
    fn kind(&self) -> MemoryKind {
        self.kind
    }

    fn device(&self) -> DeviceId {
        self.id
    }

    fn ordinal(&self) -> u32 {
        0
    }

    fn pinned(&self, len: usize) -> Result<Memory> {
        Ok(Memory::owned(vec![0; len]))
    }

    unsafe fn copy(&self, direction: Direction, pieces: &[Piece], done: Ticket) {
        self.ask(CopyWork::Pieces(direction, pieces.to_vec()), done);
    }

    unsafe fn hop(&self, hops: &[Hop], done: Ticket) {
        self.ask(CopyWork::Hops(hops.to_vec()), done);
    }

    fn share(&self, memory: &Arc<Memory>) -> Result<IpcHandle> {
        let (address, len) = (memory.address(), memory.len());
        let state = self.shared.lock();
        if let Some(why) = state.refusal[0] {
            return Err(ErrorKind::Unsupported.because(why));
        }
        let (base, allocation) = state.find(address, len)?;
        allocation.share(address - base)
    }

    fn open(
        self: Arc<Self>,
        owner: DeviceId,
        process: LinkProcess<'_>,
        handle: &IpcHandle,
        len: usize,
    ) -> Result<Memory> {
        if let Some(why) = self.shared.lock().refusal[1] {
            return Err(ErrorKind::Unsupported.because(why));
        }
        if owner != self.id {
            let why = format!(
                "test device {:?} does not reach {owner:?}: they have different numbers",
                self.id
            );
            return Err(ErrorKind::Unsupported.because(why));
        }
        let allocation = Allocation::open(process, handle)?;
        if handle.offset.checked_add(len as u64).is_none_or(|end| end > allocation.len() as u64) {
            return Err(ErrorKind::Malformed
                .because("a handle of the test device names more bytes than the allocation has"));
        }
        let address = allocation.address() + handle.offset;
        Ok(self.adopt(allocation, address, len, owner))
    }

    fn open_later(
        self: Arc<Self>,
        owner: DeviceId,
        process: LinkProcess<'_>,
        handle: &IpcHandle,
        len: usize,
        done: MemoryReceiver,
    ) {
        if let Some(held) = &mut self.shared.lock().held_openings {
            return held.push(done);
        }
        done(self.open(owner, process, handle, len));
    }
}

impl TestDevice {
    fn ask(&self, work: CopyWork, done: Ticket) {
        let mut state = self.shared.lock();
        let outcome = state.next.pop_front().unwrap_or(CopyOutcome::Copy);
        state.waiting.push_back(PendingCopy { work, done, outcome });
        state.counters.most_waiting = state.counters.most_waiting.max(state.waiting.len());
        drop(state);
        self.shared.changed.notify_all();
    }
}

impl Device for Arc<TestDevice> {
    fn access(&self) -> Arc<dyn DeviceAccess> {
        Arc::clone(self) as _
    }

    fn allocate(&self, len: usize) -> Result<Memory> {
        Ok(TestDevice::allocate(self, len))
    }
}

impl Drop for TestDevice {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.ended = true;
        state.held = false;
        drop(state);
        self.shared.changed.notify_all();
    }
}

impl fmt::Debug for TestDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TestDevice({}, {:?})", self.kind, self.counters())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, DeviceState> {
        self.state.lock()
    }

    /// Performs copies until the device is dropped and no copy waits.
    fn run(&self) {
        let mut state = self.lock();
        loop {
            if state.held || state.waiting.is_empty() {
                if state.ended && state.waiting.is_empty() {
                    return;
                }
                state = self.changed.wait_until(state, None);
                continue;
            }
            let waiting = state.waiting.len();
            let at = state.order.pick(waiting);
            let Some(copy) = state.waiting.remove(at) else { continue };
            if let CopyOutcome::CopyAfter(time) = copy.outcome {
                drop(state);
                std::thread::sleep(time); // the test requested a slow device
                state = self.lock();
            }
            state.counters.copies += 1;
            state.counters.hops += u64::from(matches!(copy.work, CopyWork::Hops(_)));
            // Under the lock, so that a concurrent free waits.
            let result = copy.perform(&state);
            if result.as_ref().is_err_and(|error| error.kind() == ErrorKind::OutOfBounds) {
                state.counters.faults += 1;
            }
            drop(state);
            match copy.outcome {
                CopyOutcome::Forget => drop(copy.done),
                _ => copy.done.settle(result),
            }
            state = self.lock();
        }
    }
}

impl CopyOrder {
    fn pick(&mut self, waiting: usize) -> usize {
        match self {
            CopyOrder::Oldest => 0,
            CopyOrder::Newest => waiting - 1,
            CopyOrder::Shuffled(seed) => {
                *seed = seed
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (*seed >> 33) as usize % waiting
            }
        }
    }
}

impl DeviceState {
    /// Returns the allocation that contains these bytes.
    ///
    /// # Errors
    /// `OutOfBounds` if there is none.
    fn find(&self, address: u64, len: usize) -> Result<(u64, &Allocation)> {
        let found = self.allocations.range(..=address).next_back().filter(|(base, allocation)| {
            (address - **base)
                .checked_add(len as u64)
                .is_some_and(|end| end <= allocation.len() as u64)
        });
        found.map(|(base, allocation)| (*base, allocation)).ok_or_else(|| {
            ErrorKind::OutOfBounds
                .because(format!("{len} bytes at {address:#x} are not memory of the test device"))
        })
    }
}

impl PendingCopy {
    fn perform(&self, state: &DeviceState) -> Result<()> {
        if self.outcome == CopyOutcome::Fail {
            return Err(
                ErrorKind::Native.because("the test device fails this copy: the test requested it")
            );
        }
        match &self.work {
            CopyWork::Pieces(direction, pieces) => {
                pieces
                    .iter()
                    .try_for_each(|piece| state.find(piece.device, piece.len).map(|_| ()))?;
                for piece in pieces {
                    let device = (piece.device - FAR) as *mut u8;
                    let (from, to) = match direction {
                        Direction::ToDevice => (piece.host.cast_const(), device),
                        Direction::ToHost => (device.cast_const(), piece.host),
                    };
                    // SAFETY: `find` has shown that the device side lies in an allocation, which
                    // cannot be freed under the lock that the caller holds. The host side is valid
                    // until the ticket settles, by the contract of `DeviceAccess::copy`. The two
                    // are different allocations, so they do not overlap.
                    unsafe { std::ptr::copy_nonoverlapping(from, to, piece.len) };
                }
            }
            CopyWork::Hops(hops) => {
                for hop in hops {
                    state.find(hop.from, hop.len)?;
                    state.find(hop.to, hop.len)?;
                }
                for hop in hops {
                    let (from, to) = ((hop.from - FAR) as *const u8, (hop.to - FAR) as *mut u8);
                    // SAFETY: `find` has shown that both sides lie in allocations, which cannot be
                    // freed under the lock that the caller holds. They may overlap.
                    unsafe { std::ptr::copy(from, to, hop.len) };
                }
            }
        }
        Ok(())
    }
}

/// Owns an allocation until it is dropped.
struct AllocationGuard {
    base: u64,
    device: Weak<Shared>,
}

impl Drop for AllocationGuard {
    fn drop(&mut self) {
        if let Some(device) = self.device.upgrade() {
            // Under the lock, so that no copy is in progress.
            device.lock().allocations.remove(&self.base);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn addresses_of_a_device_are_no_pointers() {
        let device = TestDevice::new(MemoryKind::Rocm);
        let memory = device.allocate(64);
        assert_eq!(memory.kind(), MemoryKind::Rocm);
        let (_reader, writer) = std::io::pipe().unwrap();
        // SAFETY: no memory is accessed, because the system call checks the address and rejects it.
        let wrote = unsafe { libc::write(writer.as_raw_fd(), memory.as_ptr().cast(), 1) };
        assert_eq!(
            (wrote, std::io::Error::last_os_error().raw_os_error()),
            (-1, Some(libc::EFAULT))
        );
    }

    #[test]
    fn copies_to_freed_memory_are_faults() {
        let device = TestDevice::new(MemoryKind::Cuda);
        let address = device.allocate(64).address();
        let mut byte = 0u8;
        let piece = Piece { device: address, host: &raw mut byte, len: 1 };
        let (done, ticket) = kvx_core::Completion::with_ticket();
        // SAFETY: `byte` outlives the wait below; the device rejects its own side.
        unsafe { device.copy(Direction::ToHost, &[piece], ticket) };
        assert_eq!(
            done.wait_blocking(Duration::from_secs(10)).unwrap_err().kind(),
            ErrorKind::OutOfBounds
        );
        assert_eq!(device.counters().faults, 1);
    }

    #[test]
    fn what_is_shared_is_opened_and_seen_from_both_sides() {
        let (ours, theirs) = (TestDevice::new(MemoryKind::Cuda), TestDevice::new(MemoryKind::Cuda));
        let memory = Arc::new(ours.allocate(8192));
        let whole = ours.share(&memory).unwrap();
        let handle = IpcHandle { offset: whole.offset + 4096, ..whole };
        let id = ours.device();
        let this = LinkProcess { number: std::process::id(), pidfd: None };
        let opened = theirs.clone().open(id, this, &handle, 100).unwrap();
        memory.copy_in(4096, b"shared").unwrap();
        let local = theirs.allocate(6);
        let (done, ticket) = kvx_core::Completion::with_ticket();
        let hop = Hop { from: opened.address(), to: local.address(), len: 6 };
        // SAFETY: both sides outlive the wait below.
        unsafe { theirs.hop(&[hop], ticket) };
        done.wait_blocking(Duration::from_secs(10)).unwrap();
        let mut seen = [0; 6];
        local.copy_out(0, &mut seen).unwrap();
        assert_eq!((&seen, theirs.allocations()), (b"shared", 2));
        drop(opened);
        assert_eq!(theirs.allocations(), 1);

        let refused = |device: &Arc<TestDevice>, handle: &IpcHandle, len| {
            device.clone().open(id, this, handle, len).map(drop).unwrap_err().kind()
        };
        let other = LinkProcess { number: 1, ..this };
        let stolen = theirs.clone().open(id, other, &handle, 1).map(drop);
        assert_eq!(stolen.unwrap_err().kind(), ErrorKind::PermissionDenied);
        assert_eq!(
            refused(&TestDevice::numbered(MemoryKind::Cuda, 1), &handle, 1),
            ErrorKind::Unsupported
        );
        assert_eq!(refused(&theirs, &handle, 4097), ErrorKind::Malformed);
        assert_eq!(
            refused(&theirs, &IpcHandle { bytes: vec![1], offset: 0 }, 1),
            ErrorKind::Malformed
        );
        drop(memory);
        assert_eq!(refused(&theirs, &handle, 1), ErrorKind::PeerLost);
        theirs.refuse_to_open("no IPC here");
        assert_eq!(refused(&theirs, &handle, 1), ErrorKind::Unsupported);
        let more = Arc::new(ours.allocate(1));
        ours.refuse_to_share("pool memory");
        assert_eq!(ours.share(&more).unwrap_err().sentence(), "pool memory");
    }

    #[test]
    fn a_device_fails_and_forgets_the_copies_that_a_test_selects() {
        let device = TestDevice::new(MemoryKind::Cuda);
        let memory = device.allocate(64);
        device.next([CopyOutcome::Fail, CopyOutcome::Forget, CopyOutcome::Copy]);
        assert_eq!(memory.copy_in(0, b"x").unwrap_err().kind(), ErrorKind::Native);
        assert_eq!(memory.copy_in(0, b"x").unwrap_err().kind(), ErrorKind::Forgotten);
        memory.copy_in(0, b"x").unwrap();
    }
}
