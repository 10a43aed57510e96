//! The machine: all connections of one agent, worked on in bounded turns.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_backend::control::reasons::peer_silent;
use kvx_backend::control::{HeldBytes, Look};
use kvx_backend::reactor::{Armed, Outbox, Progress, Queued, SLICE, Turn};
use kvx_core::transport::{INLINE_BYTES, LinkState};
use kvx_core::{Bound, Error, Kind, LinkId, RegionId, Result, Ticket, TransferId};
use slab::Slab;

use super::chunk::{Bin, MAX_PIECES};
use super::conn::{Conn, Effect, Role, Scope};
use super::error;
use super::frames::MAX_DATA;
use super::linking::greet;
use super::listener::Listener;
use super::peers::OpenedLink;
use super::transport::Shared;
use super::wake::{Event, Wake};

/// How long a handshake may take.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long no further closed connection makes a warning of its own.
const WARNING_PAUSE: Duration = Duration::from_secs(1);
/// Bytes that one connection moves before another has its turn.
const SHARE: usize = 256 << 10;
/// Bytes of bulk work in a turn, and in a frame, while small work comes by: that waits for so much on either side.
const BESIDE_SMALL: usize = 64 << 10;
/// How long after a small transfer the next is expected. Not long: bulk work is half as fast meanwhile.
const LATELY: Duration = Duration::from_millis(1);
/// What a turn of a connection costs at least, in bytes.
const TURN: usize = 4096;
/// Bytes of a turn that are a stream's.
const BURST: usize = 64 << 10;
/// Small connections that have their turn before a bulk one has.
const SMALL_TURNS: usize = 32;

/// What other threads ask of the machine; `Staged`: look after the stream of this token, a device has copied for it.
pub(super) enum Command {
    Connect(Box<OpenedLink>),
    Post { link: LinkId, plan: Arc<Bound>, id: TransferId, done: Ticket },
    Notify { link: LinkId, bytes: Box<[u8]>, done: Ticket },
    Cancel { link: LinkId, id: TransferId },
    Close { link: LinkId },
    Revoke { region: RegionId, done: Ticket },
    Staged { token: u64 },
    Resume,
}

/// See the module.
pub(super) struct Machine {
    pub(super) scope: Scope,
    wake: Wake,
    pub(super) listener: Listener,
    /// Whether somebody may wait to be accepted.
    pub(super) accepting: bool,
    /// When to accept again.
    pub(super) accept_at: Option<Instant>,
    pub(super) conns: Slab<Conn>,
    pub(super) peers: HashMap<LinkId, OpenedLink>,
    /// Connections with something to do.
    small: VecDeque<usize>,
    bulk: VecDeque<usize>,
    /// Links with something to send out.
    pub(super) eager: Vec<LinkId>,
    /// Streams that can go on, by token.
    pub(super) woken: Vec<u64>,
    /// The next turn may be on the thread of somebody who posts: only small work.
    brief: bool,
    ticked: bool,
    /// A stream of payload has moved since the machine last slept.
    bursting: bool,
    /// When there was last a small transfer, of ours or of a peer.
    small_at: Option<Instant>,
    pub(super) handshakes: usize,
    pub(super) served: usize,
    /// Connections that are served by link and lane.
    pub(super) lanes: HashMap<([u8; 16], u8), usize>,
    /// When a connection was last said to be closed, and how many were since then.
    warned: Option<Instant>,
    unsaid: u64,
}

impl Machine {
    pub(super) fn new(shared: Arc<Shared>, listener: Listener) -> Result<Self> {
        Ok(Machine {
            scope: Scope {
                shared,
                bin: Bin::new(),
                pieces: Vec::with_capacity(MAX_PIECES + 2),
                effects: Vec::new(),
                described: 0,
                held: HeldBytes::default(),
                piece: MAX_DATA,
                small_came: false,
            },
            wake: Wake::new(&listener.socket)?,
            listener,
            accepting: true,
            accept_at: None,
            conns: Slab::new(),
            peers: HashMap::new(),
            small: VecDeque::new(),
            bulk: VecDeque::new(),
            eager: Vec::new(),
            woken: Vec::new(),
            brief: false,
            ticked: false,
            bursting: false,
            small_at: None,
            handshakes: 0,
            served: 0,
            lanes: HashMap::new(),
            warned: None,
            unsaid: 0,
        })
    }

    /// Queues a connection if it has something to do.
    pub(super) fn touch(&mut self, key: usize) {
        let Some(conn) = self.conns.get_mut(key) else { return };
        if !conn.queued && conn.is_ready(self.scope.described) {
            conn.queued = true;
            if conn.small { self.small.push_back(key) } else { self.bulk.push_back(key) }
        }
    }

