//! A cell of the fault table: the process that fails, the fault, and the state of the load at that
//! time.

use std::fmt;

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Subject {
    PrefillRank,
    PrefillEngine,
    DecodeRank,
    DecodeEngine,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Trouble {
    Killed,
    StoppedAWhile,
    Stopped,
    Restarted,
    Renamed,
    /// The request is aborted.
    Aborted,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Moment {
    BeforeTheHandshake,
    InTheHandshake,
    Queued,
    Reading,
    /// The prefill has not read the decode's request to write yet.
    Asked,
    /// Some blocks have been written.
    Written,
    /// All blocks have arrived; their digests are being checked.
    Checking,
    ToldNotFreed,
    Idle,
}

pub(super) use Moment::{
    Asked, BeforeTheHandshake, Checking, Idle, InTheHandshake, Queued, Reading, ToldNotFreed,
    Written,
};
pub(super) use Subject::{DecodeEngine, DecodeRank, PrefillEngine, PrefillRank};
pub(super) use Trouble::{Aborted, Killed, Renamed, Restarted, Stopped, StoppedAWhile};

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PrefillRank => "prefill rank",
            PrefillEngine => "prefill engine",
            DecodeRank => "decode rank",
            DecodeEngine => "decode engine",
        })
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Killed => "killed",
            StoppedAWhile => "stopped 5 s",
            Stopped => "stopped",
            Restarted => "restarted",
            Renamed => "restarted with a new id",
            Aborted => "aborts",
        })
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BeforeTheHandshake => "before the handshake",
            InTheHandshake => "in the handshake",
            Queued => "queued",
            Reading => "reading",
            Asked => "asked",
            Written => "being written",
            Checking => "checking",
            ToldNotFreed => "told, not freed",
            Idle => "idle",
        })
    }
}

impl Subject {
    pub(super) fn is_rank(self) -> bool {
        matches!(self, PrefillRank | DecodeRank)
    }

    pub(super) fn is_prefill(self) -> bool {
        matches!(self, PrefillRank | PrefillEngine)
    }
}

/// The process that fails, the fault, and the state of the load at that time.
#[derive(Clone, Copy)]
pub(super) struct Cell {
    pub(super) subject: Subject,
    pub(super) trouble: Trouble,
    pub(super) moment: Moment,
}

/// Returns all cells of the NixlConnector, whose decode reads.
pub(super) fn of_reads() -> Vec<Cell> {
    cells(
        &[PrefillRank, PrefillEngine, DecodeRank, DecodeEngine],
        &[BeforeTheHandshake, InTheHandshake, Queued, Reading, Checking, ToldNotFreed, Idle],
    )
}

/// Returns all cells of the MooncakeConnector, whose prefill writes. It supports neither ranks in
/// separate processes nor digests.
pub(super) fn of_writes() -> Vec<Cell> {
    cells(
        &[PrefillEngine, DecodeEngine],
        &[BeforeTheHandshake, InTheHandshake, Queued, Asked, Written, ToldNotFreed, Idle],
    )
}

fn cells(subjects: &[Subject], moments: &[Moment]) -> Vec<Cell> {
    let mut cells = Vec::new();
    for &subject in subjects {
        for trouble in [Killed, StoppedAWhile, Stopped, Restarted, Renamed, Aborted] {
            let all = moments.iter().map(|&moment| Cell { subject, trouble, moment });
            cells.extend(all.filter(|cell| cell.can_be()));
        }
    }
    cells
}

impl Cell {
    /// Returns whether the cell is possible. Only engines abort requests; an idle decode, and one
    /// that already has its blocks, has no request to abort.
    fn can_be(&self) -> bool {
        match self.trouble {
            Aborted => match self.subject {
                PrefillEngine => true,
                DecodeEngine => !matches!(self.moment, ToldNotFreed | Idle),
                PrefillRank | DecodeRank => false,
            },
            Killed | Stopped | StoppedAWhile | Restarted | Renamed => true,
        }
    }

    /// Returns whether a rank is killed and started again. The engine rejects the new rank, and is
    /// then restarted itself.
    pub(super) fn is_of_a_rank_again(&self) -> bool {
        self.subject.is_rank() && matches!(self.trouble, Restarted | Renamed)
    }

    /// Returns the text for the process and the fault.
    pub(super) fn title(&self) -> String {
        let then = if self.is_of_a_rank_again() { "started again, then its engine " } else { "" };
        format!("{} {then}{}", self.subject, self.trouble)
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.title(), self.moment)
    }
}
