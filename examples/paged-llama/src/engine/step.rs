//! The engine's loop: it assigns blocks, plans and computes steps, and handles their results.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::blocks::Blocks;
use super::metrics::EngineMetrics;
use super::mover::{FinishedRequest, Mover};
use super::sequence::{SampledToken, Sequence};
use super::{Command, FinishReason, Forward, Limits};
use crate::events::CachePublisher;
use crate::kv::{Kept, Outcome, Status, Then};
use crate::model::{Chunk, LogitsScope, ModelError as Error, Result};
use crate::tokenizer::Tokenizer;

/// The longest time that an idle loop sleeps.
const IDLE: Duration = Duration::from_secs(3600);

pub(super) struct EngineLoop {
    limits: Limits,
    counts: Arc<EngineMetrics>,
    model: Box<dyn Forward>,
    tokenizer: Arc<Tokenizer>,
    mover: Box<dyn Mover>,
    blocks: Blocks,
    events: Option<CachePublisher>,
    /// Requests in the order in which they get blocks. Some already have a few.
    waiting: VecDeque<Sequence>,
    /// Requests whose blocks a peer is filling.
    loading: HashMap<String, Sequence>,
    /// Running requests in the order of their arrival: the last one is preempted first.
    running: Vec<Sequence>,
    /// Blocks of requests that have ended or failed, which are held until the outcome arrives.
    kept: HashMap<(String, Kept), Vec<u32>>,
    draining: bool,
}

impl EngineLoop {
    pub(super) fn new(
        limits: Limits,
        model: Box<dyn Forward>,
        tokenizer: Arc<Tokenizer>,
        mover: Box<dyn Mover>,
        events: Option<CachePublisher>,
    ) -> Self {
        let mut blocks = Blocks::new(limits.blocks, limits.prefix_cache);
        if events.is_some() {
            blocks.record_changes();
        }
        EngineLoop {
            counts: Arc::new(EngineMetrics::of(limits.engine, limits.block_size)),
            limits,
            model,
            tokenizer,
            mover,
            blocks,
            events,
            waiting: VecDeque::new(),
            loading: HashMap::new(),
            running: Vec::new(),
            kept: HashMap::new(),
            draining: false,
        }
    }

    /// Runs until the engine is stopped or the model fails.
    pub(super) fn run(mut self, commands: &Receiver<Command>) -> Result<()> {
        let mut idle = false;
        loop {
            let due =
                self.mover.due().map_or(IDLE, |due| due.saturating_duration_since(Instant::now()));
            let first = match idle {
                true => commands.recv_timeout(due.min(IDLE)),
                false => commands.try_recv().map_err(|_| RecvTimeoutError::Timeout),
            };
            for command in first.into_iter().chain(commands.try_iter()) {
                match command {
                    Command::Add(request, told) => {
                        let counts = self.counts.clone();
                        self.add(Sequence::new(*request, told, counts, &self.tokenizer));
                    }
                    Command::Abort(name) => self.abort(&name),
                    Command::Look => {}
                    Command::Drain => self.draining = true,
                    Command::Stop => return Ok(()),
                    Command::Fail(why) => return Err(self.failed(Error::new(why))),
                }
            }
            for outcome in self.mover.step() {
                self.handle_outcome(outcome);
            }
            let admitted = self.admit();
            let computed = match self.compute() {
                Ok(computed) => computed,
                Err(error) => return Err(self.failed(error)),
            };
            if !computed {
                self.measure();
            }
            self.publish();
            idle = !admitted && !computed;
            let nobody =
                self.waiting.is_empty() && self.loading.is_empty() && self.running.is_empty();
            if self.draining && nobody {
                return Ok(());
            }
        }
    }

    fn failed(&mut self, error: Error) -> Error {
        self.all(|sequence| {
            sequence.fail("the model has failed; see the server's log for the reason")
        });
        error
    }

    fn add(&mut self, sequence: Sequence) {
        if self.draining {
            return sequence.fail("the server is shutting down");
        }
        let request = &sequence.request;
        self.mover.on_request(&request.name, request.prompt.len(), request.transfer.as_ref());
        self.waiting.push_back(sequence);
    }

