//! What a worker with the MooncakeConnector asks of the runtime around it.

use std::sync::Arc;

use super::super::action::{Action, Connection, Move};
use super::layouts::Target;
use crate::ids::{Address, RequestId};
use crate::time::Time;
use crate::wire::mooncake::PullRequest;

/// One question to a bootstrap server. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueryId(pub(super) u64);

/// One question to a worker of a prefill, on a connection of its own. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PullId(pub(super) u64);

/// One question of a decode's worker, as the runtime names it: the way back to who asked. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AskId(pub u64);

/// No answer comes any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unanswered {
    /// The question may have arrived. Else nobody writes for it.
    pub delivered: bool,
    /// Why, in a sentence.
    pub error: String,
}

/// What a worker asks for. Nothing here waits: answers come as calls of
/// [`MooncakeWorker`](super::MooncakeWorker).
#[derive(Clone, Debug)]
pub enum MooncakeAction {
    /// `GET /query` of a bootstrap server. Answer: [`queried`](super::MooncakeWorker::queried).
    Query {
        /// The question.
        query: QueryId,
        /// Of which server.
        address: Address,
        /// It has to have an answer by then.
        deadline: Time,
    },
    /// Ask a worker of a prefill; a second time for the same question ends the first one. Answers, any number:
    /// [`answered`](super::MooncakeWorker::answered); at the deadline or when the way is gone,
    /// [`unanswered`](super::MooncakeWorker::unanswered).
    Ask {
        /// The question.
        pull: PullId,
        /// `tcp://host:port`, as the bootstrap server tells it.
        address: Arc<str>,
        /// The message. What it grants, and where a plain Mooncake agent finds the memory, the runtime writes in.
        question: Box<PullRequest>,
        /// Whether the worker is one of kvx, as far as the bootstrap server knows.
        is_kvx: bool,
        /// When no answer is waited for any more.
        deadline: Time,
    },
    /// Nothing more is wanted to hear of a question.
    Hangup {
        /// Which.
        pull: PullId,
    },
    /// Send a message to who asked. If there is no way back any more, nothing is lost.
    Answer {
        /// Whom.
        ask: AskId,
        /// The message.
        bytes: Vec<u8>,
    },
    /// Describe the memory of a worker that is to be written to. Answer:
    /// [`connected`](super::MooncakeWorker::connected).
    Connect {
        /// The name of what comes of it.
        connection: Connection,
        /// Whose.
        target: Arc<Target>,
    },
    /// Write the local blocks into the remote ones. Answers:
    /// [`move_resolved`](super::MooncakeWorker::move_resolved), and, if that was not the end of it,
    /// [`move_settled`](super::MooncakeWorker::move_settled) or
    /// [`move_forgotten`](super::MooncakeWorker::move_forgotten).
    Write {
        /// What.
        what: Move,
        /// For which request of the decode: one that it has fenced off is refused there.
        theirs: RequestId,
    },
    /// What any worker may ask for: of these [`Cancel`](Action::Cancel), [`Fence`](Action::Fence) and
    /// [`Disconnect`](Action::Disconnect).
    Engine(Action),
}
