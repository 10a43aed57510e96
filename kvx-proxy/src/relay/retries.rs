//! Limits of retries, per request and over all requests.

use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

/// Retries are a share of requests, so that a sick fleet is not stormed: each request pays in, each
/// retry takes out.
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
    /// A request has come.
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
    /// The request has had its attempts.
    OutOfAttempts,
    /// All requests together have had theirs.
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
    fn a_request_has_its_attempts() {
        let budget = RetryBudget::default();
        let mut tries = Attempts::new(3);
        assert_eq!([tries.decide(&budget), tries.decide(&budget)], [RetryDecision::Yes; 2]);
        assert_eq!(tries.decide(&budget), RetryDecision::OutOfAttempts);
    }

    #[test]
    fn all_requests_have_a_share() {
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
        assert!(budget.thousandths.load(Relaxed) <= MOST, "what was saved is bounded");
    }
}
