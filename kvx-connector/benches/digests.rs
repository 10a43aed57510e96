//! The cost of `kvx_digest` at a prefill and at a decode, next to hashing the same bytes alone: 64
//! MiB in blocks of 16 KiB. `--bars` prints the figures that `cargo xtask limits` asks for.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_connector::{Connector, Decode, Prefill};
use kvx_core::{Memory, Registry};
use kvx_vllm::Version;
use kvx_vllm::config::{KvTransferConfig, Surroundings};
use kvx_vllm::engine::{BlockLists, WorkerRank};
use kvx_vllm::mapping::{Caches, Heads, KvLayout, KvTensors, LayerCache, MemoryType};
use kvx_vllm::wire::CompatibilityFactors;
use twox_hash::XxHash3_64;

const LAYERS: usize = 8;
const BLOCK: usize = 16 << 10;
const BLOCKS: usize = 512;
const TOKENS: u32 = 16;
const ROUNDS: usize = 31;
const PATIENCE: Duration = Duration::from_secs(30);

/// Starts an engine with a pool in which all layers differ.
fn engine(name: &str, digests: bool) -> (Connector, Arc<Memory>) {
    let json = format!(
        r#"{{"kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": "{name}-{digests}",
             "kv_connector_extra_config": {{"backends": ["SHM"], "kvx_digest": {digests}}}}}"#
    );
    let surroundings = Surroundings::default().variable("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1");
    let config = KvTransferConfig::from_json(&json, &surroundings).expect("a right configuration");
    let mut factors = CompatibilityFactors::new(Version::default(), "a model");
    (factors.num_kv_heads, factors.num_hidden_layers) = (1, LAYERS as u32);
    let mut registry = Registry::new();
    registry.add(kvx_native::Shm).expect("a name of its own");
    let builder = Connector::builder(&config, registry, factors).block_size(TOKENS).any_port();
    let connector = builder.build_blocking().expect("a side channel");
    let pool = Arc::new(Memory::pool(LAYERS * BLOCKS * BLOCK).build().expect("64 MiB"));
    let layer = |at: usize| {
        pool.copy_in(at * BLOCKS * BLOCK, &vec![at as u8 + 1; BLOCKS * BLOCK])
            .expect("it is within");
        LayerCache {
            name: format!("layers.{at}").into(),
            tensors: KvTensors::Together(pool.address() + (at * BLOCKS * BLOCK) as u64),
            blocks: BLOCKS as u32,
            block_len: BLOCK as u64,
            block_stride: BLOCK as u64,
            group: 0,
            heads: Heads::Replicated,
            memory: MemoryType::Dram,
        }
    };
    let caches = Caches::of_layers((0..LAYERS).map(layer).collect(), KvLayout::Lbhnc, TOKENS, 1, 0);
    let rank = connector.rank(WorkerRank { pp: 0, tp: 0 }).expect("its only worker");
    rank.register(caches.expect("right caches"), [Arc::clone(&pool)]).expect("host memory");
    (connector, pool)
}

/// Returns all blocks, in an order without neighbours.
fn scattered() -> Vec<u32> {
    (0..BLOCKS).map(|at| (at * 509 % BLOCKS) as u32).collect()
}

/// Measures the seconds of a prefill's `publish`, and of a decode's load until its outcome.
fn both([prefill, decode]: &[(Connector, Arc<Memory>); 2], round: usize) -> [f64; 2] {
    let lists = || BlockLists::single(scattered());
    let began = Instant::now();
    let published =
        Prefill::new(&prefill.0).publish(format!("r{round}"), lists(), BLOCKS as u32 * TOKENS);
    let (lease, params) = published.expect("right blocks");
    let publishing = began.elapsed();
    let began = Instant::now();
    let fetch = Decode::new(&decode.0).fetch(format!("d{round}"), &params, 0, lists(), PATIENCE);
    fetch.wait_blocking(PATIENCE).expect("by its deadline").expect("it loads");
    let fetching = began.elapsed();
    drop(lease.wait_blocking(PATIENCE));
    [publishing, fetching].map(|took| took.as_secs_f64())
}

/// Measures the seconds of hashing the same blocks in place, in the same order.
fn hashing(bytes: &[u8]) -> f64 {
    let began = Instant::now();
    for block in scattered() {
        for layer in 0..LAYERS {
            let bytes = &bytes[(layer * BLOCKS + block as usize) * BLOCK..][..BLOCK];
            black_box(XxHash3_64::oneshot_with_seed(layer as u64, bytes));
        }
    }
    began.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let [without, with] =
        [false, true].map(|digests| [engine("prefill", digests), engine("decode", digests)]);
    let bytes: Vec<u8> = (0..LAYERS * BLOCKS * BLOCK).map(|at| at as u8).collect();
    let rounds: Vec<_> = (0..ROUNDS)
        .map(|round| (both(&without, round), both(&with, round), hashing(&bytes)))
        .collect();
    let alone = median(rounds.iter().map(|round| round.2).collect());
    let bars = std::env::args().any(|argument| argument == "--bars");
    if !bars {
        println!(
            "64 MiB over SHM, {ROUNDS} interleaved rounds, medians; hashing alone: {:.2} ms",
            alone * 1e3
        );
    }
    for (at, what) in ["publishing", "loading"].into_iter().enumerate() {
        let added =
            median(rounds.iter().map(|round| (round.1[at] - round.0[at]) / round.2).collect());
        let [without, with] = [
            median(rounds.iter().map(|round| round.0[at] * 1e3).collect()),
            median(rounds.iter().map(|round| round.1[at] * 1e3).collect()),
        ];
        if bars {
            println!("{{\"cost\":\"digests_{what}\",\"value\":{added}}}");
        } else {
            println!(
                "{what}: {without:.2} ms without digests, {with:.2} ms with: {added:.2} of hashing alone more"
            );
        }
    }
}
