//! The table of memory: what lives, on which device, and how it came to be.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{LazyLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::code::{Answer, Code};
use crate::devices::Device;
use crate::mapping::{self, Mapping};
use crate::settings::{note_fault, settings};

/// The origin of memory: drivers share and free each in its own way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// From the plain allocator.
    Plain,
    /// From a pool of a stream's.
    Pool,
    /// A file at a reserved address.
    Virtual,
    /// Opened from the process that allocated it: the number of the file.
    Opened(u64),
}

/// Device memory that lives.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) len: usize,
    pub(crate) device: Device,
    pub(crate) origin: Origin,
    /// Virtual memory may be touched once its access is set.
    pub(crate) accessible: bool,
    file: OwnedFd,
    /// None for virtual memory, whose pages are its reservation's.
    _pages: Option<Mapping>,
}

/// All memory of this process. Work on it holds the lock for reading: nothing is unmapped
/// meanwhile.
#[derive(Default)]
pub(crate) struct Memory {
    device: BTreeMap<u64, Allocation>,
    /// By host addresses.
    pinned: BTreeMap<u64, Mapping>,
    /// Ranges of addresses for virtual memory.
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

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Memory {
    /// Memory of a device, zeroed. Errors: `INVALID_VALUE` for no bytes, `OUT_OF_MEMORY`.
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

    /// Gives memory back. Errors: `INVALID_VALUE` for an address where none of these begins: a
    /// fault.
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

    /// Takes in what was opened or mapped, at its address.
    pub(crate) fn insert(&mut self, address: u64, allocation: Allocation) {
        self.device.insert(address, allocation);
    }

    /// The allocation around an address, and where it begins.
    pub(crate) fn around(&self, address: u64) -> Option<(u64, &Allocation)> {
        let (base, allocation) = self.device.range(..=address).next_back()?;
        (address - base < allocation.len as u64).then_some((*base, allocation))
    }

    /// The allocations that begin within a range of addresses.
    pub(crate) fn within(
        &mut self,
        start: u64,
        len: usize,
    ) -> impl Iterator<Item = (u64, &mut Allocation)> {
        self.device
            .range_mut(start..start.saturating_add(len as u64))
            .map(|(base, found)| (*base, found))
    }

    /// Everything that was opened.
    pub(crate) fn opened(&self) -> impl Iterator<Item = Origin> {
        self.device.values().map(|allocation| allocation.origin)
    }

    /// The host's pointer to a range of device memory, all of it alive and accessible. Adjacent
    /// pieces of virtual memory are one range. Errors: `INVALID_VALUE`.
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

    /// Host memory that the driver knows.
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

    /// The pinned memory around a host address, and where it begins.
    pub(crate) fn pinned_around(&self, address: u64) -> Option<(u64, usize)> {
        let (base, pages) = self.pinned.range(..=address).next_back()?;
        (address - base < pages.len() as u64).then_some((*base, pages.len()))
    }

    /// The host's pointer to what a kernel may touch: device memory, and pinned memory at its own
    /// address. Errors: `INVALID_VALUE`.
    pub(crate) fn reachable(&self, address: u64, len: usize) -> Answer<*mut u8> {
        if mapping::is_of_device(address) {
            return self.range(address, len);
        }
        let (base, whole) = self.pinned_around(address).ok_or(Code::INVALID_VALUE)?;
        let end = (address - base).checked_add(len as u64).filter(|end| *end <= whole as u64);
        end.map(|_| address as *mut u8).ok_or(Code::INVALID_VALUE)
    }

    /// Bytes of device memory that were allocated and not freed.
    pub(crate) fn allocated(&self) -> i64 {
        self.used.values().sum::<u64>() as i64
    }
}
