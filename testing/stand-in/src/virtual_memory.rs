//! Virtual memory, with separate addresses, files and access rights.

use std::os::fd::{AsFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, SeekFrom, open, seek};

use crate::code::{Answer, Code};
use crate::devices::Device;
use crate::handles::Handles;
use crate::mapping::{self, Mapping};
use crate::memory::{Allocation, Memory, Origin};

/// All lengths are multiples of this number.
pub(crate) const GRANULARITY: usize = 2 << 20;

/// Memory without an address.
pub(crate) struct Physical {
    device: Device,
    len: usize,
    file: OwnedFd,
    shareable: bool,
}

pub(crate) static PHYSICAL: Handles<Physical> = Handles::new();

impl Physical {
    pub(crate) fn create(device: Device, len: usize, shareable: bool) -> Answer<Arc<Self>> {
        if len == 0 || !len.is_multiple_of(GRANULARITY) {
            return Err(Code::INVALID_VALUE);
        }
        Ok(Arc::new(Physical { device, len, file: mapping::file(len)?, shareable }))
    }

    /// Returns a descriptor of the memory, which the caller owns. Fails with `INVALID_VALUE` if it
    /// was not created as shareable.
    pub(crate) fn export(&self) -> Answer<RawFd> {
        if !self.shareable {
            return Err(Code::INVALID_VALUE);
        }
        Ok(mapping::again(self.file.as_fd())?.into_raw_fd())
    }

    /// Returns the memory of a descriptor, which remains the caller's.
    pub(crate) fn import(device: Device, descriptor: RawFd) -> Answer<Arc<Self>> {
        // SAFETY: `dup` accepts any number, and returns a new descriptor that only this code owns.
        let file = unsafe {
            let copied = libc::dup(descriptor);
            if copied < 0 {
                return Err(Code::INVALID_VALUE);
            }
            OwnedFd::from_raw_fd(copied)
        };
        let (len, _) = mapping::length_and_number(&file)?;
        Ok(Arc::new(Physical { device, len, file, shareable: true }))
    }
}

impl Memory {
    /// Reserves addresses for virtual memory. Fails with `INVALID_VALUE` for lengths that are no
    /// multiples of the granularity.
    pub(crate) fn reserve(&mut self, len: usize) -> Answer<u64> {
        if len == 0 || !len.is_multiple_of(GRANULARITY) {
            return Err(Code::INVALID_VALUE);
        }
        let pages = Mapping::reserved(len)?;
        let address = pages.address();
        self.reserved.insert(address, pages);
        Ok(address)
    }

    /// Releases addresses. Fails with `INVALID_VALUE` unless they are exactly one reservation
    /// without mapped memory.
    pub(crate) fn unreserve(&mut self, address: u64, len: usize) -> Answer {
        let whole = self.reserved.get(&address).is_some_and(|pages| pages.len() == len);
        if !whole || self.within(address, len).next().is_some() {
            return Err(Code::INVALID_VALUE);
        }
        self.reserved.remove(&address);
        Ok(())
    }

    /// Returns the reservation that contains a range, and the offset of the range in it.
    fn reservation(&self, address: u64, len: usize) -> Answer<(&Mapping, usize)> {
        let (base, pages) =
            self.reserved.range(..=address).next_back().ok_or(Code::INVALID_VALUE)?;
        let offset = (address - base) as usize;
        let fits = offset.checked_add(len).is_some_and(|end| end <= pages.len());
        if fits { Ok((pages, offset)) } else { Err(Code::INVALID_VALUE) }
    }

    /// Maps memory at reserved addresses. Fails with `INVALID_VALUE`.
    pub(crate) fn map(&mut self, address: u64, len: usize, memory: &Physical) -> Answer {
        if len != memory.len || self.within(address, len).next().is_some() {
            return Err(Code::INVALID_VALUE);
        }
        let file = mapping::again(memory.file.as_fd())?;
        let (pages, offset) = self.reservation(address, len)?;
        pages.replace(offset, len, Some(file.as_fd()))?;
        self.insert(address, Allocation::new(len, memory.device, Origin::Virtual, file, None));
        Ok(())
    }

    /// Unmaps a range, which must consist of whole pieces. Fails with `INVALID_VALUE`.
    pub(crate) fn unmap(&mut self, address: u64, len: usize) -> Answer {
        let pieces: Vec<_> = self
            .within(address, len)
            .map(|(base, found)| (base, found.len, found.origin))
            .collect();
        let covered: usize = pieces.iter().map(|(_, len, _)| len).sum();
        if covered != len || pieces.iter().any(|(_, _, origin)| *origin != Origin::Virtual) {
            return Err(Code::INVALID_VALUE);
        }
        let (pages, offset) = self.reservation(address, len)?;
        pages.replace(offset, len, None)?;
        for (base, ..) in pieces {
            self.free(base, |origin| origin == Origin::Virtual)?;
        }
        Ok(())
    }

    /// Sets the access to a range. Fails with `INVALID_VALUE` for memory that is not mapped.
    pub(crate) fn set_access(&mut self, address: u64, len: usize, granted: bool) -> Answer {
        let mut covered = 0;
        for (_, piece) in self.within(address, len) {
            piece.accessible = granted;
            covered += piece.len;
        }
        if covered == len { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }

    /// Returns a descriptor for a range, positioned at the beginning of the range; the caller owns
    /// it. Fails with `INVALID_VALUE` unless the range is within one allocation, and with
    /// `NOT_SUPPORTED` for memory of a pool.
    pub(crate) fn descriptor(&self, address: u64, len: usize) -> Answer<RawFd> {
        let (base, allocation) = self.around(address).ok_or(Code::INVALID_VALUE)?;
        let whole = allocation.len.next_multiple_of(mapping::page()) as u64;
        if len == 0 || (address - base).checked_add(len as u64).is_none_or(|end| end > whole) {
            return Err(Code::INVALID_VALUE);
        }
        if allocation.origin == Origin::Pool {
            return Err(Code::NOT_SUPPORTED);
        }
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&allocation.file()));
        // Opens the file again, because a duplicate would share its position.
        let file =
            open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|_| Code::UNKNOWN)?;
        seek(&file, SeekFrom::Start(address - base)).map_err(|_| Code::UNKNOWN)?;
        Ok(file.into_raw_fd())
    }
}
