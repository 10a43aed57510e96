//! Limits of retries, per request and over all requests.

use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

/// A budget that limits retries to a share of all requests, so that retries do not overload a
/// failing fleet. Each request deposits a share, and each retry takes one.
#[derive(Debug)]
pub(crate) struct RetryBudget {
    thousandths: AtomicI64,
}

const START: i64 = 10_000;
const MOST: i64 = 100_000;

impl Default for RetryBudget {
    fn default() -> Self {
        RetryBudget { thousandths: AtomicI64::new(START) }
    }
}

impl RetryBudget {
    /// Adds the share of a new request.
    pub(crate) fn deposit(&self, share: f64) {
        let share = (share * 1000.0) as i64;
        let _ = self.thousandths.fetch_update(Relaxed, Relaxed, |have| {
            (have < MOST).then_some((have + share).min(MOST))
        });
    }

    fn take(&self) -> bool {
        let taken = self
            .thousandths
            .fetch_update(Relaxed, Relaxed, |have| (have >= 1000).then_some(have - 1000));
        taken.is_ok()
    }
}

/// The attempts of one request.
#[derive(Debug)]
pub(crate) struct Attempts {
    pub(crate) made: u32,
    most: u32,
}

/// The decision about a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RetryDecision {
    Yes,
    /// The request has used all its attempts.
    OutOfAttempts,
    /// The budget of all requests is used up.
    OutOfBudget,
}

impl Attempts {
    pub(crate) fn new(attempts: u32) -> Self {
        Attempts { made: 1, most: attempts }
    }

    pub(crate) fn decide(&mut self, budget: &RetryBudget) -> RetryDecision {
        if self.made >= self.most {
            return RetryDecision::OutOfAttempts;
        }
        if !budget.take() {
            return RetryDecision::OutOfBudget;
        }
        self.made += 1;
        RetryDecision::Yes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_of_a_request_are_limited() {
        let budget = RetryBudget::default();
        let mut tries = Attempts::new(3);
        assert_eq!([tries.decide(&budget), tries.decide(&budget)], [RetryDecision::Yes; 2]);
        assert_eq!(tries.decide(&budget), RetryDecision::OutOfAttempts);
    }

    #[test]
    fn retries_are_a_share_of_all_requests() {
        let budget = RetryBudget::default();
        let retries = |count| {
            (0..count)
                .filter(|_| {
                    budget.deposit(0.2);
                    Attempts::new(9).decide(&budget) == RetryDecision::Yes
                })
                .count()
        };
        let first = retries(1000);
        assert!((205..=215).contains(&first), "ten at the start and a fifth: {first}");
        assert!((199..=201).contains(&retries(1000)));
        (0..100_000).for_each(|_| budget.deposit(0.2));
        assert!(budget.thousandths.load(Relaxed) <= MOST, "deposits are bounded");
    }
}
