//! The engine's interface to the component that moves its blocks between servers.

use std::sync::Arc;
use std::time::Instant;

use crate::kv::{Outcome, TransferParams};

/// Wakes the engine, because there may be outcomes.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// Moves blocks from and to peers. No method blocks.
pub trait Mover: Send {
    /// Records that a request has arrived.
    fn on_request(&mut self, request: &str, prompt_tokens: usize, params: Option<&TransferParams>);

    /// Returns the number of tokens beyond the first `computed` ones that a peer has.
    fn matched_tokens(&self, request: &str, computed: usize) -> usize;

    /// Records that a request has its blocks: the first `computed` tokens are not loaded, the next
    /// `external` ones are, into `fill`. Called once more for a request that loads nothing.
    fn on_allocated(&mut self, request: &str, fill: &[u32], computed: usize, external: usize);

    /// Sends orders, and returns the outcomes of earlier ones.
    fn step(&mut self) -> Vec<Outcome>;

    /// Returns when the next [`step`](Self::step) is due if nothing wakes the engine before. `None`
    /// for a mover whose own thread keeps its deadlines.
    fn due(&self) -> Option<Instant> {
        None
    }

    /// Ends a request, and returns true if the engine must keep its blocks until an outcome names
    /// it.
    fn on_finished(&mut self, ending: FinishedRequest<'_>) -> (bool, Option<TransferParams>);
}

/// A finished request.
#[derive(Clone, Copy, Debug)]
pub struct FinishedRequest<'a> {
    /// The request's name.
    pub request: &'a str,
    /// The request's blocks, from the first token on.
    pub blocks: &'a [u32],
    /// The number of tokens whose keys and values are in the blocks.
    pub computed: usize,
    /// The number of prompt tokens that were in the prefix cache.
    pub cached: usize,
    /// The reason for the end.
    pub status: crate::kv::Status,
}

/// The mover of an engine without peers.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoMover;

impl Mover for NoMover {
    fn on_request(&mut self, _: &str, _: usize, _: Option<&TransferParams>) {}

    fn matched_tokens(&self, _: &str, _: usize) -> usize {
        0
    }

    fn on_allocated(&mut self, _: &str, _: &[u32], _: usize, _: usize) {}

    fn step(&mut self) -> Vec<Outcome> {
        Vec::new()
    }

    fn on_finished(&mut self, _: FinishedRequest<'_>) -> (bool, Option<TransferParams>) {
        (false, None)
    }
}
