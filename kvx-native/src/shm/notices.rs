//! Notifications, in both directions.

use std::sync::Arc;

use kvx_backend::control::ControlMessage;
use kvx_backend::control::errors::malformed;
use kvx_backend::reactor::Outbox;
use kvx_core::Result;
use kvx_core::backend::Ticket;

use super::connection::Connection;
use super::error::NAME;
use super::machine::Machine;
use super::shared_link::SharedLink;
use super::socket::Poller;

impl Connection {
    /// Sends the notifications that fit into the window.
    fn send_notices(&mut self, poller: &Poller) {
        while let Some((notice, bytes)) = self.to_peer.next_to_send() {
            self.send(poller, ControlMessage::Notify { notice, bytes: &bytes });
        }
    }
}

impl Machine {
    /// Sends a notification over a link.
    pub(crate) fn notify(
        &mut self,
        link: &Arc<SharedLink>,
        bytes: Box<[u8]>,
        done: Ticket,
        out: &mut Outbox,
    ) {
        let Some(at) = self.links.get(&link.id).copied().filter(|at| self.connections[*at].is_up())
        else {
            return out.settle(done, Err(link.gone()));
        };
        let connection = &mut self.connections[at];
        if let Err((done, why)) = connection.to_peer.add(bytes, done) {
            return out.settle(done, Err(why.with_backend(NAME)));
        }
        connection.send_notices(&self.poller);
        self.note_awaiting(at);
    }

    /// Takes an acknowledgement. Returns `Malformed` unless it is for the oldest notification.
    pub(crate) fn take_ack(&mut self, at: usize, notice: u64, out: &mut Outbox) -> Result<()> {
        let connection = &mut self.connections[at];
        out.settle(connection.to_peer.acknowledge(notice)?, Ok(()));
        connection.send_notices(&self.poller);
        self.note_awaiting(at);
        Ok(())
    }

    /// Takes a notification. Returns `Malformed` if the peer sends more than it may.
    pub(crate) fn take_notice(&mut self, at: usize, notice: u64, bytes: &[u8]) -> Result<()> {
        let connection = &mut self.connections[at];
        let Some(peer) = &connection.peer else {
            return Err(malformed("a notification before the handshake"));
        };
        let sender = peer.as_sender();
        if connection
            .from_peer
            .take(notice, bytes, |bytes| self.events.notification(sender, bytes))?
        {
            connection.send(&self.poller, ControlMessage::Ack { notice });
        }
        Ok(())
    }

    /// Delivers waiting notifications, for which the agent's queue has space again.
    pub(crate) fn resume(&mut self) {
        for (_, connection) in &mut self.connections {
            while let Some(peer) = &connection.peer
                && let Some(notice) = connection
                    .from_peer
                    .deliver_next(|bytes| self.events.notification(peer.as_sender(), bytes))
            {
                connection.send(&self.poller, ControlMessage::Ack { notice });
            }
            connection.note_held(&mut self.held).ok(); // cannot fail: it holds less
        }
    }
}
