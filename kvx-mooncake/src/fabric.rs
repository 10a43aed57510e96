//! Mooncake's engine as a `Fabric` of kvx-backend: posts batches, and reports the ends of batches
//! and of blocking calls.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_backend::error::{closed, link_lost};
use kvx_backend::fabric::{EndpointId, Event, Fabric, Job, SendStatus, Unregister};
use kvx_backend::reactor::{Armed, Turn};
use kvx_core::backend::{ForeignRange, RemoteSpec};
use kvx_core::{Capabilities, Error, ErrorKind, Identity, RegionId, Result};

use crate::batches::{Batches, FailedBatch, InFlightBatch};
use crate::blocking_calls::{BlockingCalls, CallReport, TAG};
use crate::capabilities::capabilities;
use crate::error;
use crate::ffi::{Engine, EnginePiece};
use crate::frames;
use crate::memory::{Local, RegisteredRanges, Remote};
use crate::peers::{Links, NotificationState, Phase, foreign_text};

/// The maximum number of pieces per batch.
const BATCH_PIECES: usize = 64;
/// The maximum number of bytes per batch, unless a single piece is longer.
const BATCH_BYTES: u64 = 1 << 20;
/// The maximum number of pieces in flight to one peer: far below the capacity of the engine's queue
/// (1,024, and as many that wait for admission).
const PEER_PIECES: usize = 256;
/// The maximum number of bytes in flight to one peer: a small transfer has to wait for them.
const PEER_BYTES: u64 = 8 << 20;
/// The number of batches queried in one turn.
const LOOKED_AT: usize = 64;
/// The shortest interval between queries for notifications.
const LISTENS: Duration = Duration::from_micros(20);
/// The time after an event during which another event is likely.
const BUSY: Duration = Duration::from_millis(20);
/// The sleeps within [`BUSY`] of an event; while pieces are in flight or answers are awaited; and
/// while calls wait for a thread.
const SHORTEST: Duration = Duration::from_micros(60);
const AWAITING: Duration = Duration::from_micros(250);
const SHORT_OF_THREADS: Duration = Duration::from_millis(1);
/// After [`BUSY`], a sleep is 1 / `PART` of the time without events, at most [`LONGEST`]: a wake-up
/// costs about 70 µs of CPU, and the engine wakes no thread.
const PART: u32 = 20;
const LONGEST: Duration = Duration::from_millis(20);
/// The maximum length of a frame of a link.
const MAX_FRAME: usize = 48 << 10;
/// The time that both ends may need to open each other's segment, before which the peer cannot
/// answer: each starts a thread for it and queries the other's engine twice. It takes some
/// milliseconds on an idle machine.
const SETS_UP: Duration = Duration::from_secs(5);

pub(crate) struct MooncakeFabric {
    /// `None` after the end.
    engine: Option<Arc<Engine>>,
    calls: BlockingCalls,
    ranges: Arc<RegisteredRanges>,
    protocol: String,
    fds: [RawFd; 1],
    /// The name by which foreign agents know this one.
    own_name: std::ffi::CString,
    links: Links,
    in_flight: Batches,
    suspects: Vec<FailedBatch>,
    /// Regions that are being unregistered, with the outcome once it is known.
    leaving: HashMap<RegionId, Option<Result<()>>>,
    /// True if a peer was lost, and may have died.
    any_lost: bool,
    /// Notifications that have been taken but not delivered.
    notified: Vec<Event>,
    pieces: Vec<EnginePiece>,
    last_event: Instant,
    /// The time of the next query for notifications.
    listens: Instant,
    /// True if pieces may be in flight that the engine neither accepted nor rejected.
    untracked: bool,
}

