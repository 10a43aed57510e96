//! Plans over lists of spans of any length.

use std::collections::HashMap;

use crate::grid::{Blocks, Grid, GridSet, Place};
use crate::operation::Op;
use crate::plan::Plan;
use crate::region::{PeerRegion, Region};
use crate::{ErrorKind, Result};

/// A range of bytes in a local region, and a range of the same length in a peer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The offset in the local region.
    pub local: u64,
    /// The offset in the peer's region.
    pub remote: u64,
    /// The number of bytes; a span of 0 bytes moves nothing.
    pub len: u64,
}

/// The minimum number of equal spans for a grid with an index list. Fewer spans become grids of one
/// block each.
const FEW: usize = 16;

impl Plan {
    /// Creates a plan of spans of any length. Each list pairs a local region with one of the
    /// peer's.
    ///
    /// Spans of equal length, at offsets that are multiples of one distance, become blocks of one
    /// grid. Spans that are adjacent on both sides move as one.
    ///
    /// # Errors
    /// `OutOfBounds` for a span beyond its region; otherwise as [`of`](Plan::of).
    pub fn of_spans<L: AsRef<[Span]>>(
        op: Op,
        lists: impl IntoIterator<Item = (Region, PeerRegion, L)>,
    ) -> Result<Plan> {
        let mut pairs = Vec::new();
        for (local, remote, spans) in lists {
            pair_up(&local, &remote, spans.as_ref(), &mut pairs)?;
        }
        Plan::of(op, pairs)
    }
}

type Pairs = Vec<(Blocks<Region>, Blocks<PeerRegion>)>;

/// Spans that are blocks of one pair of grids.
struct Equal {
    shape: Shape,
    local: Vec<u32>,
    remote: Vec<u32>,
}

/// A pair of packed grids: the length of their blocks, and the offsets of block 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    len: u64,
    local: u64,
    remote: u64,
}

fn pair_up(local: &Region, remote: &PeerRegion, spans: &[Span], pairs: &mut Pairs) -> Result<()> {
    for span in spans {
        within("local", span.local, span.len, local.len())?;
        within("remote", span.remote, span.len, remote.len())?;
    }
    let grid = |base, length, count| Grid { base, stride: length, length, count };
    let (equal, odd) = grouped(spans);
    if equal.is_empty() && odd.is_empty() {
        let none = grid(0, 1, 0);
        pairs.push((local.grid(none)?.blocks(0..0), remote.grid(none)?.blocks(0..0)));
    }
    for Equal { shape, local: ours, remote: theirs } in equal {
        let count = |indices: &[u32]| indices.iter().max().map_or(0, |max| max + 1);
        let our_grid = local.grid(grid(shape.local, shape.len, count(&ours)))?;
        let their_grid = remote.grid(grid(shape.remote, shape.len, count(&theirs)))?;
        pairs.push((our_grid.blocks(ours), their_grid.blocks(theirs)));
    }
    if !odd.is_empty() {
        let one = |base, length| grid(base, length, 1);
        let ours: Result<Vec<_>> =
            odd.iter().map(|span| local.grid(one(span.local, span.len))).collect();
        let theirs: Result<Vec<_>> =
            odd.iter().map(|span| remote.grid(one(span.remote, span.len))).collect();
        pairs.push((GridSet::join(ours?)?.blocks(0..1), GridSet::join(theirs?)?.blocks(0..1)));
    }
    Ok(())
}

fn within(side: &str, offset: u64, len: u64, region: u64) -> Result<()> {
    if offset.checked_add(len).is_some_and(|end| end <= region) {
        return Ok(());
    }
    Err(ErrorKind::OutOfBounds.because(format!(
        "a span of {len} bytes at {side} offset {offset} lies outside a region of {region} bytes"
    )))
}

