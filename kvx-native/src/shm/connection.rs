//! A connection: one control socket and its state, on both ends.

use std::collections::{HashMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_backend::control::proof::{Claim, Proof};
use kvx_backend::control::{
    ENTRY_OVERHEAD, GrantedRegions, Greeting, HeldBytes, ImportedRegions, NoticesFromPeer,
    NoticesToPeer, Silence, WelcomeDraft,
};
use kvx_core::backend::fork::Private;
use kvx_core::backend::{BoundPlan, RegionKey, Ticket};
use kvx_core::{DeviceAccess, Error, ErrorKind, Identity, Memory, RegionId, Result, TransferId};
use rustix::io::Errno;

use super::error::error;
use super::host::PeerProcess;
use super::lent::LentRegions;
use super::memory::{CopyMethod, PeerRegion, Regions};
use super::messages::{Message, Probe};
use super::shared_link::{Import, SharedLink};
use super::socket::{self, ConnectionSocket, Poller, Ready};
use super::window::{PeerWatch, Window};
use super::writes::{WINDOW, WriteStep, Writes};
use crate::Settlement;
use crate::clock;
use crate::described::{Described, Side};

/// The limit for messages that wait for a peer to read them; a peer that exceeds it is
/// disconnected.
const MAX_QUEUED: usize = 64 << 10;

/// The peer for which memory is counted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum HeldBytesOwner {
    /// The process that the kernel reports.
    Process(i32),
    /// The identity that a process in another PID namespace claims; its process number is not
    /// visible here.
    Claimed(Identity),
}

/// The phase of a connection.
#[derive(Debug)]
pub(crate) enum Phase {
    /// The handshake must be done by this time.
    Hello(Instant),
    Up,
    /// This end holds nothing of the peer and sends no more, but the peer has not yet proven that
    /// it holds nothing of this end.
    Leaving,
}

/// The way in which a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The other end certainly holds nothing of this end: its process has ended, or it has shut
    /// down its sending side, which it does last.
    Proven,
    /// This end closes it; the other end keeps its regions until it notices.
    Ours,
}

/// A handshake that waits until this end has probed the other end's memory.
pub(crate) struct Probing {
    pub(crate) probe: Probe,
    pub(crate) then: AfterProbe,
}

/// The continuation of a handshake after the probe.
pub(crate) enum AfterProbe {
    /// This end answers the hello of an initiator.
    Welcome { from: Identity, draft: WelcomeDraft },
    /// This end confirms the welcome of a target, which has probed this end's memory.
    Confirm { proof: Proof, theirs: Result<()> },
}

/// A link that is not up: it waits for space in the peer's queue of clients, or for the peer's
/// answer.
pub(crate) struct Connecting {
    pub(crate) link: Arc<SharedLink>,
    pub(crate) socket: Vec<u8>,
    pub(crate) until: Instant,
    /// How often it may greet again after the peer closed during the handshake.
    pub(crate) retries: u8,
}

/// A packet that waits for space in the socket.
struct Packet {
    bytes: Vec<u8>,
    /// The memory whose file is sent with the packet.
    memory: Option<Arc<Memory>>,
}

impl Packet {
    /// Returns the bytes of memory that the packet takes.
    fn cost(&self) -> usize {
        self.bytes.capacity() + ENTRY_OVERHEAD
    }
}

/// A transfer that waits until all its regions are granted.
pub(crate) struct PendingTransfer {
    pub(crate) plan: Arc<BoundPlan>,
    pub(crate) id: TransferId,
    pub(crate) done: Ticket,
}

pub(crate) struct Connection {
    pub(crate) socket: Arc<ConnectionSocket>,
    pub(crate) process: Arc<PeerProcess>,
    pub(crate) phase: Phase,
    /// The greeting of this end, until the peer answers it.
    pub(crate) greeting: Option<Greeting>,
    /// The attempt that opened this connection, on the initiator's side.
    pub(crate) attempt: Option<Connecting>,
    /// True if the peer has sent a valid hello.
    pub(crate) has_said_hello: bool,
    pub(crate) probing: Option<Probing>,
    /// The claim that the peer must prove before the connection is up.
    pub(crate) awaited: Option<Claim>,
    /// The link of this connection; `None` on the target's side.
    pub(crate) link: Option<Arc<SharedLink>>,
    /// The identity of the other end, once the handshake has named it.
    pub(crate) peer: Option<Identity>,
    pub(crate) silence: Silence,
    queue: VecDeque<Packet>,
    queued_bytes: usize,
    asked_for_room: bool,
    /// True if the kernel currently takes no more files although it has space for bytes. No event
    /// reports when that changes.
    pub(crate) crowded: bool,
    token: u64,
    /// True if the other end has stopped reading; its earlier messages must still be read.
    pub(crate) deaf: bool,
    /// The error with which the kernel refuses to send, recorded where the connection cannot be
    /// ended at once.
    pub(crate) broken: Option<Error>,

