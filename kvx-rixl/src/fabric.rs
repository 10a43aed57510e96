//! NIXL as a `Fabric` of kvx-backend.

use std::collections::VecDeque;
use std::ffi::CStr;
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::Arc;
use std::time::Duration;

use kvx_backend::devices::rdma_devices;
use kvx_backend::error::closed;
use kvx_backend::fabric::{EndpointId, Event, Fabric, Job, SendStatus, Unregister};
use kvx_backend::reactor::{Armed, Turn};
use kvx_core::backend::{ForeignRange, MAX_NOTIFICATION, RemoteSpec};
use kvx_core::{Capabilities, ErrorKind, Identity, PerOp, Result, Revocation};

use crate::address::Address;
use crate::agent_lock::AgentLock;
use crate::cpu_trials::{self, CpuTrials};
use crate::ffi::{MemorySegment, NixlAgent, Range, State, TransferList, UnreleasedRequests};
use crate::memory::{self, Local, RegisteredRanges};
use crate::peers::{NixlRegion, PeerAccess, Peers};
use crate::prepared_requests::{DescriptorBudget, PreparedRequests, Slice, SliceLease};
use crate::sleep_timer::SleepTimer;
use crate::wake_set::WakeSet;
use flights::{FlightPurpose, InFlightRequest};

mod flights;

/// The prefix of notifications between kvx agents: all others are from or for foreign agents.
const MAGIC: &[u8] = b"\0kvx/rixl\x01\n";
/// The maximum number of descriptors per slice: some 2 µs each.
const SLICE_PIECES: usize = 64;
/// The maximum number of bytes of a piece, and of a slice if the transfer has several. Over shared
/// memory a post copies before it returns, and a message waits for its end. UCX copies that many
/// bytes at a time, so shorter slices cost throughput.
const SLICE_BYTES: u64 = 512 << 10;
/// The maximum number of bytes of a transfer that is posted as one slice.
const ONE_SLICE: u64 = 1 << 20;
/// The time until both ends have loaded the other's address and the trial of the link has ended: a
/// third of a second each on an idle machine.
const SETS_UP: Duration = Duration::from_secs(5);
/// The maximum number of slices in progress to one peer.
const DEPTH: usize = 32;

/// The state of a transfer.
#[derive(Default)]
pub(crate) struct TransferState {
    lease: Option<SliceLease>,
    /// True once NIXL has loaded the peer's regions for this transfer.
    regions_loaded: bool,
}

/// A peer's region.
pub(crate) struct Remote(Arc<NixlRegion>);

/// The lists from which requests are created: for host memory and for devices, on each side.
#[derive(Default)]
struct Lists {
    local: [Option<TransferList>; 2],
    remote: [Option<TransferList>; 2],
}

fn list<'a>(
    lists: &'a mut [Option<TransferList>; 2],
    agent: &NixlAgent,
    segment: MemorySegment,
) -> Result<&'a mut TransferList> {
    let slot = &mut lists[usize::from(segment == MemorySegment::Device)];
    let list = match slot.take() {
        Some(list) => list,
        None => agent.list(segment)?,
    };
    let list = slot.insert(list);
    list.clear();
    Ok(list)
}

pub(crate) struct NixlFabric {
    agent_lock: Arc<AgentLock>,
    unreleased: Arc<UnreleasedRequests>,
    ranges: Arc<RegisteredRanges>,
    peers: Peers,
    lists: Lists,
    kept: Arc<DescriptorBudget>,
    flights: Vec<InFlightRequest>,
    /// True if requests were given up: their end is unknown.
    gave_up: bool,
    trials: CpuTrials,
    /// The events to report next.
    events: VecDeque<Event>,
    /// The endpoint of a transfer that found the agent in use, to be retried.
    waits_for_lock: Option<EndpointId>,
    sleeps: SleepTimer,
    wakes: WakeSet,
    fds: [RawFd; 1],
    capabilities: Capabilities,
    description: String,
    /// True if the machine has RDMA devices, which serve peers without the CPU.
    has_rdma: bool,
}

fn agent(locked: &Option<NixlAgent>) -> Result<&NixlAgent> {
    locked.as_ref().ok_or_else(closed)
}

