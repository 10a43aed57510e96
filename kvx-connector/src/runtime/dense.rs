//! Support for engines that keep a dense tensor for each sequence: a pool of blocks that peers read
//! and loads fill.

use std::fmt;
use std::future::Future as _;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::sync::Mutex;
use kvx_core::{Deadline, Error, ErrorKind, Memory, Result};

use super::decode::{Decode, Fetch, HeldBlocks, LoadError, Loaded};
use super::outcomes::Released;
use super::prefill::{Lease, Prefill};
use kvx_vllm::engine::{BlockLists, RequestId};
use kvx_vllm::mapping::{
    BlockRows, BlockShape, Caches, DenseShape, Heads, KvLayout, KvTensors, LayerCache, MemoryType,
    rows_from_block, rows_into_block,
};
use kvx_vllm::params::{TransferMode, TransferParams};

/// The part of a model that a rank keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DenseModel {
    /// The names of the rank's layers, in the order of the views.
    pub layers: Vec<Arc<str>>,
    /// The number of KV heads of the whole model, over all ranks.
    pub heads: u32,
    /// The number of KV heads of this rank.
    pub rank_heads: usize,
    /// The size in bytes of one head's K of one token. V has the same size.
    pub row: usize,
    /// The number of tokens in a block.
    pub block_tokens: u32,
    /// The layout of a block, LBHNC or LBNHC. Peers use the same one.
    pub layout: KvLayout,
}

/// K or V of one layer and one sequence, to be saved.
#[derive(Clone, Copy, Debug)]
pub struct DenseView<'a> {
    /// The bytes, from the first row on.
    pub bytes: &'a [u8],
    /// The order and strides of the rows.
    pub shape: DenseShape,
}

/// K or V of one layer and one sequence, to be loaded.
#[derive(Debug)]
pub struct DenseViewMut<'a> {
    /// The bytes, from the first row on.
    pub bytes: &'a mut [u8],
    /// The order and strides of the rows.
    pub shape: DenseShape,
}

/// Blocks of the connector, for an engine whose tensors have no blocks. Cheap to clone.
///
/// ```
/// # mod kvx { pub use kvx_connector as connector; }
/// use kvx::connector::{
///     DenseModel, DensePool, DenseShape, DenseView, DenseViewMut, KvLayout,
/// };
///
/// let layout = KvLayout::Lbhnc;
/// let layers = vec!["layers.0.attn".into()];
/// let pool = DensePool::new(DenseModel { layers, heads: 2, rank_heads: 2, row: 4, block_tokens: 4, layout }, 8)?;
/// // Six tokens in [head][token][dim], and back into [token][head][dim].
/// let (k, v) = ((0..48).collect::<Vec<u8>>(), vec![7; 48]);
/// let shape = DenseShape::heads_outermost(2, 6, 4);
/// let blocks = pool.save(6, &[[DenseView { bytes: &k, shape }, DenseView { bytes: &v, shape }]])?;
/// assert_eq!(blocks.lists().len(), 2);
/// let (mut k_back, mut v_back, shape) = (vec![0; 48], vec![0; 48], DenseShape::tokens_outermost(2, 6, 4));
/// let views = [DenseViewMut { bytes: &mut k_back, shape }, DenseViewMut { bytes: &mut v_back, shape }];
/// pool.load(&blocks, 6, &mut [views])?;
/// assert_eq!((&k_back[..8], v_back), (&[0, 1, 2, 3, 24, 25, 26, 27][..], v));
/// # Ok::<(), kvx_core::Error>(())
/// ```
#[derive(Clone)]
pub struct DensePool(Arc<Pool>);

struct Pool {
    model: DenseModel,
    rows: BlockShape,
    block_len: usize,
    blocks: u32,
    memory: Arc<Memory>,
    free: Mutex<Vec<u32>>,
    /// Blocks of failed loads that a transfer may still write to.
    held: Mutex<Vec<(HeldBlocks, Vec<u32>)>>,
}

