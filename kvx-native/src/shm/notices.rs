//! Notifications, in both directions.

use std::sync::Arc;

use kvx_backend::reactor::Outbox;
use kvx_core::transport::Full;
use kvx_core::{Kind, Result, Ticket};

use super::connection::{Connection, Notice};
use super::error::error;
use super::link::Wiring;
use super::messages::Message;
use super::progress::Machine;
use super::socket::Poller;

/// The most notifications of one connection that are not acknowledged: what the target may have to park. So it never
/// has to stop reading a connection.
const WINDOW: usize = 16;
/// The most bytes of notifications that wait on one link for the peer.
const MAX_WAITING: usize = 64 << 20;

impl Connection {
    /// Sends the notifications that there is room for.
    fn send_notices(&mut self, poller: &Poller) {
        while self.sent.len() < WINDOW
            && let Some(notice) = self.notices.pop_front()
        {
            self.notice_bytes -= notice.bytes.len();
            let id = self.next_notice;
            self.next_notice += 1;
            self.send(poller, &Message::Notify { id, bytes: &notice.bytes });
            self.sent.insert(id, notice.done);
        }
    }
}

impl Machine {
    /// A notification goes out over a link.
    pub(crate) fn notify(&mut self, link: &Arc<Wiring>, bytes: Box<[u8]>, done: Ticket, out: &mut Outbox) {
        let Some(at) = self.links.get(&link.id).copied().filter(|at| self.connections[*at].is_up()) else {
            return out.settle(done, Err(link.gone()));
        };
        let connection = &mut self.connections[at];
        if connection.notice_bytes + bytes.len() > MAX_WAITING {
            let reason = format!(
                "{MAX_WAITING} bytes of notifications wait for this peer already: it does not take them"
            );
            return out.settle(done, Err(error(Kind::Exhausted, reason)));
        }
        connection.notice_bytes += bytes.len();
        connection.notices.push_back(Notice { bytes, done });
        connection.send_notices(&self.poller);
        self.note_awaiting(at);
    }

    /// The peer's agent has a notification. Errors: `Malformed` for one that was not sent.
    pub(crate) fn take_ack(&mut self, at: usize, id: u64, out: &mut Outbox) -> Result<()> {
        let connection = &mut self.connections[at];
        let Some(done) = connection.sent.remove(&id) else {
            return Err(error(
                Kind::Malformed,
                "malformed SHM message: a notification is acknowledged that was not sent",
            ));
        };
        out.settle(done, Ok(()));
        connection.send_notices(&self.poller);
        self.note_awaiting(at);
        Ok(())
    }

    /// A notification came in. Errors: `Malformed` when the peer sends more than it may.
    pub(crate) fn take_notice(&mut self, at: usize, id: u64, bytes: &[u8]) -> Result<()> {
        let connection = &mut self.connections[at];
        if connection.parked.len() >= WINDOW {
            return Err(error(
                Kind::Malformed,
                format!(
                    "malformed SHM message: more than {WINDOW} notifications before the first was acknowledged"
                ),
            ));
        }
        let Some(peer) = &connection.peer else { return Ok(()) };
        match self.events.notification(peer.as_sender(), bytes) {
            Ok(()) => connection.send(&self.poller, &Message::Ack { id }),
            Err(Full) => connection.parked.push_back((id, bytes.into())),
        }
        Ok(())
    }

    /// There is room again for notifications.
    pub(crate) fn resume(&mut self) {
        for (_, connection) in &mut self.connections {
            while let (Some((id, bytes)), Some(peer)) = (connection.parked.front(), &connection.peer) {
                if self.events.notification(peer.as_sender(), bytes).is_err() {
                    break;
                }
                let id = *id;
                connection.parked.pop_front();
                connection.send(&self.poller, &Message::Ack { id });
            }
        }
    }
}
