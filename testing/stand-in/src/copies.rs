//! Copies, which are checked when they are submitted and when they run.

use std::sync::Arc;

use crate::code::{Answer, Code};
use crate::mapping::is_of_device;
use crate::memory::{Memory, memory};
use crate::settings::note_fault;
use crate::stream::Stream;

/// One end of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Device(u64),
    /// Ordinary host memory of the program.
    Host(u64),
    /// Memory that the driver pinned, which begins at `base`.
    Pinned {
        address: u64,
        base: u64,
    },
}

impl End {
    /// Returns the memory at an address.
    pub(crate) fn of(address: u64) -> Self {
        if is_of_device(address) {
            return End::Device(address);
        }
        match memory().pinned_around(address) {
            Some((base, _)) => End::Pinned { address, base },
            None => End::Host(address),
        }
    }

    fn at(self, offset: usize) -> Self {
        let offset = offset as u64;
        match self {
            End::Device(address) => End::Device(address.wrapping_add(offset)),
            End::Host(address) => End::Host(address.wrapping_add(offset)),
            End::Pinned { address, base } => {
                End::Pinned { address: address.wrapping_add(offset), base }
            }
        }
    }

    /// Returns the host's pointer to these bytes. Fails with `INVALID_VALUE` for memory that is not
    /// allocated.
    fn pointer(self, memory: &Memory, len: usize) -> Answer<*mut u8> {
        match self {
            End::Device(address) => memory.range(address, len),
            End::Host(0) => Err(Code::INVALID_VALUE),
            End::Host(address) => Ok(address as *mut u8),
            End::Pinned { address, base } => match memory.pinned_around(base) {
                Some((found, whole))
                    if found == base && address - base + len as u64 <= whole as u64 =>
                {
                    Ok(address as *mut u8)
                }
                _ => Err(Code::INVALID_VALUE),
            },
        }
    }
}

/// Rows of equal width at two pitches; a plain copy is one row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) to: End,
    pub(crate) to_pitch: usize,
    pub(crate) from: End,
    pub(crate) from_pitch: usize,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

impl Rows {
    pub(crate) fn one(to: End, from: End, len: usize) -> Self {
        Rows { to, to_pitch: len, from, from_pitch: len, width: len, height: 1 }
    }

    fn row(&self, row: usize, memory: &Memory) -> Answer<(*mut u8, *mut u8)> {
        let to = self.to.at(row * self.to_pitch).pointer(memory, self.width)?;
        Ok((to, self.from.at(row * self.from_pitch).pointer(memory, self.width)?))
    }

    fn perform(&self) -> Answer {
        let memory = memory();
        for row in 0..self.height {
            let (to, from) = self.row(row, &memory).map_err(|_| Code::ILLEGAL_ADDRESS)?;
            // SAFETY: device and pinned memory was found above, and the lock keeps it allocated.
            // Ordinary host memory is valid until the copy ends, which every driver requires of its
            // callers.
            unsafe { std::ptr::copy(from, to, self.width) };
        }
        Ok(())
    }
}

/// Submits copies to a stream. Fails with `INVALID_VALUE` for memory that is not allocated, or for
/// rows that overlap.
pub(crate) fn copy(stream: &Arc<Stream>, rows: Rows) -> Answer {
    let overlap = rows.height > 1 && (rows.width > rows.to_pitch || rows.width > rows.from_pitch);
    let last = rows.height.saturating_sub(1);
    let fits =
        [rows.to_pitch, rows.from_pitch].iter().all(|pitch| last.checked_mul(*pitch).is_some());
    let alive = {
        let memory = memory();
        fits && (0..rows.height).all(|row| rows.row(row, &memory).is_ok())
    };
    if overlap || !alive {
        note_fault();
        return Err(Code::INVALID_VALUE);
    }
    stream.push(Box::new(move || rows.perform()));
    Ok(())
}

/// Submits memory to fill to a stream. Fails like [`copy`].
pub(crate) fn fill(stream: &Arc<Stream>, address: u64, value: u8, len: usize) -> Answer {
    if memory().range(address, len).is_err() {
        note_fault();
        return Err(Code::INVALID_VALUE);
    }
    stream.push(Box::new(move || {
        let memory = memory();
        let start = memory.range(address, len).map_err(|_| Code::ILLEGAL_ADDRESS)?;
        // SAFETY: the memory was found above, and the lock keeps it allocated.
        unsafe { start.write_bytes(value, len) };
        Ok(())
    }));
    Ok(())
}
