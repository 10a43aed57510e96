#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod nixl;
mod runtime;

#[doc(hidden)]
pub use runtime::fuzz;

// The API that an engine calls.
pub use runtime::{
    Connector, ConnectorBuilder, Decode, DenseBlocks, DenseLease, DenseModel, DensePool, DenseView,
    DenseViewMut, Fetch, Group, HeldBlocks, JoinedRank, Lease, LoadError, Loaded, Prefill, Probe,
    Rank, Released, describe_metrics, probe,
};

// The values that this API takes and returns, as kvx-vllm defines them.
pub use kvx_vllm::Version;
pub use kvx_vllm::engine::{
    Address, Allocation, Arrival, BlockLists, BlockReference, Ending, EngineId, Finished, Kept,
    LoadFailure, METRICS, MOONCAKE_METRICS, Matched, NotLoaded, Outcome, ParamsTrust, RequestId,
    Settings, Status, Then, Time, Withheld, WorkerRank,
};
pub use kvx_vllm::mapping::{
    Caches, DenseShape, Heads, KvLayout, KvTensors, LayerCache, MemoryType,
};
pub use kvx_vllm::params::{ParamsError, TransferParams};
pub use kvx_vllm::wire::{CompatibilityFactors, CompatibilityHash, NixlAgentMetadata};
