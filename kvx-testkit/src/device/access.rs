//! The devices that a suite runs on.

use std::sync::Arc;

use kvx_core::{DeviceAccess, Memory, Result};

/// A device of some process, for the suite: whose memory it is, and how to get some. See
/// [`Suite::device`](crate::Suite).
pub trait Device: Send + Sync {
    /// Returns the access that agents copy it with.
    fn access(&self) -> Arc<dyn DeviceAccess>;

    /// Memory on it.
    fn allocate(&self, len: usize) -> Result<Memory>;
}
