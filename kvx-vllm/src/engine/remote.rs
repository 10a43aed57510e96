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

impl RemoteEngine {
    /// Creates a peer with one rank of each kind that has not registered its memory again.
    pub fn new(engine: impl Into<EngineId>, address: Address) -> Self {
        let (tp_size, pp_size, dcp_size, registration) = (1, 1, 1, 0);
        RemoteEngine { engine: engine.into(), address, tp_size, pp_size, dcp_size, registration }
    }
}
