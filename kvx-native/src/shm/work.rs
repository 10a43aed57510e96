//! The work of the machine's turns: reads, pulls of writes, batches of flights, and mappings to be
//! made present.

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
    /// The connection it belongs to; flights know theirs by themselves.
    pub(crate) fn connection(&self) -> Option<usize> {
        match self {
            Work::Read(read) => Some(read.at),
            Work::Pull(pull) => Some(pull.at),
            Work::Flight(_) => None,
        }
    }

    /// Ends it; a pull has no ticket here.
    pub(crate) fn settle(self, reason: Error, out: &mut Outbox) {
        if let Work::Read(read) = self {
            out.settle(read.done, Err(reason));
        }
    }
}

/// A read under way.
pub(crate) struct Read {
    /// The connection whose peer is read.
    pub(crate) at: usize,
    pub(crate) id: TransferId,
    pub(crate) pieces: ReadPieces,
    pub(crate) places: Vec<CopySource>,
    pub(crate) targets: Vec<u64>,
    pub(crate) left: u64,
    pub(crate) done: Ticket,
}

impl Read {
    /// Returns whether it reads from the peer's region of this number.
    pub(crate) fn reads(&self, id: RegionId) -> bool {
        self.pieces.0.bound().remotes().iter().any(|remote| remote.id == id)
    }
}

/// A part of a peer's write.
pub(crate) struct Pull {
    /// The connection it came over.
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
    /// The memory that it takes.
    pub(crate) cost: usize,
}

impl Pull {
    pub(crate) fn reads(&self, id: RegionId) -> bool {
        self.from.contains(&id)
    }

    pub(crate) fn writes(&self, id: RegionId) -> bool {
        self.into.iter().any(|(into, _)| *into == id)
    }

    /// Turns it into a flight, for a device or a thread to do.
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
