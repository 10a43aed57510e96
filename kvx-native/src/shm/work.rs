//! The work of the machine's turns: reads, pulls of writes, batches of flights, and mappings whose
//! pages are made present.

use std::sync::Arc;

use kvx_backend::reactor::Outbox;
use kvx_core::backend::Ticket;
use kvx_core::{Error, Memory, RegionId, TransferId};

use super::copy::{PullPieces, ReadPieces};
use super::copy_threads::Sides;
use super::flights::{FlightPurpose, Load, Mover};
use super::memory::{CopySource, Mapping};

/// Work that takes turns.
pub(crate) enum Work {
    Read(Box<Read>),
    Pull(Box<Pull>),
    /// The next batch of a flight.
    Flight(u64),
}

impl Work {
    /// Returns the connection to which the work belongs; flights record theirs separately.
    pub(crate) fn connection(&self) -> Option<usize> {
        match self {
            Work::Read(read) => Some(read.at),
            Work::Pull(pull) => Some(pull.at),
            Work::Flight(_) => None,
        }
    }

    /// Ends the work. A pull has no ticket at this end.
    pub(crate) fn settle(self, reason: Error, out: &mut Outbox) {
        if let Work::Read(read) = self {
            out.settle(read.done, Err(reason));
        }
    }
}

/// A read in progress.
pub(crate) struct Read {
    /// The index of the connection whose peer's memory is read.
    pub(crate) at: usize,
    pub(crate) id: TransferId,
    pub(crate) pieces: ReadPieces,
    pub(crate) places: Vec<CopySource>,
    pub(crate) targets: Vec<u64>,
    pub(crate) left: u64,
    pub(crate) done: Ticket,
}

impl Read {
    /// Returns true if this reads from the peer's region with this id.
    pub(crate) fn reads(&self, id: RegionId) -> bool {
        self.pieces.0.bound().remotes().iter().any(|remote| remote.id == id)
    }
}

/// A part of a peer's write.
pub(crate) struct Pull {
    /// The index of the connection over which the request arrived.
    pub(crate) at: usize,
    pub(crate) write: u64,
    pub(crate) pieces: PullPieces,
    pub(crate) places: Vec<CopySource>,
    pub(crate) targets: Vec<u64>,
    /// The peer's regions that it reads from.
    pub(crate) from: Vec<RegionId>,
    /// Local regions that it writes to, and their memory.
    pub(crate) into: Vec<(RegionId, Arc<Memory>)>,
    pub(crate) left: u64,
    /// The bytes of memory that the pull takes.
    pub(crate) cost: usize,
}

impl Pull {
    pub(crate) fn reads(&self, id: RegionId) -> bool {
        self.from.contains(&id)
    }

    pub(crate) fn writes(&self, id: RegionId) -> bool {
        self.into.iter().any(|(into, _)| *into == id)
    }

    /// Converts the pull into a flight, which a device or a thread moves.
    pub(crate) fn flight(self, mover: Mover) -> (FlightPurpose, Load) {
        let Pull { write, pieces, places, from, into, left, cost, .. } = self;
        let (into, targets) = into.into_iter().unzip();
        let sides = Arc::new(Sides { places, targets });
        let load = Load { mover, pieces: Box::new(pieces), sides, from, bytes: left };
        (FlightPurpose::Pull { write: Some(write), into, cost }, load)
    }
}

/// A mapping whose pages are being made present.
pub(crate) struct Populate {
    pub(crate) at: usize,
    pub(crate) id: RegionId,
    pub(crate) mapping: Arc<Mapping>,
    pub(crate) from: usize,
}
