//! Simulations whose choices a seed determines.

use std::fmt::Debug;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// The seeds to run instead of a test's: one (`17`), or several (`200..10000`).
const VARIABLE: &str = "KVX_SEED";
/// The number of runs of each seed in [`assert_seeds_repeat`].
const REPEATS: &str = "KVX_REPEATS";

/// Runs a simulation with each of the first `count` seeds, or with those that `KVX_SEED` names, and
/// returns their results. If a run panics, prints its seed.
///
/// # Panics
/// If a run does, or if the variable is malformed.
pub fn run_seeds<T>(count: u64, run: impl Fn(u64) -> T) -> Vec<T> {
    let with_seed = |seed| {
        catch_unwind(AssertUnwindSafe(|| run(seed))).unwrap_or_else(|panic| {
            eprintln!("{VARIABLE}={seed} repeats this run");
            resume_unwind(panic)
        })
    };
    chosen(0..count).map(with_seed).collect()
}

/// Runs a simulation `times` times with each of the seeds from 1 to `count`, or as `KVX_SEED` and
/// `KVX_REPEATS` say.
///
/// # Panics
/// If two runs of one seed differ, or if two seeds have the same run.
pub fn assert_seeds_repeat<T: PartialEq + Debug>(count: u64, times: u64, run: impl Fn(u64) -> T) {
    let times = std::env::var(REPEATS).map_or(times, |text| number(REPEATS, &text));
    let mut firsts = Vec::new();
    for seed in chosen(1..count + 1) {
        let first = run(seed);
        for _ in 1..times {
            assert_eq!(run(seed), first, "seed {seed} has two different runs");
        }
        assert!(!firsts.contains(&first), "seed {seed} has the run of another seed: {first:?}");
        firsts.push(first);
    }
}

fn chosen(usual: Range<u64>) -> Range<u64> {
    std::env::var(VARIABLE).map_or(usual, |text| parse(&text))
}

fn parse(text: &str) -> Range<u64> {
    let number = |text| number(VARIABLE, text);
    match text.split_once("..") {
        Some((from, to)) => number(from)..number(to),
        None => number(text)..number(text) + 1,
    }
}

fn number(name: &str, text: &str) -> u64 {
    text.parse().unwrap_or_else(|error| panic!("{name} is {text:?}, not a number: {error}"))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_seed_and_a_range_of_seeds_can_be_chosen() {
        assert_eq!((parse("17"), parse("200..300")), (17..18, 200..300));
        assert_eq!(run_seeds(3, |seed| seed * 2), [0, 2, 4]);
    }

    #[test]
    fn runs_that_differ_and_seeds_with_one_run_are_found() {
        assert_seeds_repeat(3, 2, |seed| seed);
        assert!(catch_unwind(|| assert_seeds_repeat(3, 2, |_| 7)).is_err());
        let count = Cell::new(0);
        let differs = AssertUnwindSafe(|| assert_seeds_repeat(1, 2, |_| count.replace(1)));
        assert!(catch_unwind(differs).is_err());
    }
}
