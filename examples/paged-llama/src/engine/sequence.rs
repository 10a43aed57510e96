//! A request in the engine: its tokens, its blocks, and the progress of its computation.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc::UnboundedSender;

use super::blocks::{Blocks, Hash, hash};
use super::metrics::EngineMetrics;
use super::text::Text;
use super::{Failure, Finish, FinishReason, Limits, Logprob, Piece, PieceResult, Request};
use crate::kv::TransferParams;
use crate::tokenizer::{Detokenizer, Tokenizer};

pub(super) struct Sequence {
    pub(super) request: Request,
    told: UnboundedSender<PieceResult>,
    counts: Arc<EngineMetrics>,
    /// The prompt, followed by the answer.
    pub(super) tokens: Vec<u32>,
    pub(super) blocks: Vec<u32>,
    /// The number of tokens whose keys and values are in the blocks.
    pub(super) computed: usize,
    /// The numbers of prompt tokens that were first found in the local cache and in a peer's
    /// blocks.
    pub(super) cached: usize,
    pub(super) external: usize,
    /// The range of the request's blocks that a peer is filling.
    pub(super) filled: Range<usize>,
    /// The request has had blocks before.
    pub(super) begun: bool,
    hashes: Vec<Hash>,
    text: Text,
    prompt_logprobs: Vec<Logprob>,
    /// The number of `prompt_logprobs` that were sent.
    prompt_told: usize,
    arrived: Instant,
    last: Instant,
}

/// A sampled token, and its effect on the answer.
pub(super) struct SampledToken {
    pub(super) text: String,
    pub(super) logprob: Option<Logprob>,
    pub(super) reason: Option<FinishReason>,
}

