//! The state of a load and of its moves.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::super::action::{Connection, GroupMove};
use super::super::failure::LoadFailure;
use super::super::generations::BlockReference;
use super::super::plan::Paired;
use super::super::step::ReceiveOrder;
use crate::ids::{RequestId, WorkerRank};
use crate::mapping::Part;

/// One load.
#[derive(Debug)]
pub(super) struct Receive {
    pub(super) order: ReceiveOrder,
    pub(super) connection: Option<Connection>,
    pub(super) stage: ReceiveStage,
    /// Why it has failed, if it has: the first reason.
    pub(super) failure: Option<LoadFailure>,
    /// Local blocks without the right contents.
    pub(super) invalid: Invalid,
    /// Nobody waits for the contents any more.
    pub(super) cancelled: bool,
    /// Who has said that it has written. What one worker of ours registers may be written for all of them.
    pub(super) written_by: BTreeSet<Box<str>>,
}

#[derive(Debug)]
pub(super) enum ReceiveStage {
    /// For the handshake.
    Waiting,
    /// Reads are under way.
    Reading(Reading),
    /// The peer writes; so many of its workers say so.
    Awaiting { expected: usize },
    /// What the peer may still write is being ended.
    Fencing,
    /// All is read; the blocks are being reordered and cleared.
    Finishing,
}

#[derive(Debug)]
pub(super) struct Reading {
    pub(super) paired: Paired,
    pub(super) reference: Option<BlockReference>,
    pub(super) lanes: Vec<LaneState>,
    /// Moves that may still touch blocks, and words still to be read.
    pub(super) unsettled: usize,
    /// What is read is not yet what the engine reads.
    pub(super) finishes: bool,
}

#[derive(Debug)]
pub(super) struct LaneState {
    pub(super) rank: WorkerRank,
    pub(super) readers: u32,
    pub(super) parts_left: usize,
    pub(super) told: bool,
}

#[derive(Debug)]
pub(super) enum Invalid {
    Blocks(BTreeSet<u32>),
    All,
}

/// One move in flight.
#[derive(Debug)]
pub(super) struct MoveState {
    pub(super) request: RequestId,
    pub(super) lane: usize,
    pub(super) phase: MovePhase,
    pub(super) push: bool,
    /// What a read fills, where it is to be compared with digests.
    pub(super) reads: Option<(Part, Arc<[GroupMove]>)>,
}

/// What is looked at when the data of a read is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Checks {
    Nothing,
    Words,
    WordsAndDigests,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MovePhase {
    /// The data moves.
    Running,
    /// It has an outcome, but may still touch memory.
    Unsettled,
    /// The data is there; the words are being read.
    Checking,
    /// The words are right; the data is being compared with digests.
    Hashing,
}

impl MoveState {
    pub(super) fn new(request: &RequestId, lane: usize, push: bool) -> Self {
        MoveState { request: request.clone(), lane, phase: MovePhase::Running, push, reads: None }
    }

    pub(super) fn is_running(&self) -> bool {
        self.phase == MovePhase::Running
    }
}

impl Receive {
    /// Nobody waits for the contents: what was cancelled for that is no failure.
    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled
    }

    /// Nothing more is told to the peer after a failure.
    pub(super) fn fail(&mut self, failure: LoadFailure, blocks: Option<Vec<u32>>) {
        match blocks {
            None => self.invalid = Invalid::All,
            Some(blocks) => {
                if let Invalid::Blocks(invalid) = &mut self.invalid {
                    invalid.extend(blocks);
                }
            }
        }
        self.failure.get_or_insert(failure);
    }
}
