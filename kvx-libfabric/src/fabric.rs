//! libfabric as a `Fabric` of kvx-backend.

use std::collections::HashSet;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_backend::fabric::{
    EndpointId, Event, Fabric, FlushCompletion, Job, JobId, SendStatus, Unregister,
};
use kvx_backend::reactor::{Armed, SLICE, Turn};
use kvx_core::backend::RemoteSpec;
use kvx_core::{Capabilities, Error, ErrorKind, Identity, Result};

use crate::address::Address;
use crate::error::{self, lost_link};
use crate::ffi::{FailedOperation, WaitMethod};
use crate::memory::{Local, MemoryRegistrar, Remote};
use crate::neighbours::Neighbour;
use crate::peer_probe::PeerProbe;
use crate::peers::Peers;
use crate::posting::{Bundle, PieceOutcome, PostingState};
use crate::process_copy;
use crate::providers::{self, SETS_UP};
use crate::rail::{MAX_MESSAGE, PostOutcome, Rail, RailEvent};
use crate::read_back::{ReadBacks, WaitingRead};
use crate::wake_socket::WakeSocket;

/// The maximum number of messages to one peer that the provider has.
const UNSENT: usize = 16;
/// How often a turn reads a rail that still has completions.
const READS: usize = 8;
/// The longest sleep while events are awaited, even though descriptors wake the reactor.
const SAFETY: Duration = Duration::from_millis(20);
/// Without a descriptor: the sleep between two polls while events are awaited, and otherwise.
const LOOKS: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(2));
/// The time to poll before sleeping, initially and at most: see [`patience_after`].
const PATIENCE: (Duration, Duration) = (Duration::from_micros(50), Duration::from_micros(400));
/// The time to poll over shared memory. Each poll takes a lock that peers spin on, forever if this
/// process is killed or stopped while it holds the lock. So agents wake each other instead.
const PATIENCE_WITH_SOCKET: Duration = Duration::from_micros(5);
/// Delays before a post that found no capacity is retried: the first, and the longest.
const RETRIES: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(2));
/// The time that `end` waits for messages that are being sent.
const FAREWELL: Duration = Duration::from_millis(40);

/// The endpoints of an agent.
pub(crate) struct LibfabricFabric {
    /// Empty after `end`.
    pub(crate) rails: Vec<Rail>,
    ours: Arc<Address>,
    /// The maximum number of pieces posted in a turn.
    turn: u32,
    /// True if addresses of endpoints are text.
    texts: bool,
    /// True if a separate socket can find out whether a process listens at a peer's address.
    probes: bool,
    pub(crate) peers: Peers,
    /// The socket by which peers on this host wake this agent, if the provider has no descriptor to
    /// sleep on.
    wake_socket: Option<WakeSocket>,
    /// Set over shared memory, for neighbours in this process.
    neighbour: Option<Neighbour>,
    fds: Vec<RawFd>,
    /// Events outside of `poll`: of links that broke, and of reads that could not be posted.
    broken: Vec<Event>,
    /// True if reads prove that writes have arrived.
    pub(crate) reads_back: bool,
    pub(crate) read_backs: ReadBacks,
    /// The endpoint of a post that found no capacity, and the time of its retry: no event reports
    /// free capacity.
    retry: Option<(EndpointId, Instant)>,
    pause: Duration,
    /// True if the provider has served a peer; it reports no details.
    serves: bool,
    patience: Duration,
    /// The start of the current sleep.
    sleeps: Option<Instant>,
    /// The maximum number of pieces per operation.
    pub(crate) together: usize,
    /// The buffer in which pieces are gathered.
    pub(crate) bundle: Bundle,
    registrar: Arc<MemoryRegistrar>,
    capabilities: Capabilities,
    description: String,
}

