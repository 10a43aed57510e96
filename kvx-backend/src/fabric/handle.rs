//! What core holds of a transport: the handles of the transport, its regions, its links.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::reactor::{Reactor, SLICE};
use kvx_core::sync::Mutex;
use kvx_core::transport::{
    Context, ForeignRange, INLINE_BYTES, INLINE_SEGMENTS, Link, LocalRegion, MAX_NOTIFICATION,
    PeerSection, RegionSpec, RemoteRegion, RemoteSpec, Transport, Turn,
};
use kvx_core::{
    Bound, Capabilities, Error, ErrorKind, Identity, Incarnation, LinkId, MemoryKind, RegionId,
    RegionKey, Result, Secret, Ticket, TransferId,
};

use super::lanes::{self, Stripe, Thread};
use super::machine::{Command, Machine};
use super::regions::{Regions, Registered};
use super::{Fabric, LaneParts, Parts, Registrar};
use crate::control::errors::still_shared;
use crate::control::proof::Keys;

pub(super) fn open<F: Fabric>(
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
    Ok(Arc::new(Opened {
        name,
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
type Lanes<F> = Arc<[Reactor<Machine<F>>]>;

struct Opened<F: Fabric> {
    name: &'static str,
    lanes: Lanes<F>,
    capabilities: Arc<Capabilities>,
    regions: Arc<Regions<F::Local>>,
    registrar: Arc<dyn Registrar<F::Local>>,
    addresses: Vec<Address>,
    secret: Option<Secret>,
    closed: AtomicBool,
}

impl<F: Fabric> Opened<F> {
    fn error(&self, kind: ErrorKind, sentence: impl Into<std::borrow::Cow<'static, str>>) -> Error {
        Error::new(kind, sentence).with_backend(self.name)
    }

    fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(self.error(ErrorKind::Closed, "the transport has been shut down"));
        }
        Ok(())
    }

    /// Leads a link over the lanes to `addresses` in turn.
    fn link(
        &self,
        id: LinkId,
        peer: Identity,
        addresses: &[&[u8]],
        keys: Option<Keys>,
    ) -> Arc<dyn Link> {
        let foreign = keys.is_none();
        let lanes = if foreign { &self.lanes[..1] } else { &self.lanes[..] };
        let wiring = Arc::new(Wiring::new(id, peer, keys, lanes.len()));
        for (lane, address) in lanes.iter().zip(addresses.iter().cycle()) {
            let (link, address) = (Arc::clone(&wiring), (*address).into());
            lane.submit(Command::Connect { link, address });
        }
        Arc::new(FabricLink {
            name: self.name,
            lanes: Arc::clone(&self.lanes),
            capabilities: Arc::clone(&self.capabilities),
            wiring,
            foreign,
            imports: AtomicU64::new(0),
        })
    }
}

// SAFETY: a `Fabric` touches local memory only for pieces that it has not reported, and the machine settles a ticket
// when all pieces of its job have been; a region's memory is kept until every peer that was granted it has released it.
unsafe impl<F: Fabric> Transport for Opened<F> {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn address(&self) -> Result<Vec<u8>> {
        lanes::encode(self.addresses.iter().map(|address| address()))
            .map_err(|error| error.with_backend(self.name))
    }

    fn register(&self, region: RegionSpec) -> Result<Arc<dyn LocalRegion>> {
        self.check_open()?;
        let kind = region.memory.kind();
        if !self.capabilities.local.contains(kind) {
            let moves = self.capabilities.local;
            return Err(self.error(
                ErrorKind::Unsupported,
                format!(
                    "{} moves {moves} memory, and this is {kind} memory: use a backend that reaches it",
                    self.name
                ),
            ));
        }
        let (local, export) = self
            .registrar
            .register(region.id, &region.memory)
            .map_err(|error| error.with_backend(self.name))?;
        let registered = Arc::new(Registered::new(region, local, self.lanes.len()));
        self.regions.open(Arc::clone(&registered));
        let (lanes, regions) = (Arc::clone(&self.lanes), Arc::clone(&self.regions));
        Ok(Arc::new(FabricRegion::<F> { lanes, regions, registered, export }))
    }

    fn link(&self, id: LinkId, peer: PeerSection<'_>) -> Result<Arc<dyn Link>> {
        self.check_open()?;
        let addresses =
            lanes::decode(peer.address).map_err(|error| error.with_backend(self.name))?;
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
        self.resume(); // a turn in which the library sees that somebody was told
        Ok(told)
    }

    fn resume(&self) {
        self.lanes.iter().for_each(|lane| lane.submit(Command::Resume));
    }

    fn shutdown(&self, done: Ticket) {
        self.closed.store(true, Ordering::Release);
        // A machine settles it with its last breath; if it is gone already, the ticket settles at once.
        for (lane, done) in self.lanes.iter().zip(lanes::tickets(done, self.lanes.len())) {
            lane.submit(Command::Shutdown { done });
            lane.ask_to_stop();
        }
        self.lanes.iter().for_each(Reactor::stop);
    }
}

/// One of our regions.
pub(super) struct FabricRegion<F: Fabric> {
    lanes: Lanes<F>,
    regions: Arc<Regions<F::Local>>,
    pub(super) registered: Arc<Registered<F::Local>>,
    export: Vec<u8>,
}

impl<F: Fabric> LocalRegion for FabricRegion<F> {
    fn export(&self) -> &[u8] {
        &self.export
    }

    fn revoke(&self, done: Ticket) {
        match self.regions.revoke(self.registered.id) {
            Some(region) => {
                for (lane, done) in self.lanes.iter().zip(lanes::tickets(done, self.lanes.len())) {
                    lane.submit(Command::Revoke { region: Arc::clone(&region), done });
                }
            }
            None => done.settle(Err(still_shared(self.registered.id))),
        }
    }
}

/// What a link's handle and the machines share.
pub(super) struct Wiring {
    pub(super) id: LinkId,
    pub(super) peer: Identity,
    /// What we prove ourselves to the peer by; `None` for an agent that is not kvx.
    pub(super) keys: Option<Keys>,
    /// Lanes whose handshake is not done.
    awaited: AtomicUsize,
    /// What the library knows, once the link is up.
    pub(super) known: Mutex<Option<(String, Arc<Capabilities>)>>,
    /// Set when it is gone.
    pub(super) gone: OnceLock<Error>,
}

impl Wiring {
    fn new(id: LinkId, peer: Identity, keys: Option<Keys>, lanes: usize) -> Self {
        let awaited = AtomicUsize::new(lanes);
        Wiring { id, peer, keys, awaited, known: Mutex::new(None), gone: OnceLock::new() }
    }

    /// A lane is up. Says whether all of them are now.
    pub(super) fn lane_up(&self) -> bool {
        self.awaited.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Why nothing goes over this link any more.
    pub(super) fn gone(&self) -> Error {
        self.gone
            .get()
            .cloned()
            .unwrap_or_else(|| Error::new(ErrorKind::Closed, "the link is not up"))
    }
}

/// A region of the peer as this link knows it. The machine holds what was made of it, under this number.
pub(super) struct Import {
    pub(super) number: u64,
    pub(super) what: RemoteMemory,
}

/// What is imported.
pub(super) enum RemoteMemory {
    Region { id: RegionId, key: RegionKey, len: u64, kind: MemoryKind, export: Box<[u8]> },
    Foreign(ForeignRange),
}

impl RemoteRegion for Import {}

/// The handle of a link.
struct FabricLink<F: Fabric> {
    name: &'static str,
    lanes: Lanes<F>,
    capabilities: Arc<Capabilities>,
    wiring: Arc<Wiring>,
    foreign: bool,
    imports: AtomicU64,
}

impl<F: Fabric> FabricLink<F> {
    /// The lanes that it leads over.
    fn lanes(&self) -> &[Reactor<Machine<F>>] {
        if self.foreign { &self.lanes[..1] } else { &self.lanes }
    }

    fn submit(&self, command: impl Fn(Arc<Wiring>) -> Command<F::Local>) {
        self.lanes().iter().for_each(|lane| lane.submit(command(Arc::clone(&self.wiring))));
    }

    fn import_as(&self, kind: MemoryKind, what: RemoteMemory) -> Result<Arc<dyn RemoteRegion>> {
        let reaches = self.capabilities().remote;
        if !reaches.contains(kind) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("this link reaches {reaches} memory of the peer, and its region is {kind} memory"),
            )
            .with_backend(self.name));
        }
        let number = self.imports.fetch_add(1, Ordering::Relaxed);
        let import = Arc::new(Import { number, what });
        self.submit(|link| Command::Import { link, import: Arc::clone(&import) });
        Ok(import)
    }
}

