//! Opens a transport around a library, and provides the handles of the transport and its regions.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvx_core::backend::{
    Context, Link, LinkId, LocalRegion, PeerSection, RegionSpec, Ticket, Transport,
};
use kvx_core::{Capabilities, Error, ErrorKind, Identity, Incarnation, Result, Secret};

use super::lanes;
use super::library::{Fabric, Registrar};
use super::link::{FabricLink, Lanes};
use super::machine::Machine;
use super::progress::Command;
use super::regions::{RegionHandle, RegionRecord, Regions};
use super::shared_link::SharedLink;
use super::signed::{Part, PartSigner};
use crate::control::proof::Keys;
use crate::error::closed;
use crate::reactor::Reactor;

/// The parts of a transport.
pub struct Parts<F: Fabric> {
    /// The backend's name.
    pub name: &'static str,
    /// The transport's capabilities, as the [`Factory`](kvx_core::backend::Factory) declares them.
    pub capabilities: Capabilities,
    /// Returns the address at which peers reach the library, as its section of the metadata. Called
    /// for each generation, on the program's threads.
    pub address: Box<dyn Fn() -> Result<Vec<u8>> + Send + Sync>,
    /// The library.
    pub fabric: F,
    /// The registrar of the library's memory.
    pub registrar: Arc<dyn Registrar<F::Local>>,
}

/// An additional part of a library, with its own thread.
pub struct LaneParts<F: Fabric> {
    /// Returns the address of this part, as in [`Parts`].
    pub address: Box<dyn Fn() -> Result<Vec<u8>> + Send + Sync>,
    /// The library.
    pub fabric: F,
}

/// Starts the reactor around a library and returns the transport.
///
/// # Errors
/// `Exhausted` without a thread or a descriptor for it.
pub fn open<F: Fabric>(context: Context, parts: Parts<F>) -> Result<Arc<dyn Transport>> {
    open_lanes(context, parts, Vec::new())
}

/// Like [`open`], with several parts of the library that work concurrently. Each part serves every
/// region, is linked with a part of the peer's, and may receive some of a [`Job`](super::Job)'s
/// pieces, which it must take from [`Job::next_piece`](super::Job::next_piece). One of them
/// unregisters a region when all have released it.
///
/// # Errors
/// As [`open`].
pub fn open_lanes<F: Fabric>(
    context: Context,
    first: Parts<F>,
    more: Vec<LaneParts<F>>,
) -> Result<Arc<dyn Transport>> {
    let Parts { name, capabilities, address, fabric, registrar } = first;
    let regions = Arc::new(Regions::new(1 + more.len()));
    let held = Arc::default();
    let lanes = std::iter::once(LaneParts { address, fabric }).chain(more).enumerate();
    let lanes = lanes.map(|(number, LaneParts { address, fabric })| {
        let address: Address = address.into();
        let number = if number == 0 { String::new() } else { format!("/{number}") };
        let thread = format!("kvx-{}{number} {}", name.to_ascii_lowercase(), context.agent.name);
        let events = Arc::clone(&context.events);
        let machine = Machine::new(
            context.clone(),
            name,
            fabric,
            Arc::clone(&regions),
            Arc::clone(&address),
            Arc::clone(&held),
        )?;
        Ok((Reactor::start(thread, machine, events)?, address))
    });
    let (reactors, addresses) =
        lanes.collect::<Result<Vec<_>>>()?.into_iter().unzip::<_, _, Vec<_>, _>();
    Ok(Arc::new(FabricTransport {
        name,
        me: context.agent,
        signer: PartSigner::new(name, context.secret.clone()),
        lanes: reactors.into(),
        capabilities: Arc::new(capabilities),
        regions,
        registrar,
        addresses,
        secret: context.secret,
        closed: AtomicBool::new(false),
    }))
}

type Address = Arc<dyn Fn() -> Result<Vec<u8>> + Send + Sync>;

struct FabricTransport<F: Fabric> {
    name: &'static str,
    me: Identity,
    signer: PartSigner,
    lanes: Lanes<F>,
    capabilities: Arc<Capabilities>,
    regions: Arc<Regions<F::Local>>,
    registrar: Arc<dyn Registrar<F::Local>>,
    addresses: Vec<Address>,
    secret: Option<Secret>,
    closed: AtomicBool,
}

impl<F: Fabric> FabricTransport<F> {
    fn error(&self, kind: ErrorKind, sentence: impl Into<std::borrow::Cow<'static, str>>) -> Error {
        Error::new(kind, sentence).with_backend(self.name)
    }

    fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(closed().with_backend(self.name));
        }
        Ok(())
    }

    /// Creates a link whose lanes connect to `addresses` in turn.
    fn link(
        &self,
        id: LinkId,
        peer: Identity,
        addresses: &[&[u8]],
        keys: Option<Keys>,
    ) -> Arc<dyn Link> {
        let foreign = keys.is_none();
        let lanes = if foreign { &self.lanes[..1] } else { &self.lanes[..] };
        let shared = Arc::new(SharedLink::new(id, peer, keys, lanes.len()));
        for (lane, address) in lanes.iter().zip(addresses.iter().cycle()) {
            let (link, address) = (Arc::clone(&shared), (*address).into());
            lane.submit(Command::Connect { link, address });
        }
        Arc::new(FabricLink {
            name: self.name,
            lanes: Arc::clone(&self.lanes),
            capabilities: Arc::clone(&self.capabilities),
            signer: self.signer.clone(),
            shared,
            foreign,
            imports: AtomicU64::new(0),
        })
    }
}

// SAFETY: a `Fabric` touches local memory only for unreported pieces, as its implementer ensures,
// and the machine settles a ticket when all pieces of its job were reported. It keeps a region's
// memory until every peer that was granted the region has released it.
unsafe impl<F: Fabric> Transport for FabricTransport<F> {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn address(&self) -> Result<Vec<u8>> {
        let addresses = lanes::encode(self.addresses.iter().map(|address| address()))
            .map_err(|error| error.with_backend(self.name))?;
        Ok(self.signer.sign(Part::Addresses, &self.me, addresses))
    }

    fn register(&self, region: RegionSpec) -> Result<Arc<dyn LocalRegion>> {
        self.check_open()?;
        let kind = region.memory.kind();
        if !self.capabilities.local.contains(kind) {
            let moves = self.capabilities.local;
            return Err(self.error(
                ErrorKind::Unsupported,
                format!(
                    "{} moves {moves} memory, and this is {kind} memory: use a backend that \
                     reaches it",
                    self.name
                ),
            ));
        }
        let (local, export) = self
            .registrar
            .register(region.id, &region.memory)
            .map_err(|error| error.with_backend(self.name))?;
        let export = self.signer.sign(Part::Export, &self.me, export);
        let record = Arc::new(RegionRecord::new(region, local, self.lanes.len()));
        self.regions.open(Arc::clone(&record));
        let (lanes, regions) = (Arc::clone(&self.lanes), Arc::clone(&self.regions));
        let revoke = Box::new(move |region: Arc<RegionRecord<F::Local>>, done| {
            for (lane, done) in lanes.iter().zip(lanes::tickets(done, lanes.len())) {
                lane.submit(Command::Revoke { region: Arc::clone(&region), done });
            }
        });
        Ok(Arc::new(RegionHandle { record, export, regions, revoke }))
    }

    fn link(&self, id: LinkId, peer: PeerSection<'_>) -> Result<Arc<dyn Link>> {
        self.check_open()?;
        let addresses = self.signer.addresses(peer.identity, peer.address)?;
        let keys = Keys::new(&peer.invitation, self.secret.as_ref());
        Ok(self.link(id, peer.identity.clone(), &addresses, Some(keys)))
    }

    fn link_foreign(&self, id: LinkId, blob: &[u8]) -> Result<Arc<dyn Link>> {
        self.check_open()?;
        let nobody = Identity { name: "foreign agent".into(), incarnation: Incarnation([0; 16]) };
        Ok(self.link(id, nobody, &[blob], None))
    }

    fn foreign_metadata(&self) -> Result<Vec<u8>> {
        self.check_open()?;
        let told =
            self.registrar.foreign_metadata().map_err(|error| error.with_backend(self.name))?;
        self.resume(); // so that the library notices in a turn that peers may now use the memory
        Ok(told)
    }

    fn resume(&self) {
        self.lanes.iter().for_each(|lane| lane.submit(Command::Resume));
    }

    fn shutdown(&self, done: Ticket) {
        self.closed.store(true, Ordering::Release);
        // The machine settles the ticket when it stops; if it has already stopped, the ticket
        // settles at once.
        for (lane, done) in self.lanes.iter().zip(lanes::tickets(done, self.lanes.len())) {
            lane.submit(Command::Shutdown { done });
            lane.ask_to_stop();
        }
        self.lanes.iter().for_each(Reactor::stop);
    }
}