    /// Local regions that the peer was granted or lent and has not released.
    pub(crate) granted: GrantedRegions,
    /// Regions of the peer that this end reads from.
    pub(crate) imports: ImportedRegions<Arc<Import>, (PeerRegion, Arc<Import>)>,
    /// The peer's process, for reads that bypass the machine; created when first needed.
    pub(crate) watched: Option<Arc<PeerWatch>>,
    /// Closed windows through which posters may still copy.
    busy_windows: Vec<(RegionId, Arc<Import>)>,
    /// Regions that the peer revokes, to be released when no local copy reads them any more, with
    /// the devices that have opened them.
    pub(crate) releasing: HashMap<RegionId, Option<Arc<dyn DeviceAccess>>>,
    /// The devices that have opened memory of the peer.
    pub(crate) devices: Vec<Arc<dyn DeviceAccess>>,
    /// The number of regions that devices are opening. Meanwhile no message is read.
    paused: usize,
    /// True if the sending side is shut down.
    pub(crate) finished: bool,
    /// Transfers that wait for regions to be granted.
    pub(crate) waiting: Vec<PendingTransfer>,
    /// Writes that the peer pulls from this end.
    pub(crate) writes: Writes,
    pub(crate) to_peer: NoticesToPeer,

    /// Regions that the peer lent to this end, from which it pulls the peer's writes.
    pub(crate) lent: LentRegions,
    /// The number of unfinished parts of the peer's writes.
    pub(crate) pulls: usize,
    /// The bytes of memory that these parts take, including parts whose answer is not awaited any
    /// more.
    pub(crate) pulls_bytes: usize,
    pub(crate) from_peer: NoticesFromPeer,
    /// The bytes that are counted as held for the peer.
    counted: usize,
}

impl Connection {
    pub(crate) fn new(
        socket: Private,
        process: PeerProcess,
        link: Option<Arc<SharedLink>>,
        now: Instant,
        patience: Duration,
    ) -> Self {
        Connection {
            socket: Arc::new(socket.into()),
            process: Arc::new(process),
            phase: Phase::Hello(now + patience),
            greeting: None,
            attempt: None,
            has_said_hello: false,
            probing: None,
            awaited: None,
            link,
            peer: None,
            silence: Silence::new(now),
            queue: VecDeque::new(),
            queued_bytes: 0,
            asked_for_room: false,
            crowded: false,
            token: 0,
            deaf: false,
            broken: None,
            granted: GrantedRegions::default(),
            imports: ImportedRegions::default(),
            watched: None,
            busy_windows: Vec::new(),
            releasing: HashMap::new(),
            devices: Vec::new(),
            paused: 0,
            finished: false,
            waiting: Vec::new(),
            writes: Writes::default(),
            to_peer: NoticesToPeer::default(),
            lent: LentRegions::default(),
            pulls: 0,
            pulls_bytes: 0,
            from_peer: NoticesFromPeer::default(),
            counted: 0,
        }
    }

    /// Adds the connection to the readiness queue.
    pub(crate) fn watch(
        &mut self,
        poller: &Poller,
        token: u64,
        life_token: u64,
    ) -> Result<(), Errno> {
        self.token = token;
        poller.add(self.socket.as_fd(), token, Ready::IN)?;
        match self.process.life() {
            Some(life) => poller.add(life, life_token, Ready::IN),
            None => Ok(()),
        }
    }

    /// Removes the connection from the readiness queue, even if a forked child keeps the
    /// descriptors open.
    pub(crate) fn unwatch(&self, poller: &Poller) {
        poller.remove(self.socket.as_fd());
        if let Some(life) = self.process.life() {
            poller.remove(life);
        }
    }

    /// Returns a granted region as posters may use it, or `None` if they could not watch the peer's
    /// process.
    pub(crate) fn window(&mut self, held: &PeerRegion) -> Option<Window> {
        let place = held.place.clone();
        match place.method {
            CopyMethod::Mapped(_) => return Some(Window { place, owner: None }),
            CopyMethod::Device(_) => return None, // a device copies asynchronously
            CopyMethod::Remote => {}
        }
        if self.watched.is_none() && self.process.pid > 0 {
            let socket = self.socket.try_clone().ok()?;
            self.watched = Some(Arc::new(PeerWatch { process: Arc::clone(&self.process), socket }));
        }
        self.watched.clone().map(|owner| Window { place, owner: Some(owner) })
    }

