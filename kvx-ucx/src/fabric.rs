//! UCX as a `Fabric` of kvx-backend.

use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_backend::fabric::{
    EndpointId, Event, Fabric, FlushCompletion, Job, JobId, SendStatus, Unregister,
};
use kvx_backend::reactor::{self, SLICE};
use kvx_core::backend::{INLINE_BYTES, RemoteSpec};
use kvx_core::{Capabilities, Error, ErrorKind, Identity, Result};

use crate::address::Address;
use crate::callbacks::{
    CallbackEvent, CallbackNotes, FAREWELL, IncomingMessage, MAX_MESSAGE, MessageHeader,
    OneShotOperation, PieceCounter,
};
use crate::error::{self, NAME};
use crate::ffi::{self, ArmOutcome, Endpoint, PostOutcome, Worker};
use crate::memory::{Local, MemoryRegistrar, Remote, RemoteKeys};
use crate::peers::{PeerWorker, Peers, lost_link};
use crate::route;

/// The id of kvx's active messages.
const MESSAGE: u32 = 0;
/// The maximum number of pieces in flight to one peer, so that a stopped peer does not delay
/// others.
const WINDOW: usize = 512;
/// The maximum number of pieces posted in a turn.
const TURN: u32 = 64;
/// The maximum number of bytes moved within the turn that posts them, if UCX can.
const SMALL: u64 = INLINE_BYTES;
/// The maximum number of messages to one peer that UCX has not sent.
const UNSENT: usize = 256;
/// Rounds of progress between two readings of the clock, and the time after which a turn ends.
const ROUNDS: (u32, Duration) = (4, Duration::from_micros(50));
/// The longest sleep while events are awaited: some of UCX's descriptors fail to wake.
const SAFETY: Duration = Duration::from_millis(20);
/// The time that the first message to a peer may take. Each side creates its endpoint in that time,
/// which costs UCX about 20 ms of CPU; on a loaded machine a multiple of that passes before the
/// peer can answer.
pub(crate) const SETS_UP: Duration = Duration::from_secs(2);
/// The time that `end` waits for unsent messages, and then for operations that were cancelled.
const LAST_WAITS: (Duration, Duration) = (Duration::from_millis(40), Duration::from_millis(20));

/// A worker with its endpoints.
pub(crate) struct UcxFabric {
    /// `None` after `end`.
    worker: Option<Worker>,
    fds: [RawFd; 1],
    notes: Rc<CallbackNotes>,
    /// Indexed by job number. UCX has their addresses, which must stay the same while this vector
    /// grows.
    counters: Vec<Rc<PieceCounter>>,
    peers: Peers,
    keys: RemoteKeys,
    /// Events of links that occurred outside of `poll`.
    events: Vec<Event>,
    registrar: Arc<MemoryRegistrar>,
    capabilities: Capabilities,
    /// True if the user has named tcp, and so accepts that UCX may abort a target over it.
    tcp: bool,
}

// SAFETY: the machine's lock admits one thread at a time, as UCX's thread mode SERIALIZED requires,
// and `Rc` and `Cell` too: every clone is in this struct, or in UCX.
unsafe impl Send for UcxFabric {}

impl UcxFabric {
    /// Creates the fabric. Errors: UCX's, if it delivers no messages.
    pub(crate) fn new(
        worker: Worker,
        own_worker: u64,
        registrar: Arc<MemoryRegistrar>,
        capabilities: Capabilities,
        tcp: bool,
    ) -> Result<UcxFabric> {
        let notes = Rc::new(CallbackNotes::default());
        // SAFETY: the fabric drops its `notes` after its worker: see `end` and the order of its
        // fields.
        unsafe { worker.deliver(MESSAGE, std::ptr::NonNull::from(&*notes)) }.map_err(|status| {
            error::native("UCX does not accept a handler for kvx's messages", status)
        })?;
        Ok(UcxFabric {
            fds: [worker.descriptor().as_raw_fd()],
            worker: Some(worker),
            notes,
            counters: Vec::new(),
            peers: Peers::new(own_worker),
            keys: RemoteKeys::default(),
            events: Vec::new(),
            registrar,
            capabilities,
            tcp,
        })
    }

