//! vLLM's disaggregated prefill and decode, for any engine: NixlConnector (pull, push and
//! bidirectional) of vLLM 0.16, 0.17 and 0.20 to 0.33, and MooncakeConnector.
//!
//! An engine can prefill for a vLLM that decodes, decode for a vLLM that prefills, or do both with
//! other engines on kvx. Programs use this crate as `kvx::connector`.
//!
//! - [`Prefill`] and [`Decode`] publish and load blocks one by one. [`Connector`] has the calls of a
//!   step loop, named as in vLLM's scheduler.
//! - [`Rank`] registers the caches of one worker, in the engine's process or in its own.
//! - [`Releaser`] is for routers: it ends the leases of blocks that no decode will fetch.
//! - [`DensePool`] is for engines with a dense tensor for each sequence.
//! - [`nixl`] gives kvx agents and NIXL agents with the backend KVX access to each other, without a
//!   NIXL library.
//!
//! # Two engines
//!
//! ```
//! # mod kvx {
//! #     pub use {kvx_connector as connector, kvx_core::*, kvx_vllm::config};
//! #     pub fn registry() -> Registry {
//! #         let mut registry = Registry::new();
//! #         registry.add(kvx_native::Shm).unwrap();
//! #         registry
//! #     }
//! # }
//! use std::{error::Error, sync::Arc, time::Duration};
//!
//! use kvx::Memory;
//! use kvx::config::{KvTransferConfig, Role};
//! use kvx::connector::{
//!     BlockLists, Caches, CompatibilityFactors, Connector, Decode, Heads, KvLayout, LayerCache,
//!     Prefill, Released, WorkerRank,
//! };
//!
//! const SOON: Duration = Duration::from_secs(10);
//! /// Four layers have 100 blocks each, of 16 tokens: 2 heads with keys and values of 8 `bf16`.
//! const BLOCKS: u64 = 100;
//! const BLOCK: u64 = 16 * 2 * (2 * 8 * 2);
//!
//! fn engine(cache: &Arc<Memory>) -> kvx::Result<Connector> {
//!     let config = KvTransferConfig::builder("NixlConnector").role(Role::Both).build()?;
//!     let mut model = CompatibilityFactors::from_config(&config, "my-model");
//!     (model.num_kv_heads, model.head_size, model.num_hidden_layers) = (2, 8, 4);
//!     let layer = |at: u64| {
//!         let start = cache.address() + at * BLOCKS * BLOCK;
//!         LayerCache::packed(format!("layers.{at}"), start, BLOCKS as u32, BLOCK, Heads::Sharded(2))
//!     };
//!     let caches = Caches::of_layers((0..4).map(layer).collect(), KvLayout::Lbhnc, 16, 1, 0)?;
//!     let kv = Connector::builder(&config, kvx::registry(), model).any_port().build_blocking()?;
//!     kv.rank(WorkerRank::default())?.register(caches, [Arc::clone(cache)])?;
//!     Ok(kv)
//! }
//!
//! fn main() -> Result<(), Box<dyn Error>> {
//!     let cache = || Memory::pool((4 * BLOCKS * BLOCK) as usize).build().map(Arc::new);
//!     let (here, there) = (cache()?, cache()?);
//!     let (prefill, decode) = (engine(&here)?, engine(&there)?);
//!
//!     // The prefill has computed 40 tokens into its blocks 7, 3 and 5, which stay as they are until
//!     // the lease ends.
//!     here.copy_in(3 * BLOCK as usize, b"layer 0 of tokens 16 to 31")?;
//!     let blocks = BlockLists::single([7, 3, 5]);
//!     let (lease, params) = Prefill::new(&prefill).publish("request 1", blocks, 40)?;
//!
//!     // A router carries `params`, as JSON. The decode already has the first 16 tokens.
//!     let blocks = BlockLists::single([9, 8]);
//!     let fetch = Decode::new(&decode).fetch("request 1", &params, 16, blocks, SOON);
//!     assert_eq!(fetch.join()?.tokens, 16..40); // or fetch.await
//!     let mut got = [0; 26];
//!     there.copy_out(9 * BLOCK as usize, &mut got)?;
//!     assert_eq!(&got, b"layer 0 of tokens 16 to 31");
//!     assert!(matches!(lease.wait_blocking(SOON), Ok(Released::Fetched)));
//!     Ok(())
//! }
//! ```
//!
//! A prefill that expires, restarts or is unreachable ends a fetch with a [`LoadError`], which says
//! what the engine does next.
//!
//! # Outcomes
//!
//! Each load and each lease ends with one [`Outcome`], or with the result of the handle that waits:
//!
//! | outcome | the engine |
//! |---|---|
//! | [`Loaded`](Outcome::Loaded) | counts the tokens as computed, and computes the prompt's last token again |
//! | [`Failed`](Outcome::Failed) | fails or recomputes as `then` says; never caches `invalid`; does not reuse `held` yet |
//! | [`Free`](Outcome::Free) | may reuse the blocks |
//! | [`Lost`](Outcome::Lost) | never uses the blocks again: writes to them cannot be ruled out |
//!
//! Digests (`kvx_digest`) are refused for prefills that publish none, such as a vLLM; for a decode with
//! more ranks than the prefill, because a digest covers a whole block of a rank; for NixlPushConnector;
//! and for device caches without a copy on the host. `publish` hashes on the caller's thread, and
//! published blocks must not grow.
//!
//! With `kv_buffer_device: cpu` and device caches, [`Connector::computed`] copies finished blocks to
//! the host while the engine computes the next chunk. After a copy that hung for 30 s, all further
//! copies fail.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod nixl;
mod runtime;

#[doc(hidden)]
pub use runtime::fuzz;

// The API that an engine calls.
pub use runtime::{
    Connector, ConnectorBuilder, Decode, DenseBlocks, DenseLease, DenseModel, DensePool, DenseView,
    DenseViewMut, Fetch, Group, HeldBlocks, JoinedRank, Lease, LoadError, Loaded, Prefill, Probe,
    Rank, Released, Releaser, describe_metrics, probe,
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
