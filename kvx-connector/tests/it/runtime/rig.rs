//! Engines without a model. The bytes of their pools name the request, layer and token that they
//! belong to.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvx_connector::{Connector, ConnectorBuilder, Decode, Loaded, Prefill, Rank, Released};
use kvx_core::{Memory, Registry};
use kvx_testkit::{Hosts, TestDevice};
use kvx_vllm::Version;
use kvx_vllm::config::{KvTransferConfig, Surroundings};
use kvx_vllm::engine::{BlockLists, WorkerRank};
use kvx_vllm::mapping::{Caches, Heads, KvLayout, KvTensors, LayerCache, MemoryType};
use kvx_vllm::params::TransferParams;
use kvx_vllm::wire::CompatibilityFactors;

/// Tokens in a block.
pub(crate) const BLOCK: u32 = 16;
/// Blocks in a pool.
pub(crate) const BLOCKS: u32 = 64;
/// Layers.
pub(crate) const LAYERS: u64 = 3;
/// Heads of the whole model.
pub(crate) const HEADS: u32 = 4;
/// Bytes of a head's content of one token.
const CONTENT: u64 = 8;
/// The variable that tells a process that its pools lie on the first device: [`CUDA`].
pub(crate) const POOL: &str = "KVX_TEST_POOL";
pub(crate) const CUDA: &str = "cuda";
/// The time limit of every wait.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);

pub(crate) fn registry() -> Registry {
    let mut registry = Registry::new();
    registry.add(kvx_native::Shm).unwrap();
    registry.add(kvx_native::Tcp).unwrap();
    registry
}

/// An engine with some workers in this process.
pub(crate) struct Engine {
    pub(crate) connector: Connector,
    pub(crate) ranks: Vec<Rank>,
    pools: Vec<Arc<Memory>>,
    tp: u32,
    blocks: u32,
}

/// Returns the address of a test's engines: on this host, or on the first of two.
pub(crate) fn host() -> String {
    Hosts::way_to_far().map_or_else(|| "127.0.0.1".to_owned(), |_| Hosts::address(1))
}

pub(crate) fn config(engine: &str, extra: &str) -> KvTransferConfig {
    configured(engine, extra, "fail")
}

fn configured(engine: &str, extra: &str, policy: &str) -> KvTransferConfig {
    of_connector("NixlConnector", engine, extra, policy)
}

fn of_connector(connector: &str, engine: &str, extra: &str, policy: &str) -> KvTransferConfig {
    let json = format!(
        r#"{{"kv_connector": "{connector}", "kv_role": "kv_both", "engine_id": "{engine}",
             "kv_load_failure_policy": "{policy}", "kv_connector_extra_config": {extra}}}"#
    );
    let surroundings = Surroundings::default().variable("VLLM_NIXL_SIDE_CHANNEL_HOST", host());
    KvTransferConfig::from_json(&json, &surroundings).unwrap()
}

pub(crate) fn builder(engine: &str, extra: &str) -> ConnectorBuilder {
    built(&config(engine, extra))
}

pub(crate) fn built(config: &KvTransferConfig) -> ConnectorBuilder {
    built_at(config).any_port()
}

fn built_at(config: &KvTransferConfig) -> ConnectorBuilder {
    let mut factors = CompatibilityFactors::new(Version::default(), "a model");
    (factors.num_kv_heads, factors.head_size, factors.num_hidden_layers) =
        (HEADS, 4, LAYERS as u32);
    Connector::builder(config, registry(), factors).block_size(BLOCK)
}

/// Builds the caches of one of `tp` workers in a pool.
pub(crate) fn caches(pool: &Memory, tp: u32) -> Caches {
    let block_len = u64::from(HEADS / tp * BLOCK) * CONTENT;
    let blocks = pool.len() as u64 / LAYERS / block_len;
    let layer = |at: u64| LayerCache {
        name: format!("layers.{at}.attn").into(),
        tensors: KvTensors::Together(pool.address() + at * block_len * blocks),
        blocks: blocks as u32,
        block_len,
        block_stride: block_len,
        group: 0,
        heads: Heads::Sharded(HEADS),
        memory: if pool.kind().is_host() { MemoryType::Dram } else { MemoryType::Vram },
    };
    Caches::of_layers((0..LAYERS).map(layer).collect(), KvLayout::Lbhnc, BLOCK, 1, 0).unwrap()
}

pub(crate) fn pool(tp: u32) -> Arc<Memory> {
    pool_of(tp, BLOCKS)
}

pub(crate) fn pool_of(tp: u32, blocks: u32) -> Arc<Memory> {
    let len = len_of(tp, blocks);
    let on_device = std::env::var(POOL).is_ok_and(|pool| pool == CUDA);
    Arc::new(if on_device {
        kvx_cuda::devices().unwrap()[0].pool(len).build().unwrap()
    } else {
        Memory::pool(len).build().unwrap()
    })
}