    /// Breaks the links to a peer, except `but`, and closes its endpoint.
    fn break_links(&mut self, at: usize, but: Option<EndpointId>, why: &Error) {
        if self.worker.is_none() {
            return;
        }
        // SAFETY: this thread has the machine, and the worker is alive.
        let links = unsafe { self.peers.close(at, &self.notes) };
        let links = links.into_iter().filter(|link| Some(*link) != but);
        self.events.extend(links.map(|endpoint| Event::Broken {
            endpoint,
            why: why.clone(),
            gone: false,
        }));
    }

    /// Breaks the links to the peer at `at`, if any, before other events are reported.
    fn break_lost_links(&mut self, at: Option<usize>, why: &'static str, events: &mut Vec<Event>) {
        let Some(at) = at else { return }; // as for nearly all messages
        self.break_links(at, None, &ErrorKind::PeerLost.because(why).with_backend(NAME));
        events.append(&mut self.events);
    }

    fn progress(&self) -> usize {
        let Some(worker) = &self.worker else { return 0 }; // a turn after the end
        let mut done = 0;
        let mut until = None;
        loop {
            for _ in 0..ROUNDS.0 {
                let now = worker.progress() as usize;
                done += now;
                if now == 0 {
                    return done;
                }
            }
            if Instant::now() >= *until.get_or_insert_with(|| Instant::now() + ROUNDS.1) {
                return done;
            }
        }
    }

    /// Makes progress right after a post: between processes UCX copies there, so a small transfer
    /// needs no other turn. Returns whether all pieces that UCX has ended, in as many steps as
    /// there are `pieces`. If progress made other steps as well, the machine must handle them.
    fn end_now(&self, pieces: usize) -> bool {
        let (Some(worker), true) = (&self.worker, self.notes.pieces() == pieces as isize) else {
            return false;
        };
        let mut steps = 0;
        while self.notes.pieces() > 0 && steps < pieces {
            match worker.progress() as usize {
                0 => return false,
                now => steps += now,
            }
        }
        self.notes.pieces() == 0 && steps == pieces
    }

    /// Reports failed endpoints, and everything else that callbacks have recorded.
    fn take_notes(&mut self, events: &mut Vec<Event>) {
        for (handle, status) in self.notes.take_failed() {
            if let Some(at) = self.peers.of_handle(handle) {
                let why = error::native(
                    "the connection to the peer broke: check whether it still runs",
                    status,
                );
                self.break_links(at, None, &why.with_kind(ErrorKind::PeerLost));
            }
        }
        // Report broken links first, so that their operations fail for that reason.
        events.append(&mut self.events);
        for IncomingMessage { from, message } in self.notes.take_messages() {
            if message == FAREWELL {
                let over = self.peers.note_farewell(from);
                self.break_lost_links(over, "the peer's agent was shut down", events);
            } else {
                let over = self.peers.note_message(from);
                self.break_lost_links(
                    over,
                    "the peer dropped this connection and made another",
                    events,
                );
                events.push(Event::Message(message));
            }
        }
        self.notes.take_ended(&self.counters, events);
    }