    /// Ends reads that bypass the machine: none begins afterwards. Those in progress are
    /// [tracked](Self::has_busy_windows).
    pub(crate) fn shut_windows(&mut self, which: impl Fn(&PeerRegion) -> bool) {
        for (held, import) in self.imports.held().filter(|(held, _)| which(held)) {
            if !import.shutter.shut() {
                self.busy_windows.push((held.id, Arc::clone(import)));
            }
        }
    }

    /// Returns true if posters still copy through closed windows of this region, or of any region.
    pub(crate) fn has_busy_windows(&mut self, id: Option<RegionId>) -> bool {
        self.busy_windows.retain(|(_, import)| !import.shutter.is_free());
        self.busy_windows.iter().any(|(looked, _)| id.is_none_or(|id| id == *looked))
    }

    /// Returns true if any window was busy at the last call of
    /// [`has_busy_windows`](Self::has_busy_windows).
    pub(crate) fn had_busy_windows(&self) -> bool {
        !self.busy_windows.is_empty()
    }

    /// Returns true if the bytes copied so far came from the peer's memory, and not from that of a
    /// successor process.
    pub(crate) fn peer_lives(&self) -> bool {
        self.process.still_behind(self.socket.as_fd())
    }

    pub(crate) fn is_up(&self) -> bool {
        matches!(self.phase, Phase::Up)
    }

    pub(crate) fn is_leaving(&self) -> bool {
        matches!(self.phase, Phase::Leaving)
    }

    /// Returns true if something is in flight that only the peer can end.
    pub(crate) fn awaits(&self) -> bool {
        self.imports.awaits_answer() || self.to_peer.awaits_answer() || !self.writes.is_empty()
    }

    /// Records whether an answer is outstanding, after the work in flight has changed. Returns the
    /// time if the wait has just begun.
    pub(crate) fn note_awaiting(&mut self) -> Option<Instant> {
        self.silence.note(self.awaits(), clock::now)
    }

