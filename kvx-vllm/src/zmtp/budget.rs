//! A limit on the bytes of messages that all peers of a socket hold in memory together.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::{DecodeError, DecodeErrorKind};

/// A budget of bytes for messages in memory.
#[derive(Debug)]
pub struct Budget {
    left: AtomicUsize,
    /// The budget of which this one is a part.
    whole: Option<Arc<Budget>>,
}

/// The part of a budget that one message holds. Dropping it returns the bytes.
#[derive(Debug)]
pub struct BudgetShare {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Budget {
    /// Creates a budget of `bytes`.
    pub fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Budget { left: AtomicUsize::new(bytes), whole: None })
    }

    /// Returns a part of at most `bytes`. What its shares take is also taken from this budget.
    pub fn part(self: &Arc<Self>, bytes: usize) -> Arc<Self> {
        Arc::new(Budget { left: AtomicUsize::new(bytes), whole: Some(Arc::clone(self)) })
    }

    /// Returns a share that holds no bytes yet.
    pub fn share(self: &Arc<Self>) -> BudgetShare {
        BudgetShare { budget: Arc::clone(self), bytes: 0 }
    }

    /// Takes all of `bytes`, or nothing. Returns whether it has taken them.
    fn take(&self, bytes: usize) -> bool {
        let left = &self.left;
        let taken =
            left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes));
        if taken.is_err() {
            return false;
        }
        let fits = self.whole.as_ref().is_none_or(|whole| whole.take(bytes));
        if !fits {
            left.fetch_add(bytes, Ordering::Relaxed);
        }
        fits
    }

    fn give_back(&self, bytes: usize) {
        self.left.fetch_add(bytes, Ordering::Relaxed);
        if let Some(whole) = &self.whole {
            whole.give_back(bytes);
        }
    }
}

impl BudgetShare {
    /// Takes `bytes` from the budget.
    ///
    /// # Errors
    ///
    /// `Exhausted`: the budget does not have that many bytes left.
    pub fn take(&mut self, bytes: usize) -> Result<(), DecodeError> {
        if !self.budget.take(bytes) {
            return Err(DecodeError::new(
                DecodeErrorKind::Exhausted,
                "too many bytes of handshakes are in memory at once; this one is dropped: retry later",
            ));
        }
        self.bytes += bytes;
        Ok(())
    }

    pub(super) fn give_back(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.budget.give_back(bytes);
    }

    /// Moves all bytes to a new share.
    pub(super) fn hand_over(&mut self) -> BudgetShare {
        BudgetShare { budget: Arc::clone(&self.budget), bytes: std::mem::take(&mut self.bytes) }
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        self.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_bounded_by_itself_and_by_the_whole() {
        let whole = Budget::new(10);
        let parts = [whole.part(6), whole.part(6)];
        let mut shares = parts.each_ref().map(Budget::share);
        assert!(shares[0].take(7).is_err() && shares[0].take(6).is_ok());
        assert!(shares[1].take(5).is_err(), "the whole has 4 bytes left");
        assert!(shares[1].take(4).is_ok() && shares[1].take(1).is_err());
        shares[0].give_back(1);
        assert!(shares[1].take(1).is_ok());
        drop(shares);
        let left = [&whole, &parts[0], &parts[1]].map(|budget| budget.left.load(Ordering::Relaxed));
        assert_eq!(left, [10, 6, 6]);
    }
}
