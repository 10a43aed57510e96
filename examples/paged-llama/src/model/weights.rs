//! A rank's share of the weights.

use std::ops::Range;
use std::path::Path;

use super::config::{Architecture, Config, Dtype};
use super::error::{ModelError, Result};
use super::kernels::{self, Matrix, SharedOutput, Vectors};
use super::ranks::{PARTS, Shard};
use super::safetensors::{Tensor, Tensors};
use super::simd::SimdLevel;

pub(super) struct Weights {
    pub(super) embedding: Tensor,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Vec<f32>,
    /// The last matrix, from the last layer's numbers to a logit for each token. Each rank has all
    /// of it; rank 0 computes with it.
    pub(super) scores: Linear,
    /// The number of query heads of this rank.
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
}

pub(super) struct Layer {
    pub(super) attention_norm: Vec<f32>,
    pub(super) queries: Linear,
    pub(super) keys: Linear,
    pub(super) values: Linear,
    pub(super) query_norm: Option<Vec<f32>>,
    pub(super) key_norm: Option<Vec<f32>>,
    pub(super) output: Linear,
    pub(super) mlp_norm: Vec<f32>,
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
}

/// A part of a matrix in its file. A part of the rows computes complete sums. A part of the columns
/// computes parts of sums, which ranks add up.
pub(super) struct Linear {
    matrix: Tensor,
    pub(super) rows: Range<usize>,
    cols: Range<usize>,
    /// The number of parts of each sum.
    parts: usize,
    pub(super) bias: Option<Vec<f32>>,
}

impl Weights {
    pub(super) fn open(folder: &Path, config: &Config, shard: &Shard) -> Result<Weights> {
        let Config { vocab, hidden, intermediate, head_dim, .. } = *config;
        let (heads, kv_heads) = shares(config, shard)?;
        let tensors = Tensors::open(folder)?;
        let vector = |name: &str, len: usize| Ok(tensors.take(name, &[len])?.widened());
        let matrix =
            |name: &str, shape: [usize; 2]| tensors.take(&format!("{name}.weight"), &shape);
        // A matrix whose rows are divided among the ranks, with its bias.
        let by_rows = |name: &str, [all, cols]: [usize; 2], rows: Range<usize>, bias: bool| {
            let bias = bias.then(|| vector(&format!("{name}.bias"), all)).transpose()?;
            let bias = bias.map(|bias| bias[rows.clone()].to_vec());
            Ok(Linear { matrix: matrix(name, [all, cols])?, rows, cols: 0..cols, parts: 1, bias })
        };
        // A matrix whose columns are divided among the ranks; its bias is added once, after the
        // sum.
        let by_cols = |name: &str, [rows, all]: [usize; 2], bias: bool| {
            let bias = bias.then(|| vector(&format!("{name}.bias"), rows)).transpose()?;
            let (cols, parts) = (share(all, shard), PARTS / shard.size);
            Ok(Linear { matrix: matrix(name, [rows, all])?, rows: 0..rows, cols, parts, bias })
        };
        let scaled = |heads: &Range<usize>| heads.start * head_dim..heads.end * head_dim;
        let (q, kv) = (config.heads * head_dim, config.kv_heads * head_dim);
        let normed = config.architecture == Architecture::Qwen3;
        let layer = |number: usize| -> Result<Layer> {
            let name = |part: &str| format!("model.layers.{number}.{part}");
            let attention = |part: &str| name(&format!("self_attn.{part}"));
            let mlp = |part: &str| name(&format!("mlp.{part}"));
            let head_norm = |part| normed.then(|| vector(&attention(part), head_dim)).transpose();
            let inner = share(intermediate, shard);
            let key_value =
                |part| by_rows(&attention(part), [kv, hidden], scaled(&kv_heads), config.qkv_bias);
            Ok(Layer {
                attention_norm: vector(&name("input_layernorm.weight"), hidden)?,
                queries: by_rows(
                    &attention("q_proj"),
                    [q, hidden],
                    scaled(&heads),
                    config.qkv_bias,
                )?,
                keys: key_value("k_proj")?,
                values: key_value("v_proj")?,
                query_norm: head_norm("q_norm.weight")?,
                key_norm: head_norm("k_norm.weight")?,
                output: by_cols(&attention("o_proj"), [hidden, q], config.output_bias)?,
                mlp_norm: vector(&name("post_attention_layernorm.weight"), hidden)?,
                gate: by_rows(
                    &mlp("gate_proj"),
                    [intermediate, hidden],
                    inner.clone(),
                    config.mlp_bias,
                )?,
                up: by_rows(&mlp("up_proj"), [intermediate, hidden], inner, config.mlp_bias)?,
                down: by_cols(&mlp("down_proj"), [hidden, intermediate], config.mlp_bias)?,
            })
        };
        let scores = if config.tied { "model.embed_tokens" } else { "lm_head" };
        Ok(Weights {
            embedding: matrix("model.embed_tokens", [vocab, hidden])?,
            layers: (0..config.layers).map(layer).collect::<Result<_>>()?,
            norm: vector("model.norm.weight", hidden)?,
            scores: by_rows(scores, [vocab, hidden], 0..vocab, false)?,
            heads: heads.len(),
            kv_heads: kv_heads.len(),
        })
    }

