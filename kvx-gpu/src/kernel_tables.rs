//! Tables that kernels read: written in pinned memory, copied to the device in front of the launch.

use crate::driver::{CopyDirection, Driver, StreamHandle};
use kvx_core::Result;
use kvx_core::backend::Hop;

/// Bytes of a table: about as many rows as one launch is worth.
pub(super) const TABLE: usize = 64 << 10;

/// One table, on both sides. Belongs to one flight at a time.
#[derive(Debug)]
pub(super) struct KernelTable {
    host: *mut u8,
    device: u64,
}

/// The tables of a device. Made on need and kept: pinning takes longer than a copy.
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
                // SAFETY: pinned above, and used by nobody.
                unsafe { driver.unpin(host) }.ok(); // the error that led here is the one to tell
                Err(error)
            }
        }
    }

    /// Takes them back, from a flight that has ended.
    pub(super) fn give(&mut self, tables: impl IntoIterator<Item = KernelTable>) {
        self.0.extend(tables);
    }

    /// Frees all.
    pub(super) fn end(&mut self, driver: &Driver) {
        for table in self.0.drain(..) {
            // SAFETY: both came from `take`, and no flight has them.
            let ended = unsafe { driver.unpin(table.host).and(driver.free(table.device)) };
            if let Err(error) = ended {
                tracing::debug!(%error, "a table of a device was not freed");
            }
        }
    }
}

impl KernelTable {
    /// Puts `bytes`, at most [`TABLE`], where kernels read them once the stream has come to it, and
    /// says where that is.
    pub(super) fn fill(
        &mut self,
        driver: &Driver,
        bytes: &[u8],
        stream: StreamHandle,
    ) -> Result<u64> {
        assert!(bytes.len() <= TABLE, "whoever makes rows counts them");
        // SAFETY: the table has that many bytes of its own, and no copy of an earlier flight reads
        // them any more.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.host, bytes.len()) };
        let line = Hop { from: self.host as u64, to: self.device, len: bytes.len() };
        // SAFETY: both sides belong to this table, which its flight keeps until an event behind the
        // copy is reached.
        unsafe { driver.copy(CopyDirection::ToDevice, line, stream) }?;
        Ok(self.device)
    }
}