    fn all(&self, each: impl Fn(&Sequence)) {
        self.waiting.iter().chain(self.loading.values()).chain(&self.running).for_each(each);
    }

    fn abort(&mut self, name: &str) {
        if let Some(sequence) = self.loading.remove(name) {
            self.end(&sequence, Status::Aborted, Kept::Load);
        } else if let Some(at) = self.waiting.iter().position(|sequence| sequence.name() == name)
            && let Some(sequence) = self.waiting.remove(at)
        {
            self.end(&sequence, Status::Aborted, Kept::Request);
        } else if let Some(at) = self.running.iter().position(|sequence| sequence.name() == name) {
            let sequence = self.running.remove(at);
            self.end(&sequence, Status::Aborted, Kept::Request);
        }
    }

    /// Ends a request. Its blocks are released, or kept until the outcome that `kept` names. For a
    /// load, those are the blocks that a peer is still filling.
    fn end(
        &mut self,
        sequence: &Sequence,
        status: Status,
        kept: Kept,
    ) -> Option<crate::kv::TransferParams> {
        let needed = sequence.computed.div_ceil(self.limits.block_size).min(sequence.blocks.len());
        let (keep, params) = self.mover.on_finished(FinishedRequest {
            request: sequence.name(),
            blocks: &sequence.blocks[..needed],
            computed: sequence.computed,
            cached: sequence.cached,
            status,
        });
        let held = match kept {
            _ if !keep => 0..0,
            Kept::Load => sequence.filled.clone(),
            _ => 0..sequence.blocks.len(),
        };
        if keep {
            self.kept
                .insert((sequence.name().to_owned(), kept), sequence.blocks[held.clone()].to_vec());
        }
        self.blocks.release(&sequence.blocks[held.end..]);
        self.blocks.release(&sequence.blocks[..held.start]);
        params
    }

