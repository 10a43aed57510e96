//! What a transfer has moved.

use std::time::Duration;

/// The result of a transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Bytes moved.
    pub bytes: u64,
    /// Blocks moved.
    pub blocks: u64,
    /// Contiguous pieces that were left after merging neighbours.
    pub segments: u64,
    /// The time that the post kept its caller.
    pub post_time: Duration,
    /// From the post until the data had arrived.
    pub transfer_time: Duration,
    /// The backend that carried it.
    pub backend: &'static str,
}
