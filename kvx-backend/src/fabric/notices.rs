//! Notifications, in both directions.

use std::sync::Arc;

use crate::reactor::Outbox;
use kvx_core::backend::Ticket;
use kvx_core::{Incarnation, Result, Sender};

use super::library::Fabric;
use super::machine::Machine;
use crate::control::ControlMessage;
use crate::control::errors::closed;

impl<F: Fabric> Machine<F> {
    pub(super) fn notify(&mut self, number: u64, bytes: Box<[u8]>, done: Ticket, out: &mut Outbox) {
        let Some(session) = self.sessions.get_mut(&number) else {
            debug_assert!(false, "a notification is sent on session {number}, which has ended");
            return out.settle(done, Err(closed().with_backend(self.name)));
        };
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
        // Expected: the acknowledgement that was just taken ended the session.
        let Some(session) = self.sessions.get_mut(&number) else { return };
        if let Err(why) = session.send_notices(self.max_message) {
            return self.cut_off(number, why, out);
        }
        self.push_out(number, out);
        self.after_work(number, out);
    }

    pub(super) fn notify_foreign(&mut self, number: u64, out: &mut Outbox) -> usize {
        // Expected: the session ended while its notifications waited to be sent.
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

    /// Delivers waiting notifications, for which the agent's queue has space again.
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

    /// Takes a notification from a peer. Returns `Malformed` if the peer sends more than it may.
    pub(super) fn take_notice(
        &mut self,
        number: u64,
        notice: u64,
        bytes: &[u8],
        out: &mut Outbox,
    ) -> Result<()> {
        let Some(session) = self.sessions.get_mut(&number) else {
            debug_assert!(false, "a notification arrived for session {number}, which has ended");
            return Ok(());
        };
        let sender = session.peer.as_sender();
        if session.from_peer.take(notice, bytes, |bytes| self.events.notification(sender, bytes))? {
            self.send(number, &ControlMessage::Ack { notice }, out);
        }
        Ok(())
    }

    /// Takes a notification from a foreign agent.
    pub(super) fn take_foreign_notice(&mut self, from: Arc<str>, bytes: Vec<u8>) {
        let is_first = self.foreign_notices.is_empty();
        if let Err(why) = self.foreign_notices.add(Arc::clone(&from), bytes) {
            tracing::error!(
                backend = self.name,
                from = &*from,
                "dropped a foreign agent's notification: {why}"
            );
        }
        // Behind others it waits: the first of them was rejected, and the agent reports free space.
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
