//! Conversion of blocks into contiguous ranges of bytes: lazily, without an allocation per block.

use std::sync::Arc;

use crate::bound::{BoundPlan, PlacedGrid};
use crate::grid::Indices;

/// A piece that is contiguous on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The position of the piece's local region in [`BoundPlan::locals`].
    pub local_region: u32,
    /// The position of the piece's remote region in [`BoundPlan::remotes`].
    pub remote_region: u32,
    /// The offset in the local region.
    pub local_offset: u64,
    /// The offset in the remote region.
    pub remote_offset: u64,
    /// The length in bytes.
    pub len: u64,
}

impl BoundPlan {
    /// Returns the contiguous pieces, of at most `max_len` bytes each. The iterator is lazy, merges
    /// pieces that are adjacent on both sides, and can be resumed.
    pub fn segments(self: &Arc<Self>, max_len: u64) -> Segments {
        Segments::new(Arc::clone(self), max_len)
    }
}

/// The segments of a bound plan; see [`BoundPlan::segments`]. It owns the plan, so a transport can
/// keep it between turns.
pub struct Segments {
    bound: Arc<BoundPlan>,
    max: u64,
    /// The pair and the grid that come next.
    pair: usize,
    grid: usize,
    /// The current pair of grids.
    now: Option<(PlacedGrid, PlacedGrid)>,
    /// The indices of the next block, local and remote.
    next: (u32, u32),
    /// True if blocks with consecutive indices are adjacent in memory.
    packed: bool,
    at: usize,
    count: usize,
    rest: Option<Segment>,
}

impl Segments {
    /// Creates the merged segments of `bound`, none longer than `max` bytes.
    pub fn new(bound: Arc<BoundPlan>, max: u64) -> Self {
        let max = max.max(1);
        Segments {
            bound,
            max,
            pair: 0,
            grid: 0,
            now: None,
            next: (0, 0),
            packed: false,
            at: 0,
            count: 0,
            rest: None,
        }
    }

    /// Returns the plan that the segments come from.
    pub fn bound(&self) -> &Arc<BoundPlan> {
        &self.bound
    }

    /// Enters the next grid that has blocks. Returns `None` at the end of the plan.
    #[cold]
    fn enter(&mut self) -> Option<()> {
        loop {
            let pair = self.bound.pairs().get(self.pair)?;
            match (pair.local.get(self.grid), pair.remote.get(self.grid)) {
                (Some(local), Some(remote)) if !pair.local_indices.is_empty() => {
                    self.grid += 1;
                    (self.at, self.count) = (0, pair.local_indices.len());
                    self.next = (pair.local_indices.at(0), pair.remote_indices.at(0));
                    self.packed = local.grid.is_packed() && remote.grid.is_packed();
                    self.now = Some((*local, *remote));
                    return Some(());
                }
                _ => (self.pair, self.grid) = (self.pair + 1, 0),
            }
        }
    }

    /// Returns the next merged piece, of any length.
    #[inline]
    fn merged(&mut self) -> Option<Segment> {
        if self.at >= self.count {
            self.enter()?;
        }
        let Some((local, remote)) = &self.now else { return None };
        let pair = &self.bound.pairs()[self.pair];
        let (ours, theirs) = (&pair.local_indices, &pair.remote_indices);
        let (mut our, mut their) = self.next;
        let length = local.grid.length;
        let mut segment = Segment {
            local_region: local.region,
            remote_region: remote.region,
            local_offset: local.grid.offset(our),
            remote_offset: remote.grid.offset(their),
            len: length,
        };
        let mut at = self.at + 1;
        while at < self.count {
            self.next = (ours.at(at), theirs.at(at));
            let follows = |next: u32, index: u32| index.checked_add(1) == Some(next);
            let neighbours =
                self.packed && follows(self.next.0, our) && follows(self.next.1, their);
            if !neighbours || segment.len >= self.max {
                break;
            }
            (our, their) = self.next;
            segment.len += length;
            at += 1;
        }
        self.at = at;
        Some(segment)
    }

    /// Returns the first `max` bytes of the segment and keeps the rest.
    #[cold]
    fn split(&mut self, mut segment: Segment) -> Segment {
        if segment.len > self.max {
            self.rest = Some(Segment {
                local_offset: segment.local_offset + self.max,
                remote_offset: segment.remote_offset + self.max,
                len: segment.len - self.max,
                ..segment
            });
            segment.len = self.max;
        }
        segment
    }
}