impl NixlFabric {
    pub(crate) fn new(
        agent_lock: Arc<AgentLock>,
        ranges: Arc<RegisteredRanges>,
        peers: Peers,
        wakes: WakeSet,
        capabilities: Capabilities,
        description: String,
    ) -> Result<Self> {
        let unreleased = Arc::clone(agent(&agent_lock.lock())?.unreleased());
        Ok(NixlFabric {
            sleeps: SleepTimer::new(),
            fds: [wakes.fd().as_raw_fd()],
            wakes,
            agent_lock,
            unreleased,
            ranges,
            peers,
            lists: Lists::default(),
            kept: Arc::default(),
            flights: Vec::new(),
            gave_up: false,
            trials: CpuTrials::default(),
            events: VecDeque::new(),
            waits_for_lock: None,
            capabilities,
            description,
            has_rdma: !rdma_devices().is_empty(),
        })
    }

    /// Sends a notification, if that is possible now. Errors: `PeerLost`.
    fn notify(&mut self, endpoint: EndpointId, bytes: &[u8]) -> Result<SendStatus> {
        let PeerAccess::Open(name, ..) = self.peers.access(endpoint)? else {
            return Ok(SendStatus::Later);
        };
        let Some(locked) = self.agent_lock.try_lock() else { return Ok(SendStatus::Later) };
        match agent(&locked)?.notify(name, bytes) {
            Ok(()) => Ok(SendStatus::Taken),
            // NIXL gives no reason; it rejects a message to an agent that it knows for no other
            // reason.
            Err(status) => Err(status.error("sending to the peer").with_kind(ErrorKind::PeerLost)),
        }
    }

