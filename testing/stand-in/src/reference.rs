//! The kernels in plain Rust on byte slices: for launches of the stand-in, and as the reference for
//! tests of the kernels.
//!
//! Bases are offsets in the slices. Bounds are checked block by block: after an error, the blocks
//! before it have been moved.

use std::ops::Range;

use kvx_core::backend::Hop;
use kvx_core::{Error, ErrorKind, Result};
use kvx_gpu::kernels::{DeviceGrid, Swap};

/// Collects the blocks that the indices select of each grid into `packed`. Errors: `OutOfBounds`.
pub fn gather(
    region: &[u8],
    grids: &[DeviceGrid],
    indices: &[u32],
    packed: &mut [u8],
) -> Result<()> {
    for grid in grids {
        for (at, index) in indices.iter().enumerate() {
            let from = range(grid.base, u64::from(*index), grid.stride, grid.length, region.len())?;
            let to = range(grid.at, at as u64, grid.length, grid.length, packed.len())?;
            packed[to].copy_from_slice(&region[from]);
        }
    }
    Ok(())
}

/// Spreads `packed` over the blocks that the indices select of each grid. Errors: `OutOfBounds`.
pub fn scatter(
    region: &mut [u8],
    grids: &[DeviceGrid],
    indices: &[u32],
    packed: &[u8],
) -> Result<()> {
    for grid in grids {
        for (at, index) in indices.iter().enumerate() {
            let to = range(grid.base, u64::from(*index), grid.stride, grid.length, region.len())?;
            let from = range(grid.at, at as u64, grid.length, grid.length, packed.len())?;
            region[to].copy_from_slice(&packed[from]);
        }
    }
    Ok(())
}

/// Copies from one slice to another. Errors: `OutOfBounds`.
pub fn hops(from: &[u8], to: &mut [u8], hops: &[Hop]) -> Result<()> {
    for hop in hops {
        let source = range(hop.from, 0, 0, hop.len as u64, from.len())?;
        let target = range(hop.to, 0, 0, hop.len as u64, to.len())?;
        to[target].copy_from_slice(&from[source]);
    }
    Ok(())
}

/// The location of the blocks of a permutation in a slice: at `base + index * stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLayout<'a> {
    /// The start of block 0.
    pub base: u64,
    /// The distance from block to block.
    pub stride: u64,
    /// One index for each block; `None` if the blocks are in order.
    pub indices: Option<&'a [u32]>,
}

impl BlockLayout<'_> {
    fn block(&self, at: usize, length: u64, within: usize) -> Result<Range<usize>> {
        let index = match self.indices {
            None => at as u64,
            Some(indices) => {
                u64::from(*indices.get(at).ok_or_else(|| out_of_bounds(at as u64, 0, within))?)
            }
        };
        range(self.base, index, self.stride, length, within)
    }
}

/// Swaps dimensions of `count` blocks. Errors: `OutOfBounds`, also for too few indices.
pub fn permute(
    (from, from_place): (&[u8], BlockLayout<'_>),
    (to, to_place): (&mut [u8], BlockLayout<'_>),
    count: usize,
    swap: Swap,
) -> Result<()> {
    let length = swap.length().ok_or_else(|| out_of_bounds(0, u64::MAX, from.len()))?;
    for at in 0..count {
        let source = from_place.block(at, length, from.len())?;
        let target = to_place.block(at, length, to.len())?;
        permute_block(&from[source], &mut to[target], swap)?;
    }
    Ok(())
}

/// Swaps dimensions of one block. Errors: `OutOfBounds` if a slice does not have the length of the
/// block.
pub fn permute_block(from: &[u8], to: &mut [u8], swap: Swap) -> Result<()> {
    if swap.length() != Some(from.len() as u64) || from.len() != to.len() {
        return Err(out_of_bounds(0, swap.length().unwrap_or(u64::MAX), from.len().min(to.len())));
    }
    if from.is_empty() {
        return Ok(());
    }
    // Their product is the length of a slice.
    let [rows, columns, run] = [swap.rows, swap.columns, swap.run].map(|number| number as usize);
    let plane = rows * columns * run;
    for (from, to) in from.chunks_exact(plane).zip(to.chunks_exact_mut(plane)) {
        for (at, to) in to.chunks_exact_mut(run).enumerate() {
            let (column, row) = (at / rows, at % rows);
            let source = (row * columns + column) * run;
            to.copy_from_slice(&from[source..source + run]);
        }
    }
    Ok(())
}

/// Returns the byte range of a block in a slice of `within` bytes.
fn range(base: u64, index: u64, stride: u64, length: u64, within: usize) -> Result<Range<usize>> {
    let start = index.checked_mul(stride).and_then(|offset| offset.checked_add(base));
    let end = start.and_then(|start| start.checked_add(length)).filter(|end| *end <= within as u64);
    match (start, end) {
        (Some(start), Some(end)) => Ok(start as usize..end as usize),
        _ => Err(out_of_bounds(start.unwrap_or(u64::MAX), length, within)),
    }
}

fn out_of_bounds(start: u64, length: u64, within: usize) -> Error {
    ErrorKind::OutOfBounds
        .because(format!("{length} bytes at offset {start} are outside a buffer of {within} bytes"))
}
