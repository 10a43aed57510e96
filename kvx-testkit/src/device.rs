//! A plain device for tests: host memory behind addresses that the host cannot reach, copied by a thread of its own.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use kvx_core::memory::{Direction, Piece};
use kvx_core::{DeviceAccess, DeviceId, Error, Kind, Memory, MemoryKind, Result, Ticket};

/// What is added to the host address of device memory. No program has memory there, so code that takes a device
/// address for a pointer faults at once, and a system call given one says `EFAULT`.
const FAR: u64 = 1 << 52;

/// A device made of host memory. It stands where a GPU would: its addresses are no pointers, its copies are
/// asynchronous, and it does what a test asks of the next copies.
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

/// What becomes of a copy; see [`TestDevice::next`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// It is done.
    Copy,
    /// It is done after this time; later copies wait.
    CopyAfter(Duration),
    /// Nothing is copied, and the ticket settles with an error.
    Fail,
    /// It is done, and the ticket is dropped without being settled.
    Forget,
}

/// The order in which waiting copies are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As they came.
    Oldest,
    /// The newest of those that wait first.
    Newest,
    /// Any of those that wait: the same for the same seed, if as many wait each time.
    Shuffled(u64),
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Live allocations: device address and length.
    allocations: BTreeMap<u64, usize>,
    waiting: VecDeque<Copy>,
    next: VecDeque<Act>,
    order: Order,
    held: bool,
    ended: bool,
    count: Count,
}

/// What a device has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Copies done.
    pub copies: u64,
    /// The most that waited at one time.
    pub most_waiting: usize,
    /// Copies that named memory which was never allocated or is freed: a bug of whoever asked for them.
    pub faults: u64,
}

struct Copy {
    direction: Direction,
    pieces: Vec<Piece>,
    done: Ticket,
    act: Act,
}

impl TestDevice {
    /// A device whose memory is of `kind`: [`MemoryKind::Cuda`] or [`MemoryKind::Rocm`].
    ///
    /// # Panics
    /// For host memory, and when no thread can be started.
    pub fn new(kind: MemoryKind) -> Arc<Self> {
        assert!(!kind.is_host(), "a device has no {kind} memory");
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                allocations: BTreeMap::new(),
                waiting: VecDeque::new(),
                next: VecDeque::new(),
                order: Order::Oldest,
                held: false,
                ended: false,
                count: Count::default(),
            }),
            changed: Condvar::new(),
        });
        let ours = Arc::clone(&shared);
        let started = std::thread::Builder::new().name("kvx-test-device".into()).spawn(move || ours.run());
        started.expect("a test can start a thread");
        Arc::new(TestDevice { kind, id: DeviceId([kind as u8 + 1; 16]), shared })
    }

    /// Memory on this device, zeroed.
    pub fn allocate(self: &Arc<Self>, len: usize) -> Memory {
        let bytes = Memory::owned(vec![0; len]);
        let base = bytes.address() + FAR;
        self.shared.lock().allocations.insert(base, len);
        let owner = Allocation { base, device: Arc::downgrade(&self.shared), bytes: Some(bytes) };
        // SAFETY: the device copies at these addresses until the owner is dropped, and nobody else knows the bytes.
        unsafe { Memory::adopt_device(base, len, self.id, Arc::clone(self) as Arc<dyn DeviceAccess>, owner) }
    }

    /// Says what becomes of the next copies that are asked for, in order; those after them are done.
    pub fn next(&self, acts: impl IntoIterator<Item = Act>) {
        self.shared.lock().next.extend(acts);
    }

    /// Says in which order waiting copies are done.
    pub fn order(&self, order: Order) {
        self.shared.lock().order = order;
    }

    /// Holds all copies back until [`release`](TestDevice::release).
    pub fn hold(&self) {
        self.shared.lock().held = true;
    }

    /// Does what was held back.
    pub fn release(&self) {
        self.shared.lock().held = false;
        self.shared.changed.notify_all();
    }

    /// How many copies wait.
    pub fn waiting(&self) -> usize {
        self.shared.lock().waiting.len()
    }

    /// What it has seen.
    pub fn count(&self) -> Count {
        self.shared.lock().count
    }
}

