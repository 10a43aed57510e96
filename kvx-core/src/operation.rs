//! The direction and the size of a transfer.

use std::fmt;

/// The direction of a transfer, as its initiator sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// From the peer's blocks into the local ones.
    Read,
    /// From the local blocks into the peer's.
    Write,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Op::Read => "read",
            Op::Write => "write",
        })
    }
}

/// The amount that a plan moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// The number of bytes.
    pub bytes: u64,
    /// The number of blocks: indices times grids.
    pub blocks: u64,
    /// The number of contiguous pieces after merging blocks that are adjacent on both sides.
    pub segments: u64,
    /// The size of the description in bytes.
    pub(crate) description: usize,
}
