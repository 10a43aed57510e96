//! The engine's interface to whatever moves its blocks between servers.

use std::sync::Arc;
use std::time::Instant;

use crate::kv::{Outcome, TransferParams};

/// Wakes the engine: there may be outcomes.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// Moves blocks from and to peers. Every method returns at once.
pub trait Mover: Send {
    /// A request has arrived.
    fn on_request(&mut self, request: &str, prompt_tokens: usize, params: Option<&TransferParams>);

    /// Tokens beyond the first `computed` ones that a peer has.
    fn matched_tokens(&self, request: &str, computed: usize) -> usize;

    /// Records that a request has its blocks: the first `computed` tokens are not loaded, the next
    /// `external` ones are, into `fill`. Called once more for a request that loads nothing.
    fn on_allocated(&mut self, request: &str, fill: &[u32], computed: usize, external: usize);

    /// Orders go out; what has come of earlier ones comes back.
    fn step(&mut self) -> Vec<Outcome>;

    /// When the next [`step`](Self::step) is due though nothing wakes the engine. Never, for a
    /// mover with a thread of its own that keeps its times.
    fn due(&self) -> Option<Instant> {
        None
    }

    /// A request has ended, with its blocks and so many tokens in them. True: the engine keeps the
    /// blocks until an outcome names the request.
    fn on_finished(&mut self, ending: FinishedRequest<'_>) -> (bool, Option<TransferParams>);
}

/// A finished request.
#[derive(Clone, Copy, Debug)]
pub struct FinishedRequest<'a> {
    /// Which.
    pub request: &'a str,
    /// Its blocks, from the first token on.
    pub blocks: &'a [u32],
    /// Tokens whose keys and values are in them.
    pub computed: usize,
    /// Those of the prompt that were in the prefix cache.
    pub cached: usize,
    /// How it has ended.
    pub status: crate::kv::Status,
}

/// An engine without peers.
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
