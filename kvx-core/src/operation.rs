//! Which way a transfer moves, and how much.

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
    /// Bytes.
    pub bytes: u64,
    /// Blocks: indices times grids.
    pub blocks: u64,
    /// Contiguous pieces that are left when neighbours on both sides are merged.
    pub segments: u64,
    /// Bytes that the description takes.
    pub(crate) description: usize,
}
