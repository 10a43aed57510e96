//! The sockets where peers ask, by the protocol of the connector.

use super::mooncake::Channels;
use super::side::SideServer;
use kvx_vllm::engine::WorkerRank;

/// The sockets that a connector listens with, until this is dropped.
#[derive(Debug)]
pub(super) enum PeerSockets {
    Nixl(SideServer),
    Mooncake(Channels),
}

impl PeerSockets {
    /// Peers are not told of a worker any more.
    pub(super) fn withdraw(&self, rank: WorkerRank) {
        match self {
            PeerSockets::Nixl(server) => drop(server.withdraw(rank)),
            PeerSockets::Mooncake(channels) => channels.withdraw(rank),
        }
    }
}
