//! [`Extents`] and [`Segments`] agree with a loop over every byte for all small sides of a plan,
//! and with a loop over blocks for large ones.
//!
//! Memory safety: backends read and write exactly the pieces that these iterators return, without
//! checking them again. Each piece must lie within the blocks of checked grids. Both ends of a
//! socket count the same stream, so no byte may be missing or repeated.

use std::collections::VecDeque;
use std::ops::Range;

use kvx_testkit::{EDGES, Tier, sequences};
use proptest::prelude::*;
use proptest::sample::select;

use super::*;
use crate::bound::Pair;
use crate::identity::LinkId;
use crate::{Grid, Op, Size};

/// A region and an offset in it.
type Byte = (u32, u64);

/// Returns all bytes of these blocks, in the order of the stream.
fn bytes(grids: &[PlacedGrid], indices: &Indices) -> Vec<Byte> {
    let mut bytes = Vec::new();
    for PlacedGrid { region, grid } in grids {
        for position in 0..indices.len() {
            let start = grid.base + grid.stride * u64::from(indices.at(position));
            bytes.extend((start..start + grid.length).map(|at| (*region, at)));
        }
    }
    bytes
}

/// Returns all valid grids of `count` blocks with these numbers.
fn grids(base: Range<u64>, most: u64, count: u32) -> Vec<Grid> {
    let mut grids = Vec::new();
    for base in base {
        for (stride, length) in (0..=most).flat_map(|a| (1..=most).map(move |b| (a, b))) {
            let grid = Grid { base, stride, length, count };
            grids.extend(grid.check(u64::MAX).is_ok().then_some(grid));
        }
    }
    grids
}

/// Returns all lists of at most `most` indices below `count`, and all ranges.
fn indices(count: u32, most: usize) -> Vec<Indices> {
    let items: Vec<u32> = (0..count).collect();
    let lists = (0..=most).flat_map(|len| sequences(&items, len).map(Indices::from));
    let ranges =
        (0..=count).flat_map(|start| (start..=count).map(move |end| Indices::from(start..end)));
    lists.chain(ranges).collect()
}

/// Places grid `i` on region `i`.
fn placed(grids: &[Grid]) -> Arc<[PlacedGrid]> {
    let placed = grids.iter().zip(0..).map(|(grid, region)| PlacedGrid { region, grid: *grid });
    placed.collect()
}

/// Takes pieces of at most `most.0` and `most.1` bytes in turn, and compares them with the model.
fn follow(mut extents: Extents, model: &[Byte], most: (u64, u64)) {
    let (mut seen, mut max, mut next) = (0, most.0, most.1);
    while let Some(extent) = extents.take(max) {
        assert!((1..=max).contains(&extent.len), "{extent:?} of at most {max} bytes");
        for at in extent.offset..extent.offset + extent.len {
            assert_eq!(model.get(seen), Some(&(extent.region, at)), "byte {seen}");
            seen += 1;
        }
        assert_eq!(extents.left(), (model.len() - seen) as u64);
        std::mem::swap(&mut max, &mut next);
    }
    assert_eq!((seen, extents.left()), (model.len(), 0));
    assert!(extents.take(max).is_none(), "the stream has ended");
}

/// Proven for one grid with all lists of up to 5 indices, two grids with up to 3 and, in the whole
/// tier, three grids with up to 2; repeated indices and all ranges included. The grids have up to 3
/// blocks, strides and lengths up to 3, and bases up to 1. Takes alternate between two limits: all
/// pairs of 1, 2, 3 and none.
#[test]
fn extents_of_every_small_side_are_its_bytes_in_their_order() {
    let limits = [1, 2, 3, u64::MAX];
    let three = Tier::Whole.runs_or_says("extents of three grids");
    for (number, most) in [(1, 5), (2, 3), (3, 2)] {
        for count in (0..=3).filter(|_| number < 3 || three) {
            let indices = indices(count, most);
            for grids in sequences(&grids(0..2, 3, count), number) {
                let grids = placed(&grids);
                for indices in &indices {
                    let model = bytes(&grids, indices);
                    let extents = Extents::new(Arc::clone(&grids), indices.clone());
                    assert_eq!(extents.left(), model.len() as u64);
                    for most in limits.iter().flat_map(|a| limits.map(|b| (*a, b))) {
                        follow(extents.clone(), &model, most);
                    }
                }
            }
        }
    }
}

fn segments(pairs: &[Pair], max: u64) -> Segments {
    let bound =
        BoundPlan::new(Op::Read, Size::default(), pairs.into(), LinkId(1), Vec::new(), Vec::new());
    Arc::new(bound).segments(max)
}

