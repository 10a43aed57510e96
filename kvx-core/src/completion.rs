//! A future that another thread completes once. Callers can also wait for it without a runtime.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::deadline::{Clock, Expire, Reason, Watch};
use crate::sync::{Condvar, Mutex};
use crate::ticket::{Settle, Ticket};
use crate::{Deadline, Error, ErrorKind, Result};

/// How long after the deadline a blocked thread stops waiting if the clock did not end the
/// operation.
const GRACE: Duration = Duration::from_secs(1);

/// The end of an operation: a future under any runtime, or [`join`](Completion::join) without one.
/// Dropping it does not stop the operation.
#[must_use = "futures do nothing unless awaited; the operation itself continues"]
pub struct Completion<T>(Arc<Promise<T>>);

/// The sending half of a [`Completion`]. The first result counts.
pub(crate) struct Promise<T> {
    state: Mutex<PromiseState<T>>,
    finished: Condvar,
}

struct PromiseState<T> {
    result: Option<Result<T>>,
    done: bool,
    waker: Option<Waker>,
    /// Watches the deadline; dropped when the operation ends.
    watch: Option<Watch>,
    /// The operation's deadline, if it has one.
    until: Option<Instant>,
}

impl<T> Promise<T> {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Promise {
            state: Mutex::new(PromiseState {
                result: None,
                done: false,
                waker: None,
                watch: None,
                until: None,
            }),
            finished: Condvar::new(),
        })
    }

    /// Creates the promise of an operation that enforces this deadline itself.
    pub(crate) fn until(deadline: Deadline) -> Arc<Self> {
        let promise = Promise::new();
        promise.state.lock().until = deadline.instant();
        promise
    }

    /// Finishes the operation. Returns `result` if it was already finished.
    pub(crate) fn finish(&self, result: Result<T>) -> Option<Result<T>> {
        let mut state = self.state.lock();
        if state.done {
            return Some(result);
        }
        state.done = true;
        state.result = Some(result);
        let (waker, watch) = (state.waker.take(), state.watch.take());
        drop(state);
        drop(watch);
        self.finished.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
        None
    }

    /// Finishes with the error of `late` at the deadline, unless the promise is finished before.
    pub(crate) fn by(
        self: &Arc<Self>,
        clock: &Clock,
        deadline: Deadline,
        late: impl Fn() -> Error + Send + Sync + 'static,
    ) where
        T: Send + 'static,
    {
        let Some(at) = deadline.instant() else { return };
        let watch = clock.watch(at, Arc::new(TimedPromise { promise: Arc::downgrade(self), late }));
        let mut state = self.state.lock();
        state.until = Some(at);
        if !state.done {
            state.watch = Some(watch);
        } else {
            drop(state);
            drop(watch);
        }
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.state.lock().done
    }

    fn poll(&self, context: &mut Context<'_>) -> Poll<Result<T>> {
        crate::fork::check()?;
        let mut state = self.state.lock();
        if state.done {
            return Poll::Ready(state.result.take().unwrap_or_else(|| Err(taken())));
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }
}

fn taken() -> Error {
    ErrorKind::Invalid.because("an earlier await took the result: keep it")
}

impl<T> Completion<T> {
    pub(crate) fn of(promise: Arc<Promise<T>>) -> Self {
        Completion(promise)
    }

    /// Creates a completion that has already ended.
    pub(crate) fn ready(result: Result<T>) -> Self {
        let promise = Promise::new();
        promise.finish(result);
        Completion(promise)
    }

    /// Blocks until the operation ends, at the latest by the deadline that it was given.
    ///
    /// For an operation without a deadline (such as
    /// [`Transfer::settled`](crate::Transfer::settled)) it waits 30 seconds, as for a transfer that
    /// sets none. [`wait_blocking`](Completion::wait_blocking) takes another time.
    ///
    /// ```no_run
    /// # use kvx_core as kvx;
    /// # fn main() -> kvx::Result<()> {
    /// # let agent = kvx::Agent::builder("decode-0").registry(kvx::Registry::new()).build()?;
    /// use std::time::Duration;
    /// agent.shutdown(Duration::from_secs(5)).join()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The error of the operation; `TimedOut` if it does not end in time; `Invalid` if an earlier
    /// `await` took the result; `Forked` in a forked child.
    pub fn join(self) -> Result<T> {
        crate::fork::check()?; // in a child the lock may stay held for ever
        let until = self
            .0
            .state
            .lock()
            .until
            .map(|until| Deadline::from(until.checked_add(GRACE).unwrap_or(until)));
        self.wait_blocking(until.unwrap_or_else(Deadline::default_for_transfers))
    }

