//! The bodies of answers, whole or token by token, and their faults.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame};
use serde_json::Value;
use tokio::sync::mpsc;

use crate::call::{Fetched, fetch};
use crate::model;
use crate::openai::{Asked, error};
use crate::params::Source;
use crate::settings::{Fault, Leg};
use crate::state::{Running, State};

/// The error of a body whose writer has broken it off.
#[derive(Debug)]
pub(crate) struct BrokenOff;

impl std::fmt::Display for BrokenOff {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("broken off by script")
    }
}

impl std::error::Error for BrokenOff {}

/// A body that another task writes. The writer is notified when the reader disconnects.
pub(crate) struct Pipe(mpsc::Receiver<Result<Bytes, BrokenOff>>);

impl Body for Pipe {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        self.0.poll_recv(context).map(|next| next.map(|bytes| bytes.map(Frame::data)))
    }
}

/// The writer of a body.
#[derive(Clone)]
struct BodyWriter(mpsc::Sender<Result<Bytes, BrokenOff>>);

/// The reader has disconnected, or a script has ended the stream.
struct Ended;

impl BodyWriter {
    async fn write(&self, bytes: impl Into<Bytes>) -> Result<(), Ended> {
        self.0.send(Ok(bytes.into())).await.map_err(|_| Ended)
    }

    async fn event(&self, value: &Value) -> Result<(), Ended> {
        self.write(event(value)).await
    }

    /// Waits, unless the reader disconnects.
    async fn pause(&self, millis: u64) -> Result<(), Ended> {
        if millis == 0 {
            return Ok(());
        }
        tokio::select! {
            () = self.0.closed() => Err(Ended),
            () = tokio::time::sleep(Duration::from_millis(millis)) => Ok(()),
        }
    }

    async fn hang(&self) -> Ended {
        self.0.closed().await;
        Ended
    }

    async fn break_off(&self) -> Ended {
        self.0.send(Err(BrokenOff)).await.ok();
        Ended
    }
}

fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// The data of a stream.
pub(crate) struct Work {
    pub(crate) asked: Asked,
    pub(crate) id: String,
    pub(crate) source: Option<Source>,
    pub(crate) fault: Option<Fault>,
    pub(crate) running: Running,
    pub(crate) leg: Leg,
}

impl Work {
    /// Returns the KV cache of each choice's answer.
    pub(crate) async fn caches(&self, state: &State) -> Result<Vec<u64>, String> {
        let own = |choice| self.asked.prompt(choice).1;
        let Some(source) = self.source.as_ref().filter(|_| state.settings.fetches) else {
            return Ok((0..self.asked.choices()).map(own).collect());
        };
        let cache = match fetch(source, Duration::from_millis(state.settings.handshake_ms)).await {
            Fetched::Cache(cache) => cache,
            Fetched::Stale => 0xdead_beef, // the blocks' unknown new content
            Fetched::Unreachable(_) => return Err(state.fault_message("Internal server error")),
        };
        if cache != own(0) {
            state.violation(
                &format!("{}: the fetched blocks belong to another prompt", self.id),
                false,
            );
        }
        Ok(vec![cache])
    }

    /// Keeps the blocks of a decode with bidirectional transfer for the next turn, and returns
    /// their parameters.
    pub(crate) fn kept(&self, state: &State, caches: &[u64]) -> Value {
        if self.leg != Leg::Decode || !state.settings.bidirectional {
            return Value::Null;
        }
        let name = state.internal_id(&self.id);
        let tokens = model::count_tokens(self.asked.prompt(0).0) + self.asked.max_tokens as usize;
        let engine = state.engine(0);
        let blocks =
            state.lock().blocks.keep(&name, engine.clone(), caches[0], model::count_blocks(tokens));
        serde_json::json!({
            "do_remote_prefill": false, "do_remote_decode": true, "remote_block_ids": [blocks],
            "remote_engine_id": engine, "remote_request_id": name, "remote_host": "127.0.0.1",
            "remote_port": state.port, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": 4711.5, "remote_registration_generation": 0, "transfer_mode": "pull",
        })
    }

