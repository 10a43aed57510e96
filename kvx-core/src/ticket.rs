//! The ticket: a transport's one proof that it has finished with the memory of an operation.

use std::sync::Arc;

use crate::Result;

/// An operation that waits for its ticket. Core's own operations implement it; everybody else uses [`Ticket::new`].
pub trait Settle: Send + Sync {
    /// The transport has finished: nobody touches the memory again.
    fn settled(self: Arc<Self>, result: Result<()>);
    /// The transport lost the ticket: nobody knows whether the memory is still touched.
    fn forgotten(self: Arc<Self>);
}

/// Held by a transport while it works on an operation. [`settle`](Ticket::settle) consumes it, so that an operation
/// cannot be reported twice:
///
/// ```compile_fail,E0382
/// # use kvx_core::backend::Ticket;
/// let ticket = Ticket::new(|_| ());
/// ticket.settle(Ok(()));
/// ticket.settle(Ok(()));
/// ```
///
/// A ticket that is dropped without being settled fails its operation with `Forgotten` and quarantines the memory:
/// that is the only safe reading of a transport that lost count.
#[must_use = "a dropped ticket quarantines the memory of its operation"]
pub struct Ticket(Option<TicketInner>);

enum TicketInner {
    Operation(Arc<dyn Settle>),
    Closure(Box<dyn FnOnce(Result<()>) + Send>),
}

impl Ticket {
    /// A ticket that calls `on_settle`; wrap another ticket in the closure to intercept it. A ticket that is
    /// dropped drops the closure uncalled, and so forgets the ticket inside it.
    pub fn new(on_settle: impl FnOnce(Result<()>) + Send + 'static) -> Self {
        Ticket(Some(TicketInner::Closure(Box::new(on_settle))))
    }

    /// A ticket that ends `operation`.
    pub fn of(operation: Arc<dyn Settle>) -> Self {
        Ticket(Some(TicketInner::Operation(operation)))
    }

    /// Says that the transport has finished: it will not touch the operation's memory again, whatever `result` is.
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
    use crate::{Error, ErrorKind};

    #[derive(Default)]
    struct Seen {
        settled: AtomicU32,
        forgotten: AtomicU32,
        failed: Mutex<Option<ErrorKind>>,
    }

    impl Settle for Seen {
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
        let seen = Arc::new(Seen::default());
        Ticket::of(seen.clone()).settle(Err(Error::new(ErrorKind::PeerLost, "gone")));
        assert_eq!(
            (seen.settled.load(Ordering::Relaxed), seen.forgotten.load(Ordering::Relaxed)),
            (1, 0)
        );
        assert_eq!(*seen.failed.lock().unwrap(), Some(ErrorKind::PeerLost));
    }

    #[test]
    fn a_dropped_wrapper_forgets_the_ticket_inside() {
        let seen = Arc::new(Seen::default());
        let inner = Ticket::of(seen.clone());
        drop(Ticket::new(move |result| inner.settle(result)));
        assert_eq!(
            (seen.settled.load(Ordering::Relaxed), seen.forgotten.load(Ordering::Relaxed)),
            (0, 1)
        );
    }
}