/// Compares the segments of these pairs with the bytes of both sides, for several limits.
fn compare(pairs: &[Pair]) {
    let side = |grids: fn(&Pair) -> (&[PlacedGrid], &Indices)| -> Vec<Byte> {
        pairs.iter().flat_map(|pair| bytes(grids(pair).0, grids(pair).1)).collect()
    };
    let local = side(|pair| (&*pair.local, &pair.local_indices));
    let remote = side(|pair| (&*pair.remote, &pair.remote_indices));
    for max in [1, 2, 3, u64::MAX] {
        let mut seen = 0;
        for segment in segments(pairs, max) {
            assert!((1..=max).contains(&segment.len), "{segment:?} of at most {max} bytes");
            for byte in 0..segment.len {
                let ours = (segment.local_region, segment.local_offset + byte);
                let theirs = (segment.remote_region, segment.remote_offset + byte);
                let expected = (local.get(seen), remote.get(seen));
                assert_eq!((Some(&ours), Some(&theirs)), expected, "byte {seen} of {pairs:?}");
                seen += 1;
            }
        }
        assert_eq!((seen, seen), (local.len(), remote.len()), "{pairs:?}");
    }
}

/// Returns all pairs of one grid on each side, with equal lengths of blocks and of lists.
fn pairs(base: Range<u64>, stride: u64, count: u32, most: usize) -> Vec<Pair> {
    let (grids, indices) = (grids(base, stride, count), indices(count, most));
    let mut pairs = Vec::new();
    for (ours, theirs) in grids.iter().flat_map(|ours| grids.iter().map(move |b| (ours, b))) {
        for local in indices.iter().filter(|_| ours.length == theirs.length) {
            for remote in indices.iter().filter(|remote| remote.len() == local.len()) {
                pairs.push(Pair {
                    local: placed(&[*ours]),
                    remote: placed(&[*theirs]),
                    local_indices: local.clone(),
                    remote_indices: remote.clone(),
                });
            }
        }
    }
    pairs
}

/// Proven for one pair with bases up to 1, strides and lengths up to 3, up to 3 blocks, and all
/// lists of up to 3 indices; and for any two pairs with lengths up to 2, 2 blocks and 2 indices.
#[test]
fn segments_of_every_small_plan_are_its_bytes_in_their_order() {
    for count in 0..=3 {
        pairs(0..2, 3, count, 3).iter().for_each(|pair| compare(std::slice::from_ref(pair)));
    }
    for two in sequences(&pairs(0..1, 2, 2, 2), 2) {
        compare(&two);
        // Joins the grids in one pair if both pairs have the same indices.
        let (first, second) = (&two[0], &two[1]);
        if first.local_indices.same_list(&second.local_indices)
            && first.remote_indices.same_list(&second.remote_indices)
        {
            let join = |a: &[PlacedGrid], b: &[PlacedGrid]| placed(&[a[0].grid, b[0].grid]);
            compare(&[Pair {
                local: join(&first.local, &second.local),
                remote: join(&first.remote, &second.remote),
                ..first.clone()
            }]);
        }
    }
}

/// The blocks of a large side that a walk has not seen: region, first byte and length of each.
struct Blocks(VecDeque<(u32, u128, u128)>);

impl Blocks {
    fn of(grids: &[PlacedGrid], indices: &Indices) -> Self {
        let blocks = grids.iter().flat_map(|placed| {
            (0..indices.len()).map(move |position| {
                let index = u128::from(indices.at(position));
                let start = u128::from(placed.grid.base) + u128::from(placed.grid.stride) * index;
                (placed.region, start, u128::from(placed.grid.length))
            })
        });
        Blocks(blocks.collect())
    }

    /// Removes the bytes of a piece from the front, where they must be.
    fn remove(&mut self, region: u32, offset: u64, len: u64) {
        let (mut at, mut left) = (u128::from(offset), u128::from(len));
        while left > 0 {
            let first = self.0.front_mut().expect("a piece lies within the blocks");
            assert_eq!((region, at), (first.0, first.1), "the next byte");
            let part = left.min(first.2);
            (at, left) = (at + part, left - part);
            (first.1, first.2) = (first.1 + part, first.2 - part);
            if first.2 == 0 {
                self.0.pop_front();
            }
        }
    }
}

/// The most indices of a large side.
const MOST_INDICES: usize = 6;
/// The most grids of a large side.
const MOST_GRIDS: usize = 3;
/// The longest block. [`Extents::new`] requires a stream of at most `u64::MAX` bytes; the decoder
/// of peers' descriptions allows `i64::MAX`.
const LONGEST: u64 = i64::MAX as u64 / (MOST_INDICES * MOST_GRIDS) as u64;

