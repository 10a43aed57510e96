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
#[derive(Clone, Debug)]
pub(super) struct Receive {
    pub(super) order: ReceiveOrder,
    pub(super) connection: Option<Connection>,
    pub(super) stage: ReceiveStage,
    /// The first reason for which the load has failed.
    pub(super) failure: Option<LoadFailure>,
    /// Local blocks without valid contents.
    pub(super) invalid: Invalid,
    /// True if the contents are no longer wanted.
    pub(super) cancelled: bool,
    /// The peer's workers that have reported their writes. They may write what one local worker
    /// registered for all local workers.
    pub(super) written_by: BTreeSet<Box<str>>,
}

#[derive(Clone, Debug)]
pub(super) enum ReceiveStage {
    /// The load waits for the handshake.
    Waiting,
    /// Reads are in progress.
    Reading(Reading),
    /// The peer writes; `expected` of its workers report the end.
    Awaiting { expected: usize },
    /// The runtime ends the writes that the peer may still make.
    Fencing,
    /// All reads have ended; the runtime reorders and clears the blocks.
    Finishing,
}

#[derive(Clone, Debug)]
pub(super) struct Reading {
    pub(super) paired: Paired,
    pub(super) reference: Option<BlockReference>,
    pub(super) lanes: Vec<LaneState>,
    /// The number of moves that may still access blocks, and of unfinished reads of generations.
    pub(super) unsettled: usize,
    /// True if the data needs reordering or clearing before the engine can use it.
    pub(super) finishes: bool,
}

#[derive(Clone, Debug)]
pub(super) struct LaneState {
    pub(super) rank: WorkerRank,
    pub(super) readers: u32,
    pub(super) parts_left: usize,
    pub(super) told: bool,
}

#[derive(Clone, Debug)]
pub(super) enum Invalid {
    Blocks(BTreeSet<u32>),
    All,
}

/// A move in flight.
#[derive(Clone, Debug)]
pub(super) struct MoveState {
    pub(super) request: RequestId,
    pub(super) lane: usize,
    pub(super) phase: MovePhase,
    pub(super) push: bool,
    /// The blocks that a read fills, if they are to be compared with digests.
    pub(super) reads: Option<(Part, Arc<[GroupMove]>)>,
}

/// The checks that follow the data of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Checks {
    Nothing,
    Words,
    WordsAndDigests,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MovePhase {
    /// The data is moving.
    Running,
    /// The move has an outcome, but may still access memory.
    Unsettled,
    /// The data has arrived; the runtime reads the generation counters.
    Checking,
    /// The generation counters are valid; the runtime compares the data with digests.
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
    /// Returns whether the contents are no longer wanted. A move that was cancelled for that reason
    /// is not a failure.
    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled
    }

    /// Records a failure. The peer gets no completion after a failure.
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
