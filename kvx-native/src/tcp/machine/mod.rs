//! The machine: all connections of one agent, served in bounded turns.

mod completion;
mod failures;
mod initiator;
mod owner;
mod progress;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_backend::control::HeldBytes;
use kvx_backend::rate_limit::RateLimited;
use kvx_core::backend::{BoundPlan, LinkId, Ticket};
use kvx_core::{Identity, RegionId, Result, TransferId};

use crate::tcp::connections::connection::{Conn, Role};
use crate::tcp::connections::lane::Scope;
use crate::tcp::connections::table::Conns;
use crate::tcp::context::AgentContext;
use crate::tcp::links::OpenedLink;
use crate::tcp::machine::failures::TurnRecord;
use crate::tcp::machine::progress::Budget;
use crate::tcp::socket::chunk::Bin;
use crate::tcp::socket::listener::Listener;
use crate::tcp::socket::poller::{Event, Poller};

/// The time limit for a handshake.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(5);
/// A request from another thread. `Staged` reports that a device has copied for the stream of this
/// token.
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

/// The state of the machine.
pub(crate) struct Machine {
    pub(crate) scope: Box<Scope>,
    /// Another scope, while the main one is in use by a connection's turn.
    pub(crate) spare: Option<Box<Scope>>,
    /// The connection that has its turn.
    pub(crate) away: Option<TurnRecord>,
    /// The budget of the machine's turn, if one has begun.
    turn: Option<Budget>,
    /// The bytes that are held for peers.
    pub(crate) held: HeldBytes<Identity>,
    pub(crate) poller: Poller,
    pub(crate) listener: Listener,
    /// True if connections may wait to be accepted.
    pub(crate) accepting: bool,
    /// The time to accept again.
    pub(crate) accept_at: Option<Instant>,
    pub(crate) conns: Conns,
    pub(crate) peers: HashMap<LinkId, OpenedLink>,
    /// Connections with work to do.
    small: VecDeque<usize>,
    bulk: VecDeque<usize>,
    /// Links with requests or notifications to send.
    pub(crate) links_with_output: Vec<LinkId>,
    /// The tokens of streams that can continue.
    pub(crate) woken: Vec<u64>,
    /// True if the next turn may run on a thread that posts, and must do only small work.
    brief: bool,
    pub(crate) ticked: bool,
    /// True if a stream of payload has moved since the machine last slept.
    bursting: bool,
    /// The time of the last small transfer, of this end or of a peer.
    small_at: Option<Instant>,
    pub(crate) handshakes: usize,
    /// Connections of peers, by link and lane.
    pub(crate) lanes: HashMap<([u8; 16], u8), usize>,
    /// The rate limit of warnings about closed connections.
    pub(crate) closed: RateLimited,
    /// The rate limit of warnings about cancelled requests on lanes that do not exist.
    pub(crate) strays: RateLimited,
}

impl Machine {
    pub(crate) fn new(context: Arc<AgentContext>, listener: Listener) -> Result<Self> {
        Ok(Machine {
            scope: Box::new(Scope::new(context, Bin::new())),
            spare: None,
            away: None,
            turn: None,
            held: HeldBytes::default(),
            poller: Poller::new(&listener.socket)?,
            listener,
            accepting: true,
            accept_at: None,
            conns: Conns::default(),
            peers: HashMap::new(),
            small: VecDeque::new(),
            bulk: VecDeque::new(),
            links_with_output: Vec::new(),
            woken: Vec::new(),
            brief: false,
            ticked: false,
            bursting: false,
            small_at: None,
            handshakes: 0,
            lanes: HashMap::new(),
            closed: RateLimited::default(),
            strays: RateLimited::default(),
        })
    }

    /// Queues a connection if it has work to do.
    pub(crate) fn queue_if_ready(&mut self, key: usize) {
        let Some(conn) = self.conns.get_mut(key) else { return }; // closed meanwhile
        if !conn.queued && conn.is_ready(self.scope.described) {
            conn.queued = true;
            if conn.small { self.small.push_back(key) } else { self.bulk.push_back(key) }
        }
    }

    pub(crate) fn by(&mut self, at: Instant, now: Instant) {
        if let Err(error) = self.poller.by(at, now) {
            tracing::error!(%error, "TCP cannot set its timer; silent peers are noticed late");
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
                    let Some(conn) = conns.get_mut(key) else { return }; // closed meanwhile
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
            tracing::error!(%error, "TCP cannot poll its sockets");
        }
        events
    }

    /// Removes a connection and closes it.
    pub(crate) fn remove(&mut self, key: usize) -> Option<Box<Conn>> {
        let mut conn = self.conns.remove(key)?;
        match &conn.role {
            Role::Greeted(_) => self.handshakes -= 1,
            Role::Served(lane) => {
                self.scope.described -= lane.described();
                if self.lanes.get(&(lane.link, lane.lane)) == Some(&key) {
                    self.lanes.remove(&(lane.link, lane.lane));
                }
            }
            _ => {}
        }
        conn.release_held(&mut self.held);
        if let Some(lane) = conn.role.up_mut() {
            lane.release(&self.scope.context.deferred);
        }
        Some(conn)
    }
}