// SAFETY: as `Opened`.
unsafe impl<F: Fabric> Link for FabricLink<F> {
    fn capabilities(&self) -> Arc<Capabilities> {
        let known = self.wiring.known.lock();
        known
            .as_ref()
            .map_or_else(|| Arc::clone(&self.capabilities), |(_, known)| Arc::clone(known))
    }

    fn describe(&self) -> String {
        let known = self.wiring.known.lock();
        known.as_ref().map_or_else(|| format!("{}, not up", self.name), |(text, _)| text.clone())
    }

    fn update(&self, peer: PeerSection<'_>) -> Result<()> {
        if *peer.identity != self.wiring.peer {
            return Err(Error::new(
                ErrorKind::PeerRestarted,
                format!("this link leads to {:?}, not {:?}", self.wiring.peer, peer.identity),
            )
            .with_backend(self.name));
        }
        let addresses =
            lanes::decode(peer.address).map_err(|error| error.with_backend(self.name))?;
        for (lane, address) in self.lanes().iter().zip(addresses.iter().cycle()) {
            let (link, address) = (Arc::clone(&self.wiring), (*address).into());
            lane.submit(Command::Update { link, address });
        }
        Ok(())
    }

    fn import(&self, region: RemoteSpec<'_>) -> Result<Arc<dyn RemoteRegion>> {
        let RemoteSpec { id, key, len, kind, export } = region;
        if self.foreign {
            let why = "this link leads to an agent that is not kvx: use RemoteGrid::at";
            return Err(Error::new(ErrorKind::Unsupported, why).with_backend(self.name));
        }
        self.import_as(kind, RemoteMemory::Region { id, key, len, kind, export: export.into() })
    }

