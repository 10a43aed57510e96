//! Copies that the machine does not make itself: reads and pulls with memory of a device, or memory
//! outside of kvx pools, on either side. [Threads](super::copy_threads) copy the latter.
//!
//! A flight is such a read or pull, moved in batches: its turns start them, and the end of each
//! starts the next. While a batch is in progress the device or thread may touch the memory of both
//! sides, so ending a flight early only stops it: a ticket, an answer or a revocation that depends
//! on its memory waits until the last batch has landed. A batch whose ticket the device loses never
//! lands.

use std::collections::HashMap;
use std::sync::Arc;

use kvx_backend::control::HeldBytes;
use kvx_core::backend::sync::Mutex;
use kvx_core::backend::{Direction, Hop, Piece as Line, Ticket};
use kvx_core::{DeviceAccess, Error, ErrorKind, Identity, Memory, RegionId, Result, TransferId};

use super::completion::{BatchCompletion, BatchEnds, ReactorHandle};
use super::connection::HeldBytesOwner;
use super::copy::{CopyError, CopyPiece};
use super::copy_threads::{Batch, CopyThreads, Sides};
use super::error::error;
use super::host::PeerProcess;
use super::memory::{CopyMethod, CopySource};

/// The approximate bytes of a batch between a device and the host, for which other transfers wait.
const COPY_BATCH: u64 = 4 << 20;
/// The approximate bytes of a batch within devices, which are some thirty times as fast; the batch
/// must take longer than its request.
const HOP_BATCH: u64 = 64 << 20;
/// The bytes of a thread's batch, for which the small copies of other transfers wait.
const THREAD_BATCH: u64 = 1 << 20;
/// The limit for pieces of a batch.
const MAX_PIECES: usize = 8192;
/// The number of batches of one flight in progress, so that the device always has the next.
pub(crate) const DEPTH: usize = 4;

/// The purpose of a flight.
pub(crate) enum FlightPurpose {
    /// A local read, and its ticket.
    Read { id: TransferId, done: Option<Ticket> },
    /// A part of a peer's write: its number if the peer waits for the answer, the local regions
    /// that it writes, and the memory that keeping it takes.
    Pull { write: Option<u64>, into: Vec<RegionId>, cost: usize },
}

/// The mover of a flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mover {
    Device,
    Thread,
}

/// The copies of a flight.
pub(crate) struct Load {
    pub(crate) mover: Mover,
    pub(crate) pieces: Box<dyn Iterator<Item = CopyPiece> + Send>,
    pub(crate) sides: Arc<Sides>,
    /// The peer's regions in which the places lie.
    pub(crate) from: Vec<RegionId>,
    pub(crate) bytes: u64,
}

impl Load {
    /// Returns the mover that is required; `None` for the machine, which reaches all of the memory.
    /// Each side has one kind of memory, so its first place determines the mover.
    pub(crate) fn mover<'a>(
        places: &[CopySource],
        mut targets: impl Iterator<Item = &'a Arc<Memory>> + Clone,
    ) -> Option<Mover> {
        if matches!(places.first(), Some(CopySource { method: CopyMethod::Device(_), .. }))
            || targets.clone().next().is_some_and(|target| !target.kind().is_host())
        {
            return Some(Mover::Device);
        }
        let all_there = places.iter().all(|place| matches!(place.method, CopyMethod::Mapped(_)))
            && targets.all(|target| target.shared_file().is_some());
        (!all_there).then_some(Mover::Thread)
    }
}

/// The mover of a batch, and the direction.
enum Route {
    Hop(Arc<dyn DeviceAccess>),
    Copy(Arc<dyn DeviceAccess>, Direction),
    /// A copying thread moves it, without a device.
    Thread {
        mapped: bool,
    },
}

impl Route {
    fn of(mover: Mover, place: &CopySource, target: &Memory) -> Result<Self> {
        match (&place.method, target.device_access()) {
            (CopyMethod::Mapped(_), None) if mover == Mover::Thread => {
                Ok(Route::Thread { mapped: true })
            }
            (CopyMethod::Remote, None) if mover == Mover::Thread => {
                Ok(Route::Thread { mapped: false })
            }
            (CopyMethod::Device(from), Some(_)) => access(from).map(Route::Hop),
            (CopyMethod::Device(from), None) => {
                access(from).map(|access| Route::Copy(access, Direction::ToHost))
            }
            (CopyMethod::Mapped(_), Some(into)) => {
                Ok(Route::Copy(Arc::clone(into), Direction::ToDevice))
            }
            (CopyMethod::Remote, Some(_)) => Err(error(
                ErrorKind::Unsupported,
                "no device reaches host memory of another process outside of kvx pools: use \
                 Memory::pool, or TCP",
            )),
            (CopyMethod::Mapped(_) | CopyMethod::Remote, None) => Err(error(
                ErrorKind::Unsupported,
                "a plan that mixes device memory with host memory: split it",
            )),
        }
    }