    /// Sends the remaining messages, ends the operations in flight, and releases everything.
    fn end(&mut self) {
        let Some(worker) = self.worker.take() else { return }; // stopped before it is dropped
        let wait = |longest: Duration| {
            let until = Instant::now() + longest;
            while !self.notes.is_quiet() && Instant::now() < until {
                if worker.progress() == 0 {
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
        };
        for (endpoint, peer) in self.peers.endpoints() {
            // SAFETY: this thread holds the machine's lock, and the endpoint is open.
            // A peer that does not receive the message detects the end later.
            unsafe { post(endpoint, peer, FAREWELL, &self.notes) }.ok();
            let ended = OneShotOperation::start(CallbackEvent::Ended, &self.notes);
            // SAFETY: this thread holds the machine's lock, the worker is alive, the endpoint is
            // open.
            match unsafe { endpoint.flush(ended) } {
                PostOutcome::Pending => {}
                // SAFETY: no callback follows.
                PostOutcome::Done | PostOutcome::Failed(_) => unsafe {
                    OneShotOperation::take_back(ended)
                },
            }
        }
        wait(LAST_WAITS.0);
        // SAFETY: this thread holds the machine's lock, and the worker is alive.
        unsafe { self.peers.close_all(&self.notes) };
        wait(LAST_WAITS.1);
        self.keys.clear();
        // Without the worker, UCX sends, receives and serves nothing.
        drop(worker);
        self.notes.take_ended(&self.counters, &mut Vec::new());
        self.registrar.worker_ended();
    }
}

/// Sends a message to a peer over its endpoint.
///
/// # Safety
/// This thread holds the machine's lock, and the endpoint is open.
unsafe fn post(
    endpoint: &Endpoint,
    peer: &PeerWorker,
    message: &[u8],
    notes: &Rc<CallbackNotes>,
) -> Result<()> {
    let told =
        CallbackEvent::Sent { frame: peer.header.frame(message), waiting: Rc::clone(&peer.unsent) };
    let once = OneShotOperation::start(told, notes);
    // SAFETY: `start` has just returned it, and only the callback or a `take_back` below frees it.
    let (header, message) = unsafe { OneShotOperation::frame(once) }.split_at(MessageHeader::LEN);
    // SAFETY: guaranteed by the caller; `once` owns the frame until the operation ends.
    match unsafe { endpoint.send(MESSAGE, header, message, once) } {
        PostOutcome::Pending => {}
        // SAFETY: no callback follows.
        PostOutcome::Done => unsafe { OneShotOperation::take_back(once) },
        PostOutcome::Failed(status) => {
            // SAFETY: no callback follows.
            unsafe { OneShotOperation::take_back(once) };
            return Err(error::native("UCX could not send a message to the peer", status)
                .with_kind(ErrorKind::PeerLost));
        }
    }
    Ok(())
}

impl Drop for UcxFabric {
    fn drop(&mut self) {
        self.end();
    }
}

// SAFETY: UCX accesses a piece's memory until it returns `PostOutcome::Done` or calls back, and
// only then does the fabric report the piece as `Moved`. After `end` there is no worker.
unsafe impl Fabric for UcxFabric {
    type Local = Local;
    type Remote = Remote;
    type State = ();

    fn connect(&mut self, endpoint: EndpointId, _: &Identity, address: &[u8]) -> Result<()> {
        let Some(worker) = &self.worker else { return Err(lost_link()) };
        let address = Address::decode(address)?;
        if let Some(library) = ffi::LIBRARY.opened() {
            address.check_keys(library.version())?;
        }
        // SAFETY: this thread holds the machine's lock; `end` closes all endpoints; the notes
        // outlive the worker.
        unsafe { self.peers.connect(endpoint, address, worker, &self.notes) }
    }

    fn setup_time(&self) -> Duration {
        SETS_UP
    }

    fn send(&mut self, endpoint: EndpointId, message: &[u8]) -> Result<SendStatus> {
        let Some((endpoint, peer)) = self.peers.of(endpoint) else { return Err(lost_link()) };
        if peer.unsent.get() >= UNSENT {
            return Ok(SendStatus::Later);
        }
        // SAFETY: this thread holds the machine's lock, and the endpoint is open.
        unsafe { post(endpoint, peer, message, &self.notes) }.map(|()| SendStatus::Taken)
    }

    fn max_message(&self) -> usize {
        MAX_MESSAGE
    }

    fn unpack(&mut self, endpoint: EndpointId, region: &RemoteSpec<'_>) -> Result<Remote> {
        let Some((endpoint, _)) = self.peers.of(endpoint) else { return Err(lost_link()) };
        // SAFETY: this thread holds the machine's lock, and the endpoint is open.
        unsafe { self.keys.unpack(endpoint, region) }
    }

    fn advance(&mut self, job: &mut Job<'_, Self>) -> Result<u64> {
        let Some((endpoint, peer)) = self.peers.of(job.endpoint()) else { return Err(lost_link()) };
        let (number, op, is_first) = (job.id().number(), job.op(), !peer.has_moved_by(job.op()));
        for next in self.counters.len()..=number {
            self.counters.push(PieceCounter::new(JobId::from_number(next), &self.notes));
        }
        let counter = &self.counters[number];
        let room = TURN.min(WINDOW.saturating_sub(peer.pieces.get()) as u32);
        let (mut bytes, mut pending, mut done, mut failed) = (0, 0, 0, None);
        while bytes < SLICE
            && pending + done < room
            && let Some(piece) = job.next_piece()
        {
            let memory = Some(job.local(piece.local_region).handle());
            let local = job.local_address(&piece) as *mut u8;
            let remote = job.remote(piece.remote_region);
            let (key, at) = (self.keys.of(remote), remote.base + piece.remote_offset);
            let len = piece.len as usize;
            // SAFETY: this thread holds the machine's lock, and the endpoint is open. Core checked
            // that the piece lies within its region, which the job keeps until the piece is
            // reported; the counter lives as long as the fabric.
            let posted =
                unsafe { endpoint.transfer(op, (local, len), memory, (at, key), counter.target()) };
            match posted {
                PostOutcome::Pending => pending += 1,
                PostOutcome::Done => done += 1,
                PostOutcome::Failed(status) => {
                    failed = Some(error::piece_error(status));
                    break;
                }
            }
            bytes += piece.len;
        }
        counter.posted(&peer.pieces, pending, done);
        let pieces = pending + done;
        if let Some(error) = failed {
            job.add_in_flight(pieces);
            return Err(error);
        }
        let small = bytes <= SMALL && pieces < TURN;
        let ended = small && self.end_now(pending as usize) && counter.take_back(pieces);
        job.add_in_flight(if ended { 0 } else { pieces });
        if is_first {
            self.peers.note_moved(job.endpoint(), op);
        }
        Ok(bytes)
    }

    fn flush(&mut self, endpoint: EndpointId, job: JobId) -> Result<FlushCompletion> {
        let Some((endpoint, _)) = self.peers.of(endpoint) else {
            return Ok(FlushCompletion::WithPieces);
        };
        let once = OneShotOperation::start(CallbackEvent::Flushed(job), &self.notes);
        // SAFETY: this thread holds the machine's lock, and the endpoint is open.
        match unsafe { endpoint.flush(once) } {
            PostOutcome::Pending => return Ok(FlushCompletion::Later),
            // SAFETY: no callback follows.
            PostOutcome::Done => unsafe { OneShotOperation::take_back(once) },
            PostOutcome::Failed(status) => {
                // SAFETY: no callback follows.
                unsafe { OneShotOperation::take_back(once) };
                return Err(error::piece_error(status));
            }
        }
        Ok(FlushCompletion::WithPieces)
    }

    fn sever(&mut self, endpoint: EndpointId) {
        if let Some(at) = self.peers.of_link(endpoint) {
            let why = ErrorKind::PeerLost
                .because("another link to this peer was lost, and they share a connection");
            self.break_links(at, Some(endpoint), &why.with_backend(NAME));
        }
    }

    fn disconnect(&mut self, endpoint: EndpointId) {
        self.keys.drop_unused();
        self.peers.disconnect(endpoint);
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> reactor::Turn {
        let done = self.progress();
        self.take_notes(events);
        reactor::Turn::did(done)
    }

    fn arm(&mut self, waiting: bool) -> Result<reactor::Armed> {
        // UCX has chosen protocols since: the machine reads them when it is idle.
        self.events.extend(self.peers.take_changed().map(Event::Changed));
        if !self.notes.is_empty() || !self.events.is_empty() {
            return Ok(reactor::Armed::Again);
        }
        let Some(worker) = &self.worker else { return Ok(reactor::Armed::Sleep(None)) };
        match worker.arm() {
            Ok(ArmOutcome::Busy) => Ok(reactor::Armed::Busy),
            Ok(ArmOutcome::Sleep) => Ok(reactor::Armed::Sleep(waiting.then_some(SAFETY))),
            Err(status) => Err(error::native("UCX does not arm its wake-up descriptor", status)),
        }
    }

    fn fds(&self) -> &[RawFd] {
        &self.fds
    }

    fn describe(&mut self, endpoint: EndpointId) -> (String, Capabilities) {
        match (self.peers.of(endpoint), &self.worker) {
            (Some((endpoint, peer)), Some(worker)) => {
                let protocols =
                    if peer.has_moved() { worker.printed_with_protocols() } else { String::new() };
                // SAFETY: this thread holds the machine's lock, and the endpoint is open.
                unsafe { route::describe(endpoint, peer.version, &protocols, &self.capabilities) }
            }
            _ => ("not connected".into(), self.capabilities.clone()),
        }
    }

    fn rejection(&mut self, endpoint: EndpointId) -> Option<Error> {
        let (endpoint, _) = self.peers.of(endpoint).filter(|_| !self.tcp)?;
        // SAFETY: this thread holds the machine's lock, and the endpoint is open.
        unsafe { route::is_over_tcp(endpoint) }.then(|| {
            let why = "UCX reaches this peer over tcp only, and aborts the target's process if this peer's agent ends during a read: \
                       use the backend TCP, or name tcp in ucx.tls";
            ErrorKind::Unsupported.because(why).with_backend(NAME)
        })
    }

    fn unregister(&mut self, local: &Local) -> Result<Unregister> {
        local.unmap().map(|()| Unregister::Now)
    }

    fn stop(&mut self) -> bool {
        self.end();
        true
    }
}
