//! Detects overlapping destinations of a plan, and counts the runs of an index list.

use crate::grid::{Grid, Indices};
use crate::{ErrorKind, Result};

/// The destinations in one grid. `space` identifies the address space: the host's, or one region of
/// a peer.
pub(crate) struct Destination<'a> {
    pub(crate) space: u64,
    pub(crate) base: u64,
    pub(crate) grid: Grid,
    pub(crate) indices: &'a Indices,
}

impl Destination<'_> {
    fn start(&self) -> u64 {
        self.base.wrapping_add(self.grid.base)
    }

    fn end(&self) -> u64 {
        self.start().wrapping_add(
            self.grid.stride * u64::from(self.grid.count.saturating_sub(1)) + self.grid.length,
        )
    }

    fn block(&self, index: u32) -> (u64, u64) {
        let start = self.base.wrapping_add(self.grid.offset(index));
        (start, start + self.grid.length)
    }
}

/// Rejects targets if two of their blocks share a byte.
pub(crate) fn check(targets: &[Destination<'_>]) -> Result<()> {
    let mut seen: Vec<&Indices> = Vec::new();
    for target in targets {
        if target.indices.len() > 1 && !seen.iter().any(|indices| indices.same_list(target.indices))
        {
            distinct(target.indices)?;
            seen.push(target.indices);
        }
    }
    let mut order: Vec<&Destination<'_>> =
        targets.iter().filter(|target| !target.indices.is_empty()).collect();
    order.sort_unstable_by_key(|target| (target.space, target.start()));
    // Groups the grids whose spans touch. Consecutive layers form groups of one.
    let mut from = 0;
    while from < order.len() {
        let mut end = order[from].end();
        let mut to = from + 1;
        while to < order.len() && order[to].space == order[from].space && order[to].start() < end {
            end = end.max(order[to].end());
            to += 1;
        }
        let group = &order[from..to];
        if group.len() > 1 && !interleaved(group) {
            disjoint(group)?;
        }
        from = to;
    }
    Ok(())
}

/// Returns true if the grids are slices of one stride that never meet, whatever the indices, such
/// as head slices.
fn interleaved(group: &[&Destination<'_>]) -> bool {
    let stride = group[0].grid.stride;
    let origin = group[0].start();
    if stride == 0 || group.iter().any(|target| target.grid.stride != stride) {
        return false;
    }
    let mut slices: Vec<(u64, u64)> = group
        .iter()
        .map(|target| ((target.start() - origin) % stride, target.grid.length))
        .collect();
    slices.sort_unstable();
    let wraps = slices.last().is_some_and(|(start, length)| start + length > stride + slices[0].0);
    !wraps && slices.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0)
}

/// Sorts and compares every block of the group.
fn disjoint(group: &[&Destination<'_>]) -> Result<()> {
    let mut blocks: Vec<(u64, u64)> = group
        .iter()
        .flat_map(|target| {
            (0..target.indices.len()).map(|position| target.block(target.indices.at(position)))
        })
        .collect();
    blocks.sort_unstable();
    match blocks.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        None => Ok(()),
        Some(pair) => Err(ErrorKind::Overlap.because(format!(
            "two destinations of the plan overlap, {} bytes apart and {} bytes long: the result \
             would be undefined",
            pair[1].0 - pair[0].0,
            pair[0].1 - pair[0].0
        ))),
    }
}

/// Rejects an index that occurs twice.
fn distinct(indices: &Indices) -> Result<()> {
    let Some(list) = indices.as_list() else { return Ok(()) };
    let Some(max) = indices.max() else { return Ok(()) };
    let twice = if (max as usize) < 64 * list.len().max(1024) {
        let mut seen = vec![0u64; max as usize / 64 + 1];
        list.iter().copied().find(|index| {
            let (word, bit) = (*index as usize / 64, 1 << (index % 64));
            let before = seen[word];
            seen[word] |= bit;
            before & bit != 0
        })
    } else {
        let mut sorted = list.to_vec();
        sorted.sort_unstable();
        sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
    };
    match twice {
        None => Ok(()),
        Some(index) => Err(ErrorKind::Overlap.because(format!(
            "block {index} is a destination twice: the result would be undefined"
        ))),
    }
}

/// Counts the pieces that are left after merging entries that are adjacent on both sides.
pub(crate) fn runs(local: &Indices, remote: &Indices) -> u64 {
    match (local.as_list(), remote.as_list()) {
        (Some(a), Some(b)) => count_runs(a.iter().copied().zip(b.iter().copied())),
        (Some(a), None) => count_runs(a.iter().copied().zip(remote.as_range().unwrap_or(0..0))),
        (None, Some(b)) => count_runs(local.as_range().unwrap_or(0..0).zip(b.iter().copied())),
        (None, None) => u64::from(!local.is_empty()),
    }
}

fn count_runs(entries: impl Iterator<Item = (u32, u32)>) -> u64 {
    let mut runs = 0;
    let mut expected = None;
    for (local, remote) in entries {
        runs += u64::from(expected != Some((u64::from(local), u64::from(remote))));
        expected = Some((u64::from(local) + 1, u64::from(remote) + 1));
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(grid: Grid, indices: &Indices) -> Destination<'_> {
        Destination { space: 0, base: 0, grid, indices }
    }

    fn kind(targets: &[Destination<'_>]) -> Option<ErrorKind> {
        check(targets).err().map(|error| error.kind())
    }

    #[test]
    fn a_block_named_twice_is_refused() {
        let twice = Indices::from([4, 2, 4]);
        assert_eq!(kind(&[target(Grid::packed(8, 9), &twice)]), Some(ErrorKind::Overlap));
        let far = Indices::from([u32::MAX - 1, 2, u32::MAX - 1]);
        assert_eq!(kind(&[target(Grid::packed(8, u32::MAX), &far)]), Some(ErrorKind::Overlap));
        let once = Indices::from([4, 2, 5]);
        assert_eq!(kind(&[target(Grid::packed(8, 9), &once)]), None);
    }

    #[test]
    fn head_slices_of_one_region_do_not_overlap_but_crossing_grids_do() {
        let all = Indices::from(0..100);
        let slice = |base, length| target(Grid { base, stride: 64, length, count: 100 }, &all);
        assert_eq!(kind(&[slice(0, 32), slice(32, 32)]), None);
        assert_eq!(kind(&[slice(0, 33), slice(32, 32)]), Some(ErrorKind::Overlap));
        assert_eq!(kind(&[slice(48, 16), slice(0, 16), slice(16, 16)]), None);
        // A slice that runs over the end of its stride into the first slice of the next block.
        assert_eq!(kind(&[slice(0, 16), slice(56, 16)]), Some(ErrorKind::Overlap));
    }

    #[test]
    fn grids_of_different_strides_are_compared_block_by_block() {
        let (few, all) = (Indices::from([0, 3]), Indices::from([1, 2]));
        let a = Grid::packed(16, 4);
        let b = Grid { base: 8, stride: 24, length: 8, count: 3 };
        // a: 0..16, 48..64; b: 32..40, 56..64
        assert_eq!(kind(&[target(a, &few), target(b, &all)]), Some(ErrorKind::Overlap));
        let first = Indices::from([1]);
        assert_eq!(kind(&[target(a, &few), target(b, &first)]), None);
    }

    #[test]
    fn spaces_are_apart() {
        let all = Indices::from(0..4);
        let grid = Grid::packed(16, 4);
        let other = Destination { space: 1, base: 0, grid, indices: &all };
        assert_eq!(kind(&[target(grid, &all), other]), None);
    }

    #[test]
    fn runs_count_what_merging_leaves() {
        assert_eq!(runs(&Indices::from([1, 2, 3, 7]), &Indices::from([4, 5, 6, 7])), 2);
        assert_eq!(runs(&Indices::from([1, 2, 3]), &Indices::from([4, 6, 5])), 3);
        assert_eq!(runs(&Indices::from(1..4), &Indices::from([4, 5, 6])), 1);
        assert_eq!(runs(&Indices::from(0..0), &Indices::from(0..0)), 0);
    }
}
