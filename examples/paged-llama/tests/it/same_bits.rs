//! Tests that logits have the same bits whatever a step contains, however a prompt is divided, and
//! whichever rank computes it.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use kvx_paged_llama::model::{
    Architecture, Chunk, Dtype, LogitsScope, Model, Pool, PoolLayout, Shard, SimdLevel,
};
use kvx_random_model::ModelSpec;
use kvx_testkit::test;
use proptest::prelude::*;

use crate::folder::{Folder, fill_with_noise};

/// Returns a small model with awkward sizes: rows and columns that no tile divides, and two query
/// heads per KV head.
fn crooked(architecture: Architecture) -> ModelSpec {
    let head_dim = if architecture == Architecture::Qwen2 { 20 } else { 24 };
    ModelSpec {
        architecture,
        layers: 2,
        hidden: 160,
        intermediate: 328,
        heads: 8,
        kv_heads: 4,
        head_dim,
        ..ModelSpec::default()
    }
}

fn prompt(len: usize, seed: u32) -> Vec<u32> {
    (0..len as u32).map(|at| (at * 37 + seed * 101 + at * at * seed) % 259).collect()
}

fn pool(model: &Model, block_tokens: usize, dtype: Dtype, layout: PoolLayout) -> Pool {
    let pool = Pool::allocate(model.pool_shape(
        256usize.div_ceil(block_tokens) * 3,
        block_tokens,
        dtype,
        layout,
    ))
    .unwrap();
    // The data of other requests in a block must not matter.
    fill_with_noise(pool)
}

/// Returns all logits of `tokens`, in chunks that end at `cuts`. Runs `before` ahead of each chunk.
fn run(
    before: impl Fn(),
    model: &Model,
    pool: &mut Pool,
    tokens: &[u32],
    cuts: &[usize],
    first_block: u32,
) -> Vec<Vec<f32>> {
    let count = tokens.len().div_ceil(pool.shape().block_tokens) as u32;
    let blocks: Vec<u32> = (first_block..first_block + count).rev().collect();
    let mut logits = Vec::new();
    let mut start = 0;
    for end in cuts.iter().copied().filter(|cut| *cut < tokens.len()).chain([tokens.len()]) {
        if end > start {
            let chunk = Chunk {
                tokens: &tokens[start..end],
                start,
                blocks: &blocks,
                logits: LogitsScope::All,
            };
            before();
            logits.extend(model.forward(pool, &[chunk]).unwrap().of(0).map(<[f32]>::to_vec));
            start = end;
        }
    }
    logits
}

fn bits(logits: &[Vec<f32>]) -> Vec<Vec<u32>> {
    logits.iter().map(|row| row.iter().map(|score| score.to_bits()).collect()).collect()
}

#[test]
fn chunks_and_neighbours_change_no_bit() {
    for (architecture, ..) in Architecture::ALL {
        let folder = Folder::with(&crooked(architecture));
        let model = Model::open(folder.path(), Shard::alone()).unwrap();
        let tokens = prompt(45, 1);
        let mut alone = pool(&model, 16, Dtype::F32, PoolLayout::Hnd);
        let one_by_one: Vec<_> = (1..=45).collect();
        let expected = bits(&run(|| {}, &model, &mut alone, &tokens, &one_by_one, 0));
        assert!(expected.iter().flatten().all(|bits| f32::from_bits(*bits).is_finite()));
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
            cases: 12,
            ..ProptestConfig::default()
        });
        let steps = (
            prop::collection::btree_set(1..45_usize, 0..6),
            prop::collection::vec(1..30_usize, 0..4),
        );
        runner
            .run(&steps, |(cuts, others)| {
                let mut shared = pool(&model, 16, Dtype::F32, PoolLayout::Hnd);
                let others: Vec<Vec<u32>> = others
                    .iter()
                    .enumerate()
                    .map(|(seed, len)| prompt(*len, seed as u32 + 2))
                    .collect();
                let (blocks, mut got, mut start) = ([5, 0, 7], Vec::new(), 0);
                for end in cuts.into_iter().chain([45]) {
                    let other_blocks: Vec<[u32; 2]> =
                        (0..4).map(|other| [20 + 2 * other, 21 + 2 * other]).collect();
                    let mut step: Vec<Chunk<'_>> = others
                        .iter()
                        .zip(&other_blocks)
                        .map(|(tokens, blocks)| Chunk {
                            tokens,
                            start: 0,
                            blocks,
                            logits: LogitsScope::Last,
                        })
                        .collect();
                    let place = start % (step.len() + 1);
                    let chunk = Chunk {
                        tokens: &tokens[start..end],
                        start,
                        blocks: &blocks,
                        logits: LogitsScope::All,
                    };
                    step.insert(place, chunk);
                    got.extend(
                        model.forward(&mut shared, &step).unwrap().of(place).map(<[f32]>::to_vec),
                    );
                    start = end;
                }
                prop_assert!(bits(&got) == expected, "{architecture:?}");
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn levels_threads_layouts_block_sizes_and_files_change_no_bit() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let made = ModelSpec { dtype, ..crooked(Architecture::Qwen3) };
        let folder = Folder::with(&made);
        let open = || Model::open(folder.path(), Shard::alone()).unwrap();
        let tokens = prompt(70, 3);
        let with = |model: &Model, block_tokens, layout| {
            let mut pool = pool(model, block_tokens, dtype, layout);
            bits(&run(|| {}, model, &mut pool, &tokens, &[33, 64], 1))
        };
        let expected = with(&open(), 16, PoolLayout::Hnd);
        for level in [SimdLevel::Portable, SimdLevel::Avx2, SimdLevel::Avx512] {
            if level.is_here() {
                assert_eq!(
                    with(&open().with_level(level), 16, PoolLayout::Hnd),
                    expected,
                    "{level:?} {dtype:?}"
                );
            }
        }
        for threads in [1, 2, 5] {
            assert_eq!(
                with(&open().with_threads(threads), 16, PoolLayout::Hnd),
                expected,
                "{threads} threads"
            );
        }
        for layout in [PoolLayout::Hnd, PoolLayout::Nhd, PoolLayout::VllmCpu] {
            for block_tokens in [1, 7, 16, 64, 128] {
                assert_eq!(
                    with(&open(), block_tokens, layout),
                    expected,
                    "{layout:?}, blocks of {block_tokens}"
                );
            }
        }
        let spread = Folder::with(&ModelSpec { shards: 5, ..made });
        assert!(spread.path().join("model-00005-of-00005.safetensors").exists());
        let model = Model::open(spread.path(), Shard::alone()).unwrap();
        assert_eq!(with(&model, 16, PoolLayout::Hnd), expected, "several files");
    }
}

