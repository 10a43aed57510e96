//! The machine: all connections of one agent, worked on in bounded turns.

mod failures;
pub(crate) mod handle;
mod initiator;
pub(crate) mod operator;
mod owner;
mod turns;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_backend::control::HeldBytes;
use kvx_backend::reactor::{Armed, Outbox, SLICE, Turn};
use kvx_core::backend::{BoundPlan, INLINE_BYTES, LinkId, LinkState, Ticket};
use kvx_core::{Error, ErrorKind, Identity, RegionId, Result, TransferId};

use crate::tcp::connections::connection::{Conn, Role};
use crate::tcp::connections::lane::{Effect, Scope};
use crate::tcp::connections::table::Conns;
use crate::tcp::context::AgentContext;
use crate::tcp::error;
use crate::tcp::frames::MAX_DATA;
use crate::tcp::links::OpenedLink;
use crate::tcp::machine::turns::Awaited;
use crate::tcp::memory::deferred::DeferredCompletions;
use crate::tcp::socket::chunk::Bin;
use crate::tcp::socket::listener::Listener;
use crate::tcp::socket::poller::{Event, Poller};

/// How long a handshake may take.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(5);
/// Bytes that one connection moves before another has its turn.
pub(crate) const SHARE: usize = 256 << 10;
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
pub(crate) enum Command {
    Connect(Box<OpenedLink>),
    Post { link: LinkId, plan: Arc<BoundPlan>, id: TransferId, done: Ticket },
    Notify { link: LinkId, bytes: Box<[u8]>, done: Ticket },
    Cancel { link: LinkId, id: TransferId },
    Close { link: LinkId },
    Revoke { region: RegionId, done: Ticket },
    Staged { token: u64 },
    Resume,
}

/// See the module.
pub(crate) struct Machine {
    pub(crate) scope: Box<Scope>,
    /// Another, for as long as that is away with a connection.
    pub(crate) spare: Option<Box<Scope>>,
    /// The turn that is under way, and what is to be told that came before it.
    pub(crate) away: Option<Awaited>,
    pub(crate) untold: Outbox,
    /// Turns that others went on without, whose connections are not lost yet.
    pub(crate) left: Vec<Awaited>,
    /// What is held for peers.
    pub(crate) held: HeldBytes<Identity>,
    pub(crate) poller: Poller,
    pub(crate) listener: Listener,
    /// Whether somebody may wait to be accepted.
    pub(crate) accepting: bool,
    /// When to accept again.
    pub(crate) accept_at: Option<Instant>,
    pub(crate) conns: Conns,
    pub(crate) peers: HashMap<LinkId, OpenedLink>,
    /// Connections with something to do.
    small: VecDeque<usize>,
    bulk: VecDeque<usize>,
    /// Links with something to send out.
    pub(crate) eager: Vec<LinkId>,
    /// Streams that can go on, by token.
    pub(crate) woken: Vec<u64>,
    /// The next turn may be on the thread of somebody who posts: only small work.
    brief: bool,
    pub(crate) ticked: bool,
    /// A stream of payload has moved since the machine last slept.
    bursting: bool,
    /// When there was last a small transfer, of ours or of a peer.
    small_at: Option<Instant>,
    pub(crate) handshakes: usize,
    pub(crate) served: usize,
    /// Connections that are served by link and lane.
    pub(crate) lanes: HashMap<([u8; 16], u8), usize>,
    /// When a connection was last said to be closed, and how many were since then.
    pub(crate) warned: Option<Instant>,
    pub(crate) unsaid: u64,
}