impl Iterator for Segments {
    type Item = Segment;

    #[inline]
    fn next(&mut self) -> Option<Segment> {
        if self.rest.is_some() {
            return self.rest.take().map(|rest| self.split(rest));
        }
        let segment = self.merged()?;
        if segment.len > self.max { Some(self.split(segment)) } else { Some(segment) }
    }
}

/// A piece that is contiguous on one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The region, as in [`PlacedGrid`].
    pub region: u32,
    /// The offset in the region.
    pub offset: u64,
    /// The length in bytes.
    pub len: u64,
}

/// One side of a pair as a stream of bytes, grid by grid and index by index. Transports whose two
/// ends each walk their own side (sockets) use it. Both ends agree on the order of the bytes, but
/// not on where pieces end.
#[derive(Clone, Debug)]
pub struct Extents {
    grids: Arc<[PlacedGrid]>,
    indices: Indices,
    grid: usize,
    at: usize,
    rest: Option<Extent>,
    left: u64,
}

impl Extents {
    /// Creates the stream of these blocks. The indices must lie within the grids.
    pub fn new(grids: Arc<[PlacedGrid]>, indices: Indices) -> Self {
        let left = grids.iter().map(|placed| placed.grid.length * indices.len() as u64).sum();
        Extents { grids, indices, grid: 0, at: 0, rest: None, left }
    }

    /// Returns the number of bytes left.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Returns the next piece, of at most `max` bytes; `max` must be at least 1.
    pub fn take(&mut self, max: u64) -> Option<Extent> {
        let mut extent = match self.rest.take() {
            Some(rest) => rest,
            None => self.merged(max)?,
        };
        if extent.len > max {
            self.rest =
                Some(Extent { offset: extent.offset + max, len: extent.len - max, ..extent });
            extent.len = max;
        }
        self.left -= extent.len;
        Some(extent)
    }

    fn merged(&mut self, max: u64) -> Option<Extent> {
        let count = self.indices.len();
        if self.at == count {
            self.at = 0;
            self.grid += 1;
        }
        if count == 0 {
            return None;
        }
        let placed = self.grids.get(self.grid)?;
        let mut extent = Extent {
            region: placed.region,
            offset: placed.grid.offset(self.indices.at(self.at)),
            len: placed.grid.length,
        };
        self.at += 1;
        while self.at < count
            && extent.len < max
            && placed.grid.offset(self.indices.at(self.at)) == extent.offset + extent.len
        {
            extent.len += placed.grid.length;
            self.at += 1;
        }
        Some(extent)
    }
}

#[cfg(test)]
mod exhaustive;
#[cfg(test)]
mod tests {
    use super::*;
    use crate::Grid;

    fn extents(grids: &[Grid], indices: impl Into<Indices>) -> Extents {
        Extents::new(
            grids.iter().map(|grid| PlacedGrid { region: 0, grid: *grid }).collect(),
            indices.into(),
        )
    }

    fn all(mut extents: Extents, max: u64) -> Vec<(u64, u64)> {
        let total = extents.left();
        let mut pieces = Vec::new();
        while let Some(extent) = extents.take(max) {
            pieces.push((extent.offset, extent.len));
        }
        assert_eq!(pieces.iter().map(|(_, len)| len).sum::<u64>(), total);
        assert_eq!(extents.left(), 0);
        pieces
    }

    // vLLM 62: the plan merges blocks that are adjacent on both sides into one segment, for every
    //     backend
    #[test]
    fn neighbours_merge_and_long_pieces_split() {
        let grid = Grid::packed(10, 100);
        assert_eq!(all(extents(&[grid], [3, 4, 5, 9, 1]), 1000), [(30, 30), (90, 10), (10, 10)]);
        assert_eq!(all(extents(&[grid], 0..4), 15), [(0, 15), (15, 5), (20, 15), (35, 5)]);
        assert_eq!(all(extents(&[grid], 5..5), 15), []);
    }

    #[test]
    fn grids_follow_each_other_and_strides_keep_blocks_apart() {
        let halves = Grid { base: 5, stride: 10, length: 5, count: 4 };
        assert_eq!(
            all(extents(&[halves, halves.at(0)], [0, 1]), 99),
            [(5, 5), (15, 5), (0, 5), (10, 5)]
        );
    }
}