impl DensePool {
    /// Creates a pool with as many blocks as all requests need that are published or loaded at the
    /// same time.
    ///
    /// # Errors
    /// - `Invalid`: the model has no layers, heads or bytes, the number of blocks is 0, or the
    ///   layout is neither LBHNC nor LBNHC.
    /// - `Exhausted`: there is not enough memory.
    pub fn new(model: DenseModel, blocks: u32) -> Result<Self> {
        let invalid = |what: String| Err(ErrorKind::Invalid.because(what));
        if !matches!(model.layout, KvLayout::Lbhnc | KvLayout::Lbnhc) {
            return invalid(format!(
                "a dense pool cannot have layout {}: use LBHNC or LBNHC",
                model.layout
            ));
        }
        let rows = BlockShape {
            heads: model.rank_heads,
            tokens: model.block_tokens as usize,
            content: model.row.saturating_mul(2),
        };
        let len = [rows.heads, rows.tokens, rows.content]
            .into_iter()
            .try_fold(1_usize, usize::checked_mul);
        let all =
            len.and_then(|len| len.checked_mul(blocks as usize)?.checked_mul(model.layers.len()));
        let (Some(block_len), Some(all @ 1..)) = (len, all) else {
            return invalid(format!(
                "a dense pool of {blocks} blocks of {model:?}: no number may be 0"
            ));
        };
        let memory = Arc::new(Memory::pool(all).build()?);
        let free = Mutex::new((0..blocks).rev().collect());
        let held = Mutex::default();
        Ok(DensePool(Arc::new(Pool { model, rows, block_len, blocks, memory, free, held })))
    }

    /// Returns the caches to register, together with [`memory`](Self::memory).
    ///
    /// # Errors
    /// Those of [`Caches::of_layers`].
    pub fn caches(&self) -> Result<Caches> {
        let Pool { model, block_len, blocks, .. } = &*self.0;
        let layer = |(at, name): (usize, &Arc<str>)| LayerCache {
            name: Arc::clone(name),
            tensors: KvTensors::Together(self.0.memory.address() + self.0.offset(at, 0) as u64),
            blocks: *blocks,
            block_len: *block_len as u64,
            block_stride: *block_len as u64,
            group: 0,
            heads: Heads::Sharded(model.heads),
            memory: MemoryType::Dram,
        };
        Caches::of_layers(
            model.layers.iter().enumerate().map(layer).collect(),
            model.layout,
            model.block_tokens,
            1,
            0,
        )
    }