    /// Starts to write the body.
    pub(crate) fn start(self, state: Arc<State>) -> Pipe {
        let (sender, receiver) = mpsc::channel(1);
        let writer = BodyWriter(sender);
        tokio::spawn(async move {
            // The task ends with its reader, at any point: vLLM aborts requests in the same way.
            let closed = writer.0.clone();
            tokio::select! {
                biased;
                written = self.write(&state, &writer) => drop(written),
                () = closed.closed() => {}
            }
        });
        Pipe(receiver)
    }

    async fn write(self, state: &State, writer: &BodyWriter) -> Result<(), Ended> {
        let delays = state.lock().delays;
        let caches = match self.caches(state).await {
            Ok(caches) => caches,
            Err(sentence) => {
                writer.event(&error(500, &sentence)).await?;
                return writer.write("data: [DONE]\n\n").await;
            }
        };
        let (asked, id) = (&self.asked, self.id.as_str());
        if self.source.is_none() {
            writer.pause(delays.prefill_ms).await?;
        }
        self.fail(state, writer, 0).await?;
        for index in (0..caches.len() as u64).filter(|_| asked.chat) {
            writer.event(&asked.first_chunk(id, index)).await?;
        }
        if asked.echo {
            for index in 0..caches.len() as u64 {
                writer
                    .event(&asked.chunk(id, index, asked.prompt(index).0, false, &Value::Null))
                    .await?;
            }
        }
        for token in 0..asked.max_tokens {
            writer.pause(delays.token_ms).await?;
            if token > 0 {
                self.fail(state, writer, token).await?;
            }
            let last = token + 1 == asked.max_tokens;
            let params = if last { self.kept(state, &caches) } else { Value::Null };
            for (index, cache) in (0..).zip(&caches) {
                let chunk = asked.chunk(id, index, model::token(*cache, token), last, &params);
                self.write_token(writer, token, chunk).await?;
            }
        }
        if asked.include_usage {
            writer.event(&asked.usage_chunk(id)).await?;
        }
        writer.write("data: [DONE]\n\n").await?;
        self.running.complete();
        Ok(())
    }

    /// Fails if a fault is due before this token.
    async fn fail(&self, state: &State, writer: &BodyWriter, token: u64) -> Result<(), Ended> {
        let is_due = |after: u32| u64::from(after) == token;
        match self.fault {
            Some(Fault::HangAfter(after)) if is_due(after) => Err(writer.hang().await),
            Some(Fault::CloseAfter(after)) if is_due(after) => Err(writer.break_off().await),
            Some(Fault::ErrorAfter(after)) if is_due(after) => {
                let message = state.fault_message("Internal server error");
                writer.event(&error(500, &message)).await?;
                writer.write("data: [DONE]\n\n").await?;
                Err(Ended)
            }
            _ => Ok(()),
        }
    }

    /// Writes a token's chunk, in two pieces that are divided within a character if the script says
    /// so.
    async fn write_token(
        &self,
        writer: &BodyWriter,
        token: u64,
        mut chunk: Value,
    ) -> Result<(), Ended> {
        let fault = match &self.fault {
            Some(
                fault @ (Fault::SplitCharacter(after)
                | Fault::HangInCharacter(after)
                | Fault::CloseInCharacter(after)),
            ) if u64::from(*after) == token => fault,
            _ => return writer.event(&chunk).await,
        };
        chunk["note"] = "雪".into(); // most tokens have only characters of one byte
        let event = event(&chunk);
        let (before, after) = event.as_bytes().split_at(event.find('雪').map_or(0, |at| at + 1));
        writer.write(before.to_vec()).await?;
        match fault {
            Fault::HangInCharacter(_) => Err(writer.hang().await),
            Fault::CloseInCharacter(_) => Err(writer.break_off().await),
            _ => {
                writer.pause(30).await?;
                writer.write(after.to_vec()).await
            }
        }
    }
}
