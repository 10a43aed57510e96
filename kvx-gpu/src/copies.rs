//! Recognises grids in lists of copies, so that the driver gets fewer and larger calls.

use crate::driver::Rows;
use kvx_core::backend::Hop;

/// The minimum number of rows of a grid; fewer are copied one by one.
const FEWEST_ROWS: usize = 4;

/// The largest pitch that drivers accept.
const LONGEST_PITCH: u64 = i32::MAX as u64;

/// Merges pieces that are contiguous on both sides, and drops empty ones.
pub(super) fn merge(pieces: impl Iterator<Item = Hop>) -> Vec<Hop> {
    let mut lines: Vec<Hop> = Vec::with_capacity(pieces.size_hint().0);
    for piece in pieces.filter(|piece| piece.len > 0) {
        match lines.last_mut() {
            Some(last)
                if ends_at(last.from, last) == piece.from && ends_at(last.to, last) == piece.to =>
            {
                last.len += piece.len;
            }
            _ => lines.push(piece),
        }
    }
    lines
}

fn ends_at(begin: u64, line: &Hop) -> u64 {
    begin.wrapping_add(line.len as u64)
}

/// A call of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyCall {
    Line(Hop),
    Rows(Rows),
}

/// Returns the calls that copy `lines`, in their order. Runs of equal lengths at equal distances
/// become rows.
pub(super) fn copy_calls(mut lines: &[Hop]) -> impl Iterator<Item = CopyCall> {
    std::iter::from_fn(move || {
        let first = lines.first()?;
        let (count, from_pitch, to_pitch) = run(lines);
        if count < FEWEST_ROWS {
            lines = &lines[1..];
            return Some(CopyCall::Line(*first));
        }
        lines = &lines[count..];
        let Hop { from, to, len: width } = *first;
        Some(CopyCall::Rows(Rows { from, from_pitch, to, to_pitch, width, count }))
    })
}

/// Returns the number of lines at the start that are rows of one grid, and their distances.
fn run(lines: &[Hop]) -> (usize, usize, usize) {
    let [first, second, ..] = lines else { return (lines.len(), 0, 0) };
    let pitches = |a: &Hop, b: &Hop| {
        let pitch = |a: u64, b: u64| {
            b.checked_sub(a).filter(|p| (a_row(first)..=LONGEST_PITCH).contains(p))
        };
        (b.len == first.len).then_some(())?;
        Some((pitch(a.from, b.from)?, pitch(a.to, b.to)?))
    };
    let Some(same) = pitches(first, second) else { return (1, 0, 0) };
    let more =
        lines.windows(2).take_while(|pair| pitches(&pair[0], &pair[1]) == Some(same)).count();
    (more + 1, same.0 as usize, same.1 as usize)
}

/// Returns the smallest distance of rows as long as `line` that do not overlap.
fn a_row(line: &Hop) -> u64 {
    line.len as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hop(from: u64, to: u64, len: usize) -> Hop {
        Hop { from, to, len }
    }

    #[test]
    fn pieces_that_are_contiguous_on_both_sides_are_one_line() {
        let pieces =
            [hop(0, 100, 10), hop(10, 110, 5), hop(15, 200, 5), hop(20, 205, 0), hop(20, 205, 1)];
        assert_eq!(merge(pieces.into_iter()), [hop(0, 100, 15), hop(15, 200, 6)]);
    }

    #[test]
    fn a_grid_is_one_step_and_order_is_kept() {
        let grid = |n: u64| (0..n).map(|at| hop(1000 + at * 64, at * 16, 16));
        let all: Vec<_> =
            [hop(5, 5, 3)].into_iter().chain(grid(8)).chain([hop(9, 9, 16)]).collect();
        let rows = Rows { from: 1000, from_pitch: 64, to: 0, to_pitch: 16, width: 16, count: 8 };
        let copy_calls: Vec<_> = copy_calls(&all).collect();
        assert_eq!(
            copy_calls,
            [CopyCall::Line(hop(5, 5, 3)), CopyCall::Rows(rows), CopyCall::Line(hop(9, 9, 16))]
        );
    }

    #[test]
    fn lines_that_are_not_a_grid_stay_lines() {
        let few: Vec<_> = (0..3).map(|at| hop(at * 64, at * 16, 16)).collect();
        let backwards: Vec<_> = (0..8).map(|at| hop(1000 - at * 64, at * 16, 16)).collect();
        let overlapping: Vec<_> = (0..8).map(|at| hop(at * 8, at * 16, 16)).collect();
        let far: Vec<_> = (0..8).map(|at| hop(at << 40, at * 16, 16)).collect();
        let odd: Vec<_> = (0..8).map(|at| hop(at * 64, at * 16, 16 - at as usize)).collect();
        for lines in [few, backwards, overlapping, far, odd] {
            let expected: Vec<_> = lines.iter().map(|line| CopyCall::Line(*line)).collect();
            assert_eq!(copy_calls(&lines).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn every_byte_is_in_one_step() {
        // Lists of runs of all lengths, adjacent to each other.
        let mut lines = Vec::new();
        for count in 1..12u64 {
            let base = 1_000_000 * count;
            lines.extend((0..count).map(|at| hop(base + at * (32 + count), base + at * 40, 32)));
        }
        let mut copied = Vec::new();
        for step in copy_calls(&lines) {
            match step {
                CopyCall::Line(line) => copied.push(line),
                CopyCall::Rows(rows) => copied.extend(rows.lines()),
            }
        }
        assert_eq!(copied, lines);
    }
}
