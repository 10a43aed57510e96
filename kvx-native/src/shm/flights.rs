//! Copies that the machine does not make itself: reads and pulls with memory on either side that is a device's, or that
//! is no pool of kvx's, for which there are [threads](super::copying).
//!
//! A flight is such a read or pull, moved in batches: its turns start them, and each that has landed makes room for
//! the next. While one is under way the device or the thread may touch the memory of both sides, so whatever ends a
//! flight early only stops it: what waits for its memory (a ticket, an answer, a region that is taken back) waits until
//! the last batch has landed. A batch whose ticket the device loses never lands.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use kvx_backend::control::HeldBytes;
use kvx_backend::reactor::Outbox;
use kvx_core::memory::{Direction, Hop, Piece as Line};
use kvx_core::sync::{Mutex, MutexGuard};
use kvx_core::{
    DeviceAccess, Error, ErrorKind, Identity, Memory, RegionId, Result, Ticket, TransferId,
};

use super::connection::HeldBytesOwner;
use super::copy::{CopyPiece, Stopped};
use super::copying::{self, Batch, Copying, Sides};
use super::error::error;
use super::granting::forget;
use super::host::PeerProcess;
use super::memory::{CopyMethod, CopySource};
use super::progress::{Command, Machine, Work};
use super::transport::Opened;

/// Bytes of a batch between a device and the host, about: what other transfers wait for.
const COPY_BATCH: u64 = 4 << 20;
/// The same within devices, which are some thirty times as fast: a batch takes longer than it takes to ask for one.
const HOP_BATCH: u64 = 64 << 20;
/// The same of a thread: so long the small copies of other transfers wait.
const THREAD_BATCH: u64 = 1 << 20;
/// The most pieces of a batch.
const MAX_PIECES: usize = 8192;
/// Batches of one flight that are under way: the device always has the next.
const DEPTH: usize = 4;

/// The way to the machine from the thread of a device, or one that copies.
#[derive(Default)]
pub(crate) struct ReactorHandle(OnceLock<Weak<Opened>>);

impl ReactorHandle {
    pub(crate) fn is(&self, opened: &Arc<Opened>) {
        self.0.set(Arc::downgrade(opened)).ok(); // once, when the transport opens
    }

    fn landed(&self, number: u64) {
        if let Some(opened) = self.0.get().and_then(Weak::upgrade) {
            opened.reactor.submit(Command::Landed { number });
        }
    }

    /// The same, from a thread of ours, which saves the reactor's a wake-up.
    fn landed_and_turn(&self, number: u64) {
        if let Some(opened) = self.0.get().and_then(Weak::upgrade) {
            opened.reactor.submit_and_turn(Command::Landed { number });
        }
    }
}

/// What a flight is for.
pub(crate) enum FlightPurpose {
    /// A read of ours, and whom to tell.
    Read { id: TransferId, done: Option<Ticket> },
    /// A part of the peer's write, if it waits for the answer, our regions that it goes to, and what keeping it takes.
    Pull { write: Option<u64>, into: Vec<RegionId>, cost: usize },
}

/// Who moves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mover {
    Device,
    Thread,
}

/// What a flight moves, and from where to where.
pub(crate) struct Load {
    pub(crate) mover: Mover,
    pub(crate) pieces: Box<dyn Iterator<Item = CopyPiece> + Send>,
    pub(crate) sides: Arc<Sides>,
    /// Regions of the peer that the places lie in.
    pub(crate) from: Vec<RegionId>,
    pub(crate) bytes: u64,
}

impl Load {
    /// Who has to move it; `None`: the machine, as all of it is there. One kind of memory a side: the first tells
    /// whether a device has it.
    pub(crate) fn mover<'a>(
        places: &[CopySource],
        mut targets: impl Iterator<Item = &'a Arc<Memory>> + Clone,
    ) -> Option<Mover> {
        if matches!(places.first(), Some(CopySource { how: CopyMethod::Device(_), .. }))
            || targets.clone().next().is_some_and(|target| !target.kind().is_host())
        {
            return Some(Mover::Device);
        }
        let all_there = places.iter().all(|place| matches!(place.how, CopyMethod::Mapped(_)))
            && targets.all(|target| target.shared_file().is_some());
        (!all_there).then_some(Mover::Thread)
    }
}

/// What devices and threads have said of batches.
#[derive(Default)]
struct BatchEnds {
    landed: Vec<(u64, Result<(), Stopped>)>,
    lost: bool,
}

