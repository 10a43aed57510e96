//! The content of the demo's pool and the blocks that are read, both known without the pool.

use kvx::{Grid, Memory};

use crate::{Result, bytes};

/// Blocks in the pool.
const IN_POOL: u32 = 4096;
/// Blocks that are read.
const READ: u32 = 1024;
/// The pool's size is a multiple of this, so that blocks are whole words.
pub(crate) const STEP: u64 = 1 << 20;

/// The blocks of a pool of a certain size, and the scattered ones that are read.
pub(crate) struct DemoBlocks {
    /// Of the pool.
    pub(crate) pool: Grid,
    /// Of the reader's memory, which has room for what is read and no more.
    pub(crate) room: Grid,
    /// Which ones of the pool.
    pub(crate) from: Vec<u32>,
    /// Where each of them goes.
    pub(crate) to: Vec<u32>,
}

impl DemoBlocks {
    /// Those of a pool of `size` bytes.
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

    /// Bytes of one block.
    pub(crate) fn length(&self) -> u64 {
        self.pool.length
    }

    /// Bytes that are read.
    pub(crate) fn read_bytes(&self) -> u64 {
        bytes_of(&self.room)
    }

    /// A pool with its content.
    pub(crate) fn filled_pool(&self) -> Result<Memory> {
        let pool = Memory::pool(bytes_of(&self.pool) as usize).build()?;
        let mut block = vec![0; self.length() as usize];
        for index in 0..self.pool.count {
            fill(index, &mut block);
            pool.copy_in(self.pool.offset(index) as usize, &block)?;
        }
        Ok(pool)
    }

    /// Memory for what is read, all zeros.
    pub(crate) fn empty_room(&self) -> Result<Memory> {
        Ok(Memory::pool(self.read_bytes() as usize).build()?)
    }

    /// Overwrites what was read.
    pub(crate) fn wipe(&self, room: &Memory) -> Result<()> {
        let zeros = vec![0; self.length() as usize];
        for index in 0..self.room.count {
            room.copy_in(self.room.offset(index) as usize, &zeros)?;
        }
        Ok(())
    }

    /// Compares the checksum of every block that was read with that of what the pool holds.
    pub(crate) fn check(&self, room: &Memory) -> Result<()> {
        let (mut got, mut expected) =
            (vec![0; self.length() as usize], vec![0; self.length() as usize]);
        for (from, to) in self.from.iter().zip(&self.to) {
            room.copy_out(self.room.offset(*to) as usize, &mut got)?;
            fill(*from, &mut expected);
            if checksum(&got) != checksum(&expected) {
                return Err(format!(
                    "block {from} of the pool did not arrive: its checksum is wrong"
                )
                .into());
            }
        }
        Ok(())
    }

    /// Copies the same blocks between two pools of this process: what no protocol can beat.
    pub(crate) fn copy(&self, pool: &Memory, room: &Memory) -> Result<()> {
        for (from, to) in self.from.iter().zip(&self.to) {
            let start = self.pool.offset(*from) as usize;
            // SAFETY: the demo never registers this pool and fills it before it copies: nobody
            // writes to it.
            let block = unsafe { pool.block(start..start + self.length() as usize) }?;
            room.copy_in(self.room.offset(*to) as usize, block)?;
        }
        Ok(())
    }
}

fn bytes_of(grid: &Grid) -> u64 {
    grid.length * u64::from(grid.count)
}

/// The content of a block of the pool.
fn fill(index: u32, block: &mut [u8]) {
    let mut random = Random(u64::from(index) << 32);
    for word in block.chunks_exact_mut(8) {
        word.copy_from_slice(&random.next().to_le_bytes());
    }
}

/// Any change of a word, and any exchange of two, changes it.
fn checksum(block: &[u8]) -> u64 {
    block.chunks_exact(8).fold(0, |sum: u64, word| {
        let word = word.try_into().map_or(0, u64::from_le_bytes);
        (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    })
}

/// The numbers below `count` in an order that is the same every time.
fn shuffled(count: u32, seed: u64) -> Vec<u32> {
    let mut random = Random(seed);
    let mut numbers: Vec<u32> = (0..count).collect();
    for at in (1..numbers.len()).rev() {
        numbers.swap(at, (random.next() % (at as u64 + 1)) as usize);
    }
    numbers
}

/// Numbers that look random and are the same for the same seed (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }
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
        blocks.copy(&pool, &room).unwrap();
        blocks.check(&room).unwrap();
        let mut byte = [0];
        room.copy_out(5000, &mut byte).unwrap();
        room.copy_in(5000, &[byte[0] ^ 1]).unwrap();
        assert!(blocks.check(&room).is_err());
        blocks.copy(&pool, &room).unwrap();
        blocks.wipe(&room).unwrap();
        assert!(blocks.check(&room).is_err());
    }
}
