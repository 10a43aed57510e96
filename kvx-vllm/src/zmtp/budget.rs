//! A limit on the bytes of messages that all peers of a socket hold in memory together.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::{DecodeError, DecodeErrorKind};

/// A budget of bytes for messages in memory.
#[derive(Debug)]
pub struct Budget {
    left: AtomicUsize,
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
        Arc::new(Budget { left: AtomicUsize::new(bytes) })
    }

    /// Returns a share that holds no bytes yet.
    pub fn share(self: &Arc<Self>) -> BudgetShare {
        BudgetShare { budget: Arc::clone(self), bytes: 0 }
    }
}

impl BudgetShare {
    /// Takes `bytes` from the budget.
    ///
    /// # Errors
    ///
    /// `Exhausted`: the budget does not have that many bytes left.
    pub fn take(&mut self, bytes: usize) -> Result<(), DecodeError> {
        let left = &self.budget.left;
        let taken =
            left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes));
        match taken {
            Ok(_) => {
                self.bytes += bytes;
                Ok(())
            }
            Err(_) => Err(DecodeError::new(
                DecodeErrorKind::Exhausted,
                "too many bytes of handshakes are in memory at once; this one is dropped: retry later",
            )),
        }
    }

    pub(super) fn give_back(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.budget.left.fetch_add(bytes, Ordering::Relaxed);
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
