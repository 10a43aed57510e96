//! Received notifications: a bounded queue, and the callers that wait for some of them.

use std::borrow::Cow;
use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::Instant;

use crate::completion::Promise;
use crate::fault_injection::injected;
use crate::identity::{Identity, Incarnation, Sender};
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::transport::QueueFull;

/// A notification from a peer, which arrived after the data that it belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// The sender's name and incarnation.
    pub from: Identity,
    /// The bytes.
    pub bytes: Box<[u8]>,
}

/// The limits of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InboxLimits {
    pub(crate) count: usize,
    pub(crate) bytes: usize,
}

impl Default for InboxLimits {
    fn default() -> Self {
        InboxLimits { count: 4096, bytes: 64 << 20 }
    }
}

pub(crate) struct Inbox {
    limits: InboxLimits,
    state: Mutex<InboxState>,
    arrived: Condvar,
    /// Until this time, `deliver` does not yield the core to waiting threads.
    keeps_core_until: Mutex<Instant>,
}

#[derive(Default)]
struct InboxState {
    queue: VecDeque<Notification>,
    /// Notifications of data that devices do not see yet.
    held: VecDeque<Notification>,
    /// The bytes of both.
    bytes: usize,
    /// True if a transport got `QueueFull` since the queue last had space.
    refused: bool,
    /// True once callers must not wait any more.
    closed: bool,
    expected: Vec<ExpectedSenders>,
    wakers: Vec<Waker>,
}

struct ExpectedSenders {
    bytes: Box<[u8]>,
    wanted: usize,
    seen: HashSet<Identity>,
    taken: Vec<Notification>,
    /// Expired when no caller waits any more.
    promise: Weak<Promise<Vec<Identity>>>,
}

impl ExpectedSenders {
    /// Returns true if the notification is one of those expected.
    fn wants(&mut self, from: &Identity, bytes: &[u8]) -> bool {
        *self.bytes == *bytes && (self.seen.insert(from.clone()) || injected("expect"))
    }

    fn is_met(&self) -> bool {
        self.taken.len() >= self.wanted
    }

    fn is_over(&self) -> bool {
        self.promise.upgrade().is_none_or(|promise| promise.is_finished())
    }
}

impl InboxState {
    /// Returns true if a notification does not fit. One that is larger than the byte limit, as
    /// foreign agents may send, fits into an empty queue.
    fn is_full(&self, limits: InboxLimits, len: usize) -> bool {
        let fits = self.bytes == 0 || self.bytes + len <= limits.bytes;
        self.queue.len() + self.held.len() >= limits.count || !fits
    }

    /// Returns the notifications of expectations that timed out or were dropped to the queue, so
    /// that a second attempt finds them.
    fn sweep(&mut self) {
        for at in (0..self.expected.len()).rev() {
            if self.expected[at].is_over() {
                for notification in self.expected.swap_remove(at).taken.into_iter().rev() {
                    self.bytes += notification.bytes.len();
                    self.queue.push_front(notification);
                }
            }
        }
    }
}

/// Returns the sender as notifications name it.
fn identity(from: Sender<'_>) -> Identity {
    let incarnation = if injected("sender") { Incarnation([0; 16]) } else { from.incarnation };
    Identity { name: from.name.into(), incarnation }
}

impl Inbox {
    pub(crate) fn new(limits: InboxLimits) -> Self {
        Inbox {
            limits,
            state: Mutex::default(),
            arrived: Condvar::new(),
            keeps_core_until: Mutex::new(Instant::now()),
        }
    }

    /// Receives a notification.
    ///
    /// # Errors
    /// [`QueueFull`]: the sender's transport keeps the notification and stops reading.
    pub(crate) fn deliver(&self, from: Sender<'_>, bytes: &[u8]) -> Result<(), QueueFull> {
        let from = identity(from);
        let mut state = self.state.lock();
        state.sweep();
        self.insert(state, from, Cow::Borrowed(bytes), true)
    }

    /// Receives a notification, but keeps it until [`release`](Inbox::release).
    ///
    /// # Errors
    /// Those of [`deliver`](Inbox::deliver).
    pub(crate) fn hold(&self, from: Sender<'_>, bytes: &[u8]) -> Result<(), QueueFull> {
        let from = identity(from);
        let mut state = self.state.lock();
        state.sweep();
        // Each expectation takes one of each sender, and that one needs no space.
        let wants = |one: &&ExpectedSenders| *one.bytes == *bytes && !one.seen.contains(&from);
        let is_same = |one: &&Notification| one.from == from && *one.bytes == *bytes;
        let wanted = state.expected.iter().filter(wants).count();
        let is_expected = wanted > 0 && state.held.iter().filter(is_same).count() < wanted;
        if !is_expected && state.is_full(self.limits, bytes.len()) {
            state.refused = true;
            return Err(QueueFull);
        }
        state.bytes += bytes.len();
        state.held.push_back(Notification { from, bytes: bytes.into() });
        Ok(())
    }

