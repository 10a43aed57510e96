//! The state that all requests share.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use tokio::sync::Semaphore;

use super::error::{ApiError, Result};
use super::hosts::{Hosts, RANK};
use super::metrics::Recorder;
use crate::engine::{Engine, Limits};
use crate::kv::ParamsTrust;
use crate::tokenizer::Tokenizer;

/// A text with more bytes a token of the model's length is not read.
const MOST_BYTES_A_TOKEN: usize = 64;

/// Requests that are read at once.
const READERS: usize = 4;

/// The state that all requests share.
pub struct Service {
    /// The engines that compute the answers: at least one.
    pub engines: Vec<Engine>,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The names that the model goes by; the first one is its own.
    pub models: Vec<String>,
    /// The folder or name that the server was started with.
    pub root: String,
    /// Tokens that the model knows.
    pub vocabulary: usize,
    /// Usage says how many tokens of the prompt were not computed.
    pub prompt_details: bool,
    /// Probabilities that a request may have of each token.
    pub most_logprobs: usize,
    /// The metrics of `/metrics`.
    pub recorder: Recorder,
    /// The permits to read a request.
    pub readers: Readers,
    /// Counts the requests that ranks answer in turn.
    pub turn: AtomicUsize,
    /// The ranks that are on other hosts.
    pub(crate) hosts: Arc<Hosts>,
    /// Decides which `kv_transfer_params` are used; `None` without peers, where they mean nothing.
    pub(crate) trust: Option<ParamsTrust>,
}

/// Permits that limit how many requests are read at once: a long text takes seconds.
#[derive(Clone, Debug)]
pub struct Readers(Arc<Semaphore>);

impl Default for Readers {
    fn default() -> Self {
        Readers(Arc::new(Semaphore::new(READERS)))
    }
}

pub(super) type Shared = State<Arc<Service>>;

impl Service {
    /// Returns the limits that all engines share.
    pub(super) fn limits(&self) -> &Limits {
        self.engines[0].limits()
    }

    pub(super) fn is_alive(&self) -> bool {
        self.engines.iter().all(Engine::is_alive)
    }

    /// The rank that a request has chosen, counted from 0, or the next one in turn of those that
    /// are there.
    pub(super) fn rank(&self, headers: &HeaderMap) -> Result<usize> {
        let ranks = self.hosts.size();
        if let Some(chosen) = rank(headers, ranks)? {
            return Ok(chosen);
        }
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        Ok((0..ranks)
            .map(|more| (turn + more) % ranks)
            .find(|rank| self.hosts.has(*rank))
            .unwrap_or(0))
    }

    /// The name of a model that a request asks for; without one, this server's.
    pub(super) fn model(&self, asked: Option<&str>) -> Result<String> {
        let asked = asked.unwrap_or(&self.models[0]);
        if self.models.iter().any(|model| model == asked) {
            return Ok(asked.to_owned());
        }
        let words = format!("The model `{asked}` does not exist.");
        Err(ApiError { field: Some("model"), ..ApiError::new(StatusCode::NOT_FOUND, words) })
    }

    /// Reads a request on a thread where it holds up no other: texts become tokens, and messages a
    /// prompt.
    pub(super) async fn read<T: Send + 'static>(
        self: &Arc<Self>,
        reading: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let failed =
            || ApiError::internal("the request could not be read; the server's log says why");
        // The thread keeps its place also when the client has gone.
        let place = self.readers.0.clone().acquire_owned().await.map_err(|_| failed())?;
        let service = self.clone();
        let read = tokio::task::spawn_blocking(move || {
            let _place = place;
            reading(&service)
        });
        read.await.unwrap_or_else(|_| Err(failed()))
    }

    pub(super) fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        // Whatever its tokens are, this is longer than the model takes, and reading it would hold
        // up others.
        let most = self.limits().model_len.saturating_mul(MOST_BYTES_A_TOKEN);
        if text.len() > most {
            return Err(ApiError::bad(format!(
                "a text of {} bytes is too long; send at most {most}",
                text.len()
            )));
        }
        self.tokenizer.encode(text, special).map_err(|error| ApiError::bad(error.to_string()))
    }
}

/// The rank that a router has chosen.
fn rank(headers: &HeaderMap, ranks: usize) -> Result<Option<usize>> {
    let Some(written) = headers.get(RANK) else { return Ok(None) };
    let rank = written.to_str().ok().and_then(|written| written.trim().parse().ok());
    match rank.filter(|rank| *rank < ranks) {
        Some(rank) => Ok(Some(rank)),
        None => Err(ApiError::bad(format!(
            "X-data-parallel-rank is out of range: it counts the engines of this server from 0, and the last one is {}",
            ranks - 1
        ))),
    }
}