/// Who moves a batch, and which way.
enum Way {
    Hop(Arc<dyn DeviceAccess>),
    Copy(Arc<dyn DeviceAccess>, Direction),
    /// None does.
    Thread {
        mapped: bool,
    },
}

impl Way {
    fn of(mover: Mover, place: &CopySource, target: &Memory) -> Result<Self> {
        match (&place.how, target.device_access()) {
            (CopyMethod::Mapped(_), None) if mover == Mover::Thread => {
                Ok(Way::Thread { mapped: true })
            }
            (CopyMethod::There, None) if mover == Mover::Thread => {
                Ok(Way::Thread { mapped: false })
            }
            (CopyMethod::Device(from), Some(_)) => access(from).map(Way::Hop),
            (CopyMethod::Device(from), None) => {
                access(from).map(|access| Way::Copy(access, Direction::ToHost))
            }
            (CopyMethod::Mapped(_), Some(into)) => {
                Ok(Way::Copy(Arc::clone(into), Direction::ToDevice))
            }
            (CopyMethod::There, Some(_)) => Err(error(
                ErrorKind::Unsupported,
                "no device reaches host memory of another process that is no kvx pool: use Memory::pool, or TCP",
            )),
            (CopyMethod::Mapped(_) | CopyMethod::There, None) => Err(error(
                ErrorKind::Unsupported,
                "a plan that mixes device memory with host memory: split it",
            )),
        }
    }

    /// Bytes of a batch, about.
    fn batch(&self) -> u64 {
        match self {
            Way::Hop(_) => HOP_BATCH,
            Way::Copy(..) => COPY_BATCH,
            Way::Thread { .. } => THREAD_BATCH,
        }
    }

    fn is(&self, other: &Way) -> bool {
        match (self, other) {
            (Way::Hop(one), Way::Hop(other)) => Arc::ptr_eq(one, other),
            (Way::Copy(one, way), Way::Copy(other, other_way)) => {
                way == other_way && Arc::ptr_eq(one, other)
            }
            (Way::Thread { mapped: one }, Way::Thread { mapped: other }) => one == other,
            _ => false,
        }
    }
}

fn access(memory: &Memory) -> Result<Arc<dyn DeviceAccess>> {
    let access = memory.device_access().cloned();
    access.ok_or_else(|| {
        error(ErrorKind::Unsupported, "a device opened a peer's memory as host memory")
    })
}

/// See the module.
pub(crate) struct Flight {
    /// The connection whose peer's memory is read; `None`: it is gone.
    pub(crate) at: Option<usize>,
    /// Once that is gone: whose memory it counts as, and how much is counted.
    counted: Option<(HeldBytesOwner, usize)>,
    peer: Option<Identity>,
    process: Arc<PeerProcess>,
    pub(crate) errand: FlightPurpose,
    load: Load,
    /// A piece that did not go with the batch before it.
    next: Option<CopyPiece>,
    /// Bytes that are in no batch yet.
    left: u64,
    moved: u64,
    told: Arc<Mutex<BatchEnds>>,
    under_way: usize,
    queued: bool,
    /// What it ends with if not with success; no further batch is started.
    failed: Option<Error>,
    /// A batch was lost: it never ends.
    lost: bool,
}

impl Flight {
    /// Whether it reads the peer's region of this number.
    pub(crate) fn reads(&self, at: usize, id: RegionId) -> bool {
        self.at == Some(at) && self.load.from.contains(&id)
    }

    /// Regions of ours that it writes to for a peer.
    pub(crate) fn ours(&self) -> &[RegionId] {
        match &self.errand {
            FlightPurpose::Read { .. } => &[],
            FlightPurpose::Pull { into, .. } => into,
        }
    }

    /// Its connection is gone: what keeping it takes is counted for itself.
    pub(crate) fn outlives(
        &mut self,
        whose: Option<HeldBytesOwner>,
        held: &mut HeldBytes<HeldBytesOwner>,
    ) {
        self.at = None;
        if let (FlightPurpose::Pull { cost, .. }, Some(whose)) = (&self.errand, whose) {
            let mut counted = 0;
            held.note_all(&whose, &mut counted, *cost).ok(); // too much is seen with the peer's next connection
            self.counted = Some((whose, counted));
        }
    }

