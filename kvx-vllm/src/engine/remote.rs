//! The description of a peer in a request's parameters.

use crate::ids::{Address, EngineId};

/// A peer, as a request's parameters name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteEngine {
    /// The engine that is expected at the address.
    pub engine: EngineId,
    /// The address of the engine's side channel.
    pub address: Address,
    /// The engine's tensor-parallel size.
    pub tp_size: u32,
    /// The engine's pipeline-parallel size.
    pub pp_size: u32,
    /// The engine's decode-context-parallel size.
    pub dcp_size: u32,
    /// The number of times that the engine had registered its memory again.
    pub registration: u64,
}
