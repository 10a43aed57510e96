//! Memory of a device: pools, adopted pointers, pinned host memory; and what gives each back.

use std::any::Any;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::device::Device;
use super::driver::{Driver, Inside, Mapped, PointerPlace};
use super::thread::Work;
use kvx_core::sync::Mutex;
use kvx_core::{Completion, Deadline, DeviceAccess, Error, ErrorKind, Memory, Result, fork};

/// An address on a device: a `CUdeviceptr` or a `hipDeviceptr_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePtr(pub u64);

/// Pools are as long as a multiple of this, and so begin at one: drivers give out smaller memory in parts of such a
/// page, and of a part no other card can be given a descriptor.
const PAGE: usize = 2 << 20;

/// Builds a pool on a device. See [`Device::pool`].
#[derive(Clone, Debug)]
#[must_use]
pub struct DevicePoolBuilder {
    device: Arc<Device>,
    len: usize,
    virtual_memory: bool,
}

impl DevicePoolBuilder {
    pub(super) fn new(device: &Arc<Device>, len: usize) -> Self {
        DevicePoolBuilder { device: Arc::clone(device), len, virtual_memory: false }
    }

    /// Makes it of the driver's virtual memory management, not of a plain allocation: for programs that map the same
    /// memory elsewhere. Other processes open it through a descriptor, which the kernel must let them take (ptrace
    /// scope).
    pub fn virtual_memory(mut self) -> Self {
        self.virtual_memory = true;
        self
    }

    /// Makes the pool, filled with zeros: new memory may hold what another part of the process has freed. Errors:
    /// `Invalid` for zero bytes, `Exhausted` when the device has not enough memory, `Unsupported` for virtual memory
    /// that it does not have.
    pub fn build(self) -> Result<Memory> {
        let DevicePoolBuilder { device, len, virtual_memory } = self;
        let whole =
            len.checked_next_multiple_of(PAGE).filter(|whole| *whole > 0).ok_or_else(|| {
                Error::new(
                    ErrorKind::Invalid,
                    format!("a pool of {len} bytes: ask for at least one, and for fewer"),
                )
            })?;
        let allocation = {
            let driver = device.driver();
            let inside = Inside::of(&**driver)?;
            let held = if virtual_memory {
                let mapped = driver.map(whole)?;
                let allocation = Allocation::new(&device, Held::Mapped(mapped));
                let file = driver.export(mapped)?;
                device.exported().lock().insert(mapped.address, file);
                allocation
            } else {
                Allocation::new(&device, Held::Allocated(driver.allocate(whole)?))
            };
            drop(inside);
            held
        };
        let address = allocation.address();
        let (filled, ticket) = Completion::with_ticket();
        // SAFETY: the allocation is held until the completion ends, and if nobody knows whether it has, for ever.
        unsafe { device.ask(Work::Zero { address, len: whole }, std::iter::empty(), ticket) };
        if let Err(error) = filled.wait(Deadline::default_for_transfers()) {
            if matches!(error.kind(), ErrorKind::Forgotten | ErrorKind::TimedOut) {
                std::mem::forget(allocation);
            }
            return Err(error);
        }
        let id = device.driver().about().id;
        // SAFETY: the memory is the allocation's, which frees it when it is dropped.
        Ok(unsafe {
            Memory::adopt_device(address, len, id, device as Arc<dyn DeviceAccess>, allocation)
        })
    }
}

/// A device's memory; gives it back when dropped.
struct Allocation {
    device: Arc<Device>,
    held: Held,
    forks: u64,
}

enum Held {
    Allocated(u64),
    Mapped(Mapped),
}

impl Allocation {
    fn new(device: &Arc<Device>, held: Held) -> Self {
        Allocation { device: Arc::clone(device), held, forks: fork::count() }
    }

