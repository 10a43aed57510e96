//! Connects two engines that keep one dense tensor per sequence, as mistral.rs and llama.cpp do.
//! One prefills, the other decodes. They have no blocks, so the connector copies between the
//! tensors and a pool of blocks.
//!
//! `cargo run --features connector --example dense_engine` runs both in one process.

use kvx::config::{KvTransferConfig, Role};
use kvx::connector::{
    CompatibilityFactors, Connector, Decode, DenseModel, DensePool, DenseShape, DenseView,
    DenseViewMut, KvLayout, Prefill, WorkerRank,
};
use std::time::Duration;

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Every wait has a deadline.
const SOON: Duration = Duration::from_secs(10);
const LAYERS: usize = 4;
const HEADS: usize = 2;
/// Bytes of one token's K in one head: 64 elements of two bytes.
const ROW: usize = 128;

/// Builds the connector of an engine, and its pool of blocks.
fn engine(name: &str) -> Result<(Connector, DensePool)> {
    let config = KvTransferConfig::builder("NixlConnector").role(Role::Both).engine_id(name);
    let config = config.build()?;
    let mut factors = CompatibilityFactors::from_config(&config, "toy");
    (factors.num_kv_heads, factors.head_size, factors.num_hidden_layers) =
        (HEADS as u32, 64, LAYERS as u32);
    let connector =
        Connector::builder(&config, kvx::registry(), factors).any_port().build_blocking()?;
    let model = DenseModel {
        layers: (0..LAYERS).map(|at| format!("model.layers.{at}.attn").into()).collect(),
        heads: HEADS as u32,
        rank_heads: HEADS,
        row: ROW,
        block_tokens: 16,
        layout: KvLayout::Lbhnc,
    };
    let pool = DensePool::new(model, 64)?;
    connector.rank(WorkerRank::default())?.register(pool.caches()?, [pool.memory().clone()])?;
    Ok((connector, pool))
}

/// Returns one byte of a layer's K (0) or V (1), in place of a forward pass.
fn element(layer: usize, kv: usize, head: usize, token: usize, at: usize) -> u8 {
    (layer * 89 + kv * 53 + head * 31 + token * 7 + at) as u8
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result {
    let tokens = 37;
    let (prefill, prefill_pool) = engine("prefill")?;
    let (decode, decode_pool) = engine("decode")?;

    // The prefill's tensors have the shape [head][token][dim], with a capacity of 64 tokens.
    let theirs = DenseShape::heads_outermost(HEADS, 64, ROW);
    let tensor = |layer: usize, kv: usize| -> Vec<u8> {
        let row = |head, token| (0..ROW).map(move |at| element(layer, kv, head, token, at));
        (0..HEADS).flat_map(|head| (0..64).flat_map(move |token| row(head, token))).collect()
    };
    let tensors: Vec<[Vec<u8>; 2]> =
        (0..LAYERS).map(|layer| [0, 1].map(|kv| tensor(layer, kv))).collect();
    let views: Vec<_> = tensors
        .iter()
        .map(|kv| [0, 1].map(|at| DenseView { bytes: &kv[at], shape: theirs }))
        .collect();
    let (lease, params) = Prefill::new(&prefill).save("request", &prefill_pool, tokens, &views)?;

    // The decode's tensors have the shape [token][head][dim], with a capacity of 48 tokens.
    let ours = DenseShape::tokens_outermost(HEADS, 48, ROW);
    let mut loaded = vec![[vec![0; 48 * HEADS * ROW], vec![0; 48 * HEADS * ROW]]; LAYERS];
    let mut views: Vec<_> = loaded
        .iter_mut()
        .map(|kv| kv.each_mut().map(|bytes| DenseViewMut { bytes, shape: ours }))
        .collect();
    let done = Decode::new(&decode)
        .load("request", &params, &decode_pool, tokens, &mut views, SOON)
        .await?;
    println!(
        "tokens {:?} have arrived; the engine computes the last one of a prompt again",
        done.tokens
    );

    for (layer, kv) in loaded.iter().enumerate() {
        for (which, bytes) in kv.iter().enumerate() {
            for token in 0..tokens.min(done.tokens.end as usize) {
                for head in 0..HEADS {
                    let row = &bytes[token * ours.token_stride + head * ours.head_stride..][..ROW];
                    assert!(
                        row.iter()
                            .enumerate()
                            .all(|(at, byte)| *byte == element(layer, which, head, token, at))
                    );
                }
            }
        }
    }
    println!("the prefill's blocks are {:?}", tokio::time::timeout(SOON, lease.released()).await?);
    assert_eq!((prefill_pool.free(), decode_pool.free()), (64, 64));
    Ok(())
}