    pub(super) fn by(&mut self, at: Instant, now: Instant) {
        if let Err(error) = self.wake.by(at, now) {
            tracing::error!(%error, "TCP cannot set its timer: silent peers are noticed late");
        }
    }

    pub(super) fn insert(&mut self, conn: Conn, now: Instant) -> Result<usize> {
        let deadline = conn.deadline;
        let key = self.conns.insert(conn);
        if let Err(error) = self.wake.watch(key, self.conns[key].socket()) {
            self.conns.remove(key);
            return Err(error);
        }
        if let Some(deadline) = deadline {
            self.by(deadline, now);
        }
        Ok(key)
    }

    fn poll(&mut self) -> usize {
        let (conns, mut events) = (&mut self.conns, 0);
        let (mut accepting, mut ticked) = (self.accepting, self.ticked);
        let (small, bulk, described) = (&mut self.small, &mut self.bulk, self.scope.described);
        let polled = self.wake.poll(|event| {
            events += 1;
            match event {
                Event::Connecting => accepting = true,
                Event::Timer => ticked = true,
                Event::Conn { key, readable, writable, hung_up } => {
                    let Some(conn) = conns.get_mut(key) else { return };
                    conn.event(readable, writable, hung_up);
                    if !conn.queued && conn.is_ready(described) {
                        conn.queued = true;
                        if conn.small { small.push_back(key) } else { bulk.push_back(key) }
                    }
                }
            }
        });
        (self.accepting, self.ticked) = (accepting, ticked);
        if let Err(error) = polled {
            tracing::error!(%error, "TCP cannot see what its sockets do");
        }
        events
    }

    /// Takes a connection out and closes it.
    pub(super) fn remove(&mut self, key: usize) -> Option<Conn> {
        let mut conn = self.conns.try_remove(key)?;
        match &conn.role {
            Role::Greeted(_) => self.handshakes -= 1,
            Role::Served(lane) => {
                self.served -= 1;
                self.scope.described -= lane.described();
                if self.lanes.get(&(lane.link, lane.lane)) == Some(&key) {
                    self.lanes.remove(&(lane.link, lane.lane));
                }
            }
            _ => {}
        }
        conn.let_go_of_held(&mut self.scope.held);
        if let Some(lane) = conn.role.up_mut() {
            lane.release(&self.scope.shared.ending);
        }
        Some(conn)
    }