impl LibfabricFabric {
    pub(crate) fn new(
        rails: Vec<Rail>,
        ours: Arc<Address>,
        wake_socket: Option<WakeSocket>,
        reads_back: bool,
        registrar: Arc<MemoryRegistrar>,
        capabilities: Capabilities,
        description: String,
    ) -> LibfabricFabric {
        let mut fds: Vec<RawFd> = wake_socket.iter().map(WakeSocket::descriptor).collect();
        fds.extend(rails.iter().filter_map(|rail| match rail.endpoint().wait_method() {
            WaitMethod::Descriptor(descriptor) => Some(descriptor),
            WaitMethod::Never => None,
        }));
        let neighbour = match (&wake_socket, rails.first()) {
            (Some(_), Some(rail)) => Some(Neighbour::new(&ours.rails[0], rail.endpoint())),
            _ => None,
        };
        let texts = rails.iter().any(|rail| rail.endpoint().domain().info().has_text_addresses());
        let together = match &wake_socket {
            Some(_) => process_copy::TOGETHER,
            None => rails.iter().map(Rail::together).min().unwrap_or(1),
        };
        LibfabricFabric {
            rails,
            turn: providers::turn(&ours.provider),
            probes: providers::listens_over_tcp(&ours.provider),
            ours,
            texts,
            peers: Peers::default(),
            wake_socket,
            neighbour,
            fds,
            broken: Vec::new(),
            reads_back,
            read_backs: ReadBacks::default(),
            retry: None,
            pause: RETRIES.0,
            serves: false,
            patience: PATIENCE.0,
            sleeps: None,
            together,
            bundle: Bundle::default(),
            registrar,
            capabilities,
            description,
        }
    }

    #[cfg(test)]
    pub(crate) fn rail(&mut self, at: usize) -> &mut Rail {
        &mut self.rails[at]
    }

    #[cfg(test)]
    pub(crate) fn peer_of(&self, endpoint: EndpointId) -> Option<usize> {
        self.peers.of(endpoint)
    }

    /// Polls one rail, and adds its events. Returns how many completions there were.
    fn read(&mut self, at: usize, events: &mut Vec<Event>) -> usize {
        let LibfabricFabric { rails, peers, broken, read_backs, .. } = self;
        let (mut done, mut sent, mut lost) = (0, Vec::new(), Vec::new());
        for _ in 0..READS {
            let read = rails[at].read(|ended| {
                done += 1;
                match ended {
                    RailEvent::Pieces { job, peer, count, failed } => {
                        let result = failed.map_or(Ok(()), |failed| {
                            Err(peer_error("a piece", peer, failed, &mut lost))
                        });
                        report_pieces(events, job, count, result);
                    }
                    RailEvent::ReadBack { job, peer, failed } => {
                        let result = failed.map_or(Ok(()), |failed| {
                            Err(peer_error("the byte that proves a write", peer, failed, &mut lost))
                        });
                        events.extend(read_backs.end(job, result));
                    }
                    RailEvent::Send { peer, failed } => {
                        sent.push(peer);
                        if let Some(failed) = failed {
                            let why = error::operation_error("a message", failed)
                                .with_kind(ErrorKind::PeerLost);
                            lost.push((peer, why));
                        }
                    }
                    RailEvent::Message(bytes) => events.push(Event::Message(bytes)),
                }
            });
            match read {
                Ok(true) => {}
                Ok(false) => break,
                Err(errno) => {
                    tracing::error!(?errno, "libfabric's completion queue has failed");
                    break;
                }
            }
        }
        for peer in sent {
            peers.sent(peer, rails);
        }
        for (peer, why) in lost {
            broken.extend(broken_links(peers, peer, &why));
        }
        done
    }

    /// Schedules a retry of a post that found no capacity. Returns whether none was scheduled
    /// before.
    fn schedule_retry(&mut self, endpoint: EndpointId) -> bool {
        let new = self.retry.is_none();
        if new {
            self.retry = Some((endpoint, Instant::now() + self.pause));
            self.pause = (self.pause * 2).min(RETRIES.1);
        }
        new
    }