    /// Returns the memory that holds the blocks.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.0.memory
    }

    /// Returns the number of free blocks.
    pub fn free(&self) -> usize {
        self.sweep();
        self.0.free.lock().len()
    }

    /// Returns to the pool those blocks of failed loads that no transfer can write to any more.
    fn sweep(&self) {
        let held = std::mem::take(&mut *self.0.held.lock());
        for (held, mut blocks) in held {
            match held.wait_blocking(Duration::ZERO) {
                Ok(Released::Lost) => {}
                Ok(_) => self.0.free.lock().append(&mut blocks),
                Err(held) => self.0.held.lock().push((held, blocks)),
            }
        }
    }

    /// Takes blocks for `tokens` tokens.
    ///
    /// # Errors
    /// `Busy`: fewer blocks are free.
    pub fn take(&self, tokens: usize) -> Result<DenseBlocks> {
        self.sweep();
        let count = tokens.div_ceil(self.0.rows.tokens);
        let mut free = self.0.free.lock();
        let Some(rest) = free.len().checked_sub(count) else {
            return Err(ErrorKind::Busy.because(format!(
                "{count} blocks for {tokens} tokens, {} are free: wait for a release, or make \
                 the pool larger",
                free.len()
            )));
        };
        let blocks = free.split_off(rest);
        Ok(DenseBlocks { pool: self.clone(), blocks })
    }

    /// Copies the first `tokens` tokens of a sequence into blocks. `views` hold K and V of each
    /// layer.
    ///
    /// # Errors
    /// - `Busy`: fewer blocks are free.
    /// - `Invalid`: the views lack a layer or a token, or do not fit the model.
    pub fn save(&self, tokens: usize, views: &[[DenseView<'_>; 2]]) -> Result<DenseBlocks> {
        self.layers(views.len())?;
        let blocks = self.take(tokens)?;
        let mut scratch = vec![0; self.0.block_len];
        for (part, block) in self.parts(tokens).zip(&blocks.blocks) {
            for (layer, views) in views.iter().enumerate() {
                scratch.fill(0);
                for (view, rows) in views.iter().zip(self.rows()) {
                    rows_into_block(view.bytes, &view.shape, part.clone(), &mut scratch, &rows)?;
                }
                self.0.memory.copy_in(self.0.offset(layer, *block), &scratch)?;
            }
        }
        Ok(blocks)
    }

    /// Copies blocks to the first `tokens` tokens of a sequence.
    ///
    /// # Errors
    /// `Invalid`: the blocks hold fewer tokens, or the views lack a layer or a token, or do not fit
    /// the model.
    pub fn load(
        &self,
        blocks: &DenseBlocks,
        tokens: usize,
        views: &mut [[DenseViewMut<'_>; 2]],
    ) -> Result<()> {
        self.layers(views.len())?;
        if blocks.blocks.len() < tokens.div_ceil(self.0.rows.tokens) {
            return Err(
                ErrorKind::Invalid.because(format!("{blocks:?} hold fewer than {tokens} tokens"))
            );
        }
        let mut scratch = vec![0; self.0.block_len];
        for (part, block) in self.parts(tokens).zip(&blocks.blocks) {
            for (layer, views) in views.iter_mut().enumerate() {
                self.0.memory.copy_out(self.0.offset(layer, *block), &mut scratch)?;
                for (view, rows) in views.iter_mut().zip(self.rows()) {
                    rows_from_block(&scratch, &rows, part.clone(), view.bytes, &view.shape)?;
                }
            }
        }
        Ok(())
    }

    /// Yields the tokens of each block.
    fn parts(&self, tokens: usize) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let step = self.0.rows.tokens;
        (0..tokens).step_by(step).map(move |first| first..tokens.min(first + step))
    }

    /// Returns where the rows of K and V lie in a block.
    fn rows(&self) -> [BlockRows; 2] {
        let Pool { model, rows: shape, .. } = &*self.0;
        let heads_before_tokens = model.layout.heads_before_tokens();
        [0, model.row].map(|start| BlockRows {
            shape: *shape,
            heads_before_tokens,
            part: start..start + model.row,
        })
    }

    fn layers(&self, given: usize) -> Result<()> {
        let wanted = self.0.model.layers.len();
        if given == wanted {
            return Ok(());
        }
        Err(ErrorKind::Invalid
            .because(format!("{given} layers were given, but the pool has {wanted}")))
    }
}

impl Pool {
    fn offset(&self, layer: usize, block: u32) -> usize {
        (layer * self.blocks as usize + block as usize) * self.block_len
    }
}

impl fmt::Debug for DensePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DensePool({} of {} blocks free)", self.0.free.lock().len(), self.0.blocks)
    }
}

/// Blocks of a dense pool, which are free again when this is dropped. [`Prefill::save`] and
/// [`Decode::load`] keep them for as long as a peer or a transfer may touch them.
pub struct DenseBlocks {
    pool: DensePool,
    blocks: Vec<u32>,
}

impl DenseBlocks {
    /// Returns the numbers of the blocks, as the connector takes them.
    pub fn lists(&self) -> BlockLists {
        BlockLists::single(&self.blocks[..])
    }

    /// Keeps the blocks from returning to the pool.
    fn keep(mut self) -> Vec<u32> {
        std::mem::take(&mut self.blocks)
    }

    /// Returns the blocks to the pool once nothing touches them any more.
    fn hold(self, held: HeldBlocks) {
        let pool = self.pool.clone();
        pool.0.held.lock().push((held, self.keep()));
    }
}

impl Drop for DenseBlocks {
    fn drop(&mut self) {
        self.pool.0.free.lock().append(&mut self.blocks);
    }
}

impl fmt::Debug for DenseBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DenseBlocks({} blocks)", self.blocks.len())
    }
}

