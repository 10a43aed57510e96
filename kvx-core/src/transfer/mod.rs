//! Transfers: one posted plan in flight. A future that resolves once, at its settling or its deadline.

mod inner;
mod looks;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Instant;

use crate::completion::{Completion, Promise};
use crate::report::Report;
use crate::{Deadline, Error, ErrorKind, Result, TransferId};

use inner::TicketStage;
pub(crate) use inner::TransferInner;
use looks::Looks;

/// A posted plan. A future under any runtime; [`wait_blocking`](Transfer::wait_blocking) without one.
///
/// Resolves once: when it settles, or at its deadline with `TimedOut`. The plan's memory stays pinned until it has
/// [settled](Transfer::settled), which may be later. Dropping it cancels what can be cancelled and frees nothing early.
///
/// With a notification it resolves when the peer's side has that too. An error of such a transfer may come after its
/// data: [`Error::report`] then says what was moved, and the peer may still be notified.
#[must_use = "dropping a transfer cancels it"]
pub struct Transfer(pub(crate) Arc<TransferInner>);

impl Transfer {
    /// Its number.
    pub fn id(&self) -> TransferId {
        self.0.id
    }

    /// Blocks until it resolves, making progress on this thread where the link can. Past `deadline` it says
    /// `TimedOut` and is dropped, and so cancelled; its own deadline holds as well.
    pub fn wait_blocking(self, deadline: impl Into<Deadline>) -> Result<Report> {
        crate::fork::check()?;
        let link = {
            let mut state = self.0.state.lock();
            if let Some(result) = self.0.take(&mut state) {
                return result;
            }
            state.on.as_ref().map(|(link, _)| Arc::clone(link))
        };
        let until = deadline.into();
        // Lends a hand first.
        let (begun, mut looks) = (Instant::now(), 0);
        while let Some(link) = &link {
            let turn = link.drive();
            let moved = turn.done > 0;
            looks = if moved { 0 } else { looks + 1 };
            if let Some(result) = self.0.take(&mut self.0.state.lock()) {
                return result;
            }
            let now = Instant::now();
            let Looks { patience, between } = Looks::after(&self.0.plan.size(), &turn);
            if until.instant().is_some_and(|until| until <= now)
                || (!moved && now >= begun + patience)
            {
                break;
            }
            if !moved {
                between(looks);
            }
        }
        if let Some(link) = &link {
            link.stop_driving();
        }
        let mut state = self.0.state.lock();
        loop {
            if let Some(result) = self.0.take(&mut state) {
                return result;
            }
            if until.passed() {
                let error = Error::new(
                    ErrorKind::TimedOut,
                    "the wait for a transfer ended: wait longer, or await it",
                );
                return Err(error.with_report(state.arrived.clone()));
            }
            state = self.0.finished.wait_until(state, until.instant());
        }
    }

    /// Makes progress on this thread where the link can, and says what came of the transfer; `None` while it is in
    /// flight. Waits for nothing. For callers with a loop of their own; one that stops calling it loses nothing but
    /// time.
    pub fn drive(&mut self) -> Option<Result<Report>> {
        if let Err(error) = crate::fork::check() {
            return Some(Err(error));
        }
        let link = {
            let mut state = self.0.state.lock();
            if let Some(result) = self.0.take(&mut state) {
                return Some(result);
            }
            state.on.as_ref().map(|(link, _)| Arc::clone(link))
        };
        link?.drive();
        self.0.take(&mut self.0.state.lock())
    }

    /// Whether it has settled; see [`settled`](Transfer::settled).
    pub fn is_settled(&self) -> bool {
        self.0.state.lock().stage == TicketStage::Settled
    }

    /// Ends when the transfer has settled: nobody will read or write its local memory for it again. It outlives the
    /// transfer, so that who drops that, under `select!` for example, takes this first.
    ///
    /// Awaited, it has no deadline: it ends with the proof, however late that comes, or never if there will be none
    /// (quarantine). [`Completion::join`] waits for 30 seconds at most, [`Completion::wait_blocking`] for as long as it is told.
    pub fn settled(&self) -> Completion<()> {
        if let Err(error) = crate::fork::check() {
            return Completion::ready(Err(error));
        }
        let promise = Promise::new();
        let mut state = self.0.state.lock();
        match state.stage {
            TicketStage::Settled => {
                promise.finish(Ok(()));
            }
            TicketStage::Forgotten => {
                promise.finish(Err(Error::new(
                    ErrorKind::Forgotten,
                    "the transport lost the transfer: it never settles",
                )));
            }
            _ => state.settled.push(Arc::clone(&promise)),
        }
        Completion::of(promise)
    }

    /// Stops it as soon as possible. Best effort: it may still succeed, and it resolves and settles all the same. One
    /// whose data has arrived resolves at once; its notification cannot be called back.
    pub fn cancel(&self) {
        if crate::fork::check().is_ok() {
            self.0.cancel(Error::new(ErrorKind::Cancelled, "the transfer was cancelled"));
        }
    }

    /// What cancels it from elsewhere while it is awaited or waited for.
    ///
    /// ```
    /// # use kvx_core as kvx;
    /// # fn look(transfer: kvx::Transfer) -> kvx::Result<()> {
    /// let canceller = transfer.canceller();
    /// let aborted = std::thread::spawn(move || canceller.cancel()); // when the client goes away
    /// let result = transfer.wait_blocking(std::time::Duration::from_secs(2)); // `Cancelled`, or what came first
    /// # aborted.join().ok(); result.map(drop) }
    /// ```
    pub fn canceller(&self) -> Canceller {
        Canceller(Arc::downgrade(&self.0))
    }
}

/// Cancels one transfer, from any thread and any number of times. Cheap to clone; keeps nothing of the transfer.
#[derive(Clone, Debug)]
pub struct Canceller(Weak<TransferInner>);

impl Canceller {
    /// As [`Transfer::cancel`]. Does nothing once the transfer has ended.
    pub fn cancel(&self) {
        if crate::fork::check().is_ok()
            && let Some(transfer) = self.0.upgrade()
            && !transfer.over.load(Ordering::Acquire)
        {
            transfer.cancel(Error::new(ErrorKind::Cancelled, "the transfer was cancelled"));
        }
    }
}

impl Future for Transfer {
    type Output = Result<Report>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        crate::fork::check()?;
        let mut state = self.0.state.lock();
        if let Some(result) = self.0.take(&mut state) {
            return Poll::Ready(result);
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if crate::fork::check().is_err() || self.0.over.load(Ordering::Acquire) {
            return;
        }
        if !matches!(self.0.state.lock().stage, TicketStage::Settled | TicketStage::Forgotten) {
            self.0.cancel(Error::new(ErrorKind::Cancelled, "the transfer was dropped"));
        }
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Transfer({}, {:?})", self.0.id.0, self.0.plan)
    }
}