impl MooncakeFabric {
    pub(crate) fn new(
        engine: Arc<Engine>,
        calls: BlockingCalls,
        ranges: Arc<RegisteredRanges>,
        protocol: String,
        me: &Identity,
    ) -> Self {
        let name: Vec<u8> = me.name.bytes().filter(|byte| *byte != 0).collect();
        MooncakeFabric {
            engine: Some(engine),
            fds: [calls.reports().fd()],
            calls,
            ranges,
            protocol,
            own_name: std::ffi::CString::new(name).unwrap_or_default(),
            links: Links::default(),
            in_flight: Batches::default(),
            suspects: Vec::new(),
            leaving: HashMap::new(),
            any_lost: false,
            notified: Vec::new(),
            pieces: Vec::new(),
            last_event: Instant::now(),
            listens: Instant::now(),
            untracked: false,
        }
    }

    fn engine(&self) -> Result<Arc<Engine>> {
        self.engine.clone().ok_or_else(closed)
    }

    fn add(&mut self, endpoint: EndpointId, address: &[u8], foreign: bool) -> Result<()> {
        let engine = self.engine()?;
        let to = self.links.add(endpoint, address, foreign)?;
        self.calls.open(&engine, &to, foreign)
    }

    fn poll_batches(&mut self, engine: &Arc<Engine>, now: Instant, events: &mut Vec<Event>) {
        for _ in 0..self.in_flight.len().min(LOOKED_AT) {
            let Some(ended) = self.in_flight.poll_next(engine, now) else { continue };
            let InFlightBatch { batch, job, endpoint, to, lens, bytes, failed, .. } = ended;
            engine.free(batch);
            let pieces = lens.len() as u32;
            if let Some(peer) = self.links.peers.get_mut(&to) {
                peer.pieces -= lens.len();
                peer.bytes -= bytes;
            }
            if self.links.forget_unused(&to) {
                self.calls.leave(&to);
            }
            match failed {
                None => events.push(Event::Completed { job, pieces, result: Ok(()) }),
                Some(failure) => {
                    self.suspect(engine, FailedBatch { job, endpoint, to, pieces, failure }, events)
                }
            }
        }
    }

    /// Finds out whether the peer has ended, before a batch's failure is reported.
    fn suspect(&mut self, engine: &Arc<Engine>, suspect: FailedBatch, events: &mut Vec<Event>) {
        let broken = self
            .links
            .endpoints
            .get(&suspect.endpoint)
            .is_none_or(|there| there.phase == Phase::Broken);
        let peer = self.links.peers.get_mut(&suspect.to);
        match peer.filter(|_| !broken) {
            Some(peer) if peer.probing => self.suspects.push(suspect),
            Some(peer) if self.calls.probe(engine, &suspect.to).is_ok() => {
                peer.probing = true;
                self.suspects.push(suspect);
            }
            _ => events.push(suspect.moved(error::lost(&suspect.to))),
        }
    }

    fn probed(&mut self, to: &Arc<str>, alive: Option<bool>, events: &mut Vec<Event>) {
        if let Some(peer) = self.links.peers.get_mut(to) {
            peer.probing = false;
        }
        let log = self.engine.as_ref().and_then(|engine| engine.log());
        for suspect in self.suspects.extract_if(.., |suspect| suspect.to == *to) {
            let why = match alive {
                Some(false) => error::lost(to),
                _ => suspect.failure.error(alive.is_some(), &log),
            };
            events.push(suspect.moved(why));
        }
        if alive == Some(false) {
            for endpoint in self.links.leading_to(to) {
                self.break_off(endpoint, error::lost(to), events);
            }
            return;
        }
        // The peer's segment may have changed. A peer that does not answer is not queried again,
        // because that takes a minute.
        if let Some(engine) = &self.engine
            && (alive == Some(true) || engine.asks_a_server())
            && let Some(peer) = self.links.peers.get_mut(to)
            && !peer.refreshing
        {
            peer.refreshing = self.calls.open(engine, to, false).is_ok();
        }
    }

    /// Breaks a link. A peer that cannot be reached may still be running.
    fn break_off(&mut self, id: EndpointId, why: Error, events: &mut Vec<Event>) {
        if let Some(endpoint) = self.links.endpoints.get_mut(&id)
            && endpoint.phase != Phase::Broken
        {
            endpoint.phase = Phase::Broken;
            events.push(Event::Broken { endpoint: id, why, gone: false });
        }
    }

