//! UCX as a fabric of kvx-backend.

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
use crate::ffi::{ArmOutcome, Endpoint, PostOutcome, Worker};
use crate::memory::{Local, MemoryRegistrar, Remote, RemoteKeys};
use crate::peers::{PeerWorker, Peers, lost_link};
use crate::route;

/// The number of kvx's active messages.
const MESSAGE: u32 = 0;
/// The most pieces under way to one peer: those of a stopped one must not keep others waiting.
const WINDOW: usize = 512;
/// The most pieces that are posted in a turn.
const TURN: u32 = 64;
/// The most bytes that are moved within the turn that posts them, if UCX can.
const SMALL: u64 = INLINE_BYTES;
/// The most messages to one peer that UCX has not sent.
const UNSENT: usize = 256;
/// Rounds of progress between two readings of the clock, and how long a turn makes progress.
const ROUNDS: (u32, Duration) = (4, Duration::from_micros(50));
/// Some descriptors of UCX fail to wake: the longest sleep while something is awaited.
const SAFETY: Duration = Duration::from_millis(20);
/// How long the first message to a peer may be on its way. Each side makes its endpoint meanwhile,
/// which costs UCX some 20 ms of a core: where others want that core as well, a multiple of it
/// passes before the peer has anything to answer.
pub(crate) const SETS_UP: Duration = Duration::from_secs(2);
/// How long the end waits for messages that are being sent, and then for operations that were
/// broken off.
const LAST_WAITS: (Duration, Duration) = (Duration::from_millis(40), Duration::from_millis(20));

/// One worker with its endpoints.
pub(crate) struct UcxFabric {
    /// `None` after the end.
    worker: Option<Worker>,
    fds: [RawFd; 1],
    notes: Rc<CallbackNotes>,
    /// By the numbers of their jobs. UCX has their addresses, which must stay while this grows.
    counters: Vec<Rc<PieceCounter>>,
    peers: Peers,
    keys: RemoteKeys,
    /// Events of links that happened outside of progress.
    events: Vec<Event>,
    registrar: Arc<MemoryRegistrar>,
    capabilities: Capabilities,
    /// The user has named tcp, and accepts what its links do to a target.
    tcp: bool,
}

// SAFETY: the machine's lock lets one thread at a time in, which is what UCX's thread mode
// SERIALIZED asks for, and what `Rc` and `Cell` need: every clone of them is in here, or in UCX's
// hands.
unsafe impl Send for UcxFabric {}

impl UcxFabric {
    /// Errors: UCX's, when it delivers no messages.
    pub(crate) fn new(
        worker: Worker,
        own_worker: u64,
        registrar: Arc<MemoryRegistrar>,
        capabilities: Capabilities,
        tcp: bool,
    ) -> Result<UcxFabric> {
        let notes = Rc::new(CallbackNotes::default());
        // SAFETY: the fabric's `notes` is dropped after its worker: `end`, and the order of its
        // fields.
        unsafe { worker.deliver(MESSAGE, std::ptr::NonNull::from(&*notes)) }
            .map_err(|status| error::native("UCX delivers no messages", status))?;
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

    /// Breaks the links to a peer and closes its endpoint.
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

    /// Breaks the links to a peer that has ended, if there is one, before other events are
    /// reported.
    fn break_lost_links(&mut self, at: Option<usize>, why: &'static str, events: &mut Vec<Event>) {
        let Some(at) = at else { return }; // the message breaks nothing, as nearly all do
        self.break_links(at, None, &Error::new(ErrorKind::PeerLost, why).with_backend(NAME));
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

    /// Between processes UCX copies in the progress after the post: has it do so now, which spares
    /// a small transfer another turn. Returns whether so many pieces, all that UCX has, have ended
    /// in as many steps: if something else has made a step as well, somebody must look for what is
    /// to be done next.
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

    /// Reports the endpoints that have failed, and everything else that callbacks noted.
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
        // Links break first, so that what fails with them fails for that reason.
        events.append(&mut self.events);
        for IncomingMessage { from, message } in self.notes.take_messages() {
            if message == FAREWELL {
                let over = self.peers.note_farewell(from);
                self.break_lost_links(over, "the peer's agent was shut down", events);
            } else {
                let over = self.peers.note_message(from);
                self.break_lost_links(
                    over,
                    "the peer has given up this connection and made another",
                    events,
                );
                events.push(Event::Message(message));
            }
        }
        self.notes.take_ended(&self.counters, events);
    }

    /// Sends the messages that wait, ends the operations in flight, and releases everything.
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
            // SAFETY: this thread has the machine, and the endpoint is open.
            // Who does not hear it learns of it later.
            unsafe { post(endpoint, peer, FAREWELL, &self.notes) }.ok();
            let ended = OneShotOperation::start(CallbackEvent::Ended, &self.notes);
            // SAFETY: this thread has the machine, the worker is alive, the endpoint is open.
            match unsafe { endpoint.flush(ended) } {
                PostOutcome::Pending => {}
                // SAFETY: no callback will come.
                PostOutcome::Done | PostOutcome::Failed(_) => unsafe {
                    OneShotOperation::take_back(ended)
                },
            }
        }
        wait(LAST_WAITS.0);
        // SAFETY: this thread has the machine, and the worker is alive.
        unsafe { self.peers.close_all(&self.notes) };
        wait(LAST_WAITS.1);
        self.keys.clear();
        // Nothing is sent, received or served without the worker.
        drop(worker);
        self.notes.take_ended(&self.counters, &mut Vec::new());
        self.registrar.worker_ended();
    }
}

