//! Actions that a worker of a MooncakeConnector asks its runtime to carry out.

use std::sync::Arc;

use super::super::action::{Action, Connection, Move};
use super::layouts::Target;
use crate::ids::{Address, RequestId};
use crate::time::Time;
use crate::wire::mooncake::PullRequest;

/// The identifier of a query to a bootstrap server. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueryId(pub(super) u64);

/// The identifier of a pull, which is sent to a prefill worker on its own connection. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PullId(pub(super) u64);

/// The runtime's identifier of a pull received from a decode worker, by which it finds the way
/// back. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AskId(pub u64);

/// The end of a pull that gets no further answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unanswered {
    /// True if the pull may have arrived. If false, no peer writes for it.
    pub delivered: bool,
    /// The reason, in a sentence.
    pub error: String,
}

/// An action that a worker asks for. No action blocks: the runtime reports results by calling
/// [`MooncakeWorker`](super::MooncakeWorker).
#[derive(Clone, Debug)]
pub enum MooncakeAction {
    /// Send `GET /query` to a bootstrap server. The runtime answers with
    /// [`queried`](super::MooncakeWorker::queried).
    Query {
        /// The query.
        query: QueryId,
        /// The server's address.
        address: Address,
        /// The time by which the query must have an answer.
        deadline: Time,
    },
    /// Send a pull to a prefill worker. A second action with the same identifier replaces the first
    /// one. The runtime reports each answer with [`answered`](super::MooncakeWorker::answered). At
    /// the deadline, or if the connection is lost, it calls
    /// [`unanswered`](super::MooncakeWorker::unanswered).
    Ask {
        /// The identifier of the pull.
        pull: PullId,
        /// The worker's address from the bootstrap server, `tcp://host:port`.
        address: Arc<str>,
        /// The message. The runtime adds the grants, and the memory addresses for a plain Mooncake
        /// agent.
        question: Box<PullRequest>,
        /// True if the bootstrap server lists the worker as a kvx worker.
        is_kvx: bool,
        /// The time after which no answer is expected.
        deadline: Time,
    },
    /// Stop waiting for answers to a pull.
    Hangup {
        /// The pull.
        pull: PullId,
    },
    /// Send an answer to a decode worker. The runtime may drop it if the connection is lost.
    Answer {
        /// The pull that is answered.
        ask: AskId,
        /// The encoded answer.
        bytes: Vec<u8>,
    },
    /// Describe the memory of a decode worker, to write into it. The runtime answers with
    /// [`connected`](super::MooncakeWorker::connected).
    Connect {
        /// The identifier of the connection.
        connection: Connection,
        /// The decode worker.
        target: Arc<Target>,
    },
    /// Write the local blocks into the remote ones. The runtime answers with
    /// [`move_resolved`](super::MooncakeWorker::move_resolved). If the write has not settled then,
    /// [`move_settled`](super::MooncakeWorker::move_settled) or
    /// [`move_forgotten`](super::MooncakeWorker::move_forgotten) follows.
    Write {
        /// The write.
        what: Move,
        /// The decode's name of the request. The decode rejects writes for a request that it has
        /// fenced.
        theirs: RequestId,
    },
    /// An action that every kind of worker may ask for, here one of [`Cancel`](Action::Cancel),
    /// [`Fence`](Action::Fence) and [`Disconnect`](Action::Disconnect).
    Engine(Action),
}