// SAFETY: pieces are touched only by `Copy::perform`, before the copy's ticket settles or is dropped.
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
        let mut state = self.shared.lock();
        let act = state.next.pop_front().unwrap_or(Act::Copy);
        state.waiting.push_back(Copy { direction, pieces: pieces.to_vec(), done, act });
        state.count.most_waiting = state.count.most_waiting.max(state.waiting.len());
        drop(state);
        self.shared.changed.notify_all();
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
        write!(f, "TestDevice({}, {:?})", self.kind, self.count())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does copies until the device is dropped and none waits.
    fn run(&self) {
        let mut state = self.lock();
        loop {
            if state.held || state.waiting.is_empty() {
                if state.ended && state.waiting.is_empty() {
                    return;
                }
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let waiting = state.waiting.len();
            let at = state.order.pick(waiting);
            let Some(copy) = state.waiting.remove(at) else { continue };
            if let Act::CopyAfter(time) = copy.act {
                drop(state);
                std::thread::sleep(time); // this is the slow device that the test asked for
                state = self.lock();
            }
            state.count.copies += 1;
            // Under the lock: memory that is freed meanwhile waits.
            let result = copy.perform(&state.allocations);
            if result.as_ref().is_err_and(|error| error.kind() == Kind::OutOfBounds) {
                state.count.faults += 1;
            }
            drop(state);
            match copy.act {
                Act::Forget => drop(copy.done),
                _ => copy.done.settle(result),
            }
            state = self.lock();
        }
    }
}

impl Order {
    fn pick(&mut self, waiting: usize) -> usize {
        match self {
            Order::Oldest => 0,
            Order::Newest => waiting - 1,
            Order::Shuffled(seed) => {
                *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (*seed >> 33) as usize % waiting
            }
        }
    }
}

impl Copy {
    fn perform(&self, allocations: &BTreeMap<u64, usize>) -> Result<()> {
        if self.act == Act::Fail {
            return Err(Error::new(Kind::Native, "the test device fails this copy: the test asked for it"));
        }
        let lies_within = |piece: &Piece| {
            let (base, len) = allocations.range(..=piece.device).next_back()?;
            (piece.device - base).checked_add(piece.len as u64).filter(|end| *end <= *len as u64)
        };
        if let Some(stray) = self.pieces.iter().find(|piece| lies_within(piece).is_none()) {
            return Err(Error::new(
                Kind::OutOfBounds,
                format!("{} bytes at {:#x} are no memory of the test device", stray.len, stray.device),
            ));
        }
        for piece in &self.pieces {
            let device = (piece.device - FAR) as *mut u8;
            let (from, to) = match self.direction {
                Direction::ToDevice => (piece.host.cast_const(), device),
                Direction::ToHost => (device.cast_const(), piece.host),
            };
            // SAFETY: the device side lies in an allocation, which cannot be freed under the lock that the caller
            // holds; the host side is valid until the ticket settles, by the contract of `DeviceAccess::copy`; the two
            // are different allocations.
            unsafe { std::ptr::copy_nonoverlapping(from, to, piece.len) };
        }
        Ok(())
    }
}

/// Frees device memory.
struct Allocation {
    base: u64,
    device: Weak<Shared>,
    bytes: Option<Memory>,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        match self.device.upgrade() {
            Some(device) => {
                let mut state = device.lock();
                state.allocations.remove(&self.base);
                self.bytes = None; // under the lock, so that no copy is in the middle of it
            }
            None => self.bytes = None,
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
        // SAFETY: no memory is touched: the system call checks the address and refuses it.
        let wrote = unsafe { libc::write(writer.as_raw_fd(), memory.as_ptr().cast(), 1) };
        assert_eq!((wrote, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EFAULT)));
    }

    #[test]
    fn copies_to_freed_memory_are_faults() {
        let device = TestDevice::new(MemoryKind::Cuda);
        let address = device.allocate(64).address();
        let mut byte = 0u8;
        let piece = Piece { device: address, host: &raw mut byte, len: 1 };
        let (done, ticket) = kvx_core::Completion::with_ticket();
        // SAFETY: `byte` outlives the wait below; the device side is refused.
        unsafe { device.copy(Direction::ToHost, &[piece], ticket) };
        assert_eq!(done.wait(Duration::from_secs(10)).unwrap_err().kind(), Kind::OutOfBounds);
        assert_eq!(device.count().faults, 1);
    }

    #[test]
    fn a_device_fails_and_forgets_what_it_is_told_to() {
        let device = TestDevice::new(MemoryKind::Cuda);
        let memory = device.allocate(64);
        device.next([Act::Fail, Act::Forget, Act::Copy]);
        assert_eq!(memory.copy_in(0, b"x").unwrap_err().kind(), Kind::Native);
        assert_eq!(memory.copy_in(0, b"x").unwrap_err().kind(), Kind::Forgotten);
        memory.copy_in(0, b"x").unwrap();
    }
}