impl Prefill<'_> {
    /// Copies the first `tokens` tokens of a sequence to blocks of `pool`, and publishes them. For
    /// engines with a dense tensor for each sequence. The caches of `pool` have to be registered.
    ///
    /// # Errors
    /// Those of [`DensePool::save`] and [`publish`](Self::publish), and `Unsupported` with
    /// NixlPushConnector.
    pub fn save(
        &self,
        request: impl Into<RequestId>,
        pool: &DensePool,
        tokens: usize,
        views: &[[DenseView<'_>; 2]],
    ) -> Result<(DenseLease, TransferParams)> {
        if self.mode() == TransferMode::Push {
            return Err(ErrorKind::Unsupported.because(
                "NixlPushConnector cannot push blocks of a dense pool: set kv_connector to \
                 NixlConnector",
            ));
        }
        let blocks = pool.save(tokens, views)?;
        let tokens = u32::try_from(tokens).map_err(|_| {
            ErrorKind::Invalid.because(format!("{tokens} tokens are too many for one request"))
        })?;
        let (lease, params) = self.publish(request, blocks.lists(), tokens)?;
        Ok((DenseLease { lease, blocks }, params))
    }
}

/// A lease and its blocks, which return to the pool when it ends. Dropping it before withdraws the
/// blocks, as dropping a [`Lease`] does.
#[must_use = "dropping a lease takes the blocks back"]
#[derive(Debug)]
pub struct DenseLease {
    // Dropped in this order: no peer may read blocks that are free.
    lease: Lease,
    blocks: DenseBlocks,
}

impl DenseLease {
    /// Waits for the end of the lease, as [`Lease::released`] does.
    pub async fn released(self) -> Released {
        let DenseLease { lease, blocks } = self;
        let released = lease.await;
        if released == Released::Lost {
            blocks.keep();
        }
        released
    }

    /// Blocks the thread until the lease ends, as [`Lease::wait_blocking`] does.
    ///
    /// # Errors
    /// Returns the lease itself, which continues, if it has not ended by the deadline.
    pub fn wait_blocking(self, deadline: impl Into<Deadline>) -> Result<Released, DenseLease> {
        let DenseLease { lease, blocks } = self;
        match lease.wait_blocking(deadline) {
            Ok(Released::Lost) => {
                blocks.keep();
                Ok(Released::Lost)
            }
            Ok(released) => Ok(released),
            Err(lease) => Err(DenseLease { lease, blocks }),
        }
    }
}

impl Decode<'_> {
    /// Loads the first `tokens` tokens of a sequence through blocks of `pool`. For engines with a
    /// dense tensor for each sequence. The caches of `pool` have to be registered.
    ///
    /// # Errors
    /// Those of [`fetch`](Self::fetch), and [`Refused`](kvx_vllm::engine::LoadFailure::Refused) if
    /// too few blocks of the pool are free or the views do not fit the model. The contents of the
    /// views are then unspecified. The error names no blocks, as all of them belong to the pool.
    pub async fn load(
        &self,
        request: impl Into<RequestId>,
        params: &TransferParams,
        pool: &DensePool,
        tokens: usize,
        views: &mut [[DenseViewMut<'_>; 2]],
        deadline: impl Into<Deadline>,
    ) -> Result<Loaded, LoadError> {
        let refused = |why: Error| LoadError::refused(why.to_string(), 0);
        let blocks = pool.take(tokens).map_err(refused)?;
        let mut loading =
            PendingLoad(Some((self.fetch(request, params, 0, blocks.lists(), deadline), blocks)));
        let ended = std::future::poll_fn(|context| loading.fetch().poll(context)).await;
        let (_, blocks) = loading.0.take().expect(TAKEN);
        match ended {
            Ok(loaded) => {
                pool.load(&blocks, tokens.min(loaded.tokens.end as usize), views)
                    .map_err(refused)?;
                Ok(loaded)
            }
            Err(mut error) => {
                error.invalid.clear();
                blocks.hold(std::mem::replace(&mut error.held, HeldBlocks::nothing()));
                Err(error)
            }
        }
    }
}

/// A load in progress and its blocks. Dropping it cancels the load.
struct PendingLoad(Option<(Fetch, DenseBlocks)>);

const TAKEN: &str = "the load is taken once, at its end or when it is dropped";

impl PendingLoad {
    fn fetch(&mut self) -> Pin<&mut Fetch> {
        Pin::new(&mut self.0.as_mut().expect(TAKEN).0)
    }
}

impl Drop for PendingLoad {
    fn drop(&mut self) {
        if let Some((fetch, blocks)) = self.0.take() {
            blocks.hold(fetch.cancel());
        }
    }
}
