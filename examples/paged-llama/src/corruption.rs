//! Corrupts the moved blocks of a prompt, to show that moved blocks determine the answers.

use std::collections::HashMap;
use std::sync::Arc;

use crate::engine::{FinishedRequest, Mover};
use crate::kv::{Kv, Memory, Outcome, TransferParams};

/// A mover that overwrites the first block of each load.
pub(crate) struct CorruptingMover {
    pub(crate) mover: Kv,
    pub(crate) memory: Arc<Memory>,
    /// Bytes per block of the first layer.
    pub(crate) len: usize,
    /// The first block of each load, by request.
    pub(crate) fill: HashMap<String, u32>,
}

impl Mover for CorruptingMover {
    fn on_request(&mut self, request: &str, prompt_tokens: usize, params: Option<&TransferParams>) {
        self.mover.on_request(request, prompt_tokens, params);
    }

    fn matched_tokens(&self, request: &str, computed: usize) -> usize {
        self.mover.matched_tokens(request, computed)
    }

    fn on_allocated(&mut self, request: &str, fill: &[u32], computed: usize, external: usize) {
        self.fill.extend(fill.first().map(|block| (request.to_owned(), *block)));
        self.mover.on_allocated(request, fill, computed, external);
    }

    fn step(&mut self) -> Vec<Outcome> {
        let outcomes = self.mover.step();
        for outcome in &outcomes {
            if let Outcome::Loaded { request, .. } = outcome
                && let Some(block) = self.fill.remove(request.as_str())
            {
                // Neither zeros nor a value that no model contains.
                let wrong = 3.0f32.to_le_bytes().repeat(self.len / 4);
                if let Err(why) = self.memory.copy_in(block as usize * self.len, &wrong) {
                    tracing::error!("cannot corrupt the block: {why}");
                }
            }
        }
        outcomes
    }

    fn on_finished(&mut self, ending: FinishedRequest<'_>) -> (bool, Option<TransferParams>) {
        self.mover.on_finished(ending)
    }
}
