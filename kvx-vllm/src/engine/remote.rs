//! Peers.

use crate::ids::{Address, EngineId};

/// A peer as a request's parameters name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteEngine {
    /// Which engine is expected at the address.
    pub engine: EngineId,
    /// Where its side channel listens.
    pub address: Address,
    /// Its tensor-parallel size.
    pub tp_size: u32,
    /// Its pipeline-parallel size.
    pub pp_size: u32,
    /// Its decode-context-parallel size.
    pub dcp_size: u32,
    /// How often it had registered its memory anew.
    pub registration: u64,
}