    /// A turn of one connection. Says how many bytes it moved.
    fn serve(&mut self, key: usize, now: Instant, out: &mut Outbox) -> usize {
        let Some(conn) = self.conns.get_mut(key) else { return 0 };
        conn.queued = false;
        if !conn.is_ready(self.scope.described) {
            return 0;
        }
        let link = conn.role.lane().map(|(link, _)| link);
        if let (Role::Connecting { link, lane }, Some(peer)) =
            (&conn.role, link.and_then(|link| self.peers.get(&link)))
        {
            let (link, lane) = (*link, *lane);
            if let Err(error) = greet(conn, link, lane, peer, &self.scope.shared) {
                self.failed(key, error, now, out);
                return 1;
            }
        }
        let with = match &conn.role {
            Role::Served(lane) => Some(&lane.who),
            _ => link.and_then(|link| self.peers.get(&link)).map(|peer| &peer.who),
        };
        let shared = Arc::clone(&self.scope.shared);
        let turn = shared.turns.enter(with, now);
        let share = SHARE.min(self.scope.piece);
        let received = conn.receive(share, key, &mut self.scope);
        let moved = match received {
            Ok(received) => conn.send(share, &mut self.scope).map(|sent| (received, sent)),
            Err(error) => {
                if conn.role.is_greeting() {
                    conn.send(share, &mut self.scope).ok(); // the last word of a refusal
                }
                Err(error)
            }
        };
        drop(turn);
        let moved = moved.and_then(|moved| conn.note_held(&mut self.scope.held).map(|()| moved));
        let finished = conn.closing && !conn.has_output();
        let full = conn.note_full(now);
        if let (Ok((received, _)), Some(peer)) = (&moved, link.and_then(|link| self.peers.get_mut(&link)))
            && *received > 0
        {
            peer.heard(now);
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
                received + sent
            }
            Err(error) => {
                self.failed(key, error, now, out);
                1
            }
        }
    }

    pub(super) fn take_effect(&mut self, now: Instant, out: &mut Outbox) {
        let mut effects = std::mem::take(&mut self.scope.effects);
        for effect in effects.drain(..) {
            match effect {
                Effect::Welcome { link, lane, seal } => self.welcome((link, lane), seal, now, out),
                Effect::Restarted { link } => {
                    let Some(peer) = self.peers.get(&link) else { continue };
                    let why = Error::new(
                        Kind::PeerRestarted,
                        format!(
                            "whoever answers for agent {} does not know its metadata: connect with its new metadata",
                            peer.who.name
                        ),
                    );
                    if peer.lanes_up == 0 && peer.address + 1 < peer.addresses.len() {
                        self.open_link(link, Some(why), now, out);
                        continue;
                    }
                    let Some(mut peer) = self.disband(link) else { continue };
                    peer.fail(&error::of_peer(why, &peer.who), &self.scope.shared.ending, out);
                    out.link(link, LinkState::Restarted);
                }
                Effect::Ended { link, transfer, result } => {
                    let Some(peer) = self.peers.get_mut(&link) else { continue };
                    if let Some(transfer) = transfer
                        && peer.ended(transfer, &result, out)
                        && let Err(error) = result
                    {
                        self.give_up(link, transfer, error, out);
                    }
                    self.eager.push(link);
                }
                Effect::Failed { link, transfer, why } => {
                    self.give_up(link, transfer, why, out);
                    self.eager.push(link);
                }
                Effect::Acked { link, id } => {
                    let Some(peer) = self.peers.get_mut(&link) else { continue };
                    match peer.acknowledged(id, out) {
                        Ok(()) => self.eager.push(link),
                        Err(error) => self.lose(link, error, out),
                    }
                }
                Effect::Entered { key } => self.entered(key, now, out),
                Effect::Cancelled { link, lane, id } => self.cancelled(link, lane, id, now, out),
            }
        }
        self.scope.effects = effects;
    }

    /// All peers together hold too much: the one that holds most loses its connections.
    fn drop_greediest(&mut self, now: Instant, out: &mut Outbox) {
        let Some(greediest) = self.scope.held.greediest(|_| true) else { return };
        let its = |conn: &Conn| matches!(&conn.role, Role::Served(lane) if lane.who == greediest);
        let keys: Vec<_> = self.conns.iter().filter(|(_, conn)| its(conn)).map(|(key, _)| key).collect();
        for key in keys {
            let why = self.scope.held.too_much();
            self.failed(key, why, now, out);
        }
    }

    /// A connection is of no use any more.
    pub(super) fn failed(&mut self, key: usize, error: Error, now: Instant, out: &mut Outbox) {
        let Some(conn) = self.remove(key) else { return };
        let from = conn.peer;
        match conn.role.lane() {
            None if matches!(
                error.kind(),
                Kind::Malformed | Kind::Denied | Kind::Incompatible | Kind::Exhausted
            ) =>
            {
                self.warn(from, &error, now);
            }
            None => tracing::debug!(%from, %error, "a TCP connection ended"),
            Some((link, lane)) => {
                if error.kind() == Kind::Malformed {
                    self.warn(from, &error, now);
                }
                let in_greeting = matches!(conn.role, Role::Greeting { .. });
                if in_greeting && error.kind() == Kind::PeerLost && self.greet_again(link, lane, now) {
                    return;
                }
                let said = matches!(error.kind(), Kind::Denied | Kind::Incompatible | Kind::Exhausted);
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

    /// Sends out what links have, as far as lanes have room.
    fn issue(&mut self, now: Instant) {
        let mut touched = Vec::new();
        let mut eager = std::mem::take(&mut self.eager);
        for link in eager.drain(..) {
            let Some(peer) = self.peers.get_mut(&link) else { continue };
            peer.issue(&mut self.conns, &mut self.scope, |key| touched.push(key));
            if let Some(at) = peer.note_busy(now, self.scope.shared.peer_timeout, &self.conns) {
                self.by(at, now);
            }
        }
        self.eager = eager;
        touched.into_iter().for_each(|key| self.touch(key));
    }

    /// Looks at everything that has a time.
    fn tick(&mut self, now: Instant, out: &mut Outbox) {
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
        for (key, conn) in &mut self.conns {
            match conn.deadline {
                Some(deadline) if deadline <= now && !conn.queued => late.push((key, conn.peer)),
                Some(deadline) => earlier(deadline),
                None => {}
            }
            conn.look_if_stuck(now).into_iter().for_each(&mut earlier);
        }
        let (mut lost, mut touched) = (Vec::new(), Vec::new());
        for (link, peer) in &mut self.peers {
            match peer.look(now, self.scope.shared.peer_timeout, &mut self.conns, |key| touched.push(key)) {
                Look::Idle => {}
                Look::Until(at) | Look::Ask(at) => earlier(at),
                Look::Lost => lost.push(*link),
            }
        }
        for (key, peer) in late {
            self.failed(key, error::no_answer(peer), now, out);
        }
        for link in lost {
            self.lose(link, peer_silent(self.scope.shared.peer_timeout), out);
        }
        touched.into_iter().for_each(|key| self.touch(key));
        if let Some(next) = next {
            self.by(next, now);
        }
    }
}

impl Progress for Machine {
    type Command = Command;

    fn command(&mut self, command: Command, out: &mut Outbox) {
        match command {
            Command::Connect(peer) => {
                let link = peer.id;
                self.peers.insert(link, *peer);
                self.open_link(link, None, Instant::now(), out);
            }
            Command::Post { link, plan, id, done } => match self.peers.get_mut(&link) {
                Some(peer) => {
                    self.brief = true;
                    self.scope.small_came |= peer.post(plan, id, done, out);
                    self.eager.push(link);
                }
                None => out.settle(done, Err(error::gone())),
            },
            Command::Notify { link, bytes, done } => match self.peers.get_mut(&link) {
                Some(peer) => {
                    self.brief = true;
                    peer.notify(bytes, done, out);
                    self.eager.push(link);
                }
                None => out.settle(done, Err(error::gone())),
            },
            Command::Cancel { link, id } => {
                let why = Error::new(Kind::Cancelled, "the transfer was cancelled");
                self.give_up(link, id, why, out);
                self.eager.push(link);
            }
            Command::Close { link } => {
                if let Some(mut peer) = self.disband(link) {
                    let why = error::of_peer(error::closed("the link"), &peer.who);
                    peer.fail(&why, &self.scope.shared.ending, out);
                }
            }
            Command::Revoke { region, done } => {
                self.revoke(region);
                out.settle(done, Ok(()));
            }
            Command::Staged { token } => self.woken.push(token),
            Command::Resume => self.resume(),
        }
    }

    fn progress(&mut self, _: &Queued, out: &mut Outbox) -> Turn {
        let now = Instant::now();
        let brief = std::mem::take(&mut self.brief);
        let mut done = if self.woken.is_empty() { 0 } else { self.wake_streams(now, out) };
        self.issue(now);
        done += self.poll();
        if self.accepting {
            done += self.accept(now);
        }
        if std::mem::take(&mut self.scope.small_came) {
            self.small_at = Some(now);
        }
        let beside_small = self.small_at.is_some_and(|at| now.saturating_duration_since(at) < LATELY);
        self.scope.piece = if beside_small { BESIDE_SMALL } else { MAX_DATA };
        let mut left = if brief { INLINE_BYTES as usize } else { self.scope.piece.min(SLICE as usize) };
        for _ in 0..self.small.len().min(SMALL_TURNS) {
            if left == 0 {
                break;
            }
            let Some(key) = self.small.pop_front() else { break };
            let moved = self.serve(key, now, out);
            left = left.saturating_sub(moved);
            done += moved;
        }
        // Bulk work has its turn whatever small work there is, but not on the thread of somebody who posts.
        let mut bulk = if brief { 0 } else { left.max(1) };
        while bulk > 0
            && let Some(key) = self.bulk.pop_front()
        {
            let moved = self.serve(key, now, out);
            bulk = bulk.saturating_sub(moved.max(TURN));
            done += moved;
        }
        if self.ticked {
            self.tick(now, out); // after what has come was read: this end may have been stopped for long
        }
        self.issue(now);
        if !self.scope.effects.is_empty() {
            self.take_effect(now, out); // of requests that could not even begin
        }
        self.bursting |= done > BURST;
        // The gap between two bursts of a stream is longer than a wake-up is worth.
        let look_for = Duration::from_micros(if self.bursting { 250 } else { 20 });
        Turn { look_for, yields: beside_small, ..Turn::did(done) }
    }

    fn arm(&mut self) -> Result<Armed> {
        self.bursting = false;
        let work = !self.small.is_empty() || !self.bulk.is_empty() || !self.eager.is_empty();
        Ok(if work || self.accepting || self.ticked { Armed::Again } else { Armed::Sleep(None) })
    }

    fn fds(&self) -> &[RawFd] {
        self.wake.fds()
    }

    fn stop(&mut self, out: &mut Outbox) {
        let why = error::closed("the agent");
        for key in self.conns.iter().map(|(key, _)| key).collect::<Vec<_>>() {
            self.remove(key);
        }
        let ending = &self.scope.shared.ending;
        for (_, mut peer) in self.peers.drain() {
            peer.fail(&why, ending, out);
        }
        ending.close().into_iter().for_each(|(ticket, result)| out.settle(ticket, result));
    }

    fn late(command: Command) {
        match command {
            Command::Post { done, .. } | Command::Notify { done, .. } => {
                done.settle(Err(error::closed("the agent")));
            }
            // Nothing reaches the region: all connections are closed, and none is accepted. Of copies that a device has
            // begun the ticket knows by itself.
            Command::Revoke { done, .. } => done.settle(Ok(())),
            Command::Connect(_)
            | Command::Cancel { .. }
            | Command::Close { .. }
            | Command::Staged { .. }
            | Command::Resume => {}
        }
    }
}
