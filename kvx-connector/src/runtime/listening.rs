//! The sockets where peers send their questions, by protocol.

use super::mooncake::Channels;
use super::side::SideServer;
use kvx_vllm::engine::WorkerRank;

/// The sockets of a connector, which listen until this is dropped.
#[derive(Debug)]
pub(super) enum PeerSockets {
    Nixl(SideServer),
    Mooncake(Channels),
}

impl PeerSockets {
    /// Stops telling peers about a worker.
    pub(super) fn withdraw(&self, rank: WorkerRank) {
        match self {
            PeerSockets::Nixl(server) => drop(server.withdraw(rank)),
            PeerSockets::Mooncake(channels) => channels.withdraw(rank),
        }
    }
}
