//! The agent: owns transports, regions, peers.

mod builder;
pub(crate) mod inner;
mod next;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use inner::{AgentInner, Open, OwnsLinks, Tables};

use crate::completion::{Completion, Promise};
use crate::deadline::Reason;
use crate::fault_injection::injected;
use crate::identity::{Generation, Identity, Incarnation, RegionId, RegionKey, checked_name};
use crate::inbox::Notification;
use crate::metadata::{Metadata, RegionInfo};
use crate::peer::{About, Peer, PeerInner};
use crate::region::{Region, RegionCore};
use crate::sync::Mutex;
use crate::transport::RegionSpec;
use crate::{Deadline, Error, ErrorKind, Memory, MemoryKind, Result, fork};

pub use builder::AgentBuilder;
pub use next::NextNotification;

/// One end of transfers: its transports, its regions, its peers. Cheap to clone.
///
/// ```no_run
/// # use kvx_core as kvx;
/// # fn main() -> kvx::Result<()> {
/// # let registry = kvx::Registry::new(); let bytes_from_the_peer = [];
/// use kvx::{Agent, Memory};
/// let agent = Agent::builder("decode-0").registry(registry.clone()).build()?;
/// let region = agent.register("kv", Memory::owned(vec![0; 1 << 20]))?;
/// let peer = agent.connect(&bytes_from_the_peer)?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Agent(Arc<AgentHandle>);

struct AgentHandle {
    inner: Arc<AgentInner>,
    /// The newest handle to each peer.
    peers: Mutex<HashMap<Identity, Weak<PeerInner>>>,
}

/// The error for a backend that may not reach a device directly.
fn only_staged(backend: &'static str, kind: MemoryKind) -> Error {
    let why = format!(
        "kv_buffer_device is cpu, and {backend} does not move {kind} memory through buffers of the host: name a \
         backend that \
         does, or register host memory"
    );
    Error::new(ErrorKind::Unsupported, why).with_backend(backend)
}

impl AgentHandle {
    fn begin(&self, peer: Arc<PeerInner>) -> Peer {
        let mut peers = self.peers.lock();
        peers.retain(|_, peer| peer.strong_count() > 0);
        peers.insert(peer.identity.clone(), Arc::downgrade(&peer));
        drop(peers);
        peer.begin();
        Peer(peer)
    }

    /// May be called again: it then waits for what the first time did not prove.
    fn shut_down(&self, deadline: Deadline) -> Result<()> {
        let agent = &self.inner;
        agent.closed.store(true, Ordering::Release);
        let mut transports_asked = agent.shutting.lock();
        let regions: Vec<_> = {
            let mut tables = agent.tables.lock();
            tables.regions.clear();
            tables.handles.iter().filter_map(Weak::upgrade).collect()
        };
        let mut peers: Vec<Arc<dyn OwnsLinks>> = agent.owners();
        peers.extend(self.peers.lock().values().filter_map(|peer| Some(peer.upgrade()? as _)));
        let peers: HashMap<_, _> =
            peers.into_iter().map(|peer| (Arc::as_ptr(&peer).cast::<()>(), peer)).collect();
        let closed = || Error::new(ErrorKind::Closed, "the agent was shut down");
        if !injected("shutdown-leaves") {
            agent.clock.interrupt(&Reason::Shutdown);
            for peer in peers.into_values() {
                peer.end(closed());
            }
        }
        agent.inbox.close();
        let left = agent.budget.drained(deadline);
        let revoked: Vec<_> = regions.iter().map(|region| region.revoke_at_shutdown()).collect();
        let mut shared = 0;
        for (region, revocation) in regions.iter().zip(revoked) {
            if revocation.wait_blocking(deadline).is_err() {
                region.quarantine("its agent was shut down before its revocation had ended");
                shared += 1;
            }
        }
        let again = std::mem::replace(&mut *transports_asked, true);
        let closing: Vec<_> = agent
            .transports
            .iter()
            .filter(|_| !again)
            .map(|open| {
                // Each on a thread of its own: one that hangs keeps no other from closing, nor this one.
                let transport = Arc::clone(&open.transport);
                let (done, ticket) = Completion::with_ticket();
                let (joined, end) = Completion::with_ticket();
                let closes = std::thread::Builder::new().name(format!("kvx-end {}", open.name));
                let closing = closes.spawn(move || {
                    transport.shutdown(ticket);
                    end.settle(Ok(())); // its threads are joined
                });
                (open.name, closing.map(|_| [done, joined]))
            })
            .collect();
        // A transport gets a moment even when revoking has used up the time.
        let patience = Deadline::from(deadline.left().max(Duration::from_millis(200)));
        let mut stuck = Vec::new();
        for (name, done) in closing {
            let ended = match done {
                Ok(ends) => ends.into_iter().try_for_each(|end| end.wait_blocking(patience)),
                Err(error) => Err(Error::os("no thread to close it on", error)),
            };
            stuck.extend(ended.err().map(|error| format!("{name}: {error}")));
        }
        agent.clock.stop();
        if left == 0 && shared == 0 && stuck.is_empty() {
            return Ok(());
        }
        let kind = if shared > 0 { ErrorKind::StillShared } else { ErrorKind::TimedOut };
        Err(Error::new(
            kind,
            format!(
                "the shutdown reached its deadline with {left} transfers not settled, {shared} regions still shared \
                 and {} transports not closed {}: that memory stays quarantined; a longer deadline may help",
                stuck.len(),
                stuck.join("; ")
            ),
        ))
    }
}

