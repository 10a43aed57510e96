//! Computes Llama and Qwen models: the weights of a folder, and one step over the paged pool.
//!
//! Layers, each of which imports only from those before it: `error`, `config`, `rope`, `chunk`,
//! `safetensors`, `simd`; `kernels`, `pool`, `ranks`; `sockets`, `weights`; `transformer`; `step`.

mod chunk;
mod config;
mod error;
mod kernels;
mod pool;
mod ranks;
mod rope;
mod safetensors;
mod simd;
mod sockets;
mod step;
mod transformer;
mod weights;

pub use chunk::{Chunk, LogitsScope};
pub use config::{Architecture, Config, Dtype};
pub use error::{ModelError, Result};
pub use pool::{Pool, PoolLayout, PoolShape, bf16};
pub use ranks::{PARTS, Ranks, Shard, sum_in_tree};
pub use simd::SimdLevel;
pub use step::Logits;
pub use transformer::Model;

/// Multiplies a matrix in the cache with `count` vectors. Benchmarks compare a step's arithmetic
/// with it.
#[doc(hidden)]
pub fn multiply_alone(matrix: &[f32], vectors: &[f32], count: usize, out: &mut [f32]) {
    let (cols, rows) = (vectors.len() / count, out.len() / count);
    let matrix = kernels::Matrix { numbers: matrix, stride: cols, cols, parts: 1 };
    let vectors = kernels::Vectors { numbers: vectors, stride: cols, count };
    kernels::multiply(
        SimdLevel::detect(),
        matrix,
        0..rows,
        vectors,
        kernels::SharedOutput::new(out),
        rows,
    );
}