/// Returns numbers of any size, most of them near a limit.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..=16_u64, select(EDGES.to_vec()), any::<u64>()]
}

/// Returns valid grids of any size, some of which end at the last address.
fn large_grid() -> impl Strategy<Value = Grid> {
    let gap = prop_oneof![Just(0), number()];
    (number(), gap, number(), any::<u32>(), any::<bool>()).prop_map(
        |(length, gap, base, n, ends)| {
            let length = length.clamp(1, LONGEST);
            let stride = length.saturating_add(gap);
            let most = (u64::MAX - length) / stride + 1;
            let count = u64::from(n).clamp(1, most) as u32;
            let span = stride * u64::from(count - 1) + length;
            let base = if ends { u64::MAX - span } else { base.min(u64::MAX - span) };
            Grid { base, stride, length, count }
        },
    )
}

fn large_grids() -> impl Strategy<Value = Vec<Grid>> {
    prop::collection::vec(large_grid(), 1..=MOST_GRIDS)
}

/// Returns indices within all of the grids, from words: a list with neighbours, or a range.
fn within(grids: &[Grid], words: &[u32], is_range: bool) -> Indices {
    let count = grids.iter().map(|grid| grid.count).min().unwrap_or(0);
    if is_range {
        let start = words.first().map_or(0, |word| word % count);
        return (start..start + (words.len() as u32).min(count - start)).into();
    }
    let mut last = 0;
    let mut next = |word: u32| {
        // Half of the indices follow the one before.
        last = if word.is_multiple_of(2) { (last + 1) % count } else { word % count };
        last
    };
    words.iter().map(|word| next(*word)).collect::<Vec<_>>().into()
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    /// Beyond these sizes: grids anywhere in 64 bits, also at their end, taken with any limits.
    #[test]
    fn extents_of_large_sides_are_their_blocks_in_their_order(
        grids in large_grids(),
        words in prop::collection::vec(any::<u32>(), 0..=MOST_INDICES),
        is_range: bool,
        limits in prop::collection::vec(number(), 0..40),
    ) {
        let indices = within(&grids, &words, is_range);
        let grids = placed(&grids);
        let mut model = Blocks::of(&grids, &indices);
        let mut extents = Extents::new(grids, indices);
        // The last takes have no limit, because the first ones may have taken single bytes.
        for max in limits.into_iter().map(|max| max.max(1)).chain(std::iter::repeat(u64::MAX)) {
            let left = model.0.iter().map(|block| block.2).sum::<u128>();
            prop_assert_eq!(u128::from(extents.left()), left);
            let Some(extent) = extents.take(max) else { break };
            prop_assert!((1..=max).contains(&extent.len));
            model.remove(extent.region, extent.offset, extent.len);
        }
        prop_assert!(model.0.is_empty());
    }

    /// Segments between grids anywhere in 64 bits, which differ on both sides.
    #[test]
    fn segments_of_large_plans_are_their_blocks_in_their_order(
        both in prop::collection::vec((large_grid(), large_grid()), 1..=MOST_GRIDS),
        words in prop::collection::vec(any::<u32>(), 0..=MOST_INDICES),
        (ours, theirs) in any::<(bool, bool)>(),
        parts in 1..8_u64,
    ) {
        let shortest = both.iter().map(|(a, b)| a.length.min(b.length)).min().unwrap_or(1);
        // Packed grids stay packed with the other length; all blocks stay where they fit.
        let shorten = |grid: &Grid| Grid {
            stride: if grid.is_packed() { shortest } else { grid.stride },
            length: shortest,
            ..*grid
        };
        let local: Vec<Grid> = both.iter().map(|(grid, _)| shorten(grid)).collect();
        let remote: Vec<Grid> = both.iter().map(|(_, grid)| shorten(grid)).collect();
        let (mut a, mut b) = (within(&local, &words, ours), within(&remote, &words, theirs));
        let len = a.len().min(b.len());
        (a, b) = (a.slice(0..len), b.slice(0..len));
        let pair = Pair {
            local: placed(&local),
            remote: placed(&remote),
            local_indices: a,
            remote_indices: b,
        };
        let mut left = (
            Blocks::of(&pair.local, &pair.local_indices),
            Blocks::of(&pair.remote, &pair.remote_indices),
        );
        let max = shortest.div_ceil(parts);
        for segment in segments(&[pair], max) {
            prop_assert!((1..=max).contains(&segment.len));
            left.0.remove(segment.local_region, segment.local_offset, segment.len);
            left.1.remove(segment.remote_region, segment.remote_offset, segment.len);
        }
        prop_assert!(left.0.0.is_empty() && left.1.0.is_empty());
    }
}
