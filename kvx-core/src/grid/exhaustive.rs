//! [`Grid::check`] and a model agree on every small grid, and on numbers at every limit.
//!
//! Memory safety: a peer chooses the numbers of a grid. After `check` has accepted the grid for a
//! region, backends access `length` bytes at [`Grid::offset`] without checking them again. So these
//! bytes must lie within the region, without overflow.

use kvx_testkit::{EDGES, Tier};
use proptest::prelude::*;
use proptest::sample::select;

use super::*;

/// Counts at the limits of their type.
const COUNTS: [u32; 8] = [0, 1, 2, 3, 1 << 16, 1 << 31, u32::MAX - 1, u32::MAX];

/// Returns whether two blocks share a byte, and the end of the last block, by marking every byte.
fn by_bytes(grid: Grid) -> (bool, u64) {
    let mut marked = Vec::new();
    let mut overlap = false;
    for index in 0..u64::from(grid.count) {
        for byte in 0..grid.length {
            let at = (grid.base + grid.stride * index + byte) as usize;
            marked.resize(marked.len().max(at + 1), false);
            overlap |= marked[at];
            marked[at] = true;
        }
    }
    // A grid without blocks marks nothing, and has to begin within the region.
    (overlap, if grid.count == 0 { grid.base } else { marked.len() as u64 })
}

/// Returns the first byte of a block, in numbers that cannot overflow.
fn start(grid: Grid, index: u32) -> u128 {
    u128::from(grid.base) + u128::from(grid.stride) * u128::from(index)
}

/// Returns whether two blocks share a byte, and the end of the last block, in numbers that cannot
/// overflow.
fn by_wide_numbers(grid: Grid) -> (bool, u128) {
    let end = match grid.count.checked_sub(1) {
        Some(last) => start(grid, last) + u128::from(grid.length),
        None => grid.base.into(),
    };
    (grid.count > 1 && grid.stride < grid.length, end)
}

fn expected(grid: Grid, (overlap, end): (bool, u128), len: u64) -> Option<ErrorKind> {
    match grid.length == 0 || overlap {
        true => Some(ErrorKind::Invalid),
        false => (end > u128::from(len)).then_some(ErrorKind::OutOfBounds),
    }
}

/// Compares a grid on a region of `len` bytes with the model. If it is accepted, checks the block
/// at `index` and the ends of the grid.
fn compare(grid: Grid, model: (bool, u128), len: u64, index: u32) {
    let kind = grid.check(len).err().map(|error| error.kind());
    assert_eq!(kind, expected(grid, model, len), "{grid:?} on {len} bytes");
    if kind.is_some() {
        return;
    }
    assert_eq!(grid.end().map(u128::from), Some(model.1), "{grid:?}");
    let Some(last) = grid.count.checked_sub(1) else { return };
    for index in [0, index.min(last), last] {
        let offset = u128::from(grid.offset(index));
        assert_eq!(offset, start(grid, index), "block {index} of {grid:?}");
        assert!(offset + u128::from(grid.length) <= u128::from(len), "block {index} of {grid:?}");
    }
}

/// Proven for each of the four numbers up to 12 (in the whole tier 16), on regions of every length
/// up to a byte after the grid's end.
#[test]
fn every_small_grid_is_accepted_exactly_if_its_blocks_are_apart_and_within_the_region() {
    let most =
        if Tier::Whole.runs_or_says("grids of numbers up to 16 instead of 12") { 16 } else { 12 };
    let numbers = || 0..=most;
    for (base, stride) in numbers().flat_map(|base| numbers().map(move |stride| (base, stride))) {
        for (length, count) in numbers().flat_map(|len| (0..=most as u32).map(move |n| (len, n))) {
            let grid = Grid { base, stride, length, count };
            let (overlap, end) = by_bytes(grid);
            let wide = by_wide_numbers(grid);
            if length > 0 {
                assert_eq!((overlap, u128::from(end)), wide, "the models of {grid:?}");
            }
            (0..=wide.1 as u64 + 1).for_each(|len| compare(grid, wide, len, count / 2));
        }
    }
}

/// Proven for all combinations of numbers at the limits of 32 and 64 bits, on regions whose length
/// is such a number, or the grid's end, or a byte more or less.
#[test]
fn no_grid_at_the_limits_of_its_numbers_overflows_into_its_region() {
    for (base, stride) in EDGES.iter().flat_map(|base| EDGES.map(|stride| (*base, stride))) {
        for (length, count) in EDGES.iter().flat_map(|len| COUNTS.map(|count| (*len, count))) {
            let grid = Grid { base, stride, length, count };
            let model = by_wide_numbers(grid);
            let around = [model.1.saturating_sub(1), model.1, model.1 + 1];
            let around = around.into_iter().filter_map(|len| u64::try_from(len).ok());
            EDGES.into_iter().chain(around).for_each(|len| compare(grid, model, len, 1));
        }
    }
}

/// Returns numbers of any size, most of them near a limit.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..=16_u64, select(EDGES.to_vec()), any::<u64>(), (u64::MAX - 16)..=u64::MAX]
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 2048, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    /// Beyond these sizes: any numbers, also for grids that end where their region ends.
    #[test]
    fn any_grid_is_accepted_exactly_if_its_blocks_are_apart_and_within_the_region(
        (base, stride, length, len) in (number(), number(), number(), number()),
        (count, index) in (prop_oneof![select(COUNTS.to_vec()), any::<u32>()], any::<u32>()),
    ) {
        let grid = Grid { base, stride, length, count };
        compare(grid, by_wide_numbers(grid), len, index);
        // Moves the blocks so that they end with the region, a byte before it and a byte after it.
        let at_zero = Grid { base: 0, ..grid };
        let span = by_wide_numbers(at_zero).1;
        for end in [len.checked_sub(1), Some(len), len.checked_add(1)].into_iter().flatten() {
            if let Some(base) = u128::from(end).checked_sub(span) {
                let moved = Grid { base: base as u64, ..grid };
                compare(moved, by_wide_numbers(moved), len, index);
            }
        }
    }
}
