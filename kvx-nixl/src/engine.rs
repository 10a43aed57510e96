//! The kvx agent behind a NIXL backend, and the objects that NIXL holds by handles.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvx::connector::nixl;
use kvx::{
    Agent, Completion, Deadline, ErrorKind, Memory, Op, Peer, PeerRegion, Plan, Region, Secret,
    Span,
};
use kvx_core::backend::sync::Mutex;
use kvx_vllm::wire::nixl::{Assembly, GENERATIONS_REGION, Got, MAX_NOTE, notes};

use crate::confirmation::{BucketSlots, Confirmation};
use crate::devices::Devices;
use crate::handles::{Handles, NixlHandle};
use crate::log::{always, info, warn};
use crate::memory::{Range, RangeOwner};
use crate::request::{ReleaseOutcome, Request};
use crate::settings::PluginSettings;
use crate::status::{NixlResult, NixlStatus};

/// The maximum number of notifications, and of their bytes, per call.
const MOST_AT_ONCE: (usize, usize) = (4096, 64 << 20);
/// The time limit for ending an engine.
const END: Duration = Duration::from_secs(10);

/// An entry of NIXL's lists: a range, and the handle of the memory that contains it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Descriptor {
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) device: u64,
    pub(crate) memory: NixlHandle,
}

/// A backend KVX of a NIXL agent.
pub(crate) struct Engine {
    agent: Agent,
    settings: PluginSettings,
    devices: Devices,
    /// The metadata with which peers connect to this agent; constant, as NIXL requires.
    introduction: Vec<u8>,
    memory: Handles<Range>,
    requests: Handles<Request>,
    /// True if requests were released in flight.
    leftovers: AtomicBool,
    peers: Mutex<HashMap<String, IntroducedPeer>>,
    /// Memory for confirmations, from the first read of a kvx engine on.
    bucket_slots: OnceLock<Arc<BucketSlots>>,
    assembly: Mutex<Assembly>,
    /// Notifications in flight, so that failures can be reported.
    sent: Mutex<Vec<(String, Completion<()>)>>,
    /// The next number of a region or a long notification.
    numbers: AtomicU64,
}

/// A peer, and its introduction.
struct IntroducedPeer {
    introduction: Box<[u8]>,
    connected: ConnectedPeer,
    /// True once the peer's route was logged.
    told: bool,
}

/// A connection to one incarnation of a peer.
#[derive(Clone)]
struct ConnectedPeer {
    peer: Peer,
    /// The leases of this incarnation, if it is a kvx engine: reads are confirmed by them.
    leases: Option<PeerRegion>,
}

/// Logs an error in one line, and returns NIXL's status for it.
pub(crate) fn report(what: &str, error: &kvx::Error) -> NixlStatus {
    warn(format_args!("{what}: {error}"));
    NixlStatus::from(error)
}

impl Engine {
    /// Creates the backend. Errors: logged in one line.
    pub(crate) fn new(
        name: &str,
        parameters: &[(String, String)],
        nixl: &str,
    ) -> NixlResult<Engine> {
        Self::build(name, parameters, nixl)
            .map_err(|error| report("the backend KVX could not be created", &error))
    }

    fn build(name: &str, parameters: &[(String, String)], nixl: &str) -> kvx::Result<Engine> {
        let settings = PluginSettings::read(parameters, |variable| std::env::var(variable).ok())?;
        let mut builder =
            Agent::builder(name).options(settings.options.clone()).peer_timeout(settings.deadline);
        if let Some(backends) = &settings.backends {
            builder = builder.backends(backends.iter().cloned());
        }
        if let Some(file) = &settings.secret_file {
            builder = builder.secret(Secret::from_file(file)?);
        }
        let devices = Devices::find();
        for device in devices.all() {
            builder = builder.device(Arc::clone(device) as _);
        }
        let agent = builder.registry(kvx::registry()).build()?;
        let open = agent.backends();
        let devices = devices.only_if(|kind| agent.reaches(kind), &open.join(", "));
        info(format_args!(
            "agent {name} in {nixl}: kvx {}, backends {}, {settings}",
            env!("CARGO_PKG_VERSION"),
            open.join(", ")
        ));
        info(devices.describe());
        for (backend, why) in agent.not_open() {
            warn(format_args!("{backend} is not used: {why}"));
        }
        let introduction = nixl::introduction(&agent)?;
        Ok(Engine {
            agent,
            settings,
            devices,
            introduction,
            memory: Handles::default(),
            requests: Handles::default(),
            leftovers: AtomicBool::new(false),
            peers: Mutex::new(HashMap::new()),
            bucket_slots: OnceLock::new(),
            assembly: Mutex::new(Assembly::default()),
            sent: Mutex::new(Vec::new()),
            numbers: AtomicU64::new(0),
        })
    }

    fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    // Memory.

    /// Returns the GPUs whose memory may be registered.
    pub(crate) fn devices(&self) -> &Devices {
        &self.devices
    }

    pub(crate) fn register(&self, memory: Memory) -> NixlResult<NixlHandle> {
        let (base, len) = (memory.address(), memory.len() as u64);
        let name = format!("{base:x}.{}", self.number());
        let region = self.agent.register(&name, memory);
        let region = region.map_err(|error| report("memory could not be registered", &error))?;
        Ok(self.memory.add(Range { base, len, owner: RangeOwner::Ours(region) }))
    }

    /// Blocks until no peer can access the memory, at most until the deadline.
    pub(crate) fn deregister(&self, handle: NixlHandle) -> NixlResult {
        let range = self.memory.get(handle).ok_or(NixlStatus::NotFound)?;
        let RangeOwner::Ours(region) = &range.owner else { return Err(NixlStatus::InvalidParam) };
        match region.revoke(self.settings.deadline).join() {
            Ok(_) => {
                self.memory.remove(handle);
                Ok(())
            }
            Err(error) => {
                let Range { base, len, .. } = &*range;
                // NIXL drops the error that this returns.
                always(format_args!(
                    "do not free the {len} bytes at {base:#x}: a peer may still access them, and did not answer by \
                     the deadline: {error}"
                ));
                Err(NixlStatus::Backend)
            }
        }
    }

    /// Returns the metadata with which peers use the memory.
    pub(crate) fn public_data(&self, handle: NixlHandle) -> NixlResult<Vec<u8>> {
        let range = self.memory.get(handle).ok_or(NixlStatus::NotFound)?;
        let RangeOwner::Ours(region) = &range.owner else { return Err(NixlStatus::InvalidParam) };
        region.metadata().map_err(|error| report("cannot describe memory for peers", &error))
    }

    pub(crate) fn load_remote(
        &self,
        address: u64,
        len: u64,
        data: &[u8],
        agent: &str,
    ) -> NixlResult<NixlHandle> {
        let peer = self.peer(agent)?.peer;
        let region = peer.import_region(data).map_err(|error| report(agent, &error))?;
        if kvx::Place::len(&region) != len {
            warn(format_args!(
                "agent {agent} lists memory of {len} bytes, but its KVX metadata lists {}",
                kvx::Place::len(&region)
            ));
            return Err(NixlStatus::Mismatch);
        }
        Ok(self.memory.add(Range { base: address, len, owner: RangeOwner::Theirs(peer, region) }))
    }

    pub(crate) fn load_local(&self, handle: NixlHandle) -> NixlResult<NixlHandle> {
        let range = self.memory.get(handle).ok_or(NixlStatus::NotFound)?;
        let (base, len) = (range.base, range.len);
        Ok(self.memory.add(Range { base, len, owner: RangeOwner::Mirror(range, OnceLock::new()) }))
    }

    pub(crate) fn unload(&self, handle: NixlHandle) {
        let Some(range) = self.memory.remove(handle) else { return }; // NIXL unloads it twice
        match &range.owner {
            RangeOwner::Theirs(peer, region) => peer.forget(region),
            RangeOwner::Mirror(_, learnt) => {
                let itself = self.connected(&self.agent.identity().name).map(|itself| itself.peer);
                if let (Some(region), Some(peer)) = (learnt.get(), itself) {
                    peer.forget(region);
                }
            }
            RangeOwner::Ours(_) => {}
        }
    }

    // Peers.

    pub(crate) fn introduction(&self) -> &[u8] {
        &self.introduction
    }

