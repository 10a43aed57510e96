//! The agent, which owns transports, regions and peers.

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

/// One side of transfers: its transports, its regions, its peers. Cheap to clone.
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

/// Returns the error for a backend that may not access a device directly.
fn only_staged(backend: &'static str, kind: MemoryKind) -> Error {
    let why = format!(
        "kv_buffer_device is cpu, and {backend} does not move {kind} memory through host buffers: \
         name a backend that does, or register host memory"
    );
    ErrorKind::Unsupported.because(why).with_backend(backend)
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

    /// Shuts the agent down. May be called again: it then waits for what the first call did not
    /// prove.
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
        let closed = || ErrorKind::Closed.because("the agent was shut down");
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
                // A thread for each: one that hangs blocks neither the others nor this one.
                let transport = Arc::clone(&open.transport);
                let (done, ticket) = Completion::with_ticket();
                let (joined, end) = Completion::with_ticket();
                let closes = std::thread::Builder::new().name(format!("kvx-end {}", open.name));
                let closing = closes.spawn(move || {
                    transport.shutdown(ticket);
                    end.settle(Ok(())); // the transport has joined its threads
                });
                (open.name, closing.map(|_| [done, joined]))
            })
            .collect();
        // A transport gets 200 ms even if the revocations have used up the time.
        let patience = Deadline::from(deadline.left().max(Duration::from_millis(200)));
        let mut stuck = Vec::new();
        for (name, done) in closing {
            let ended = match done {
                Ok(ends) => ends.into_iter().try_for_each(|end| end.wait_blocking(patience)),
                Err(error) => Err(Error::os("could not start the thread that closes it", error)),
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
                "the shutdown reached its deadline with {left} transfers not settled, {shared} \
                 regions still shared and {} transports not closed {}: that memory stays \
                 quarantined; a longer deadline may help",
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

    /// Returns the agent's name and incarnation.
    pub fn identity(&self) -> &Identity {
        &self.0.inner.identity
    }

    /// Returns the open backends, in order of preference.
    pub fn backends(&self) -> Vec<&'static str> {
        self.0.inner.transports.iter().map(|open| open.name).collect()
    }

    /// Returns the backends that were requested but could not be opened, each with the reason.
    pub fn not_open(&self) -> &[(&'static str, Error)] {
        &self.0.inner.not_open
    }

    /// Returns true if every open backend can move device memory through host buffers alone, as
    /// [`AgentBuilder::stage_device_memory`] requires.
    pub fn stages_devices(&self) -> bool {
        self.0.inner.transports.iter().all(|open| open.transport.stages_devices())
    }

    /// Returns true if an open backend reaches memory of this kind, so that
    /// [`register`](Self::register) can succeed.
    pub fn reaches(&self, kind: MemoryKind) -> bool {
        let local = |open: &Open| open.transport.capabilities().local.contains(kind);
        self.0
            .inner
            .transports
            .iter()
            .any(|open| self.0.inner.may_register(open, kind) && local(open))
    }

    /// Registers memory under a name that is unique among this agent's regions. May block, because
    /// a backend may have to pin pages.
    ///
    /// # Errors
    /// `Invalid` if the memory is empty or the name is taken or malformed; `Unsupported`, with the
    /// reason of each backend, if no open backend can register the memory; `Native` if the
    /// operating system gives no random key; `Closed`; `Forked`.
    pub fn register(&self, name: &str, memory: impl Into<Arc<Memory>>) -> Result<Region> {
        self.0.inner.check_open()?;
        let (name, memory) = (checked_name("region", name)?, memory.into());
        if memory.is_empty() {
            return Err(ErrorKind::Invalid
                .because(format!("region {name:?} has no bytes: register at least one")));
        }
        let taken = |tables: &Tables| tables.names.contains(&name);
        let name_is_taken = || {
            ErrorKind::Invalid.because(format!(
                "a region named {name:?} is registered already: choose another name"
            ))
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
            return Err(ErrorKind::Unsupported.because(format!(
                "no open backend can register {} memory: {}",
                memory.kind(),
                reasons.join("; ")
            )));
        }
        let exports = locals
            .iter()
            .enumerate()
            .filter_map(|(at, local)| {
                local.as_ref().ok().map(|local| (at as u8, local.export().to_vec()))
            })
            .collect();
        self.0.inner.flushed.note(memory.device_access());
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
            // Another thread was faster. Dropping the region revokes it.
            return Err(name_is_taken());
        }
        tables.regions.insert(id, Arc::new(info));
        tables.names.insert(name);
        tables.generation += 1;
        if tables.handles.len() == tables.handles.capacity() {
            // Rare, so that registering many regions takes linear time.
            tables.handles.retain(|handle| handle.strong_count() > 0);
        }
        tables.handles.push(Arc::downgrade(region.core()));
        drop(tables);
        Ok(region)
    }

    /// Returns the bytes that peers need to connect. The program carries them to the peers by any
    /// means. Newer metadata updates peers that are already connected.
    ///
    /// # Errors
    /// `Exhausted` if there are more regions or longer addresses than readers accept; an error of a
    /// backend that cannot name its address; `Closed`; `Forked`.
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

    /// Returns a handle to the agent that `metadata` describes, which may be this agent itself.
    ///
    /// Returns at once and connects in the background: see [`Peer::ready`]. If this agent already
    /// has a handle to the same incarnation that is not lost, the handle is shared and updated. A
    /// link that failed for a temporary reason (a limit of this process, a peer that was full) is
    /// then tried again, as by each post that finds no link. After a transfer has failed with
    /// `PeerLost`, await [`Peer::loss`] first: until then, this call returns the old handle.
    ///
    /// # Errors
    /// `Malformed` if the bytes are not metadata; `Incompatible` if the two sides have no version
    /// in common or a critical section is unknown; `Closed`; `Forked`. Failures to connect are
    /// reported by [`Peer::ready`] and by transfers.
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

    /// Returns a handle to an agent that is not kvx, from that agent's own blob: the metadata of a
    /// NIXL agent (`RIXL`) or the name of a Mooncake segment (`MOONCAKE`). The route and the
    /// capabilities of the peer say which promises of kvx do not hold for it.
    ///
    /// # Errors
    /// `NoRoute` if no open backend connects to such agents; `Native` if the operating system gives
    /// no random bytes; `Closed`; `Forked`. A blob that the backend rejects is reported by
    /// [`Peer::ready`] and by transfers.
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

    /// Returns the bytes that an agent that is not kvx needs to reach this agent and the regions
    /// that are registered now: NIXL metadata (`RIXL`) or the name of a Mooncake segment
    /// (`MOONCAKE`).
    ///
    /// Such agents cannot be asked to release memory. Revoking a region that these bytes name fails
    /// with `StillShared`, and its memory is never freed.
    ///
    /// # Errors
    /// `NoRoute` if no open backend connects to such agents; `Unsupported` if the backend connects
    /// to kvx agents only; an error of the backend; `Closed`; `Forked`.
    pub fn foreign_metadata(&self, backend: &str) -> Result<Vec<u8>> {
        self.0.inner.check_open()?;
        self.0.inner.transports[self.0.inner.speaks(backend)?].transport.foreign_metadata()
    }

    /// Returns the oldest notification, if there is one.
    pub fn try_notification(&self) -> Option<Notification> {
        fork::check().ok()?;
        let (notification, resume) = self.0.inner.inbox.take();
        if resume {
            self.0.inner.resume_transports();
        }
        notification
    }

    /// Waits for the oldest notification: as a future, or by [`NextNotification::join`] without a
    /// runtime. Dropping the future loses no notification.
    ///
    /// A peer that has died sends none. End the wait with a deadline, or with [`Peer::loss`] of a
    /// connection to that peer.
    ///
    /// # Errors
    /// `TimedOut` at the deadline, after which the agent continues to work; `Closed` if the agent
    /// is shut down; `Forked`.
    pub fn notification(&self, deadline: impl Into<Deadline>) -> NextNotification {
        NextNotification::new(Arc::clone(&self.0.inner), deadline.into())
    }

    /// Waits until `senders` different agents (by name and incarnation) have sent exactly these
    /// bytes, before or after the call, and returns their identities. The notifications that it
    /// counts do not appear in the queue again.
    ///
    /// An invited peer chooses its own name, so one peer can pose as several senders. Give
    /// metadata, or the secret, only to peers that you trust.
    ///
    /// # Errors
    /// `TimedOut` at the deadline; `Closed` if the agent is shut down; `Forked`.
    pub fn wait_for_senders(
        &self,
        bytes: impl AsRef<[u8]>,
        senders: usize,
        deadline: impl Into<Deadline>,
    ) -> Completion<Vec<Identity>> {
        let agent = &self.0.inner;
        let late = "not all of the expected notifications arrived by the deadline";
        agent.begin(deadline.into(), late, |promise| {
            if agent.inbox.wait_for_senders(bytes.as_ref(), senders, promise) {
                agent.resume_transports();
            }
        })
    }

    /// Shuts the agent down: fails what is in flight, revokes all regions, closes the transports
    /// and joins the threads. Notifications that are still queued may be lost.
    ///
    /// # Errors
    /// `StillShared` if a region could not be revoked by the deadline, otherwise `TimedOut` if a
    /// transfer did not settle or a transport did not close in time. The memory concerned stays
    /// quarantined. `Exhausted` if the shutdown thread could not be started; `Forked`.
    pub fn shutdown(&self, deadline: impl Into<Deadline>) -> Completion<()> {
        if let Err(error) = fork::check() {
            return Completion::ready(Err(error));
        }
        let deadline = deadline.into();
        let promise = Promise::until(deadline);
        let (agent, done) = (Arc::clone(&self.0), Arc::clone(&promise));
        // The steps block, so they run on a new thread and not on the caller's runtime.
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
