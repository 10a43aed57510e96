//! KV cache events: what an engine has cached, as vLLM and SGLang publish it over ZeroMQ.
//!
//! A PUB socket sends [publications](Publication), numbered from 0 at each start of its process.
//! Each has a [batch](EventBatch) of events. A ROUTER socket replays earlier ones on
//! [request](replay_request).
//!
//! Decoders read the arrays that vLLM sends up to version 0.23, and the maps of later versions and
//! of SGLang. They ignore fields and events that they do not know. The encoder writes maps.

mod decode;
mod encode;
mod frames;
#[doc(hidden)]
pub mod fuzz;

pub use self::frames::{
    Publication, ReplayAnswer, publication, replay_answer, replay_end, replay_request,
};

/// The most bytes of an encoded batch. A prompt of a million tokens takes 5 MB.
pub const MAX_BATCH: usize = 8 << 20;

/// The medium of blocks that an engine computes with, whatever memory that is.
pub const MEDIUM_GPU: &str = "GPU";

/// The events of one step of an engine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EventBatch {
    /// The time of the batch, in seconds since 1970.
    pub timestamp: f64,
    /// The events in their order.
    pub events: Vec<CacheEvent>,
    /// The data parallel rank of the engine.
    pub rank: Option<u32>,
    /// The number of events of kinds that are not known. They are not among `events`.
    pub unknown: usize,
}

/// A change of an engine's cache.
#[derive(Clone, Debug, PartialEq)]
pub enum CacheEvent {
    /// Blocks were stored.
    Stored(Box<BlockStored>),
    /// Blocks were removed.
    Removed(Box<BlockRemoved>),
    /// All blocks were removed.
    Cleared,
}

/// An engine's name of a block: a hash of its tokens and of all before them, of which the last 8
/// bytes are kept. The algorithm is the engine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockHash(pub u64);

/// Blocks that follow one another in a prompt were stored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockStored {
    /// The blocks.
    pub hashes: Vec<BlockHash>,
    /// The block before the first one; `None` at the start of a prompt.
    pub parent: Option<BlockHash>,
    /// The tokens of all blocks. Empty if they are not plain numbers, such as SGLang's pairs.
    pub tokens: Vec<u32>,
    /// The tokens of a block.
    pub block_size: u32,
    /// The number of the LoRA adapter, which `lora_name` replaces.
    pub lora_id: Option<i64>,
    /// Where the blocks are.
    pub medium: Option<String>,
    /// The LoRA adapter.
    pub lora_name: Option<String>,
    /// For each block, true if its hash depends on more than tokens. Empty if the engine does not
    /// say.
    pub extra_keys: Vec<bool>,
    /// The group of layers, in models with several.
    pub group: Option<u32>,
    /// The kind of attention of the group.
    pub kind: Option<String>,
    /// `LOCAL`, or `REMOTE` for blocks that other engines hold.
    pub locality: Option<String>,
    /// True if the blocks belong to a cache salt (SGLang).
    pub has_salt: bool,
}

/// Blocks were removed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockRemoved {
    /// The blocks.
    pub hashes: Vec<BlockHash>,
    /// Where they were.
    pub medium: Option<String>,
    /// The group of layers.
    pub group: Option<u32>,
    /// `LOCAL`, or `REMOTE` for blocks that other engines held.
    pub locality: Option<String>,
}

impl BlockStored {
    /// Returns the tokens of each block if the blocks are exactly those tokens: any request without
    /// an adapter, images or a salt that begins with them can use the blocks.
    ///
    /// Returns `None` for blocks of sliding windows and of state space models, which hold fewer
    /// tokens than they stand for.
    pub fn plain_blocks(&self) -> Option<impl Iterator<Item = (BlockHash, &[u32])>> {
        let size = self.block_size as usize;
        let is_plain = self.lora_id.is_none()
            && self.lora_name.is_none()
            && !self.has_salt
            && !self.extra_keys.contains(&true);
        let is_full = match self.kind.as_deref() {
            None | Some("full_attention" | "mla_attention" | "sink_full_attention") => true,
            Some(_) => false,
        };
        let is_dense = size > 0 && self.hashes.len().checked_mul(size) == Some(self.tokens.len());
        (is_plain && is_full && is_dense)
            .then(|| self.hashes.iter().copied().zip(self.tokens.chunks_exact(size)))
    }
}

/// Returns true if blocks of this medium and locality are those that the engine computes with.
pub fn is_in_pool(medium: Option<&str>, locality: Option<&str>) -> bool {
    matches!(medium, None | Some(MEDIUM_GPU)) && locality != Some("REMOTE")
}
