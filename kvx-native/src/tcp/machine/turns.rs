//! A connection has its turn away from the machine, which goes on without it if the turn hangs.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

use kvx_backend::reactor::Outbox;
use kvx_core::backend::LinkId;
use kvx_core::{Error, ErrorKind, Identity, Result};

use crate::tcp::connections::connection::{Conn, Role};
use crate::tcp::connections::lane::Scope;
use crate::tcp::machine::operator::Owned;
use crate::tcp::machine::{Machine, SHARE};
use crate::tcp::memory::deferred::{AbandonedTurn, Concern, Touched};

/// What a thread works on in a turn, without the machine's lock.
pub(crate) struct InFlightTurn {
    pub(crate) key: usize,
    /// Its link, if that is one of ours.
    link: Option<LinkId>,
    pub(crate) conn: Box<Conn>,
    pub(crate) scope: Box<Scope>,
    pub(crate) share: usize,
}

/// What the machine knows meanwhile.
pub(crate) struct Awaited {
    /// See [`Turns`](crate::tcp::machine::watch::Turns).
    pub(crate) turn: u64,
    key: usize,
    what: AwaitedRole,
    peer: SocketAddr,
    socket: RawFd,
    pub(crate) left_behind: Arc<AbandonedTurn>,
    /// It was said that nobody can go on.
    pub(crate) told: bool,
}

/// What is away.
enum AwaitedRole {
    /// A lane of ours.
    Ours(LinkId),
    /// A peer's, in the handshake as the turn begins.
    Greeted,
    /// A peer's.
    Served { who: Identity, link: [u8; 16], lane: u8, touched: Arc<Touched> },
}

impl AwaitedRole {
    fn of(role: &Role) -> Self {
        match role {
            Role::Greeted(_) => AwaitedRole::Greeted,
            Role::Served(lane) => AwaitedRole::Served {
                who: lane.who.clone(),
                link: lane.link,
                lane: lane.lane,
                touched: Arc::clone(&lane.touched),
            },
            Role::Connecting { link, .. } | Role::Greeting { link, .. } => AwaitedRole::Ours(*link),
            Role::Requests(lane) => AwaitedRole::Ours(lane.link),
        }
    }
}

/// Lets a turn go that others went on without; not under the machine's lock.
pub(crate) fn let_go(owned: &Owned, away: InFlightTurn) {
    let InFlightTurn { mut conn, scope, .. } = away;
    if let Some(machine) = owned.machine.lock().as_mut() {
        conn.let_go_of_held(&mut machine.held);
    }
    if let Some(lane) = conn.role.up_mut() {
        lane.release(&scope.context.deferred);
    }
    tracing::info!(peer = %conn.peer, "TCP: a turn that hung has ended: what waited for it goes on");
    drop(conn);
    scope.context.deferred.is_out(&scope.left_behind);
}

impl Machine {
    /// Sends a connection into its turn, if there is something to do. What was to be told so far waits with the
    /// machine.
    pub(crate) fn send_away(
        &mut self,
        key: usize,
        now: Instant,
        out: &mut Outbox,
    ) -> Option<InFlightTurn> {
        let conn = self.conns.get_mut(key)?;
        conn.queued = false;
        if !conn.is_ready(self.scope.described) {
            return None;
        }
        let link = conn.role.lane().map(|(link, _)| link);
        if let (Role::Connecting { lane, .. }, Some(peer)) =
            (&conn.role, link.and_then(|link| self.peers.get(&link)))
        {
            let lane = *lane;
            if let Err(error) = peer.greet(conn, lane, &self.scope.context) {
                self.failed(key, error, now, out);
                return None;
            }
        }
        let conn = self.conns.send_away(key)?;
        let spare = self.spare.take().unwrap_or_else(|| self.new_scope());
        let scope = std::mem::replace(&mut self.scope, spare);
        self.untold.append(out);
        self.away = Some(Awaited {
            turn: scope.context.turns.begin(),
            key,
            what: AwaitedRole::of(&conn.role),
            peer: conn.peer,
            socket: conn.socket().as_raw_fd(),
            left_behind: Arc::clone(&scope.left_behind),
            told: false,
        });
        let share = SHARE.min(scope.piece);
        Some(InFlightTurn { key, link, conn, scope, share })
    }

    fn new_scope(&self) -> Box<Scope> {
        Box::new(Scope::new(Arc::clone(&self.scope.context), self.scope.bin.clone()))
    }