/// Returns the size of a pool of `blocks` blocks in bytes.
fn len_of(tp: u32, blocks: u32) -> usize {
    LAYERS as usize * blocks as usize * (HEADS / tp * BLOCK) as usize * CONTENT as usize
}

impl Engine {
    pub(crate) fn new(engine: &str, extra: &str, tp: u32) -> Self {
        Self::of(builder(engine, extra), tp)
    }

    pub(crate) fn with_policy(engine: &str, extra: &str, policy: &str, tp: u32) -> Self {
        Self::of(built(&configured(engine, extra, policy)), tp)
    }

    /// Starts an engine whose prefill writes.
    pub(crate) fn pushing(engine: &str, extra: &str, tp: u32) -> Self {
        Self::of(Self::push_builder(engine, extra), tp)
    }

    pub(crate) fn push_builder(engine: &str, extra: &str) -> ConnectorBuilder {
        built(&of_connector("NixlPushConnector", engine, extra, "fail"))
    }

    /// Starts an engine with the MooncakeConnector.
    pub(crate) fn mooncake(engine: &str, extra: &str, tp: u32) -> Self {
        Self::of(Self::mooncake_builder(engine, extra), tp)
    }

    pub(crate) fn mooncake_builder(engine: &str, extra: &str) -> ConnectorBuilder {
        built(&of_connector("MooncakeConnector", engine, extra, "fail"))
    }

    /// Starts an engine with the MooncakeConnector in this role. Its bootstrap server has this
    /// port.
    pub(crate) fn mooncake_at(
        engine: &str,
        role: &str,
        extra: &str,
        port: u16,
    ) -> ConnectorBuilder {
        let json = format!(
            r#"{{"kv_connector": "MooncakeConnector", "kv_role": "{role}", "engine_id": "{engine}",
                 "kv_connector_extra_config": {extra}}}"#
        );
        let surroundings =
            Surroundings::default().variable("VLLM_MOONCAKE_BOOTSTRAP_PORT", port.to_string());
        built_at(&KvTransferConfig::from_json(&json, &surroundings).unwrap())
    }

    /// Starts an engine whose prefill writes, with `blocks` blocks.
    pub(crate) fn pushing_many(engine: &str, blocks: u32) -> Self {
        let config = of_connector("NixlPushConnector", engine, "{}", "fail");
        Self::sized(built(&config), 1, blocks)
    }

    /// Starts an engine whose pools lie on a device, and whose peers see copies of them on the
    /// host.
    pub(crate) fn on_device(
        device: &Arc<TestDevice>,
        connector: &str,
        engine: &str,
        extra: &str,
        tp: u32,
    ) -> Self {
        let json = format!(
            r#"{{"kv_connector": "{connector}", "kv_role": "kv_both", "engine_id": "{engine}",
                 "kv_buffer_device": "cpu", "kv_connector_extra_config": {extra}}}"#
        );
        let surroundings =
            Surroundings::default().variable("VLLM_NIXL_SIDE_CHANNEL_HOST", host()).gpu(true);
        let builder = built(&KvTransferConfig::from_json(&json, &surroundings).unwrap());
        let pool = || Arc::new(device.allocate(len_of(tp, BLOCKS)));
        Self::with(builder, (0..tp).map(|_| pool()).collect(), BLOCKS)
    }

    pub(crate) fn of(builder: ConnectorBuilder, tp: u32) -> Self {
        Self::sized(builder, tp, BLOCKS)
    }

    fn sized(builder: ConnectorBuilder, tp: u32, blocks: u32) -> Self {
        Self::with(builder, (0..tp).map(|_| pool_of(tp, blocks)).collect(), blocks)
    }

    fn with(builder: ConnectorBuilder, pools: Vec<Arc<Memory>>, blocks: u32) -> Self {
        let tp = pools.len() as u32;
        let connector = builder.workers(tp, 1).build_blocking().unwrap();
        let ranks = pools.iter().zip(0..).map(|(pool, rank)| {
            let rank = connector.rank(WorkerRank { pp: 0, tp: rank }).unwrap();
            rank.register(caches(pool, tp), [Arc::clone(pool)]).unwrap()
        });
        let ranks = ranks.collect();
        Engine { connector, ranks, pools, tp, blocks }
    }

    /// Gives the caches back and registers others.
    pub(crate) fn register_anew(&mut self) {
        (0..self.ranks.len()).for_each(|at| self.register_one_anew(at));
    }

    /// Gives the caches of one worker back and registers others.
    pub(crate) fn register_one_anew(&mut self, at: usize) {
        let (rank, held) = (&self.ranks[at], &mut self.pools[at]);
        rank.give_back(LIMIT).wait_blocking(LIMIT).unwrap();
        *held = pool(self.tp);
        rank.clone().register(caches(held, self.tp), [Arc::clone(held)]).unwrap();
    }

    /// Makes one step: loads that were ordered go to the workers.
    pub(crate) fn step(&self) {
        self.connector.step();
        self.ranks.iter().for_each(Rank::start_load_kv);
    }

    fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        let Engine { tp, blocks, .. } = *self;
        self.pools.iter().zip(0..).map(move |(pool, rank)| Part { pool, tp, rank, blocks })
    }

    /// Computes tokens of a request into these blocks.
    pub(crate) fn compute(&self, request: u16, blocks: &[u32], tokens: u32) {
        self.parts().for_each(|part| part.compute(request, blocks, tokens));
    }

    /// Counts the tokens in these blocks that do not belong to the request.
    pub(crate) fn wrong(&self, request: u16, blocks: &[u32], tokens: Range<u32>) -> usize {
        self.parts().map(|part| part.wrong(request, blocks, tokens.clone())).sum()
    }

    pub(crate) fn end(self) {
        self.connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
    }
}

