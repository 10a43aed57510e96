//! What a worker asks of the runtime around it.

use std::sync::Arc;

use kvx_core::Indices;

use super::remote::RemoteEngine;
use crate::ids::{BlockLists, RequestId, WorkerRank};
use crate::mapping::{Part, Tokens};
use crate::time::Time;
use crate::wire::{PushGrant, PushRegistration};

/// One handshake with a peer, and what was set up by it: descriptors, links. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Connection(pub(crate) u64);

/// One read or write. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MoveId(pub(crate) u64);

/// The blocks of one KV cache group that a move carries: pair by pair, in all layers of the group. The lists are
/// shared by all layers, ranks and parts.
#[derive(Clone, Debug)]
pub struct GroupMove {
    /// Which group.
    pub group: usize,
    /// Blocks here, in the grids that the peer's plan made for them.
    pub local: Indices,
    /// Blocks there.
    pub remote: Indices,
}

/// The blocks of a move as logical lists: what [`PeerMap::moves`](crate::mapping::PeerMap::moves) takes.
#[derive(Clone, Debug)]
pub struct MoveLists {
    /// Blocks here.
    pub local: BlockLists,
    /// Blocks there: the peer's word, found to lie within its pool.
    pub remote: BlockLists,
    /// Where the lists end.
    pub tokens: Option<Tokens>,
}

/// The blocks that a read has filled, and which generations of the peer's blocks they came from.
#[derive(Clone, Debug)]
pub struct ReadBlocks {
    /// From which worker, and from which memory to which.
    pub part: Part,
    /// What, pair by pair.
    pub groups: Arc<[GroupMove]>,
    /// The peer's word for its pool.
    pub pool: u64,
    /// Logical blocks there with their words.
    pub words: Vec<(u32, u64)>,
}

/// One read or write of a request's blocks between this worker and one of the peer's.
#[derive(Clone, Debug)]
pub struct Move {
    /// Its name in the answer.
    pub id: MoveId,
    /// For which request of ours.
    pub request: RequestId,
    /// With whom.
    pub connection: Connection,
    /// With which of its workers, and from which memory to which.
    pub part: Part,
    /// What, pair by pair.
    pub groups: Arc<[GroupMove]>,
    /// The same as it was told.
    pub lists: MoveLists,
    /// To be sent to the same worker once the data is there, and only then.
    pub notification: Option<Arc<[u8]>>,
    /// It has to have an outcome by then; on the worker's clock.
    pub deadline: Time,
    /// What to write by, where a kvx decode has said so: of all its workers.
    pub grants: Arc<[PushGrant]>,
}

/// What a worker asks for. Nothing here waits: answers come as calls of [`Worker`](super::Worker).
#[derive(Clone, Debug)]
pub enum Action {
    /// Ask these workers of the peer for their metadata, check it, describe their memory. Answer:
    /// [`connected`](super::Worker::connected).
    Handshake {
        /// The name of what comes of it.
        connection: Connection,
        /// Whom.
        peer: Arc<RemoteEngine>,
        /// Which of its workers.
        ranks: Vec<WorkerRank>,
    },
    /// Read the remote blocks into the local ones. Answers: [`move_resolved`](super::Worker::move_resolved), and, if
    /// that was not the end of it, [`move_settled`](super::Worker::move_settled) or
    /// [`move_forgotten`](super::Worker::move_forgotten).
    Read(Move),
    /// Write the local blocks into the remote ones. Answers as for a read.
    Write(Move),
    /// Read the generations of these blocks, the pool's word first, after the data. Answer:
    /// [`generations_read`](super::Worker::generations_read).
    ReadGenerations {
        /// The read they belong to.
        id: MoveId,
        /// For which request of ours.
        request: RequestId,
        /// With whom.
        connection: Connection,
        /// Which worker there.
        rank: WorkerRank,
        /// Logical blocks there, group by group. The words come in this order.
        blocks: Arc<[Indices]>,
    },
    /// Compare the blocks that a read has filled with the digests that the peer has published for them. Answer:
    /// [`digests_checked`](super::Worker::digests_checked).
    CheckDigests {
        /// The read.
        id: MoveId,
        /// For which request of ours.
        request: RequestId,
        /// With whom.
        connection: Connection,
        /// What was read.
        blocks: Arc<ReadBlocks>,
    },
    /// Send a notification. Answer only when it fails: [`notification_failed`](super::Worker::notification_failed).
    Notify {
        /// To whom.
        connection: Connection,
        /// Which worker there.
        rank: WorkerRank,
        /// For which request of ours.
        request: Option<RequestId>,
        /// What.
        bytes: Arc<[u8]>,
    },
    /// Tell these workers where the blocks of a request are to be written. What the runtime grants for that ends with
    /// [`Fence`](Action::Fence), and with the load. Answer only when it fails:
    /// [`notification_failed`](super::Worker::notification_failed).
    Register {
        /// Which request of ours.
        request: RequestId,
        /// Whom.
        connection: Connection,
        /// Which workers there.
        ranks: Vec<WorkerRank>,
        /// What to say.
        registration: Box<PushRegistration>,
    },
    /// Reorder and clear the blocks of a load that were read, as
    /// [`PeerMap::finishing`](crate::mapping::PeerMap::finishing) says. Answer: [`finished`](super::Worker::finished).
    Finish {
        /// Which request.
        request: RequestId,
        /// With whom.
        connection: Connection,
        /// Which blocks: what its moves have carried, all ranks together.
        lists: MoveLists,
    },
    /// End a move as soon as may be. It still settles.
    Cancel {
        /// Which.
        id: MoveId,
    },
    /// See to it that no peer writes into the blocks of a request for that request, now or later. Answer:
    /// [`fenced`](super::Worker::fenced).
    Fence {
        /// Which request.
        request: RequestId,
    },
    /// Forget a connection: nothing uses it any more. Its descriptors and mappings go.
    Disconnect {
        /// Which.
        connection: Connection,
    },
}
