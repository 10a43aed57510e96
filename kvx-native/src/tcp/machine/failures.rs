//! Connections that fail: by errors, deadlines and silence, by exceeding memory limits, and by
//! turns that hang.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use kvx_backend::control::SilenceStatus;
use kvx_backend::control::errors::peer_silent;
use kvx_backend::reactor::Outbox;
use kvx_core::backend::LinkId;
use kvx_core::{Error, ErrorKind, Identity};

use crate::clock;
use crate::tcp::connections::connection::{Conn, Role};
use crate::tcp::connections::lane::Scope;
use crate::tcp::error;
use crate::tcp::machine::Machine;
use crate::tcp::memory::deferred::{AbandonedTurn, ActiveRegions, Concern};

/// The machine's record of a connection that has its turn.
pub(crate) struct TurnRecord {
    key: usize,
    role: TurnRole,
    peer: SocketAddr,
    turn: Arc<AbandonedTurn>,
}

/// The role of a connection as its turn begins.
enum TurnRole {
    /// A lane that this end opened.
    Ours(LinkId),
    /// A peer's connection, in the handshake.
    Greeted,
    /// A peer's lane.
    Served { who: Identity, link: [u8; 16], lane: u8, touched: Arc<ActiveRegions> },
}

impl TurnRecord {
    pub(crate) fn new(key: usize, conn: &Conn, scope: &Scope) -> Self {
        let (role, turn) = (TurnRole::of(&conn.role), Arc::clone(&scope.turn));
        TurnRecord { key, role, peer: conn.peer, turn }
    }
}

impl TurnRole {
    fn of(role: &Role) -> Self {
        match role {
            Role::Greeted(_) => TurnRole::Greeted,
            Role::Served(lane) => TurnRole::Served {
                who: lane.who.clone(),
                link: lane.link,
                lane: lane.lane,
                touched: Arc::clone(&lane.touched),
            },
            Role::Connecting { link, .. } | Role::Greeting { link, .. } => TurnRole::Ours(*link),
            Role::Requests(lane) => TurnRole::Ours(lane.link),
        }
    }
}

impl Machine {
    /// Closes the connections of the peer that holds most, if all peers together hold too much.
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

    /// Closes a connection that has failed, and ends its link or tries again.
    pub(crate) fn failed(&mut self, key: usize, error: Error, now: Instant, out: &mut Outbox) {
        let Some(conn) = self.remove(key) else { return }; // it was closed with its link
        let from = conn.peer;
        match conn.role.lane() {
            None if matches!(
                error.kind(),
                ErrorKind::Malformed
                    | ErrorKind::Authentication
                    | ErrorKind::Incompatible
                    | ErrorKind::Exhausted
            ) =>
            {
                self.warn(from, &error);
            }
            None => tracing::debug!(%from, %error, "a TCP connection ended"),
            Some((link, lane)) => {
                if error.kind() == ErrorKind::Malformed {
                    self.warn(from, &error);
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
                    ErrorKind::Authentication | ErrorKind::Incompatible | ErrorKind::Exhausted
                );
                if lane == 0 && conn.role.is_greeting() && !said {
                    self.open_link(link, Some(error), now, out);
                } else {
                    self.lose(link, error, out);
                }
            }
        }
    }

    /// Logs why a connection was closed, with rate-limited warnings.
    fn warn(&mut self, from: SocketAddr, error: &Error) {
        tracing::debug!(%from, %error, "closed a TCP connection");
        self.closed.log(|| tracing::warn!(%from, %error, "closed a TCP connection"));
    }

    /// Checks all deadlines.
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
        touched.into_iter().for_each(|key| self.queue_if_ready(key));
        if let Some(next) = next {
            self.by(next, now);
        }
    }

    /// Closes the connection whose turn hangs, with its link, before any other turn, because other
    /// state still refers to it. Operations on its memory wait for its thread.
    pub(crate) fn abandon_turn(&mut self, out: &mut Outbox) {
        let Some(TurnRecord { key, role, peer: from, turn }) = self.away.take() else {
            return debug_assert!(false, "a connection is away when its turn hangs");
        };
        let context = Arc::clone(&self.scope.context);
        let token = context.deferred.token(key);
        turn.abandon(token); // first, so that it touches no memory beyond the recorded one
        let has_stages = context.stages.do_without_some();
        let (touches, receives) = match &role {
            TurnRole::Ours(link) => (Concern::Link(*link), Concern::Regions(Vec::new())),
            TurnRole::Served { touched, .. } => match touched.concerns() {
                // a device may touch some as well
                (_, receives) if has_stages => (Concern::AllRegions, receives),
                concerns => concerns,
            },
            TurnRole::Greeted => (Concern::AllRegions, Concern::AllRegions),
        };
        context.deferred.add_turn(token, turn, touches, receives);
        if let Some(socket) = self.conns.abandon(key) {
            self.poller.unwatch(&*socket);
        }
        self.scope.described = self.conns.iter().map(|(_, conn)| conn.described()).sum();
        let peer = match &role {
            TurnRole::Ours(link) => self.peers.get(link).map(|peer| &peer.who),
            TurnRole::Served { who, .. } => Some(who),
            TurnRole::Greeted => None,
        };
        tracing::warn!(
            ?peer, %from,
            "TCP: unresolved page fault in memory that is sent to this peer or received from it \
             (userfaultfd, a file whose server hangs): the link to it is lost; revocations and \
             transfers of that memory wait until the fault is resolved"
        );
        match role {
            TurnRole::Ours(link) => self.lose(link, hangs(), out),
            TurnRole::Greeted => self.handshakes -= 1,
            TurnRole::Served { link, lane, .. } => {
                if self.lanes.get(&(link, lane)) == Some(&key) {
                    self.lanes.remove(&(link, lane));
                }
                // The peer learns from its other lanes that the link has ended.
                let others = self.lanes.iter().filter(|((of, _), _)| *of == link);
                for key in others.map(|(_, key)| *key).collect::<Vec<_>>() {
                    self.failed(key, hangs(), clock::now(), out);
                }
            }
        }
    }
}

fn hangs() -> Error {
    ErrorKind::PeerLost.because(
        "unresolved page fault in memory that takes part in a transfer: check what backs it \
         (userfaultfd, a file whose server hangs), then connect again",
    )
}
