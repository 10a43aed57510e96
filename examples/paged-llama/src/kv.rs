//! All of kvx in this server: memory that is registered, a connector, and its step loop's calls.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use kvx::connector::engine::{self, Allocation, Arrival, METRICS, MOONCAKE_METRICS, RequestId, WorkerRank};
pub use kvx::connector::engine::{BlockLists, Kept, LoadFailure, Outcome, Status, Then};
use kvx::connector::mapping::{Caches, Heads, KvLayout, KvTensors, LayerCache, MemoryType};
pub use kvx::connector::params::TransferParams;
use kvx::connector::runtime::{Connector, Rank};
use kvx::connector::{Dialect, wire::CompatibilityFactors};
pub use kvx::{Memory, config::KvTransferConfig};

use crate::engine::{Ending, Limits, Mover, Wake};
use crate::model::{Config, ModelError as Error, Pool, PoolLayout, PoolShape, Result};

pub(crate) fn describe_metrics() {
    kvx::describe_metrics();
    kvx::connector::runtime::describe_metrics();
}

/// The bounds of the buckets that vLLM gives a histogram of transfers.
pub(crate) fn buckets(name: &str) -> Option<&'static [f64]> {
    METRICS.iter().chain(&MOONCAKE_METRICS).find(|metric| metric.name == name)?.buckets
}

/// `kv_transfer_params` of a request; the words say what is wrong with them.
pub(crate) fn transfer_params(value: &serde_json::Value) -> std::result::Result<TransferParams, String> {
    TransferParams::from_value(value).map_err(|error| error.to_string())
}

/// `kv_transfer_params` of an answer.
pub(crate) fn transfer_value(params: &TransferParams) -> serde_json::Value {
    params.to_value(Dialect::default()).unwrap_or_default()
}

/// A pool in memory that kvx can register.
pub fn pool(shape: PoolShape) -> Result<(Pool, Arc<Memory>)> {
    let memory = Arc::new(Memory::pool(shape.bytes()).build().map_err(Error::of)?);
    // SAFETY: the memory lives as long as the pool. Peers read only blocks that are complete, which no step writes, and
    // write only blocks of requests that wait, which no step names.
    unsafe { Pool::over(shape, memory.as_ptr(), memory.len(), memory.clone()) }.map(|pool| (pool, memory))
}

/// The engine's connection with its peers.
pub struct Kv {
    connector: Connector,
    ranks: Vec<Rank>,
    /// Outcomes were taken: whoever wakes the engine may wait for the next ones.
    taken: mpsc::SyncSender<()>,
}

impl Kv {
    /// Registers each rank's pool, and listens to peers of this `model`. A block may be several blocks of the pool.
    pub fn open(
        config: &KvTransferConfig,
        model: &str,
        shape: &PoolShape,
        limits: &Limits,
        whole: &Config,
        memories: Vec<Arc<Memory>>,
        wake: Wake,
    ) -> Result<Self> {
        let mut factors = CompatibilityFactors::from_config(config, model);
        factors.dtype = format!("torch.{}", shape.dtype.name());
        (factors.num_kv_heads, factors.head_size) = (whole.kv_heads as u32, whole.head_dim as u32);
        factors.num_hidden_layers = whole.layers as u32;
        if shape.layout == PoolLayout::VllmCpu {
            factors.attn_backend_name = "CPU_ATTN".into();
        }
        let (tokens, each) = (shape.block_tokens as u32, (limits.block_size / shape.block_tokens) as u32);
        let connector = Connector::builder(config, kvx::registry()).model(factors).block_size(tokens * each);
        let connector = connector.workers(memories.len() as u32, 1).data_parallel_rank(limits.engine as u32);
        let connector = connector.build_blocking().map_err(Error::of)?;
        let layer = |memory: &Memory, at: usize| LayerCache {
            name: format!("model.layers.{at}.self_attn.attn").into(),
            tensors: KvTensors::Together(memory.address() + (at * shape.layer_bytes()) as u64),
            blocks: shape.blocks as u32,
            block_len: shape.block_bytes() as u64,
            block_stride: shape.block_bytes() as u64,
            group: 0,
            heads: Heads::Sharded(whole.kv_heads as u32),
            memory: MemoryType::Dram,
        };
        let layout = if shape.layout == PoolLayout::Nhd { KvLayout::Lbnhc } else { KvLayout::Lbhnc };
        let register = |(tp, memory): (u32, Arc<Memory>)| {
            let layers = (0..shape.layers).map(|at| layer(&memory, at)).collect();
            let caches = Caches::of_layers(layers, layout, tokens, each, 0)?;
            let caches =
                if shape.layout == PoolLayout::VllmCpu { caches.with_transposed_keys() } else { caches };
            connector.rank(WorkerRank { pp: 0, tp })?.register(caches, [memory])
        };
        let ranks = (0..).zip(memories).map(register).collect::<kvx::Result<_>>().map_err(Error::of)?;
        let (taken, again) = mpsc::sync_channel(1);
        let (second, waiting) = (Duration::from_secs(1), connector.clone());
        let waker = move || {
            let news = || waiting.wait(second).then(|| wake()).map_or(Duration::ZERO, |()| second);
            // It ends with the engine, which drops its end of the channel.
            while again.recv_timeout(news()) != Err(mpsc::RecvTimeoutError::Disconnected) {}
        };
        std::thread::Builder::new().name(format!("kv-{}", limits.engine)).spawn(waker).map_err(Error::of)?;
        Ok(Kv { connector, ranks, taken })
    }
}

impl Mover for Kv {
    fn arrived(&mut self, request: &str, prompt_tokens: usize, params: Option<&TransferParams>) {
        let request = &RequestId::from(request);
        let arrival = Arrival { request, prompt_tokens: prompt_tokens as u32, params, deadline: None };
        if let Err(why) = self.connector.on_new_request(arrival) {
            tracing::warn!(%request, "{why}");
        }
    }

    fn offers(&self, request: &str, computed: usize) -> usize {
        self.connector.get_num_new_matched_tokens(&request.into(), computed as u32).tokens as usize
    }

    fn allocated(&mut self, request: &str, fill: &[u32], computed: usize, external: usize) {
        let fill = BlockLists::single(fill);
        let allocation = Allocation { fill, computed: computed as u32, external: external as u32 };
        if let Err(why) = self.connector.update_state_after_alloc(&request.into(), allocation) {
            tracing::error!(request, "{why}");
        }
    }

    fn step(&mut self) -> Vec<Outcome> {
        self.connector.step();
        self.ranks.iter().for_each(Rank::start_load_kv);
        let outcomes = self.connector.outcomes();
        let _ = self.taken.try_send(());
        outcomes
    }

    fn ended(&mut self, ending: Ending<'_>) -> (bool, Option<TransferParams>) {
        let Ending { request, blocks, computed, cached, status } = ending;
        let (blocks, computed, cached) = (BlockLists::single(blocks), computed as u32, Some(cached as u32));
        let ending = engine::Ending { status, blocks, computed, cached, reference: None };
        let finished = self.connector.request_finished(&request.into(), ending);
        (finished.delay_free, finished.params)
    }
}

impl Drop for Kv {
    fn drop(&mut self) {
        if let Err(why) = self.connector.shutdown(Duration::from_secs(5)).wait(Duration::from_secs(6)) {
            tracing::warn!("{why}");
        }
    }
}
