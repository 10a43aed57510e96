//! From blocks to bytes: contiguous pieces, lazily, without an allocation per block.

use std::sync::Arc;

use crate::grid::Indices;
use crate::plan::{Bound, Placed};

/// A piece that is contiguous on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Position in [`Bound::locals`].
    pub local_region: u32,
    /// Position in [`Bound::remotes`].
    pub remote_region: u32,
    /// Offset in the local region.
    pub local_offset: u64,
    /// Offset in the remote region.
    pub remote_offset: u64,
    /// Bytes.
    pub len: u64,
}

/// The segments of a bound plan; see [`Bound::segments`]. Owns the plan, so it can be kept between turns.
pub struct Segments {
    bound: Arc<Bound>,
    max: u64,
    pair: usize,
    grid: usize,
    at: usize,
    rest: Option<Segment>,
}

impl Segments {
    pub(crate) fn new(bound: Arc<Bound>, max: u64) -> Self {
        Segments { bound, max: max.max(1), pair: 0, grid: 0, at: 0, rest: None }
    }

    /// The plan they come from.
    pub fn bound(&self) -> &Arc<Bound> {
        &self.bound
    }

    /// The next merged piece, however long.
    fn merged(&mut self) -> Option<Segment> {
        let pairs = self.bound.pairs();
        loop {
            let pair = pairs.get(self.pair)?;
            let count = pair.local_indices.len();
            if self.at == count || self.grid == pair.local.len() {
                self.at = 0;
                self.grid += 1;
                if count == 0 || self.grid >= pair.local.len() {
                    self.grid = 0;
                    self.pair += 1;
                }
                continue;
            }
            let (local, remote) = (&pair.local[self.grid], &pair.remote[self.grid]);
            let length = local.grid.length;
            let mut segment = Segment {
                local_region: local.region,
                remote_region: remote.region,
                local_offset: local.grid.offset(pair.local_indices.at(self.at)),
                remote_offset: remote.grid.offset(pair.remote_indices.at(self.at)),
                len: length,
            };
            self.at += 1;
            while self.at < count
                && segment.len < self.max
                && local.grid.offset(pair.local_indices.at(self.at)) == segment.local_offset + segment.len
                && remote.grid.offset(pair.remote_indices.at(self.at)) == segment.remote_offset + segment.len
            {
                segment.len += length;
                self.at += 1;
            }
            return Some(segment);
        }
    }
}

impl Iterator for Segments {
    type Item = Segment;

    fn next(&mut self) -> Option<Segment> {
        let mut segment = match self.rest.take() {
            Some(rest) => rest,
            None => self.merged()?,
        };
        if segment.len > self.max {
            self.rest = Some(Segment {
                local_offset: segment.local_offset + self.max,
                remote_offset: segment.remote_offset + self.max,
                len: segment.len - self.max,
                ..segment
            });
            segment.len = self.max;
        }
        Some(segment)
    }
}

/// A piece that is contiguous on one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Which region, as [`Placed`] says.
    pub region: u32,
    /// Offset in it.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// One side of a pair as a stream of bytes: grid by grid, index by index. Transports whose two ends each walk their
/// own side (sockets) use it; both ends agree on the order, not on where the pieces end.
#[derive(Clone, Debug)]
pub struct Extents {
    grids: Arc<[Placed]>,
    indices: Indices,
    grid: usize,
    at: usize,
    rest: Option<Extent>,
    left: u64,
}

impl Extents {
    /// The stream of these blocks. The indices lie within the grids.
    pub fn new(grids: Arc<[Placed]>, indices: Indices) -> Self {
        let left = grids.iter().map(|placed| placed.grid.length * indices.len() as u64).sum();
        Extents { grids, indices, grid: 0, at: 0, rest: None, left }
    }

    /// Bytes that are left.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// The next piece, of at most `max` bytes (at least one).
    pub fn take(&mut self, max: u64) -> Option<Extent> {
        let mut extent = match self.rest.take() {
            Some(rest) => rest,
            None => self.merged(max)?,
        };
        if extent.len > max {
            self.rest = Some(Extent { offset: extent.offset + max, len: extent.len - max, ..extent });
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
mod tests {
    use super::*;
    use crate::Grid;

    fn extents(grids: &[Grid], indices: impl Into<Indices>) -> Extents {
        Extents::new(grids.iter().map(|grid| Placed { region: 0, grid: *grid }).collect(), indices.into())
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
        assert_eq!(all(extents(&[halves, halves.at(0)], [0, 1]), 99), [(5, 5), (15, 5), (0, 5), (10, 5)]);
    }
}
