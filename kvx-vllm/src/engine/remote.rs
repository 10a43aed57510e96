//! Peers.

use crate::ids::{Address, EngineId};

/// A peer, as a request's parameters name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteEngine {
    /// The engine that is expected at the address.
    pub engine: EngineId,
    /// The address of its side channel.
    pub address: Address,
    /// Its tensor-parallel size.
    pub tp_size: u32,
    /// Its pipeline-parallel size.
    pub pp_size: u32,
    /// Its decode-context-parallel size.
    pub dcp_size: u32,
    /// The number of times that it had registered its memory again.
    pub registration: u64,
}
