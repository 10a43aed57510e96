//! The machine: all connections of one agent, worked on in bounded turns.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::reactor::{Armed, Outbox, Progress, SLICE};
use kvx_core::transport::LinkState;
use kvx_core::{Bound, Error, Kind, LinkId, RegionId, Result, Ticket, TransferId};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use slab::Slab;

use super::auth::{Door, Knock};
use super::conn::{Conn, Effect, Role, Scope};
use super::error;
use super::listener::Listener;
use super::payload::{Bin, MAX_PIECES};
use super::peers::{Peer, Silence};
use super::socket;
use super::transport::Shared;
use super::wake::{Event, Wake};

/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Connections whose handshake is not done; one more drops the oldest.
const MAX_DOORS: usize = 512;
/// Connections accepted in one turn.
const ACCEPTS: usize = 32;
/// How long nothing is accepted when the system is out of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// Bytes that one connection moves before another has its turn.
const SHARE: usize = 256 << 10;
/// Small connections that have their turn before a bulk one has.
const SMALL_TURNS: usize = 32;

/// What other threads ask of the machine.
pub(super) enum Command {
    Connect(Box<Peer>),
    Post { link: LinkId, plan: Arc<Bound>, id: TransferId, done: Ticket },
    Notify { link: LinkId, bytes: Box<[u8]>, done: Ticket },
    Cancel { link: LinkId, id: TransferId },
    Close { link: LinkId },
    Revoke { region: RegionId, done: Ticket },
    Resume,
}

/// See the module.
pub(super) struct Machine {
    shared: Arc<Shared>,
    wake: Wake,
    listener: Listener,
    /// Whether somebody may wait to be accepted.
    knocking: bool,
    /// When to accept again.
    accept_at: Option<Instant>,
    conns: Slab<Conn>,
    peers: HashMap<LinkId, Peer>,
    /// Connections with something to do.
    small: VecDeque<usize>,
    bulk: VecDeque<usize>,
    /// Links with something to send out.
    eager: Vec<LinkId>,
    /// The next turn may be on the thread of somebody who posts: only small work.
    brief: bool,
    ticked: bool,
    doors: usize,
    guests: usize,
    /// Connections of guests by link and lane.
    lanes: HashMap<([u8; 16], u8), usize>,
    described: usize,
    bin: Bin,
    pieces: Vec<libc::iovec>,
    effects: Vec<Effect>,
}

// SAFETY: `pieces` is scratch for one system call and is empty of meaning between turns; all else is Send.
unsafe impl Send for Machine {}

impl Machine {
    pub(super) fn new(shared: Arc<Shared>, listener: Listener) -> Result<Self> {
        Ok(Machine {
            shared,
            wake: Wake::new(&listener.socket)?,
            listener,
            knocking: true,
            accept_at: None,
            conns: Slab::new(),
            peers: HashMap::new(),
            small: VecDeque::new(),
            bulk: VecDeque::new(),
            eager: Vec::new(),
            brief: false,
            ticked: false,
            doors: 0,
            guests: 0,
            lanes: HashMap::new(),
            described: 0,
            bin: Bin::new(),
            pieces: Vec::with_capacity(MAX_PIECES + 2),
            effects: Vec::new(),
        })
    }

    /// Queues a connection if it has something to do.
    fn touch(&mut self, key: usize) {
        let Some(conn) = self.conns.get_mut(key) else { return };
        if !conn.queued && conn.is_ready(self.described) {
            conn.queued = true;
            if conn.small { self.small.push_back(key) } else { self.bulk.push_back(key) }
        }
    }

    fn by(&mut self, at: Instant, now: Instant) {
        if let Err(error) = self.wake.by(at, now) {
            tracing::error!(%error, "TCP cannot set its timer: silent peers are noticed late");
        }
    }

