//! Notifications of a link: a window of sent ones without acknowledgement, and bounded queues at
//! both ends.

use std::collections::VecDeque;

use kvx_core::backend::{QueueFull, Ticket};
use kvx_core::{Error, ErrorKind, Result};

use super::ENTRY_OVERHEAD;
use super::errors::malformed;

/// The limit of unacknowledged notifications of one link. A target must have space to park as many,
/// because it never stops reading.
pub const WINDOW: usize = 64;
/// The limit in bytes of unacknowledged notifications.
const WINDOW_BYTES: usize = 1 << 20;
/// The limit in bytes of notifications that wait at the sender; each counts [`ENTRY_OVERHEAD`] more
/// than its length.
const MAX_WAITING_BYTES: usize = 64 << 20;

struct QueuedNotice {
    bytes: Box<[u8]>,
    done: Ticket,
}

struct SentNotice {
    notice: u64,
    len: usize,
    done: Ticket,
}

/// Notifications on their way to a peer, the oldest first.
#[derive(Default)]
pub struct NoticesToPeer {
    waiting: VecDeque<QueuedNotice>,
    waiting_cost: usize,
    sent: VecDeque<SentNotice>,
    sent_bytes: usize,
    next: u64,
}

impl NoticesToPeer {
    /// Queues a notification.
    ///
    /// # Errors
    /// `Exhausted`, with the ticket, if too much is waiting already.
    pub fn add(&mut self, bytes: Box<[u8]>, done: Ticket) -> Result<(), (Ticket, Error)> {
        let cost = bytes.len() + ENTRY_OVERHEAD;
        if self.waiting_cost + cost > MAX_WAITING_BYTES {
            let why = format!(
                "{} notifications wait for this peer already, of {} MiB in all: it does not \
                 acknowledge them",
                self.waiting.len(),
                MAX_WAITING_BYTES >> 20
            );
            return Err((done, ErrorKind::Exhausted.because(why)));
        }
        self.waiting_cost += cost;
        self.waiting.push_back(QueuedNotice { bytes, done });
        Ok(())
    }

    /// Takes the next notification to send, with its number; `None` while the window is full.
    pub fn next_to_send(&mut self) -> Option<(u64, Box<[u8]>)> {
        let len = self.waiting.front()?.bytes.len();
        if self.sent.len() >= WINDOW || self.sent_bytes + len > WINDOW_BYTES {
            return None;
        }
        let (bytes, done) = self.pop()?;
        let notice = self.next;
        self.next += 1;
        self.sent_bytes += len;
        self.sent.push_back(SentNotice { notice, len, done });
        Some((notice, bytes))
    }

    /// Takes the ticket of a notification that the peer acknowledges.
    ///
    /// # Errors
    /// `Malformed` unless it is the oldest that was sent: notifications cannot overtake each other.
    pub fn acknowledge(&mut self, notice: u64) -> Result<Ticket> {
        if self.sent.front().is_some_and(|sent| sent.notice == notice)
            && let Some(sent) = self.sent.pop_front()
        {
            self.sent_bytes -= sent.len;
            return Ok(sent.done);
        }
        Err(malformed("an acknowledgement does not match the oldest notification"))
    }

    /// Returns true if an acknowledgement is outstanding.
    pub fn awaits_answer(&self) -> bool {
        !self.sent.is_empty()
    }

    /// Returns the oldest unsent notification, for a peer that acknowledges nothing.
    pub fn front(&self) -> Option<&[u8]> {
        self.waiting.front().map(|waiting| &*waiting.bytes)
    }

    /// Takes the oldest unsent notification.
    pub fn pop(&mut self) -> Option<(Box<[u8]>, Ticket)> {
        let QueuedNotice { bytes, done } = self.waiting.pop_front()?;
        self.waiting_cost -= bytes.len() + ENTRY_OVERHEAD;
        Some((bytes, done))
    }

    /// Takes all tickets when the link has ended.
    pub fn end(&mut self) -> impl Iterator<Item = Ticket> {
        (self.waiting_cost, self.sent_bytes) = (0, 0);
        let sent = std::mem::take(&mut self.sent).into_iter().map(|sent| sent.done);
        sent.chain(std::mem::take(&mut self.waiting).into_iter().map(|waiting| waiting.done))
    }
}

/// A peer's notifications that do not fit into the agent's queue, the oldest first.
#[derive(Default)]
pub struct NoticesFromPeer {
    parked: VecDeque<(u64, Box<[u8]>)>,
    bytes: usize,
}

impl NoticesFromPeer {
    /// Takes a notification that arrived. Returns true if `deliver` took it and the caller must
    /// acknowledge it. Waits behind others that are parked: otherwise small ones could overtake a
    /// large one for ever.
    ///
    /// # Errors
    ///
    /// `Malformed` for more than the window.
    pub fn take(
        &mut self,
        notice: u64,
        bytes: &[u8],
        deliver: impl FnOnce(&[u8]) -> Result<(), QueueFull>,
    ) -> Result<bool> {
        if self.parked.is_empty() && deliver(bytes).is_ok() {
            return Ok(true);
        }
        if self.parked.len() >= WINDOW || self.bytes + bytes.len() > WINDOW_BYTES {
            return Err(malformed("the peer sent more notifications than the window allows"));
        }
        self.bytes += bytes.len();
        self.parked.push_back((notice, bytes.into()));
        Ok(false)
    }