    fn take_report(&mut self, report: CallReport, events: &mut Vec<Event>) {
        match report {
            CallReport::Opened { to, result } => {
                if let Some(peer) = self.links.peers.get_mut(&to) {
                    peer.refreshing = false;
                    peer.segment = result.as_ref().ok().copied().or(peer.segment);
                }
                for id in self.links.leading_to(&to) {
                    let Some(endpoint) = self.links.endpoints.get_mut(&id) else {
                        debug_assert!(false, "the endpoint leads to this peer");
                        continue;
                    };
                    match &result {
                        // So that core retries the work that waited for the peer's segment.
                        _ if endpoint.phase == Phase::Open => events.push(Event::Ready(id)),
                        _ if endpoint.phase != Phase::Opening => {}
                        Ok(_) => {
                            endpoint.phase = Phase::Open;
                            if endpoint.foreign {
                                events.push(Event::Ready(id));
                            }
                        }
                        Err(why) => {
                            let why = why.clone().with_kind(ErrorKind::PeerLost);
                            self.break_off(id, why, events);
                        }
                    }
                }
            }
            CallReport::Probed { to, alive } => self.probed(&to, alive, events),
            CallReport::Unsent { endpoint, why } => {
                self.break_off(endpoint, why.with_kind(ErrorKind::PeerLost), events);
            }
            CallReport::ForeignSent { endpoint, result } => {
                if let Some(endpoint) = self.links.endpoints.get_mut(&endpoint) {
                    endpoint.note = NotificationState::Sent(result);
                }
            }
            CallReport::Unregister { region, left, dead } => {
                let proven = dead.or_else(|why| if self.any_lost { Err(why) } else { Ok(()) });
                let ended = left.and_then(|left| match proven {
                    Ok(()) => left.end(),
                    Err(why) => {
                        std::mem::forget(left); // kept for the life of the process
                        Err(why)
                    }
                });
                if let Some(leaving) = self.leaving.get_mut(&region) {
                    *leaving = Some(ended);
                }
            }
        }
    }

    fn take_notifications(&mut self, engine: &Engine) -> usize {
        let notified = &mut self.notified;
        engine.notifications(|name, text| {
            if name != TAG.to_bytes() {
                let from = String::from_utf8_lossy(name).into();
                return notified.push(Event::Notification { from, bytes: text.to_vec() });
            }
            match frames::decode(text) {
                Ok(frames) => notified.extend(frames.into_iter().map(Event::Message)),
                Err(why) => {
                    tracing::debug!(%why, "Mooncake delivered a notification that no kvx agent sends")
                }
            }
        })
    }
}

// SAFETY: only `advance` passes local memory to the engine, and counts each piece. A piece is
// reported when the engine reports its end, after which the engine writes nothing (measured).
// `stop` returns true only when no piece is in flight.
unsafe impl Fabric for MooncakeFabric {
    type Local = Local;
    type Remote = Remote;
    type State = ();

    fn connect(&mut self, endpoint: EndpointId, _peer: &Identity, address: &[u8]) -> Result<()> {
        self.add(endpoint, address, false)
    }

    fn connect_foreign(&mut self, endpoint: EndpointId, blob: &[u8]) -> Result<()> {
        self.add(endpoint, blob.trim_ascii(), true)
    }

    fn setup_time(&self) -> Duration {
        SETS_UP
    }

    /// Handles regions that were added later: over RDMA, their keys are part of the segment's
    /// description.
    fn update(&mut self, endpoint: EndpointId, _address: &[u8]) -> Result<()> {
        let Some(to) = self.links.endpoints.get(&endpoint).map(|endpoint| Arc::clone(&endpoint.to))
        else {
            return Ok(());
        };
        if self.protocol != "tcp"
            && let Some(peer) = self.links.peers.get_mut(&to)
            && !std::mem::replace(&mut peer.refreshing, true)
        {
            let engine = self.engine()?;
            self.calls.open(&engine, &to, false)?;
        }
        Ok(())
    }

