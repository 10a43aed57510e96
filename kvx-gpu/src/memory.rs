//! Device memory: pools and adopted pointers.

use std::any::Any;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::calls::BlockingCalls;
use super::device::Device;
use super::strided::DevicePtr;
use super::thread::DeviceWork;
use crate::driver::{MappedMemory, PointerPlace};
use kvx_core::backend::fork;
use kvx_core::backend::sync::Mutex;
use kvx_core::{Completion, Deadline, DeviceAccess, Error, ErrorKind, Memory, Result};

/// The length of a pool is a multiple of this, and so is its address. Drivers take smaller
/// allocations from parts of such a page, for which they export no descriptor to other cards.
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

    /// Creates the pool with the driver's virtual memory management instead of a plain allocation,
    /// for programs that map the same memory elsewhere. Other processes open it through a
    /// descriptor, which the kernel must let them take (ptrace scope).
    pub fn virtual_memory(mut self) -> Self {
        self.virtual_memory = true;
        self
    }

    /// Creates the pool, filled with zeros, because new memory may contain what another part of the
    /// process has freed. Errors: `Invalid` for zero bytes, `Exhausted` if the device does not have
    /// enough memory, `Unsupported` for virtual memory that it does not support.
    pub fn build(self) -> Result<Memory> {
        let DevicePoolBuilder { device, len, virtual_memory } = self;
        let whole =
            len.checked_next_multiple_of(PAGE).filter(|whole| *whole > 0).ok_or_else(|| {
                ErrorKind::Invalid.because(format!(
                    "a pool cannot have {len} bytes: ask for 1 to {}",
                    usize::MAX / PAGE * PAGE
                ))
            })?;
        let calls = device.calls()?;
        let allocation = if virtual_memory {
            let mapped = calls.wait(move |driver| driver.map(whole))?;
            let held = Allocation::new(&device, calls.clone(), AllocationKind::Mapped(mapped));
            let file = calls.wait(move |driver| driver.export(mapped))?;
            device.exported().lock().insert(mapped.address, file);
            held
        } else {
            let address = calls.wait(move |driver| driver.allocate(whole))?;
            Allocation::new(&device, calls, AllocationKind::Allocated(address))
        };
        let address = allocation.address();
        let (filled, ticket) = Completion::with_ticket();
        // SAFETY: the allocation is held until the completion ends, or forever if its end is
        // unknown.
        unsafe { device.ask(DeviceWork::Zero { address, len: whole }, std::iter::empty(), ticket) };
        if let Err(error) = filled.wait_blocking(Deadline::default_for_transfers()) {
            if matches!(error.kind(), ErrorKind::Forgotten | ErrorKind::TimedOut) {
                std::mem::forget(allocation);
            }
            return Err(error);
        }
        let id = device.driver().info().id;
        // SAFETY: the memory belongs to the allocation, which frees it when it is dropped.
        Ok(unsafe {
            Memory::adopt_device(address, len, id, device as Arc<dyn DeviceAccess>, allocation)
        })
    }
}

/// A device's memory, freed after it was dropped.
struct Allocation {
    device: Arc<Device>,
    calls: BlockingCalls,
    held: AllocationKind,
    forks: u64,
}

#[derive(Clone, Copy)]
enum AllocationKind {
    Allocated(u64),
    Mapped(MappedMemory),
}

impl Allocation {
    fn new(device: &Arc<Device>, calls: BlockingCalls, held: AllocationKind) -> Self {
        Allocation { device: Arc::clone(device), calls, held, forks: fork::count() }
    }

