//! Copies that the machine does not make itself: reads and pulls with memory on either side that is
//! a device's, or that is no pool of kvx's, for which there are [threads](super::copy_threads).
//!
//! A flight is such a read or pull, moved in batches: its turns start them, and the end of each
//! starts the next. While one is under way the device or the thread may touch the memory of both
//! sides, so ending a flight early only stops it: a ticket, an answer or a revocation that waits
//! for its memory waits until the last batch has landed. A batch whose ticket the device loses
//! never lands.

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

/// Bytes of a batch between a device and the host, about: what other transfers wait for.
const COPY_BATCH: u64 = 4 << 20;
/// Bytes of a batch within devices, which are some thirty times as fast: a batch takes longer than
/// its request.
const HOP_BATCH: u64 = 64 << 20;
/// Bytes of a batch of a thread, for which the small copies of other transfers wait.
const THREAD_BATCH: u64 = 1 << 20;
/// The most pieces of a batch.
const MAX_PIECES: usize = 8192;
/// Batches of one flight that are under way: the device always has the next.
pub(crate) const DEPTH: usize = 4;

/// What a flight is for.
pub(crate) enum FlightPurpose {
    /// A read of ours, and whom to tell.
    Read { id: TransferId, done: Option<Ticket> },
    /// A part of the peer's write, if it waits for the answer, our regions that it goes to, and
    /// what keeping it takes.
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
    /// Returns the device or thread that has to move it; `None` for the machine, which reaches all
    /// of it. Each side has one kind of memory: the first place tells which.
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

/// Who moves a batch, and which way.
enum Route {
    Hop(Arc<dyn DeviceAccess>),
    Copy(Arc<dyn DeviceAccess>, Direction),
    /// None does.
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
                "no device reaches host memory of another process that is no kvx pool: use Memory::pool, or TCP",
            )),
            (CopyMethod::Mapped(_) | CopyMethod::Remote, None) => Err(error(
                ErrorKind::Unsupported,
                "a plan that mixes device memory with host memory: split it",
            )),
        }
    }

    /// Bytes of a batch, about.
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

/// See the module.
pub(crate) struct Flight {
    /// The connection whose peer's memory is read; `None`: it is gone.
    pub(crate) at: Option<usize>,
    /// Once that is gone: whose memory it counts as, and how much is counted.
    pub(crate) counted: Option<(HeldBytesOwner, usize)>,
    pub(crate) peer: Option<Identity>,
    pub(crate) process: Arc<PeerProcess>,
    pub(crate) purpose: FlightPurpose,
    pub(crate) load: Load,
    /// A piece that did not go with the batch before it.
    pub(crate) next: Option<CopyPiece>,
    /// Bytes that are in no batch yet.
    pub(crate) left: u64,
    pub(crate) moved: u64,
    pub(crate) ends: Arc<Mutex<BatchEnds>>,
    pub(crate) under_way: usize,
    pub(crate) queued: bool,
    /// What it ends with if not with success; no further batch is started.
    pub(crate) failed: Option<Error>,
    /// A batch was lost: it never ends.
    pub(crate) lost: bool,
}

impl Flight {
    /// Returns whether it reads the peer's region of this number.
    pub(crate) fn reads(&self, at: usize, id: RegionId) -> bool {
        self.at == Some(at) && self.load.from.contains(&id)
    }

    /// Regions of ours that it writes to for a peer.
    pub(crate) fn ours(&self) -> &[RegionId] {
        match &self.purpose {
            FlightPurpose::Read { .. } => &[],
            FlightPurpose::Pull { into, .. } => into,
        }
    }

    /// Its connection is gone: what keeping it takes is counted for itself.
    pub(crate) fn detach(
        &mut self,
        owner: Option<HeldBytesOwner>,
        held: &mut HeldBytes<HeldBytesOwner>,
    ) {
        self.at = None;
        if let (FlightPurpose::Pull { cost, .. }, Some(owner)) = (&self.purpose, owner) {
            let mut counted = 0;
            held.note_all(&owner, &mut counted, *cost).ok(); // too much is seen with the peer's next connection
            self.counted = Some((owner, counted));
        }
    }

    /// The next batch: pieces that one device moves one way. Errors: a piece that none can move.
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

    /// Starts the next batch. Says how many bytes it has. Errors: as `batch`, and `Exhausted`
    /// without a thread for it.
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
                // SAFETY: as below; what its sides do not keep is our memory in a read, which the
                // ticket does.
                unsafe { copying.take(batch) }?;
            }
            // SAFETY: core and the grants (`checked`, for a pull) have held all pieces against the
            // lengths of their regions; the flight keeps both sides until the batch has landed, and
            // for ever if it never does.
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
                // SAFETY: the pieces are checked as for a hop, and the flight keeps both sides
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

    /// Returns the flights with ended batches that the machine has not taken: without a reactor it
    /// gets no report.
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

    /// Returns whether any is under way.
    #[cfg(test)]
    pub(crate) fn any(&self) -> bool {
        !self.open.is_empty()
    }

    /// Returns whether something of a peer's is being read over this connection.
    pub(crate) fn any_at(&self, at: usize) -> bool {
        self.open.values().any(|flight| flight.at == Some(at))
    }

    /// Returns whether the peer's region of this number is being read.
    pub(crate) fn any_reads(&self, at: usize, id: RegionId) -> bool {
        self.open.values().any(|flight| flight.reads(at, id))
    }

    /// Returns whether our region of this number is being written to for a peer.
    pub(crate) fn any_writes(&self, id: RegionId) -> bool {
        self.open.values().any(|flight| flight.ours().contains(&id))
    }

    /// Returns whether a device may write to our region of this number for ever.
    pub(crate) fn has_lost(&self, id: RegionId) -> bool {
        self.open.values().any(|flight| flight.lost && flight.ours().contains(&id))
    }

    /// Returns the flights with batches whose end is not known, for which an ending machine waits.
    pub(crate) fn under_way(&self) -> Vec<u64> {
        self.of(|flight| !flight.lost)
    }

    pub(crate) fn of(&self, which: impl Fn(&Flight) -> bool) -> Vec<u64> {
        self.open.iter().filter(|(_, flight)| which(flight)).map(|(number, _)| *number).collect()
    }

    /// Leaks the memory that devices may touch for ever. Returns the local regions in it.
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
