//! A bounded fuzzer that mutates seeds, with the same cases in every run. `cargo xtask fuzz` runs
//! the same functions without bounds.

use std::fmt::Display;
use std::time::{Duration, Instant};

use crate::allocation::most_allocated;
use crate::random::Random;

/// The maximum time for one input, after which libFuzzer calls it a hang.
const LONGEST: Duration = Duration::from_secs(10);
/// The most bytes that a target may allocate for one input: for each of its bytes, and in addition.
const EACH: usize = 64;
const ONCE: usize = 1 << 20;
/// The targets that may allocate more than [`ONCE`]: two lanes between authenticated agents, which
/// seal pieces of up to 1 MiB and have a buffer for one in each direction.
const WITH_BUFFERS: [(&str, usize); 2] = [("tcp_owner", 5 << 20), ("tcp_initiator", 5 << 20)];

/// Calls a fuzz target with one input. The program's allocator must be
/// [`CountingAllocator`](crate::CountingAllocator).
///
/// # Panics
/// If the target panics, takes ten seconds, or allocates more than 64 times the input's length and
/// a constant, which is 1 MiB for most targets.
pub fn within_limits(name: &str, target: fn(&[u8]), bytes: &[u8]) {
    let begun = Instant::now();
    let ((), most) = most_allocated(|| target(bytes));
    let (took, len) = (begun.elapsed(), bytes.len());
    assert!(took < LONGEST, "an input of {len} bytes took {took:?}");
    let once =
        WITH_BUFFERS.iter().find(|(known, _)| *known == name).map_or(ONCE, |(_, once)| *once);
    assert!(most <= once + EACH * len, "an input of {len} bytes took {most} bytes of memory");
}

/// Calls a target with one input, and prints the input and its origin if it fails.
pub(crate) fn attempt(name: &str, origin: &dyn Display, bytes: &[u8], target: fn(&[u8])) {
    if let Err(panic) = std::panic::catch_unwind(|| within_limits(name, target, bytes)) {
        eprintln!("{name}, {origin}: {}", bytes.escape_ascii());
        std::panic::resume_unwind(panic);
    }
}

fn pick<'a, T: AsRef<[u8]>>(random: &mut Random, from: &'a [T]) -> &'a [u8] {
    from.get(random.below(from.len())).map_or(&[], AsRef::as_ref)
}

/// Returns a random part of the bytes.
fn part<'a>(random: &mut Random, of: &'a [u8], longest: usize) -> &'a [u8] {
    let from = random.below(of.len() + 1);
    &of[from..(from + random.below(longest)).min(of.len())]
}

/// Returns one of the seeds with one to six changes.
fn mutated(
    random: &mut Random,
    seeds: &[impl AsRef<[u8]>],
    pieces: &[impl AsRef<[u8]>],
) -> Vec<u8> {
    let mut bytes = pick(random, seeds).to_vec();
    for _ in 0..=random.below(6) {
        let at = random.below(bytes.len() + 1);
        match random.below(7) {
            0 if at < bytes.len() => bytes[at] = random.word() as u8,
            1 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            2 => bytes.truncate(at),
            3 => {
                let end = (at + random.below(12)).min(bytes.len());
                bytes.drain(at..end);
            }
            4 => {
                let other = pick(random, seeds);
                bytes.splice(at..at, part(random, other, 60).iter().copied());
            }
            5 => {
                let own = part(random, &bytes, 40).to_vec();
                bytes.splice(at..at, own);
            }
            _ => drop(bytes.splice(at..at, pick(random, pieces).iter().copied())),
        }
    }
    bytes
}

/// Calls `target` with each seed, and with `cases` mutations of them. `pieces` are tokens of the
/// input's grammar, and its limits.
///
/// # Panics
/// If there are no seeds, or if the target fails [`within_limits`], with the input on standard
/// error.
pub fn fuzz(
    name: &str,
    seeds: &[impl AsRef<[u8]>],
    pieces: &[impl AsRef<[u8]>],
    cases: u64,
    target: fn(&[u8]),
) {
    assert!(!seeds.is_empty(), "{name} has no seeds");
    seeds.iter().for_each(|seed| attempt(name, &"a seed", seed.as_ref(), target));
    for case in 1..=cases {
        let mut random = Random::seeded(case);
        let bytes = mutated(&mut random, seeds, pieces);
        attempt(name, &format_args!("case {case}"), &bytes, target);
    }
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    use super::*;

    #[global_allocator]
    static ALLOCATOR: crate::CountingAllocator = crate::CountingAllocator;

    /// An input whose first byte is the number of megabytes that it makes the target allocate.
    fn allocates(bytes: &[u8]) {
        let megabytes = usize::from(bytes.first().copied().unwrap_or(0));
        drop(black_box(Vec::<u8>::with_capacity(megabytes << 20)));
    }

    #[test]
    fn an_input_that_takes_much_more_memory_than_its_length_is_found() {
        within_limits("any", allocates, &[1]);
        within_limits("any", allocates, &[2; 20 << 10]);
        assert!(std::panic::catch_unwind(|| within_limits("any", allocates, &[2])).is_err());
        let found = std::panic::catch_unwind(|| fuzz("big", &["\0"], &["\x7f"], 100, allocates));
        assert!(found.is_err());
    }

    #[test]
    fn a_fault_that_needs_two_changes_is_found() {
        let wrong =
            |bytes: &[u8]| assert!(!(bytes.contains(&b'b') && bytes.contains(&b'c')), "both");
        let found = std::panic::catch_unwind(|| fuzz("two", &["a"], &["b", "c"], 1000, wrong));
        assert!(found.is_err());
    }

    #[test]
    fn every_run_has_the_same_cases() {
        let seeds = [&b"one seed"[..], b"and another"];
        let run = || -> Vec<Vec<u8>> {
            (1..50).map(|case| mutated(&mut Random::seeded(case), &seeds, &[b"piece"])).collect()
        };
        assert_eq!(run(), run());
    }
}
