//! A bounded fuzzer that mutates seeds, with the same cases in every run. `cargo xtask fuzz` runs
//! the same functions without bounds.

use crate::random::Random;

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

/// Calls `check` with each seed, and with `cases` mutations of them. `pieces` are tokens of the
/// input's grammar, and its limits.
///
/// # Panics
/// If `check` panics; the bytes are then on standard error.
pub fn fuzz(
    name: &str,
    seeds: &[impl AsRef<[u8]>],
    pieces: &[impl AsRef<[u8]>],
    cases: u64,
    check: fn(&[u8]),
) {
    assert!(!seeds.is_empty(), "{name} has no seeds");
    seeds.iter().for_each(|seed| check(seed.as_ref()));
    for case in 1..=cases {
        let mut random = Random::seeded(case);
        let bytes = mutated(&mut random, seeds, pieces);
        if let Err(panic) = std::panic::catch_unwind(|| check(&bytes)) {
            eprintln!("{name}, case {case}: {}", bytes.escape_ascii());
            std::panic::resume_unwind(panic);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
