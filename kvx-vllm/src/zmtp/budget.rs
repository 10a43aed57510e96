//! How many bytes of messages may be in memory for all peers of a socket together.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::{DecodeError, DecodeErrorKind};

/// Bytes that are left.
#[derive(Debug)]
pub struct Budget {
    left: AtomicUsize,
}

/// What one message takes of a budget; dropping it returns the bytes.
#[derive(Debug)]
pub struct BudgetShare {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Budget {
    /// A budget of so many bytes.
    pub fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Budget { left: AtomicUsize::new(bytes) })
    }

    /// A share that has taken nothing yet.
    pub fn share(self: &Arc<Self>) -> BudgetShare {
        BudgetShare { budget: Arc::clone(self), bytes: 0 }
    }
}

impl BudgetShare {
    /// Takes more.
    ///
    /// # Errors
    ///
    /// `Exhausted`.
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
                "too many bytes of handshakes are in memory at once; this one is given up: ask again",
            )),
        }
    }

    pub(super) fn give_back(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.budget.left.fetch_add(bytes, Ordering::Relaxed);
    }

    /// All of it, in other hands.
    pub(super) fn hand_over(&mut self) -> BudgetShare {
        BudgetShare { budget: Arc::clone(&self.budget), bytes: std::mem::take(&mut self.bytes) }
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        self.give_back(self.bytes);
    }
}
