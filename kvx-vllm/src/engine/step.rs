//! Messages of one step between the scheduler and the workers.

use std::sync::Arc;

use super::action::MoveLists;
use super::failure::{LoadFailure, TransferFailure};
use super::generations::BlockReference;
use super::remote::RemoteEngine;
use super::stats::TransferStats;
use crate::ids::{BlockLists, EngineId, RequestId};
use crate::mapping::Tokens;
use crate::time::{ClockOffset, Time};

/// The blocks of a request at a peer.
#[derive(Clone, Debug, PartialEq)]
pub struct RemoteRequest {
    /// The peer's name of the request.
    pub request: RequestId,
    /// The peer that holds the blocks.
    pub peer: Arc<RemoteEngine>,
    /// Logical block numbers in the order of the prompt. Empty in push mode, where the peer knows
    /// them.
    pub blocks: BlockLists,
    /// The time on the peer's clock at which the peer frees the blocks, even if a reader still
    /// needs them.
    pub expires_at_peer: Option<f64>,
    /// The generation that the peer's counters must not exceed. Only kvx peers publish one.
    pub reference: Option<BlockReference>,
}

/// The order of one load.
#[derive(Clone, Debug, PartialEq)]
pub struct ReceiveOrder {
    /// The request.
    pub request: RequestId,
    /// Local blocks to fill. If empty, the workers read nothing and only notify the peer that it
    /// may free its blocks.
    pub local: BlockLists,
    /// The blocks at the peer.
    pub remote: RemoteRequest,
    /// The number of tokens that need no load. The first block to fill holds the token after them.
    pub computed: u32,
    /// The number of prompt tokens that are available after the load.
    pub end: u32,
    /// The number of tokens that the peer's blocks hold, at least `end`.
    pub held_there: u32,
    /// True if the scheduler waits for a report.
    pub awaited: bool,
    /// The load's deadline, on the scheduler's clock.
    pub deadline: Time,
}

impl ReceiveOrder {
    /// Returns the complete lists, including blocks that do not move.
    pub(super) fn lists(&self) -> MoveLists {
        let (local, remote) = (self.local.clone(), self.remote.blocks.clone());
        MoveLists { local, remote, tokens: Some(self.tokens()) }
    }

    /// Returns the numbers of tokens at which the lists end.
    pub(super) fn tokens(&self) -> Tokens {
        Tokens { producer: self.held_there, wanted: self.end }
    }
}

/// Blocks that a peer may fetch.
#[derive(Clone, Debug, PartialEq)]
pub struct SendOrder {
    /// The request.
    pub request: RequestId,
    /// The time at which unfetched blocks are freed, on the scheduler's clock.
    pub expires: Time,
    /// The blocks, if this engine sends them itself.
    pub push: Option<BlockLists>,
}

/// The requests of a peer that this engine still wants.
#[derive(Clone, Debug, PartialEq)]
pub struct Heartbeat {
    /// The peer.
    pub peer: Arc<RemoteEngine>,
    /// The peer's names of the requests.
    pub requests: Vec<RequestId>,
}

/// The scheduler's message of one step to the workers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConnectorMeta {
    /// The scheduler's clock when it built the message. Workers convert the deadlines in it to
    /// their own clocks.
    pub built_at: Time,
    /// The number of times that this engine has registered its memory again.
    pub registration: u64,
    /// Requests that a peer of a MooncakeConnector will ask for, each with the name of its
    /// transfer.
    pub named: Vec<(RequestId, RequestId)>,
    /// Requests that have started their prefill and whose blocks a peer will fetch.
    pub prefilling: Vec<RequestId>,
    /// Requests from `prefilling` or `named` that ended without blocks for a peer.
    pub dropped: Vec<RequestId>,
    /// Blocks that are ready for a peer.
    pub send: Vec<SendOrder>,
    /// Requests whose blocks the engine has revoked.
    pub withdrawn: Vec<RequestId>,
    /// Loads to start.
    pub receive: Vec<ReceiveOrder>,
    /// Loads to cancel.
    pub cancel: Vec<RequestId>,
    /// Leases to renew at peers.
    pub heartbeats: Vec<Heartbeat>,
}

impl ConnectorMeta {
    /// Returns whether the message contains nothing for the workers.
    pub fn is_empty(&self) -> bool {
        let (built_at, registration) = (self.built_at, self.registration);
        *self == ConnectorMeta { built_at, registration, ..ConnectorMeta::default() }
    }
}

/// Blocks that an engine keeps for the connector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kept {
    /// The blocks of a load that was aborted or failed at its deadline.
    Load,
    /// All blocks of a finished request, kept for a peer.
    Request,
}

/// A load that did not fill all its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedLoad {
    /// The request.
    pub request: RequestId,
    /// The reason.
    pub failure: LoadFailure,
    /// Local blocks without valid contents, in ascending order. With several KV cache groups they
    /// do not determine a valid prefix.
    pub invalid: Vec<u32>,
}

/// A worker's report after a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkerOutput {
    /// The worker's clock at the time of the report.
    pub at: Time,
    /// Requests whose blocks no peer needs any more: fetched, sent or expired.
    pub finished_sending: Vec<RequestId>,
    /// Loads that have ended: no transfer accesses their blocks any more.
    pub finished_recving: Vec<RequestId>,
    /// The loads of `finished_recving` that failed.
    pub failed_recving: Vec<FailedLoad>,
    /// Failed loads whose blocks a peer may still write to. They end later.
    pub failing: Vec<(RequestId, LoadFailure)>,
    /// Requests of `finished_sending` and `finished_recving` whose blocks a forgotten transfer may
    /// access until the process exits.
    pub lost: Vec<(RequestId, Kept)>,
    /// Clocks of peers.
    pub clocks: Vec<(EngineId, ClockOffset)>,
    /// Failures to log.
    pub failures: Vec<TransferFailure>,
    /// Transfer statistics since the last output.
    pub stats: TransferStats,
    /// The number of heartbeats and answers from peers for requests that this worker does not know.
    /// Many of them only arrive late.
    pub unknown_requests: u64,
}

impl WorkerOutput {
    /// Returns the blocks without valid contents, for engines that ask by block. Only for models
    /// with one KV cache group.
    pub fn invalid_block_ids(&self) -> Vec<u32> {
        let mut blocks: Vec<_> =
            self.failed_recving.iter().flat_map(|failed| failed.invalid.iter().copied()).collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }

    /// Returns whether the report is empty.
    pub fn is_empty(&self) -> bool {
        *self == WorkerOutput { at: self.at, ..WorkerOutput::default() }
    }
}
