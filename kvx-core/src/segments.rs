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
    /// The pair and the grid of it that come after `walk`.
    pair: usize,
    grid: usize,
    walk: Option<Walk>,
    rest: Option<Segment>,
}

/// The blocks of one grid of a pair, one after the other.
struct Walk {
    local: Placed,
    remote: Placed,
    local_indices: Indices,
    remote_indices: Indices,
    at: usize,
    count: usize,
    /// Both offsets of the block at `at`, while there is one.
    next: (u64, u64),
}

impl Walk {
    #[inline]
    fn offsets(&self, at: usize) -> (u64, u64) {
        let local = self.local.grid.offset(self.local_indices.at(at));
        (local, self.remote.grid.offset(self.remote_indices.at(at)))
    }

    /// The next blocks that follow each other on both sides, until `max` bytes are reached. Inlined: handing a segment
    /// over through memory costs more than finding it.
    #[inline(always)]
    fn merged(&mut self, max: u64) -> Option<Segment> {
        if self.at == self.count {
            return None;
        }
        let length = self.local.grid.length;
        let ((local_offset, remote_offset), mut len) = (self.next, 0);
        loop {
            len += length;
            self.at += 1;
            if self.at == self.count {
                break;
            }
            self.next = self.offsets(self.at);
            if self.next != (local_offset + len, remote_offset + len) || len >= max {
                break;
            }
        }
        Some(Segment {
            local_region: self.local.region,
            remote_region: self.remote.region,
            local_offset,
            remote_offset,
            len,
        })
    }
}

impl Segments {
    pub(crate) fn new(bound: Arc<Bound>, max: u64) -> Self {
        Segments { bound, max: max.max(1), pair: 0, grid: 0, walk: None, rest: None }
    }

    /// The plan they come from.
    pub fn bound(&self) -> &Arc<Bound> {
        &self.bound
    }

    /// The next segment where a long one was split, or a grid has ended.
    #[cold]
    fn next_slowly(&mut self) -> Option<Segment> {
        let max = self.max;
        let segment = match self.rest.take() {
            Some(rest) => rest,
            None => self.advance()?.merged(max)?,
        };
        Some(if segment.len <= max { segment } else { self.split(segment) })
    }

    /// The first `max` bytes of a longer segment; keeps the rest.
    fn split(&mut self, segment: Segment) -> Segment {
        let max = self.max;
        self.rest = Some(Segment {
            local_offset: segment.local_offset + max,
            remote_offset: segment.remote_offset + max,
            len: segment.len - max,
            ..segment
        });
        Segment { len: max, ..segment }
    }

    /// Goes on to the next grid that has blocks to walk.
    fn advance(&mut self) -> Option<&mut Walk> {
        loop {
            let pair = self.bound.pairs().get(self.pair)?;
            let count = pair.local_indices.len();
            let (Some(local), true) = (pair.local.get(self.grid), count > 0) else {
                (self.pair, self.grid) = (self.pair + 1, 0);
                continue;
            };
            let mut walk = Walk {
                local: *local,
                remote: pair.remote[self.grid],
                local_indices: pair.local_indices.clone(),
                remote_indices: pair.remote_indices.clone(),
                at: 0,
                count,
                next: (0, 0),
            };
            walk.next = walk.offsets(0);
            self.grid += 1;
            return Some(self.walk.insert(walk));
        }
    }
}

impl Iterator for Segments {
    type Item = Segment;

    #[inline]
    fn next(&mut self) -> Option<Segment> {
        let max = self.max;
        if self.rest.is_none()
            && let Some(walk) = &mut self.walk
            && let Some(segment) = walk.merged(max)
        {
            return Some(if segment.len <= max { segment } else { self.split(segment) });
        }
        self.next_slowly()
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
