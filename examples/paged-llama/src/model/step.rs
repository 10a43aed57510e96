//! Computes one step: some tokens of some sequences pass through all layers together. The order of
//! each token's operations does not depend on the other tokens.

use std::ops::Range;

use super::chunk::{Chunk, LogitsScope};
use super::config::Config;
use super::error::{ModelError, Result};
use super::kernels::{self, Matrix, SharedOutput, Vectors};
use super::pool::Pool;
use super::rope::rotate;
use super::transformer::Model;
use super::weights::{Layer, Linear};

/// The logits of the requested rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    vocab: usize,
    /// The rows of each chunk.
    rows: Vec<Range<usize>>,
    numbers: Vec<f32>,
}

impl Logits {
    /// Returns the logits of chunk `index`, a slice for each requested token, in order. Only rank 0
    /// has any.
    pub fn of(&self, index: usize) -> std::slice::ChunksExact<'_, f32> {
        let rows = &self.rows[index];
        self.numbers[rows.start * self.vocab..rows.end * self.vocab].chunks_exact(self.vocab)
    }
}

/// The number of matrix rows per task.
const TASK_ROWS: usize = 64;
/// The number of query rows per attention task; at least those of one token.
const TASK_QUERIES: usize = 32;
/// The number of tokens whose keys or values are read together.
const TILE: usize = 64;

/// The parts of a step that all layers share.
struct Step<'a> {
    chunks: &'a [Chunk<'a>],
    /// The chunk and position of each token.
    places: Vec<(usize, usize)>,
    /// The rotation of each token.
    turns: Vec<f32>,
}