/// Sends a message to a peer over its endpoint.
///
/// # Safety
/// This thread has the machine, and the endpoint is open.
unsafe fn post(
    endpoint: &Endpoint,
    peer: &PeerWorker,
    message: &[u8],
    notes: &Rc<CallbackNotes>,
) -> Result<()> {
    let told =
        CallbackEvent::Sent { frame: peer.header.frame(message), waiting: Rc::clone(&peer.unsent) };
    let once = OneShotOperation::start(told, notes);
    // SAFETY: it was handed over just now, and UCX keeps it until the end.
    let (header, message) = unsafe { OneShotOperation::frame(once) }.split_at(MessageHeader::LEN);
    // SAFETY: the caller's promise; `once` keeps the frame until the end.
    match unsafe { endpoint.send(MESSAGE, header, message, once) } {
        PostOutcome::Pending => {}
        // SAFETY: no callback will come.
        PostOutcome::Done => unsafe { OneShotOperation::take_back(once) },
        PostOutcome::Failed(status) => {
            // SAFETY: no callback will come.
            unsafe { OneShotOperation::take_back(once) };
            return Err(error::native("UCX does not send a message to the peer", status)
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

// SAFETY: UCX touches the memory of a piece until it returns `PostOutcome::Done` or calls back, and
// only then is the piece reported as `Moved`. After `end` there is no worker.
unsafe impl Fabric for UcxFabric {
    type Local = Local;
    type Remote = Remote;
    type State = ();

    fn connect(&mut self, endpoint: EndpointId, _: &Identity, address: &[u8]) -> Result<()> {
        let Some(worker) = &self.worker else { return Err(lost_link()) };
        let address = Address::decode(address)?;
        // SAFETY: this thread has the machine; `end` closes all endpoints; the inbox outlives the
        // worker.
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
        // SAFETY: this thread has the machine, and the endpoint is open.
        unsafe { post(endpoint, peer, message, &self.notes) }.map(|()| SendStatus::Taken)
    }

    fn max_message(&self) -> usize {
        MAX_MESSAGE
    }

    fn unpack(&mut self, endpoint: EndpointId, region: &RemoteSpec<'_>) -> Result<Remote> {
        let Some((endpoint, _)) = self.peers.of(endpoint) else { return Err(lost_link()) };
        // SAFETY: this thread has the machine, and the endpoint is open.
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
            // SAFETY: this thread has the machine, and the endpoint is open. Core checked that the
            // piece lies within its region, which the job keeps until the piece is reported; the
            // tally lives as long as the driver.
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
        // SAFETY: this thread has the machine, and the endpoint is open.
        match unsafe { endpoint.flush(once) } {
            PostOutcome::Pending => return Ok(FlushCompletion::Later),
            // SAFETY: no callback will come.
            PostOutcome::Done => unsafe { OneShotOperation::take_back(once) },
            PostOutcome::Failed(status) => {
                // SAFETY: no callback will come.
                unsafe { OneShotOperation::take_back(once) };
                return Err(error::piece_error(status));
            }
        }
        Ok(FlushCompletion::WithPieces)
    }

    fn sever(&mut self, endpoint: EndpointId) {
        if let Some(at) = self.peers.of_link(endpoint) {
            let why = Error::new(
                ErrorKind::PeerLost,
                "another link to this peer was lost, and they share a connection",
            );
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
        // UCX has chosen protocols meanwhile: they are looked at when there is time.
        self.events.extend(self.peers.take_changed().map(Event::Changed));
        if !self.notes.is_empty() || !self.events.is_empty() {
            return Ok(reactor::Armed::Again);
        }
        let Some(worker) = &self.worker else { return Ok(reactor::Armed::Sleep(None)) };
        match worker.arm() {
            Ok(ArmOutcome::Busy) => Ok(reactor::Armed::Busy),
            Ok(ArmOutcome::Sleep) => Ok(reactor::Armed::Sleep(waiting.then_some(SAFETY))),
            Err(status) => Err(error::native("UCX cannot be slept on", status)),
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
                // SAFETY: this thread has the machine, and the endpoint is open.
                unsafe { route::describe(endpoint, peer.version, &protocols, &self.capabilities) }
            }
            _ => ("not connected".into(), self.capabilities.clone()),
        }
    }

    fn rejection(&mut self, endpoint: EndpointId) -> Option<Error> {
        let (endpoint, _) = self.peers.of(endpoint).filter(|_| !self.tcp)?;
        // SAFETY: this thread has the machine, and the endpoint is open.
        unsafe { route::is_over_tcp(endpoint) }.then(|| {
            let why = "UCX reaches this peer over tcp only, where it ends the target's process when a reader goes away amid its reads: \
                       use the backend TCP, or name tcp in ucx.tls";
            Error::new(ErrorKind::Unsupported, why).with_backend(NAME)
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