impl Agent {
    fn of(inner: Arc<AgentInner>) -> Self {
        Agent(Arc::new(AgentHandle { inner, peers: Mutex::default() }))
    }

    /// Its name and incarnation.
    pub fn identity(&self) -> &Identity {
        &self.0.inner.identity
    }

    /// The backends that are open, in order of preference.
    pub fn backends(&self) -> Vec<&'static str> {
        self.0.inner.transports.iter().map(|open| open.name).collect()
    }

    /// The backends that were asked for and could not be opened, and why.
    pub fn not_open(&self) -> &[(&'static str, Error)] {
        &self.0.inner.not_open
    }

    /// Whether no open backend needs more than small buffers of the host to move memory of devices, as
    /// [`AgentBuilder::stage_device_memory`] has it.
    pub fn stages_devices(&self) -> bool {
        self.0.inner.transports.iter().all(|open| open.transport.stages_devices())
    }

    /// Whether an open backend reaches memory of this kind: [`register`](Self::register) has somebody to ask.
    pub fn reaches(&self, kind: MemoryKind) -> bool {
        let local = |open: &Open| open.transport.capabilities().local.contains(kind);
        self.0
            .inner
            .transports
            .iter()
            .any(|open| self.0.inner.may_register(open, kind) && local(open))
    }

    /// Registers memory under a name that is unique among this agent's regions. May block: registering can pin pages.
    ///
    /// # Errors
    /// `Invalid` for the name or empty memory; when no open backend can serve the memory, `Unsupported` with each
    /// reason; `Closed`, `Forked`.
    pub fn register(&self, name: &str, memory: impl Into<Arc<Memory>>) -> Result<Region> {
        self.0.inner.check_open()?;
        let (name, memory) = (checked_name("region", name)?, memory.into());
        if memory.is_empty() {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("region {name:?} has no bytes: register at least one"),
            ));
        }
        let taken = |tables: &Tables| tables.names.contains(&name);
        let name_is_taken = || {
            Error::new(
                ErrorKind::Invalid,
                format!("a region named {name:?} is registered already: choose another name"),
            )
        };
        if taken(&self.0.inner.tables.lock()) {
            return Err(name_is_taken());
        }
        let (id, key) = (RegionId(self.0.inner.next_id()), RegionKey::random()?);
        let locals: Vec<_> = self
            .0
            .inner
            .transports
            .iter()
            .map(|open| {
                if !self.0.inner.may_register(open, memory.kind()) {
                    return Err(only_staged(open.name, memory.kind()));
                }
                let spec = RegionSpec { id, key, memory: Arc::clone(&memory) };
                open.transport.register(spec).map_err(|error| error.with_backend(open.name))
            })
            .collect();
        if locals.iter().all(Result::is_err) {
            let reasons: Vec<_> = locals
                .iter()
                .filter_map(|local| local.as_ref().err())
                .map(ToString::to_string)
                .collect();
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "no open backend can register {} memory: {}",
                    memory.kind(),
                    reasons.join("; ")
                ),
            ));
        }
        let exports = locals
            .iter()
            .enumerate()
            .filter_map(|(at, local)| {
                local.as_ref().ok().map(|local| (at as u8, local.export().to_vec()))
            })
            .collect();
        let info = RegionInfo {
            id,
            key,
            name: Arc::clone(&name),
            len: memory.len() as u64,
            kind: memory.kind(),
            device: memory.device(),
            read_only: memory.is_read_only(),
            exports,
        };
        let region = Region::new(
            Arc::clone(&self.0.inner),
            RegionCore::new(id, key, Arc::clone(&name), memory, locals),
        );
        let mut tables = self.0.inner.tables.lock();
        if taken(&tables) || self.0.inner.is_closed() {
            drop(tables);
            self.0.inner.check_open()?;
            return Err(name_is_taken()); // another thread was faster; the region's drop revokes it
        }
        tables.regions.insert(id, Arc::new(info));
        tables.names.insert(name);
        tables.generation += 1;
        if tables.handles.len() == tables.handles.capacity() {
            tables.handles.retain(|handle| handle.strong_count() > 0); // seldom: many regions are linear
        }
        tables.handles.push(Arc::downgrade(region.core()));
        drop(tables);
        Ok(region)
    }

    /// The bytes that peers need to connect, to be carried to them by any means. Newer ones update connected peers.
    pub fn metadata(&self) -> Result<Vec<u8>> {
        self.0.inner.check_open()?;
        let mut backends = Vec::new();
        for open in &self.0.inner.transports {
            backends.push((
                open.name.into(),
                open.transport.address().map_err(|error| error.with_backend(open.name))?,
            ));
        }
        let tables = self.0.inner.tables.lock();
        let metadata = Metadata {
            identity: self.0.inner.identity.clone(),
            generation: Generation(tables.generation),
            invited: Some(self.0.inner.invited),
            backends,
            regions: tables.regions.values().cloned().collect(),
        };
        drop(tables);
        metadata.encode()
    }

    /// A handle to the agent that `metadata` describes; also to this one itself. Returns at once and connects behind:
    /// see [`Peer::ready`]. A handle to the same incarnation that is not lost is shared and updated; what kept it from
    /// a link and may have passed (a limit of this process, a peer that was full) is tried again, as by each post that
    /// finds no link. After a transfer has failed with `PeerLost`, await [`Peer::loss`] first: the old handle is shared
    /// until then.
    ///
    /// # Errors
    /// `Malformed`, `Incompatible`; `Closed`, `Forked`.
    pub fn connect(&self, metadata: impl AsRef<[u8]>) -> Result<Peer> {
        self.0.inner.check_open()?;
        let metadata = Metadata::decode(metadata.as_ref())?;
        metadata.invited()?;
        let known = self.0.peers.lock().get(&metadata.identity).and_then(Weak::upgrade);
        if let Some(known) = known.filter(|peer| peer.lost().is_none()) {
            known.update(metadata)?;
            known.begin();
            return Ok(Peer(known));
        }
        let identity = metadata.identity.clone();
        let peer = PeerInner::new(
            Arc::clone(&self.0.inner),
            identity,
            About::Kvx(Arc::new(metadata)),
            None,
        );
        Ok(self.0.begin(peer))
    }

    /// A handle to an agent that is not kvx, from its own blob: a NIXL agent's (`RIXL`) or a Mooncake segment's name
    /// (`MOONCAKE`). What kvx cannot promise toward it, its route and its capabilities say.
    ///
    /// # Errors
    /// `UnknownBackend`; `NoRoute` when that backend is not open; what the backend says of the blob.
    pub fn connect_foreign(&self, backend: &str, blob: impl AsRef<[u8]>) -> Result<Peer> {
        self.0.inner.check_open()?;
        let at = self.0.inner.speaks(backend)?;
        let identity = Identity {
            name: format!("foreign {}", self.0.inner.transports[at].name).into(),
            incarnation: Incarnation::random()?,
        };
        let peer = PeerInner::new(
            Arc::clone(&self.0.inner),
            identity,
            About::Foreign(blob.as_ref().into()),
            Some(at),
        );
        Ok(self.0.begin(peer))
    }

    /// The bytes that an agent that is not kvx needs to reach this one and the regions that are registered now:
    /// NIXL's metadata (`RIXL`) or a Mooncake segment's name (`MOONCAKE`). Such agents cannot be asked to let go:
    /// revoking a region that was told of says `StillShared`, and its memory is never freed.
    ///
    /// # Errors
    /// `NoRoute` when that backend is not open; `Unsupported`; what the backend says.
    pub fn foreign_metadata(&self, backend: &str) -> Result<Vec<u8>> {
        self.0.inner.check_open()?;
        self.0.inner.transports[self.0.inner.speaks(backend)?].transport.foreign_metadata()
    }

    /// The oldest notification, if there is one.
    pub fn try_notification(&self) -> Option<Notification> {
        fork::check().ok()?;
        let (notification, resume) = self.0.inner.inbox.take();
        if resume {
            self.0.inner.resume_transports();
        }
        notification
    }

    /// The oldest notification, waited for: awaited, or by [`NextNotification::join`] without a runtime. Dropping it
    /// loses nothing. Errors: `TimedOut`, after which the agent works on, `Closed`, `Forked`. A reader that has died
    /// sends none: a deadline, or [`Peer::loss`] of a connection to it, ends the wait.
    pub fn notification(&self, deadline: impl Into<Deadline>) -> NextNotification {
        NextNotification::new(Arc::clone(&self.0.inner), deadline.into())
    }

    /// Ends when `senders` different agents (name and incarnation) have sent exactly these bytes, before or after the
    /// call; gives their identities. What it counts does not come out of the queue again. Who was invited says himself
    /// what he is called, so that one peer can be all of them: hand metadata, or the secret, only to peers that you
    /// believe. Errors: `TimedOut`.
    pub fn wait_for_senders(
        &self,
        bytes: impl AsRef<[u8]>,
        senders: usize,
        deadline: impl Into<Deadline>,
    ) -> Completion<Vec<Identity>> {
        if let Err(error) = self.0.inner.check_open() {
            return Completion::ready(Err(error));
        }
        let promise = Promise::new();
        let late = || {
            Error::new(
                ErrorKind::TimedOut,
                "not all of the expected notifications came by the deadline",
            )
        };
        promise.by(&self.0.inner.clock, deadline.into(), late);
        if self.0.inner.inbox.wait_for_senders(bytes.as_ref(), senders, &promise) {
            self.0.inner.resume_transports();
        }
        Completion::of(promise)
    }

    /// Ends everything: fails what is in flight, revokes all regions, closes transports, joins threads. `Ok` says that
    /// all of it was proven by the deadline; else `StillShared` or `TimedOut` says what was not, and that memory stays
    /// quarantined. Notifications that nobody has waited for may be lost.
    pub fn shutdown(&self, deadline: impl Into<Deadline>) -> Completion<()> {
        if let Err(error) = fork::check() {
            return Completion::ready(Err(error));
        }
        let deadline = deadline.into();
        let promise = Promise::until(deadline);
        let (agent, done) = (Arc::clone(&self.0), Arc::clone(&promise));
        // The steps wait for each other, so they get a thread: the caller's runtime is not to be blocked.
        let started = std::thread::Builder::new().name("kvx-shutdown".into()).spawn(move || {
            done.finish(agent.shut_down(deadline));
        });
        if let Err(error) = started {
            promise.finish(Err(Error::os("the shutdown thread could not be started", error)
                .with_kind(ErrorKind::Exhausted)));
        }
        Completion::of(promise)
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Agent({:?}, {:?})", self.0.inner.identity, self.backends())
    }
}
