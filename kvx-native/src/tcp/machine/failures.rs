//! Connections that are of no use any more, and how the machine finds those that time or greed makes so.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kvx_backend::control::SilenceStatus;
use kvx_backend::control::errors::peer_silent;
use kvx_backend::reactor::Outbox;
use kvx_core::{Error, ErrorKind, Identity};

use crate::tcp::connections::connection::{Conn, Role};
use crate::tcp::error;
use crate::tcp::machine::Machine;

/// How long no further closed connection makes a warning of its own.
const WARNING_PAUSE: Duration = Duration::from_secs(1);

impl Machine {
    /// All peers together hold too much: the one that holds most loses its connections.
    pub(crate) fn drop_greediest(&mut self, now: Instant, out: &mut Outbox) {
        let is_here = |who: &Identity| {
            self.conns
                .iter()
                .any(|(_, conn)| matches!(&conn.role, Role::Served(lane) if lane.who == *who))
        };
        let Some(greediest) = self.held.greediest(is_here) else { return };
        let its = |conn: &Conn| matches!(&conn.role, Role::Served(lane) if lane.who == greediest);
        let keys: Vec<_> =
            self.conns.iter().filter(|(_, conn)| its(conn)).map(|(key, _)| key).collect();
        for key in keys {
            let why = self.held.too_much();
            self.failed(key, why, now, out);
        }
    }

    /// A connection is of no use any more.
    pub(crate) fn failed(&mut self, key: usize, error: Error, now: Instant, out: &mut Outbox) {
        let Some(conn) = self.remove(key) else { return };
        let from = conn.peer;
        match conn.role.lane() {
            None if matches!(
                error.kind(),
                ErrorKind::Malformed
                    | ErrorKind::Denied
                    | ErrorKind::Incompatible
                    | ErrorKind::Exhausted
            ) =>
            {
                self.warn(from, &error, now);
            }
            None => tracing::debug!(%from, %error, "a TCP connection ended"),
            Some((link, lane)) => {
                if error.kind() == ErrorKind::Malformed {
                    self.warn(from, &error, now);
                }
                let in_greeting = matches!(conn.role, Role::Greeting { .. });
                if in_greeting
                    && error.kind() == ErrorKind::PeerLost
                    && self.greet_again(link, lane, now)
                {
                    return;
                }
                let said = matches!(
                    error.kind(),
                    ErrorKind::Denied | ErrorKind::Incompatible | ErrorKind::Exhausted
                );
                if lane == 0 && conn.role.is_greeting() && !said {
                    self.open_link(link, Some(error), now, out);
                } else {
                    self.lose(link, error, out);
                }
            }
        }
    }

    /// Says why a connection was closed, but not a thousand times a second.
    fn warn(&mut self, from: SocketAddr, error: &Error, now: Instant) {
        if self.warned.is_some_and(|at| now.saturating_duration_since(at) < WARNING_PAUSE) {
            self.unsaid += 1;
            tracing::debug!(%from, %error, "closed a TCP connection");
            return;
        }
        let unsaid = std::mem::take(&mut self.unsaid);
        self.warned = Some(now);
        tracing::warn!(%from, %error, unsaid, "closed a TCP connection");
    }

    /// Looks at everything that has a time.
    pub(crate) fn tick(&mut self, now: Instant, out: &mut Outbox) {
        self.ticked = false;
        let mut next: Option<Instant> = None;
        let mut earlier = |at: Instant| next = Some(next.map_or(at, |next| next.min(at)));
        if let Some(at) = self.accept_at {
            if at <= now {
                self.accept_at = None;
                self.accepting = true;
            } else {
                earlier(at);
            }
        }
        let mut late = Vec::new();
        for (key, conn) in self.conns.iter_mut() {
            match conn.deadline {
                Some(deadline) if deadline <= now && !conn.queued => late.push((key, conn.peer)),
                Some(deadline) => earlier(deadline),
                None => {}
            }
            conn.look_if_stuck(now).into_iter().for_each(&mut earlier);
        }
        let (mut lost, mut touched) = (Vec::new(), Vec::new());
        for (link, peer) in &mut self.peers {
            match peer.look(now, self.scope.context.peer_timeout, &mut self.conns, |key| {
                touched.push(key)
            }) {
                SilenceStatus::Idle => {}
                SilenceStatus::Until(at) | SilenceStatus::Ask(at) => earlier(at),
                SilenceStatus::Lost => lost.push(*link),
            }
        }
        for (key, peer) in late {
            self.failed(key, error::no_answer(peer), now, out);
        }
        for link in lost {
            self.lose(link, peer_silent(self.scope.context.peer_timeout), out);
        }
        touched.into_iter().for_each(|key| self.touch(key));
        if let Some(next) = next {
            self.by(next, now);
        }
    }
}
