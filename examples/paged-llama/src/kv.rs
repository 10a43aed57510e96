//! All uses of kvx in this server: registered memory, a connector, and the calls of its step loop.

use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

pub(crate) use kvx::connector::describe_metrics as describe_connector_metrics;
use kvx::connector::{Allocation, Arrival, Caches, Heads, KvLayout, LayerCache, RequestId};
pub use kvx::connector::{BlockLists, Kept, LoadFailure, Outcome, TransferParams};
use kvx::connector::{CompatibilityFactors, Connector, JoinedRank, WorkerRank};
pub(crate) use kvx::connector::{METRICS, MOONCAKE_METRICS, Rank};
pub use kvx::connector::{ParamsTrust, Status, Then};
pub(crate) use kvx::describe_metrics;
pub use kvx::{Memory, Secret, config::KvTransferConfig};

use crate::engine::{FinishedRequest, Mover, Wake};
use crate::model::{ModelError as Error, Pool, PoolLayout, PoolShape, Result};
use crate::rank::{AllRanks, PATIENCE, PrivateFolder, RankSetup};

/// Allocates a pool in memory that kvx can register.
pub fn pool(shape: PoolShape) -> Result<(Pool, Arc<Memory>)> {
    let memory = Arc::new(Memory::pool(shape.bytes()).build().map_err(Error::of)?);
    // SAFETY: `memory.clone()` keeps the memory alive as long as the pool. Peers read only complete
    // blocks, which no step writes, and write only blocks of waiting requests, which no step names.
    let pool = unsafe { Pool::over(shape, memory.as_ptr(), memory.len(), memory.clone()) };
    Ok((pool?, memory))
}

/// Joins a rank in a separate process to the engine's connector.
pub(crate) fn join(path: &Path, setup: &RankSetup, memory: Arc<Memory>) -> kvx::Result<JoinedRank> {
    let rank = WorkerRank { pp: 0, tp: setup.rank as u32 };
    let joined = Rank::join(path, rank, kvx::registry(), PATIENCE)?;
    joined.register(caches(&memory, setup)?, [memory]).map(|()| joined)
}

/// Describes the layout of a rank's pool. An engine's block may be several blocks of the pool.
fn caches(memory: &Memory, setup: &RankSetup) -> kvx::Result<Caches> {
    let shape = &setup.shape;
    let layer = |at: usize| {
        let address = memory.address() + (at * shape.layer_bytes()) as u64;
        let (blocks, len) = (shape.blocks as u32, shape.block_bytes() as u64);
        let heads = Heads::Sharded(setup.kv_heads as u32);
        LayerCache::packed(format!("model.layers.{at}.self_attn.attn"), address, blocks, len, heads)
    };
    let layout = if shape.layout == PoolLayout::Nhd { KvLayout::Lbnhc } else { KvLayout::Lbhnc };
    let (tokens, each) = (shape.block_tokens, setup.block_size / shape.block_tokens);
    let layers = (0..shape.layers).map(layer).collect();
    let caches = Caches::of_layers(layers, layout, tokens as u32, each as u32, 0)?;
    Ok(if shape.layout == PoolLayout::VllmCpu { caches.with_transposed_keys() } else { caches })
}

/// The engine's connection to its peers.
pub(crate) struct Kv {
    connector: Connector,
    ranks: Vec<Rank>,
    /// Signals that outcomes were taken, so that the waker thread waits for the next ones.
    taken: mpsc::SyncSender<()>,
}