impl Machine {
    pub(crate) fn new(context: Arc<AgentContext>, listener: Listener) -> Result<Self> {
        Ok(Machine {
            scope: Box::new(Scope::new(context, Bin::new())),
            spare: None,
            away: None,
            untold: Outbox::default(),
            left: Vec::new(),
            held: HeldBytes::default(),
            poller: Poller::new(&listener.socket)?,
            listener,
            accepting: true,
            accept_at: None,
            conns: Conns::default(),
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
    pub(crate) fn touch(&mut self, key: usize) {
        let Some(conn) = self.conns.get_mut(key) else { return };
        if !conn.queued && conn.is_ready(self.scope.described) {
            conn.queued = true;
            if conn.small { self.small.push_back(key) } else { self.bulk.push_back(key) }
        }
    }

    pub(crate) fn by(&mut self, at: Instant, now: Instant) {
        if let Err(error) = self.poller.by(at, now) {
            tracing::error!(%error, "TCP cannot set its timer: silent peers are noticed late");
        }
    }

    pub(crate) fn insert(&mut self, conn: Conn, now: Instant) -> Result<usize> {
        let deadline = conn.deadline;
        let key = self.conns.insert(conn);
        if let Err(error) = self.poller.watch(key, self.conns[key].socket()) {
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
        let polled = self.poller.poll(|event| {
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
    pub(crate) fn remove(&mut self, key: usize) -> Option<Box<Conn>> {
        let mut conn = self.conns.remove(key)?;
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
        conn.let_go_of_held(&mut self.held);
        if let Some(lane) = conn.role.up_mut() {
            lane.release(&self.scope.context.deferred);
        }
        Some(conn)
    }

    pub(crate) fn take_effect(&mut self, now: Instant, out: &mut Outbox) {
        let mut effects = std::mem::take(&mut self.scope.effects);
        for effect in effects.drain(..) {
            match effect {
                Effect::Welcome { link, lane, seal } => self.welcome((link, lane), seal, now, out),
                Effect::Restarted { link } => {
                    let Some(peer) = self.peers.get(&link) else { continue };
                    let why = Error::new(
                        ErrorKind::PeerRestarted,
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
                    peer.fail(&error::of_peer(why, &peer.who), &self.scope.context.deferred, out);
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

    /// Looks after streams whose device has copied, and settles what has waited for that. Says how many there were.
    pub(crate) fn wake_streams(&mut self, now: Instant, out: &mut Outbox) -> usize {
        let mut woken = std::mem::take(&mut self.woken);
        let count = woken.len();
        for token in woken.drain(..) {
            let (settled, answer) = self.scope.context.deferred.look(token);
            settled.into_iter().for_each(|(ticket, result)| out.settle(ticket, result));
            if let Some(answer) = answer {
                self.answer(&answer);
            }
            let key = DeferredCompletions::key(token);
            if let Some(conn) = self.conns.get_mut(key) {
                conn.woken(token, now, &mut self.scope);
                self.touch(key);
            }
        }
        self.woken = woken;
        self.take_effect(now, out);
        count
    }

    /// Sends out what links have, as far as lanes have room.
    fn issue(&mut self, now: Instant) {
        let mut touched = Vec::new();
        let mut eager = std::mem::take(&mut self.eager);
        for link in eager.drain(..) {
            let Some(peer) = self.peers.get_mut(&link) else { continue };
            peer.issue(&mut self.conns, &mut self.scope, |key| touched.push(key));
            if let Some(at) = peer.note_busy(now, self.scope.context.peer_timeout, &self.conns) {
                self.by(at, now);
            }
        }
        self.eager = eager;
        touched.into_iter().for_each(|key| self.touch(key));
    }

    /// The first part of a turn, before connections have theirs.
    pub(crate) fn begin(&mut self, now: Instant, out: &mut Outbox) -> Budget {
        let brief = std::mem::take(&mut self.brief);
        let mut done = if self.woken.is_empty() { 0 } else { self.wake_streams(now, out) };
        self.issue(now);
        if !self.scope.effects.is_empty() {
            self.take_effect(now, out); // before what they stand in is away with one connection
        }
        done += self.poll();
        if self.accepting {
            done += self.accept(now);
        }
        if std::mem::take(&mut self.scope.small_came) {
            self.small_at = Some(now);
        }
        let beside_small =
            self.small_at.is_some_and(|at| now.saturating_duration_since(at) < LATELY);
        self.scope.piece = if beside_small { BESIDE_SMALL } else { MAX_DATA };
        let left = if brief { INLINE_BYTES as usize } else { self.scope.piece.min(SLICE as usize) };
        Budget {
            brief,
            beside_small,
            small: self.small.len().min(SMALL_TURNS),
            left,
            bulk: None,
            done,
        }
    }

    /// Whose turn it is.
    pub(crate) fn next(&mut self, budget: &mut Budget) -> Option<usize> {
        if budget.bulk.is_none() {
            if budget.small > 0
                && budget.left > 0
                && let Some(key) = self.small.pop_front()
            {
                budget.small -= 1;
                return Some(key);
            }
            // Bulk work has its turn whatever small work there is, but not on the thread of somebody who posts.
            budget.bulk = Some(if budget.brief { 0 } else { budget.left.max(1) });
        }
        if budget.bulk > Some(0) { self.bulk.pop_front() } else { None }
    }

    /// The last part of a turn.
    pub(crate) fn end(&mut self, budget: &Budget, now: Instant, out: &mut Outbox) -> Turn {
        if self.ticked {
            self.tick(now, out); // after what has come was read: this end may have been stopped for long
        }
        self.issue(now);
        if !self.scope.effects.is_empty() {
            self.take_effect(now, out); // of requests that could not even begin
        }
        self.bursting |= budget.done > BURST;
        // The gap between two bursts of a stream is longer than a wake-up is worth.
        let look_for = Duration::from_micros(if self.bursting { 250 } else { 20 });
        Turn { look_for, yields: budget.beside_small, ..Turn::did(budget.done) }
    }

    pub(crate) fn arm(&mut self) -> Armed {
        self.bursting = false;
        let work = !self.small.is_empty() || !self.bulk.is_empty() || !self.eager.is_empty();
        if work || self.accepting || self.ticked { Armed::Again } else { Armed::Sleep(None) }
    }

    pub(crate) fn command(&mut self, command: Command, out: &mut Outbox) {
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
                let why = Error::new(ErrorKind::Cancelled, "the transfer was cancelled");
                self.give_up(link, id, why, out);
                self.eager.push(link);
            }
            Command::Close { link } => {
                if let Some(mut peer) = self.disband(link) {
                    let why = error::of_peer(error::closed("the link"), &peer.who);
                    peer.fail(&why, &self.scope.context.deferred, out);
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

    pub(crate) fn stop(&mut self, out: &mut Outbox) {
        let why = error::closed("the agent");
        for key in self.conns.iter().map(|(key, _)| key).collect::<Vec<_>>() {
            self.remove(key);
        }
        let deferred = &self.scope.context.deferred;
        for (_, mut peer) in self.peers.drain() {
            peer.fail(&why, deferred, out);
        }
        deferred.close().into_iter().for_each(|(ticket, result)| out.settle(ticket, result));
    }
}

/// What a turn may do, and has done.
pub(crate) struct Budget {
    brief: bool,
    beside_small: bool,
    /// Small connections that may have their turn.
    small: usize,
    /// Bytes that are left for them.
    left: usize,
    /// Bytes that are left for bulk connections, once it is their turn.
    bulk: Option<usize>,
    done: usize,
}

impl Budget {
    /// A connection has moved so many bytes.
    pub(crate) fn spend(&mut self, moved: usize) {
        match &mut self.bulk {
            None => self.left = self.left.saturating_sub(moved),
            Some(bulk) => *bulk = bulk.saturating_sub(moved.max(TURN)),
        }
        self.done += moved;
    }
}