    /// Offers the oldest parked notification to `deliver` again. Returns its number, for the
    /// acknowledgement, if `deliver` took it.
    pub fn deliver_next(
        &mut self,
        deliver: impl FnOnce(&[u8]) -> Result<(), QueueFull>,
    ) -> Option<u64> {
        deliver(&self.parked.front()?.1).ok()?;
        let (notice, bytes) = self.parked.pop_front()?;
        self.bytes -= bytes.len();
        Some(notice)
    }

    /// Returns the bytes that the parked notifications take.
    pub fn held(&self) -> usize {
        self.bytes + self.parked.len() * ENTRY_OVERHEAD
    }

    /// Returns true if none is parked.
    pub fn is_empty(&self) -> bool {
        self.parked.is_empty()
    }

    /// Drops all notifications when the link has ended.
    pub fn clear(&mut self) {
        *self = NoticesFromPeer::default();
    }
}

#[cfg(test)]
mod exhaustive;
#[cfg(test)]
mod tests {
    use super::*;

    fn ticket() -> Ticket {
        Ticket::new(|_| {})
    }

    fn add(to_peer: &mut NoticesToPeer, len: usize) -> Result<(), Error> {
        to_peer.add(vec![7; len].into(), ticket()).map_err(|(done, why)| {
            done.settle(Err(why.clone()));
            why
        })
    }

    fn settle(tickets: impl Iterator<Item = Ticket>) -> usize {
        tickets.map(|done| done.settle(Ok(()))).count()
    }

    #[test]
    fn the_window_is_bounded_in_number_and_bytes_and_opens_with_each_acknowledgement() {
        for (len, fit) in [(0, WINDOW), (64 << 10, 16), (256 << 10, 4)] {
            let mut to_peer = NoticesToPeer::default();
            (0..2 * WINDOW).for_each(|_| add(&mut to_peer, len).unwrap());
            let sent: Vec<u64> =
                std::iter::from_fn(|| to_peer.next_to_send()).map(|(notice, _)| notice).collect();
            assert_eq!(sent, (0..fit as u64).collect::<Vec<_>>());
            to_peer.acknowledge(0).unwrap().settle(Ok(()));
            assert_eq!(to_peer.next_to_send().unwrap().0, fit as u64);
            assert!(to_peer.next_to_send().is_none() && to_peer.awaits_answer());
            assert_eq!(settle(to_peer.end()), 2 * WINDOW - 1);
            assert!(!to_peer.awaits_answer() && to_peer.front().is_none());
        }
    }

    #[test]
    fn waiting_notifications_are_bounded_even_if_they_are_empty() {
        for len in [0, 1000, 64 << 10] {
            let mut to_peer = NoticesToPeer::default();
            let most = MAX_WAITING_BYTES / (len + ENTRY_OVERHEAD);
            let fit = (0..=most).take_while(|_| add(&mut to_peer, len).is_ok()).count();
            assert_eq!(fit, most);
            assert_eq!(add(&mut to_peer, len).unwrap_err().kind(), ErrorKind::Exhausted);
            to_peer.next_to_send().unwrap();
            add(&mut to_peer, len).unwrap();
            assert_eq!(settle(to_peer.end()), most + 1);
            add(&mut to_peer, len).unwrap();
            settle(to_peer.end());
        }
    }

    #[test]
    fn only_the_oldest_sent_notification_can_be_acknowledged() {
        let mut to_peer = NoticesToPeer::default();
        (0..3).for_each(|_| add(&mut to_peer, 1).unwrap());
        assert!(to_peer.acknowledge(0).is_err(), "it was not sent");
        (0..2).for_each(|_| drop(to_peer.next_to_send()));
        assert!(to_peer.acknowledge(1).is_err(), "it is not the oldest");
        to_peer.acknowledge(0).unwrap().settle(Ok(()));
        assert!(to_peer.acknowledge(0).is_err(), "twice");
        settle(to_peer.end());
    }

    #[test]
    fn a_new_notification_does_not_overtake_parked_ones() {
        let mut from_peer = NoticesFromPeer::default();
        let full = |_: &[u8]| Err(QueueFull);
        let room = |_: &[u8]| Ok(());
        assert!(from_peer.take(0, b"a", room).unwrap());
        assert!(!from_peer.take(1, b"large", full).unwrap());
        assert!(!from_peer.take(2, b"b", room).unwrap(), "it waits although it would fit");
        assert_eq!(from_peer.deliver_next(full), None);
        let mut delivered = Vec::new();
        let mut next = || {
            from_peer.deliver_next(|bytes| {
                delivered.push(bytes.to_vec());
                Ok(())
            })
        };
        assert_eq!((next(), next(), next()), (Some(1), Some(2), None));
        assert_eq!(delivered, [&b"large"[..], b"b"]);
        assert!(from_peer.take(3, b"c", room).unwrap());
    }

    #[test]
    fn more_notifications_than_the_window_are_malformed() {
        for len in [1, WINDOW_BYTES / 4] {
            let (mut from_peer, mut to_peer) =
                (NoticesFromPeer::default(), NoticesToPeer::default());
            (0..2 * WINDOW).for_each(|_| add(&mut to_peer, len).unwrap());
            let mut last = 0;
            while let Some((notice, bytes)) = to_peer.next_to_send() {
                let acknowledged = from_peer.take(notice, &bytes, |_| Err(QueueFull));
                assert!(!acknowledged.expect("a whole window is kept"));
                last = notice;
            }
            let more = from_peer.take(last + 1, &vec![0; len], |_| Err(QueueFull));
            assert_eq!(more.unwrap_err().kind(), ErrorKind::Malformed);
            settle(to_peer.end());
        }
    }
}