    fn told(&self) -> MutexGuard<'_, BatchEnds> {
        self.told.lock()
    }

    /// The next batch: pieces that one device moves one way. Errors: a piece that none can move.
    fn batch(&mut self) -> Result<Option<(Way, Vec<Hop>, u64)>> {
        let (mut hops, mut bytes, mut way): (Vec<Hop>, u64, Option<Way>) = (Vec::new(), 0, None);
        while way.as_ref().is_none_or(|way| bytes < way.batch())
            && hops.len() < MAX_PIECES
            && let Some(piece) = self.next.take().or_else(|| self.load.pieces.next())
        {
            let (place, target) = (
                &self.load.sides.places[piece.from as usize],
                &self.load.sides.targets[piece.into as usize],
            );
            let its = Way::of(self.load.mover, place, target)?;
            if way.as_ref().is_some_and(|way| !way.is(&its)) {
                self.next = Some(piece);
                break;
            }
            way.get_or_insert(its);
            let (from, to) = (place.base + piece.from_offset, target.address() + piece.into_offset);
            hops.push(Hop { from, to, len: piece.len as usize });
            bytes += piece.len;
        }
        Ok(way.map(|way| (way, hops, bytes)))
    }

    /// Starts the next batch. Says how many bytes it has. Errors: as `batch`, and `Exhausted` without a thread for it.
    fn start(
        &mut self,
        number: u64,
        home: &Arc<ReactorHandle>,
        copying: &mut Copying,
    ) -> Result<u64> {
        let Some((way, hops, bytes)) = self.batch()? else {
            self.left = 0;
            return Ok(0);
        };
        let (told, home) = (Arc::clone(&self.told), Arc::clone(home));
        let landing = BatchCompletion { told, home, number, bytes: Some(bytes) };
        let done = |landing: BatchCompletion| {
            Ticket::new(move |result| landing.tell(result.map_err(Stopped::Failed)))
        };
        match way {
            Way::Thread { mapped } => {
                let (process, sides) = (Arc::clone(&self.process), Arc::clone(&self.load.sides));
                let peer = self.peer.clone();
                let batch = Batch { number, peer, process, mapped, hops, bytes, sides, landing };
                // SAFETY: as below; what its sides do not keep is our memory in a read, which the ticket does.
                unsafe { copying.take(batch) }?;
            }
            // SAFETY: core and the grants (`checked`, for a pull) have held all pieces against the lengths of their
            // regions; the flight keeps both sides until the batch has landed, and for ever if it never does.
            Way::Hop(access) => unsafe { access.hop(&hops, done(landing)) },
            Way::Copy(access, direction) => {
                let line = |hop: &Hop| match direction {
                    Direction::ToHost => {
                        Line { device: hop.from, host: hop.to as *mut u8, len: hop.len }
                    }
                    Direction::ToDevice => {
                        Line { device: hop.to, host: hop.from as *mut u8, len: hop.len }
                    }
                };
                let lines: Vec<Line> = hops.iter().map(line).collect();
                // SAFETY: as above; what is mapped here is only read.
                unsafe { access.copy(direction, &lines, done(landing)) };
            }
        }
        self.under_way += 1;
        self.left = self.left.saturating_sub(bytes);
        Ok(bytes)
    }
}

/// Tells the machine of a batch.
pub(crate) struct BatchCompletion {
    told: Arc<Mutex<BatchEnds>>,
    home: Arc<ReactorHandle>,
    number: u64,
    /// `None`: told.
    bytes: Option<u64>,
}

impl BatchCompletion {
    fn told(&self) -> MutexGuard<'_, BatchEnds> {
        self.told.lock()
    }

    /// It was not begun, and the machine knows.
    pub(crate) fn withdraw(mut self) {
        self.bytes = None;
    }

    fn tell(mut self, result: Result<(), Stopped>) {
        self.put(result);
        self.home.landed(self.number);
    }

    /// From a thread of ours.
    pub(crate) fn tell_and_turn(mut self, result: Result<(), Stopped>) {
        self.put(result);
        self.home.landed_and_turn(self.number);
    }

    /// Another of the flight follows at once, and is told of.
    pub(crate) fn note(mut self, result: Result<(), Stopped>) {
        self.put(result);
    }

    fn put(&mut self, result: Result<(), Stopped>) {
        if let Some(bytes) = self.bytes.take() {
            self.told().landed.push((bytes, result));
        }
    }
}

impl Drop for BatchCompletion {
    fn drop(&mut self) {
        if self.bytes.is_some() {
            self.told().lost = true;
            self.home.landed(self.number);
        }
    }
}

