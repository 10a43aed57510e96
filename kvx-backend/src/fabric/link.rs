//! The handle of a link, which core holds.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvx_core::backend::{
    BoundPlan, ForeignRange, INLINE_BYTES, INLINE_SEGMENTS, Link, PeerSection, RemoteRegion,
    RemoteSpec, Ticket, Turn,
};
use kvx_core::{Capabilities, Error, ErrorKind, MemoryKind, Result, TransferId};

use super::lanes::{self, Stripe, Thread};
use super::library::Fabric;
use super::machine::Machine;
use super::progress::Command;
use super::shared_link::{Import, RemoteMemory, SharedLink};
use super::signed::{Part, PartSigner};
use crate::error::{check_notification, other_peer};
use crate::reactor::{Reactor, SLICE};

/// The lanes of a transport.
pub(super) type Lanes<F> = Arc<[Reactor<Machine<F>>]>;

/// The handle of a link.
pub(super) struct FabricLink<F: Fabric> {
    pub(super) name: &'static str,
    pub(super) lanes: Lanes<F>,
    pub(super) capabilities: Arc<Capabilities>,
    pub(super) signer: PartSigner,
    pub(super) shared: Arc<SharedLink>,
    pub(super) foreign: bool,
    pub(super) imports: AtomicU64,
}

impl<F: Fabric> FabricLink<F> {
    /// Returns the lanes that the link uses.
    fn lanes(&self) -> &[Reactor<Machine<F>>] {
        if self.foreign { &self.lanes[..1] } else { &self.lanes }
    }

    fn submit(&self, command: impl Fn(Arc<SharedLink>) -> Command<F::Local>) {
        self.lanes().iter().for_each(|lane| lane.submit(command(Arc::clone(&self.shared))));
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

// SAFETY: a fabric touches local memory only for unreported pieces, and the machine settles a
// ticket once all pieces of its job were reported.
unsafe impl<F: Fabric> Link for FabricLink<F> {
    fn capabilities(&self) -> Arc<Capabilities> {
        let known = self.shared.known.lock();
        known
            .as_ref()
            .map_or_else(|| Arc::clone(&self.capabilities), |(_, known)| Arc::clone(known))
    }

    fn describe(&self) -> String {
        let known = self.shared.known.lock();
        known.as_ref().map_or_else(|| format!("{}, not up", self.name), |(text, _)| text.clone())
    }

    fn update(&self, peer: PeerSection<'_>) -> Result<()> {
        if *peer.identity != self.shared.peer {
            return Err(other_peer(&self.shared.peer, peer.identity).with_backend(self.name));
        }
        let addresses = self.signer.addresses(peer.identity, peer.address)?;
        for (lane, address) in self.lanes().iter().zip(addresses.iter().cycle()) {
            let (link, address) = (Arc::clone(&self.shared), (*address).into());
            lane.submit(Command::Update { link, address });
        }
        Ok(())
    }

    fn import(&self, region: RemoteSpec<'_>) -> Result<Arc<dyn RemoteRegion>> {
        let RemoteSpec { id, key, len, kind, export } = region;
        if self.foreign {
            let why = "this link leads to a foreign agent: use RemoteGrid::at";
            return Err(ErrorKind::Unsupported.because(why).with_backend(self.name));
        }
        let export = self.signer.verify(Part::Export, &self.shared.peer, export)?.into();
        self.import_as(kind, RemoteMemory::Region { id, key, len, kind, export })
    }

    fn import_foreign(&self, range: ForeignRange) -> Result<Arc<dyn RemoteRegion>> {
        if !self.foreign {
            let why = "this link leads to a kvx agent: use its regions";
            return Err(ErrorKind::Unsupported.because(why).with_backend(self.name));
        }
        self.import_as(range.kind, RemoteMemory::Foreign(range))
    }

    fn post(&self, plan: Arc<BoundPlan>, id: TransferId, done: Ticket) {
        let size = plan.size();
        let lanes = self.lanes();
        if size.bytes > SLICE && lanes.len() > 1 {
            let of = lanes.len();
            for (lane, done) in lanes::tickets(done, of).into_iter().enumerate() {
                let (link, plan) = (Arc::clone(&self.shared), Arc::clone(&plan));
                let stripe = Stripe { lane, of };
                lanes[lane].submit(Command::Post { link, plan, stripe, id, done, inline_on: None });
            }
            return;
        }
        let (lane, link, stripe) =
            (&lanes[lanes::own(lanes.len())], Arc::clone(&self.shared), Stripe::WHOLE);
        if size.bytes <= INLINE_BYTES && size.segments <= INLINE_SEGMENTS {
            let inline_on = Some(Thread::this());
            lane.submit_and_turn(Command::Post { link, plan, stripe, id, done, inline_on });
        } else {
            lane.submit(Command::Post { link, plan, stripe, id, done, inline_on: None });
        }
    }

    fn notify(&self, bytes: &[u8], done: Ticket) {
        if let Err(why) = check_notification(bytes) {
            return done.settle(Err(why.with_backend(self.name)));
        }
        let link = Arc::clone(&self.shared);
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