    /// Blocks until the operation ends or `deadline` passes. The operation continues after the
    /// deadline.
    ///
    /// # Errors
    /// The error of the operation; `TimedOut` if `deadline` passes first; `Invalid` if an earlier
    /// `await` took the result; `Forked` in a forked child.
    pub fn wait_blocking(self, deadline: impl Into<Deadline>) -> Result<T> {
        crate::fork::check()?;
        let until = deadline.into().instant();
        let mut state = self.0.state.lock();
        loop {
            if state.done {
                return state.result.take().unwrap_or_else(|| Err(taken()));
            }
            if until.is_some_and(|until| until <= std::time::Instant::now()) {
                return Err(ErrorKind::TimedOut
                    .because("the wait ended before the operation; wait longer or await it"));
            }
            state = self.0.finished.wait_until(state, until);
        }
    }
}

impl Completion<()> {
    /// Creates a completion and the ticket that ends it.
    pub fn with_ticket() -> (Self, Ticket) {
        let promise = Promise::new();
        (Completion(Arc::clone(&promise)), Ticket::of(promise))
    }
}

impl<T> Future for Completion<T> {
    type Output = Result<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll(context)
    }
}

impl Settle for Promise<()> {
    fn settled(self: Arc<Self>, result: Result<()>) {
        self.finish(result);
    }

    fn forgotten(self: Arc<Self>) {
        self.finish(Err(ErrorKind::Forgotten
            .because("the transport lost the operation: report this as a bug in the transport")));
    }
}

/// A promise with the error that it gets at its deadline.
struct TimedPromise<T, F> {
    promise: Weak<Promise<T>>,
    late: F,
}

impl<T: Send, F: Fn() -> Error + Send + Sync> Expire for TimedPromise<T, F> {
    fn expire(self: Arc<Self>) {
        if let Some(promise) = self.promise.upgrade() {
            promise.finish(Err((self.late)()));
        }
    }

    fn interrupt(self: Arc<Self>, reason: &Reason) {
        if matches!(reason, Reason::Shutdown)
            && let Some(promise) = self.promise.upgrade()
        {
            promise.finish(Err(ErrorKind::Closed.because("the agent was shut down meanwhile")));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_first_result_counts() {
        let promise = Promise::new();
        assert!(promise.finish(Ok(1)).is_none());
        assert!(matches!(promise.finish(Ok(2)), Some(Ok(2))));
        assert_eq!(Completion::of(promise).wait_blocking(Duration::ZERO).unwrap(), 1);
    }

    #[test]
    fn a_wait_ends_at_its_deadline() {
        let error = Completion::<()>::of(Promise::new())
            .wait_blocking(Duration::from_millis(10))
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn a_join_keeps_the_deadline_that_the_operation_was_given() {
        let clock = Clock::start("test").unwrap();
        let begun = Instant::now();
        let promise = Promise::<()>::new();
        promise.by(&clock, Duration::from_millis(20).into(), || {
            ErrorKind::StillShared.because("its own")
        });
        let error = Completion::of(Arc::clone(&promise)).join().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StillShared, "{error}");
        // `join` also returns if the operation does not enforce its deadline.
        let deadline = Deadline::from(Duration::from_millis(20));
        let error = Completion::of(Promise::<()>::until(deadline)).join().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        clock.stop();
    }

    #[test]
    fn a_lost_ticket_ends_the_completion() {
        let (completion, ticket) = Completion::with_ticket();
        drop(ticket);
        assert_eq!(
            completion.wait_blocking(Duration::from_secs(10)).unwrap_err().kind(),
            ErrorKind::Forgotten
        );
    }
}
