//! Decode context parallelism: each rank has a part of the sequence, in its own latent.

use std::sync::Arc;

use kvx_connector::{Connector, ConnectorBuilder, Decode, Loaded, Prefill, Released};
use kvx_core::Memory;
use kvx_testkit::test;
use kvx_vllm::engine::WorkerRank;
use kvx_vllm::mapping::{Caches, Heads, KvLayout, KvTensors, LayerCache, MemoryType};
use kvx_vllm::params::TransferParams;

use super::rig::{self, BLOCK, BLOCKS, LAYERS, LIMIT, lists};

/// The size of a layer's block in bytes.
const LEN: usize = 256;

/// Two workers and their pools.
struct Engine {
    connector: Connector,
    pools: Vec<Arc<Memory>>,
}

impl Engine {
    fn new(builder: ConnectorBuilder, dcp: u32) -> Self {
        let connector =
            builder.workers(2, 1).decode_context_parallel(dcp).build_blocking().unwrap();
        let pools: Vec<_> =
            (0..2).map(|_| Arc::new(Memory::pool(place(LAYERS, 0)).build().unwrap())).collect();
        for (pool, tp) in pools.iter().zip(0..) {
            let layer = |at: u64| LayerCache {
                name: format!("layers.{at}.attn").into(),
                tensors: KvTensors::Together(pool.address() + place(at, 0) as u64),
                blocks: BLOCKS,
                block_len: LEN as u64,
                block_stride: LEN as u64,
                group: 0,
                heads: Heads::Replicated,
                memory: MemoryType::Dram,
            };
            let layers = (0..LAYERS).map(layer).collect();
            let caches = Caches::of_layers(layers, KvLayout::Lbhnc, BLOCK, 1, 0).unwrap();
            let rank = connector.rank(WorkerRank { pp: 0, tp }).unwrap();
            rank.register(caches, [Arc::clone(pool)]).unwrap();
        }
        Engine { connector, pools }
    }
}

/// Returns where a block of a layer starts.
fn place(layer: u64, block: u32) -> usize {
    (layer as usize * BLOCKS as usize + block as usize) * LEN
}

/// Returns the bytes of a layer's block on a rank, by the block's place in the request.
fn content(rank: usize, layer: u64, at: usize) -> [u8; LEN] {
    std::array::from_fn(|byte| (byte * 7 + rank * 101 + layer as usize * 31 + at * 13) as u8)
}

/// Publishes and fetches blocks between engines whose ranks have different bytes.
fn each_rank_gets_its_part(start: fn(&str, &str) -> ConnectorBuilder) {
    let [prefill, decode] = ["prefill", "decode"].map(|name| Engine::new(start(name, "{}"), 2));
    let (here, there) = ([3, 9, 4], [7, 1, 30]);
    let blocks = |list: [u32; 3]| {
        (0..LAYERS).flat_map(move |layer| {
            list.into_iter().enumerate().map(move |(at, block)| (layer, at, place(layer, block)))
        })
    };
    for (rank, pool) in prefill.pools.iter().enumerate() {
        for (layer, at, place) in blocks(here) {
            pool.copy_in(place, &content(rank, layer, at)).unwrap();
        }
    }
    let tokens = 3 * BLOCK;
    let (lease, params) =
        Prefill::new(&prefill.connector).publish("r", lists(&here), tokens).unwrap();
    assert_eq!((params.tp_size, params.dcp_size), (Some(2), Some(2)));
    let fetch = Decode::new(&decode.connector).fetch("r", &params, 0, lists(&there), LIMIT);
    assert_eq!(fetch.wait_blocking(LIMIT).unwrap().unwrap(), Loaded { tokens: 0..tokens });
    for (rank, pool) in decode.pools.iter().enumerate() {
        for (layer, at, place) in blocks(there) {
            let mut bytes = [0; LEN];
            pool.copy_out(place, &mut bytes).unwrap();
            assert_eq!(bytes, content(rank, layer, at), "rank {rank}, layer {layer}, block {at}");
        }
    }
    assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
    end([decode, prefill]);
}

// vLLM 43: with equal DCP sizes, each rank reads its part of the sequence
#[test]
fn ranks_that_share_a_sequence_read_each_its_part() {
    each_rank_gets_its_part(rig::builder);
}

// vLLM 43, 47: with equal DCP sizes, a push writes each rank's part of the sequence to it
#[test]
fn ranks_that_share_a_sequence_are_written_each_its_part() {
    each_rank_gets_its_part(rig::Engine::push_builder);
}

// vLLM 43: a peer with a different DCP size is rejected with an error that says why
#[test]
fn a_peer_that_divides_its_sequences_otherwise_is_refused_in_words() {
    let prefill = Engine::new(rig::builder("prefill", "{}"), 2);
    let decode = Engine::new(rig::builder("decode", "{}"), 1);
    let (lease, params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[1]), BLOCK).unwrap();
    let refused = refused(&decode, &params);
    assert!(refused.contains("give both sides the same size"), "{refused}");
    drop(lease);
    end([decode, prefill]);
}

/// Otherwise its ranks would be taken for parts of the sequence that they do not hold.
// vLLM 43: a peer whose handshake and parameters state different DCP sizes is rejected
#[test]
fn a_peer_whose_handshake_says_another_size_is_refused_in_words() {
    let prefill = Engine::new(rig::builder("prefill", "{}"), 1);
    let decode = Engine::new(rig::builder("decode", "{}"), 2);
    let (lease, mut params) =
        Prefill::new(&prefill.connector).publish("r", lists(&[1]), BLOCK).unwrap();
    params.dcp_size = Some(2);
    let refused = refused(&decode, &params);
    assert!(refused.contains("size of 1, and 2 was expected"), "{refused}");
    drop(lease);
    end([decode, prefill]);
}

fn end(engines: [Engine; 2]) {
    for engine in engines {
        engine.connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
    }
}

/// Returns why a load of one block fails.
fn refused(decode: &Engine, params: &TransferParams) -> String {
    let fetch = Decode::new(&decode.connector).fetch("d", params, 0, lists(&[2]), LIMIT);
    fetch.wait_blocking(LIMIT).unwrap().unwrap_err().to_string()
}