impl Model {
    /// Computes a step: writes keys and values of the chunks' tokens into `pool`, and returns the
    /// requested logits. All ranks of a model must compute the same steps. The chunks of one step
    /// must belong to different sequences.
    ///
    /// # Errors
    /// Fails before it writes anything if the pool has another shape, a token is beyond the
    /// vocabulary, or blocks are missing or beyond the pool. Also fails if a rank is lost.
    pub fn forward(&self, pool: &mut Pool, chunks: &[Chunk<'_>]) -> Result<Logits> {
        self.check(pool, chunks)?;
        if self.shard.rank == 0 {
            self.shard.ranks.announce_step(chunks)?;
        }
        let Config { hidden: width, intermediate, head_dim, vocab, .. } = self.config;
        let places: Vec<(usize, usize)> = (chunks.iter().enumerate())
            .flat_map(|(index, chunk)| {
                (0..chunk.tokens.len()).map(move |token| (index, chunk.start + token))
            })
            .collect();
        let rope = &self.config.rope;
        let mut turns = vec![0.0; places.len() * rope.width()];
        for (turn, (_, position)) in turns.chunks_exact_mut(rope.width()).zip(&places) {
            rope.turn(*position, turn);
        }
        let step = Step { chunks, places, turns };
        let count = step.places.len();
        let mut hidden = vec![0.0; count * width];
        let tokens = chunks.iter().flat_map(|chunk| chunk.tokens);
        for (out, token) in hidden.chunks_exact_mut(width).zip(tokens) {
            self.weights.embed(*token, out);
        }
        let (heads, kv_heads) = (self.weights.heads, self.weights.kv_heads);
        let (mut normed, mut sums) = (vec![0.0; count * width], vec![0.0; count * width]);
        let mut qkv = vec![0.0; count * (heads + 2 * kv_heads) * head_dim];
        let mut mixed = vec![0.0; count * heads * head_dim];
        let inner = intermediate / self.shard.size;
        let (mut gate, mut up) = (vec![0.0; count * inner], vec![0.0; count * inner]);
        for (number, layer) in self.weights.layers.iter().enumerate() {
            self.norm(&hidden, &layer.attention_norm, &mut normed);
            self.apply(&[&layer.queries, &layer.keys, &layer.values], &normed, &mut qkv);
            self.place(number, layer, &step, &mut qkv, pool);
            self.attend(number, &step, &qkv, pool, &mut mixed);
            self.add(&layer.output, &mixed, &mut sums, &mut hidden)?;
            self.norm(&hidden, &layer.mlp_norm, &mut normed);
            self.apply(&[&layer.gate], &normed, &mut gate);
            self.apply(&[&layer.up], &normed, &mut up);
            self.each(&mut gate, inner, |row, gate| {
                kernels::gate(self.level, gate, &up[row * inner..][..inner])
            });
            self.add(&layer.down, &gate, &mut sums, &mut hidden)?;
        }
        let mut logits = Logits { vocab, rows: Vec::new(), numbers: Vec::new() };
        let (mut last, mut row) = (Vec::new(), 0);
        for chunk in chunks {
            let end = row + chunk.tokens.len();
            let from = match chunk.logits {
                _ if self.shard.rank > 0 => end,
                LogitsScope::None => end,
                LogitsScope::Last => end - 1,
                LogitsScope::All => row,
            };
            let begin = last.len() / width;
            last.extend_from_slice(&hidden[from * width..end * width]);
            logits.rows.push(begin..last.len() / width);
            row = end;
        }
        let mut normed = vec![0.0; last.len()];
        self.norm(&last, &self.weights.norm, &mut normed);
        logits.numbers = vec![0.0; last.len() / width * vocab];
        if !last.is_empty() {
            self.apply(&[&self.weights.scores], &normed, &mut logits.numbers);
        }
        Ok(logits)
    }

    fn check(&self, pool: &Pool, chunks: &[Chunk<'_>]) -> Result<()> {
        let shape = pool.shape();
        let wanted = self.pool_shape(shape.blocks, shape.block_tokens, shape.dtype, shape.layout);
        if *shape != wanted {
            return Err(ModelError::new(format!(
                "the pool is {shape:?}, but this model's is {wanted:?}"
            )));
        }
        for chunk in chunks {
            if let Some(token) =
                chunk.tokens.iter().find(|token| **token as usize >= self.config.vocab)
            {
                let vocab = self.config.vocab;
                return Err(ModelError::new(format!(
                    "token {token} is beyond the model's {vocab} tokens: does the tokenizer belong \
                     to the model?"
                )));
            }
            let end = chunk.start + chunk.tokens.len();
            let needed = end.div_ceil(shape.block_tokens);
            let known = |block: &u32| (*block as usize) < shape.blocks;
            if chunk.tokens.is_empty()
                || chunk.blocks.len() < needed
                || !chunk.blocks[..needed].iter().all(known)
            {
                return Err(ModelError::new(format!(
                    "{} tokens up to {end} need {needed} of the pool's {} blocks, but got {:?}",
                    chunk.tokens.len(),
                    shape.blocks,
                    chunk.blocks
                )));
            }
        }
        Ok(())
    }

    /// Calls `work` with each row of `numbers`, on all threads.
    fn each(&self, numbers: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
        let count = numbers.len() / width;
        let places = SharedOutput::new(numbers);
        let one = |row: usize| {
            // SAFETY: each row belongs to exactly one task.
            work(row, unsafe { places.part(row * width, width) });
        };
        // Waking a thread pays only for more rows than this.
        let rows = 16;
        self.share(count.div_ceil(rows), |task| {
            (task * rows..count.min((task + 1) * rows)).for_each(one)
        });
    }

    fn norm(&self, numbers: &[f32], weight: &[f32], out: &mut [f32]) {
        let (width, epsilon) = (weight.len(), self.config.norm_epsilon);
        self.each(out, width, |row, out| {
            out.copy_from_slice(&numbers[row * width..][..width]);
            kernels::norm(self.level, out, weight, epsilon);
        });
    }

    /// Multiplies each row of `numbers` with several matrices, and writes the results next to each
    /// other in a row of `out`.
    fn apply(&self, linears: &[&Linear], numbers: &[f32], out: &mut [f32]) {
        let all: usize = linears.iter().map(|linear| linear.rows.len()).sum();
        let count = out.len() / all;
        let stride = numbers.len() / count;
        let vectors = Vectors { numbers, stride, count };
        let mut tasks = Vec::new();
        let mut begin = 0;
        for linear in linears {
            let rows = linear.rows.len();
            tasks.extend(
                (0..rows)
                    .step_by(TASK_ROWS)
                    .map(|row| (linear, begin, row..rows.min(row + TASK_ROWS))),
            );
            begin += rows;
        }
        let places = SharedOutput::new(out);
        self.share(tasks.len(), |task| {
            let (linear, begin, rows) = &tasks[task];
            linear.multiply(self.level, rows.clone(), vectors, places.from(*begin), all);
            let Some(bias) = linear.bias.as_ref().filter(|_| !linear.is_partial()) else { return };
            for vector in 0..count {
                // SAFETY: these rows belong to this task only.
                let out = unsafe { places.part(vector * all + begin + rows.start, rows.len()) };
                out.iter_mut().zip(&bias[rows.clone()]).for_each(|(out, bias)| *out += bias);
            }
        });
    }

    /// Adds to each row of `hidden` its product with a matrix that is divided among the ranks.
    fn add(
        &self,
        linear: &Linear,
        numbers: &[f32],
        sums: &mut [f32],
        hidden: &mut [f32],
    ) -> Result<()> {
        self.apply(&[linear], numbers, sums);
        self.shard.ranks.sum(sums)?;
        let rows = linear.rows.len();
        for (hidden, sums) in hidden.chunks_exact_mut(rows).zip(sums.chunks_exact_mut(rows)) {
            if let Some(bias) = &linear.bias {
                sums.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
            }
            hidden.iter_mut().zip(sums).for_each(|(hidden, sum)| *hidden += *sum);
        }
        Ok(())
    }

    /// Rotates queries and keys to their positions, and writes keys and values into the pool.
    fn place(
        &self,
        number: usize,
        layer: &Layer,
        step: &Step<'_>,
        qkv: &mut [f32],
        pool: &mut Pool,
    ) {
        let Config { head_dim, norm_epsilon, .. } = self.config;
        let (heads, kv_heads) = (self.weights.heads, self.weights.kv_heads);
        let width = (heads + 2 * kv_heads) * head_dim;
        let turn_width = self.config.rope.width();
        self.each(qkv, width, |row, numbers| {
            let turn = &step.turns[row * turn_width..][..turn_width];
            for (head, numbers) in
                numbers.chunks_exact_mut(head_dim).take(heads + kv_heads).enumerate()
            {
                let weight = if head < heads { &layer.query_norm } else { &layer.key_norm };
                if let Some(weight) = weight {
                    kernels::norm(self.level, numbers, weight, norm_epsilon);
                }
                rotate(numbers, turn);
            }
        });
        let shape = *pool.shape();
        for (row, (chunk, position)) in qkv.chunks_exact(width).zip(&step.places) {
            let block = step.chunks[*chunk].blocks[position / shape.block_tokens];
            let (keys, values) = row[heads * head_dim..].split_at(kv_heads * head_dim);
            for (numbers, are_keys) in [(keys, true), (values, false)] {
                for (head, numbers) in numbers.chunks_exact(head_dim).enumerate() {
                    let strip = shape.strip(number, block, are_keys, head);
                    pool.put(strip, position % shape.block_tokens, numbers);
                }
            }
        }
    }

    /// Computes attention: for each token and head, mixes the values of all tokens up to it.
    fn attend(&self, number: usize, step: &Step<'_>, qkv: &[f32], pool: &Pool, mixed: &mut [f32]) {
        let group = self.weights.heads / self.weights.kv_heads;
        let tokens = (TASK_QUERIES / group).max(1);
        let mut tasks = Vec::new();
        let mut row = 0;
        for chunk in step.chunks {
            let end = row + chunk.tokens.len();
            for from in (row..end).step_by(tokens) {
                let rows = from..end.min(from + tokens);
                tasks.extend((0..self.weights.kv_heads).map(|head| (chunk, rows.clone(), head)));
            }
            row = end;
        }
        let places = SharedOutput::new(mixed);
        self.share(tasks.len(), |task| {
            let (chunk, rows, head) = &tasks[task];
            let first = step.places[rows.start].1;
            self.mix(
                AttentionTask { number, chunk, rows: rows.clone(), head: *head, first },
                qkv,
                pool,
                places,
            );
        });
    }

    fn mix(&self, task: AttentionTask<'_>, qkv: &[f32], pool: &Pool, mixed: SharedOutput<'_>) {
        let dim = self.config.head_dim;
        let (heads, kv_heads) = (self.weights.heads, self.weights.kv_heads);
        let (group, width) = (heads / kv_heads, (heads + 2 * kv_heads) * dim);
        let own = task.head * group * dim;
        let queries: Vec<f32> = task
            .rows
            .clone()
            .flat_map(|row| &qkv[row * width + own..][..group * dim])
            .copied()
            .collect();
        let count = task.rows.len() * group;
        let all = task.first + task.rows.len();
        // Returns how many tokens the query of a row sees.
        let seen = |row: usize| task.first + row / group + 1;
        let mut scores = vec![0.0; count * all];
        let mut tile = vec![0.0; TILE.min(pool.shape().block_tokens) * dim];
        self.tiles(&task, pool, true, all, &mut tile, |from, keys| {
            let matrix = Matrix { numbers: keys, stride: dim, cols: dim, parts: 1 };
            let vectors = Vectors { numbers: &queries, stride: dim, count };
            let places = SharedOutput::new(&mut scores[from..]);
            kernels::multiply(self.level, matrix, 0..keys.len() / dim, vectors, places, all);
        });
        let scale = 1.0 / (dim as f32).sqrt();
        for (row, scores) in scores.chunks_exact_mut(all).enumerate() {
            kernels::softmax(self.level, &mut scores[..seen(row)], scale);
        }
        let mut out = queries;
        out.fill(0.0);
        self.tiles(&task, pool, false, all, &mut tile, |from, values| {
            for (row, (out, scores)) in
                out.chunks_exact_mut(dim).zip(scores.chunks_exact(all)).enumerate()
            {
                let to = seen(row).min(from + values.len() / dim);
                if from < to {
                    kernels::accumulate(self.level, out, &scores[from..to], values);
                }
            }
        });
        for (out, row) in out.chunks_exact(group * dim).zip(task.rows) {
            // SAFETY: the part of a token and KV head belongs to exactly one task.
            unsafe { mixed.part(row * heads * dim + own, group * dim) }.copy_from_slice(out);
        }
    }

    /// Calls `work` with the keys (or values) of the first `all` tokens, `tile` by `tile`.
    fn tiles(
        &self,
        task: &AttentionTask<'_>,
        pool: &Pool,
        keys: bool,
        all: usize,
        tile: &mut [f32],
        mut work: impl FnMut(usize, &[f32]),
    ) {
        let (dim, shape) = (self.config.head_dim, pool.shape());
        let mut from = 0;
        while from < all {
            let within = from % shape.block_tokens;
            let count = (tile.len() / dim).min(shape.block_tokens - within).min(all - from);
            let strip = shape.strip(
                task.number,
                task.chunk.blocks[from / shape.block_tokens],
                keys,
                task.head,
            );
            pool.take(strip, within, &mut tile[..count * dim]);
            work(from, &tile[..count * dim]);
            from += count;
        }
    }
}

/// Consecutive tokens of one chunk, for one KV head and the query heads that share it.
struct AttentionTask<'a> {
    /// The number of the layer.
    number: usize,
    chunk: &'a Chunk<'a>,
    rows: Range<usize>,
    head: usize,
    /// The first token's position.
    first: usize,
}
