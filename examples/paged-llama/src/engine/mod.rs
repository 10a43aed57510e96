//! The engine: many requests over one model and one pool, step by step, on a thread of its own.
//!
//! Each step computes a chunk of every request that runs: one token of those that decode, more of
//! those whose prompt is still to be computed. Blocks that begin alike are shared; when there are
//! too few, the youngest request gives its own back and is computed again later. With nothing to do
//! the thread sleeps.

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
use crate::kv::TransferParams;
use crate::model::{Chunk, ModelError as Error, Result};
use crate::tokenizer::Tokenizer;

/// A model with its pool.
pub trait Forward: Send {
    /// Computes a step: writes keys and values into the blocks, and returns the requested logits of
    /// each chunk, a row for each token.
    ///
    /// # Errors
    ///
    /// The model cannot compute any more; every request fails.
    fn forward(&mut self, chunks: &[Chunk<'_>]) -> Result<Vec<Vec<Vec<f32>>>>;
}

/// What an engine is made with.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Tokens in a block.
    pub block_size: usize,
    /// Blocks of the pool.
    pub blocks: usize,
    /// Tokens of prompt and answer together.
    pub model_len: usize,
    /// Requests that run at once.
    pub requests: usize,
    /// Tokens of a step.
    pub step_tokens: usize,
    /// Requests share blocks that begin alike.
    pub prefix_cache: bool,
    /// What is told of tokens are logits instead of the logarithms of probabilities.
    pub raw_logits: bool,
    /// The engine's rank of data parallelism: its number in metrics and for peers.
    pub engine: usize,
}

/// One prompt, and what is wanted of it.
#[derive(Debug)]
pub struct Request {
    /// The engine's name of it, never used twice.
    pub name: String,
    /// Its tokens, at least one.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// The longest answer.
    pub max_tokens: usize,
    /// Before so many tokens nothing ends the answer.
    pub min_tokens: usize,
    /// Tokens that end the answer and are no part of it.
    pub ends: Vec<u32>,
    /// Tokens that end the answer, and that the client has named itself.
    pub stop_tokens: Vec<u32>,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// Whether such a text is a part of the answer.
    pub include_stop: bool,
    /// Special tokens are not told.
    pub skip_special: bool,
    /// For each token of the answer its probability and those of so many likelier ones.
    pub logprobs: Option<usize>,
    /// The same for the tokens of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// `kv_transfer_params`.
    pub transfer: Option<TransferParams>,
}

/// Some of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// Text that is certain now.
    pub text: String,
    /// Tokens that were chosen since the last piece, with their probabilities if these are wanted.
    pub tokens: Vec<(u32, Option<Logprob>)>,
    /// Of the prompt's tokens from the second on, before the first token.
    pub prompt_logprobs: Vec<Logprob>,
    /// Tokens of the prompt that were in the cache, or came from a peer.
    pub cached: usize,
    /// The answer ends here.
    pub end: Option<Finish>,
}

/// The end of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    /// Whether the model or a stop has ended it, or its length.
    pub reason: FinishReason,
    /// What the client may send to another server.
    pub transfer: Option<TransferParams>,
}

/// Why an answer ends.
#[derive(Clone, Debug, PartialEq)]
pub enum FinishReason {
    /// It is as long as it may be.
    Length,
    /// The model has ended it.
    EndOfText,
    /// One of the client's texts.
    Stop(String),
    /// One of the client's tokens.
    StopToken(u32),
}

/// A piece of an answer, or the reason why there is none.
pub type PieceResult = std::result::Result<Piece, Failure>;

/// Why a request has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure(pub String);

enum Command {
    Add(Box<Request>, UnboundedSender<PieceResult>),
    Abort(String),
    /// Something outside has happened.
    Look,
    /// No more requests come: what runs may end.
    Drain,
    /// Whatever runs, it is over.
    Stop,
    /// The model cannot compute any more.
    Fail(String),
}

/// A running engine. Cloned by whoever asks it.
#[derive(Clone)]
pub struct Engine {
    commands: Sender<Command>,
    limits: Limits,
    dead: Arc<AtomicBool>,
}

/// The engine's thread.
pub struct Running {
    engine: Engine,
    thread: Option<JoinHandle<Result<()>>>,
}

/// A request in the engine. Dropped, it is aborted.
pub struct Answer {
    pieces: UnboundedReceiver<PieceResult>,
    name: String,
    commands: Sender<Command>,
}

impl Engine {
    /// Starts the thread. `mover` is asked for with what wakes the engine.
    ///
    /// # Errors
    ///
    /// A request of the full length would not fit into the pool; or the mover's own.
    pub fn start(
        limits: Limits,
        model: Box<dyn Forward>,
        tokenizer: Arc<Tokenizer>,
        mover: impl FnOnce(Wake) -> Result<Box<dyn Mover>>,
    ) -> Result<Running> {
        let needed = limits.model_len.div_ceil(limits.block_size);
        if needed > limits.blocks {
            return Err(Error::new(format!(
                "a request of {} tokens needs {needed} blocks and the pool has {}; lower --max-model-len to {}, or raise \
                 --num-gpu-blocks-override",
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
            let ended = EngineLoop::new(limits, model, tokenizer, mover).run(&received);
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
            .map_err(|error| Error::new(format!("the engine's thread: {error}")))?;
        Ok(Running { engine, thread: Some(thread) })
    }

    /// What it was made with.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Whether it still computes.
    pub fn is_alive(&self) -> bool {
        !self.dead.load(Ordering::Acquire)
    }

    /// Ends it: the model cannot compute any more, for this reason. Every request fails.
    pub fn fail(&self, why: String) {
        // An error: it has ended.
        let _ = self.commands.send(Command::Fail(why));
    }

    /// Puts a request in the queue.
    pub fn submit(&self, request: Request) -> Answer {
        let (told, pieces) = unbounded_channel();
        let name = request.name.clone();
        // Without a thread the answer is closed at once.
        let _ = self.commands.send(Command::Add(Box::new(request), told));
        Answer { pieces, name, commands: self.commands.clone() }
    }
}

impl Running {
    /// What requests are put in by.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Ends the engine. Aborts running requests, or with `drain` finishes them and accepts no new
    /// ones.
    ///
    /// # Errors
    ///
    /// What has ended the thread before.
    pub fn stop(mut self, drain: bool) -> Result<()> {
        self.tell(if drain { Command::Drain } else { Command::Stop });
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(ended)) => ended,
            _ => Err(Error::new("the engine's thread has panicked; its last words are above")),
        }
    }

    /// Ends all of these. What runs is over. Each takes its time to part from its peers, and all
    /// take it at once.
    ///
    /// # Errors
    ///
    /// What has ended one of the threads before.
    pub fn stop_all(engines: Vec<Running>) -> Result<()> {
        engines.iter().for_each(|one| one.tell(Command::Stop));
        engines.into_iter().try_for_each(|one| one.stop(false))
    }

    fn tell(&self, command: Command) {
        // An error: it has ended.
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
    /// The next piece; none behind the last.
    pub async fn next(&mut self) -> Option<PieceResult> {
        self.pieces.recv().await
    }

    /// As [`next`](Self::next), for a future written by hand.
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

/// Marks the engine as dead on drop, also when its thread panics.
struct DeathNotice(Arc<AtomicBool>);

impl Drop for DeathNotice {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Whoever came too late is told so by its closed channel.
fn refuse_rest(received: &Receiver<Command>) {
    while received.try_recv().is_ok() {}
}