    /// Writes a token's embedding.
    pub(super) fn embed(&self, token: u32, out: &mut [f32]) {
        let at = token as usize * out.len();
        match self.embedding.dtype {
            Dtype::F32 => out.copy_from_slice(&self.embedding.f32s()[at..][..out.len()]),
            Dtype::Bf16 => {
                let row = &self.embedding.bf16s()[at..][..out.len()];
                out.iter_mut()
                    .zip(row)
                    .for_each(|(out, bits)| *out = f32::from_bits(u32::from(*bits) << 16));
            }
        }
    }
}

impl Linear {
    /// Returns whether the products of this matrix are parts of sums.
    pub(super) fn is_partial(&self) -> bool {
        self.parts != 1 || self.cols.len() < self.matrix.shape[1]
    }

    /// Writes `rows` of the product with each vector to `out[vector * out_stride + row]`. No other
    /// thread may use these numbers.
    pub(super) fn multiply(
        &self,
        level: SimdLevel,
        rows: Range<usize>,
        vectors: Vectors<'_>,
        out: SharedOutput<'_>,
        out_stride: usize,
    ) {
        let (stride, cols, parts) = (self.matrix.shape[1], self.cols.len(), self.parts);
        let from = self.rows.start * stride + self.cols.start;
        match self.matrix.dtype {
            Dtype::F32 => {
                let matrix = Matrix { numbers: &self.matrix.f32s()[from..], stride, cols, parts };
                kernels::multiply(level, matrix, rows, vectors, out, out_stride);
            }
            Dtype::Bf16 => {
                let matrix = Matrix { numbers: &self.matrix.bf16s()[from..], stride, cols, parts };
                kernels::multiply(level, matrix, rows, vectors, out, out_stride);
            }
        }
    }
}

/// Returns this rank's part of `all`.
fn share(all: usize, shard: &Shard) -> Range<usize> {
    let one = all / shard.size;
    shard.rank * one..(shard.rank + 1) * one
}

/// Returns this rank's query heads and KV heads. If there are more ranks than KV heads, several
/// ranks have the same one.
fn shares(config: &Config, shard: &Shard) -> Result<(Range<usize>, Range<usize>)> {
    let Config { heads, kv_heads, head_dim, intermediate, .. } = *config;
    let size = shard.size;
    if !matches!(size, 1 | 2 | 4 | 8) || shard.rank >= size {
        return Err(ModelError::new(format!(
            "rank {} of {size}: the number of ranks must be 1, 2, 4 or 8",
            shard.rank
        )));
    }
    if !heads.is_multiple_of(size)
        || (!kv_heads.is_multiple_of(size) && !size.is_multiple_of(kv_heads))
    {
        return Err(ModelError::new(format!(
            "{heads} heads, {kv_heads} of keys and values, cannot be divided among {size} ranks; \
             set --tensor-parallel-size to a number that divides them"
        )));
    }
    if heads * head_dim % PARTS != 0 || intermediate % PARTS != 0 {
        return Err(ModelError::new(format!(
            "the model's sizes {} (heads times head_dim) and {intermediate} (intermediate_size) \
             must be multiples of {PARTS}; use another model",
            heads * head_dim
        )));
    }
    let own = if kv_heads < size {
        shard.rank * kv_heads / size..shard.rank * kv_heads / size + 1
    } else {
        share(kv_heads, shard)
    };
    Ok((share(heads, shard), own))
}
