//! The factory and the transport.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvx_backend::control::proof::Keys;
use kvx_backend::error::closed;
use kvx_backend::reactor::Reactor;
use kvx_core::backend::{
    Admission, AutoOpen, Availability, Context, Factory, Link, LinkId, LocalRegion, PeerSection,
    Placement, RegionSpec, Ticket, Transport, Unavailable,
};
use kvx_core::{
    Capabilities, HungPageScope, Idle, Isolation, MemoryKinds, Options, PerOp, RegionId, Result,
    Revocation, Secret,
};

use super::address::Address;
use super::config::Config;
use super::copy::readable_by_others;
use super::endpoint::Endpoint;
use super::error::NAME;
use super::host::Host;
use super::link::ShmLink;
use super::machine::Machine;
use super::memory::{Reach, Regions, shared_by_device};
use super::progress::Command;
use super::shared_link::SharedLink;

/// The factory of SHM transports, between processes of one user on one host.
///
/// SHM trusts processes of the same user and refuses all others by the credentials that the kernel
/// reports. Within one user it relies on each reader to read only granted regions and to release
/// them when they are revoked: reads are [`Isolation::Cooperative`]. No agent writes into memory of
/// another, whatever a peer sends: the target's thread checks key and bounds of each write,
/// [`Isolation::Owner`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Shm;

fn capabilities() -> Capabilities {
    Capabilities {
        isolation: PerOp { read: Isolation::Cooperative, write: Isolation::Owner },
        idle: Idle::Asleep,
        target_cpu: PerOp { read: false, write: true },
        revocation: Revocation::Confirmed,
        peer_loss_within: Some(Duration::from_secs(1)),
        settles_without_peer: PerOp { read: true, write: false },
        hung_page: HungPageScope::Peer,
        ordered: false,
        // Memory of a device works if the agent has an access to that device.
        local: MemoryKinds::ALL,
        remote: MemoryKinds::ALL,
    }
}

impl Factory for Shm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn placement(&self) -> Placement {
        Placement { order: 10, auto_open: AutoOpen::Open, speaks_for: &[] }
    }

    fn admission(&self) -> Admission {
        Admission::Proven
    }

    fn available(&self, _options: &Options) -> Result<Availability, Unavailable> {
        Host::current().map_err(|why| {
            Unavailable::because(
                why.sentence().to_owned(),
                "mount /proc in this container, and leave the process descriptors (ulimit -n)",
            )
        })?;
        Ok(Availability::embedded(env!("CARGO_PKG_VERSION"), capabilities()))
    }

    fn open(&self, context: Context) -> Result<Arc<dyn Transport>> {
        let config = Config::read(&context.options)?;
        let host = Host::current()?;
        let regions = Arc::new(Regions::default());
        let events = Arc::clone(&context.events);
        let name = format!("kvx-shm {}", context.agent.name);
        let devices = context.devices.clone();
        let secret = context.secret.clone();
        let machine = Machine::new(context, config, Arc::clone(&regions))?;
        let handle = machine.reactor_handle();
        let address = Address { host, socket: machine.socket_name() };
        let reactor = Reactor::start(name, machine, events)?;
        let closed = AtomicBool::new(false);
        let capabilities = Arc::new(capabilities());
        let endpoint = Arc::new(Endpoint { reactor, capabilities, regions, devices });
        let weak = Arc::downgrade(&endpoint);
        handle.set(weak);
        Ok(Arc::new(ShmTransport { endpoint, address, secret, closed }))
    }
}

struct ShmTransport {
    endpoint: Arc<Endpoint>,
    address: Address,
    secret: Option<Secret>,
    closed: AtomicBool,
}

impl ShmTransport {
    fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(closed().with_backend(NAME));
        }
        Ok(())
    }
}

// SAFETY: links keep a plan's memory (see `ShmLink`). The table of regions keeps a region's memory
// until it is revoked; after that the machine keeps it until every peer with a grant has released
// it or has died.
unsafe impl Transport for ShmTransport {
    fn capabilities(&self) -> &Capabilities {
        &self.endpoint.capabilities
    }

    fn address(&self) -> Result<Vec<u8>> {
        Ok(self.address.encode())
    }

    fn register(&self, region: RegionSpec) -> Result<Arc<dyn LocalRegion>> {
        self.check_open()?;
        let memory = &region.memory;
        let reach = Reach::of(memory);
        if reach == Reach::Foreign {
            readable_by_others(memory)?;
        }
        let handle = shared_by_device(memory)?;
        let id = region.id;
        self.endpoint.regions.open(region, handle);
        Ok(Arc::new(ShmRegion { endpoint: Arc::clone(&self.endpoint), id, export: reach.export() }))
    }

    fn link(&self, id: LinkId, peer: PeerSection<'_>) -> Result<Arc<dyn Link>> {
        self.check_open()?;
        let address = Address::decode(peer.address)?;
        self.address.host.reaches(&address.host)?;
        let shared = Arc::new(SharedLink {
            id,
            peer: peer.identity.clone(),
            keys: Keys::new(&peer.invitation, self.secret.as_ref()),
            reachability: Default::default(),
            gone: Default::default(),
        });
        self.endpoint
            .reactor
            .submit(Command::Connect { link: Arc::clone(&shared), socket: address.socket });
        Ok(Arc::new(ShmLink::new(Arc::clone(&self.endpoint), shared)))
    }

    fn resume(&self) {
        self.endpoint.reactor.submit(Command::Resume);
    }

    fn shutdown(&self, done: Ticket) {
        self.closed.store(true, Ordering::Release);
        // The machine settles the ticket when it stops; if it has already stopped, the ticket
        // settles at once.
        self.endpoint.reactor.submit(Command::Shutdown { done });
        self.endpoint.reactor.stop();
    }
}

/// A registered local region.
struct ShmRegion {
    endpoint: Arc<Endpoint>,
    id: RegionId,
    export: Vec<u8>,
}

impl LocalRegion for ShmRegion {
    fn export(&self) -> &[u8] {
        &self.export
    }

    fn revoke(&self, done: Ticket) {
        match self.endpoint.regions.revoke(self.id) {
            Ok(region) => self.endpoint.reactor.submit(Command::Revoke { region, done }),
            Err(unproven) => done.settle(Err(unproven)),
        }
    }
}
