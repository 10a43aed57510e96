//! The content of the demo's pool and the blocks that are read; both are known without the pool.

use kvx::{Grid, Memory};

use crate::bench::bare::{self, List};
use crate::bench::content;
use crate::bench::points::shuffled;
use crate::{Result, bytes};

/// The number of blocks in the pool.
const IN_POOL: u32 = 4096;
/// The number of blocks that are read.
const READ: u32 = 1024;
/// The pool's size is a multiple of this, so that blocks are whole words.
pub(crate) const STEP: u64 = 1 << 20;

/// The blocks of a pool of a certain size, and the scattered blocks that are read.
pub(crate) struct DemoBlocks {
    /// The grid of the pool.
    pub(crate) pool: Grid,
    /// The grid of the reader's memory, which holds exactly the blocks that are read.
    pub(crate) room: Grid,
    /// The blocks of the pool that are read.
    pub(crate) from: Vec<u32>,
    /// The destination of each.
    pub(crate) to: Vec<u32>,
}

impl DemoBlocks {
    /// Chooses the blocks for a pool of `size` bytes.
    pub(crate) fn of(size: u64) -> Result<Self> {
        if size == 0 || !size.is_multiple_of(STEP) || usize::try_from(size).is_err() {
            return Err(
                format!("--size {size} bytes: write a multiple of {}", bytes::show(STEP)).into()
            );
        }
        let length = size / u64::from(IN_POOL);
        Ok(DemoBlocks {
            pool: Grid::packed(length, IN_POOL),
            room: Grid::packed(length, READ),
            from: shuffled(IN_POOL, 1).into_iter().take(READ as usize).collect(),
            to: shuffled(READ, 2),
        })
    }

    /// Returns the bytes of one block.
    pub(crate) fn length(&self) -> u64 {
        self.pool.length
    }

    /// Returns the bytes that are read.
    pub(crate) fn read_bytes(&self) -> u64 {
        bytes_of(&self.room)
    }

    /// Allocates the pool, and fills it.
    pub(crate) fn filled_pool(&self) -> Result<Memory> {
        let bytes = bytes_of(&self.pool);
        let pool = Memory::pool(bytes as usize).build()?;
        content::fill(&pool, bytes)?;
        Ok(pool)
    }

    /// Allocates zeroed memory for the blocks that are read.
    pub(crate) fn empty_room(&self) -> Result<Memory> {
        Ok(Memory::pool(self.read_bytes() as usize).build()?)
    }

    /// Zeroes the blocks that were read.
    pub(crate) fn wipe(&self, room: &Memory) -> Result<()> {
        Ok(content::wipe(room, self.read_bytes())?)
    }

    /// Compares every block that was read with the content of the pool.
    pub(crate) fn check(&self, room: &Memory) -> Result<()> {
        let pairs = self.from.iter().copied().zip(self.to.iter().copied());
        content::compare(room, self.length(), pairs)
    }

    /// Copies the same blocks between two pools of this process, which no protocol can beat.
    pub(crate) fn copy(&self, pool: &Memory, room: &Memory) {
        let list = List { length: self.length() as usize, from: &self.from, to: &self.to };
        // SAFETY: the demo makes both memories of these sizes, registers neither with an agent that
        // moves blocks meanwhile, and holds no references into them.
        unsafe { bare::copy(pool.address(), room.address(), list) };
    }
}

fn bytes_of(grid: &Grid) -> u64 {
    grid.length * u64::from(grid.count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_without_whole_blocks_are_refused() {
        for size in [0, 1, (1 << 20) + 1] {
            assert!(DemoBlocks::of(size).is_err(), "{size}");
        }
        assert_eq!(DemoBlocks::of(256 << 20).unwrap().length(), 64 << 10);
    }

    #[test]
    fn the_blocks_that_are_read_are_scattered_and_each_is_read_once() {
        let blocks = DemoBlocks::of(1 << 20).unwrap();
        for (list, below) in [(&blocks.from, IN_POOL), (&blocks.to, READ)] {
            let mut sorted = list.clone();
            sorted.sort_unstable();
            sorted.dedup();
            assert_eq!(sorted.len(), READ as usize);
            assert!(list.iter().all(|index| *index < below));
        }
        let pairs: Vec<_> = blocks.from.iter().zip(&blocks.to).collect();
        let adjacent = pairs
            .windows(2)
            .filter(|pair| *pair[1].0 == pair[0].0 + 1 && *pair[1].1 == pair[0].1 + 1);
        assert_eq!(adjacent.count(), 0);
    }

    #[test]
    fn a_copy_passes_the_check_and_a_changed_byte_does_not() {
        let blocks = DemoBlocks::of(1 << 20).unwrap();
        let (pool, room) = (blocks.filled_pool().unwrap(), blocks.empty_room().unwrap());
        assert!(blocks.check(&room).is_err());
        blocks.copy(&pool, &room);
        blocks.check(&room).unwrap();
        let mut byte = [0];
        room.copy_out(5000, &mut byte).unwrap();
        room.copy_in(5000, &[byte[0] ^ 1]).unwrap();
        assert!(blocks.check(&room).is_err());
        blocks.copy(&pool, &room);
        blocks.wipe(&room).unwrap();
        assert!(blocks.check(&room).is_err());
    }
}