    /// Asks NIXL to load the peer's regions that a transfer names. Returns whether all of them are
    /// loaded.
    fn load_regions(
        peers: &mut Peers,
        agent: &NixlAgent,
        job: &Job<'_, Self>,
        load: u64,
    ) -> Result<bool> {
        let endpoint = job.endpoint();
        for region in 0..job.plan().remotes().len() as u32 {
            let export = &job.remote(region).0;
            if !export.is_loaded_for(load)
                && !cpu_trials::load_region(agent, peers, endpoint, export)?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Creates the next slice of a transfer, of at most `most` bytes. Returns it with whether it is
    /// the last; `None` if no piece is left.
    fn make(
        lists: &mut Lists,
        agent: &NixlAgent,
        name: &CStr,
        job: &mut Job<'_, Self>,
        most: u64,
    ) -> Result<Option<(Slice, bool)>> {
        let Some(mut piece) = job.next_piece() else { return Ok(None) };
        let (ours, theirs) =
            (job.local(piece.local_region).range, job.remote(piece.remote_region).0.range);
        let local = list(&mut lists.local, agent, ours.segment)?;
        let remote = list(&mut lists.remote, agent, theirs.segment)?;
        let (mut bytes, mut pieces) = (0, 0);
        let last = loop {
            let (ours, theirs) =
                (job.local(piece.local_region).range, job.remote(piece.remote_region).0.range);
            local.add(ours.address + piece.local_offset, piece.len, ours.device);
            remote.add(theirs.address + piece.remote_offset, piece.len, theirs.device);
            bytes += piece.len;
            pieces += 1;
            // Look at one more piece, to know whether this slice is the last.
            let Some(next) = job.next_piece() else { break true };
            if pieces >= SLICE_PIECES || bytes + next.len > most {
                job.put_back(next);
                break false;
            }
            piece = next;
        };
        let request = Arc::new(agent.request(job.op(), local, remote, name)?);
        Ok(Some((Slice { request, bytes, pieces }, last)))
    }
}

// SAFETY: only `advance` posts slices. A slice is reported when NIXL has reported that its request
// is no longer in progress, also after its peer was lost. With requests in progress, `stop` returns
// false.
unsafe impl Fabric for NixlFabric {
    type Local = Local;
    type Remote = Remote;
    type State = TransferState;

    fn connect(&mut self, endpoint: EndpointId, _: &Identity, address: &[u8]) -> Result<()> {
        let Address { blob, page, .. } = Address::decode(address)?;
        if self.peers.connect(endpoint, &blob, false)? {
            self.events.push_back(Event::Ready(endpoint));
        }
        let page = Arc::new(NixlRegion::new(page.range, page.blob));
        self.trials.begin(&self.peers, endpoint, page);
        Ok(())
    }

    fn accept(&mut self, endpoint: EndpointId, _: &Identity, address: &[u8]) -> Result<()> {
        let Address { blob, .. } = Address::decode(address)?;
        self.peers.accept(endpoint, &blob)
    }

    fn setup_time(&self) -> Duration {
        SETS_UP
    }

    fn send(&mut self, endpoint: EndpointId, message: &[u8]) -> Result<SendStatus> {
        if self.trials.is_waiting(endpoint) {
            return Ok(SendStatus::Later);
        }
        let framed = [MAGIC, message].concat();
        self.notify(endpoint, &framed)
    }

    fn max_message(&self) -> usize {
        MAX_NOTIFICATION + 256
    }

    fn unpack(&mut self, endpoint: EndpointId, region: &RemoteSpec<'_>) -> Result<Remote> {
        let export = memory::Export::decode(region.export)?;
        if let Some(agent) = self.peers.name(endpoint) {
            export.check(&agent.to_string_lossy())?;
        }
        let memory::Export { range, blob } = export;
        if range.len < region.len {
            return Err(
                ErrorKind::Malformed.because("the region is longer than its description for NIXL")
            );
        }
        Ok(Remote(Arc::new(NixlRegion::new(range, blob))))
    }

    fn max_piece(&self) -> u64 {
        SLICE_BYTES
    }

    fn advance(&mut self, job: &mut Job<'_, Self>) -> Result<u64> {
        let endpoint = job.endpoint();
        let agent_lock = Arc::clone(&self.agent_lock);
        let Some(locked) = agent_lock.try_lock() else {
            self.waits_for_lock = Some(endpoint);
            return Ok(0);
        };
        let agent = agent(&locked)?;
        let (name, load) = match self.peers.access(endpoint)? {
            PeerAccess::Open(name, load, flights) if flights < DEPTH => (Arc::clone(name), load),
            PeerAccess::Open(..) | PeerAccess::Later => return Ok(0),
        };
        if !job.state().regions_loaded {
            if !Self::load_regions(&mut self.peers, agent, job, load)
                .map_err(|why| self.attribute_error(agent, &name, why))?
            {
                return Ok(0);
            }
            job.state().regions_loaded = true;
        }
        if job.state().lease.is_none() {
            let prepared = job.plan().native(|| Ok(PreparedRequests::default()))?;
            job.state().lease = Some(SliceLease::take(&prepared, load, &self.kept));
        }
        let is_short = job.plan().size().bytes <= ONE_SLICE;
        let most = if is_short { ONE_SLICE } else { SLICE_BYTES };
        let next = job.state().lease.as_mut().and_then(SliceLease::next);
        let slice = match next {
            Some((slice, last)) => {
                if last {
                    job.finish_posting();
                }
                slice
            }
            None => {
                let made = Self::make(&mut self.lists, agent, &name, job, most);
                let made = made.map_err(|why| self.attribute_error(agent, &name, why))?;
                let Some((slice, last)) = made else { return Ok(0) };
                if let Some(lease) = &mut job.state().lease {
                    lease.keep(&slice);
                    if last {
                        lease.complete();
                    }
                }
                slice
            }
        };
        // SAFETY: core has checked the bounds of the local memory and keeps it until the slice is
        // reported. The request is not in progress, because its lease is exclusive and its last
        // transfer has ended.
        let state = unsafe { agent.post(&slice.request) };
        match state {
            State::Done => {}
            State::InProgress => {
                self.track(FlightPurpose::Job(job.id()), slice.request, &name);
                job.add_in_flight(1);
            }
            State::Failed(status) => {
                let why = self.attribute_error(agent, &name, status.error("a transfer"));
                if Self::may_continue(status, &why) {
                    tracing::warn!(peer = ?name, %why, "a post failed, but some of its pieces may be in progress: kvx keeps their memory");
                    self.give_up(slice.request);
                    job.add_in_flight(1); // never reported
                }
                return Err(why);
            }
        }
        Ok(slice.bytes)
    }

    fn sever(&mut self, endpoint: EndpointId) {
        self.trials.forget(endpoint);
        self.peers.sever(endpoint);
    }

    fn disconnect(&mut self, endpoint: EndpointId) {
        self.trials.forget(endpoint);
        if let Some(gone) = self.peers.disconnect(endpoint) {
            self.abandon(&gone);
        }
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Turn {
        // Check this first: once the plugin has read the data, the descriptors no longer show that
        // it has woken this thread.
        let woken = self.sleeps.is_asleep() && self.wakes.take();
        self.peers.take_loaded(events);
        let agent_lock = Arc::clone(&self.agent_lock);
        agent_lock.clear_released();
        let mut messages = 0;
        if let Some(mut locked) = agent_lock.try_lock() {
            if let Some(endpoint) = self.waits_for_lock.take() {
                // So that core repeats the call that found the agent in use.
                events.push(Event::Ready(endpoint));
            }
            if let Some(agent) = locked.as_mut() {
                if !self.unreleased.is_empty() {
                    agent.release();
                }
                if !self.flights.is_empty() {
                    self.poll_flights(agent);
                    self.note_in_progress();
                }
                self.advance_trials(agent);
                // Report ended transfers before messages: their waiter drives this turn.
                if self.events.is_empty() {
                    let before = events.len();
                    agent.notifications(|from, bytes| events.push(parse_notification(from, bytes)));
                    messages = events.len() - before;
                }
            }
        }
        events.extend(self.events.drain(..));
        self.sleeps.looked(woken, messages > 0, !events.is_empty());
        let (look_for, look_until) = self.sleeps.looks();
        // UCX works as long as it finds something to do, and peers' transfers over TCP are such
        // work: up to a second.
        let own_thread_only =
            !self.has_rdma && (self.peers.needs_cpu || self.ranges.any_published());
        Turn { look_for, look_until, own_thread_only, ..Turn::did(events.len()) }
    }

    fn arm(&mut self, waiting: bool) -> Result<Armed> {
        if !self.events.is_empty() {
            return Ok(Armed::Again);
        }
        let in_flight = !self.flights.is_empty();
        self.sleeps.slept();
        Ok(Armed::Sleep(Some(self.sleeps.next(in_flight, waiting))))
    }

    fn fds(&self) -> &[RawFd] {
        &self.fds
    }

    fn describe(&mut self, endpoint: EndpointId) -> (String, Capabilities) {
        if !self.peers.is_foreign(endpoint) {
            let target_cpu = self.peers.reach(endpoint).unwrap_or(PerOp::BOTH);
            let how = if target_cpu == PerOp::NEITHER { ", without the peer's CPU" } else { "" };
            let capabilities = Capabilities { target_cpu, ..self.capabilities.clone() };
            return (format!("{}{how}", self.description), capabilities);
        }
        let text = format!(
            "{}, to an agent that is not kvx: it does not acknowledge notifications, its silence is not detected, and memory that it knows is never released",
            self.description
        );
        (
            text,
            Capabilities {
                revocation: Revocation::Never,
                peer_loss_within: None,
                ..self.capabilities.clone()
            },
        )
    }

    fn unregister(&mut self, local: &Local) -> Result<Unregister> {
        self.ranges.remove(&local.range)
    }

    fn stop(&mut self) -> bool {
        let in_flight = self.gave_up || !self.flights.is_empty();
        // Requests in progress are never released, nor their agent destroyed: that would be a use
        // after free.
        std::mem::forget(std::mem::take(&mut self.flights));
        let gone = self.agent_lock.lock().take();
        self.lists = Lists::default();
        if in_flight {
            tracing::warn!(
                "NIXL requests are still in progress: kvx keeps the agent and the requests' memory"
            );
            std::mem::forget(gone);
            return false;
        }
        drop(gone);
        // A foreign agent with the metadata of memory may access it as long as this process lives.
        !self.ranges.any_published()
    }

    fn connect_foreign(&mut self, endpoint: EndpointId, blob: &[u8]) -> Result<()> {
        if self.peers.connect(endpoint, blob, true)? {
            self.events.push_back(Event::Ready(endpoint));
        }
        for earlier in self.peers.earlier_endpoints(endpoint) {
            let why =
                ErrorKind::PeerLost.because("this agent was connected again with newer metadata");
            self.events.push_back(Event::Broken { endpoint: earlier, why, gone: false });
        }
        Ok(())
    }

    fn unpack_foreign(&mut self, _: EndpointId, range: &ForeignRange) -> Result<Remote> {
        let ForeignRange { address, len, kind, device } = *range;
        let segment = if kind.is_host() { MemorySegment::Host } else { MemorySegment::Device };
        let range = Range { segment, address, len, device };
        Ok(Remote(Arc::new(NixlRegion::new(range, Box::default()))))
    }

    fn notify_foreign(&mut self, endpoint: EndpointId, bytes: &[u8]) -> Result<SendStatus> {
        self.notify(endpoint, bytes)
    }
}

/// Parses a notification of a kvx agent, or of a foreign agent.
fn parse_notification(from: &CStr, bytes: &[u8]) -> Event {
    match bytes.strip_prefix(MAGIC) {
        Some(message) => Event::Message(message.to_vec()),
        None => Event::Notification { from: from.to_string_lossy().into(), bytes: bytes.to_vec() },
    }
}

#[cfg(test)]
mod tests;
