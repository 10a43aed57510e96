//! The table of allocated memory: its device and its origin.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{LazyLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::code::{Answer, Code};
use crate::devices::Device;
use crate::mapping::{self, Mapping};
use crate::settings::{note_fault, settings};

/// The origin of memory, which determines how drivers share and free it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The plain allocator.
    Plain,
    /// A stream's pool.
    Pool,
    /// A file at a reserved address.
    Virtual,
    /// Another process, from which it was opened; the number of the file.
    Opened(u64),
}

/// Allocated device memory.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) len: usize,
    pub(crate) device: Device,
    pub(crate) origin: Origin,
    /// True unless it is virtual memory whose access is not set yet.
    pub(crate) accessible: bool,
    file: OwnedFd,
    /// `None` for virtual memory, whose pages belong to its reservation.
    _pages: Option<Mapping>,
}

/// All memory of this process. Work on it holds the read lock, so that nothing is unmapped
/// meanwhile.
#[derive(Default)]
pub(crate) struct Memory {
    device: BTreeMap<u64, Allocation>,
    /// Pinned memory by host address.
    pinned: BTreeMap<u64, Mapping>,
    /// Reserved address ranges for virtual memory.
    pub(crate) reserved: BTreeMap<u64, Mapping>,
    used: HashMap<Device, u64>,
}

static MEMORY: LazyLock<RwLock<Memory>> = LazyLock::new(RwLock::default);

pub(crate) fn memory() -> RwLockReadGuard<'static, Memory> {
    MEMORY.read().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn memory_mut() -> RwLockWriteGuard<'static, Memory> {
    MEMORY.write().unwrap_or_else(PoisonError::into_inner)
}

impl Allocation {
    pub(crate) fn new(
        len: usize,
        device: Device,
        origin: Origin,
        file: OwnedFd,
        pages: Option<Mapping>,
    ) -> Self {
        Allocation {
            len,
            device,
            origin,
            accessible: origin != Origin::Virtual,
            file,
            _pages: pages,
        }
    }

    /// Returns whether it is memory of another process whose range the driver does not tell by this
    /// means.
    pub(crate) fn hides_its_range(&self, means: u8) -> bool {
        matches!(self.origin, Origin::Opened(_)) && settings().hidden_imports >= means
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Memory {
    /// Allocates zeroed memory of a device. Fails with `INVALID_VALUE` for zero bytes, or with
    /// `OUT_OF_MEMORY`.
    pub(crate) fn allocate(&mut self, device: Device, len: usize, origin: Origin) -> Answer<u64> {
        let limit = settings().memory;
        let used = self.used.entry(device).or_default();
        if len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        if used.checked_add(len as u64).is_none_or(|used| used > limit) {
            return Err(Code::OUT_OF_MEMORY);
        }
        let whole = len.next_multiple_of(mapping::page());
        let file = mapping::file(whole)?;
        let pages = Mapping::of_file(file.as_fd(), whole)?;
        *used += len as u64;
        let address = pages.address();
        self.device.insert(address, Allocation::new(len, device, origin, file, Some(pages)));
        Ok(address)
    }

    /// Frees memory. If no allocation that `ends` accepts begins at the address, notes a fault and
    /// fails with `INVALID_VALUE`.
    pub(crate) fn free(&mut self, address: u64, ends: fn(Origin) -> bool) -> Answer {
        if self.device.get(&address).is_none_or(|allocation| !ends(allocation.origin)) {
            note_fault();
            return Err(Code::INVALID_VALUE);
        }
        if let Some(allocation) = self.device.remove(&address)
            && matches!(allocation.origin, Origin::Plain | Origin::Pool)
        {
            *self.used.entry(allocation.device).or_default() -= allocation.len as u64;
        }
        Ok(())
    }

    /// Adds opened or mapped memory at its address.
    pub(crate) fn insert(&mut self, address: u64, allocation: Allocation) {
        self.device.insert(address, allocation);
    }

    /// Returns the allocation that contains an address, and its beginning.
    pub(crate) fn around(&self, address: u64) -> Option<(u64, &Allocation)> {
        let (base, allocation) = self.device.range(..=address).next_back()?;
        (address - base < allocation.len as u64).then_some((*base, allocation))
    }

    /// Returns the allocations that begin within an address range.
    pub(crate) fn within(
        &mut self,
        start: u64,
        len: usize,
    ) -> impl Iterator<Item = (u64, &mut Allocation)> {
        self.device
            .range_mut(start..start.saturating_add(len as u64))
            .map(|(base, found)| (*base, found))
    }

    /// Returns the origins of all opened memory.
    pub(crate) fn opened(&self) -> impl Iterator<Item = Origin> {
        self.device.values().map(|allocation| allocation.origin)
    }

    /// Returns the host's pointer to a range of device memory that is allocated and accessible
    /// throughout. Adjacent pieces of virtual memory count as one range. Fails with
    /// `INVALID_VALUE`.
    pub(crate) fn range(&self, address: u64, len: usize) -> Answer<*mut u8> {
        let end = address.checked_add(len as u64).ok_or(Code::INVALID_VALUE)?;
        let mut at = address;
        while at < end {
            match self.around(at) {
                Some((base, allocation)) if allocation.accessible => {
                    at = base + allocation.len as u64
                }
                _ => return Err(Code::INVALID_VALUE),
            }
        }
        if len == 0 && !mapping::is_of_device(address) {
            return Err(Code::INVALID_VALUE);
        }
        Ok(mapping::pointer(address))
    }

    /// Allocates pinned host memory.
    pub(crate) fn pin(&mut self, len: usize) -> Answer<u64> {
        if len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let pages = Mapping::private(len.next_multiple_of(mapping::page()))?;
        let address = pages.host();
        self.pinned.insert(address, pages);
        Ok(address)
    }

    pub(crate) fn unpin(&mut self, address: u64) -> Answer {
        match self.pinned.remove(&address) {
            Some(_) => Ok(()),
            None => {
                note_fault();
                Err(Code::INVALID_VALUE)
            }
        }
    }

    /// Returns the pinned memory that contains a host address, and its beginning.
    pub(crate) fn pinned_around(&self, address: u64) -> Option<(u64, usize)> {
        let (base, pages) = self.pinned.range(..=address).next_back()?;
        (address - base < pages.len() as u64).then_some((*base, pages.len()))
    }

    /// Returns the host's pointer to memory that a kernel may access: device memory, and pinned
    /// memory at its host address. Fails with `INVALID_VALUE`.
    pub(crate) fn reachable(&self, address: u64, len: usize) -> Answer<*mut u8> {
        if mapping::is_of_device(address) {
            return self.range(address, len);
        }
        let (base, whole) = self.pinned_around(address).ok_or(Code::INVALID_VALUE)?;
        let end = (address - base).checked_add(len as u64).filter(|end| *end <= whole as u64);
        end.map(|_| address as *mut u8).ok_or(Code::INVALID_VALUE)
    }

    /// Returns the bytes of device memory that were allocated and not freed.
    pub(crate) fn allocated(&self) -> i64 {
        self.used.values().sum::<u64>() as i64
    }
}
