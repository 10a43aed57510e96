//! Memory of other processes: a handle identifies the file and its process, and the file is opened
//! through that process.

use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::{Mode, OFlags, open};

use crate::code::{Answer, Code};
use crate::devices::Device;
use crate::mapping::{self, Mapping};
use crate::memory::{Allocation, Memory, Origin};

/// The handle with which another process opens memory.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct MemHandle([u8; 64]);

const MAGIC: u64 = u64::from_le_bytes(*b"kvxstand");

/// The fields of a handle.
struct Parts {
    process: u64,
    descriptor: u64,
    /// The file's inode number, because descriptors are reused.
    number: u64,
    len: u64,
    device: u64,
}

impl Parts {
    fn encode(&self) -> MemHandle {
        let words =
            [MAGIC, self.process, self.descriptor, self.number, self.len, self.device, 0, 0];
        let mut bytes = [0; 64];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        MemHandle(bytes)
    }

    fn decode(handle: &MemHandle) -> Answer<Self> {
        let word = |at: usize| {
            let bytes = handle.0[at * 8..][..8].try_into().expect("eight bytes");
            u64::from_le_bytes(bytes)
        };
        if word(0) != MAGIC {
            return Err(Code::INVALID_VALUE);
        }
        let [process, descriptor, number, len, device] = [1, 2, 3, 4, 5].map(word);
        Ok(Parts { process, descriptor, number, len, device })
    }
}

impl Memory {
    /// Returns a handle to an allocation. Fails with `INVALID_VALUE` unless an allocation of the
    /// plain allocator begins at this address.
    pub(crate) fn share(&self, address: u64) -> Answer<MemHandle> {
        let found = self
            .around(address)
            .filter(|(base, found)| *base == address && found.origin == Origin::Plain);
        let (_, allocation) = found.ok_or(Code::INVALID_VALUE)?;
        let (_, number) = mapping::length_and_number(allocation.file())?;
        let parts = Parts {
            process: u64::from(std::process::id()),
            descriptor: allocation.file().as_raw_fd() as u64,
            number,
            len: allocation.len as u64,
            device: allocation.device.0 as u64,
        };
        Ok(parts.encode())
    }

    /// Opens memory that another process has shared. Fails with `INVALID_CONTEXT` for memory of
    /// this process, `ALREADY_MAPPED` for open memory, and `INVALID_VALUE` for an invalid handle,
    /// freed memory, or an owner that has ended.
    pub(crate) fn open(&mut self, handle: &MemHandle) -> Answer<u64> {
        let Parts { process, descriptor, number, len, device } = Parts::decode(handle)?;
        if process == u64::from(std::process::id()) {
            return Err(Code::INVALID_CONTEXT);
        }
        if self.opened().any(|origin| origin == Origin::Opened(number)) {
            return Err(Code::ALREADY_MAPPED);
        }
        let path = format!("/proc/{process}/fd/{descriptor}");
        let file = open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|_| Code::INVALID_VALUE)?;
        let (whole, found) = mapping::length_and_number(&file)?;
        if found != number
            || whole as u64 != len.next_multiple_of(mapping::page() as u64)
            || device >= 16
        {
            return Err(Code::INVALID_VALUE);
        }
        let pages = Mapping::of_file(file.as_fd(), whole)?;
        let address = pages.address();
        let origin = Origin::Opened(number);
        self.insert(
            address,
            Allocation::new(len as usize, Device(device as usize), origin, file, Some(pages)),
        );
        Ok(address)
    }

    /// Closes opened memory. Fails with `INVALID_VALUE`.
    pub(crate) fn close(&mut self, address: u64) -> Answer {
        self.free(address, |origin| matches!(origin, Origin::Opened(_)))
    }
}
