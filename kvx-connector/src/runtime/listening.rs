//! Where peers ask, by the protocol of the connector.

use std::sync::Arc;

use super::mooncake::Channels;
use super::side::SideServer;
use super::state::Shared;
use crate::engine::WorkerRank;

/// What a connector listens with, until it is dropped.
#[derive(Debug)]
pub(super) enum Listening {
    Nixl(SideServer),
    Mooncake(Channels),
}

impl Listening {
    /// There is nothing to tell of a worker any more.
    pub(super) fn withdraw(&self, shared: &Arc<Shared>, rank: WorkerRank) {
        match self {
            Listening::Nixl(server) => drop(server.withdraw(rank)),
            Listening::Mooncake(channels) => channels.withdraw(shared, rank),
        }
    }
}