#[test]
fn ranks_change_no_bit() {
    for (architecture, ..) in Architecture::ALL {
        for kv_heads in [8, 2] {
            let made = ModelSpec { kv_heads, ..crooked(architecture) };
            let folder = Folder::with(&made);
            let tokens = prompt(40, 4);
            let with = |shard: Shard| {
                let ranks = shard.ranks.clone();
                let model = Model::open(folder.path(), shard).unwrap().with_threads(1);
                let mut pool = pool(&model, 16, Dtype::F32, PoolLayout::Nhd);
                // Rank 0 announces each step, which these ranks already know.
                let told = || drop(ranks.next_step().unwrap());
                bits(&run(told, &model, &mut pool, &tokens, &[39], 0))
            };
            let expected = with(Shard::alone());
            for size in [2, 4, 8] {
                let (ours, theirs): (Vec<_>, Vec<_>) =
                    (1..size).map(|_| UnixStream::pair().unwrap()).unzip();
                let head = Shard::head(ours, Duration::from_secs(10)).unwrap();
                let members = theirs.into_iter().enumerate();
                let members = members.map(|(index, socket)| Shard::member(index + 1, size, socket));
                let shards: Vec<_> = std::iter::once(head).chain(members).collect();
                let got = std::thread::scope(|scope| {
                    let threads: Vec<_> =
                        shards.into_iter().map(|shard| scope.spawn(|| with(shard))).collect();
                    threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
                });
                assert_eq!(
                    got[0], expected,
                    "{size} ranks, {kv_heads} heads of keys, {architecture:?}"
                );
                assert!(got[1..].iter().all(Vec::is_empty), "only rank 0 has logits");
            }
        }
    }
}

/// Checks ranks that receive their steps from rank 0, and end when it ends.
#[test]
fn ranks_that_follow_change_no_bit_and_one_that_is_gone_fails_the_step() {
    let folder = Folder::with(&crooked(Architecture::Llama));
    let tokens = prompt(40, 6);
    let with = |shard: Shard| {
        let model = Model::open(folder.path(), shard).unwrap().with_threads(1);
        let pool = pool(&model, 16, Dtype::F32, PoolLayout::Nhd);
        (model, pool)
    };
    let (model, mut own) = with(Shard::alone());
    let expected = bits(&run(|| {}, &model, &mut own, &tokens, &[7, 39], 0));
    let (ours, mut theirs): (Vec<_>, Vec<_>) = (0..3).map(|_| UnixStream::pair().unwrap()).unzip();
    let (model, mut first) = with(Shard::head(ours, Duration::from_secs(10)).unwrap());
    std::thread::scope(|scope| {
        let followers: Vec<_> = theirs
            .drain(..)
            .enumerate()
            .map(|(index, socket)| {
                scope.spawn(move || {
                    let (model, mut pool) = with(Shard::member(index + 1, 4, socket));
                    model.follow(&mut pool)
                })
            })
            .collect();
        assert_eq!(bits(&run(|| {}, &model, &mut first, &tokens, &[7, 39], 0)), expected);
        drop(model);
        assert!(followers.into_iter().all(|follower| follower.join().unwrap() == Ok(())));
    });
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let (model, mut first) = with(Shard::head(vec![ours], Duration::from_millis(50)).unwrap());
    let chunk = Chunk { tokens: &tokens, start: 0, blocks: &[0, 1, 2], logits: LogitsScope::Last };
    let error = model.forward(&mut first, &[chunk]).unwrap_err().to_string();
    assert!(error.contains("rank 1 of the model does not answer"), "{error}");
}
