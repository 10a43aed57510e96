//! The arguments of a kernel launch: its entry, the size of the grid, and numbers.

use kvx_core::backend::Hop;
use kvx_core::{ErrorKind, Result};

use super::Swap;

/// The number of threads per block of every launch, in one dimension.
pub const THREADS: u32 = 256;

/// The names of the kernels.
pub const ENTRIES: [&str; 4] = ["kvx_gather", "kvx_scatter", "kvx_hops", "kvx_permute"];

/// The number of bytes that a block of threads moves at a time, if they are aligned.
const PIECE: u64 = THREADS as u64 * 4 * 16;

/// The maximum size that drivers accept for the second and third dimension of a grid.
const MOST: u64 = 65_535;

/// A grid of a grid set on a device. Its blocks are at `base + index * stride`, and contiguous from
/// `at` on in the packed bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceGrid {
    /// The start of block 0: an address for a launch, an offset for the reference in the tests.
    pub base: u64,
    /// The distance from block to block.
    pub stride: u64,
    /// The number of bytes of a block.
    pub length: u64,
    /// The start of the grid's first block in the packed bytes.
    pub at: u64,
}

/// The location of the blocks of a permutation: at `base + index * stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchBlocks {
    /// The address of block 0.
    pub base: u64,
    /// The distance from block to block.
    pub stride: u64,
    /// The address of an array of `u32`, one for each block; 0 if the blocks are in order.
    pub indices: u64,
}

/// A launch: blocks of [`THREADS`] threads in one dimension, no shared memory, and 64-bit
/// parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel, one of [`ENTRIES`].
    pub entry: &'static str,
    /// The number of thread blocks in each dimension. A smaller grid does the same work with fewer
    /// processors.
    pub grid: [u32; 3],
    /// The kernel's parameters, in order.
    pub parameters: Vec<u64>,
}

impl Launch {
    /// Copies the blocks of each grid of `table` that `count` indices select: with `gather` into
    /// the packed bytes at the address `packed`, otherwise out of them. `grids` is the address of
    /// the [encoded](encode_grids) table, `indices` that of the `u32`s.
    pub fn grids(
        gather: bool,
        packed: u64,
        grids: u64,
        table: &[DeviceGrid],
        indices: u64,
        count: usize,
    ) -> Self {
        let longest = table.iter().map(|grid| grid.length).max().unwrap_or(0);
        let [of_grids, count] = [table.len() as u64, count as u64];
        Launch {
            entry: if gather { "kvx_gather" } else { "kvx_scatter" },
            grid: [blocks(count), pieces(longest, PIECE), of_grids.clamp(1, MOST) as u32],
            parameters: vec![packed, grids, of_grids, indices, count],
        }
    }

    /// Copies unrelated ranges: `hops` is the address of the [encoded](encode_hops) table.
    pub fn hops(hops: u64, table: &[Hop]) -> Self {
        let longest = table.iter().map(|hop| hop.len as u64).max().unwrap_or(0);
        let count = table.len() as u64;
        Launch {
            entry: "kvx_hops",
            grid: [blocks(count), pieces(longest, PIECE), 1],
            parameters: vec![hops, count],
        }
    }

    /// Swaps dimensions of `count` blocks, from one location to another. Errors: `Invalid` for
    /// blocks of 4 GiB or more.
    pub fn permute(to: LaunchBlocks, from: LaunchBlocks, count: usize, swap: Swap) -> Result<Self> {
        let length = swap.length().filter(|length| *length <= u64::from(u32::MAX));
        let length = length.ok_or_else(|| {
            ErrorKind::Invalid.because(format!("cannot permute blocks of 4 GiB or more: {swap:?}"))
        })?;
        let Swap { outer, rows, columns, run } = swap;
        let count = count as u64;
        Ok(Launch {
            entry: "kvx_permute",
            // One unit per thread at a time: computing its source takes longer than moving it.
            grid: [blocks(count), pieces(length, PIECE / 4), 1],
            parameters: vec![
                to.base,
                to.stride,
                to.indices,
                from.base,
                from.stride,
                from.indices,
                count,
                outer,
                rows,
                columns,
                run,
            ],
        })
    }
}

/// Returns the first dimension of a grid; drivers reject 0.
fn blocks(count: u64) -> u32 {
    count.clamp(1, i32::MAX as u64) as u32
}

fn pieces(longest: u64, piece: u64) -> u32 {
    longest.div_ceil(piece).clamp(1, MOST) as u32
}

/// Encodes a table of grids for the kernels, to be copied to an address that is a multiple of 8.
pub fn encode_grids(table: &[DeviceGrid]) -> Vec<u8> {
    encode(table.iter().map(|grid| [grid.base, grid.stride, grid.length, grid.at]))
}

/// Encodes a table of hops for the kernel, to be copied to an address that is a multiple of 8.
pub fn encode_hops(table: &[Hop]) -> Vec<u8> {
    encode(table.iter().map(|hop| [hop.from, hop.to, hop.len as u64]))
}

fn encode<const N: usize>(rows: impl Iterator<Item = [u64; N]>) -> Vec<u8> {
    rows.flatten().flat_map(u64::to_ne_bytes).collect()
}