    pub(crate) fn load_peer(&self, agent: &str, introduction: &[u8]) -> NixlResult {
        self.connect(agent, introduction.into()).map(drop)
    }

    fn connect(&self, agent: &str, introduction: Box<[u8]>) -> NixlResult<ConnectedPeer> {
        let peer = self.agent.connect(&introduction).map_err(|error| report(agent, &error))?;
        if *peer.identity().name != *agent {
            warn(format_args!("agent {agent} introduces itself as {}", peer.identity().name));
            return Err(NixlStatus::Mismatch);
        }
        let leases = match peer.region(GENERATIONS_REGION) {
            Ok(leases) => Some(leases),
            // Agents that are no engines introduce no region.
            Err(error) if error.kind() == ErrorKind::Unregistered => None,
            Err(error) => return Err(report(agent, &error)),
        };
        let connected = ConnectedPeer { peer, leases };
        let remote = IntroducedPeer { introduction, connected: connected.clone(), told: false };
        let before = self.peers.lock().insert(agent.to_owned(), remote);
        drop(before); // without the lock: this may close links
        Ok(connected)
    }

    pub(crate) fn forget_peer(&self, agent: &str) {
        let gone = self.peers.lock().remove(agent);
        drop(gone);
    }

    /// Returns the peer of this name. Reconnects to one that was lost because it was silent. This
    /// agent itself needs no introduction.
    fn peer(&self, agent: &str) -> NixlResult<ConnectedPeer> {
        match self.connected(agent) {
            Some(known) if !is_lost(&known.peer) => Ok(known),
            Some(_) => {
                let introduction =
                    self.peers.lock().get(agent).map(|remote| remote.introduction.clone());
                self.connect(agent, introduction.ok_or(NixlStatus::NotFound)?)
            }
            None if *self.agent.identity().name == *agent => {
                self.connect(agent, self.introduction.as_slice().into())
            }
            None => Err(NixlStatus::NotFound),
        }
    }

    fn connected(&self, agent: &str) -> Option<ConnectedPeer> {
        self.peers.lock().get(agent).map(|remote| remote.connected.clone())
    }

    /// Logs how a peer is reached, once for each of its handles.
    fn tell_route(&self, agent: &str) {
        let (route, confirms) = match self.peers.lock().get_mut(agent) {
            Some(remote) if !remote.told => {
                remote.told = true;
                (remote.connected.peer.route(), remote.connected.leases.is_some())
            }
            _ => return,
        };
        let confirms =
            if confirms { "; this plug-in confirms reads by the engine's leases" } else { "" };
        info(format_args!(
            "agent {} reaches {agent} by {route}{confirms}",
            self.agent.identity().name
        ));
    }

    // Transfers.

    pub(crate) fn prepare(
        &self,
        op: Op,
        local: &[Descriptor],
        remote: &[Descriptor],
        agent: &str,
    ) -> NixlResult<NixlHandle> {
        if self.leftovers.swap(false, Ordering::Relaxed) {
            drop(self.requests.extract(Request::is_over));
            self.leftovers.fetch_or(self.requests.any(Request::is_released), Ordering::Relaxed);
        }
        let peer = self.peer(agent)?.peer;
        let lists = self.pair_up(local, remote, &peer)?;
        let plan = Plan::of_spans(op, lists).map_err(|error| report(agent, &error))?;
        Ok(self.requests.add(Request::new(agent.to_owned(), plan)))
    }