    fn send(&mut self, endpoint: EndpointId, message: &[u8]) -> Result<SendStatus> {
        let engine = self.engine()?;
        let Some(to) = self.links.endpoints.get(&endpoint).map(|endpoint| &endpoint.to) else {
            return Err(link_lost());
        };
        Ok(if self.calls.frame(&engine, to, endpoint, message)? {
            SendStatus::Taken
        } else {
            SendStatus::Later
        })
    }

    fn max_message(&self) -> usize {
        MAX_FRAME
    }

    fn unpack(&mut self, _endpoint: EndpointId, region: &RemoteSpec<'_>) -> Result<Remote> {
        Remote::read(region.export)
    }

    fn unpack_foreign(&mut self, _endpoint: EndpointId, range: &ForeignRange) -> Result<Remote> {
        Ok(Remote { address: range.address })
    }

    fn advance(&mut self, job: &mut Job<'_, Self>) -> Result<u64> {
        let engine = self.engine()?;
        let id = job.endpoint();
        let Some(endpoint) =
            self.links.endpoints.get(&id).filter(|there| there.phase != Phase::Broken)
        else {
            return Err(link_lost());
        };
        let to = Arc::clone(&endpoint.to);
        let Some(peer) = self.links.peers.get_mut(&to) else { return Ok(0) };
        let Some(segment) = peer.segment.filter(|_| !peer.refreshing) else {
            return Ok(0); // the segment is not open yet
        };
        let (op, mut bytes) = (job.op(), 0);
        self.pieces.clear();
        while self.pieces.len() < BATCH_PIECES
            && peer.pieces + self.pieces.len() < PEER_PIECES
            && (peer.bytes + bytes < PEER_BYTES && bytes < BATCH_BYTES)
            && let Some(piece) = job.next_piece()
        {
            bytes += piece.len;
            self.pieces.push(EnginePiece {
                op,
                local: job.local_address(&piece),
                segment,
                remote: job.remote(piece.remote_region).address.wrapping_add(piece.remote_offset),
                len: piece.len,
            });
        }
        if self.pieces.is_empty() {
            return Ok(0);
        }
        let count = self.pieces.len();
        // SAFETY: core keeps the local memory until the pieces that are counted here have been
        // reported.
        match unsafe { engine.submit(&self.pieces) } {
            Ok(batch) => {
                job.add_in_flight(count as u32);
                peer.pieces += count;
                peer.bytes += bytes;
                let lens = self.pieces.iter().map(|piece| piece.len).collect();
                self.in_flight.push(InFlightBatch::new(batch, job.id(), id, to, lens));
                Ok(bytes)
            }
            Err(refused) => {
                if !refused.unstarted {
                    // Never reported: the ticket does not settle, and the memory stays in
                    // quarantine.
                    job.add_in_flight(count as u32);
                    self.untracked = true;
                    self.break_off_later(id, refused.why.clone());
                }
                Err(refused.why)
            }
        }
    }

    /// Does not stop the engine's operations, because it cannot cancel: pieces to a stopped peer
    /// end after 30 s each.
    fn sever(&mut self, endpoint: EndpointId) {
        self.any_lost = true;
        // The endpoint was disconnected before.
        let Some(there) = self.links.endpoints.get_mut(&endpoint) else { return };
        there.phase = Phase::Broken;
        let to = Arc::clone(&there.to);
        self.calls.forget(&to, endpoint);
        let why = error::lost(&to);
        let notified = &mut self.notified;
        let told = self.suspects.extract_if(.., |suspect| suspect.endpoint == endpoint);
        notified.extend(told.map(|suspect| suspect.moved(why.clone())));
    }