impl Sequence {
    pub(super) fn new(
        request: Request,
        told: UnboundedSender<PieceResult>,
        counts: Arc<EngineMetrics>,
        tokenizer: &Tokenizer,
    ) -> Self {
        let detokenizer = Detokenizer::after(tokenizer, &request.prompt, request.skip_special);
        let text = Text::new(detokenizer, request.stop.clone(), request.include_stop);
        let now = Instant::now();
        Sequence {
            tokens: request.prompt.clone(),
            request,
            told,
            counts,
            blocks: Vec::new(),
            computed: 0,
            cached: 0,
            external: 0,
            filled: 0..0,
            begun: false,
            hashes: Vec::new(),
            text,
            prompt_logprobs: Vec::new(),
            prompt_told: 0,
            arrived: now,
            last: now,
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.request.name
    }

    pub(super) fn given(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// Begins with these blocks, which are full and valid.
    pub(super) fn begin_with(&mut self, blocks: Vec<u32>, block_size: usize) {
        self.computed = blocks.len() * block_size;
        self.blocks = blocks;
        // After the first token, the cache contains blocks that the request itself has computed.
        if self.given() == 0 {
            (self.cached, self.external) = (self.computed, 0);
        }
    }

    /// Releases the blocks. Their contents are recomputed, also those that a peer has sent.
    pub(super) fn give_up(&mut self) -> Vec<u32> {
        let blocks = std::mem::take(&mut self.blocks);
        self.begin_with(Vec::new(), 0);
        blocks
    }

    /// Returns the number of tokens that are not computed yet: one, once the prompt is complete.
    pub(super) fn missing(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Returns the hashes of the first `count` full blocks.
    pub(super) fn hashes(&mut self, count: usize, block_size: usize) -> &[Hash] {
        while self.hashes.len() < count {
            let from = self.hashes.len() * block_size;
            let next = hash(self.hashes.last(), &self.tokens[from..from + block_size]);
            self.hashes.push(next);
        }
        &self.hashes[..count]
    }

    /// Caches the full blocks from token `from` on, so that other requests can share them.
    pub(super) fn remember(&mut self, blocks: &mut Blocks, block_size: usize, from: usize) {
        let full = self.computed / block_size;
        self.hashes(full, block_size);
        for at in from / block_size..full {
            let before = at.checked_sub(1).map(|before| &self.hashes[before]);
            let tokens = &self.tokens[at * block_size..(at + 1) * block_size];
            blocks.remember(self.blocks[at], self.hashes[at], before, tokens);
        }
    }

    /// Returns whether logits of prompt tokens are still needed.
    pub(super) fn wants_prompt_logits(&self) -> bool {
        self.request.prompt_logprobs.is_some()
            && self.prompt_logprobs.len() + 1 < self.request.prompt.len()
    }

    /// Records the logits of the tokens from `start` on that are followed by further prompt tokens.
    pub(super) fn note_prompt(&mut self, start: usize, rows: &[Vec<f32>], raw_logits: bool) {
        let Some(top) = self.request.prompt_logprobs else { return };
        for (at, row) in (start..).zip(rows) {
            // After a preemption some tokens are computed a second time.
            if at == self.prompt_logprobs.len()
                && let Some(token) = self.request.prompt.get(at + 1)
            {
                self.prompt_logprobs.push(Logprob::of(row, *token, top, raw_logits));
            }
        }
    }

    /// Samples the next token.
    pub(super) fn choose(
        &mut self,
        logits: &[f32],
        tokenizer: &Tokenizer,
        limits: &Limits,
    ) -> SampledToken {
        let (prompt, given) = self.tokens.split_at(self.request.prompt.len());
        let request = &self.request;
        let young = given.len() < request.min_tokens;
        let banned: Vec<u32> = match young {
            true => request.ends.iter().chain(&request.stop_tokens).copied().collect(),
            false => Vec::new(),
        };
        let token = request.sampling.choose(logits, prompt, given, &banned);
        let logprob =
            request.logprobs.map(|top| Logprob::of(logits, token, top, limits.raw_logits));
        self.tokens.push(token);
        let request = &self.request;
        let mut reason = if request.stop_tokens.contains(&token) {
            Some(FinishReason::StopToken(token))
        } else {
            request.ends.contains(&token).then_some(FinishReason::EndOfText)
        };
        let mut text = String::new();
        if reason.is_none() || request.include_stop {
            let may_stop = !young && reason.is_none();
            let (piece, stop) = self.text.push(tokenizer, token, may_stop);
            text = piece;
            reason = reason.or(stop.map(FinishReason::Stop));
        }
        let full = self.given() >= self.request.max_tokens || self.tokens.len() >= limits.model_len;
        reason = reason.or(full.then_some(FinishReason::Length));
        if reason.is_some() && !matches!(reason, Some(FinishReason::Stop(_))) {
            text += &self.text.finish(tokenizer);
        }
        SampledToken { text, logprob, reason }
    }

    /// Sends the sampled token to the client.
    pub(super) fn tell(&mut self, chosen: SampledToken, transfer: Option<TransferParams>) {
        let token = self.tokens[self.tokens.len() - 1];
        let now = Instant::now();
        if self.given() == 1 {
            self.counts.first_token.record(now - self.arrived);
        } else {
            self.counts.between_tokens.record(now - self.last);
        }
        self.last = now;
        let prompt_logprobs = self.prompt_logprobs[self.prompt_told..].to_vec();
        self.prompt_told = self.prompt_logprobs.len();
        let piece = Piece {
            text: chosen.text,
            tokens: vec![(token, chosen.logprob)],
            prompt_logprobs,
            cached: self.cached + self.external,
            end: chosen.reason.map(|reason| Finish { reason, transfer }),
        };
        if let Some(end) = &piece.end {
            let ended = match end.reason {
                FinishReason::Length => &self.counts.ended_by_length,
                _ => &self.counts.ended_by_stop,
            };
            ended.increment(1);
            self.counts.whole_request.record(now - self.arrived);
        }
        let _ = self.told.send(Ok(piece));
    }

    /// Fails the request.
    pub(super) fn fail(&self, words: &str) {
        self.counts.failed.increment(1);
        let _ = self.told.send(Err(Failure(words.to_owned())));
    }
}