    fn address(&self) -> u64 {
        match &self.held {
            Held::Allocated(address) => *address,
            Held::Mapped(mapped) => mapped.address,
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if fork::count() != self.forks {
            return; // a child after fork has no device
        }
        let driver = self.device.driver();
        let freed = Inside::of(&**driver).and_then(|_inside| match &self.held {
            // SAFETY: it came from `allocate`, and `Memory` is gone, so nobody uses it any more.
            Held::Allocated(address) => unsafe { driver.free(*address) },
            Held::Mapped(mapped) => {
                self.device.exported().lock().remove(&mapped.address);
                // SAFETY: it came from `map`; as above.
                unsafe { driver.unmap(*mapped) }
            }
        });
        if let Err(error) = freed {
            tracing::warn!(%error, "memory of a device was not freed");
        }
    }
}

/// Descriptors of virtual memory that other processes may take, by its address.
pub(super) type Exported = Mutex<BTreeMap<u64, OwnedFd>>;

/// The host memory that a device has pinned for kvx.
#[derive(Default)]
pub(super) struct Pinned(Mutex<BTreeMap<u64, usize>>);

impl Pinned {
    /// Whether all of these ranges lie in it.
    pub(super) fn has_all(&self, mut ranges: impl Iterator<Item = (u64, usize)>) -> bool {
        let pinned = self.0.lock();
        let mut last = 0..0;
        ranges.all(|(address, len)| {
            let Some(end) = address.checked_add(len as u64) else { return false };
            if !last.contains(&address) {
                let Some((base, len)) = pinned.range(..=address).next_back() else { return false };
                last = *base..*base + *len as u64;
            }
            last.contains(&address) && end <= last.end
        })
    }
}

/// Pinned host memory; unpinned when dropped.
struct PinnedBuffer {
    base: u64,
    driver: Arc<dyn Driver>,
    pinned: Arc<Pinned>,
    forks: u64,
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if fork::count() != self.forks {
            return;
        }
        self.pinned.0.lock().remove(&self.base);
        let unpinned = Inside::of(&*self.driver).and_then(|_inside| {
            // SAFETY: it came from `pin`, and `Memory` is gone, so nobody uses it any more.
            unsafe { self.driver.unpin(self.base as *mut u8) }
        });
        if let Err(error) = unpinned {
            tracing::warn!(%error, "pinned memory was not freed");
        }
    }
}

/// Host memory, pinned and zeroed.
pub(super) fn pin(driver: &Arc<dyn Driver>, pinned: &Arc<Pinned>, len: usize) -> Result<Memory> {
    if len == 0 {
        return Err(Error::new(
            ErrorKind::Invalid,
            "0 bytes of pinned memory: ask for at least one",
        ));
    }
    let inside = Inside::of(&**driver)?;
    let base = driver.pin(len)?;
    drop(inside);
    // SAFETY: new memory of that length, which nobody else has seen. It may hold what another process left.
    unsafe { base.write_bytes(0, len) };
    pinned.0.lock().insert(base as u64, len);
    let owner = PinnedBuffer {
        base: base as u64,
        driver: Arc::clone(driver),
        pinned: Arc::clone(pinned),
        forks: fork::count(),
    };
    // SAFETY: the memory is the owner's, and stays pinned until that is dropped.
    Ok(unsafe { Memory::adopt_pinned(base, len, owner) })
}

/// Looks at a pointer of the program's, and makes it memory of the device.
///
/// # Safety
/// As [`Memory::adopt_device`].
pub(super) unsafe fn adopt(
    device: &Arc<Device>,
    DevicePtr(address): DevicePtr,
    len: usize,
    owner: impl Any + Send + Sync,
) -> Result<Memory> {
    let driver = device.driver();
    let about = driver.about();
    let invalid = |sentence: String| Err(Error::new(ErrorKind::Invalid, sentence));
    let Some(last) = (len as u64).checked_sub(1).and_then(|more| address.checked_add(more)) else {
        return invalid(format!(
            "{len} bytes at {address:#x}: adopt at least one, inside the address space"
        ));
    };
    let inside = Inside::of(&**driver)?;
    // Both ends: memory of several mappings in a row is one to its program and many to the driver.
    for end in [address, last] {
        let pointer = driver.classify(end)?;
        match pointer.place {
            PointerPlace::Device => {}
            PointerPlace::Unknown => {
                return invalid(format!(
                    "{end:#x} is no address that {} knows: memory of the host is adopted with Memory::adopt, and a \
                     range must end where its allocation does",
                    about.driver
                ));
            }
            PointerPlace::Pinned => {
                return invalid(format!(
                    "{end:#x} is pinned memory of the host: adopt it with Memory::adopt_pinned"
                ));
            }
            PointerPlace::Managed => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "{end:#x} is managed memory, which moves between host and devices: allocate it as plain memory"
                    ),
                ));
            }
        }
        if pointer.ordinal != about.ordinal as i32 {
            return invalid(format!(
                "{end:#x} lies on device {}, and this is device {} ({}): adopt it with that device",
                pointer.ordinal, about.ordinal, about.name
            ));
        }
        if pointer.pooled {
            return Err(in_a_pool(address, about.driver));
        }
    }
    drop(inside);
    let access = Arc::clone(device) as Arc<dyn DeviceAccess>;
    // SAFETY: the caller's promise, and the pointer is one of this device.
    Ok(unsafe { Memory::adopt_device(address, len, about.id, access, owner) })
}

/// Memory of a driver's pool.
pub(super) fn in_a_pool(address: u64, driver: &str) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!(
            "{address:#x} comes from a memory pool of {driver} (the async allocator), which no other process and \
             no card \
             can be given: make the KV pool with Device::pool and hand its address to the framework, or let the \
             framework allocate without pools (PyTorch: its native allocator; cudarc: result::malloc_sync)"
        ),
    )
}