impl Kv {
    /// Registers the ranks' pools, and listens for peers with this `model`.
    pub(crate) fn open(
        (config, model): (&KvTransferConfig, &str),
        all: &mut AllRanks,
        wake: Wake,
    ) -> Result<Kv> {
        let AllRanks { setup, memories, .. } = &*all;
        let (shape, engine, count) = (setup.shape, setup.engine as u32, setup.size as u32);
        let mut factors = CompatibilityFactors::from_config(config, model);
        factors.dtype = format!("torch.{}", shape.dtype.name());
        (factors.num_kv_heads, factors.head_size) = (setup.kv_heads as u32, shape.head_dim as u32);
        factors.num_hidden_layers = shape.layers as u32;
        if shape.layout == PoolLayout::VllmCpu {
            factors.attn_backend_name = "CPU_ATTN".into();
        }
        let connector = Connector::builder(config, kvx::registry(), factors);
        let connector = connector.workers(count, 1).block_size(setup.block_size as u32);
        let connector = connector.data_parallel_rank(engine).build_blocking().map_err(Error::of)?;
        let rank = |tp: u32| {
            let rank = connector.rank(WorkerRank { pp: 0, tp })?;
            let Some(memory) = memories.get(tp as usize) else { return Ok(rank) };
            rank.register(caches(memory, setup)?, [memory.clone()])
        };
        let ranks = (0..count).map(rank).collect::<kvx::Result<_>>().map_err(Error::of)?;
        if memories.len() < setup.size {
            let folder = PrivateFolder::new()?;
            let joined = connector.group(folder.socket(), PATIENCE);
            all.join_at(folder, || joined.wait_blocking(2 * PATIENCE).map_err(Error::of))?;
        }
        let (taken, again) = mpsc::sync_channel(1);
        let (second, waiting) = (Duration::from_secs(1), connector.clone());
        let waker = move || {
            let news = || {
                waiting
                    .outcomes_ready_blocking(second)
                    .then(|| wake())
                    .map_or(Duration::ZERO, |()| second)
            };
            // The thread ends with the engine, which drops its end of the channel.
            while again.recv_timeout(news()) != Err(mpsc::RecvTimeoutError::Disconnected) {}
        };
        std::thread::Builder::new().name(format!("kv-{engine}")).spawn(waker).map_err(Error::of)?;
        Ok(Kv { connector, ranks, taken })
    }
}

impl Mover for Kv {
    fn on_request(&mut self, request: &str, prompt_tokens: usize, params: Option<&TransferParams>) {
        let (request, prompt_tokens) = (&RequestId::from(request), prompt_tokens as u32);
        let arrival = Arrival { request, prompt_tokens, params, deadline: None };
        let noted = self.connector.on_new_request(arrival);
        noted.unwrap_or_else(|why| tracing::warn!(%request, "{why}"));
    }

    fn matched_tokens(&self, request: &str, computed: usize) -> usize {
        self.connector.get_num_new_matched_tokens(&request.into(), computed as u32).tokens as usize
    }

    fn on_allocated(&mut self, request: &str, fill: &[u32], computed: usize, external: usize) {
        let fill = BlockLists::single(fill);
        let allocation = Allocation { fill, computed: computed as u32, external: external as u32 };
        let noted = self.connector.update_state_after_alloc(&request.into(), allocation);
        noted.unwrap_or_else(|why| tracing::error!(request, "{why}"));
    }

    fn step(&mut self) -> Vec<Outcome> {
        self.connector.step();
        self.ranks.iter().for_each(Rank::start_load_kv);
        let outcomes = self.connector.outcomes();
        let _ = self.taken.try_send(());
        outcomes
    }

    fn on_finished(&mut self, finished: FinishedRequest<'_>) -> (bool, Option<TransferParams>) {
        let FinishedRequest { request, status, .. } = finished;
        let (blocks, cached) = (BlockLists::single(finished.blocks), Some(finished.cached as u32));
        let computed = finished.computed as u32;
        let ending = kvx::connector::Ending { status, blocks, computed, cached, reference: None };
        let finished = self.connector.request_finished(&request.into(), ending);
        (finished.delay_free, finished.params)
    }
}

impl Drop for Kv {
    fn drop(&mut self) {
        let stopped =
            self.connector.shutdown(Duration::from_secs(5)).wait_blocking(Duration::from_secs(6));
        stopped.map_or_else(|why| tracing::warn!("{why}"), drop);
    }
}
