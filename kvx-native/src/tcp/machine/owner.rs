//! The machine as an owner: connections that peers open, requests that they cancel, and regions
//! that are revoked.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_backend::reactor::Outbox;
use kvx_core::backend::fork::Private;
use kvx_core::{ErrorKind, RegionId};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use crate::tcp::connections::connection::{Conn, Role};
use crate::tcp::frames::auth::OwnerHandshake;
use crate::tcp::frames::put_end;
use crate::tcp::machine::{HANDSHAKE, Machine};
use crate::tcp::memory::deferred::LateAnswer;
use crate::tcp::socket;

/// The limit for connections whose handshake is not done.
const MAX_HANDSHAKES: usize = 512;
/// The limit for connections accepted in one turn.
const ACCEPTS: usize = 32;
/// The pause of accepting when the system is out of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

impl Machine {
    pub(crate) fn accept(&mut self, now: Instant) -> usize {
        for accepted in 0..ACCEPTS {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::acceptfrom_with(&self.listener.socket, flags) {
                Ok((socket, peer)) => {
                    let socket = Private::from(socket);
                    let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
                    let peer = peer.unwrap_or_else(|| SocketAddr::from(([0; 4], 0)));
                    if let Err(error) = socket::tune(&socket, self.scope.context.peer_timeout) {
                        tracing::debug!(
                            %peer,
                            %error,
                            "a TCP connection ended before it was accepted"
                        );
                        continue;
                    }
                    self.admit(Conn::new(socket, peer, self.handshake(), now + HANDSHAKE), now);
                }
                Err(Errno::AGAIN) => {
                    self.accepting = false;
                    return accepted;
                }
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => {
                    tracing::warn!(%error, "TCP cannot accept connections; trying again soon");
                    self.accepting = false;
                    self.accept_at = Some(now + ACCEPT_PAUSE);
                    self.by(now + ACCEPT_PAUSE, now);
                    return accepted;
                }
            }
        }
        ACCEPTS
    }

    fn handshake(&self) -> Role {
        let context = &self.scope.context;
        let (keys, limit) = (context.keys.clone(), Arc::clone(&context.limit));
        Role::Greeted(Box::new(OwnerHandshake::new(keys, context.wish(), Some(limit))))
    }

    fn admit(&mut self, conn: Conn, now: Instant) {
        if self.handshakes >= MAX_HANDSHAKES {
            // Drops a connection of the address that has most of them: preferably one that has not
            // sent a valid hello, and among those the oldest.
            let waiting = || {
                self.conns.iter().filter_map(|(key, conn)| match &conn.role {
                    Role::Greeted(handshake) => Some((key, conn, handshake.has_said_hello())),
                    _ => None,
                })
            };
            let mut crowds = HashMap::<_, usize>::new();
            waiting().for_each(|(_, conn, _)| *crowds.entry(conn.peer.ip()).or_default() += 1);
            let first_to_go = waiting().min_by_key(|(_, conn, said)| {
                (Reverse(crowds.get(&conn.peer.ip()).copied()), *said, conn.deadline)
            });
            if let Some(key) = first_to_go.map(|(key, ..)| key) {
                self.remove(key);
            }
        }
        match self.insert(conn, now) {
            Ok(_) => self.handshakes += 1,
            Err(error) => tracing::warn!(%error, "TCP dropped a connection"),
        }
    }

    /// Handles that a peer's lane is up.
    pub(crate) fn entered(&mut self, key: usize, now: Instant, out: &mut Outbox) {
        self.handshakes -= 1;
        let Some(Conn { role: Role::Served(lane), peer, .. }) = self.conns.get(key) else {
            return debug_assert!(false, "a connection has rejoined when its effects are applied");
        };
        tracing::debug!(peer = ?lane.who, from = %peer, lane = lane.lane, "a peer connected over TCP");
        match self.lanes.entry((lane.link, lane.lane)) {
            Entry::Vacant(vacant) => {
                vacant.insert(key);
            }
            Entry::Occupied(_) => {
                let error = ErrorKind::Malformed
                    .because(format!("lane {} of a link exists already", lane.lane));
                self.failed(key, error, now, out);
            }
        }
    }

    /// Cancels a request for a peer, which sent the CANCEL on another of its lanes.
    pub(crate) fn cancelled(
        &mut self,
        link: [u8; 16],
        lane: u8,
        id: u64,
        now: Instant,
        out: &mut Outbox,
    ) {
        let key = self.lanes.get(&(link, lane)).copied();
        let conn = key.and_then(|key| Some((key, self.conns.get_mut(key)?)));
        let Some((key, Conn { role: Role::Served(lane), input, output, .. })) = conn else {
            // The lane has just been lost, or never existed.
            self.strays.log(|| {
                tracing::warn!(
                    lane,
                    id,
                    "TCP: a peer cancels a request on a lane that it does not have"
                );
            });
            return;
        };
        match lane.cancel(id, input, output, &mut self.scope) {
            Ok(()) => self.queue_if_ready(key),
            Err(error) => self.failed(key, error, now, out),
        }
    }

    /// Sends a refusal that was delayed until nothing of the request can land any more.
    pub(crate) fn answer(&mut self, answer: &LateAnswer) {
        // The peer may have disconnected while a device copied.
        let Some(key) = self.lanes.get(&(answer.link, answer.lane)).copied() else { return };
        if let Some(conn) = self.conns.get_mut(key) {
            put_end(&mut conn.output.control, answer.id, Err(&answer.why));
            self.queue_if_ready(key);
        }
    }

    pub(crate) fn revoke(&mut self, region: RegionId) {
        let mut touched = Vec::new();
        for (key, conn) in self.conns.iter_mut() {
            let Conn { role: Role::Served(lane), input, output, .. } = conn else { continue };
            lane.revoke(region, input, output, &mut self.scope);
            touched.push(key);
        }
        touched.into_iter().for_each(|key| self.queue_if_ready(key));
    }

    pub(crate) fn resume(&mut self) {
        let mut touched = Vec::new();
        for (key, conn) in self.conns.iter_mut() {
            let Conn { role: Role::Served(lane), output, .. } = conn else { continue };
            if lane.resume(output, &self.scope.context) {
                touched.push(key);
            }
        }
        touched.into_iter().for_each(|key| self.queue_if_ready(key));
    }
}
