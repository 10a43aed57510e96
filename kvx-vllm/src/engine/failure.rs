//! Failures of transfers, and their texts in logs.

use std::fmt;

use serde_json::{Map, Value};

use crate::ids::{Address, EngineId, RequestId, WorkerRank};

/// The reason why a load did not fill all its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadFailure {
    /// The peer is unreachable, or incompatible with this engine.
    Handshake(String),
    /// A read, a registration or a notification failed.
    Transfer(String),
    /// The lease ended, the peer reused the blocks before they were read, or another load has
    /// fetched the request already.
    Stale,
    /// Blocks do not match the digests that the peer published.
    Corrupt,
    /// The parameters are impossible, such as numbers beyond the peer's pool, too few blocks or an
    /// old registration.
    Refused(String),
    /// The peer frees the blocks too soon to fetch them.
    Expiring,
    /// The peer did not push the blocks in time.
    NotPushed,
    /// The request's deadline passed.
    Deadline,
    /// A rank of this engine that runs in its own process is missing.
    Rank(String),
}

impl fmt::Display for LoadFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadFailure::Handshake(why) => write!(f, "the handshake failed: {why}"),
            LoadFailure::Transfer(why) => write!(f, "the transfer failed: {why}"),
            LoadFailure::Stale => f.write_str(
                "the peer no longer held the blocks for this request when they were read; the data \
                 is discarded. Its lease had ended (raise kv_lease_duration at the prefill if \
                 requests wait longer than that), or another load had fetched the request",
            ),
            LoadFailure::Corrupt => f.write_str(
                "blocks that were read do not match the digests that the peer published \
                 (kvx_digest); the data is discarded",
            ),
            LoadFailure::Refused(why) => write!(f, "the load is refused: {why}"),
            LoadFailure::Expiring => f.write_str("the peer is about to free the blocks"),
            LoadFailure::NotPushed => f.write_str("the peer did not send the blocks in time"),
            LoadFailure::Deadline => f.write_str("the request's deadline has passed"),
            LoadFailure::Rank(why) => write!(f, "this engine has lost a rank: {why}"),
        }
    }
}

/// A failed step, under the name that vLLM's log gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// The peer's metadata is incompatible with this engine.
    HandshakeSetupFailed,
    /// The peer's side channel did not answer, or its answer was malformed.
    HandshakeFailed,
    /// A transfer could not be prepared.
    TransferSetupFailed,
    /// A transfer ended in an error.
    TransferFailed,
    /// A transfer ended without a result.
    TransferException,
    /// A transfer could not be ended. Its blocks stay pinned.
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
    /// A prefill did not write the blocks that a decode requested.
    PullFailed,
    /// A prefill could not write blocks that a decode requested.
    SendFailed,
    /// No failed step: the lease of blocks ended before all their readers had read them.
    LeaseExpired,
}

impl FailureKind {
    /// All kinds.
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

    /// Returns the kind's name in logs.
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

    /// Returns whether the step belongs to the MooncakeConnector. Its log lines begin with that
    /// name.
    pub fn is_of_mooncake(self) -> bool {
        matches!(self, FailureKind::QueryFailed | FailureKind::PullFailed | FailureKind::SendFailed)
    }

    /// Returns whether the failure counts as a failed notification in addition to a failed
    /// transfer.
    pub fn is_notification(self) -> bool {
        matches!(self, FailureKind::NotificationFailed | FailureKind::PushRegNotifFailed)
    }
}

/// A failed step and its context. The `Display` text is the log line: a fixed prefix, the kind, and
/// a JSON object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferFailure {
    /// The failed step.
    pub kind: FailureKind,
    /// The request, if the step belongs to one.
    pub request: Option<RequestId>,
    /// The peer's name of the request.
    pub remote_request: Option<RequestId>,
    /// The peer.
    pub engine: Option<EngineId>,
    /// The address of the peer's side channel.
    pub address: Option<Address>,
    /// The worker of the peer.
    pub rank: Option<WorkerRank>,
    /// The number of the request's local blocks in each KV cache group.
    pub blocks: Vec<usize>,
    /// The error of the transport.
    pub error: String,
}

impl TransferFailure {
    /// Creates a failure of which only the step and the error are known.
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

    /// Creates the failure for a lease that ended. `setting` is the setting that would make it
    /// longer.
    pub(crate) fn lease_expired(request: &RequestId, setting: &str) -> Self {
        TransferFailure {
            request: Some(request.clone()),
            ..TransferFailure::new(
                FailureKind::LeaseExpired,
                format!(
                    "no decode fetched its blocks in time: the decodes' log says why; raise \
                     {setting} to keep them longer"
                ),
            )
        }
    }

    /// Returns the known context by name.
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
        // Most models have one group. Several groups are listed separately.
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

/// A handshake that did not yield a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandshakeFailure {
    /// True if the peer answered, but is incompatible with this engine. If false, it did not
    /// answer, or its answer was malformed.
    pub setup: bool,
    /// The reason, in a sentence.
    pub error: String,
}

/// A move that did not succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoveFailure {
    /// The failed step.
    pub kind: FailureKind,
    /// True if the move no longer accesses its memory. If false,
    /// [`Worker::move_settled`](super::Worker::move_settled) reports that later, or
    /// [`Worker::move_forgotten`](super::Worker::move_forgotten) that it will never be known.
    pub settled: bool,
    /// True if the peer has restarted or is gone, so that its metadata is no longer valid. The
    /// worker repeats the handshake later.
    pub peer_is_gone: bool,
    /// The reason, in a sentence.
    pub error: String,
}