/// All flights of a machine, by number.
#[derive(Default)]
pub(crate) struct Flights {
    open: HashMap<u64, Flight>,
    next: u64,
    pub(crate) home: Arc<ReactorHandle>,
}

impl Flights {
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Flight> {
        self.open.values_mut()
    }

    /// Flights of which something has landed that the machine has not heard of: nobody tells one without a reactor.
    #[cfg(test)]
    pub(crate) fn landed(&self) -> Vec<u64> {
        let has_landed = |flight: &Flight| {
            let told = flight.told();
            !told.landed.is_empty() || told.lost && !flight.lost
        };
        self.open
            .iter()
            .filter(|(_, flight)| has_landed(flight))
            .map(|(number, _)| *number)
            .collect()
    }

    /// Whether any is under way.
    #[cfg(test)]
    pub(crate) fn any(&self) -> bool {
        !self.open.is_empty()
    }

    /// Whether something of a peer's is being read over this connection.
    pub(crate) fn any_at(&self, at: usize) -> bool {
        self.open.values().any(|flight| flight.at == Some(at))
    }

    /// Whether the peer's region of this number is being read.
    pub(crate) fn any_reads(&self, at: usize, id: RegionId) -> bool {
        self.open.values().any(|flight| flight.reads(at, id))
    }

    /// Whether our region of this number is being written to for a peer.
    pub(crate) fn any_writes(&self, id: RegionId) -> bool {
        self.open.values().any(|flight| flight.ours().contains(&id))
    }

    /// Whether a device may write to our region of this number for ever.
    pub(crate) fn has_lost(&self, id: RegionId) -> bool {
        self.open.values().any(|flight| flight.lost && flight.ours().contains(&id))
    }

    /// Those of which the machine has not heard what became of their batches: it ends, and waits for them.
    pub(crate) fn under_way(&self) -> Vec<u64> {
        self.of(|flight| !flight.lost)
    }

    fn of(&self, which: impl Fn(&Flight) -> bool) -> Vec<u64> {
        self.open.iter().filter(|(_, flight)| which(flight)).map(|(number, _)| *number).collect()
    }

    /// What devices may touch for ever, as far as anybody will know: it is never freed. Our regions among it.
    pub(crate) fn keep_for_ever(&mut self) -> Vec<RegionId> {
        let mut kept = Vec::new();
        for (_, mut flight) in self.open.drain() {
            kept.extend_from_slice(flight.ours());
            if let FlightPurpose::Read { done, .. } = &mut flight.errand {
                drop(done.take());
            }
            std::mem::forget(flight);
        }
        kept
    }
}

impl Machine {
    /// Takes a read or a pull that a device or a thread has to move. Gives its number.
    pub(crate) fn take_off(&mut self, at: usize, errand: FlightPurpose, load: Load) -> u64 {
        let number = self.flights.next;
        self.flights.next += 1;
        let flight = Flight {
            at: Some(at),
            counted: None,
            peer: self.connections[at].peer.clone(),
            process: Arc::clone(&self.connections[at].process),
            errand,
            left: load.bytes,
            load,
            next: None,
            moved: 0,
            told: Arc::default(),
            under_way: 0,
            queued: false,
            failed: None,
            lost: false,
        };
        self.flights.open.insert(number, flight);
        self.queue_flight(number);
        number
    }

    fn queue_flight(&mut self, number: u64) {
        let Some(flight) = self.flights.open.get_mut(&number) else { return };
        let has_more = flight.failed.is_none() && flight.left > 0;
        if has_more && !flight.queued && flight.under_way < DEPTH {
            flight.queued = true;
            self.turns.push(Work::Flight(number), flight.left);
        }
    }

    /// Starts a batch. Says how many bytes it has.
    pub(crate) fn flight_turn(&mut self, number: u64, out: &mut Outbox) -> u64 {
        let Some(flight) = self.flights.open.get_mut(&number) else { return 0 };
        flight.queued = false;
        if flight.failed.is_some() || flight.left == 0 {
            return 0;
        }
        let started =
            flight.start(number, &self.flights.home, &mut self.copying).unwrap_or_else(|why| {
                flight.failed = Some(why);
                0
            });
        if flight.load.mover == Mover::Thread {
            self.look_by(Instant::now() + copying::STUCK);
        }
        self.queue_flight(number);
        self.end_flight(number, out);
        started
    }

