//! The backend, opened: a listener, a machine, and its thread.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvx_backend::control::proof::Keys;
use kvx_backend::reactor::Reactor;
use kvx_core::transport::{
    Admission, Availability, Context, Events, Factory, Link, LocalRegion, PeerSection, RegionSpec,
    Transport,
};
use kvx_core::{
    AutoOpen, Capabilities, HungPageScope, Identity, Idle, Incarnation, Isolation, LinkId,
    MemoryKinds, Options, PerOp, Placement, Result, Revocation, Secret, Ticket, Unavailable,
};

use super::address;
use super::config::Config;
use super::ending::DeferredCompletions;
use super::error::NAME;
use super::hung::{Turns, Watch};
use super::link::{LinkStanding, TcpLink};
use super::listener::{Listener, host_addresses};
use super::memory::{Regions, TcpRegion};
use super::peers::OpenedLink;
use super::progress::{Command, Machine, Operator, Owned};
use super::seal::Seal;
use super::staging::DeviceStages;

/// TCP: the embedded transport between hosts, with nothing to install.
///
/// Binds to loopback unless its options say otherwise; see the table of options in this crate's front page.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tcp;

impl Factory for Tcp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn placement(&self) -> Placement {
        Placement { order: 90, without_a_list: AutoOpen::Open, speaks_for: &[] }
    }

    fn admission(&self) -> Admission {
        Admission::Proven
    }

    fn available(&self, options: &Options) -> Result<Availability, Unavailable> {
        let config = Config::read(options).map_err(|error| {
            Unavailable::because(error.sentence().to_owned(), "correct the option")
        })?;
        let devices =
            host_addresses().into_iter().map(|(name, ip)| format!("{name} {ip}")).collect();
        let caution = (!config.bind.is_loopback()).then(|| {
            format!(
                "TCP listens on {}: give the fleet a shared secret, and the bytes of blocks are sealed between hosts \
                 (\"tcp.seal\"); without one keep strangers off that network",
                config.bind
            )
        });
        Ok(Availability {
            version: env!("CARGO_PKG_VERSION").into(),
            library: None,
            devices,
            rdma: false,
            capabilities: capabilities(),
            cautions: caution.into_iter().collect(),
        })
    }

    fn open(&self, context: Context) -> Result<Arc<dyn Transport>> {
        open(context)
            .map(|transport| Arc::new(transport) as _)
            .map_err(|error| error.with_backend(NAME))
    }
}

/// What TCP promises.
pub(super) fn capabilities() -> Capabilities {
    Capabilities {
        isolation: PerOp::same(Isolation::Owner),
        idle: Idle::Asleep,
        target_cpu: PerOp::BOTH,
        revocation: Revocation::Owner,
        peer_loss_within: Some(Duration::from_secs(1)),
        settles_without_peer: PerOp::BOTH,
        hung_page: HungPageScope::Peer,
        ordered: false,
        // Memory of a device brings along who copies it.
        local: MemoryKinds::ALL,
        remote: MemoryKinds::ALL,
    }
}

/// What the machine and the handles share.
pub(super) struct Shared {
    pub(super) config: Config,
    pub(super) agent: Identity,
    /// What peers prove to us by.
    pub(super) keys: Keys,
    pub(super) secret: Option<Secret>,
    pub(super) events: Arc<dyn Events>,
    pub(super) peer_timeout: Duration,
    pub(super) regions: Regions,
    pub(super) stages: DeviceStages,
    pub(super) ending: Arc<DeferredCompletions>,
    pub(super) turns: Turns,
}

impl Shared {
    /// What this end wants sealed at least on a connection with whoever is there.
    pub(super) fn wish_toward(&self, peer: SocketAddr) -> Seal {
        self.config.wish_toward(peer.ip(), self.secret.is_some())
    }
}

