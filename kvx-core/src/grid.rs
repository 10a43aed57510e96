//! Grids: equal blocks in a region, and the index lists that select blocks.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::fault_injection::injected;
use crate::{ErrorKind, MemoryKind, Result, fork};

/// A range of memory that grids lie on: a [`Region`](crate::Region) or a
/// [`PeerRegion`](crate::PeerRegion).
pub trait Place: sealed::Sealed {
    /// Returns the length in bytes.
    fn len(&self) -> u64;
    /// Returns true if the range has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Returns the kind of memory.
    fn kind(&self) -> MemoryKind;
    /// Returns true if the range is read-only: see
    /// [`Memory::adopt_shared`](crate::Memory::adopt_shared).
    fn is_read_only(&self) -> bool;
    /// Returns the address space and the address of the first byte, by which core recognises two
    /// regions over the same bytes.
    #[doc(hidden)]
    fn origin(&self) -> (u64, u64);
    #[doc(hidden)]
    fn is(&self, other: &Self) -> bool;
}

/// Restricts `Place` to the regions of this crate.
pub(crate) mod sealed {
    pub trait Sealed {}
}

/// Equal blocks at equal distances. Block `i` is the `length` bytes from `base + i * stride`.
///
/// A head slice for tensor parallelism is another grid on the same region, with the same stride and
/// a shorter length.
///
/// ```
/// # use kvx_core as kvx;
/// use kvx::Grid;
/// let whole = Grid::packed(4096, 100);
/// let second_half_of_each = Grid { base: 2048, length: 2048, ..whole };
/// assert_eq!(second_half_of_each.end(), Some(100 * 4096));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grid {
    /// The offset of block 0 in the region, in bytes.
    pub base: u64,
    /// The distance from one block to the next, in bytes; at least `length`.
    pub stride: u64,
    /// The length of a block in bytes.
    pub length: u64,
    /// The number of blocks.
    pub count: u32,
}

impl Grid {
    /// Creates a grid of `count` adjacent blocks of `length` bytes from offset 0.
    pub const fn packed(length: u64, count: u32) -> Self {
        Grid { base: 0, stride: length, length, count }
    }

    /// Returns the same grid with another base.
    #[must_use]
    pub const fn at(self, base: u64) -> Self {
        Grid { base, ..self }
    }

    /// Returns the offset of a block.
    #[inline]
    pub const fn offset(&self, index: u32) -> u64 {
        self.base + self.stride * index as u64
    }

    /// Returns the offset after the last block; `None` if it overflows. An empty grid ends at its
    /// base.
    pub const fn end(&self) -> Option<u64> {
        if self.count == 0 {
            return Some(self.base);
        }
        let Some(last) = self.stride.checked_mul(self.count as u64 - 1) else { return None };
        let Some(last) = last.checked_add(self.base) else { return None };
        last.checked_add(self.length)
    }

    /// Returns true if each block ends where the next one begins.
    pub const fn is_packed(&self) -> bool {
        self.stride == self.length
    }

    /// Checks the grid against a region of `len` bytes.
    ///
    /// # Errors
    /// `Invalid` for blocks of length 0 or a stride below the length; `OutOfBounds` if the grid
    /// does not fit.
    pub fn check(&self, len: u64) -> Result<()> {
        if self.length == 0 {
            return Err(
                ErrorKind::Invalid.because("a grid with length 0: blocks have at least one byte")
            );
        }
        if self.count > 1 && self.stride < self.length {
            return Err(ErrorKind::Invalid.because(format!(
                "a grid with stride {} below its length {}: blocks would overlap",
                self.stride, self.length
            )));
        }
        match self.end() {
            Some(end) if end <= len => Ok(()),
            _ if injected("bounds") => Ok(()),
            _ => Err(ErrorKind::OutOfBounds.because(format!(
                "a grid of {} blocks of {} bytes, stride {}, from offset {} does not fit into a \
                 region of {len} bytes",
                self.count, self.length, self.stride, self.base
            ))),
        }
    }
}

/// The indices of blocks in a grid set: a shared list or a range. They are never copied: a plan
/// keeps the `Arc`.
#[derive(Clone)]
pub struct Indices(Repr);

