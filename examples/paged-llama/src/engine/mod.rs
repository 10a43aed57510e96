//! The engine: many requests over one model and one pool, step by step, on a dedicated thread.
//!
//! Each step computes a chunk of every running request: one token of each that decodes, and more of
//! those whose prompt is not complete. Requests with the same prefix share blocks. If there are too
//! few blocks, the youngest request releases its own and is recomputed later. An idle thread
//! sleeps.

mod blocks;
mod metrics;
mod mover;
mod sampling;
mod sequence;
mod step;
#[cfg(test)]
mod tests;
mod text;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

pub use self::mover::{FinishedRequest, Mover, NoMover, Wake};
pub use self::sampling::{Logprob, Sampling};
use self::step::EngineLoop;
use crate::events::CachePublisher;
use crate::kv::TransferParams;
use crate::model::{Chunk, ModelError as Error, Result};
use crate::tokenizer::Tokenizer;

/// A model with its pool.
pub trait Forward: Send {
    /// Computes a step: writes keys and values into the blocks, and returns the requested logits of
    /// each chunk, one row per token.
    ///
    /// # Errors
    ///
    /// Fails if the model cannot compute any more; every request then fails.
    fn forward(&mut self, chunks: &[Chunk<'_>]) -> Result<Vec<Vec<Vec<f32>>>>;
}

/// The limits of an engine.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Tokens per block.
    pub block_size: usize,
    /// The number of blocks in the pool.
    pub blocks: usize,
    /// The longest sequence, prompt and answer together.
    pub model_len: usize,
    /// The number of requests that run concurrently.
    pub requests: usize,
    /// The most tokens per step.
    pub step_tokens: usize,
    /// Lets requests with the same prefix share blocks.
    pub prefix_cache: bool,
    /// Reports logits instead of log probabilities.
    pub raw_logits: bool,
    /// The engine's data-parallel rank: its number in metrics and for peers.
    pub engine: usize,
}

/// A prompt and the options of its answer.
#[derive(Debug)]
pub struct Request {
    /// The engine's unique name for the request, never reused.
    pub name: String,
    /// The tokens of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// The sampling parameters.
    pub sampling: Sampling,
    /// The most tokens of the answer.
    pub max_tokens: usize,
    /// The fewest tokens of the answer; until then, nothing ends it.
    pub min_tokens: usize,
    /// Tokens that end the answer and are not part of it.
    pub ends: Vec<u32>,
    /// Tokens named by the client that end the answer.
    pub stop_tokens: Vec<u32>,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// Includes in the answer the text that ended it.
    pub include_stop: bool,
    /// Omits special tokens from the text.
    pub skip_special: bool,
    /// The number of likeliest tokens to report with each token of the answer; `None` reports no
    /// probabilities.
    pub logprobs: Option<usize>,
    /// The number of likeliest tokens to report with each token of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// `kv_transfer_params`.
    pub transfer: Option<TransferParams>,
}

/// A part of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// New text that no later token can change.
    pub text: String,
    /// The tokens since the last piece, with their probabilities if requested.
    pub tokens: Vec<(u32, Option<Logprob>)>,
    /// The probabilities of the prompt's tokens from the second on, before the first token.
    pub prompt_logprobs: Vec<Logprob>,
    /// The number of prompt tokens that were cached or loaded from a peer.
    pub cached: usize,
    /// The end of the answer, in the last piece.
    pub end: Option<Finish>,
}

/// The end of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    /// The reason for the end.
    pub reason: FinishReason,
    /// Parameters that the client may send to another server.
    pub transfer: Option<TransferParams>,
}

/// The reason why an answer ends.
#[derive(Clone, Debug, PartialEq)]
pub enum FinishReason {
    /// The answer has reached its length limit.
    Length,
    /// The model has ended the answer.
    EndOfText,
    /// A text that the client has named.
    Stop(String),
    /// A token that the client has named.
    StopToken(u32),
}

/// A piece of an answer, or the reason why there is none.
pub type PieceResult = std::result::Result<Piece, Failure>;

/// The reason why a request has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure(pub String);

enum Command {
    Add(Box<Request>, UnboundedSender<PieceResult>),
    Abort(String),
    /// Outcomes may be available.
    Look,
    /// Accept no more requests, and let running ones end.
    Drain,
    /// End at once.
    Stop,
    /// The model cannot compute any more.
    Fail(String),
}

/// A handle to a running engine, to submit requests; clones share the engine.
#[derive(Clone)]
pub struct Engine {
    commands: Sender<Command>,
    limits: Limits,
    dead: Arc<AtomicBool>,
}

