//! A value that the connector's thread sets once, and that an engine awaits or blocks for.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use kvx_core::Deadline;
use kvx_core::backend::sync::{Condvar, Mutex};

/// A slot that is set once and taken once. Needs no runtime.
#[derive(Debug)]
pub(super) struct Slot<T> {
    state: Mutex<SlotState<T>>,
    set: Condvar,
}

#[derive(Debug)]
struct SlotState<T> {
    value: Option<T>,
    waker: Option<Waker>,
}

impl<T> Slot<T> {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Slot {
            state: Mutex::new(SlotState { value: None, waker: None }),
            set: Condvar::new(),
        })
    }

    /// Sets the value and wakes the task that waits.
    pub(super) fn set(&self, value: T) {
        if let Some(waker) = self.fill(value) {
            waker.wake();
        }
    }

    /// Sets the value. Returns the waker of the task that waits: the caller may hold a lock, and
    /// wakes it later.
    pub(super) fn fill(&self, value: T) -> Option<Waker> {
        let mut state = self.state.lock();
        state.value = Some(value);
        self.set.notify_all();
        state.waker.take()
    }

    /// Takes the value, if it is set.
    pub(super) fn take(&self) -> Option<T> {
        self.state.lock().value.take()
    }

    pub(super) fn poll(&self, context: &mut Context<'_>) -> Poll<T> {
        let mut state = self.state.lock();
        if let Some(value) = state.value.take() {
            return Poll::Ready(value);
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }

    /// Blocks until the value is set or the deadline has passed.
    pub(super) fn wait(&self, deadline: Deadline) -> Option<T> {
        let until = until(deadline);
        let mut state = self.state.lock();
        loop {
            if let Some(value) = state.value.take() {
                return Some(value);
            }
            if Instant::now() >= until {
                return None;
            }
            state = self.set.wait_until(state, Some(until));
        }
    }
}

/// Converts a deadline to a moment, for calls of the standard library.
pub(super) fn until(deadline: Deadline) -> Instant {
    let day = std::time::Duration::from_secs(86_400);
    Instant::now() + deadline.left().min(day)
}
