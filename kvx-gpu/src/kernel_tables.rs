//! Tables that kernels read: written to pinned memory, and copied to the device before the launch.

use crate::driver::{CopyDirection, Driver, StreamHandle};
use kvx_core::Result;
use kvx_core::backend::Hop;

/// The number of bytes of a table: about as many rows as one launch should process.
pub(super) const TABLE: usize = 64 << 10;

/// A table, on both sides. Belongs to one flight at a time.
#[derive(Debug)]
pub(super) struct KernelTable {
    host: *mut u8,
    device: u64,
}

/// The unused tables of a device, created on demand and kept: pinning takes longer than a copy.
#[derive(Debug, Default)]
pub(super) struct Tables(Vec<KernelTable>);

impl Tables {
    pub(super) fn take(&mut self, driver: &Driver) -> Result<KernelTable> {
        if let Some(table) = self.0.pop() {
            return Ok(table);
        }
        let host = driver.pin(TABLE)?;
        match driver.allocate(TABLE) {
            Ok(device) => Ok(KernelTable { host, device }),
            Err(error) => {
                // SAFETY: pinned above, and not used.
                unsafe { driver.unpin(host) }.ok(); // report the first error
                Err(error)
            }
        }
    }

    /// Returns tables from a flight that has ended.
    pub(super) fn give(&mut self, tables: impl IntoIterator<Item = KernelTable>) {
        self.0.extend(tables);
    }

    /// Frees all tables.
    pub(super) fn end(&mut self, driver: &Driver) {
        for table in self.0.drain(..) {
            // SAFETY: both came from `take`, and no flight uses them.
            let ended = unsafe { driver.unpin(table.host).and(driver.free(table.device)) };
            if let Err(error) = ended {
                tracing::debug!(%error, "a table of a device could not be freed");
            }
        }
    }
}

impl KernelTable {
    /// Puts `bytes`, at most [`TABLE`], where kernels can read them after this point of the stream.
    /// Returns their address.
    pub(super) fn fill(
        &mut self,
        driver: &Driver,
        bytes: &[u8],
        stream: StreamHandle,
    ) -> Result<u64> {
        assert!(bytes.len() <= TABLE, "the caller splits longer tables");
        // SAFETY: the table has that many bytes, and no copy of an earlier flight reads them any
        // more.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.host, bytes.len()) };
        let line = Hop { from: self.host as u64, to: self.device, len: bytes.len() };
        // SAFETY: both sides belong to this table, which its flight keeps until an event after the
        // copy is reached.
        unsafe { driver.copy(CopyDirection::ToDevice, line, stream) }?;
        Ok(self.device)
    }
}