    /// Queues a message, and sends as much as the socket takes.
    pub(crate) fn send<'a>(&mut self, poller: &Poller, message: impl Into<Message<'a>>) {
        self.send_with(poller, message, None);
    }

    /// Like [`send`](Self::send), with the file of a pool.
    pub(crate) fn send_with<'a>(
        &mut self,
        poller: &Poller,
        message: impl Into<Message<'a>>,
        memory: Option<Arc<Memory>>,
    ) {
        if self.deaf || self.is_leaving() {
            return;
        }
        let packet = Packet { bytes: message.into().encode(), memory };
        self.queued_bytes += packet.cost();
        self.queue.push_back(packet);
        if !self.asked_for_room {
            self.flush(poller);
        }
    }

    /// Returns the number of packets that wait for space.
    pub(crate) fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Checks the number of messages that wait for the peer. Returns `Exhausted` above the limit.
    pub(crate) fn check_queue(&self) -> Result<()> {
        if self.queue.len() <= MAX_QUEUED {
            return Ok(());
        }
        Err(error(
            ErrorKind::Exhausted,
            format!("the peer has more than {MAX_QUEUED} unread messages"),
        ))
    }

    /// Returns the peer for which the memory counts; `None` if this end initiated the connection,
    /// or the peer is not known yet.
    pub(crate) fn held_bytes_owner(&self) -> Option<HeldBytesOwner> {
        match (&self.link, &self.peer) {
            (Some(_), _) => None,
            (None, _) if self.process.pid > 0 => Some(HeldBytesOwner::Process(self.process.pid)),
            // The hello may be a replay of another peer's.
            (None, _) if matches!(self.phase, Phase::Hello(_)) => None,
            (None, peer) => peer.clone().map(HeldBytesOwner::Claimed),
        }
    }

    /// Returns true if ending the connection frees memory that counts for this peer.
    pub(crate) fn is_counted_for(&self, owner: &HeldBytesOwner) -> bool {
        self.counted > 0 && !self.is_leaving() && self.held_bytes_owner().as_ref() == Some(owner)
    }

    /// Counts the memory that is now held for the peer. Returns `Exhausted` for a peer over its
    /// limit.
    pub(crate) fn note_held(&mut self, held: &mut HeldBytes<HeldBytesOwner>) -> Result<()> {
        let bytes =
            self.from_peer.held() + self.queued_bytes + self.pulls_bytes + self.lent.bytes();
        if HeldBytes::<HeldBytesOwner>::rounded_to_step(bytes) == self.counted {
            return Ok(());
        }
        self.held_bytes_owner().map_or(Ok(()), |owner| held.note(&owner, &mut self.counted, bytes))
    }

    /// Stops counting the memory because the connection ends.
    pub(crate) fn release_held(&mut self, held: &mut HeldBytes<HeldBytesOwner>) {
        if let Some(owner) = self.held_bytes_owner() {
            // An excess of this peer's other connections is noticed with them.
            held.note(&owner, &mut self.counted, 0).ok();
        }
    }

    /// Drops the packets that were not sent.
    pub(crate) fn clear_queue(&mut self) {
        self.queue.clear();
        self.queued_bytes = 0;
    }

    /// Sends as much as the socket takes.
    pub(crate) fn flush(&mut self, poller: &Poller) {
        self.crowded = false;
        while let Some(packet) = self.queue.front() {
            let file = packet.memory.as_deref().and_then(Memory::shared_file);
            match socket::send(self.socket.as_fd(), &packet.bytes, file) {
                Ok(()) => {
                    self.queued_bytes -= packet.cost();
                    self.queue.pop_front();
                }
                Err(Errno::AGAIN) => break,
                // Too many files of this user are in flight, until their readers take them.
                Err(Errno::NOBUFS | Errno::TOOMANYREFS) => {
                    self.crowded = true;
                    poller.mark_crowded();
                    break;
                }
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    // Messages that the peer sent before it closed must still be read: the reading
                    // side ends the connection.
                    self.deaf = true;
                    self.clear_queue();
                }
                Err(cause) => {
                    self.deaf = true;
                    self.clear_queue();
                    let sentence = "cannot send a message: check net.core.wmem_max and ulimit -n";
                    self.broken = Some(Error::os(sentence, cause).with_kind(ErrorKind::Exhausted));
                }
            }
        }
        // A broken connection also asks for write events, because the next one ends it.
        let wanted = !self.queue.is_empty() && !self.crowded || self.broken.is_some();
        if wanted != self.asked_for_room {
            self.asked_for_room = wanted;
            self.watch_again(poller);
        }
    }

    /// Reads no message until [`resume`](Self::resume) is called as often.
    pub(crate) fn pause(&mut self, poller: &Poller) {
        self.paused += 1;
        self.watch_again(poller);
    }

    pub(crate) fn resume(&mut self, poller: &Poller) {
        self.paused -= 1;
        self.watch_again(poller);
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.paused > 0
    }

    /// Tells the readiness queue which events the connection waits for.
    fn watch_again(&self, poller: &Poller) {
        let mut ready = if self.is_paused() { Ready::empty() } else { Ready::IN };
        ready.set(Ready::OUT, self.asked_for_room);
        if let Err(cause) = poller.change(self.socket.as_fd(), self.token, ready) {
            tracing::error!(error = %cause, "SHM: cannot watch a connection");
        }
    }

    /// Returns the device that has opened a region of the peer.
    pub(crate) fn device_of(&self, id: RegionId) -> Option<Arc<dyn DeviceAccess>> {
        let lent = self.lent.get(id).and_then(|held| held.as_ref().ok());
        let mut imported = self.imports.held().map(|(held, _)| held);
        let held = lent.or_else(|| imported.find(|held| held.id == id))?;
        match &held.place.method {
            CopyMethod::Device(memory) => memory.device_access().cloned(),
            CopyMethod::Mapped(_) | CopyMethod::Remote => None,
        }
    }

    /// Begins a write whose remote regions were granted.
    pub(crate) fn start_write(
        &mut self,
        poller: &Poller,
        regions: &Regions,
        id: TransferId,
        plan: Arc<BoundPlan>,
        done: Ticket,
    ) {
        for local in plan.locals() {
            if self.granted.grant(local.id) {
                let access = regions.access(local.id, &local.memory);
                let file = access.is_file().then(|| Arc::clone(&local.memory));
                self.send_with(poller, Message::Lend { id: local.id, access }, file);
            }
        }
        self.writes.start(id, plan, done);
    }

    /// Sends the parts that fit into the window. Appends the writes that have settled.
    pub(crate) fn pump(&mut self, poller: &Poller, settled: &mut Vec<Settlement>) {
        while self.queued() < WINDOW {
            match self.writes.next_part() {
                None => break,
                Some(WriteStep::Settled(one)) => settled.push(one),
                Some(WriteStep::Part(write, plan, part)) => {
                    let into = Described::of(&plan, &part, Side::Remote, |region| {
                        let remote = plan.remote(region);
                        (remote.id, remote.key)
                    });
                    // The target knows lent regions by number, on this connection only, so no key
                    // is sent.
                    let from = Described::of(&plan, &part, Side::Local, |region| {
                        (plan.local(region).id, RegionKey([0; 16]))
                    });
                    self.send(poller, Message::Write { write, into, from });
                }
            }
        }
    }
}
