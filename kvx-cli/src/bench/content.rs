//! The content of memory, which every side computes from a few numbers.

use kvx::Memory;

use super::bare::List;
use super::points::Shape;
use crate::Result;

/// The number of bytes that are written or compared at a time.
const PIECE: usize = 256 << 10;

/// Returns the 8 bytes at `offset`, a multiple of 8, of a source. They are never zero at an offset
/// that exists in a machine's memory.
fn word(offset: u64) -> u64 {
    (offset / 8 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn write(memory: &Memory, bytes: u64, content: impl Fn(u64) -> u64) -> kvx::Result<()> {
    let mut piece = vec![0; PIECE];
    for start in (0..bytes).step_by(PIECE) {
        let len = PIECE.min((bytes - start) as usize);
        for (at, place) in piece[..len].chunks_exact_mut(8).enumerate() {
            place.copy_from_slice(&content(start + 8 * at as u64).to_le_bytes());
        }
        memory.copy_in(start as usize, &piece[..len])?;
    }
    Ok(())
}

/// Fills the first `bytes` of memory with the content of a source.
pub(crate) fn fill(memory: &Memory, bytes: u64) -> kvx::Result<()> {
    write(memory, bytes, word)
}

/// Zeroes the first `bytes` of memory, for a destination.
pub(crate) fn wipe(memory: &Memory, bytes: u64) -> kvx::Result<()> {
    write(memory, bytes, |_| 0)
}

/// Compares every byte of a destination's first lists with the expected content.
pub(crate) fn check(memory: &Memory, shape: Shape, lists: u32) -> Result<()> {
    let pairs = shape.from().into_iter().zip(shape.to());
    compare(memory, shape.block, pairs.take((lists * shape.count) as usize))
}

/// Compares blocks of a destination with the blocks of the source that belong there. `pairs` holds
/// the source's block, then the destination's.
pub(crate) fn compare(
    memory: &Memory,
    block: u64,
    pairs: impl Iterator<Item = (u32, u32)>,
) -> Result<()> {
    let mut piece = vec![0; PIECE.min(block as usize)];
    for (from, to) in pairs {
        let (source, destination) = (u64::from(from) * block, u64::from(to) * block);
        for start in (0..block).step_by(PIECE) {
            let piece = &mut piece[..PIECE.min((block - start) as usize)];
            memory.copy_out((destination + start) as usize, piece)?;
            let mut expected =
                (source + start..).step_by(8).map(|offset| word(offset).to_le_bytes());
            if !piece
                .chunks_exact(8)
                .all(|word| expected.next().is_some_and(|expected| word == expected))
            {
                return Err(format!(
                    "block {to} of the destination does not hold block {from} of the source"
                )
                .into());
            }
        }
    }
    Ok(())
}

/// The block lists of a shape, as the limits use them.
pub(crate) struct ShapeBlocks {
    shape: Shape,
    from: Vec<u32>,
    to: Vec<u32>,
}

impl ShapeBlocks {
    pub(crate) fn of(shape: Shape) -> Self {
        ShapeBlocks { shape, from: shape.from(), to: shape.to() }
    }

    /// Returns the list of a transfer, by its number: lists repeat after a while.
    pub(crate) fn list(&self, transfer: u64) -> List<'_> {
        let part = self.shape.part(transfer);
        List {
            length: self.shape.block as usize,
            from: &self.from[part.clone()],
            to: &self.to[part],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::bare;
    use super::super::points::Pattern;
    use super::*;

    #[test]
    fn a_copy_passes_the_check_and_a_changed_byte_does_not() {
        let shape = Shape { block: 24, count: 25, lists: 2, pattern: Pattern::Scattered, seed: 9 };
        let bytes = shape.memory() as usize;
        let (source, destination) = (Memory::owned(vec![0; bytes]), Memory::owned(vec![1; bytes]));
        fill(&source, shape.memory()).unwrap();
        assert!(check(&destination, shape, 2).is_err());
        // SAFETY: both memories have all blocks of the shape, and nobody else touches them.
        unsafe {
            bare::copy(source.address(), destination.address(), ShapeBlocks::of(shape).list(0))
        };
        assert!(check(&destination, shape, 1).is_ok() && check(&destination, shape, 2).is_err());
        // SAFETY: list 3 is within the same two memories, which this test owns.
        unsafe {
            bare::copy(source.address(), destination.address(), ShapeBlocks::of(shape).list(3))
        };
        check(&destination, shape, 2).unwrap();
        let mut byte = [0];
        destination.copy_out(700, &mut byte).unwrap();
        destination.copy_in(700, &[byte[0] ^ 1]).unwrap();
        assert!(check(&destination, shape, 2).is_err());
        wipe(&destination, shape.memory()).unwrap();
        assert!(check(&destination, shape, 2).is_err());
    }
}