/// A running engine's thread.
pub struct Running {
    engine: Engine,
    thread: Option<JoinHandle<Result<()>>>,
}

/// The answer to a request. Dropping it aborts the request.
pub struct Answer {
    pieces: UnboundedReceiver<PieceResult>,
    name: String,
    commands: Sender<Command>,
}

impl Engine {
    /// Starts the thread. `mover` receives a function that wakes the engine. Changes of the prefix
    /// cache are published as `events`.
    ///
    /// # Errors
    ///
    /// Fails if a request of the full length does not fit into the pool, or if `mover` fails.
    pub fn start(
        limits: Limits,
        model: Box<dyn Forward>,
        tokenizer: Arc<Tokenizer>,
        events: Option<CachePublisher>,
        mover: impl FnOnce(Wake) -> Result<Box<dyn Mover>>,
    ) -> Result<Running> {
        let needed = limits.model_len.div_ceil(limits.block_size);
        if needed > limits.blocks {
            return Err(Error::new(format!(
                "a request of {} tokens needs {needed} blocks, but the pool has {}; lower \
                 --max-model-len to {}, or raise --num-gpu-blocks-override",
                limits.model_len,
                limits.blocks,
                limits.blocks * limits.block_size
            )));
        }
        let (commands, received) = channel();
        let wake = commands.clone();
        let mover = mover(Arc::new(move || drop(wake.send(Command::Look))))?;
        let dead = Arc::new(AtomicBool::new(false));
        let engine = Engine { commands, limits: limits.clone(), dead: dead.clone() };
        let number = limits.engine;
        let run = move || {
            let dies = DeathNotice(dead);
            let ended = EngineLoop::new(limits, model, tokenizer, mover, events).run(&received);
            drop(dies);
            if let Err(why) = &ended {
                tracing::error!("engine {number} has ended: {why}; start the server again");
            }
            refuse_rest(&received);
            ended
        };
        let thread = std::thread::Builder::new()
            .name(format!("engine-{number}"))
            .spawn(run)
            .map_err(|error| Error::new(format!("cannot start the engine's thread: {error}")))?;
        Ok(Running { engine, thread: Some(thread) })
    }

    /// Returns the engine's limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns whether the engine still computes.
    pub fn is_alive(&self) -> bool {
        !self.dead.load(Ordering::Acquire)
    }

    /// Ends the engine because the model cannot compute any more. Every request fails.
    pub fn fail(&self, why: String) {
        // An error means that the engine has already ended.
        let _ = self.commands.send(Command::Fail(why));
    }

    /// Puts a request into the queue.
    pub fn submit(&self, request: Request) -> Answer {
        let (told, pieces) = unbounded_channel();
        let name = request.name.clone();
        // If the thread has ended, the answer is closed at once.
        let _ = self.commands.send(Command::Add(Box::new(request), told));
        Answer { pieces, name, commands: self.commands.clone() }
    }
}

impl Running {
    /// Returns the handle to submit requests.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Ends the engine. Aborts running requests, or with `drain` finishes them and accepts no new
    /// ones.
    ///
    /// # Errors
    ///
    /// Returns the error with which the thread had already ended.
    pub fn stop(mut self, drain: bool) -> Result<()> {
        self.tell(if drain { Command::Drain } else { Command::Stop });
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(ended)) => ended,
            _ => Err(Error::new("the engine's thread has panicked; see its message above")),
        }
    }

    /// Ends all of these engines and aborts running requests. Each engine takes time to disconnect
    /// from its peers, so all of them end concurrently.
    ///
    /// # Errors
    ///
    /// Returns the error with which one of the threads had already ended.
    pub fn stop_all(engines: Vec<Running>) -> Result<()> {
        engines.iter().for_each(|one| one.tell(Command::Stop));
        engines.into_iter().try_for_each(|one| one.stop(false))
    }

    fn tell(&self, command: Command) {
        // An error means that the engine has already ended.
        let _ = self.engine.commands.send(command);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.tell(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Answer {
    /// Returns the next piece, or `None` after the last.
    pub async fn next(&mut self) -> Option<PieceResult> {
        self.pieces.recv().await
    }

    /// Polls for the next piece, for a hand-written future; see [`next`](Self::next).
    pub fn poll_next(
        &mut self,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<PieceResult>> {
        self.pieces.poll_recv(context)
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Abort(std::mem::take(&mut self.name)));
    }
}

/// Marks the engine as dead on drop, including when its thread panics.
struct DeathNotice(Arc<AtomicBool>);

impl Drop for DeathNotice {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Drops the remaining commands, which closes the answers of requests that arrived too late.
fn refuse_rest(received: &Receiver<Command>) {
    while received.try_recv().is_ok() {}
}
