//! Checks that processes use no more resources as work continues.

use std::time::{Duration, Instant};

use crate::check::{Check, Failure};
use crate::process_state::ResourceUsage;

/// The number of measurements.
const LOOKS: usize = 12;
/// The number of measurements at the start, and at the end, that are compared.
const QUARTER: usize = LOOKS / 4;

/// Repeats `work` for `time`. Meanwhile, `look` measures the resources of two processes twelve
/// times; its argument is the time since the start. Fails if each of the last measurements finds
/// more of some resource than any of the first, by more than work usually varies. What killed peers
/// have left may take up to `patience` after the end to disappear.
///
/// # Errors
/// The resource that has grown, or an error of `work` or `look`.
pub fn stays_flat<State>(
    state: &mut State,
    time: Duration,
    patience: Duration,
    mut work: impl FnMut(&mut State) -> Check,
    mut look: impl FnMut(&mut State, Duration) -> Result<[ResourceUsage; 2], Failure>,
) -> Check {
    let begun = Instant::now();
    let mut looks = Vec::new();
    for number in 1..=LOOKS {
        let until = begun + time * number as u32 / LOOKS as u32;
        while Instant::now() < until {
            work(state)?;
        }
        looks.push(look(state, begun.elapsed())?);
    }
    let end = Instant::now() + patience;
    loop {
        match grown(&looks) {
            None => return Ok(()),
            Some(why) if Instant::now() > end => return Err(Failure::new(why)),
            Some(_) => std::thread::sleep(Duration::from_millis(200)),
        }
        looks.push(look(state, begun.elapsed())?);
    }
}

/// Returns the resource that has grown: each of the last measurements found more of it than any of
/// the first.
fn grown(looks: &[[ResourceUsage; 2]]) -> Option<String> {
    [0, 1].into_iter().find_map(|process| {
        let of = |looks: &[[ResourceUsage; 2]]| {
            looks.iter().map(|look| look[process]).collect::<Vec<_>>()
        };
        let first = of(&looks[..QUARTER]).into_iter().reduce(ResourceUsage::most)?;
        let last = of(&looks[LOOKS - QUARTER..]).into_iter().reduce(ResourceUsage::least)?;
        last.beyond(first)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELD: ResourceUsage =
        ResourceUsage { descriptors: 20, threads: 5, memory: 100, mappings: 400, quarantined: 0 };

    /// Measures a process that uses `memory` MiB at each measurement, and another one that does not
    /// change.
    fn grown_by(memory: impl Fn(u64) -> u64) -> Option<String> {
        let looks: Vec<_> = (1..=LOOKS as u64)
            .map(|at| [HELD, ResourceUsage { memory: memory(at), ..HELD }])
            .collect();
        grown(&looks)
    }

    #[test]
    fn ups_and_downs_are_not_growth() {
        assert_eq!(grown_by(|at| if at % 2 == 0 { 100 } else { 200 }), None);
        assert_eq!(grown_by(|at| if at == 12 { 1000 } else { 100 }), None);
    }

    #[test]
    fn what_each_look_has_more_of_has_grown() {
        let why = grown_by(|at| 100 + 10 * at).unwrap();
        assert!(why.contains("200 MiB"), "{why}");
    }

    #[test]
    fn what_goes_within_the_patience_is_not_growth() {
        let mut looks = 0;
        let flat = stays_flat(
            &mut looks,
            Duration::ZERO,
            Duration::from_secs(10),
            |_| Ok(()),
            |looks, _| {
                *looks += 1;
                let memory = if (10..=12).contains(looks) { 1000 } else { 100 };
                Ok([HELD, ResourceUsage { memory, ..HELD }])
            },
        );
        assert!(flat.is_ok(), "{flat:?}");
        assert_eq!(looks, 13);
    }
}
