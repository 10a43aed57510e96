//! The ticket: the proof that a transport has finished with the memory of an operation.

use std::sync::Arc;

use crate::Result;

/// An operation that waits for its ticket. Core implements it for its own operations; transports
/// use [`Ticket::new`].
pub trait Settle: Send + Sync {
    /// Called when the transport has finished and will not touch the memory again.
    fn settled(self: Arc<Self>, result: Result<()>);
    /// Called when the transport lost the ticket, so that it may still touch the memory.
    fn forgotten(self: Arc<Self>);
}

/// The right of a transport to work on an operation, held until it has finished.
/// [`settle`](Ticket::settle) consumes the ticket, so that an operation cannot be reported twice:
///
/// ```compile_fail,E0382
/// # use kvx_core::backend::Ticket;
/// let ticket = Ticket::new(|_| ());
/// ticket.settle(Ok(()));
/// ticket.settle(Ok(()));
/// ```
///
/// Dropping a ticket without settling it fails the operation with `Forgotten` and quarantines the
/// memory, because a transport that lost the ticket may still use the memory.
#[must_use = "a dropped ticket quarantines the memory of its operation"]
pub struct Ticket(Option<TicketInner>);

enum TicketInner {
    Operation(Arc<dyn Settle>),
    Closure(Box<dyn FnOnce(Result<()>) + Send>),
}

impl Ticket {
    /// Creates a ticket that calls `on_settle`. To intercept another ticket, move it into the
    /// closure. Dropping the new ticket drops the closure uncalled, and thereby the ticket inside
    /// it.
    pub fn new(on_settle: impl FnOnce(Result<()>) + Send + 'static) -> Self {
        Ticket(Some(TicketInner::Closure(Box::new(on_settle))))
    }

    /// Creates a ticket that ends `operation`.
    pub fn of(operation: Arc<dyn Settle>) -> Self {
        Ticket(Some(TicketInner::Operation(operation)))
    }

    /// Ends the operation with `result`. By calling it, the transport promises not to touch the
    /// operation's memory again, whatever `result` is.
    pub fn settle(mut self, result: Result<()>) {
        match self.0.take() {
            Some(TicketInner::Operation(operation)) => operation.settled(result),
            Some(TicketInner::Closure(on_settle)) => on_settle(result),
            None => {}
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(TicketInner::Operation(operation)) = self.0.take() {
            operation.forgotten();
        }
    }
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ticket")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::ErrorKind;

    #[derive(Default)]
    struct SettleCounts {
        settled: AtomicU32,
        forgotten: AtomicU32,
        failed: Mutex<Option<ErrorKind>>,
    }

    impl Settle for SettleCounts {
        fn settled(self: Arc<Self>, result: Result<()>) {
            self.settled.fetch_add(1, Ordering::Relaxed);
            *self.failed.lock().unwrap() = result.err().map(|error| error.kind());
        }
        fn forgotten(self: Arc<Self>) {
            self.forgotten.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_settled_ticket_is_not_forgotten() {
        let counts = Arc::new(SettleCounts::default());
        Ticket::of(counts.clone()).settle(Err(ErrorKind::PeerLost.because("gone")));
        assert_eq!(
            (counts.settled.load(Ordering::Relaxed), counts.forgotten.load(Ordering::Relaxed)),
            (1, 0)
        );
        assert_eq!(*counts.failed.lock().unwrap(), Some(ErrorKind::PeerLost));
    }

    #[test]
    fn a_dropped_wrapper_forgets_the_ticket_inside() {
        let counts = Arc::new(SettleCounts::default());
        let inner = Ticket::of(counts.clone());
        drop(Ticket::new(move |result| inner.settle(result)));
        assert_eq!(
            (counts.settled.load(Ordering::Relaxed), counts.forgotten.load(Ordering::Relaxed)),
            (0, 1)
        );
    }
}
