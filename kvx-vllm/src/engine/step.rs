//! What the scheduler half tells the workers at each step, and what they tell it back.

use std::sync::Arc;

use super::action::MoveLists;
use super::failure::{LoadFailure, TransferFailure};
use super::generations::BlockReference;
use super::remote::RemoteEngine;
use super::stats::TransferStats;
use crate::ids::{BlockLists, EngineId, RequestId};
use crate::mapping::Tokens;
use crate::time::{ClockOffset, Time};

/// A request's blocks at the peer.
#[derive(Clone, Debug, PartialEq)]
pub struct RemoteRequest {
    /// The peer's name of the request.
    pub request: RequestId,
    /// Where they are.
    pub peer: Arc<RemoteEngine>,
    /// Logical block numbers in the order of the prompt. Empty in push, where the peer knows them.
    pub blocks: BlockLists,
    /// When the peer frees them whoever reads, on its own clock.
    pub expires_at_peer: Option<f64>,
    /// What the peer's generations must not exceed; only kvx peers say so.
    pub reference: Option<BlockReference>,
}

/// One load for the workers.
#[derive(Clone, Debug, PartialEq)]
pub struct ReceiveOrder {
    /// The request.
    pub request: RequestId,
    /// Blocks to fill. None: nothing is read, the peer is only told that it may free its blocks.
    pub local: BlockLists,
    /// Where from.
    pub remote: RemoteRequest,
    /// Tokens that need no load: the first block to fill comes after them.
    pub computed: u32,
    /// Tokens of the prompt that are there after the load.
    pub end: u32,
    /// Tokens that the peer's blocks hold, at least `end`.
    pub held_there: u32,
    /// Whether the scheduler waits for a report.
    pub awaited: bool,
    /// On the scheduler's clock.
    pub deadline: Time,
}

impl ReceiveOrder {
    /// Its lists, whatever of them moves.
    pub(super) fn lists(&self) -> MoveLists {
        let (local, remote) = (self.local.clone(), self.remote.blocks.clone());
        MoveLists { local, remote, tokens: Some(self.tokens()) }
    }

    /// Where its lists end.
    pub(super) fn tokens(&self) -> Tokens {
        Tokens { producer: self.held_there, wanted: self.end }
    }
}

/// Blocks that a peer may come for.
#[derive(Clone, Debug, PartialEq)]
pub struct SendOrder {
    /// The request.
    pub request: RequestId,
    /// When they are freed if nobody comes; on the scheduler's clock.
    pub expires: Time,
    /// The blocks, where this engine itself sends them.
    pub push: Option<BlockLists>,
}

/// Which requests of a peer are still wanted.
#[derive(Clone, Debug, PartialEq)]
pub struct Heartbeat {
    /// The peer.
    pub peer: Arc<RemoteEngine>,
    /// Its names of the requests.
    pub requests: Vec<RequestId>,
}

/// The message of one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConnectorMeta {
    /// The scheduler's clock when it was built: deadlines in it are moved to the worker's.
    pub built_at: Time,
    /// How often this engine had registered its memory anew.
    pub registration: u64,
    /// Requests that a peer of a MooncakeConnector will ask for, and the transfers that both sides know them by.
    pub named: Vec<(RequestId, RequestId)>,
    /// Requests whose prefill has begun and that a peer will come for.
    pub prefilling: Vec<RequestId>,
    /// Requests of those that ended without anything for a peer.
    pub dropped: Vec<RequestId>,
    /// Blocks that are ready for a peer.
    pub send: Vec<SendOrder>,
    /// Requests whose blocks the engine has taken back from under their peers.
    pub withdrawn: Vec<RequestId>,
    /// Loads to begin.
    pub receive: Vec<ReceiveOrder>,
    /// Loads that nobody wants any more.
    pub cancel: Vec<RequestId>,
    /// Leases to renew.
    pub heartbeats: Vec<Heartbeat>,
}

impl ConnectorMeta {
    /// Whether the workers need not see it.
    pub fn is_empty(&self) -> bool {
        self.named.is_empty()
            && self.prefilling.is_empty()
            && self.dropped.is_empty()
            && self.send.is_empty()
            && self.withdrawn.is_empty()
            && self.receive.is_empty()
            && self.cancel.is_empty()
            && self.heartbeats.is_empty()
    }
}

/// Blocks that an engine keeps for the connector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kept {
    /// Those of a load that was aborted or has failed at its deadline.
    Load,
    /// All of a request that has ended, for a peer.
    Request,
}

/// A load that did not bring everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedLoad {
    /// The request.
    pub request: RequestId,
    /// Why.
    pub failure: LoadFailure,
    /// Local blocks without the right contents, ascending. With several KV cache groups they say nothing about
    /// prefixes.
    pub invalid: Vec<u32>,
}

/// What a worker has to tell after a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkerOutput {
    /// The worker's clock.
    pub at: Time,
    /// Requests whose blocks no peer needs any more: fetched, sent or expired.
    pub finished_sending: Vec<RequestId>,
    /// Loads that are over: nothing touches their blocks any more.
    pub finished_recving: Vec<RequestId>,
    /// Those of them that failed.
    pub failed_recving: Vec<FailedLoad>,
    /// Loads that have failed while a peer may still write to their blocks: they are over later.
    pub failing: Vec<(RequestId, LoadFailure)>,
    /// Those of both whose blocks a forgotten transfer may touch for ever.
    pub lost: Vec<(RequestId, Kept)>,
    /// Clocks of peers.
    pub clocks: Vec<(EngineId, ClockOffset)>,
    /// For the log.
    pub failures: Vec<TransferFailure>,
    /// What happened since the last output.
    pub stats: TransferStats,
    /// Heartbeats and answers of peers for requests that this worker does not know. Many of them
    /// only arrive late.
    pub unknown_requests: u64,
}

impl WorkerOutput {
    /// Blocks without the right contents, for engines that ask by block; of models with one KV cache group.
    pub fn invalid_block_ids(&self) -> Vec<u32> {
        let mut blocks: Vec<_> =
            self.failed_recving.iter().flat_map(|failed| failed.invalid.iter().copied()).collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }

    /// Whether there is nothing to tell.
    pub fn is_empty(&self) -> bool {
        self.finished_sending.is_empty()
            && self.finished_recving.is_empty()
            && self.failed_recving.is_empty()
            && self.failing.is_empty()
            && self.lost.is_empty()
            && self.clocks.is_empty()
            && self.failures.is_empty()
            && self.stats.is_empty()
            && self.unknown_requests == 0
    }
}