/// The part of the caches that one of `tp` workers has.
pub(crate) struct Part<'a> {
    pub(crate) pool: &'a Memory,
    pub(crate) tp: u32,
    pub(crate) rank: u32,
    pub(crate) blocks: u32,
}

impl Part<'_> {
    /// Visits each value of these tokens, with its place.
    fn each(
        &self,
        request: u16,
        blocks: &[u32],
        tokens: Range<u32>,
    ) -> impl Iterator<Item = (usize, [u8; CONTENT as usize])> {
        let heads = HEADS / self.tp;
        let block_len = u64::from(heads * BLOCK) * CONTENT;
        let (first, count) = (self.rank * heads, u64::from(self.blocks));
        (0..LAYERS).flat_map(move |layer| {
            let tokens = tokens.clone();
            (0..heads).flat_map(move |head| {
                tokens.clone().map(move |token| {
                    let block = u64::from(blocks[(token / BLOCK) as usize]);
                    let within = u64::from(head * BLOCK + token % BLOCK) * CONTENT;
                    let at = (layer * count + block) * block_len + within;
                    (at as usize, content(request, layer, first + head, token))
                })
            })
        })
    }

    pub(crate) fn compute(&self, request: u16, blocks: &[u32], tokens: u32) {
        for (at, bytes) in self.each(request, blocks, 0..tokens) {
            self.pool.copy_in(at, &bytes).unwrap();
        }
    }

    pub(crate) fn wrong(&self, request: u16, blocks: &[u32], tokens: Range<u32>) -> usize {
        let wrong = self.each(request, blocks, tokens).filter(|(at, right)| {
            let mut bytes = [0; CONTENT as usize];
            self.pool.copy_out(*at, &mut bytes).unwrap();
            bytes != *right
        });
        wrong.count()
    }
}

fn content(request: u16, layer: u64, head: u32, token: u32) -> [u8; CONTENT as usize] {
    let [a, b] = request.to_le_bytes();
    let [c, d, ..] = token.to_le_bytes();
    [a, b, layer as u8, head as u8, c, d, 0x5a, a ^ c ^ layer as u8]
}

pub(crate) fn lists(blocks: &[u32]) -> BlockLists {
    BlockLists::single(blocks)
}

/// Runs a future on this thread, without a runtime.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    kvx_testkit::run(future)
}

/// The numbers of workers of two engines.
pub(crate) const SIZES: [(u32, u32); 5] = [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2)];

/// Sends prompts from an engine of `from` workers to one of `to` workers over this backend.
pub(crate) fn moves_prompts(
    start: fn(&str, &str, u32) -> Engine,
    called: &str,
    backend: &str,
    (from, to): (u32, u32),
) -> TransferParams {
    let extra = format!(r#"{{"backends": ["{backend}"]}}"#);
    let (prefill, decode) = (start("prefill", &extra, from), start("decode", &extra, to));
    prompts_arrive(prefill, decode, called, &format!("{backend} {from} to {to}"))
}

/// Publishes three prompts at one engine and fetches them at the other, which calls them by these
/// names. Then both end. Returns the parameters that the last decode got.
fn prompts_arrive(prefill: Engine, decode: Engine, called: &str, what: &str) -> TransferParams {
    let (here, there) = ([3, 9, 4], [7, 1, 30]);
    let tokens = 2 * BLOCK + 5;
    let round = |round| {
        prefill.compute(round, &here, tokens);
        let name = format!("r{round}");
        let (lease, params) =
            Prefill::new(&prefill.connector).publish(&*name, lists(&here), tokens).unwrap();
        let loaded = block_on(Decode::new(&decode.connector).fetch(
            format!("{called}{round}"),
            &params,
            0,
            lists(&there),
            LIMIT,
        ));
        let loaded = loaded.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(loaded, Loaded { tokens: 0..tokens });
        assert_eq!(decode.wrong(round, &there, 0..tokens), 0, "{what}");
        assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
        params
    };
    let params = [0, 1, 2].map(round).into_iter().next_back().unwrap();
    assert!(prefill.connector.is_idle() && decode.connector.is_idle());
    decode.end();
    prefill.end();
    params
}