    fn import_foreign(&self, range: ForeignRange) -> Result<Arc<dyn RemoteRegion>> {
        if !self.foreign {
            let why = "this link leads to a kvx agent: use its regions";
            return Err(Error::new(ErrorKind::Unsupported, why).with_backend(self.name));
        }
        self.import_as(range.kind, RemoteMemory::Foreign(range))
    }

    fn post(&self, plan: Arc<Bound>, id: TransferId, done: Ticket) {
        let size = plan.size();
        let lanes = self.lanes();
        if size.bytes > SLICE && lanes.len() > 1 {
            let of = lanes.len();
            for (lane, done) in lanes::tickets(done, of).into_iter().enumerate() {
                let (link, plan) = (Arc::clone(&self.wiring), Arc::clone(&plan));
                let stripe = Stripe { lane, of };
                lanes[lane].submit(Command::Post { link, plan, stripe, id, done, inline_on: None });
            }
            return;
        }
        let (lane, link, stripe) =
            (&lanes[lanes::own(lanes.len())], Arc::clone(&self.wiring), Stripe::WHOLE);
        if size.bytes <= INLINE_BYTES && size.segments <= INLINE_SEGMENTS {
            let inline_on = Some(Thread::this());
            lane.submit_and_turn(Command::Post { link, plan, stripe, id, done, inline_on });
        } else {
            lane.submit(Command::Post { link, plan, stripe, id, done, inline_on: None });
        }
    }

    fn notify(&self, bytes: &[u8], done: Ticket) {
        if bytes.len() > MAX_NOTIFICATION {
            let len = bytes.len();
            let why =
                format!("a notification of {len} bytes, at most {MAX_NOTIFICATION} are allowed");
            return done.settle(Err(Error::new(ErrorKind::Invalid, why).with_backend(self.name)));
        }
        let link = Arc::clone(&self.wiring);
        self.lanes[0].submit(Command::Notify { link, bytes: bytes.into(), done });
    }

    fn cancel(&self, id: TransferId) {
        self.submit(|link| Command::Cancel { link, id });
    }

    fn drive(&self) -> Turn {
        let lanes = self.lanes();
        lanes[lanes::own(lanes.len())].drive()
    }

    fn stop_driving(&self) {
        let lanes = self.lanes();
        lanes[lanes::own(lanes.len())].stop_driving();
    }

    fn close(&self) {
        self.submit(|link| Command::Close { link });
    }
}

/// The handle that a plan's remote side keeps.
pub(super) fn import_of(region: &Arc<dyn RemoteRegion>) -> Option<&Import> {
    let any: &dyn Any = &**region;
    any.downcast_ref()
}
