//! The paged KV cache, over memory with another owner, such as a region of kvx.

use std::any::Any;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::config::Dtype;
use super::error::{ModelError, Result};

/// The order of the numbers within one block of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PoolLayout {
    /// `[head][token]`, each with the key followed by the value. Peers can split it into heads or
    /// into fewer tokens.
    Hnd,
    /// `[token][head]`, each with the key followed by the value.
    Nhd,
    /// The layout of vLLM on the CPU: for each head the keys `[dim][token]`, then the values
    /// `[token][dim]`.
    VllmCpu,
}

/// The shape of a pool: layers, each of them a sequence of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names are self-explanatory")]
pub struct PoolShape {
    pub layers: usize,
    pub blocks: usize,
    /// Tokens per block.
    pub block_tokens: usize,
    /// The number of KV heads of this rank.
    pub kv_heads: usize,
    pub head_dim: usize,
    pub dtype: Dtype,
    pub layout: PoolLayout,
}

impl PoolShape {
    /// Returns the bytes per block and layer, keys and values.
    pub fn block_bytes(&self) -> usize {
        2 * self.half() * self.dtype.size()
    }

    /// Returns the bytes per layer.
    pub fn layer_bytes(&self) -> usize {
        self.blocks * self.block_bytes()
    }

    /// Returns the bytes of the pool.
    pub fn bytes(&self) -> usize {
        self.layers * self.layer_bytes()
    }

    /// Returns how many numbers a block's keys, or its values, have.
    fn half(&self) -> usize {
        self.block_tokens * self.kv_heads * self.head_dim
    }

    /// Returns the location of one head's keys, or values, in a block, in numbers from the pool's
    /// beginning.
    pub(super) fn strip(&self, layer: usize, block: u32, keys: bool, head: usize) -> Strip {
        let PoolShape { block_tokens: tokens, kv_heads: heads, head_dim: dim, .. } = *self;
        let begin = (layer * self.blocks + block as usize) * 2 * self.half();
        let behind = if keys { 0 } else { dim };
        match self.layout {
            PoolLayout::Hnd => {
                Strip { begin: begin + behind + 2 * head * tokens * dim, token: 2 * dim, dim: 1 }
            }
            PoolLayout::Nhd => {
                Strip { begin: begin + behind + 2 * head * dim, token: 2 * heads * dim, dim: 1 }
            }
            PoolLayout::VllmCpu if keys => {
                Strip { begin: begin + 2 * head * tokens * dim, token: 1, dim: tokens }
            }
            PoolLayout::VllmCpu => {
                Strip { begin: begin + (2 * head + 1) * tokens * dim, token: dim, dim: 1 }
            }
        }
    }
}

/// One head's part of a block. Number `(t, d)` is at `begin + t * token + d * dim`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Strip {
    begin: usize,
    token: usize,
    dim: usize,
}

/// A paged KV cache.
pub struct Pool {
    shape: PoolShape,
    memory: *mut u8,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the memory is not tied to a thread, and its owner is `Send`.
unsafe impl Send for Pool {}
// SAFETY: a shared pool is only read. A write needs `&mut Pool`, and the caller of `Pool::over`
// ensures that no one else writes the memory during a read.
unsafe impl Sync for Pool {}

impl Pool {
    /// Allocates a pool of zeros.
    ///
    /// # Errors
    /// Fails if the system has too little memory.
    pub fn allocate(shape: PoolShape) -> Result<Pool> {
        let mut memory: Vec<u32> = Vec::new();
        let words = shape.bytes().div_ceil(4);
        memory.try_reserve_exact(words).map_err(|_| {
            ModelError::new(format!(
                "cannot allocate a KV cache of {} bytes; use fewer blocks",
                shape.bytes()
            ))
        })?;
        memory.resize(words, 0);
        let begin = memory.as_mut_ptr().cast();
        // SAFETY: the vector owns the bytes, lives as long as the pool, and no other code accesses
        // it.
        unsafe { Pool::over(shape, begin, words * 4, Arc::new(memory)) }
    }

