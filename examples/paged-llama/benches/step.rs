//! Compares steps of a model of 1 GiB with this machine's limits: the decode of one sequence with a
//! bare read of the weights, and a prefill with the bare kernel on numbers in the cache. `cargo
//! bench -p kvx-paged-llama --bench step` prints one JSON object per line, with the medians of the
//! times and of the ratios of each round. With `-- --test` it runs one round of a small model.
#![allow(clippy::unwrap_used, reason = "a benchmark that cannot run may panic")]

use std::fs::File;
use std::hint::black_box;
use std::io::Read as _;
use std::path::Path;
use std::time::Instant;

use kvx_paged_llama::model::{
    Architecture, Chunk, Dtype, LogitsScope, Model, Pool, PoolLayout, Shard, multiply_alone,
};
use kvx_random_model::{ModelSpec, make_model};

/// Tokens of the measured prompt.
const PROMPT: usize = 512;

fn main() {
    let test = std::env::args().any(|argument| argument == "--test");
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("step-{}", std::process::id()));
    let made = ModelSpec {
        architecture: Architecture::Qwen3,
        layers: if test { 1 } else { 11 },
        hidden: 2048,
        intermediate: 6144,
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
        dtype: Dtype::Bf16,
        tied: true,
        ..ModelSpec::default()
    };
    let bytes = make_model(&folder, &made).unwrap();
    let rounds = if test { 1 } else { 7 };
    measure(&folder, bytes, rounds);
    std::fs::remove_dir_all(folder).unwrap();
}

fn measure(folder: &Path, bytes: u64, rounds: usize) {
    let model = Model::open(folder, Shard::alone()).unwrap();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut pool = Pool::allocate(model.pool_shape(64, 16, Dtype::Bf16, PoolLayout::Hnd)).unwrap();
    let blocks: Vec<u32> = (0..64).collect();
    let tokens: Vec<u32> = (0..PROMPT as u32 + 1).map(|at| at * 31 % 259).collect();
    let mut step = |range: std::ops::Range<usize>| {
        let chunk = Chunk {
            tokens: &tokens[range.clone()],
            start: range.start,
            blocks: &blocks,
            logits: LogitsScope::Last,
        };
        let begin = Instant::now();
        black_box(model.forward(&mut pool, &[chunk]).unwrap());
        begin.elapsed().as_secs_f64()
    };
    let mut whole = Vec::new();
    File::open(folder.join("model.safetensors")).unwrap().read_to_end(&mut whole).unwrap();
    step(0..PROMPT);
    let (mut decodes, mut prefills) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (read, decode) = (bare_read(&whole, threads), step(PROMPT..PROMPT + 1));
        decodes.push((decode, read / decode));
        let (flops, prefill) = (bare_kernel(threads), step(0..PROMPT));
        // The embedding is looked up and not multiplied, and the last layer runs once.
        let ours = bytes as f64 / 2.0 * 2.0 * PROMPT as f64 / prefill;
        prefills.push((prefill, ours / flops));
    }
    for (what, rounds) in [("decode", decodes), ("prefill", prefills)] {
        let seconds = median(rounds.iter().map(|round| round.0));
        let ratio = median(rounds.iter().map(|round| round.1));
        println!(
            "{{\"what\":\"{what}\",\"bytes\":{bytes},\"seconds\":{seconds:.5},\"ratio\":{ratio:.3}}}"
        );
    }
}

/// Returns the seconds that `threads` threads take to read all bytes once.
fn bare_read(bytes: &[u8], threads: usize) -> f64 {
    let begin = Instant::now();
    let sum = |part: &[u8]| {
        part.as_chunks::<8>().0.iter().fold(0, |sum, word| sum ^ u64::from_ne_bytes(*word))
    };
    std::thread::scope(|scope| {
        for part in bytes.chunks(bytes.len().div_ceil(threads)) {
            scope.spawn(move || black_box(sum(part)));
        }
    });
    begin.elapsed().as_secs_f64()
}

/// Returns the operations per second of the kernel on `threads` threads, with all numbers in their
/// caches.
fn bare_kernel(threads: usize) -> f64 {
    let (rows, cols, count, times) = (32, 512, 32, 4000);
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let (matrix, vectors) = (vec![0.5; rows * cols], vec![0.25; count * cols]);
                let mut out = vec![0.0; rows * count];
                for _ in 0..times {
                    multiply_alone(black_box(&matrix), &vectors, count, &mut out);
                }
                black_box(out);
            });
        }
    });
    (2 * rows * cols * count * times * threads) as f64 / begin.elapsed().as_secs_f64()
}

fn median(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}