    fn disconnect(&mut self, endpoint: EndpointId) {
        if let Some(to) = self.links.remove(endpoint) {
            self.calls.leave(&to);
        }
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Turn {
        let Some(engine) = self.engine.clone() else { return Turn::did(0) };
        let (before, now) = (events.len(), Instant::now());
        // A caller that polls a transfer must not keep the engine's lock busy.
        if now >= self.listens {
            self.listens = now + LISTENS;
            self.take_notifications(&engine);
        }
        events.append(&mut self.notified);
        for report in self.calls.reports().take() {
            self.take_report(report, events);
        }
        self.poll_batches(&engine, now, events);
        let count = events.len() - before;
        if count > 0 {
            self.last_event = now;
        }
        // Polling costs more than sleeping when nothing has happened for long.
        let (look_for, look_until) = match self.in_flight.is_empty() {
            false => (Duration::from_micros(100), None),
            true => (Duration::from_micros(20), Some(self.last_event + BUSY)),
        };
        // The engine takes about 30 µs per piece, and reports its end only when queried.
        Turn { look_for, look_until, ends_unannounced: true, ..Turn::did(count) }
    }

    fn arm(&mut self, waiting: bool) -> Result<Armed> {
        if !self.calls.reports().is_empty() || !self.notified.is_empty() {
            return Ok(Armed::Again);
        }
        let short = match &self.engine {
            Some(engine) => self.calls.start_a_thread_if_short(engine)?,
            None => false,
        };
        // The engine wakes no thread, so it is polled, more often when events are expected. While
        // it is active, the interval does not depend on pieces in flight, so a post need not wake
        // this thread to shorten its sleep.
        let quiet = self.last_event.elapsed();
        Ok(Armed::Sleep(Some(match () {
            () if quiet < BUSY => SHORTEST,
            () if waiting || !self.in_flight.is_empty() => AWAITING,
            () if short => SHORT_OF_THREADS,
            () => (quiet / PART).clamp(SHORT_OF_THREADS, LONGEST),
        })))
    }

    fn fds(&self) -> &[RawFd] {
        &self.fds
    }

    fn describe(&mut self, endpoint: EndpointId) -> (String, Capabilities) {
        let to =
            self.links.endpoints.get(&endpoint).map_or("a peer that was lost", |there| &*there.to);
        (format!("Mooncake over {} to {to}", self.protocol), capabilities(&self.protocol))
    }

    fn unregister(&mut self, local: &Local) -> Result<Unregister> {
        match self.leaving.remove(&local.region) {
            Some(Some(ended)) => return ended.map(|()| Unregister::Now),
            Some(None) => {}
            None => self.calls.unregister(&self.engine()?, &self.ranges, local)?,
        }
        self.leaving.insert(local.region, None); // this thread takes the reports
        Ok(Unregister::Later)
    }

    fn stop(&mut self) -> bool {
        self.calls.close();
        let Some(engine) = self.engine.take() else { return true };
        if !self.in_flight.is_empty() || self.untracked {
            // The engine may write to quarantined memory at any time.
            std::mem::forget((engine, Arc::clone(&self.ranges)));
            return false;
        }
        // A thread that waits for a stopped peer holds the engine, which serves peers until that
        // thread returns.
        let ended = Arc::into_inner(engine).is_some() || self.ranges.is_empty();
        if !ended {
            std::mem::forget(Arc::clone(&self.ranges));
        }
        ended
    }

    fn notify_foreign(&mut self, endpoint: EndpointId, bytes: &[u8]) -> Result<SendStatus> {
        let engine = self.engine()?;
        let Some(there) = self.links.endpoints.get_mut(&endpoint) else {
            return Err(link_lost());
        };
        match std::mem::take(&mut there.note) {
            NotificationState::Sent(result) => result.map(|()| SendStatus::Taken),
            NotificationState::Sending => {
                there.note = NotificationState::Sending;
                Ok(SendStatus::Later)
            }
            NotificationState::None => {
                let text = foreign_text(bytes)?;
                if self.calls.foreign(&engine, &there.to, endpoint, self.own_name.clone(), text)? {
                    there.note = NotificationState::Sending;
                }
                Ok(SendStatus::Later)
            }
        }
    }
}

impl MooncakeFabric {
    /// Reports the break to core at the next turn: core holds the job now.
    fn break_off_later(&mut self, id: EndpointId, why: Error) {
        let mut told = Vec::new();
        self.break_off(id, why.with_kind(ErrorKind::PeerLost), &mut told);
        self.notified.append(&mut told);
    }
}