    fn handle_outcome(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Loaded { request, computed } => {
                // An expected race: the request was aborted while its blocks were being loaded.
                let Some(mut sequence) = self.loading.remove(request.as_str()) else { return };
                let had = sequence.computed;
                sequence.computed = (computed as usize).min(sequence.tokens.len());
                sequence.external = sequence.computed - had.min(sequence.computed);
                self.counts.external_hits.increment(sequence.external as u64);
                // The peer does not send the last token's logits, so that token is recomputed. Its
                // block is cached after that.
                sequence.computed = sequence.computed.min(sequence.tokens.len() - 1);
                sequence.remember(&mut self.blocks, self.limits.block_size, had);
                self.waiting.push_front(sequence);
            }
            Outcome::Failed { request, failure, then, invalid, held } => {
                // An expected race: the request was aborted while its blocks were being loaded.
                let Some(mut sequence) = self.loading.remove(request.as_str()) else { return };
                tracing::warn!(
                    request = sequence.name(),
                    invalid = invalid.len(),
                    "KV load failure: {failure}"
                );
                let held: Vec<u32> =
                    held.groups().iter().flat_map(|group| group.iter().copied()).collect();
                let computed = match then {
                    Then::Fail => 0,
                    Then::Recompute { computed } => computed as usize,
                };
                // Keep the valid blocks, and replace all blocks after them.
                let valid = computed / self.limits.block_size;
                let behind = sequence.blocks.split_off(valid.min(sequence.blocks.len()));
                let back: Vec<u32> =
                    behind.into_iter().filter(|block| !held.contains(block)).collect();
                self.blocks.release(&back);
                if !held.is_empty() {
                    self.kept.insert((sequence.name().to_owned(), Kept::Load), held);
                }
                sequence.computed = computed;
                sequence.external = computed.saturating_sub(sequence.cached);
                if then == Then::Fail {
                    self.end(&sequence, Status::Failed, Kept::Request);
                    sequence.fail("Internal server error");
                } else {
                    self.waiting.push_front(sequence);
                }
            }
            Outcome::Free { request, kept } => {
                if let Some(blocks) = self.kept.remove(&(request.as_str().to_owned(), kept)) {
                    self.blocks.release(&blocks);
                }
            }
            Outcome::Lost { request, kept } => {
                if let Some(blocks) = self.kept.remove(&(request.as_str().to_owned(), kept)) {
                    self.blocks.lose(&blocks);
                }
            }
        }
    }

    /// Gives blocks to waiting requests in their order, while there are enough. Returns whether a
    /// request got any.
    fn admit(&mut self) -> bool {
        let mut any = false;
        while self.running.len() < self.limits.requests {
            let Some(mut sequence) = self.waiting.pop_front() else { break };
            let needed = sequence.tokens.len().div_ceil(self.limits.block_size);
            if needed > self.blocks.usable() {
                self.end(&sequence, Status::Failed, Kept::Request);
                sequence.fail("the pool has lost too many blocks; restart the server");
                any = true;
                continue;
            }
            let fresh = sequence.blocks.is_empty();
            let new = !std::mem::replace(&mut sequence.begun, true);
            if fresh && !sequence.wants_prompt_logits() {
                let most = (sequence.tokens.len() - 1) / self.limits.block_size;
                let found = self.blocks.find(sequence.hashes(most, self.limits.block_size));
                sequence.begin_with(found, self.limits.block_size);
            }
            let Some(more) = self.take(needed - sequence.blocks.len()) else {
                if fresh {
                    self.blocks.release(&sequence.give_up());
                }
                sequence.begun = !new;
                self.waiting.push_front(sequence);
                break;
            };
            sequence.blocks.extend(more);
            any = true;
            if new {
                self.begin(sequence);
            } else {
                self.running.push(sequence);
            }
        }
        any
    }

    /// Takes `count` blocks. If there are too few, also takes those of waiting requests, which are
    /// recomputed later.
    fn take(&mut self, count: usize) -> Option<Vec<u32>> {
        loop {
            if let Some(taken) = self.blocks.take(count) {
                return Some(taken);
            }
            let last =
                self.waiting.iter_mut().rev().find(|sequence| !sequence.blocks.is_empty())?;
            self.blocks.release(&last.give_up());
        }
    }

    /// Handles a request's first blocks: loads the tokens that a peer has.
    fn begin(&mut self, mut sequence: Sequence) {
        let (block_size, computed) = (self.limits.block_size, sequence.computed);
        let prompt = sequence.request.prompt.len();
        self.counts.prompt_tokens.increment(prompt as u64);
        self.counts.prefix_queries.increment(prompt as u64);
        self.counts.prefix_hits.increment(computed as u64);
        let external = match sequence.wants_prompt_logits() {
            true => 0,
            false => self.mover.matched_tokens(sequence.name(), computed).min(prompt - computed),
        };
        sequence.filled = match external {
            0 => 0..0,
            _ => computed / block_size..(computed + external).div_ceil(block_size),
        };
        let fill = &sequence.blocks[sequence.filled.clone()];
        self.mover.on_allocated(sequence.name(), fill, computed, external);
        if external > 0 {
            self.counts.external_queries.increment((prompt - computed) as u64);
            self.loading.insert(sequence.name().to_owned(), sequence);
        } else {
            self.running.push(sequence);
        }
    }

    /// Computes one step. Returns whether there was anything to compute.
    fn compute(&mut self) -> Result<bool> {
        let chunks = self.plan();
        if chunks.is_empty() {
            return Ok(false);
        }
        let running = &self.running;
        let work: Vec<Chunk<'_>> = chunks
            .iter()
            .map(|&(at, count)| {
                let sequence = &running[at];
                let to = sequence.computed + count;
                let logits = match to == sequence.tokens.len() {
                    _ if sequence.wants_prompt_logits() => LogitsScope::All,
                    true => LogitsScope::Last,
                    false => LogitsScope::None,
                };
                let tokens = &sequence.tokens[sequence.computed..to];
                Chunk { tokens, start: sequence.computed, blocks: &sequence.blocks, logits }
            })
            .collect();
        let rows = self.model.forward(&work)?;
        if rows.len() != chunks.len() {
            return Err(Error::new("the model did not return logits for each chunk"));
        }
        let mut ended = Vec::new();
        for ((at, count), rows) in chunks.into_iter().zip(rows) {
            ended.extend(self.advance(at, count, &rows).map(|how| (at, how)));
        }
        ended.sort_unstable_by_key(|(at, _)| std::cmp::Reverse(*at));
        let mut over = Vec::with_capacity(ended.len());
        for (at, (status, chosen)) in ended {
            let sequence = self.running.remove(at);
            let params = self.end(&sequence, status, Kept::Request);
            over.push((sequence, chosen, params));
        }
        // Update the metrics and publish first: a client that has its answer must not find the
        // request in them.
        self.measure();
        self.publish();
        for (mut sequence, chosen, params) in over {
            sequence.tell(chosen, params);
        }
        Ok(true)
    }

    /// Advances a request by `count` tokens. Returns how it has ended, if it has.
    fn advance(
        &mut self,
        at: usize,
        count: usize,
        rows: &[Vec<f32>],
    ) -> Option<(Status, SampledToken)> {
        let sequence = &mut self.running[at];
        let before = sequence.computed;
        sequence.note_prompt(before, rows, self.limits.raw_logits);
        sequence.computed += count;
        sequence.remember(&mut self.blocks, self.limits.block_size, before);
        if sequence.missing() > 0 {
            return None;
        }
        let logits = rows.last()?;
        let chosen = sequence.choose(logits, &self.tokenizer, &self.limits);
        self.counts.generation_tokens.increment(1);
        let status = match chosen.reason {
            None => {
                sequence.tell(chosen, None);
                return None;
            }
            Some(FinishReason::Length) => Status::LengthCapped,
            Some(_) => Status::Stopped,
        };
        Some((status, chosen))
    }

    /// Returns the requests of the next step and the number of tokens of each, with decoding
    /// requests first.
    fn plan(&mut self) -> Vec<(usize, usize)> {
        let mut left = self.limits.step_tokens;
        let mut at = 0;
        while at < self.running.len() {
            if self.running[at].missing() == 1 && !self.grow(at) {
                continue;
            }
            at += 1;
        }
        let mut chunks = Vec::new();
        for decoding in [true, false] {
            for (at, sequence) in self.running.iter().enumerate() {
                let has_room =
                    sequence.tokens.len() <= sequence.blocks.len() * self.limits.block_size;
                if (sequence.missing() == 1) == decoding && has_room && left > 0 {
                    let count = sequence.missing().min(left);
                    left -= count;
                    chunks.push((at, count));
                }
            }
        }
        chunks
    }

    /// Gets the block for a request's next token: a free one, or that of the youngest request,
    /// which is preempted. Returns false if the request itself was preempted.
    fn grow(&mut self, at: usize) -> bool {
        loop {
            let sequence = &self.running[at];
            if sequence.tokens.len() <= sequence.blocks.len() * self.limits.block_size {
                return true;
            }
            if let Some(more) = self.take(1) {
                self.running[at].blocks.extend(more);
                continue;
            }
            if self.running.len() == 1 && !(self.kept.is_empty() && self.loading.is_empty()) {
                return true; // continues when blocks are released
            }
            let youngest = self.running.len() - 1;
            let mut sequence = self.running.remove(youngest);
            self.counts.preemptions.increment(1);
            self.blocks.release(&sequence.give_up());
            self.waiting.push_front(sequence);
            if youngest == at {
                return false;
            }
        }
    }

    fn publish(&mut self) {
        if let (Some(events), Some(changes)) = (&self.events, self.blocks.changes()) {
            events.publish(changes.take());
        }
    }

    fn measure(&self) {
        self.counts.running.set(self.running.len() as f64);
        self.counts.waiting.set((self.waiting.len() + self.loading.len()) as f64);
        self.counts.usage.set(self.blocks.usage());
        self.counts.blocks_kept.set(self.kept.values().map(Vec::len).sum::<usize>() as f64);
    }
}