#[derive(Clone)]
enum Repr {
    List { list: Arc<[u32]>, part: Range<usize> },
    Range(Range<u32>),
}

impl Indices {
    /// Returns the number of indices.
    pub fn len(&self) -> usize {
        match &self.0 {
            Repr::List { part, .. } => part.len(),
            Repr::Range(range) => range.len(),
        }
    }

    /// Returns true if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the index at `position`.
    ///
    /// # Panics
    /// If a list has no such position.
    #[inline]
    pub fn at(&self, position: usize) -> u32 {
        match &self.0 {
            Repr::List { list, part } => list[part.start + position],
            Repr::Range(range) => range.start + position as u32,
        }
    }

    /// Returns a part of the indices, sharing the list.
    ///
    /// # Panics
    /// If `part` is not within `0..len`.
    #[must_use]
    pub fn slice(&self, part: Range<usize>) -> Self {
        assert!(part.start <= part.end && part.end <= self.len(), "a slice within the list");
        Indices(match &self.0 {
            Repr::List { list, part: outer } => Repr::List {
                list: Arc::clone(list),
                part: outer.start + part.start..outer.start + part.end,
            },
            Repr::Range(range) => {
                Repr::Range(range.start + part.start as u32..range.start + part.end as u32)
            }
        })
    }

    /// Returns the range, if the indices are a range.
    pub fn as_range(&self) -> Option<Range<u32>> {
        match &self.0 {
            Repr::Range(range) => Some(range.clone()),
            Repr::List { .. } => None,
        }
    }

    /// Returns the list, if the indices are a list.
    pub fn as_list(&self) -> Option<&[u32]> {
        match &self.0 {
            Repr::List { list, part } => Some(&list[part.clone()]),
            Repr::Range(_) => None,
        }
    }

    /// Returns the largest index; `None` if there are none.
    pub fn max(&self) -> Option<u32> {
        match &self.0 {
            Repr::List { list, part } => list[part.clone()].iter().copied().max(),
            Repr::Range(range) => range.end.checked_sub(1).filter(|last| *last >= range.start),
        }
    }

    /// Returns the size of their description in bytes.
    pub(crate) fn bytes(&self) -> usize {
        match &self.0 {
            Repr::List { part, .. } => part.len() * 4,
            Repr::Range(_) => 8,
        }
    }

    pub(crate) fn same_list(&self, other: &Indices) -> bool {
        match (&self.0, &other.0) {
            (Repr::List { list: a, part: x }, Repr::List { list: b, part: y }) => {
                Arc::ptr_eq(a, b) && x == y
            }
            (Repr::Range(a), Repr::Range(b)) => a == b,
            _ => false,
        }
    }
}

impl From<Arc<[u32]>> for Indices {
    fn from(list: Arc<[u32]>) -> Self {
        let part = 0..list.len();
        Indices(Repr::List { list, part })
    }
}

impl From<Vec<u32>> for Indices {
    fn from(list: Vec<u32>) -> Self {
        Arc::<[u32]>::from(list).into()
    }
}

impl From<&[u32]> for Indices {
    fn from(list: &[u32]) -> Self {
        Arc::<[u32]>::from(list).into()
    }
}

impl<const N: usize> From<[u32; N]> for Indices {
    fn from(list: [u32; N]) -> Self {
        Arc::<[u32]>::from(list).into()
    }
}

impl From<Range<u32>> for Indices {
    fn from(range: Range<u32>) -> Self {
        Indices(Repr::Range(range))
    }
}

impl fmt::Debug for Indices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Repr::Range(range) => write!(f, "{range:?}"),
            Repr::List { .. } => write!(f, "[{} indices]", self.len()),
        }
    }
}

/// Grids with equally many blocks that share one index list, such as the layers of a model. `R` is
/// [`Region`](crate::Region) or [`PeerRegion`](crate::PeerRegion).
#[derive(Clone)]
pub struct GridSet<R> {
    pub(crate) grids: Arc<[(R, Grid)]>,
}