    /// Posts the reads that prove writes, as many as the provider takes. A peer that takes none now
    /// delays no other peer's.
    fn post_read_backs(&mut self) {
        // Each refused read costs a call of the provider, so one is enough for all to that peer.
        let mut refused: HashSet<(EndpointId, usize)> = HashSet::new();
        for _ in 0..self.read_backs.waiting() {
            let Some(read) = self.read_backs.next() else { return };
            let WaitingRead { job, endpoint, byte } = read;
            let posted = match self.peers.of(endpoint) {
                Some(_) if refused.contains(&(endpoint, byte.rail)) => Ok(PostOutcome::Later),
                Some(peer) => {
                    let posted = self.rails[byte.rail].read_back(job, peer, byte.remote);
                    let what = "libfabric could not read a written byte back";
                    posted.map_err(|errno| error::native(what, errno))
                }
                None => Err(lost_link()),
            };
            match posted {
                Ok(PostOutcome::Posted) => {}
                Ok(PostOutcome::Later) => {
                    refused.insert((endpoint, byte.rail));
                    self.read_backs.put_back(read);
                    self.schedule_retry(endpoint);
                }
                Err(why) => self.broken.extend(self.read_backs.end(job, Err(why))),
            }
        }
    }

    /// Wakes a peer that has no descriptor to sleep on.
    fn wake_peer(&mut self, at: usize) -> Result<()> {
        match (&self.wake_socket, self.peers.peer(at).and_then(|peer| peer.wake_at.as_ref())) {
            (Some(ours), Some(theirs)) => ours.wake(theirs),
            _ => Ok(()),
        }
    }

    /// Finishes sending messages, and releases everything. Returns whether the provider certainly
    /// no longer accesses local memory.
    fn end(&mut self) -> bool {
        let until = Instant::now() + FAREWELL;
        while !self.rails.iter().all(Rail::is_quiet) && Instant::now() < until {
            let done: usize = (0..self.rails.len()).map(|at| self.read(at, &mut Vec::new())).sum();
            if done == 0 {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        self.peers.clear(&self.rails);
        self.registrar.close();
        if self.wake_socket.is_some() && self.peers.unanswered {
            // A peer that has not yet read this endpoint's name crashes if the shared memory of
            // that name is gone (seen with libfabric 1.17). So the endpoint stays open.
            std::mem::forget(
                self.rails.iter().map(|rail| Arc::clone(rail.endpoint())).collect::<Vec<_>>(),
            );
        }
        if let Some(neighbour) = self.neighbour.take() {
            // Over shared memory only calls of this process access memory, so another owner of the
            // endpoint may close it later.
            self.rails.drain(..).for_each(Rail::leave);
            drop(neighbour);
        }
        // Without endpoints, libfabric sends, receives and serves nothing.
        let mut certain = true;
        for mut rail in self.rails.drain(..) {
            certain &= rail.close();
        }
        certain
    }
}

impl Drop for LibfabricFabric {
    fn drop(&mut self) {
        self.end();
    }
}

/// Returns the time to poll before sleeping, given the length of the last sleep. The sender of a
/// stream pauses while it copies bytes into its socket. A target that slept in these pauses was
/// woken more than once per MB and took a sixth longer.
fn patience_after(before: Duration, slept: Duration) -> Duration {
    if slept < PATIENCE.1 { (before * 2).min(PATIENCE.1) } else { PATIENCE.0 }
}

/// Reports completed pieces, in one event with the previous ones if they belong to the same job.
#[inline]
fn report_pieces(events: &mut Vec<Event>, job: JobId, count: u32, result: Result<()>) {
    if let (Ok(()), Some(Event::Completed { job: last, pieces, result: Ok(()) })) =
        (&result, events.last_mut())
        && *last == job
    {
        *pieces += count;
        return;
    }
    events.push(Event::Completed { job, pieces: count, result });
}

/// Returns the error of a failed operation, and records whether the peer is lost.
fn peer_error(
    what: &str,
    peer: usize,
    failed: FailedOperation,
    lost: &mut Vec<(usize, Error)>,
) -> Error {
    let why = error::operation_error(what, failed);
    if why.kind() == ErrorKind::PeerLost {
        lost.push((peer, why.clone()));
    }
    why
}

fn broken_links<'a>(
    peers: &mut Peers,
    peer: usize,
    why: &'a Error,
) -> impl Iterator<Item = Event> + use<'a> {
    let links = peers.break_off(peer).into_iter();
    links.map(|endpoint| Event::Broken { endpoint, why: why.clone(), gone: false })
}

// SAFETY: libfabric accesses the memory of a piece until it reports the operation's end, and only
// then does the fabric report `Moved`. It does not access a piece that was not posted. After `end`
// there are no endpoints.
unsafe impl Fabric for LibfabricFabric {
    type Local = Local;
    type Remote = Remote;
    type State = PostingState;