    /// Returns a pool over `len` bytes at `memory`, which `owner` keeps alive.
    ///
    /// # Errors
    /// Fails if the memory is too short or misaligned.
    ///
    /// # Safety
    /// The bytes must be readable and writable while `owner` lives. While a step runs, no one else
    /// may write the blocks that it names, or read those that it writes.
    pub unsafe fn over(
        shape: PoolShape,
        memory: *mut u8,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Pool> {
        if len < shape.bytes() {
            let needed = shape.bytes();
            return Err(ModelError::new(format!(
                "the KV cache needs {needed} bytes, but the memory has {len}; register more"
            )));
        }
        if !memory.addr().is_multiple_of(shape.dtype.size()) {
            return Err(ModelError::new(
                "the KV cache is misaligned; use memory that begins at a page",
            ));
        }
        Ok(Pool { shape, memory, _owner: owner })
    }

    /// Returns the pool's shape.
    pub fn shape(&self) -> &PoolShape {
        &self.shape
    }

    /// Writes one token's keys (or values) of one head.
    pub(super) fn put(&mut self, strip: Strip, token: usize, values: &[f32]) {
        self.check(strip, token, values.len());
        for (dim, &value) in values.iter().enumerate() {
            let at = strip.begin + token * strip.token + dim * strip.dim;
            // SAFETY: the assertion above ensures that it is within the pool, and `over`'s caller
            // that no one else accesses it.
            unsafe {
                match self.shape.dtype {
                    Dtype::F32 => self.memory.cast::<f32>().add(at).write(value),
                    Dtype::Bf16 => self.memory.cast::<u16>().add(at).write(bf16(value)),
                }
            }
        }
    }

    /// Reads tokens `first..first + out.len() / head_dim` of one head.
    #[inline(always)]
    pub(super) fn take(&self, strip: Strip, first: usize, out: &mut [f32]) {
        let dims = self.shape.head_dim;
        let tokens = out.len() / dims;
        self.check(strip, first + tokens - 1, dims);
        let begin = strip.begin + first * strip.token;
        // SAFETY: the assertion above ensures that it is within the pool, and `over`'s caller that
        // no one else writes it.
        unsafe {
            match self.shape.dtype {
                Dtype::F32 => {
                    let from = self.memory.cast::<f32>().add(begin);
                    strided(out, dims, strip, |at| from.add(at).read());
                }
                Dtype::Bf16 => {
                    let from = self.memory.cast::<u16>().add(begin);
                    strided(out, dims, strip, |at| {
                        f32::from_bits(u32::from(from.add(at).read()) << 16)
                    });
                }
            }
        }
    }

    fn check(&self, strip: Strip, last_token: usize, dims: usize) {
        let last = strip.begin + last_token * strip.token + (dims - 1) * strip.dim;
        assert!(last < self.shape.bytes() / self.shape.dtype.size(), "beyond the KV cache");
    }
}

#[inline(always)]
fn strided(out: &mut [f32], dims: usize, strip: Strip, read: impl Fn(usize) -> f32) {
    let tokens = out.len() / dims;
    if strip.dim == 1 {
        for (token, out) in out.chunks_exact_mut(dims).enumerate() {
            for (dim, out) in out.iter_mut().enumerate() {
                *out = read(token * strip.token + dim);
            }
        }
    } else {
        for dim in 0..dims {
            for token in 0..tokens {
                out[token * dims + dim] = read(token * strip.token + dim * strip.dim);
            }
        }
    }
}

/// Rounds to the nearest `bf16`, ties to even.
pub fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the place of each number, from the beginning, for 3 layers, 4 blocks of 5 tokens and
    /// 2 heads of 6 numbers.
    #[test]
    fn layouts_put_each_number_where_they_say() {
        for layout in [PoolLayout::Hnd, PoolLayout::Nhd, PoolLayout::VllmCpu] {
            let (blocks, tokens, heads, dims) = (4, 5, 2, 6);
            let shape = PoolShape {
                layers: 3,
                blocks,
                block_tokens: tokens,
                kv_heads: heads,
                head_dim: dims,
                dtype: Dtype::F32,
                layout,
            };
            assert_eq!((shape.block_bytes(), shape.bytes()), (2 * 60 * 4, 3 * 4 * 2 * 60 * 4));
            let mut pool = Pool::allocate(shape).unwrap();
            for (keys, head, token) in
                (0..2 * heads * tokens).map(|n| (n % 2 == 0, n / 2 % heads, n / 2 / heads))
            {
                let name =
                    |dim| (usize::from(keys) * 1000 + head * 100 + token * 10 + dim) as f32 + 1.0;
                let values: Vec<f32> = (0..dims).map(name).collect();
                pool.put(shape.strip(1, 2, keys, head), token, &values);
                for (dim, value) in values.iter().enumerate() {
                    let behind = if keys { 0 } else { dims };
                    let within = match layout {
                        PoolLayout::Hnd => behind + 2 * (head * tokens + token) * dims + dim,
                        PoolLayout::Nhd => behind + 2 * (token * heads + head) * dims + dim,
                        PoolLayout::VllmCpu if keys => {
                            head * 2 * tokens * dims + dim * tokens + token
                        }
                        PoolLayout::VllmCpu => (head * 2 + 1) * tokens * dims + token * dims + dim,
                    };
                    let at = (blocks + 2) * 2 * heads * tokens * dims + within;
                    // SAFETY: `at` is within the pool, and only this test has the pool.
                    let number = unsafe { pool.memory.cast::<f32>().add(at).read() };
                    assert_eq!(number, *value, "{layout:?}");
                }
                let mut back = vec![0.0; dims];
                pool.take(shape.strip(1, 2, keys, head), token, &mut back);
                assert_eq!(back, values);
            }
        }
    }

    #[test]
    fn numbers_are_halved_to_the_nearest() {
        for (value, half) in
            [(1.0, 0x3f80), (1.003_906_2, 0x3f80), (1.003_907, 0x3f81), (1.011_718_8, 0x3f82)]
        {
            assert_eq!(bf16(value), half, "{value}");
        }
        assert!(f32::from_bits(u32::from(bf16(f32::NAN)) << 16).is_nan());
    }
}
