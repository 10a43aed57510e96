//! The report of what a transfer has moved.

use std::time::Duration;

/// The result of a transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// The number of bytes moved.
    pub bytes: u64,
    /// The number of blocks moved.
    pub blocks: u64,
    /// The number of contiguous pieces after merging adjacent blocks.
    pub segments: u64,
    /// How long the post blocked its caller.
    pub post_time: Duration,
    /// The time from the post until the data had arrived.
    pub transfer_time: Duration,
    /// The backend that carried the transfer.
    pub backend: &'static str,
}
