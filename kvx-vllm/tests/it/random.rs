//! Numbers that depend only on the seed.

use std::ops::Range;

/// splitmix64: the same numbers from the same seed on every machine.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number in the range, which must not be empty.
    pub(crate) fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.below(range.end - range.start)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.word() % limit
    }

    /// Returns true in `chance` percent of all calls.
    pub(crate) fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }

    pub(crate) fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    /// Returns a number that is usually near the start of the range, rarely far from it.
    pub(crate) fn skewed(&mut self, range: Range<u64>) -> u64 {
        let far = self.within(range.clone());
        let shift = self.below(8);
        range.start + ((far - range.start) >> shift)
    }

    /// Returns distinct numbers below `limit`, in random order.
    pub(crate) fn distinct(&mut self, count: usize, limit: u32) -> Vec<u32> {
        let mut all: Vec<u32> = (0..limit).collect();
        for at in 0..count {
            let other = at + self.below((all.len() - at) as u64) as usize;
            all.swap(at, other);
        }
        all.truncate(count);
        all
    }
}