    /// Pairs the ranges of two lists, grouped by the memory that contains them.
    fn pair_up(
        &self,
        local: &[Descriptor],
        remote: &[Descriptor],
        peer: &Peer,
    ) -> NixlResult<Vec<(Region, PeerRegion, Vec<Span>)>> {
        if local.len() != remote.len() || local.is_empty() {
            return Err(NixlStatus::InvalidParam);
        }
        type Key = (NixlHandle, NixlHandle);
        let mut lists: Vec<(Key, Arc<Range>, Arc<Range>, Vec<Span>)> = Vec::new();
        let mut places: HashMap<Key, usize> = HashMap::new();
        let mut last: Option<(Key, usize)> = None;
        for (ours, theirs) in local.iter().zip(remote) {
            let key = (ours.memory, theirs.memory);
            let at = match last {
                Some((same, at)) if same == key => at,
                _ => match places.get(&key) {
                    Some(at) => *at,
                    None => {
                        let range = |handle| self.memory.get(handle).ok_or(NixlStatus::NotFound);
                        let room =
                            Vec::with_capacity(if lists.is_empty() { local.len() } else { 0 });
                        lists.push((key, range(key.0)?, range(key.1)?, room));
                        places.insert(key, lists.len() - 1);
                        lists.len() - 1
                    }
                },
            };
            last = Some((key, at));
            if ours.len != theirs.len {
                return Err(NixlStatus::InvalidParam);
            }
            let (_, our, their, spans) = &mut lists[at];
            let (local, remote) =
                (our.offset(ours.address, ours.len)?, their.offset(theirs.address, theirs.len)?);
            spans.push(Span { local, remote, len: ours.len });
        }
        lists
            .into_iter()
            .map(|(_, ours, theirs, spans)| {
                let RangeOwner::Ours(local) = &ours.owner else {
                    return Err(NixlStatus::InvalidParam);
                };
                Ok((local.clone(), self.region_of(&theirs, peer)?, spans))
            })
            .collect()
    }

    fn region_of(&self, range: &Range, peer: &Peer) -> NixlResult<PeerRegion> {
        match &range.owner {
            RangeOwner::Theirs(_, region) => Ok(region.clone()),
            RangeOwner::Ours(_) => Err(NixlStatus::InvalidParam),
            RangeOwner::Mirror(mirrored, learnt) => {
                if let Some(region) = learnt.get() {
                    return Ok(region.clone());
                }
                let RangeOwner::Ours(region) = &mirrored.owner else {
                    return Err(NixlStatus::InvalidParam);
                };
                let region = region.metadata().and_then(|bytes| peer.import_region(&bytes));
                let region = region.map_err(|error| {
                    report("cannot use this agent's own memory as a peer's", &error)
                })?;
                Ok(learnt.get_or_init(|| region).clone())
            }
        }
    }

    pub(crate) fn post(&self, handle: NixlHandle, note: Option<&[u8]>) -> NixlResult<NixlStatus> {
        let request = self.requests.get(handle).ok_or(NixlStatus::NotFound)?;
        let ConnectedPeer { peer, leases } = self.peer(&request.peer)?;
        let notes = self.notes(note)?;
        let deadline = Deadline::from(self.settings.deadline);
        let (notes, confirmation) = match (request.plan.op(), leases) {
            (Op::Write, _) | (Op::Read, None) => (notes, None),
            (Op::Read, Some(leases)) => {
                let confirmation = self.confirmation(&peer, leases, note, notes, deadline);
                let confirmation = confirmation.map_err(|error| report(&request.peer, &error))?;
                (Vec::new(), Some(confirmation))
            }
        };
        let cure = self.settings.cure();
        let status = request.post(&peer, notes, confirmation, deadline, cure)?;
        if status != NixlStatus::InProgress {
            self.tell_route(&request.peer);
        }
        Ok(status)
    }

    fn confirmation(
        &self,
        peer: &Peer,
        leases: PeerRegion,
        note: Option<&[u8]>,
        notes: Vec<Box<[u8]>>,
        deadline: Deadline,
    ) -> kvx::Result<Confirmation> {
        let slots = Arc::clone(self.bucket_slots()?);
        Confirmation::new((peer.clone(), leases), slots, note, notes, deadline)
    }

    /// Returns the memory for confirmations. Registers it at the first call, without a lock.
    fn bucket_slots(&self) -> kvx::Result<&Arc<BucketSlots>> {
        if let Some(slots) = self.bucket_slots.get() {
            return Ok(slots);
        }
        // Two threads may both register memory, so the regions need different names.
        let slots = BucketSlots::new(&self.agent, &format!("confirmations.{}", self.number()))?;
        Ok(self.bucket_slots.get_or_init(|| Arc::new(slots)))
    }

    pub(crate) fn check(&self, handle: NixlHandle) -> NixlResult<NixlStatus> {
        let request = self.requests.get(handle).ok_or(NixlStatus::NotFound)?;
        let status = request.check(self.settings.cure());
        if status != NixlStatus::InProgress {
            self.tell_route(&request.peer);
        }
        Ok(status)
    }

