//! Host memory that a device has pinned.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::calls::BlockingCalls;
use crate::driver::Driver;
use kvx_core::backend::fork;
use kvx_core::backend::sync::Mutex;
use kvx_core::{ErrorKind, Memory, Result};

/// The host memory that a device has pinned for kvx.
#[derive(Default)]
pub(super) struct PinnedRanges(Mutex<BTreeMap<u64, usize>>);

impl PinnedRanges {
    /// Returns whether all of these ranges are pinned.
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

/// Pinned host memory; unpinned after it was dropped.
struct PinnedBuffer {
    base: u64,
    calls: BlockingCalls,
    pinned: Arc<PinnedRanges>,
    forks: u64,
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if fork::count() != self.forks {
            return;
        }
        self.pinned.0.lock().remove(&self.base);
        let base = self.base;
        self.calls.later(move |driver| {
            let unpinned = driver.enter().and_then(|_inside| {
                // SAFETY: it came from `pin`, and `Memory` is dropped, so nobody uses it any more.
                unsafe { driver.unpin(base as *mut u8) }
            });
            if let Err(error) = unpinned {
                tracing::warn!(%error, "pinned memory could not be freed");
            }
        });
    }
}

/// Allocates pinned, zeroed host memory, on the thread of `calls`.
pub(super) fn pin(
    driver: &Driver,
    calls: BlockingCalls,
    pinned: Arc<PinnedRanges>,
    len: usize,
) -> Result<Memory> {
    if len == 0 {
        return Err(ErrorKind::Invalid
            .because("cannot allocate 0 bytes of pinned memory: allocate at least one"));
    }
    let base = driver.pin(len)?;
    // SAFETY: new memory of that length, which nobody else uses. It may contain what another
    // process left.
    unsafe { base.write_bytes(0, len) };
    pinned.0.lock().insert(base as u64, len);
    let owner = PinnedBuffer { base: base as u64, calls, pinned, forks: fork::count() };
    // SAFETY: the owner keeps the memory allocated and pinned until it is dropped.
    Ok(unsafe { Memory::adopt_pinned(base, len, owner) })
}
