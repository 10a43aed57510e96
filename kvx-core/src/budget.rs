//! Limits on transfers in flight. There is no limit on the size of one transfer.

use std::sync::Arc;

use crate::completion::Promise;
use crate::fault_injection::injected;
use crate::sync::{Condvar, Mutex};
use crate::{Deadline, ErrorKind, Result};

/// Limits on what an agent has in flight; see
/// [`AgentBuilder::budget`](crate::AgentBuilder::budget).
///
/// ```
/// # use kvx_core as kvx;
/// use kvx::Limits;
/// assert_eq!(Limits::default(), Limits { transfers: 65_536, description_bytes: 256 << 20 });
/// let few = Limits { transfers: 100, ..Limits::default() };
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The number of transfers that have not settled. The default is 65,536.
    pub transfers: usize,
    /// The bytes of the descriptions of their plans, mostly index lists at 4 bytes a block. The
    /// default is 256 MiB.
    pub description_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { transfers: 65_536, description_bytes: 256 << 20 }
    }
}

#[derive(Default)]
struct BudgetUse {
    transfers: usize,
    description_bytes: usize,
    waiting: Vec<Arc<Promise<()>>>,
}

pub(crate) struct Budget {
    limits: Limits,
    used: Mutex<BudgetUse>,
    changed: Condvar,
}

impl Budget {
    pub(crate) fn new(limits: Limits) -> Self {
        Budget { limits, used: Mutex::default(), changed: Condvar::new() }
    }

    /// Takes the share of a transfer. A description larger than the whole budget is accepted when
    /// nothing else is in flight.
    ///
    /// # Errors
    /// `Busy` if the share exceeds the budget.
    pub(crate) fn take(&self, description: usize) -> Result<()> {
        let mut used = self.used.lock();
        if !self.fits(&used, description) && !injected("budget") {
            return Err(ErrorKind::Busy.because(format!(
                "{} transfers with {} bytes of descriptions are in flight, the budget is {} and \
                 {}: wait with post_wait, or raise it when the agent is built",
                used.transfers,
                used.description_bytes,
                self.limits.transfers,
                self.limits.description_bytes
            )));
        }
        used.transfers += 1;
        used.description_bytes += description;
        Ok(())
    }

    fn fits(&self, used: &BudgetUse, description: usize) -> bool {
        used.transfers < self.limits.transfers
            && (used.transfers == 0
                || used.description_bytes + description <= self.limits.description_bytes)
    }

    pub(crate) fn give_back(&self, description: usize) {
        let mut used = self.used.lock();
        used.transfers -= 1;
        used.description_bytes -= description;
        let waiting = std::mem::take(&mut used.waiting);
        drop(used);
        self.changed.notify_all();
        for promise in waiting {
            promise.finish(Ok(()));
        }
    }

    /// Finishes the promise when a share is returned, or at once if the description fits.
    pub(crate) fn on_change(&self, description: usize, promise: Arc<Promise<()>>) {
        let mut used = self.used.lock();
        if self.fits(&used, description) {
            drop(used);
            promise.finish(Ok(()));
        } else {
            used.waiting.push(promise);
        }
    }

    /// Blocks until nothing is in flight or the deadline passes. Returns the number of transfers
    /// left.
    pub(crate) fn drained(&self, deadline: Deadline) -> usize {
        let mut used = self.used.lock();
        while used.transfers > 0 && !deadline.passed() {
            used = self.changed.wait_until(used, deadline.instant());
        }
        used.transfers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_is_kept_and_given_back() {
        let budget = Budget::new(Limits { transfers: 2, description_bytes: 100 });
        budget.take(80).unwrap();
        assert_eq!(budget.take(30).unwrap_err().kind(), ErrorKind::Busy);
        budget.take(20).unwrap();
        assert_eq!(budget.take(0).unwrap_err().kind(), ErrorKind::Busy);
        budget.give_back(80);
        budget.give_back(20);
        budget.take(1000).unwrap(); // alone, a description of any size
        assert_eq!(budget.drained(std::time::Duration::from_millis(1).into()), 1);
    }
}