    /// Returns the approximate bytes of a batch.
    fn batch(&self) -> u64 {
        match self {
            Route::Hop(_) => HOP_BATCH,
            Route::Copy(..) => COPY_BATCH,
            Route::Thread { .. } => THREAD_BATCH,
        }
    }

    fn is_same(&self, other: &Route) -> bool {
        match (self, other) {
            (Route::Hop(one), Route::Hop(other)) => Arc::ptr_eq(one, other),
            (Route::Copy(one, way), Route::Copy(other, other_way)) => {
                way == other_way && Arc::ptr_eq(one, other)
            }
            (Route::Thread { mapped: one }, Route::Thread { mapped: other }) => one == other,
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

/// A read or pull that a device or thread moves: see the [module](self).
pub(crate) struct Flight {
    /// The connection to the peer whose memory is read; `None` once it has ended.
    pub(crate) at: Option<usize>,
    /// After the end of the connection, the peer for which its memory counts, and how much.
    pub(crate) counted: Option<(HeldBytesOwner, usize)>,
    pub(crate) peer: Option<Identity>,
    pub(crate) process: Arc<PeerProcess>,
    pub(crate) purpose: FlightPurpose,
    pub(crate) load: Load,
    /// The piece that did not fit into the previous batch.
    pub(crate) next: Option<CopyPiece>,
    /// The bytes that are in no batch yet.
    pub(crate) left: u64,
    pub(crate) moved: u64,
    pub(crate) ends: Arc<Mutex<BatchEnds>>,
    pub(crate) under_way: usize,
    pub(crate) queued: bool,
    /// The error with which the flight ends; no further batch is started.
    pub(crate) failed: Option<Error>,
    /// True if a batch was lost; the flight never ends.
    pub(crate) lost: bool,
}

impl Flight {
    /// Returns true if the flight reads the peer's region with this id.
    pub(crate) fn reads(&self, at: usize, id: RegionId) -> bool {
        self.at == Some(at) && self.load.from.contains(&id)
    }

    /// Returns the local regions that the flight writes for a peer.
    pub(crate) fn ours(&self) -> &[RegionId] {
        match &self.purpose {
            FlightPurpose::Read { .. } => &[],
            FlightPurpose::Pull { into, .. } => into,
        }
    }

    /// Counts the flight's memory separately, because its connection has ended.
    pub(crate) fn detach(
        &mut self,
        owner: Option<HeldBytesOwner>,
        held: &mut HeldBytes<HeldBytesOwner>,
    ) {
        self.at = None;
        if let (FlightPurpose::Pull { cost, .. }, Some(owner)) = (&self.purpose, owner) {
            let mut counted = 0;
            // An excess is noticed with the peer's next connection.
            held.note_all(&owner, &mut counted, *cost).ok();
            self.counted = Some((owner, counted));
        }
    }

    /// Returns the next batch: pieces that one device moves in one direction. Returns an error for
    /// a piece that no device or thread can move.
    fn batch(&mut self) -> Result<Option<(Route, Vec<Hop>, u64)>> {
        let (mut hops, mut bytes, mut way): (Vec<Hop>, u64, Option<Route>) = (Vec::new(), 0, None);
        while way.as_ref().is_none_or(|way| bytes < way.batch())
            && hops.len() < MAX_PIECES
            && let Some(piece) = self.next.take().or_else(|| self.load.pieces.next())
        {
            let (place, target) = (
                &self.load.sides.places[piece.from as usize],
                &self.load.sides.targets[piece.into as usize],
            );
            let its = Route::of(self.load.mover, place, target)?;
            if way.as_ref().is_some_and(|way| !way.is_same(&its)) {
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

    /// Starts the next batch. Returns its size in bytes. Returns the errors of `batch`, and
    /// `Exhausted` without a thread for it.
    pub(crate) fn start(
        &mut self,
        number: u64,
        reactor: &Arc<ReactorHandle>,
        copying: &mut CopyThreads,
    ) -> Result<u64> {
        let Some((way, hops, bytes)) = self.batch()? else {
            self.left = 0;
            return Ok(0);
        };
        let (ends, reactor) = (Arc::clone(&self.ends), Arc::clone(reactor));
        let completion = BatchCompletion { ends, reactor, number, bytes: Some(bytes) };
        let done = |completion: BatchCompletion| {
            Ticket::new(move |result| completion.report(result.map_err(CopyError::Failed)))
        };
        match way {
            Route::Thread { mapped } => {
                let (process, sides) = (Arc::clone(&self.process), Arc::clone(&self.load.sides));
                let peer = self.peer.clone();
                let batch = Batch { number, peer, process, mapped, hops, bytes, sides, completion };
                // SAFETY: core, and `checked` for a pull, checked all pieces against the lengths of
                // their regions. `sides` keeps all memory but the local memory of a read, which the
                // ticket keeps.
                unsafe { copying.take(batch) }?;
            }
            // SAFETY: core, and `checked` for a pull, checked all pieces against the lengths of
            // their regions; the flight keeps both sides until the batch has landed, or for ever if
            // it never does.
            Route::Hop(access) => unsafe { access.hop(&hops, done(completion)) },
            Route::Copy(access, direction) => {
                let line = |hop: &Hop| match direction {
                    Direction::ToHost => {
                        Line { device: hop.from, host: hop.to as *mut u8, len: hop.len }
                    }
                    Direction::ToDevice => {
                        Line { device: hop.to, host: hop.from as *mut u8, len: hop.len }
                    }
                };
                let lines: Vec<Line> = hops.iter().map(line).collect();
                // SAFETY: the pieces are checked as for `hop`, and the flight keeps both sides
                // until the batch has landed. The host side is this agent's memory, or a mapping,
                // which is only read.
                unsafe { access.copy(direction, &lines, done(completion)) };
            }
        }
        self.under_way += 1;
        self.left = self.left.saturating_sub(bytes);
        Ok(bytes)
    }
}

/// All flights of a machine, by number.
#[derive(Default)]
pub(crate) struct Flights {
    pub(crate) open: HashMap<u64, Flight>,
    pub(crate) next: u64,
    pub(crate) reactor: Arc<ReactorHandle>,
}

impl Flights {
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Flight> {
        self.open.values_mut()
    }

    /// Returns the flights with ended batches that the machine has not processed. Without a reactor
    /// it gets no reports.
    #[cfg(test)]
    pub(crate) fn with_batch_ends(&self) -> Vec<u64> {
        let has_landed = |flight: &Flight| {
            let ends = flight.ends.lock();
            !ends.landed.is_empty() || ends.lost && !flight.lost
        };
        self.open
            .iter()
            .filter(|(_, flight)| has_landed(flight))
            .map(|(number, _)| *number)
            .collect()
    }

    /// Returns true if a flight is open.
    #[cfg(test)]
    pub(crate) fn any(&self) -> bool {
        !self.open.is_empty()
    }

    /// Returns true if a flight reads the peer's memory over this connection.
    pub(crate) fn any_at(&self, at: usize) -> bool {
        self.open.values().any(|flight| flight.at == Some(at))
    }

    /// Returns true if a flight reads the peer's region with this id.
    pub(crate) fn any_reads(&self, at: usize, id: RegionId) -> bool {
        self.open.values().any(|flight| flight.reads(at, id))
    }

    /// Returns true if a flight writes the local region with this id for a peer.
    pub(crate) fn any_writes(&self, id: RegionId) -> bool {
        self.open.values().any(|flight| flight.ours().contains(&id))
    }

    /// Returns true if a device may write the local region with this id for ever.
    pub(crate) fn has_lost(&self, id: RegionId) -> bool {
        self.open.values().any(|flight| flight.lost && flight.ours().contains(&id))
    }

    /// Returns the flights with batches whose end is unknown, for which an ending machine waits.
    pub(crate) fn under_way(&self) -> Vec<u64> {
        self.of(|flight| !flight.lost)
    }

    pub(crate) fn of(&self, which: impl Fn(&Flight) -> bool) -> Vec<u64> {
        self.open.iter().filter(|(_, flight)| which(flight)).map(|(number, _)| *number).collect()
    }

    /// Leaks memory that devices may touch for ever. Returns the local regions that contain it.
    pub(crate) fn keep_for_ever(&mut self) -> Vec<RegionId> {
        let mut kept = Vec::new();
        for (_, mut flight) in self.open.drain() {
            kept.extend_from_slice(flight.ours());
            if let FlightPurpose::Read { done, .. } = &mut flight.purpose {
                drop(done.take());
            }
            std::mem::forget(flight);
        }
        kept
    }
}