    fn insert(&mut self, conn: Conn, now: Instant) -> Result<usize> {
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
        let (mut knocking, mut ticked) = (self.knocking, self.ticked);
        let (small, bulk, described) = (&mut self.small, &mut self.bulk, self.described);
        let polled = self.wake.poll(|event| {
            events += 1;
            match event {
                Event::Knock => knocking = true,
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
        (self.knocking, self.ticked) = (knocking, ticked);
        if let Err(error) = polled {
            tracing::error!(%error, "TCP cannot see what its sockets do");
        }
        events
    }

    fn accept(&mut self, now: Instant) -> usize {
        for accepted in 0..ACCEPTS {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::acceptfrom_with(&self.listener.socket, flags) {
                Ok((socket, peer)) => {
                    let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
                    let peer = peer.unwrap_or_else(|| SocketAddr::from(([0; 4], 0)));
                    if let Err(error) = socket::tune(&socket, self.shared.peer_timeout) {
                        tracing::debug!(%peer, %error, "a TCP connection was gone before it was accepted");
                        continue;
                    }
                    self.admit(Conn::new(socket, peer, self.door(), now + HANDSHAKE), now);
                }
                Err(Errno::AGAIN) => {
                    self.knocking = false;
                    return accepted;
                }
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => {
                    tracing::warn!(%error, "TCP cannot accept connections now; trying again soon");
                    self.knocking = false;
                    self.accept_at = Some(now + ACCEPT_PAUSE);
                    self.by(now + ACCEPT_PAUSE, now);
                    return accepted;
                }
            }
        }
        ACCEPTS
    }

    fn door(&self) -> Role {
        let max = self.shared.config.max_connections;
        let full = (self.guests >= max).then(|| {
            Error::new(
                Kind::Exhausted,
                format!("the peer serves {max} connections already (\"tcp.max_connections\"): raise that, or try later"),
            )
        });
        Role::Door(Door::new(self.shared.secret.clone(), self.shared.agent.clone(), full))
    }

    fn admit(&mut self, conn: Conn, now: Instant) {
        if self.doors >= MAX_DOORS {
            let doors = self.conns.iter().filter(|(_, conn)| matches!(conn.role, Role::Door(_)));
            if let Some(key) = doors.min_by_key(|(_, conn)| conn.deadline).map(|(key, _)| key) {
                self.remove(key);
            }
        }
        match self.insert(conn, now) {
            Ok(_) => self.doors += 1,
            Err(error) => tracing::warn!(%error, "TCP dropped a connection"),
        }
    }

    /// Takes a connection out and closes it.
    fn remove(&mut self, key: usize) -> Option<Conn> {
        let conn = self.conns.try_remove(key)?;
        match &conn.role {
            Role::Door(_) => self.doors -= 1,
            Role::Guest(guest) => {
                self.guests -= 1;
                self.described -= guest.described();
                if self.lanes.get(&(guest.link, guest.lane)) == Some(&key) {
                    self.lanes.remove(&(guest.link, guest.lane));
                }
            }
            _ => {}
        }
        Some(conn)
    }

    /// A turn of one connection. Says how many bytes it moved.
    fn serve(&mut self, key: usize, now: Instant, out: &mut Outbox) -> usize {
        let Some(conn) = self.conns.get_mut(key) else { return 0 };
        conn.queued = false;
        if !conn.is_ready(self.described) {
            return 0;
        }
        let link = conn.role.lane().map(|(link, _)| link);
        if let (Role::Connecting { link, lane }, Some(peer)) =
            (&conn.role, link.and_then(|link| self.peers.get(&link)))
        {
            let (link, lane) = (*link, *lane);
            if let Err(error) = greet(conn, link, lane, peer, &self.shared) {
                self.failed(key, error, now, out);
                return 1;
            }
        }
        let mut scope = Scope {
            shared: &self.shared,
            bin: &mut self.bin,
            pieces: &mut self.pieces,
            effects: &mut self.effects,
            described: &mut self.described,
        };
        let received = conn.receive(SHARE, key, &mut scope);
        let moved = match received {
            Ok(received) => conn.send(SHARE, &mut scope).map(|sent| (received, sent)),
            Err(error) => {
                if conn.role.is_greeting() {
                    conn.send(SHARE, &mut scope).ok(); // the last word of a refusal
                }
                Err(error)
            }
        };
        let finished = conn.closing && !conn.has_output();
        if let (Ok((received, _)), Some(peer)) = (&moved, link.and_then(|link| self.peers.get_mut(&link)))
            && *received > 0
        {
            peer.heard(now);
        }
        self.take_effect(now, out);
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

    fn take_effect(&mut self, now: Instant, out: &mut Outbox) {
        let mut effects = std::mem::take(&mut self.effects);
        for effect in effects.drain(..) {
            match effect {
                Effect::Welcome { link, lane } => self.welcome(link, lane, now, out),
                Effect::Restarted { link, incarnation } => {
                    let Some(mut peer) = self.disband(link) else { continue };
                    let why = Error::new(
                        Kind::PeerRestarted,
                        format!("agent {} has restarted: connect with its new metadata", peer.who.name),
                    );
                    peer.fail(&error::of_peer(why, &peer.who), out);
                    out.link(link, LinkState::Restarted(incarnation));
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
                Effect::Acked { link, id } => {
                    let Some(peer) = self.peers.get_mut(&link) else { continue };
                    match peer.acknowledged(id, out) {
                        Ok(()) => self.eager.push(link),
                        Err(error) => self.lose(link, error, out),
                    }
                }
                Effect::Entered { key } => self.entered(key, now, out),
                Effect::Cancelled { link, lane, id } => self.cancelled(link, lane, id, now, out),
                Effect::Mistaken { who } => {
                    tracing::debug!(peer = ?who, "a peer looks for another agent, or another life of this one");
                }
            }
        }
        self.effects = effects;
    }

    /// A peer's lane is up.
    fn entered(&mut self, key: usize, now: Instant, out: &mut Outbox) {
        self.doors -= 1;
        self.guests += 1;
        let Some(Conn { role: Role::Guest(guest), peer, .. }) = self.conns.get(key) else { return };
        tracing::debug!(peer = ?guest.who, from = %peer, lane = guest.lane, "a peer connected over TCP");
        if self.lanes.contains_key(&(guest.link, guest.lane)) {
            let error = Error::new(Kind::Malformed, format!("lane {} of a link comes twice", guest.lane));
            self.failed(key, error, now, out);
        } else {
            self.lanes.insert((guest.link, guest.lane), key);
        }
    }

    /// A peer takes back a request, which it sent on another of its lanes.
    fn cancelled(&mut self, link: [u8; 16], lane: u8, id: u64, now: Instant, out: &mut Outbox) {
        let Some(key) = self.lanes.get(&(link, lane)).copied() else { return };
        let Some(Conn { role: Role::Guest(guest), input, output, .. }) = self.conns.get_mut(key) else {
            return;
        };
        let mut scope = Scope {
            shared: &self.shared,
            bin: &mut self.bin,
            pieces: &mut self.pieces,
            effects: &mut self.effects,
            described: &mut self.described,
        };
        match guest.cancel(id, input, output, &mut scope) {
            Ok(()) => self.touch(key),
            Err(error) => self.failed(key, error, now, out),
        }
    }

    fn give_up(&mut self, link: LinkId, transfer: TransferId, why: Error, out: &mut Outbox) {
        let Some(peer) = self.peers.get_mut(&link) else { return };
        let mut touched = Vec::new();
        peer.give_up(transfer, why, &mut self.conns, &mut self.bin, out, |key| touched.push(key));
        touched.into_iter().for_each(|key| self.touch(key));
    }

    /// A lane is up: the small one opens the others, the last one makes the link.
    fn welcome(&mut self, link: LinkId, lane: u8, now: Instant, out: &mut Outbox) {
        let Some(peer) = self.peers.get_mut(&link) else { return };
        peer.lanes_up += 1;
        peer.heard(now);
        if peer.is_up() {
            let (address, bulk) = (peer.addresses[peer.address], peer.lanes.len() - 1);
            peer.standing.set(format!("TCP to {address}: a small lane and {bulk} bulk lanes"));
            out.link(link, LinkState::Up);
            self.eager.push(link);
        } else if lane == 0 {
            for lane in 1..peer.lanes.len() {
                if let Err(error) = self.open_lane(link, lane as u8, now) {
                    self.lose(link, error, out);
                    return;
                }
            }
        }
    }

    fn open_lane(&mut self, link: LinkId, lane: u8, now: Instant) -> Result<()> {
        let Some(peer) = self.peers.get(&link) else { return Ok(()) };
        let address = peer.addresses[peer.address];
        let socket = socket::connect(address, self.shared.peer_timeout)
            .map_err(|errno| error::unreachable(address, errno))?;
        let by = peer.lane_by(lane, HANDSHAKE, now);
        let conn = Conn::new(socket, address, Role::Connecting { link, lane }, by);
        let key = self.insert(conn, now)?;
        if let Some(peer) = self.peers.get_mut(&link) {
            peer.lanes[usize::from(lane)] = Some(key);
        }
        Ok(())
    }

    /// Opens the small lane of a link, at the next address if `failed` says that the current one is no good.
    fn open_link(&mut self, link: LinkId, failed: Option<Error>, now: Instant, out: &mut Outbox) {
        let mut failed = failed;
        loop {
            let Some(peer) = self.peers.get_mut(&link) else { return };
            if let Some(error) = failed {
                if peer.address + 1 == peer.addresses.len() {
                    self.lose(link, error, out);
                    return;
                }
                tracing::debug!(peer = ?peer.who, %error, "trying the peer's next address");
                peer.address += 1;
            }
            match self.open_lane(link, 0, now) {
                Ok(()) => return,
                Err(error) => failed = Some(error),
            }
        }
    }

    /// Takes a link and its connections out.
    fn disband(&mut self, link: LinkId) -> Option<Peer> {
        let peer = self.peers.remove(&link)?;
        for key in peer.lanes.iter().flatten() {
            self.remove(*key);
        }
        Some(peer)
    }

    fn lose(&mut self, link: LinkId, why: Error, out: &mut Outbox) {
        if let Some(peer) = self.disband(link) {
            tracing::debug!(peer = ?peer.who, error = %why, "a TCP link is lost");
            peer.lost(why, out);
        }
    }

    /// A connection is of no use any more.
    fn failed(&mut self, key: usize, error: Error, now: Instant, out: &mut Outbox) {
        let Some(conn) = self.remove(key) else { return };
        let from = conn.peer;
        match conn.role.lane() {
            None if matches!(error.kind(), Kind::Malformed | Kind::Denied | Kind::Incompatible) => {
                tracing::warn!(%from, %error, "closed a TCP connection");
            }
            None => tracing::debug!(%from, %error, "a TCP connection ended"),
            Some((link, lane)) => {
                if error.kind() == Kind::Malformed {
                    tracing::warn!(%from, %error, "closed a TCP connection");
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

    /// Sends out what links have, as far as lanes have room.
    fn issue(&mut self, now: Instant) {
        let mut touched = Vec::new();
        let mut eager = std::mem::take(&mut self.eager);
        for link in eager.drain(..) {
            let Some(peer) = self.peers.get_mut(&link) else { continue };
            peer.issue(&mut self.conns, |key| touched.push(key));
            if let Some(at) = peer.note_busy(now, self.shared.peer_timeout) {
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
                self.knocking = true;
            } else {
                earlier(at);
            }
        }
        let mut late = Vec::new();
        for (key, conn) in &self.conns {
            match conn.deadline {
                Some(deadline) if deadline <= now => late.push((key, conn.peer)),
                Some(deadline) => earlier(deadline),
                None => {}
            }
        }
        let (mut lost, mut touched) = (Vec::new(), Vec::new());
        for (link, peer) in &mut self.peers {
            match peer.look(now, self.shared.peer_timeout, &mut self.conns, |key| touched.push(key)) {
                Silence::Idle => {}
                Silence::Until(at) => earlier(at),
                Silence::Lost => lost.push(*link),
            }
        }
        for (key, peer) in late {
            self.failed(key, error::no_answer(peer), now, out);
        }
        for link in lost {
            self.lose(link, error::silent(self.shared.peer_timeout.as_secs_f64()), out);
        }
        touched.into_iter().for_each(|key| self.touch(key));
        if let Some(next) = next {
            self.by(next, now);
        }
    }

    fn revoke(&mut self, region: RegionId) {
        let mut touched = Vec::new();
        for (key, conn) in &mut self.conns {
            let Conn { role: Role::Guest(guest), input, output, .. } = conn else { continue };
            let mut scope = Scope {
                shared: &self.shared,
                bin: &mut self.bin,
                pieces: &mut self.pieces,
                effects: &mut self.effects,
                described: &mut self.described,
            };
            guest.revoke(region, input, output, &mut scope);
            touched.push(key);
        }
        touched.into_iter().for_each(|key| self.touch(key));
    }

    fn resume(&mut self) {
        let mut touched = Vec::new();
        for (key, conn) in &mut self.conns {
            let Conn { role: Role::Guest(guest), output, .. } = conn else { continue };
            if guest.resume(output, &self.shared) {
                touched.push(key);
            }
        }
        touched.into_iter().for_each(|key| self.touch(key));
    }
}

/// A connect has ended: says hello, or why it failed.
fn greet(conn: &mut Conn, link: LinkId, lane: u8, peer: &Peer, shared: &Shared) -> Result<()> {
    socket::connected(conn.socket()).map_err(|errno| error::unreachable(conn.peer, errno))?;
    let (own, expected) = (shared.agent.clone(), peer.who.clone());
    let which = (peer.nonce, lane);
    let knock = Knock::start(shared.secret.clone(), own, expected, which, &mut conn.output.control)?;
    conn.role = Role::Knock { link, lane, knock };
    Ok(())
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
                    peer.post(plan, id, done, out);
                    self.eager.push(link);
                }
                None => out.settle(done, Err(error::gone())),
            },
            Command::Notify { link, bytes, done } => match self.peers.get_mut(&link) {
                Some(peer) => {
                    self.brief = true;
                    peer.notify(bytes, done);
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
                    peer.fail(&why, out);
                }
            }
            Command::Revoke { region, done } => {
                self.revoke(region);
                out.settle(done, Ok(()));
            }
            Command::Resume => self.resume(),
        }
    }

    fn progress(&mut self, out: &mut Outbox) -> usize {
        let now = Instant::now();
        let brief = std::mem::take(&mut self.brief);
        self.issue(now);
        let mut done = self.poll();
        if self.ticked {
            self.tick(now, out);
        }
        if self.knocking {
            done += self.accept(now);
        }
        for _ in 0..self.small.len().min(SMALL_TURNS) {
            let Some(key) = self.small.pop_front() else { break };
            done += self.serve(key, now, out);
        }
        let mut left = if brief { 0 } else { SLICE as usize };
        while left > 0
            && let Some(key) = self.bulk.pop_front()
        {
            let moved = self.serve(key, now, out);
            left = left.saturating_sub(moved.max(4096));
            done += moved;
        }
        self.issue(now);
        done
    }

    fn arm(&mut self) -> Result<Armed> {
        let work = !self.small.is_empty() || !self.bulk.is_empty() || !self.eager.is_empty();
        Ok(if work || self.knocking || self.ticked { Armed::Again } else { Armed::Sleep(None) })
    }

    fn fds(&self) -> &[RawFd] {
        self.wake.fds()
    }

    fn stop(&mut self, out: &mut Outbox) {
        let why = error::closed("the agent");
        for (_, mut peer) in self.peers.drain() {
            peer.fail(&why, out);
        }
        self.conns.clear();
    }

    fn late(command: Command) {
        match command {
            Command::Post { done, .. } | Command::Notify { done, .. } => {
                done.settle(Err(error::closed("the agent")));
            }
            // Nothing reaches the region: all connections are closed, and none is accepted.
            Command::Revoke { done, .. } => done.settle(Ok(())),
            Command::Connect(_) | Command::Cancel { .. } | Command::Close { .. } | Command::Resume => {}
        }
    }
}