impl<R: Place + Clone> GridSet<R> {
    /// Creates a set of grids on these regions, in this order.
    ///
    /// # Errors
    /// `Invalid` if there are no grids or their counts differ, or for a grid with a wrong length or
    /// stride; `OutOfBounds` if a grid does not fit into its region; `Forked`.
    ///
    /// ```no_run
    /// # use kvx_core as kvx;
    /// # fn layers(regions: Vec<kvx::Region>) -> kvx::Result<()> {
    /// use kvx::{Grid, GridSet};
    /// let layers = GridSet::of(regions.into_iter().map(|layer| (layer, Grid::packed(64 << 10, 256))))?;
    /// # Ok(()) }
    /// ```
    pub fn of(grids: impl IntoIterator<Item = (R, Grid)>) -> Result<Self> {
        fork::check()?;
        let grids: Arc<[(R, Grid)]> = grids.into_iter().collect();
        grids.iter().try_for_each(|(region, grid)| grid.check(region.len()))?;
        GridSet { grids }.of_equal_counts()
    }

    /// Joins several sets into one; the grids keep their order.
    ///
    /// # Errors
    /// `Invalid` if there are no grids or their counts differ.
    pub fn join(sets: impl IntoIterator<Item = GridSet<R>>) -> Result<Self> {
        let grids = sets.into_iter().flat_map(|set| set.grids.to_vec()).collect();
        GridSet { grids }.of_equal_counts()
    }

    fn of_equal_counts(self) -> Result<Self> {
        let grids = &self.grids;
        let Some((_, first)) = grids.first() else {
            return Err(ErrorKind::Invalid.because("a grid set of no grids: join at least one"));
        };
        if let Some((_, other)) = grids.iter().find(|(_, grid)| grid.count != first.count) {
            return Err(ErrorKind::Invalid.because(format!(
                "a grid set shares one index list, but its grids have {} and {} blocks: make a set \
                 of each",
                first.count, other.count
            )));
        }
        Ok(self)
    }

    /// Returns the number of blocks in each grid.
    pub fn count(&self) -> u32 {
        self.grids[0].1.count
    }

    /// Returns the grids and the regions that they lie on.
    pub fn grids(&self) -> &[(R, Grid)] {
        &self.grids
    }

    /// Selects these blocks of every grid of the set: one side of a pair in a plan.
    pub fn blocks(&self, indices: impl Into<Indices>) -> Blocks<R> {
        Blocks { set: self.clone(), indices: indices.into() }
    }
}

/// Selected blocks of a grid set: one side of a pair in a [`Plan`](crate::Plan).
#[derive(Clone)]
pub struct Blocks<R> {
    pub(crate) set: GridSet<R>,
    pub(crate) indices: Indices,
}

#[cfg(test)]
mod exhaustive;
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_is_checked_against_its_region() {
        assert!(Grid::packed(16, 4).check(64).is_ok());
        assert_eq!(Grid::packed(16, 4).check(63).unwrap_err().kind(), ErrorKind::OutOfBounds);
        assert_eq!(Grid::packed(0, 4).check(64).unwrap_err().kind(), ErrorKind::Invalid);
        let overlapping = Grid { base: 0, stride: 8, length: 16, count: 2 };
        assert_eq!(overlapping.check(64).unwrap_err().kind(), ErrorKind::Invalid);
        let huge = Grid { base: u64::MAX, stride: u64::MAX, length: 1, count: u32::MAX };
        assert_eq!(huge.check(u64::MAX).unwrap_err().kind(), ErrorKind::OutOfBounds);
        // The last block of a strided grid needs no space after it.
        assert!(Grid { base: 8, stride: 16, length: 8, count: 4 }.check(64).is_ok());
    }

    #[test]
    fn slices_of_indices_share_the_list() {
        let list: Arc<[u32]> = [5, 6, 7, 8].into();
        let indices = Indices::from(Arc::clone(&list));
        let tail = indices.slice(2..4);
        assert_eq!((tail.len(), tail.at(0), tail.at(1), tail.max()), (2, 7, 8, Some(8)));
        assert_eq!(Arc::strong_count(&list), 3);
        let range = Indices::from(10..20).slice(3..5);
        assert_eq!((range.as_range(), range.max()), (Some(13..15), Some(14)));
        assert_eq!(Indices::from(5..5).max(), None);
    }
}
