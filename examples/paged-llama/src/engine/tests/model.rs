//! A model whose answers prove which tokens were in the blocks that it was given.

use std::sync::{Arc, Mutex, MutexGuard};

use crate::engine::Forward;
use crate::model::{Chunk, LogitsScope, ModelError, Result};

pub(super) const VOCABULARY: usize = 258;

/// The contents of the model's blocks, and its calls. The test shares it.
#[derive(Clone)]
pub(super) struct Memory(Arc<Mutex<Inner>>);

pub(super) struct Inner {
    block_size: usize,
    /// The tokens in each block.
    pub(super) slots: Vec<Vec<Option<u32>>>,
    /// The number of tokens computed.
    pub(super) computed: usize,
    /// The number of tokens of each step.
    pub(super) steps: Vec<usize>,
    /// The most requests in one step.
    pub(super) widest: usize,
    pub(super) fails: bool,
}

impl Memory {
    pub(super) fn new(blocks: usize, block_size: usize) -> Self {
        let slots = vec![vec![None; block_size]; blocks];
        Memory(Arc::new(Mutex::new(Inner {
            block_size,
            slots,
            computed: 0,
            steps: Vec::new(),
            widest: 0,
            fails: false,
        })))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().expect("no test has panicked with it")
    }

    /// Writes the tokens from `start` on, as a peer would.
    pub(super) fn fill(&self, blocks: &[u32], tokens: &[u32]) {
        let mut inner = self.lock();
        for (at, token) in tokens.iter().enumerate() {
            let (block, slot) = (blocks[at / inner.block_size], at % inner.block_size);
            inner.slots[block as usize][slot] = Some(*token);
        }
    }
}

impl Forward for Memory {
    fn forward(&mut self, work: &[Chunk<'_>]) -> Result<Vec<Vec<Vec<f32>>>> {
        let mut inner = self.lock();
        if inner.fails {
            return Err(ModelError::new("as the test wants"));
        }
        let size = inner.block_size;
        inner.steps.push(work.iter().map(|work| work.tokens.len()).sum());
        inner.widest = inner.widest.max(work.len());
        let mut rows = Vec::new();
        for work in work {
            inner.computed += work.tokens.len();
            for (at, token) in (work.start..).zip(work.tokens) {
                inner.slots[work.blocks[at / size] as usize][at % size] = Some(*token);
            }
            let end = work.start + work.tokens.len();
            let from = match work.logits {
                LogitsScope::None => end,
                LogitsScope::Last => end - 1,
                LogitsScope::All => work.start,
            };
            let read = |at: usize| {
                inner.slots[work.blocks[at / size] as usize][at % size]
                    .expect("this token was never computed")
            };
            rows.push((from..end).map(|last| logits((0..=last).map(read))).collect());
        }
        Ok(rows)
    }
}

/// Returns the logits after these tokens.
pub(super) fn logits(tokens: impl Iterator<Item = u32>) -> Vec<f32> {
    let mut state = 7u64;
    for token in tokens {
        state = mix(state ^ u64::from(token));
    }
    // Letters are likely, other bytes are not, and the end token is never the likeliest.
    let one = |token: usize| {
        let chance = (mix(state ^ ((token as u64) << 32)) >> 40) as f32 / (1u64 << 24) as f32;
        if (97..123).contains(&token) { 4.0 + chance } else { chance - 4.0 }
    };
    (0..VOCABULARY).map(one).collect()
}

/// Returns the answer to a prompt when the likeliest token is always taken.
pub(super) fn expected(prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..count {
        let logits = logits(tokens.iter().copied());
        let best = (0..VOCABULARY)
            .max_by(|a, b| logits[*a].total_cmp(&logits[*b]))
            .expect("there are tokens");
        tokens.push(best as u32);
    }
    tokens.split_off(prompt.len())
}

fn mix(state: u64) -> u64 {
    let mut mixed = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
