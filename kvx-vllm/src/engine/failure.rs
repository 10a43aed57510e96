//! What can go wrong with a transfer, and how it is said.

use std::fmt;

use serde_json::{Map, Value};

use crate::ids::{Address, EngineId, RequestId, WorkerRank};

/// Why the blocks of a request did not come.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadFailure {
    /// The peer could not be reached, or it and this engine do not fit together.
    Handshake(String),
    /// A read, a registration or a notification failed.
    Transfer(String),
    /// The peer had given the blocks to another request before they were read.
    Stale,
    /// Blocks do not have the digests that the peer has published.
    Corrupt,
    /// What the parameters ask for cannot be: numbers beyond the peer's pool, too few blocks, an old registration.
    Refused(String),
    /// The peer keeps the blocks too short a time to fetch them.
    Expiring,
    /// The peer that was to send the blocks did not do so in time.
    NotPushed,
    /// The request's deadline came first.
    Deadline,
    /// A rank of this engine that runs in a process of its own is not there.
    Rank(String),
}

impl fmt::Display for LoadFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadFailure::Handshake(why) => write!(f, "the handshake failed: {why}"),
            LoadFailure::Transfer(why) => write!(f, "the transfer failed: {why}"),
            LoadFailure::Stale => f.write_str(
                "the peer had taken blocks back, or reused them, before they were read; they are refused",
            ),
            LoadFailure::Corrupt => f.write_str(
                "blocks that were read do not have the digests that the peer has published (kvx_digest); they \
                 are refused",
            ),
            LoadFailure::Refused(why) => write!(f, "the load is refused: {why}"),
            LoadFailure::Expiring => f.write_str("the peer is about to free the blocks"),
            LoadFailure::NotPushed => f.write_str("the peer did not send the blocks in time"),
            LoadFailure::Deadline => f.write_str("the request's deadline has come"),
            LoadFailure::Rank(why) => write!(f, "this engine has lost a rank: {why}"),
        }
    }
}

/// The step that failed, by the name that vLLM's log gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// The peer's data does not fit this engine.
    HandshakeSetupFailed,
    /// The peer's side channel did not answer, or not in words.
    HandshakeFailed,
    /// A transfer could not be described.
    TransferSetupFailed,
    /// A transfer ended in an error.
    TransferFailed,
    /// A transfer ended without saying how.
    TransferException,
    /// A transfer could not be ended: its blocks stay pinned.
    TransferReleaseFailed,
    /// A notification was not sent.
    NotificationFailed,
    /// The handshake before a push registration failed.
    PushRegHandshakeFailed,
    /// A push registration was not sent.
    PushRegNotifFailed,
    /// The handshake before a push failed.
    PushHandshakeFailed,
    /// A bootstrap server did not answer, or does not know the engine.
    QueryFailed,
    /// A prefill that was asked for blocks did not write them.
    PullFailed,
    /// Blocks that were asked for could not be written.
    SendFailed,
    /// No failed step: the lease of blocks ended before all that were to read them had done so.
    LeaseExpired,
}

impl FailureKind {
    /// All of them.
    pub const ALL: [FailureKind; 14] = [
        FailureKind::HandshakeSetupFailed,
        FailureKind::HandshakeFailed,
        FailureKind::TransferSetupFailed,
        FailureKind::TransferFailed,
        FailureKind::TransferException,
        FailureKind::TransferReleaseFailed,
        FailureKind::NotificationFailed,
        FailureKind::PushRegHandshakeFailed,
        FailureKind::PushRegNotifFailed,
        FailureKind::PushHandshakeFailed,
        FailureKind::QueryFailed,
        FailureKind::PullFailed,
        FailureKind::SendFailed,
        FailureKind::LeaseExpired,
    ];

    /// As it stands in the log.
    pub fn as_str(self) -> &'static str {
        match self {
            FailureKind::HandshakeSetupFailed => "handshake_setup_failed",
            FailureKind::HandshakeFailed => "handshake_failed",
            FailureKind::TransferSetupFailed => "transfer_setup_failed",
            FailureKind::TransferFailed => "transfer_failed",
            FailureKind::TransferException => "transfer_exception",
            FailureKind::TransferReleaseFailed => "transfer_release_failed",
            FailureKind::NotificationFailed => "notification_failed",
            FailureKind::PushRegHandshakeFailed => "push_reg_handshake_failed",
            FailureKind::PushRegNotifFailed => "push_reg_notif_failed",
            FailureKind::PushHandshakeFailed => "push_handshake_failed",
            FailureKind::QueryFailed => "query_failed",
            FailureKind::PullFailed => "pull_failed",
            FailureKind::SendFailed => "send_failed",
            FailureKind::LeaseExpired => "lease_expired",
        }
    }

    /// Whether it is a step of the MooncakeConnector: its log lines begin with that name.
    pub fn is_of_mooncake(self) -> bool {
        matches!(self, FailureKind::QueryFailed | FailureKind::PullFailed | FailureKind::SendFailed)
    }

    /// Whether it counts as a failed notification too, beside the failed transfers that all of them are.
    pub fn is_notification(self) -> bool {
        matches!(self, FailureKind::NotificationFailed | FailureKind::PushRegNotifFailed)
    }
}