    /// Delivers the oldest notification that is kept.
    pub(crate) fn release(&self) {
        let mut state = self.state.lock();
        state.sweep();
        let Some(Notification { from, bytes }) = state.held.pop_front() else {
            return debug_assert!(false, "each release follows a hold");
        };
        state.bytes = state.bytes.saturating_sub(bytes.len());
        // It had its space before, so it is not refused.
        self.insert(state, from, Cow::Owned(bytes.into()), false).ok();
    }

    fn insert(
        &self,
        mut state: MutexGuard<'_, InboxState>,
        from: Identity,
        bytes: Cow<'_, [u8]>,
        is_limited: bool,
    ) -> Result<(), QueueFull> {
        if let Some(at) =
            state.expected.iter_mut().position(|expectation| expectation.wants(&from, &bytes))
        {
            let notification = Notification { from, bytes: bytes.into() };
            if injected("expect-keeps") {
                state.queue.push_back(notification.clone());
            }
            state.expected[at].taken.push(notification);
            if state.expected[at].is_met() {
                let met = state.expected.swap_remove(at);
                drop(state);
                if met.finish() {
                    self.give_way();
                }
            }
            return Ok(());
        }
        if is_limited && state.is_full(self.limits, bytes.len()) && !injected("inbox") {
            state.refused = true;
            return Err(QueueFull);
        }
        state.bytes += bytes.len();
        let notification = Notification { from, bytes: bytes.into() };
        if injected("twice") {
            state.queue.push_back(notification.clone());
        }
        state.queue.push_back(notification);
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        let awaited = self.arrived.notify_all() || !wakers.is_empty();
        wakers.into_iter().for_each(Waker::wake);
        if awaited {
            self.give_way();
        }
        Ok(())
    }

    /// Yields the core to a waiting thread, because the transport acknowledges next, which takes
    /// longer than a wake-up in some libraries. If other threads take the core instead, for
    /// milliseconds, the next yield waits sixteen times as long.
    fn give_way(&self) {
        let now = Instant::now();
        if now < *self.keeps_core_until.lock() {
            return;
        }
        std::thread::yield_now();
        let after = Instant::now();
        *self.keeps_core_until.lock() = after + 16 * (after - now);
    }

    /// Returns the oldest notification, and true if the queue has space again after a `QueueFull`.
    pub(crate) fn take(&self) -> (Option<Notification>, bool) {
        self.take_or_wake(None)
    }

    /// Does the work of [`take`](Inbox::take). If the queue is empty, `waker` is woken when a
    /// notification arrives.
    pub(crate) fn take_or_wake(&self, waker: Option<&Waker>) -> (Option<Notification>, bool) {
        let mut state = self.state.lock();
        state.sweep();
        let taken = state.queue.pop_front();
        match (&taken, waker) {
            (Some(notification), _) => {
                state.bytes = state.bytes.saturating_sub(notification.bytes.len())
            }
            (None, Some(waker)) if !state.wakers.iter().any(|known| known.will_wake(waker)) => {
                state.wakers.push(waker.clone());
            }
            _ => {}
        }
        let roomy =
            state.queue.len() <= self.limits.count / 2 && state.bytes <= self.limits.bytes / 2;
        let resume = roomy && std::mem::take(&mut state.refused);
        (taken, resume)
    }

    /// Blocks until there may be a notification, or until the deadline.
    pub(crate) fn wait_until(&self, until: Option<Instant>) {
        let state = self.state.lock();
        if state.queue.is_empty() && !state.closed {
            drop(self.arrived.wait_until(state, until));
        }
    }

    /// Wakes all waiters, and lets no caller wait from now on.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.wake_all();
    }

    pub(crate) fn wake_all(&self) {
        let wakers = std::mem::take(&mut self.state.lock().wakers);
        self.arrived.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Finishes `promise` when `wanted` different senders have sent `bytes`; counts queued
    /// notifications first. Returns true if transports are holding notifications back: expected
    /// ones may be among them, and need no space in the queue.
    pub(crate) fn wait_for_senders(
        &self,
        bytes: &[u8],
        wanted: usize,
        promise: &Arc<Promise<Vec<Identity>>>,
    ) -> bool {
        let promise = Arc::downgrade(promise);
        let mut expectation = ExpectedSenders {
            bytes: bytes.into(),
            wanted,
            seen: HashSet::new(),
            taken: Vec::new(),
            promise,
        };
        let mut state = self.state.lock();
        state.sweep();
        let mut kept = VecDeque::with_capacity(state.queue.len());
        while let Some(notification) = state.queue.pop_front() {
            if expectation.is_met() || !expectation.wants(&notification.from, &notification.bytes) {
                kept.push_back(notification);
                continue;
            }
            if injected("expect-keeps") {
                kept.push_back(notification.clone());
            }
            state.bytes = state.bytes.saturating_sub(notification.bytes.len());
            expectation.taken.push(notification);
        }
        state.queue = kept;
        let held_back = std::mem::take(&mut state.refused);
        if expectation.is_met() {
            drop(state);
            expectation.finish();
        } else {
            state.expected.push(expectation);
        }
        held_back
    }
}