    /// The turn has ended. Says how many bytes it moved. It comes back if others went on without it.
    pub(crate) fn take_back(
        &mut self,
        away: InFlightTurn,
        moved: Result<(usize, usize)>,
        now: Instant,
        out: &mut Outbox,
    ) -> std::result::Result<usize, InFlightTurn> {
        if away.scope.left_behind.is_so() {
            return Err(away);
        }
        let InFlightTurn { key, link, mut conn, scope, .. } = away;
        scope.context.turns.end();
        self.away = None;
        self.spare = Some(std::mem::replace(&mut self.scope, scope));
        out.append(&mut self.untold);
        let moved = moved.and_then(|moved| conn.note_held(&mut self.held).map(|()| moved));
        let finished = conn.closing && !conn.has_output();
        let full = conn.note_full(now);
        self.conns.put_back(key, conn);
        if let (Ok((received, _)), Some(peer)) =
            (&moved, link.and_then(|link| self.peers.get_mut(&link)))
            && *received > 0
        {
            peer.note_activity(now);
        }
        if let Some(at) = full {
            self.by(at, now);
        }
        self.take_effect(now, out);
        self.drop_greediest(now, out);
        match moved {
            Ok((received, sent)) => {
                if finished {
                    self.remove(key);
                } else {
                    self.touch(key);
                }
                Ok(received + sent)
            }
            Err(error) => {
                self.failed(key, error, now, out);
                Ok(1)
            }
        }
    }

    /// A turn hangs: its connection is lost, and who waits for its memory waits for its thread. `leave` has another
    /// thread go on. Says whether one does.
    pub(crate) fn leave_behind(&mut self, turn: u64, leave: impl FnOnce() -> Result<()>) -> bool {
        let Some(awaited) = self.away.as_mut().filter(|awaited| awaited.turn == turn) else {
            return false;
        };
        if let Err(why) = leave() {
            if !std::mem::replace(&mut awaited.told, true) {
                let peer = awaited.peer;
                tracing::error!(%peer, %why, "TCP: all peers wait for a page that does not come, and nobody can go on");
            }
            return false;
        }
        let Some(awaited) = self.away.take() else { return false };
        let Scope { context, .. } = &*self.scope;
        context.turns.end();
        let token = context.deferred.token(awaited.key);
        awaited.left_behind.leave(token); // first: then it touches nothing that is not known of
        let has_stages = context.stages.do_without_some();
        let (touches, receives) = match &awaited.what {
            AwaitedRole::Ours(link) => (Concern::Link(*link), Concern::Regions(Vec::new())),
            AwaitedRole::Served { touched, .. } => match touched.concerns() {
                (_, receives) if has_stages => (Concern::AllRegions, receives), // a device may be at some as well
                concerns => concerns,
            },
            AwaitedRole::Greeted => (Concern::AllRegions, Concern::AllRegions),
        };
        context.deferred.leave(token, Arc::clone(&awaited.left_behind), touches, receives);
        // SAFETY: the thread that hangs closes the socket only after it had this lock; if it has panicked, the number
        // leads at worst to what this queue does not know, and says so.
        self.poller.unwatch(unsafe { BorrowedFd::borrow_raw(awaited.socket) });
        self.scope.described = self.conns.iter().map(|(_, conn)| conn.described()).sum();
        self.left.push(awaited);
        true
    }

    /// The connections whose turns hang are lost, and those that belong to them: before anything else is done, as much
    /// still leads to them.
    pub(crate) fn lose_left(&mut self, out: &mut Outbox) {
        if self.left.is_empty() {
            return;
        }
        out.append(&mut self.untold);
        let now = Instant::now();
        for Awaited { key, what, peer: from, .. } in std::mem::take(&mut self.left) {
            self.conns.remove(key);
            let whom = match &what {
                AwaitedRole::Ours(link) => self.peers.get(link).map(|peer| peer.who.clone()),
                AwaitedRole::Served { who, .. } => Some(who.clone()),
                AwaitedRole::Greeted => None,
            };
            tracing::warn!(
                peer = ?whom, %from,
                "TCP: a page does not come, of memory that is sent to this peer or received from it (userfaultfd, a \
                 file whose server hangs): the link to it is lost, and whoever waits for that memory waits on"
            );
            match what {
                AwaitedRole::Ours(link) => self.lose(link, hangs(), out),
                AwaitedRole::Greeted => self.handshakes -= 1,
                AwaitedRole::Served { link, lane, .. } => {
                    self.served -= 1;
                    if self.lanes.get(&(link, lane)) == Some(&key) {
                        self.lanes.remove(&(link, lane));
                    }
                    // Its peer sees by the others that the link is gone.
                    let others = self.lanes.iter().filter(|((of, _), _)| *of == link);
                    for key in others.map(|(_, key)| *key).collect::<Vec<_>>() {
                        self.failed(key, hangs(), now, out);
                    }
                }
            }
        }
    }
}

fn hangs() -> Error {
    Error::new(
        ErrorKind::PeerLost,
        "a page of memory that takes part in a transfer does not come: look after what backs it (userfaultfd, a file \
         whose server hangs), then connect again",
    )
}
