//! The model: its weights, and the threads that compute with them.

use std::path::Path;

use rayon::iter::{IndexedParallelIterator as _, IntoParallelIterator as _, ParallelIterator as _};

use super::config::{Config, Dtype};
use super::error::Result;
use super::pool::{PoolLayout, PoolShape};
use super::ranks::Shard;
use super::simd::SimdLevel;
use super::weights::Weights;

/// A model, or one rank's share of it, ready to compute.
pub struct Model {
    pub(super) config: Config,
    pub(super) shard: Shard,
    pub(super) weights: Weights,
    pub(super) level: SimdLevel,
    pub(super) threads: Option<rayon::ThreadPool>,
}

impl Model {
    /// Opens the model in `folder`: `config.json`, `generation_config.json` if there is one, and
    /// safetensors files.
    ///
    /// # Errors
    /// Fails if [`Config::read`] fails, the weights do not match the configuration, or the heads
    /// cannot be divided among the ranks.
    pub fn open(folder: &Path, shard: Shard) -> Result<Model> {
        let config = Config::read(folder)?;
        let weights = Weights::open(folder, &config, &shard)?;
        let threads = several(std::thread::available_parallelism().map_or(1, usize::from));
        Ok(Model { config, shard, weights, level: SimdLevel::detect(), threads })
    }

    /// Sets the number of threads, by default the number of cores. It does not affect results.
    #[must_use]
    pub fn with_threads(mut self, threads: usize) -> Model {
        self.threads = several(threads);
        self
    }

    /// Sets the SIMD level, by default the best one available. It does not affect results.
    ///
    /// # Panics
    /// Panics if this machine does not support the level.
    #[must_use]
    pub fn with_level(mut self, level: SimdLevel) -> Model {
        assert!(level.is_here(), "this machine has no {level:?}");
        self.level = level;
        self
    }

    /// Returns the whole model's shape.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the number of KV heads in this rank's pool.
    pub fn kv_heads(&self) -> usize {
        self.weights.kv_heads
    }

    /// Returns the shape of the pool that this rank needs.
    pub fn pool_shape(
        &self,
        blocks: usize,
        block_tokens: usize,
        dtype: Dtype,
        layout: PoolLayout,
    ) -> PoolShape {
        let Config { layers, head_dim, .. } = self.config;
        PoolShape {
            layers,
            blocks,
            block_tokens,
            kv_heads: self.kv_heads(),
            head_dim,
            dtype,
            layout,
        }
    }

    /// Runs tasks `0..count` on all threads. Each result depends only on its task.
    pub(super) fn share(&self, count: usize, task: impl Fn(usize) + Sync + Send) {
        match &self.threads {
            Some(threads) if count > 1 => {
                threads.install(|| (0..count).into_par_iter().with_max_len(1).for_each(task));
            }
            _ => (0..count).for_each(task),
        }
    }
}

/// Returns a pool of threads that sleep until there is work, or `None` if the caller's thread is
/// enough or the system cannot start more.
fn several(threads: usize) -> Option<rayon::ThreadPool> {
    if threads <= 1 {
        return None;
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    let pool = pool.thread_name(|number| format!("kvx-llama-{number}")).build();
    pool.inspect_err(
        |error| tracing::warn!(%error, "cannot start {threads} threads; one thread computes the steps"),
    )
    .ok()
}
