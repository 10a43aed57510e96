//! Transfers: posted plans in flight. Each is a future that resolves once, when it settles or at
//! its deadline.

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
use crate::{Deadline, ErrorKind, Result, TransferId};

use inner::TicketStage;
pub(crate) use inner::TransferInner;
use looks::Looks;

/// A posted plan. Await it under any runtime, or call [`wait_blocking`](Transfer::wait_blocking)
/// without one.
///
/// A transfer resolves once: when it settles, or at its deadline with `TimedOut`. The plan's memory
/// stays pinned until the transfer has [settled](Transfer::settled), which may be later. Dropping
/// the transfer cancels what can be cancelled and frees no memory early.
///
/// A transfer with a notification resolves when the peer's agent has the notification. Such a
/// transfer may fail after its data has arrived: [`Error::report`](crate::Error::report) then
/// returns a report of the data, and the peer may still be notified.
#[must_use = "dropping a transfer cancels it"]
pub struct Transfer(pub(crate) Arc<TransferInner>);

impl Transfer {
    /// Returns the transfer's number.
    pub fn id(&self) -> TransferId {
        self.0.id
    }

    /// Blocks until the transfer resolves, and makes progress on this thread if the link can. If
    /// `deadline` passes first, the transfer is dropped and thereby cancelled. The transfer's own
    /// deadline applies as well.
    ///
    /// # Errors
    /// The error of the transfer; `TimedOut` if either deadline passes; `Invalid` if an earlier
    /// `await` took the result; `Forked`.
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
        // Moves data on this thread first.
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
                let error = ErrorKind::TimedOut
                    .because("the wait for a transfer ended: wait longer, or await it");
                return Err(error.with_report(state.arrived.clone()));
            }
            state = self.0.finished.wait_until(state, until.instant());
        }
    }

    /// Makes progress on this thread if the link can, and returns the result of the transfer;
    /// `None` while it is in flight. Never blocks. Callers with a loop of their own use it; one
    /// that stops calling it only loses time.
    ///
    /// # Errors
    /// As [`wait_blocking`](Transfer::wait_blocking).
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

    /// Returns true if the transfer has settled; see [`settled`](Transfer::settled).
    pub fn is_settled(&self) -> bool {
        self.0.state.lock().stage == TicketStage::Settled
    }

    /// Waits until the transfer has settled: nothing will read or write its local memory for it
    /// again.
    ///
    /// The completion outlives the transfer. Callers that may drop the transfer, for example in
    /// `select!`, create it first. When awaited, it has no deadline: it ends with the proof,
    /// however late, or never if there will be none (quarantine). [`Completion::join`] waits for at
    /// most 30 seconds, [`Completion::wait_blocking`] until its deadline.
    ///
    /// # Errors
    /// `Forgotten` if the transport lost the transfer, which then never settles; `Forked`.
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
                promise.finish(Err(ErrorKind::Forgotten
                    .because("the transport lost the transfer: it never settles")));
            }
            _ => state.settled.push(Arc::clone(&promise)),
        }
        Completion::of(promise)
    }

    /// Cancels the transfer as soon as possible, on a best-effort basis: it may still succeed, and
    /// it resolves and settles in any case. A transfer whose data has arrived resolves at once; its
    /// notification cannot be recalled.
    pub fn cancel(&self) {
        if crate::fork::check().is_ok() {
            self.0.cancel(ErrorKind::Cancelled.because("the transfer was cancelled"));
        }
    }

    /// Returns a handle that can cancel the transfer from elsewhere while it is awaited.
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

/// A handle that cancels one transfer, from any thread and any number of times. Cheap to clone; it
/// does not keep the transfer alive.
#[derive(Clone, Debug)]
pub struct Canceller(Weak<TransferInner>);

impl Canceller {
    /// Cancels the transfer, as [`Transfer::cancel`] does. Does nothing once the transfer has
    /// ended.
    pub fn cancel(&self) {
        if crate::fork::check().is_ok()
            && let Some(transfer) = self.0.upgrade()
            && !transfer.over.load(Ordering::Acquire)
        {
            transfer.cancel(ErrorKind::Cancelled.because("the transfer was cancelled"));
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
            self.0.cancel(ErrorKind::Cancelled.because("the transfer was dropped"));
        }
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Transfer({}, {:?})", self.0.id.0, self.0.plan)
    }
}