    /// Releases a request. One that was released before, or never existed, is already gone.
    pub(crate) fn release(&self, handle: NixlHandle) -> NixlResult {
        let Some(request) = self.requests.get(handle) else { return Ok(()) };
        match request.release(self.settings.deadline) {
            ReleaseOutcome::Gone => {
                self.requests.remove(handle);
                Ok(())
            }
            ReleaseOutcome::Active => {
                self.leftovers.store(true, Ordering::Relaxed);
                Err(NixlStatus::Active)
            }
            ReleaseOutcome::Stuck => {
                warn(format_args!(
                    "agent {}: a released transfer has not ended in {:?}: do not free its local memory",
                    request.peer, self.settings.deadline
                ));
                self.leftovers.store(true, Ordering::Relaxed);
                Err(NixlStatus::Backend)
            }
        }
    }

    // Notifications.

    fn notes(&self, note: Option<&[u8]>) -> NixlResult<Vec<Box<[u8]>>> {
        let Some(bytes) = note else { return Ok(Vec::new()) };
        notes(self.number(), bytes).ok_or_else(|| {
            warn(format_args!(
                "a notification has {} bytes, but the limit is {MAX_NOTE}",
                bytes.len()
            ));
            NixlStatus::InvalidParam
        })
    }

    /// Sends a notification; sending needs no polling. A later call reports its failure.
    pub(crate) fn notify(&self, agent: &str, note: &[u8]) -> NixlResult {
        let peer = self.peer(agent)?.peer;
        for note in self.notes(Some(note))? {
            self.send(agent, &peer, &note);
        }
        Ok(())
    }

    fn send(&self, agent: &str, peer: &Peer, note: &[u8]) {
        let sending = peer.notify(note, self.settings.deadline);
        let mut sent = self.sent.lock();
        sent.push((agent.to_owned(), sending));
        if sent.len() == sent.capacity() {
            prune(&mut sent);
        }
    }

    /// Returns the notifications that have arrived since the last call.
    pub(crate) fn notifications(&self) -> Vec<(String, Box<[u8]>)> {
        prune(&mut self.sent.lock());
        let mut assembly = self.assembly.lock();
        let mut got = Vec::new();
        let mut bytes = 0;
        // Notifications that arrive during the loop are for the next call, so that senders cannot
        // block the caller.
        while got.len() < MOST_AT_ONCE.0
            && bytes < MOST_AT_ONCE.1
            && let Some(next) = self.agent.try_notification()
        {
            bytes += next.bytes.len();
            match assembly.take(next.from.incarnation, &next.bytes) {
                Got::Whole(bytes) => got.push((next.from.name.to_string(), bytes)),
                Got::Part => {}
                Got::Instead(dropped) => warn(format_args!(
                    "dropped an incomplete notification, of which {dropped} bytes had arrived: too \
                     many are incomplete, most of them from its sender"
                )),
                Got::Nonsense => warn(format_args!(
                    "agent {}: received a malformed notification",
                    next.from.name
                )),
            }
        }
        got
    }

    /// Ends the agent within a time limit.
    pub(crate) fn end(self) {
        let peers = std::mem::take(&mut *self.peers.lock());
        drop(peers);
        drop(self.requests.extract(|_| true));
        let longest = END.min(self.settings.deadline);
        if let Err(error) = self.agent.shutdown(longest).join() {
            warn(format_args!("agent {} ends: {error}", self.agent.identity().name));
        }
    }
}

/// Returns whether a peer was lost because it was silent, so that it can be connected again.
fn is_lost(peer: &Peer) -> bool {
    peer.lost().is_some_and(|error| error.kind() == ErrorKind::PeerLost)
}

/// Removes the notifications that have arrived, and logs those that have failed.
fn prune(sent: &mut Vec<(String, Completion<()>)>) {
    sent.retain_mut(|(agent, sending)| match crate::request::now(sending) {
        None => true,
        Some(Ok(())) => false,
        Some(Err(error)) => {
            warn(format_args!("agent {agent} did not take a notification: {error}"));
            false
        }
    });
}
