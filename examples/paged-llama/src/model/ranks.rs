//! The sums that tensor-parallel ranks compute together, in a fixed order.

use std::sync::Arc;

use super::chunk::Chunk;
use super::error::Result;

/// The number of equal parts of a sum. They are added as a tree, whichever rank computes a part, so
/// that 1, 2, 4 and 8 ranks get the same bits.
pub const PARTS: usize = 8;

/// A rank among those that share one model.
#[derive(Clone)]
pub struct Shard {
    /// The number of the rank, from 0.
    pub rank: usize,
    /// The number of ranks: 1, 2, 4 or 8.
    pub size: usize,
    /// The connection to the other ranks.
    pub ranks: Arc<dyn Ranks>,
}

impl Shard {
    /// Returns the only rank of a model.
    pub fn alone() -> Shard {
        Shard { rank: 0, size: 1, ranks: Arc::new(SingleRank) }
    }
}

/// Adds numbers over all ranks.
pub trait Ranks: Send + Sync {
    /// Replaces each of the `values` by the sum of the ranks' values at this index, in the order of
    /// [`sum_in_tree`].
    ///
    /// # Errors
    /// Fails if a rank is lost or does not answer by a deadline; the step then fails.
    fn sum(&self, values: &mut [f32]) -> Result<()>;

    /// Announces the step that rank 0 begins, unless the other ranks know it by other means.
    ///
    /// # Errors
    /// See [`Ranks::sum`].
    fn announce_step(&self, _step: &[Chunk<'_>]) -> Result<()> {
        Ok(())
    }

    /// Waits for a step that [`Ranks::announce_step`] announces; returns `None` when rank 0 has
    /// ended.
    ///
    /// # Errors
    /// See [`Ranks::sum`].
    fn next_step(&self) -> Result<Option<Vec<u32>>> {
        Ok(None)
    }
}

/// Adds the values of ranks 0, 1, …: neighbours to neighbours, until one sum is left in `given[0]`.
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