/// Separates spans that are blocks of a common grid from the others.
fn grouped(spans: &[Span]) -> (Vec<Equal>, Vec<Span>) {
    let first = spans.first().map_or(0, |span| span.len);
    let merged;
    // Blocks of equal length stay in their grid: the transfer merges them when it moves them.
    let spans = if spans.iter().all(|span| span.len == first) {
        spans
    } else {
        merged = joined(spans);
        &merged
    };
    let mut groups: Vec<Equal> = Vec::new();
    let mut known: HashMap<Shape, usize> = HashMap::new();
    for span in spans.iter().filter(|span| span.len > 0) {
        let ((our_base, ours), (their_base, theirs)) =
            (block(span.local, span.len), block(span.remote, span.len));
        let shape = Shape { len: span.len, local: our_base, remote: their_base };
        let at = match groups.last() {
            Some(last) if last.shape == shape => groups.len() - 1,
            _ => *known.entry(shape).or_insert_with(|| {
                groups.push(Equal { shape, local: Vec::new(), remote: Vec::new() });
                groups.len() - 1
            }),
        };
        groups[at].local.push(ours);
        groups[at].remote.push(theirs);
    }
    let (equal, few): (Vec<_>, Vec<_>) =
        groups.into_iter().partition(|group| group.local.len() >= FEW);
    let mut odd = Vec::new();
    for Equal { shape: Shape { len, local, remote }, local: ours, remote: theirs } in few {
        let span = |(ours, theirs): (&u32, &u32)| Span {
            local: local + u64::from(*ours) * len,
            remote: remote + u64::from(*theirs) * len,
            len,
        };
        odd.extend(ours.iter().zip(&theirs).map(span));
    }
    (equal, odd)
}

/// Returns the base of a packed grid and the block in it. An offset that a 32-bit index does not
/// reach becomes its own base.
fn block(offset: u64, len: u64) -> (u64, u32) {
    match u32::try_from(offset / len) {
        Ok(index) if index < u32::MAX => (offset % len, index),
        _ => (offset, 0),
    }
}

/// Merges consecutive spans that are adjacent on both sides.
fn joined(spans: &[Span]) -> Vec<Span> {
    let mut joined: Vec<Span> = Vec::with_capacity(spans.len());
    for span in spans {
        match joined.last_mut() {
            Some(last)
                if last.local + last.len == span.local && last.remote + last.len == span.remote =>
            {
                last.len += span.len;
            }
            _ => joined.push(*span),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(local: u64, remote: u64, len: u64) -> Span {
        Span { local, remote, len }
    }

    /// Converts the groups back into a sorted list.
    fn named(spans: &[Span]) -> (usize, usize, Vec<(u64, u64, u64)>) {
        let (equal, odd) = grouped(spans);
        let of = |group: &Equal| {
            let Shape { len, local, remote } = group.shape;
            let at = move |(ours, theirs): (&u32, &u32)| {
                (local + u64::from(*ours) * len, remote + u64::from(*theirs) * len, len)
            };
            group.local.iter().zip(&group.remote).map(at).collect::<Vec<_>>()
        };
        let mut all: Vec<_> = equal.iter().flat_map(of).collect();
        all.extend(odd.iter().map(|span| (span.local, span.remote, span.len)));
        all.sort_unstable();
        (equal.len(), odd.len(), all)
    }

    #[test]
    fn equal_blocks_are_one_grid_even_where_they_touch() {
        let spans: Vec<_> = (0..100).map(|i| span(64 + i * 4096, 4096 * (99 - i), 4096)).collect();
        let mut wanted: Vec<_> =
            spans.iter().map(|span| (span.local, span.remote, span.len)).collect();
        wanted.sort_unstable();
        assert_eq!(named(&spans), (1, 0, wanted));
    }

    #[test]
    fn unequal_neighbours_are_joined_and_odd_ones_stay_apart() {
        let spans =
            [span(0, 100, 7), span(7, 107, 9), span(30, 0, 0), span(40, 20, 5), span(45, 26, 5)];
        assert_eq!(named(&spans), (0, 3, vec![(0, 100, 16), (40, 20, 5), (45, 26, 5)]));
        assert_eq!(named(&[]), (0, 0, vec![]));
    }

    #[test]
    fn mixed_lengths_are_a_grid_for_each_length_that_is_frequent() {
        let mut spans: Vec<_> = (0..40).map(|i| span(i * 8192, i * 16384, 4096)).collect();
        spans.extend((0..40).map(|i| span((1 << 30) + i * 128, (1 << 30) + i * 256, 64)));
        spans.push(span(1 << 40, 3, 1000));
        let (grids, odd, all) = named(&spans);
        assert_eq!((grids, odd, all.len()), (2, 1, 81));
    }

    #[test]
    fn offsets_beyond_32_bits_of_blocks_are_reached() {
        let far = (1 << 40) + 1;
        let spans: Vec<_> = (0..20).map(|i| span(far + i, i, 1)).collect();
        let (_, _, all) = named(&spans);
        assert_eq!(all[19], (far + 19, 19, 1));
    }
}