impl ExpectedSenders {
    /// Finishes the promise. Returns false if no caller waits for it any more.
    fn finish(self) -> bool {
        let Some(promise) = self.promise.upgrade() else { return false };
        promise.finish(Ok(self.taken.into_iter().map(|notification| notification.from).collect()));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENDERS: [Sender<'static>; 2] = [
        Sender { name: "a", incarnation: Incarnation([1; 16]) },
        Sender { name: "b", incarnation: Incarnation([2; 16]) },
    ];

    #[test]
    fn a_full_queue_refuses_until_half_of_it_is_taken() {
        let inbox = Inbox::new(InboxLimits { count: 4, bytes: 1000 });
        for _ in 0..4 {
            inbox.deliver(SENDERS[0], b"x").unwrap();
        }
        assert_eq!(inbox.deliver(SENDERS[0], b"x"), Err(QueueFull));
        let resumes: Vec<bool> = (0..4).map(|_| inbox.take().1).collect();
        assert_eq!(resumes, [false, true, false, false]);
    }

    #[test]
    fn one_that_is_held_takes_room_and_comes_when_it_is_released() {
        let inbox = Inbox::new(InboxLimits { count: 2, bytes: 1000 });
        inbox.hold(SENDERS[0], b"first").unwrap();
        inbox.hold(SENDERS[1], b"second").unwrap();
        assert_eq!(inbox.hold(SENDERS[0], b"third"), Err(QueueFull));
        assert_eq!(inbox.take().0, None);
        inbox.release();
        assert!(inbox.take().0.is_some_and(|one| *one.bytes == *b"first"));
        let promise = Promise::new();
        inbox.wait_for_senders(b"second", 2, &promise);
        inbox.hold(SENDERS[0], b"third").unwrap(); // the queue is full
        inbox.hold(SENDERS[0], b"second").unwrap(); // expected, so beyond the limit
        assert_eq!(inbox.hold(SENDERS[0], b"second"), Err(QueueFull), "one of a sender counts");
        inbox.release();
        inbox.release();
        assert!(!promise.is_finished());
        inbox.release();
        assert!(promise.is_finished());
    }

    #[test]
    fn one_that_is_larger_than_the_room_is_taken_alone() {
        let inbox = Inbox::new(InboxLimits { count: 4, bytes: 10 });
        inbox.deliver(SENDERS[0], b"first").unwrap();
        assert_eq!(inbox.deliver(SENDERS[0], &[7; 1000]), Err(QueueFull));
        inbox.take();
        inbox.deliver(SENDERS[0], &[7; 1000]).unwrap();
        assert_eq!(inbox.deliver(SENDERS[0], b"x"), Err(QueueFull));
        assert!(inbox.take().0.is_some_and(|large| large.bytes.len() == 1000));
        inbox.deliver(SENDERS[0], b"x").unwrap();
    }

    #[test]
    fn what_a_full_queue_refuses_is_not_copied() {
        let inbox = Inbox::new(InboxLimits { count: 1, bytes: 1000 });
        inbox.deliver(SENDERS[0], b"x").unwrap();
        let (large, begun) = (vec![7; 64 << 20], Instant::now());
        for _ in 0..1000 {
            assert_eq!(inbox.deliver(SENDERS[0], &large), Err(QueueFull));
        }
        assert!(
            begun.elapsed() < std::time::Duration::from_secs(1),
            "62 GiB of copies take some ten times as long"
        );
    }

    #[test]
    fn expect_counts_senders_and_takes_what_it_counts() {
        let inbox = Inbox::new(InboxLimits::default());
        inbox.deliver(SENDERS[0], b"done").unwrap();
        inbox.deliver(SENDERS[0], b"done").unwrap();
        inbox.deliver(SENDERS[0], b"other").unwrap();
        let promise = Promise::new();
        inbox.wait_for_senders(b"done", 2, &promise);
        assert!(!promise.is_finished());
        inbox.deliver(SENDERS[1], b"done").unwrap();
        assert!(promise.is_finished());
        let left: Vec<_> = std::iter::from_fn(|| inbox.take().0).map(|one| one.bytes).collect();
        assert_eq!(left, [b"done".to_vec().into(), Box::<[u8]>::from(*b"other")]);
    }

    #[test]
    fn an_expectation_that_nobody_waits_for_gives_back_what_it_took() {
        let inbox = Inbox::new(InboxLimits::default());
        let promise = Promise::new();
        inbox.wait_for_senders(b"done", 2, &promise);
        inbox.deliver(SENDERS[0], b"done").unwrap();
        assert_eq!(inbox.take().0, None);
        drop(promise);
        let again = Promise::new();
        inbox.wait_for_senders(b"done", 2, &again);
        inbox.deliver(SENDERS[1], b"done").unwrap();
        assert!(again.is_finished());
    }
}