/// What links and regions hold: the way to the machine.
pub(super) struct Handle {
    pub(super) shared: Arc<Shared>,
    pub(super) reactor: Reactor<Operator>,
    machine: Weak<Owned>,
    process: u32,
}

impl Handle {
    /// Has another thread go on without a turn that hangs.
    pub(super) fn go_on_without(&self, turn: u64) {
        let start = |next| self.reactor.go_on_with(next);
        if !self.machine.upgrade().is_some_and(|machine| machine.go_on_without(turn, start)) {
            self.shared.turns.stop_watching();
        }
    }

    /// Whether this is the process that opened it, not a forked child: only there does the machine run.
    pub(super) fn is_at_home(&self) -> bool {
        std::process::id() == self.process
    }
}

struct TcpTransport {
    handle: Arc<Handle>,
    watch: Watch,
    capabilities: Capabilities,
    address: Vec<u8>,
}

fn open(context: Context) -> Result<TcpTransport> {
    let config = Config::read(&context.options)?;
    let listener = Listener::open(&config)?;
    let address = address::encode(&listener.addresses);
    let name = format!("kvx-tcp {}", context.agent.name);
    let events = Arc::clone(&context.events);
    let shared = Arc::new(Shared {
        config,
        agent: context.agent,
        keys: Keys::new(&context.invitation, context.secret.as_ref()),
        secret: context.secret,
        events: context.events,
        peer_timeout: context.peer_timeout,
        regions: Regions::default(),
        stages: DeviceStages::default(),
        ending: Arc::default(),
        turns: Turns::default(),
    });
    let operator = Operator::of(Machine::new(Arc::clone(&shared), listener)?);
    let machine = Arc::downgrade(operator.owned());
    let reactor = Reactor::start(name, operator, events)?;
    let handle = Arc::new(Handle { shared, reactor, machine, process: std::process::id() });
    handle.shared.ending.home(&handle);
    let watch = Watch::start(&handle)?;
    Ok(TcpTransport { handle, watch, capabilities: capabilities(), address })
}

// SAFETY: the machine touches a plan's memory as `TcpLink` says. A region's memory is touched for requests that hold
// it, and a revocation takes it out of the table and then from each of them, before it settles; what a device still
// copies for one of them, and a turn that hangs in it, hold the revocation up (`DeferredCompletions`).
unsafe impl Transport for TcpTransport {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn address(&self) -> Result<Vec<u8>> {
        Ok(self.address.clone())
    }

    fn register(&self, region: RegionSpec) -> Result<Arc<dyn LocalRegion>> {
        TcpRegion::register(region, Arc::clone(&self.handle))
            .map(|region| Arc::new(region) as _)
            .map_err(|error| error.with_backend(NAME))
    }

    fn stages_devices(&self) -> bool {
        true
    }

    fn link(&self, id: LinkId, peer: PeerSection<'_>) -> Result<Arc<dyn Link>> {
        let name = &peer.identity.name;
        let addresses = address::decode(peer.address)
            .map_err(|error| error.with_backend(NAME).with_peer(Arc::clone(name)))?;
        let standing = Arc::new(LinkStanding::default());
        let Shared { config, peer_timeout, secret, .. } = &*self.handle.shared;
        let keys = Keys::new(&peer.invitation, secret.as_ref());
        let up_by = Instant::now() + *peer_timeout;
        let who = (peer.identity.clone(), keys, Incarnation::random()?.0);
        let peer =
            OpenedLink::new(id, who, addresses, config.connections, Arc::clone(&standing), up_by);
        self.handle.reactor.submit(Command::Connect(Box::new(peer)));
        Ok(Arc::new(TcpLink { id, handle: Arc::clone(&self.handle), standing }))
    }

    fn resume(&self) {
        self.handle.reactor.submit(Command::Resume);
    }

    fn shutdown(&self, done: Ticket) {
        self.handle.reactor.stop();
        self.watch.end();
        done.settle(Ok(()));
    }
}
