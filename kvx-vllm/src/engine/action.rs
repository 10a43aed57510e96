//! Actions that a worker asks its runtime to carry out.

use std::sync::Arc;

use kvx_core::Indices;

use super::remote::RemoteEngine;
use crate::ids::{BlockLists, RequestId, WorkerRank};
use crate::mapping::{Part, Tokens};
use crate::time::Time;
use crate::wire::{PushGrant, PushRegistration};

/// One handshake with a peer and its results, such as descriptors and links. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Connection(pub(crate) u64);

/// The identifier of one read or write. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MoveId(pub(crate) u64);

/// The blocks of one KV cache group that a move transfers, pair by pair, in all layers of the
/// group. All layers, ranks and parts share the lists.
#[derive(Clone, Debug)]
pub struct GroupMove {
    /// The KV cache group.
    pub group: usize,
    /// Local blocks, as indices into the grids of the peer's plan.
    pub local: Indices,
    /// Remote blocks.
    pub remote: Indices,
}

/// The blocks of a move as logical lists, for [`PeerMap::moves`](crate::mapping::PeerMap::moves).
#[derive(Clone, Debug)]
pub struct MoveLists {
    /// Local blocks.
    pub local: BlockLists,
    /// Remote blocks. The peer named them; the worker has checked that they lie within its pool.
    pub remote: BlockLists,
    /// The number of tokens at which the lists end.
    pub tokens: Option<Tokens>,
}

/// Blocks that a read filled, and the generations of the peer's blocks at that time.
#[derive(Clone, Debug)]
pub struct ReadBlocks {
    /// The peer's worker, and the two kinds of memory.
    pub part: Part,
    /// The blocks, pair by pair.
    pub groups: Arc<[GroupMove]>,
    /// The identifier of the peer's pool.
    pub pool: u64,
    /// The peer's logical blocks with their generation counters.
    pub words: Vec<(u32, u64)>,
}

/// A read or write of a request's blocks between this worker and one of the peer's workers.
#[derive(Clone, Debug)]
pub struct Move {
    /// The identifier that the answer carries.
    pub id: MoveId,
    /// The local request.
    pub request: RequestId,
    /// The connection to the peer.
    pub connection: Connection,
    /// The peer's worker, and the two kinds of memory.
    pub part: Part,
    /// The blocks, pair by pair.
    pub groups: Arc<[GroupMove]>,
    /// The moved blocks as logical lists.
    pub lists: MoveLists,
    /// A notification that the runtime sends to the same worker once the data has arrived, and only
    /// then.
    pub notification: Option<Arc<[u8]>>,
    /// The time by which the move must have an outcome, on the worker's clock.
    pub deadline: Time,
    /// Grants of all workers of a kvx decode, which authorize the write. Other decodes send none.
    pub grants: Arc<[PushGrant]>,
}

/// An action that a worker asks for. No action blocks: the runtime reports results by calling
/// [`Worker`](super::Worker).
#[derive(Clone, Debug)]
pub enum Action {
    /// Request the metadata of these workers of the peer, check it, and describe their memory. The
    /// runtime answers with [`connected`](super::Worker::connected).
    Handshake {
        /// The identifier of the connection.
        connection: Connection,
        /// The peer.
        peer: Arc<RemoteEngine>,
        /// The workers of the peer.
        ranks: Vec<WorkerRank>,
    },
    /// Read the remote blocks into the local ones. The runtime answers with
    /// [`move_resolved`](super::Worker::move_resolved). If the move has not settled then,
    /// [`move_settled`](super::Worker::move_settled) or
    /// [`move_forgotten`](super::Worker::move_forgotten) follows.
    Read(Move),
    /// Write the local blocks into the remote ones. The answers are those of a read.
    Write(Move),
    /// Read the pool's identifier and the generation counters of these blocks, after the data. The
    /// runtime answers with [`generations_read`](super::Worker::generations_read).
    ReadGenerations {
        /// The read that these blocks belong to.
        id: MoveId,
        /// The local request.
        request: RequestId,
        /// The connection to the peer.
        connection: Connection,
        /// The worker of the peer.
        rank: WorkerRank,
        /// The peer's logical blocks, group by group. The answer lists their counters in this
        /// order.
        blocks: Arc<[Indices]>,
    },
    /// Compare the blocks that a read filled with the digests that the peer published. The runtime
    /// answers with [`digests_checked`](super::Worker::digests_checked).
    CheckDigests {
        /// The read.
        id: MoveId,
        /// The local request.
        request: RequestId,
        /// The connection to the peer.
        connection: Connection,
        /// The blocks that the read filled.
        blocks: Arc<ReadBlocks>,
    },
    /// Send a notification. The runtime answers only if that fails, with
    /// [`notification_failed`](super::Worker::notification_failed).
    Notify {
        /// The connection to the peer.
        connection: Connection,
        /// The worker of the peer.
        rank: WorkerRank,
        /// The local request.
        request: Option<RequestId>,
        /// The encoded notification.
        bytes: Arc<[u8]>,
    },
    /// Register the blocks of a request with these workers, which then write into them. The
    /// runtime's grants for that end with [`Fence`](Action::Fence) and with the load. The runtime
    /// answers only on failure, with [`notification_failed`](super::Worker::notification_failed).
    Register {
        /// The local request.
        request: RequestId,
        /// The connection to the peer.
        connection: Connection,
        /// The workers of the peer.
        ranks: Vec<WorkerRank>,
        /// The registration to send.
        registration: Box<PushRegistration>,
    },
    /// Reorder and clear the blocks that a load has read, as
    /// [`PeerMap::finishing`](crate::mapping::PeerMap::finishing) specifies. The runtime answers
    /// with [`finished`](super::Worker::finished).
    Finish {
        /// The local request.
        request: RequestId,
        /// The connection to the peer.
        connection: Connection,
        /// The blocks that the moves of all ranks transferred.
        lists: MoveLists,
    },
    /// Cancel a move as soon as possible. It still settles.
    Cancel {
        /// The move.
        id: MoveId,
    },
    /// Make sure that no peer writes into the blocks of a request for that request, now or later.
    /// The runtime answers with [`fenced`](super::Worker::fenced).
    Fence {
        /// The local request.
        request: RequestId,
    },
    /// Close a connection that is no longer in use, and release its descriptors and mappings.
    Disconnect {
        /// The connection.
        connection: Connection,
    },
}
