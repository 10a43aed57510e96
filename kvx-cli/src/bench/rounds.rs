//! Alternating rounds, and statistics of their times.

use std::time::{Duration, Instant};

use crate::Result;

/// The result of one party's round.
#[derive(Clone, Debug, Default)]
pub(crate) struct Round {
    /// The number of times that the party moved the blocks.
    pub(crate) times: u64,
    /// The seconds for all of these moves.
    pub(crate) seconds: f64,
    /// The seconds of each, if known.
    pub(crate) each: Vec<f64>,
    /// The seconds of posts, if there are any: a sample.
    pub(crate) posts: Vec<f64>,
}

impl Round {
    /// Returns the seconds per move.
    pub(crate) fn seconds_each(&self) -> f64 {
        self.seconds / self.times as f64
    }
}

/// A function that moves the blocks for about the given time.
pub(crate) type Party<'a> = Box<dyn FnMut(Duration) -> Result<Round> + 'a>;

/// How thoroughly a point is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// The rounds of each party.
    pub(crate) rounds: usize,
    /// The total time.
    pub(crate) seconds: f64,
}

impl Effort {
    /// Checks the values that a user wrote.
    pub(crate) fn new(rounds: usize, seconds: f64) -> Result<Self> {
        if rounds == 0 {
            return Err("--rounds must be at least 1".into());
        }
        if !(seconds > 0.0 && seconds <= 86_400.0) {
            return Err(format!("--seconds {seconds}: write a time of up to a day").into());
        }
        Ok(Effort { rounds, seconds })
    }
}

/// Runs all parties in turn, as many rounds as wanted; the first party changes from round to round.
/// Returns each party's rounds.
pub(crate) fn interleave(
    parties: &mut [Party<'_>],
    Effort { rounds, seconds }: Effort,
    mut after_each: impl FnMut(),
) -> Result<Vec<Vec<Round>>> {
    let budget = Duration::from_secs_f64(seconds / (rounds * parties.len()) as f64);
    let mut done = vec![Vec::with_capacity(rounds); parties.len()];
    for round in 0..rounds {
        for turn in 0..parties.len() {
            let party = (round + turn) % parties.len();
            done[party].push(parties[party](budget)?);
        }
        after_each();
    }
    Ok(done)
}

/// Calls `act` with 0, 1, … and the current time until `budget` has passed, and at least `least`
/// times.
pub(crate) fn timed<E>(
    budget: Duration,
    least: u64,
    mut act: impl FnMut(u64, Instant) -> std::result::Result<(), E>,
) -> Result<Round>
where
    Box<dyn std::error::Error>: From<E>,
{
    let mut round = Round::default();
    let start = Instant::now();
    let mut now = start;
    while round.times < least || now - start < budget {
        act(round.times, now)?;
        let done = Instant::now();
        round.each.push((done - now).as_secs_f64());
        round.times += 1;
        now = done;
    }
    round.seconds = (now - start).as_secs_f64();
    Ok(round)
}

/// Rounds a figure to `digits` decimal places.
pub(crate) fn round(value: f64, digits: i32) -> f64 {
    let scale = 10f64.powi(digits);
    (value * scale).round() / scale
}

/// Rounds a figure to `digits` significant digits.
pub(crate) fn significant(value: f64, digits: i32) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    round(value, digits - 1 - value.abs().log10().floor() as i32)
}

/// Returns the value below which this part of the values lies, or `None` without values.
pub(crate) fn quantile(values: impl IntoIterator<Item = f64>, part: f64) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_unstable_by(f64::total_cmp);
    let last = values.len().checked_sub(1)?;
    // The value with the next rank above.
    Some(values[((part * values.len() as f64).ceil() as usize).saturating_sub(1).min(last)])
}

/// Returns the middle value, or the mean of the two in the middle, or `None` without values.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        len if len % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

/// The ratio of two parties' speeds, round by round: above 1, the first is faster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ratio {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Ratio {
    pub(crate) fn of(ours: &[Round], theirs: &[Round]) -> Option<Self> {
        let ratios: Vec<f64> = ours
            .iter()
            .zip(theirs)
            .map(|(ours, theirs)| theirs.seconds_each() / ours.seconds_each())
            .collect();
        let (min, max) =
            (ratios.iter().copied().reduce(f64::min)?, ratios.iter().copied().reduce(f64::max)?);
        Some(Ratio { median: median(ratios)?, min, max })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn took(seconds: f64) -> Round {
        Round { times: 2, seconds, ..Round::default() }
    }

    #[test]
    fn a_ratio_is_taken_round_by_round() {
        // The machine slows down to a fifth in the last round, for both parties.
        let ours = [took(1.0), took(1.25), took(5.0)];
        let theirs = [took(0.8), took(1.0), took(4.5)];
        let ratio = Ratio::of(&ours, &theirs).unwrap();
        assert_eq!((ratio.median, ratio.min, ratio.max), (0.8, 0.8, 0.9));
        assert_eq!(Ratio::of(&[], &[]), None);
    }

    #[test]
    fn quantiles_are_values_that_occurred() {
        let values = || (1..=200).map(f64::from);
        assert_eq!((quantile(values(), 0.5), quantile(values(), 0.99)), (Some(100.0), Some(198.0)));
        assert_eq!((quantile([7.0], 0.99), quantile([], 0.5)), (Some(7.0), None));
        assert_eq!(
            (median([3.0, 1.0]), median([5.0, 1.0, 3.0]), median([])),
            (Some(2.0), Some(3.0), None)
        );
    }

    #[test]
    fn figures_keep_their_significant_digits() {
        let values = [0.000_123_456, 12.3456, 123_456.0, 0.0, f64::INFINITY];
        let rounded = values.map(|value| significant(value, 3));
        assert_eq!(rounded, [0.000_123, 12.3, 123_000.0, 0.0, f64::INFINITY]);
    }

    #[test]
    fn every_party_has_every_turn_as_often() {
        let order = std::cell::RefCell::new(String::new());
        let party = |name: char| -> Party<'_> {
            let order = &order;
            Box::new(move |_| {
                order.borrow_mut().push(name);
                Ok(took(1.0))
            })
        };
        let effort = Effort::new(4, 1.0).unwrap();
        let done = interleave(&mut [party('a'), party('b')], effort, || ()).unwrap();
        assert_eq!((order.borrow().as_str(), done[0].len(), done[1].len()), ("abbaabba", 4, 4));
    }
}