    fn address(&self) -> u64 {
        match &self.held {
            AllocationKind::Allocated(address) => *address,
            AllocationKind::Mapped(mapped) => mapped.address,
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if fork::count() != self.forks {
            return; // a forked child has no device
        }
        let held = self.held;
        if let AllocationKind::Mapped(mapped) = held {
            self.device.exported().lock().remove(&mapped.address);
        }
        self.calls.later(move |driver| {
            let freed = driver.enter().and_then(|_inside| match held {
                // SAFETY: it came from `allocate`, and `Memory` is dropped, so nobody uses it any
                // more.
                AllocationKind::Allocated(address) => unsafe { driver.free(address) },
                // SAFETY: it came from `map`, and `Memory` is dropped, so nobody uses it any more.
                AllocationKind::Mapped(mapped) => unsafe { driver.unmap(mapped) },
            });
            if let Err(error) = freed {
                tracing::warn!(%error, "device memory could not be freed");
            }
        });
    }
}

/// Descriptors of virtual memory that other processes may take, by address.
pub(super) type ExportedFiles = Mutex<BTreeMap<u64, OwnedFd>>;

/// Checks a pointer of the program, and makes it memory of the device.
///
/// # Safety
/// As for [`Memory::adopt_device`].
pub(super) unsafe fn adopt(
    device: &Arc<Device>,
    DevicePtr(address): DevicePtr,
    len: usize,
    owner: impl Any + Send + Sync,
) -> Result<Memory> {
    let driver = device.driver();
    let info = driver.info();
    let invalid = |sentence: String| Err(ErrorKind::Invalid.because(sentence));
    let Some(last) = (len as u64).checked_sub(1).and_then(|more| address.checked_add(more)) else {
        return invalid(format!(
            "{len} bytes at {address:#x}: adopt at least one, inside the address space"
        ));
    };
    let inside = driver.enter()?;
    // Check both ends: memory with several consecutive mappings is one range to its program, but
    // several to the driver.
    for end in [address, last] {
        let pointer = driver.classify(end)?;
        match pointer.place {
            PointerPlace::Device => {}
            PointerPlace::Unknown => {
                return invalid(format!(
                    "{} does not know the address {end:#x}: adopt host memory with Memory::adopt; a \
                     range must end where its allocation does",
                    info.driver
                ));
            }
            PointerPlace::Pinned => {
                return invalid(format!(
                    "{end:#x} is pinned memory of the host: adopt it with Memory::adopt_pinned"
                ));
            }
            PointerPlace::Managed => {
                return Err(ErrorKind::Unsupported.because(format!(
                    "{end:#x} is managed memory, which migrates between host and devices: allocate \
                     it as plain memory"
                )));
            }
        }
        if pointer.ordinal != info.ordinal as i32 {
            return invalid(format!(
                "{end:#x} is on device {}, but this is device {} ({}): adopt it with that device",
                pointer.ordinal, info.ordinal, info.name
            ));
        }
        if pointer.is_pooled {
            return Err(pool_error(address, info.driver));
        }
        if driver.is_of_other_context(&pointer) {
            return Err(ErrorKind::Unsupported.because(format!(
                "{end:#x} belongs to another context than the device's primary one, in which kvx \
                 copies: allocate it in the primary context (cuDevicePrimaryCtxRetain), which the \
                 runtime and all frameworks use"
            )));
        }
    }
    drop(inside);
    let access = Arc::clone(device) as Arc<dyn DeviceAccess>;
    // SAFETY: guaranteed by the caller, and the pointer belongs to this device.
    Ok(unsafe { Memory::adopt_device(address, len, info.id, access, owner) })
}

/// Returns the error for virtual memory that the program has mapped, of which the driver makes no
/// handle for other processes.
pub(super) fn mapped_error(address: u64, driver: &str) -> Error {
    ErrorKind::Unsupported.because(format!(
        "{address:#x} is virtual memory of the program, which {driver} does not share with other \
         processes: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False (PyTorch), or create the \
         KV pool with Device::pool; without that, transfers go through the host (TCP)"
    ))
}

/// Returns the error for memory from a driver's pool.
pub(super) fn pool_error(address: u64, driver: &str) -> Error {
    ErrorKind::Unsupported.because(format!(
        "{address:#x} is from a memory pool of {driver} (the async allocator), which cannot be \
         shared with other processes and cards: create the KV pool with Device::pool and pass its \
         address to the framework, or let the framework allocate without pools (PyTorch: its \
         native allocator; cudarc: result::malloc_sync)"
    ))
}
