//! One cell of the table: who fails, how, and where a load is then.

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
    /// Its request is.
    Aborted,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Moment {
    BeforeTheHandshake,
    InTheHandshake,
    Queued,
    Reading,
    /// The prefill was asked to write, and has not read the question.
    Asked,
    /// Some of it has been written.
    Written,
    /// All has arrived, and is compared with its digests.
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

/// Who fails, how, and where a load is then.
#[derive(Clone, Copy)]
pub(super) struct Cell {
    pub(super) subject: Subject,
    pub(super) trouble: Trouble,
    pub(super) moment: Moment,
}

/// All of NixlConnector, whose decode reads.
pub(super) fn of_reads() -> Vec<Cell> {
    cells(
        &[PrefillRank, PrefillEngine, DecodeRank, DecodeEngine],
        &[BeforeTheHandshake, InTheHandshake, Queued, Reading, Checking, ToldNotFreed, Idle],
    )
}

/// All of MooncakeConnector, whose prefill writes. It refuses ranks in processes of their own, and digests.
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
    /// A request is the engine's. An idle decode has none, nor one that has its blocks.
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

    /// A rank is killed and started again as the same one, which its engine refuses: the engine is restarted then.
    pub(super) fn is_of_a_rank_again(&self) -> bool {
        self.subject.is_rank() && matches!(self.trouble, Restarted | Renamed)
    }

    /// Who fails, and how.
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
