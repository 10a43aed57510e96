//! The devices that a suite runs on.

use std::sync::Arc;

use kvx_core::{DeviceAccess, Memory, Result};

/// A device of a process, for the suite: an access to its memory, and an allocator. See
/// [`Suite::device`](crate::Suite).
pub trait Device: Send + Sync {
    /// Returns the access that agents copy its memory with.
    fn access(&self) -> Arc<dyn DeviceAccess>;

    /// Allocates memory on the device.
    ///
    /// # Errors
    /// An error of the device.
    fn allocate(&self, len: usize) -> Result<Memory>;
}