    /// Batches of a flight have landed.
    pub(crate) fn landed(&mut self, number: u64, out: &mut Outbox) {
        let Some(flight) = self.flights.open.get_mut(&number) else { return };
        let (landed, lost) = {
            let mut told = flight.told();
            (std::mem::take(&mut told.landed), told.lost)
        };
        let mut gone = false;
        for (bytes, result) in landed {
            flight.under_way -= 1;
            match result {
                Ok(()) => flight.moved += bytes,
                Err(Stopped::OwnerGone) => gone = true,
                Err(Stopped::Failed(why)) => {
                    flight.failed.get_or_insert(why);
                }
            }
        }
        if lost && !std::mem::replace(&mut flight.lost, true) {
            return self.lose_flight(number);
        }
        if let Some(at) = flight.at
            && flight.failed.is_none()
            && (gone || !self.connections[at].peer_lives())
        {
            // What was copied last does not count: it ends with the connection, and for the same reason.
            self.other_end_gone(at, out);
        }
        self.queue_flight(number);
        self.end_flight(number, out);
    }

    /// A device has lost a batch: it may touch both sides for ever.
    fn lose_flight(&mut self, number: u64) {
        let Some(flight) = self.flights.open.get_mut(&number) else { return };
        let forgotten = error(
            ErrorKind::Forgotten,
            "a device, or a thread of kvx's, lost a copy: the memory on both sides is quarantined; report this as a \
             bug of its crate",
        );
        tracing::error!(error = %forgotten, "SHM: a transfer never ends");
        flight.failed.get_or_insert(forgotten);
        if let FlightPurpose::Read { done, .. } = &mut flight.errand {
            drop(done.take());
        }
        let into = flight.ours().to_vec();
        for (region, done) in self.recalls.give_up(|id| into.contains(&id)) {
            forget(region, done);
        }
    }

    /// Starts no more batches of these flights. Those of which none is under way end at once.
    pub(crate) fn stop_flights(
        &mut self,
        which: impl Fn(&Flight) -> bool,
        why: &Error,
        out: &mut Outbox,
    ) {
        for number in self.flights.of(which) {
            if let Some(flight) = self.flights.open.get_mut(&number) {
                flight.failed.get_or_insert_with(|| why.clone());
                if flight.load.mover == Mover::Thread {
                    flight.under_way -= self.copying.withdraw(number);
                }
            }
            self.end_flight(number, out);
        }
    }

    /// Looks after the copying threads: one that is stuck is replaced.
    pub(crate) fn look_at_copies(&mut self, now: Instant) {
        let (hung, again) = self.copying.look(now);
        let hung: Vec<_> = hung.iter().filter_map(|number| self.flights.open.get(number)).collect();
        if !hung.is_empty() {
            self.hung.log(|| {
                for flight in hung {
                    let (peer, theirs, ours) = (&flight.peer, &flight.load.from, flight.ours());
                    tracing::warn!(
                        ?peer,
                        ?theirs,
                        ?ours,
                        "SHM: a copy waits for a page that does not come (userfaultfd, a file whose server hangs): \
                         its regions, and what goes on with this peer, wait with it"
                    );
                }
            });
        }
        if let Some(again) = again {
            self.look_by(again);
        }
    }

    /// Ends a flight if nothing of it is under way and nothing more will be.
    fn end_flight(&mut self, number: u64, out: &mut Outbox) {
        let Some(flight) = self.flights.open.get(&number) else { return };
        if flight.under_way > 0 || flight.failed.is_none() && flight.left > 0 {
            return;
        }
        let Some(Flight { at, counted, errand, load, moved, failed, .. }) =
            self.flights.open.remove(&number)
        else {
            return;
        };
        if let Some((whose, mut counted)) = counted {
            self.held.note_all(&whose, &mut counted, 0).ok(); // it has less
        }
        drop(load); // the plan, and what was opened of the peer's
        // "Unsupported" would say that nothing has moved.
        let result = match failed {
            None => Ok(()),
            Some(why) if moved > 0 && why.kind() == ErrorKind::Unsupported => {
                Err(why.with_kind(ErrorKind::Native))
            }
            Some(why) => Err(why),
        };
        match errand {
            FlightPurpose::Read { done, .. } => {
                if let Some(done) = done {
                    out.settle(done, result);
                }
            }
            FlightPurpose::Pull { write, cost, .. } => {
                if let Some(at) = at {
                    self.forget_pull(at, cost);
                    if let Some(write) = write {
                        self.answer(at, write, result);
                    }
                }
                self.settle_recalls(out);
            }
        }
        if let Some(at) = at {
            self.release_landed(at, out);
        }
    }
}