    fn connect(&mut self, endpoint: EndpointId, _: &Identity, address: &[u8]) -> Result<()> {
        if self.rails.is_empty() {
            return Err(lost_link());
        }
        let address = Address::decode(address)?;
        address.check(&self.ours, self.texts)?;
        if let Some(host) = &address.host {
            process_copy::check(host.process, host.probe)?;
        }
        self.peers.connect(endpoint, address, &self.rails)
    }

    fn setup_time(&self) -> Duration {
        SETS_UP
    }

    fn send(&mut self, endpoint: EndpointId, message: &[u8]) -> Result<SendStatus> {
        let Some(at) = self.peers.of(endpoint) else { return Err(lost_link()) };
        let Some(rail) = self.rails.first() else { return Err(lost_link()) };
        if let Some(host) = self.peers.peer(at).and_then(|peer| peer.address.host.as_ref()) {
            // A killed process may have left a lock held on which this call would spin.
            process_copy::check(host.process, host.probe)
                .map_err(|why| why.with_kind(ErrorKind::PeerLost))?;
        }
        let to = self.peers.peer_number(at, 0, 0, rail)?;
        // The provider keeps messages to a stopped peer; this bound leaves buffers for other peers.
        let most = UNSENT.min(self.rails[0].sends());
        if self.peers.peer(at).is_some_and(|peer| peer.unsent >= most) {
            return Ok(SendStatus::Later);
        }
        let posted = self.rails[0].send(at, to, message).map_err(|errno| {
            error::native("libfabric could not send a message to the peer", errno)
                .with_kind(ErrorKind::PeerLost)
        })?;
        if let Some(peer) = self.peers.peer(at) {
            if posted == PostOutcome::Posted {
                peer.unsent += 1;
                peer.answers = true;
                peer.probe = None;
            } else {
                if peer.probe.is_none() && self.probes {
                    peer.probe = PeerProbe::new(&peer.address.rails[0]);
                }
                peer.probe.as_mut().map_or(Ok(()), PeerProbe::check)?;
            }
        }
        // Without capacity, the peer must free some, or read this endpoint's name first.
        if posted == PostOutcome::Posted || self.schedule_retry(endpoint) {
            self.wake_peer(at)?;
        }
        Ok(if posted == PostOutcome::Posted { SendStatus::Taken } else { SendStatus::Later })
    }

    fn max_message(&self) -> usize {
        MAX_MESSAGE
    }

    fn unpack(&mut self, endpoint: EndpointId, region: &RemoteSpec<'_>) -> Result<Remote> {
        let Some(peer) = self.peers.of(endpoint).and_then(|at| self.peers.peer(at)) else {
            return Err(lost_link());
        };
        Remote::decode(region, peer.address.rails.len())
    }

    fn max_piece(&self) -> u64 {
        let longest = self.rails.iter().map(|rail| rail.endpoint().domain().info().longest());
        longest.min().unwrap_or(SLICE).clamp(1, SLICE)
    }

    fn advance(&mut self, job: &mut Job<'_, Self>) -> Result<u64> {
        let Some(at) = self.peers.of(job.endpoint()) else { return Err(lost_link()) };
        let (mut bytes, mut gone, mut posted, mut result) = (0, 0, 0, Ok(()));
        while bytes < SLICE && gone < self.turn {
            match self.post_some(at, job, SLICE - bytes) {
                Ok(Some((PieceOutcome::NoCapacity, ..))) => {
                    self.schedule_retry(job.endpoint());
                    break;
                }
                Ok(Some((how, count, len))) => {
                    match how {
                        PieceOutcome::Posted => posted += count,
                        _ => job.note_contact(),
                    }
                    gone += count;
                    bytes += len;
                }
                Ok(None) => break,
                Err(why) => {
                    if why.kind() == ErrorKind::PeerLost {
                        self.broken.extend(broken_links(&mut self.peers, at, &why));
                    }
                    result = Err(why);
                    break;
                }
            }
        }
        job.add_in_flight(posted);
        result.map(|()| bytes)
    }

