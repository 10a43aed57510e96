//! The machine: its state, and its timers.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_backend::control::proof::Keys;
use kvx_backend::control::{HeldBytes, Recalls, Silence};
use kvx_backend::rate_limit::RateLimited;
use kvx_backend::reactor::{Outbox, WorkQueue, no_poller};
use kvx_core::backend::fork::Private;
use kvx_core::backend::{Context, Events, LinkId, Ticket};
use kvx_core::{DeviceAccess, Identity, Result};
use slab::Slab;

use super::address::{name_socket_name, random_socket_name};
use super::completion::ReactorHandle;
use super::config::Config;
use super::connection::{Connecting, Connection, HeldBytesOwner, Probing};
use super::copy::Copier;
use super::copy_threads::CopyThreads;
use super::flights::Flights;
use super::memory::{Regions, RevokedRegion};
use super::messages::MAX_MESSAGE;
use super::openings::Openings;
use super::socket::{self, LISTENERS, Poller, Ready};
use super::work::{Populate, Work};

/// All messages of a peer that has ended.
pub(crate) const ALL: usize = usize::MAX;

pub(crate) struct Machine {
    pub(crate) me: Identity,
    /// The keys that authenticate peers.
    pub(crate) keys: Keys,
    pub(crate) unauthenticated: RateLimited,
    pub(crate) config: Config,
    pub(crate) events: Arc<dyn Events>,
    pub(crate) peer_timeout: Duration,
    pub(crate) regions: Arc<Regions>,
    pub(crate) devices: Vec<Arc<dyn DeviceAccess>>,
    pub(crate) flights: Flights,
    pub(crate) openings: Openings,
    /// The bytes that peers read to check whether they may read this process's memory.
    pub(crate) probe_bytes: Box<[u8; 32]>,
    pub(crate) socket_name: Vec<u8>,
    pub(crate) listeners: [Option<Private>; LISTENERS],
    pub(crate) accepting: bool,
    pub(crate) poller: Poller,
    pub(crate) fds: [RawFd; 1],
    pub(crate) connections: Slab<Connection>,
    /// The bytes that are held for peers.
    pub(crate) held: HeldBytes<HeldBytesOwner>,
    pub(crate) links: HashMap<LinkId, usize>,
    /// Connections whose handshake waits for a probe; some have ended since.
    pub(crate) to_probe: VecDeque<usize>,
    /// The connection whose probe is under way.
    pub(crate) probed: Option<(usize, Probing)>,
    /// The processes whose abandoned probe still hangs.
    pub(crate) hung_probes: HashSet<i32>,
    pub(crate) connecting: Vec<Connecting>,
    /// Revocations, by the connections whose peers hold the region.
    pub(crate) recalls: Recalls<usize, (RevokedRegion, Ticket)>,
    pub(crate) turns: WorkQueue<Work>,
    /// Mappings to make present while the machine is idle.
    pub(crate) populates: VecDeque<Populate>,
    pub(crate) copier: Copier,
    pub(crate) copying: CopyThreads,
    /// The rate limit of warnings about copies that wait for a page fault.
    pub(crate) hung: RateLimited,
    pub(crate) buffer: Vec<u8>,
    /// The time of the next check; `None` if nothing depends on it.
    pub(crate) next_look: Option<Instant>,
    /// True if a caller's thread had this turn only to post a small read and has done so; the turn
    /// does nothing else.
    pub(crate) lent_turn: bool,
    /// True if much data was moved since the machine last slept.
    pub(crate) bursting: bool,
    pub(crate) shutdown: Vec<Ticket>,
}

impl Machine {
    pub(crate) fn new(context: Context, config: Config, regions: Arc<Regions>) -> Result<Self> {
        let socket_name = random_socket_name()?;
        let listeners = socket::listen_twice(&socket_name, &name_socket_name(&context.agent.name))?;
        let poller = Poller::new().map_err(no_poller)?;
        for (token, listener) in listeners.iter().enumerate() {
            if let Some(listener) = listener {
                poller.add(listener.as_fd(), token as u64, Ready::IN).map_err(no_poller)?;
            }
        }
        let probe_bytes = Box::new(kvx_core::backend::random_key()?);
        let copying = CopyThreads::of(&context.agent.name);
        Ok(Machine {
            keys: Keys::new(&context.invitation, context.secret.as_ref()),
            unauthenticated: RateLimited::default(),
            me: context.agent,
            config,
            events: context.events,
            peer_timeout: context.peer_timeout,
            regions,
            devices: context.devices,
            flights: Flights::default(),
            openings: Openings::default(),
            probe_bytes,
            socket_name,
            listeners,
            accepting: true,
            fds: [poller.fd().as_raw_fd()],
            poller,
            connections: Slab::new(),
            held: HeldBytes::default(),
            links: HashMap::new(),
            to_probe: VecDeque::new(),
            probed: None,
            hung_probes: HashSet::new(),
            connecting: Vec::new(),
            recalls: Recalls::default(),
            turns: WorkQueue::default(),
            populates: VecDeque::new(),
            copier: Copier::new(),
            copying,
            hung: RateLimited::default(),
            buffer: vec![0; MAX_MESSAGE],
            next_look: None,
            lent_turn: false,
            bursting: false,
            shutdown: Vec::new(),
        })
    }

    /// Returns the reactor handle for threads of devices.
    pub(crate) fn reactor_handle(&self) -> Arc<ReactorHandle> {
        Arc::clone(&self.flights.reactor)
    }

    /// Returns the name of the socket on which the machine listens.
    pub(crate) fn socket_name(&self) -> Vec<u8> {
        self.socket_name.clone()
    }

    /// Schedules the next check at `at` or earlier.
    pub(crate) fn look_by(&mut self, at: Instant) {
        self.next_look = Some(self.next_look.map_or(at, |next| next.min(at)));
    }

    /// Records whether a connection awaits an answer, after its operations in flight have changed;
    /// the timers watch it meanwhile.
    pub(crate) fn note_awaiting(&mut self, at: usize) {
        if let Some(now) = self.connections[at].note_awaiting() {
            self.look_by(now + Silence::step(self.peer_timeout));
        }
    }

    /// Sends the parts of writes that fit into their windows, and settles the writes that are done.
    pub(crate) fn pump(&mut self, at: usize, out: &mut Outbox) {
        let mut settled = Vec::new();
        self.connections[at].pump(&self.poller, &mut settled);
        for (done, result) in settled {
            out.settle(done, result);
        }
        self.note_awaiting(at);
    }
}
