//! Notifications that came in: a bounded queue, and those who wait for something in it.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use crate::breaks::broken;
use crate::completion::Shot;
use crate::identity::{Identity, Incarnation, Sender};
use crate::sync::{Condvar, Mutex};
use crate::transport::Full;

/// Bytes from a peer, that arrived after the data they speak of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// Who sent them: name and incarnation.
    pub from: Identity,
    /// The bytes.
    pub bytes: Box<[u8]>,
}

/// How much the queue holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) count: usize,
    pub(crate) bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { count: 4096, bytes: 64 << 20 }
    }
}

pub(crate) struct Inbox {
    limits: Limits,
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Notification>,
    bytes: usize,
    /// Somebody was told `Full` since the queue last had room.
    refused: bool,
    /// Nobody shall wait any more.
    closed: bool,
    expected: Vec<Expectation>,
    wakers: Vec<Waker>,
}

struct Expectation {
    bytes: Box<[u8]>,
    wanted: usize,
    seen: HashSet<Identity>,
    order: Vec<Identity>,
    shot: Arc<Shot<Vec<Identity>>>,
}

impl Expectation {
    /// Takes the notification if it is one more of those expected.
    fn takes(&mut self, notification: &Notification) -> bool {
        let fits = !self.shot.is_finished() && *self.bytes == *notification.bytes;
        if !fits || (!self.seen.insert(notification.from.clone()) && !broken("expect")) {
            return false;
        }
        self.order.push(notification.from.clone());
        true
    }

    fn is_met(&self) -> bool {
        self.order.len() >= self.wanted
    }
}

impl Inbox {
    pub(crate) fn new(limits: Limits) -> Self {
        Inbox { limits, state: Mutex::default(), arrived: Condvar::new() }
    }

    /// Takes a notification in. [`Full`]: the sender's transport keeps it and stops reading.
    pub(crate) fn deliver(&self, from: Sender<'_>, bytes: &[u8]) -> Result<(), Full> {
        let incarnation = if broken("sender") { Incarnation([0; 16]) } else { from.incarnation };
        let notification =
            Notification { from: Identity { name: from.name.into(), incarnation }, bytes: bytes.into() };
        let mut state = self.state.lock();
        state.expected.retain(|expectation| !expectation.shot.is_finished());
        if let Some(at) = state.expected.iter_mut().position(|expectation| expectation.takes(&notification)) {
            if broken("expect-keeps") {
                state.queue.push_back(notification);
            }
            if state.expected[at].is_met() {
                let met = state.expected.swap_remove(at);
                drop(state);
                met.shot.finish(Ok(met.order));
            }
            return Ok(());
        }
        let full = state.queue.len() >= self.limits.count || state.bytes + bytes.len() > self.limits.bytes;
        if full && !broken("inbox") {
            state.refused = true;
            return Err(Full);
        }
        state.bytes += bytes.len();
        if broken("twice") {
            state.queue.push_back(notification.clone());
        }
        state.queue.push_back(notification);
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        self.arrived.notify_all();
        wakers.into_iter().for_each(Waker::wake);
        Ok(())
    }

    /// The oldest notification. The flag says that the queue has room again after a `Full`.
    pub(crate) fn take(&self) -> (Option<Notification>, bool) {
        self.take_or_wake(None)
    }

    /// As [`take`](Inbox::take); without one, `waker` is woken when one arrives.
    pub(crate) fn take_or_wake(&self, waker: Option<&Waker>) -> (Option<Notification>, bool) {
        let mut state = self.state.lock();
        let taken = state.queue.pop_front();
        match (&taken, waker) {
            (Some(notification), _) => state.bytes = state.bytes.saturating_sub(notification.bytes.len()),
            (None, Some(waker)) if !state.wakers.iter().any(|known| known.will_wake(waker)) => {
                state.wakers.push(waker.clone());
            }
            _ => {}
        }
        let roomy = state.queue.len() <= self.limits.count / 2 && state.bytes <= self.limits.bytes / 2;
        let resume = roomy && std::mem::take(&mut state.refused);
        (taken, resume)
    }

    /// Blocks until there may be one, or until the deadline.
    pub(crate) fn wait_until(&self, until: Option<Instant>) {
        let state = self.state.lock();
        if state.queue.is_empty() && !state.closed {
            drop(self.arrived.wait_until(state, until));
        }
    }

    /// Those who wait look again now, and nobody waits from now on.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.wake_all();
    }

    pub(crate) fn wake_all(&self) {
        let wakers = std::mem::take(&mut self.state.lock().wakers);
        self.arrived.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Finishes `shot` when `wanted` different senders have sent `bytes`; looks at what is queued first. The flag is
    /// as in [`take`](Inbox::take).
    pub(crate) fn expect(&self, bytes: &[u8], wanted: usize, shot: Arc<Shot<Vec<Identity>>>) -> bool {
        let mut expectation =
            Expectation { bytes: bytes.into(), wanted, seen: HashSet::new(), order: Vec::new(), shot };
        let mut state = self.state.lock();
        let mut kept = VecDeque::with_capacity(state.queue.len());
        while let Some(notification) = state.queue.pop_front() {
            if !expectation.is_met() && expectation.takes(&notification) && !broken("expect-keeps") {
                state.bytes = state.bytes.saturating_sub(notification.bytes.len());
            } else {
                kept.push_back(notification);
            }
        }
        state.queue = kept;
        let roomy = state.queue.len() <= self.limits.count / 2 && state.bytes <= self.limits.bytes / 2;
        let resume = roomy && std::mem::take(&mut state.refused);
        if expectation.is_met() {
            drop(state);
            expectation.shot.finish(Ok(expectation.order));
        } else {
            state.expected.push(expectation);
        }
        resume
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
        let inbox = Inbox::new(Limits { count: 4, bytes: 1000 });
        for _ in 0..4 {
            inbox.deliver(SENDERS[0], b"x").unwrap();
        }
        assert_eq!(inbox.deliver(SENDERS[0], b"x"), Err(Full));
        let resumes: Vec<bool> = (0..4).map(|_| inbox.take().1).collect();
        assert_eq!(resumes, [false, true, false, false]);
    }

    #[test]
    fn expect_counts_senders_and_takes_what_it_counts() {
        let inbox = Inbox::new(Limits::default());
        inbox.deliver(SENDERS[0], b"done").unwrap();
        inbox.deliver(SENDERS[0], b"done").unwrap();
        inbox.deliver(SENDERS[0], b"other").unwrap();
        let shot = Shot::new();
        inbox.expect(b"done", 2, Arc::clone(&shot));
        assert!(!shot.is_finished());
        inbox.deliver(SENDERS[1], b"done").unwrap();
        assert!(shot.is_finished());
        let left: Vec<_> = std::iter::from_fn(|| inbox.take().0).map(|one| one.bytes).collect();
        assert_eq!(left, [b"done".to_vec().into(), Box::<[u8]>::from(*b"other")]);
    }
}
