//! What tensor-parallel ranks say to each other: sums, in one order.

use std::sync::Arc;

use super::chunk::Chunk;
use super::error::Result;

/// The number of equal parts of a sum. They are added in one tree, whichever rank computes a part,
/// so that 1, 2, 4 and 8 ranks get the same bits.
pub const PARTS: usize = 8;

/// A rank's place among those that share one model.
#[derive(Clone)]
pub struct Shard {
    /// Counted from 0.
    pub rank: usize,
    /// 1, 2, 4 or 8.
    pub size: usize,
    /// The way to the others.
    pub ranks: Arc<dyn Ranks>,
}

impl Shard {
    /// The whole model in one rank.
    pub fn alone() -> Shard {
        Shard { rank: 0, size: 1, ranks: Arc::new(SingleRank) }
    }
}

/// Adds numbers over all ranks.
pub trait Ranks: Send + Sync {
    /// Makes `values` the sums over all ranks, each rank's at the same place, in the order of
    /// [`sum_in_tree`].
    ///
    /// # Errors
    /// A rank that is gone or does not answer by a deadline: the step then fails.
    fn sum(&self, values: &mut [f32]) -> Result<()>;

    /// Rank 0 tells the others of the step that it begins, if they do not know it by other means.
    ///
    /// # Errors
    /// As [`Ranks::sum`].
    fn announce_step(&self, _step: &[Chunk<'_>]) -> Result<()> {
        Ok(())
    }

    /// The other end of [`Ranks::announce_step`]: waits for a step; nothing when rank 0 has ended.
    ///
    /// # Errors
    /// As [`Ranks::sum`].
    fn next_step(&self) -> Result<Option<Vec<u32>>> {
        Ok(None)
    }
}

/// Adds up what ranks 0, 1, … gave: neighbours to neighbours, until one is left, which is then in
/// `given[0]`.
pub fn sum_in_tree(given: &mut [Vec<f32>]) {
    let mut apart = 1;
    while apart < given.len() {
        for pair in given.chunks_mut(2 * apart) {
            if let Some((left, [right, ..])) = pair.split_at_mut_checked(apart) {
                left[0].iter_mut().zip(right).for_each(|(sum, value)| *sum += *value);
            }
        }
        apart *= 2;
    }
}

struct SingleRank;

impl Ranks for SingleRank {
    fn sum(&self, _: &mut [f32]) -> Result<()> {
        Ok(())
    }
}