    fn flush(&mut self, endpoint: EndpointId, job: JobId) -> Result<FlushCompletion> {
        if self.peers.of(endpoint).is_none() {
            self.read_backs.forget(job);
            return Ok(FlushCompletion::WithPieces);
        }
        if !self.read_backs.start(job, endpoint) {
            return Ok(FlushCompletion::WithPieces);
        }
        self.post_read_backs();
        Ok(FlushCompletion::Later)
    }

    fn sever(&mut self, endpoint: EndpointId) {
        // libfabric ends the operations to one peer only when its connection breaks or the endpoint
        // closes.
        self.peers.sever(endpoint);
    }

    fn disconnect(&mut self, endpoint: EndpointId) {
        self.peers.disconnect(endpoint, &self.rails);
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Turn {
        if let Some(since) = self.sleeps.take() {
            self.patience = patience_after(self.patience, since.elapsed());
        }
        events.append(&mut self.broken);
        let done: usize = (0..self.rails.len()).map(|at| self.read(at, events)).sum();
        self.post_read_backs();
        // A target that has served a request polls on for a while: asking whether it may sleep
        // costs more than polling.
        let done = done + usize::from(std::mem::take(&mut self.serves));
        if !self.broken.is_empty() {
            // Report broken links first, so that their operations fail for that reason.
            events.splice(0..0, self.broken.drain(..));
        }
        if !events.is_empty() {
            (self.retry, self.pause) = (None, RETRIES.0);
        } else if let Some((endpoint, _)) = self.retry.take_if(|(_, at)| *at <= Instant::now()) {
            // There may be capacity now. Any event makes the machine retry, and this one has no
            // other effect on the link.
            events.push(Event::Ready(endpoint));
        }
        let look_for =
            if self.wake_socket.is_some() { PATIENCE_WITH_SOCKET } else { self.patience };
        Turn { look_for, ..Turn::did(done) }
    }

    fn arm(&mut self, waiting: bool) -> Result<Armed> {
        if !self.broken.is_empty() {
            return Ok(Armed::Again);
        }
        let mut longest = waiting.then_some(SAFETY);
        if self.wake_socket.as_ref().is_some_and(WakeSocket::take_wakes) {
            return Ok(Armed::Again); // completions added since then may not have been seen
        }
        for rail in &self.rails {
            match rail.endpoint().wait_method() {
                WaitMethod::Descriptor(_) if !rail.endpoint().may_sleep() => {
                    self.serves = true;
                    return Ok(Armed::Again);
                }
                WaitMethod::Never if self.wake_socket.is_none() => {
                    longest = Some(if waiting { LOOKS.0 } else { LOOKS.1 });
                }
                WaitMethod::Descriptor(_) | WaitMethod::Never => {}
            }
        }
        if self.read_backs.waiting() > 0 {
            longest = Some(longest.map_or(RETRIES.1, |longest| longest.min(RETRIES.1)));
        }
        if let Some((_, at)) = &self.retry {
            let left = at.saturating_duration_since(Instant::now());
            longest = Some(longest.map_or(left, |longest| longest.min(left)));
        }
        // A sleep that ends by its timeout says nothing about the sender's pauses.
        self.sleeps = longest.is_none().then(Instant::now);
        Ok(Armed::Sleep(longest))
    }

    fn fds(&self) -> &[RawFd] {
        &self.fds
    }

    fn describe(&mut self, _: EndpointId) -> (String, Capabilities) {
        (self.description.clone(), self.capabilities.clone())
    }

    fn unregister(&mut self, local: &Local) -> Result<Unregister> {
        local.unmap().map(|()| Unregister::Now)
    }

    fn stop(&mut self) -> bool {
        self.end()
    }
}

#[cfg(test)]
mod early_completions;
#[cfg(test)]
mod full_window;
#[cfg(test)]
mod strict;
#[cfg(test)]
mod unordered;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_sleeps_double_the_patience_and_a_long_one_resets_it() {
        let (short, long) = (Duration::from_micros(90), Duration::from_millis(3));
        let mut patience = PATIENCE.0;
        for micros in [100, 200, 400, 400] {
            patience = patience_after(patience, short);
            assert_eq!(patience, Duration::from_micros(micros));
        }
        assert_eq!(patience_after(patience, long), PATIENCE.0);
    }
}
