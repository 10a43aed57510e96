//! Notifications, in both directions.

use std::sync::Arc;

use crate::reactor::Outbox;
use crate::transport::Full;
use crate::{Error, Incarnation, Kind, Result, Sender, Ticket};

use super::Fabric;
use super::machine::Machine;
use super::messages::Message;
use super::session::WINDOW;

/// The most notifications of foreign agents, which nothing holds back, that wait for room.
const MAX_HELD: usize = 16 << 10;

impl<F: Fabric> Machine<F> {
    pub(super) fn notify(&mut self, number: u64, bytes: Box<[u8]>, done: Ticket, out: &mut Outbox) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        if let Err((done, why)) = session.add_notice(bytes, done) {
            return out.settle(done, Err(why.backend(self.name)));
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
            .filter(|(_, session)| !session.parked.is_empty())
            .map(|(number, _)| *number)
            .collect();
        for number in parked {
            while let Some(session) = self.sessions.get_mut(&number)
                && let Some((notice, bytes)) = session.parked.front()
                && self.events.notification(session.peer.as_sender(), bytes).is_ok()
            {
                let notice = *notice;
                session.parked.pop_front();
                self.send(number, &Message::Ack { notice }, out);
            }
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
        if session.parked.len() >= WINDOW {
            let why = format!(
                "malformed link message: more than {WINDOW} notifications before the first was acknowledged"
            );
            return Err(Error::new(Kind::Malformed, why));
        }
        match self.events.notification(session.peer.as_sender(), bytes) {
            Ok(()) => self.send(number, &Message::Ack { notice }, out),
            Err(Full) => session.parked.push_back((notice, bytes.into())),
        }
        Ok(())
    }

    /// A foreign agent sent a notification.
    pub(super) fn take_foreign_notice(&mut self, from: Arc<str>, bytes: Vec<u8>) {
        if self.held.len() >= MAX_HELD {
            return tracing::error!(
                backend = self.name,
                from = &*from,
                "a foreign agent's notification is dropped: {MAX_HELD} wait already; take them faster"
            );
        }
        self.held.push_back((from, bytes));
        self.deliver_held();
    }

    fn deliver_held(&mut self) {
        while let Some((from, bytes)) = self.held.front() {
            let sender = Sender { name: from, incarnation: Incarnation([0; 16]) };
            if self.events.notification(sender, bytes).is_err() {
                break;
            }
            self.held.pop_front();
        }
    }
}