/// One failed step with what is known about it. Its text is the log line: a prefix to look for, the kind, and an
/// object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferFailure {
    /// Which step.
    pub kind: FailureKind,
    /// The request, if it was for one.
    pub request: Option<RequestId>,
    /// The peer's name of the request.
    pub remote_request: Option<RequestId>,
    /// The peer.
    pub engine: Option<EngineId>,
    /// Where its side channel is.
    pub address: Option<Address>,
    /// Which of its workers.
    pub rank: Option<WorkerRank>,
    /// Local blocks of the request, counted for each KV cache group.
    pub blocks: Vec<usize>,
    /// What the transport said.
    pub error: String,
}

impl TransferFailure {
    /// A failure of which only the step and the error are known.
    pub fn new(kind: FailureKind, error: impl Into<String>) -> Self {
        TransferFailure {
            kind,
            request: None,
            remote_request: None,
            engine: None,
            address: None,
            rank: None,
            blocks: Vec::new(),
            error: error.into(),
        }
    }

    /// The end of a lease, and the setting by which it would last longer.
    pub(crate) fn lease_expired(request: &RequestId, setting: &str) -> Self {
        TransferFailure {
            request: Some(request.clone()),
            ..TransferFailure::new(
                FailureKind::LeaseExpired,
                format!("no decode fetched its blocks in time; they are kept for {setting}"),
            )
        }
    }

    /// What is known, by name.
    pub fn context(&self) -> Map<String, Value> {
        let mut context = Map::new();
        let mut add = |key: &str, value: Option<Value>| {
            if let Some(value) = value {
                context.insert(key.to_owned(), value);
            }
        };
        add("request_id", self.request.as_ref().map(|id| id.as_str().into()));
        add("remote_request_id", self.remote_request.as_ref().map(|id| id.as_str().into()));
        add("remote_engine_id", self.engine.as_ref().map(|id| id.as_str().into()));
        add("remote_host", self.address.as_ref().map(|at| (*at.host).into()));
        add("remote_port", self.address.as_ref().map(|at| at.port.into()));
        add("remote_pp_rank", self.rank.map(|rank| rank.pp.into()));
        add("remote_tp_rank", self.rank.map(|rank| rank.tp.into()));
        add(
            "num_local_blocks",
            (!self.blocks.is_empty()).then(|| self.blocks.iter().sum::<usize>().into()),
        );
        // One group is the ordinary model; several are told apart.
        add(
            "num_local_blocks_per_group",
            (self.blocks.len() > 1).then(|| self.blocks.clone().into()),
        );
        add("error", Some(self.error.as_str().into()));
        context
    }
}

impl fmt::Display for TransferFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (FailureKind::LeaseExpired, Some(request)) = (self.kind, &self.request) {
            return write!(f, "the lease of request {request} has expired: {}", self.error);
        }
        let connector = if self.kind.is_of_mooncake() { "Mooncake" } else { "NIXL" };
        write!(
            f,
            "{connector} transfer failure: {} {}",
            self.kind.as_str(),
            Value::Object(self.context())
        )
    }
}

/// A handshake that brought no plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandshakeFailure {
    /// The peer answered, but it and this engine do not fit together. Else it did not answer, or not in words.
    pub setup: bool,
    /// Why, in a sentence.
    pub error: String,
}

/// A move that did not succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoveFailure {
    /// Which step.
    pub kind: FailureKind,
    /// Nothing touches its memory any more. Else [`Worker::move_settled`](super::Worker::move_settled) says so later, or
    /// [`Worker::move_forgotten`](super::Worker::move_forgotten) that nobody ever will.
    pub settled: bool,
    /// What the handshake described is no longer there: the peer has restarted, or is gone. It is asked anew, later.
    pub peer_is_gone: bool,
    /// Why, in a sentence.
    pub error: String,
}
