//! Notifications, in both directions.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::reactor::Outbox;
use kvx_core::transport::{Full, MAX_FOREIGN_NOTIFICATION};
use kvx_core::{Incarnation, Result, Sender, Ticket};

use super::Fabric;
use super::machine::Machine;
use crate::control::ControlMessage;

/// The most notifications of foreign agents that wait for room, and their bytes.
const MAX_HELD: (usize, usize) = (16 << 10, 64 << 20);

/// Notifications of foreign agents that wait for room, the oldest first. Nothing holds such agents back.
#[derive(Default)]
pub(super) struct ForeignNotices {
    queue: VecDeque<(Arc<str>, Vec<u8>)>,
    bytes: usize,
}

impl ForeignNotices {
    /// Errors: why it is dropped.
    fn add(&mut self, from: Arc<str>, bytes: Vec<u8>) -> Result<(), String> {
        let (count, room) = MAX_HELD;
        let len = bytes.len();
        if len > MAX_FOREIGN_NOTIFICATION {
            return Err(format!(
                "it has {len} bytes, and at most {MAX_FOREIGN_NOTIFICATION} are taken"
            ));
        }
        if self.queue.len() >= count || self.bytes + len > room {
            return Err(format!("{} wait already: take them faster", self.queue.len()));
        }
        self.bytes += len;
        self.queue.push_back((from, bytes));
        Ok(())
    }

    fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Hands over as many as `deliver` takes.
    fn deliver(&mut self, mut deliver: impl FnMut(&str, &[u8]) -> Result<(), Full>) {
        while let Some((from, bytes)) = self.queue.front()
            && deliver(from, bytes).is_ok()
        {
            self.bytes -= bytes.len();
            self.queue.pop_front();
        }
    }
}

impl<F: Fabric> Machine<F> {
    pub(super) fn notify(&mut self, number: u64, bytes: Box<[u8]>, done: Ticket, out: &mut Outbox) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        if let Err((done, why)) = session.to_peer.add(bytes, done) {
            return out.settle(done, Err(why.with_backend(self.name)));
        }
        if session.foreign {
            self.notify_foreign(number, out);
        } else {
            self.send_notices(number, out);
        }
    }

    pub(super) fn send_notices(&mut self, number: u64, out: &mut Outbox) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        if let Err(why) = session.send_notices(self.max_message) {
            return self.cut_off(number, why, out);
        }
        self.push_out(number, out);
        self.after_work(number, out);
    }

    pub(super) fn notify_foreign(&mut self, number: u64, out: &mut Outbox) -> usize {
        let Some(session) = self.sessions.get_mut(&number) else { return 0 };
        let mut settled = Vec::new();
        session.notify_foreign(&mut self.fabric, &mut settled);
        if session.has_waiting() && !self.sending.contains(&number) {
            self.sending.push(number);
        }
        let count = settled.len();
        for (done, result) in settled {
            out.settle(done, result);
        }
        count
    }

    /// There is room again for notifications.
    pub(super) fn resume(&mut self, out: &mut Outbox) {
        self.deliver_held();
        let parked: Vec<u64> = self
            .sessions
            .iter()
            .filter(|(_, session)| !session.from_peer.is_empty())
            .map(|(number, _)| *number)
            .collect();
        for number in parked {
            while let Some(session) = self.sessions.get_mut(&number)
                && let Some(notice) = session
                    .from_peer
                    .deliver_next(|bytes| self.events.notification(session.peer.as_sender(), bytes))
            {
                self.send(number, &ControlMessage::Ack { notice }, out);
            }
            self.held_less(number);
        }
    }

    /// A notification came in. Errors: `Malformed` when the peer sends more than it may.
    pub(super) fn take_notice(
        &mut self,
        number: u64,
        notice: u64,
        bytes: &[u8],
        out: &mut Outbox,
    ) -> Result<()> {
        let Some(session) = self.sessions.get_mut(&number) else { return Ok(()) };
        let sender = session.peer.as_sender();
        if session.from_peer.take(notice, bytes, |bytes| self.events.notification(sender, bytes))? {
            self.send(number, &ControlMessage::Ack { notice }, out);
        }
        Ok(())
    }

    /// A foreign agent sent a notification.
    pub(super) fn take_foreign_notice(&mut self, from: Arc<str>, bytes: Vec<u8>) {
        let is_first = self.foreign_notices.is_empty();
        if let Err(why) = self.foreign_notices.add(Arc::clone(&from), bytes) {
            tracing::error!(
                backend = self.name,
                from = &*from,
                "a foreign agent's notification is dropped: {why}"
            );
        }
        // Behind others it waits for room: that of the first was refused, and room is told.
        if is_first {
            self.deliver_held();
        }
    }

    fn deliver_held(&mut self) {
        self.foreign_notices.deliver(|name, bytes| {
            self.events.notification(Sender { name, incarnation: Incarnation([0; 16]) }, bytes)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_foreign_agents_send_is_bounded_and_none_is_stuck() {
        let (mut held, from) = (ForeignNotices::default(), Arc::<str>::from("python"));
        assert!(held.add(Arc::clone(&from), vec![0; MAX_FOREIGN_NOTIFICATION + 1]).is_err());
        let fit = |held: &mut ForeignNotices, len| {
            (0..=MAX_HELD.0)
                .take_while(|_| held.add(Arc::clone(&from), vec![7; len]).is_ok())
                .count()
        };
        assert_eq!(fit(&mut held, MAX_FOREIGN_NOTIFICATION), MAX_HELD.1 / MAX_FOREIGN_NOTIFICATION);
        let mut room = 3;
        held.deliver(|name, bytes| {
            assert_eq!((name, bytes.len()), ("python", MAX_FOREIGN_NOTIFICATION));
            room -= 1;
            if room < 0 { Err(Full) } else { Ok(()) }
        });
        assert_eq!(fit(&mut held, MAX_FOREIGN_NOTIFICATION), 3);
        held.deliver(|_, _| Ok(()));
        assert_eq!((held.bytes, fit(&mut held, 1)), (0, MAX_HELD.0));
    }
}
