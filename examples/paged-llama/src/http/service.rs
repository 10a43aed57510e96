//! The state that all requests share.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use tokio::sync::Semaphore;

use super::client::RefusedParams;
use super::error::{ApiError, Result};
use super::hosts::{Hosts, RANK};
use super::limits::RequestLimits;
use super::metrics::Recorder;
use crate::engine::{Engine, Limits};
use crate::kv::ParamsTrust;
use crate::tokenizer::Tokenizer;

/// The longest text, in bytes per token of the model's length; the server does not tokenize longer
/// ones.
const MOST_BYTES_A_TOKEN: usize = 64;

/// The number of requests that are tokenized concurrently.
const READERS: usize = 4;

/// The state that all requests share.
pub struct Service {
    /// The engines that compute the answers, at least one.
    pub engines: Vec<Engine>,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The names of the model, the primary one first.
    pub models: Vec<String>,
    /// The folder or name that the server was started with.
    pub root: String,
    /// The number of tokens in the model's vocabulary.
    pub vocabulary: usize,
    /// Reports in the usage how many tokens of the prompt were not computed.
    pub prompt_details: bool,
    /// The most probabilities that a request may report for each token.
    pub most_logprobs: usize,
    /// The metrics of `/metrics`.
    pub recorder: Recorder,
    /// The limits on clients.
    pub request_limits: RequestLimits,
    /// The permits to tokenize a request.
    pub readers: Readers,
    /// The number of requests that were assigned to ranks in turn.
    pub turn: AtomicUsize,
    /// The ranks that are on other hosts.
    pub(crate) hosts: Arc<Hosts>,
    /// The check of `kv_transfer_params`; `None` without peers, where the parameters have no
    /// effect.
    pub(crate) trust: Option<ParamsTrust>,
    /// The log of parameters that fail this check.
    pub(crate) refused_params: RefusedParams,
}

/// Permits that limit how many requests are tokenized concurrently: a long text takes seconds.
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

    /// Returns the rank that a request has chosen, counted from 0, or else the next available one
    /// in turn.
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

    /// Returns the name of the requested model; by default, this server's.
    pub(super) fn model(&self, asked: Option<&str>) -> Result<String> {
        let asked = asked.unwrap_or(&self.models[0]);
        if self.models.iter().any(|model| model == asked) {
            return Ok(asked.to_owned());
        }
        let words = format!("The model `{asked}` does not exist.");
        Err(ApiError { field: Some("model"), ..ApiError::new(StatusCode::NOT_FOUND, words) })
    }

    /// Tokenizes a request on a separate thread, where it delays no other requests.
    pub(super) async fn read<T: Send + 'static>(
        self: &Arc<Self>,
        reading: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let failed = || {
            ApiError::internal("the request could not be read; see the server's log for the reason")
        };
        // The thread keeps its permit even if the client disconnects.
        let place = self.readers.0.clone().acquire_owned().await.map_err(|_| failed())?;
        let service = self.clone();
        let read = tokio::task::spawn_blocking(move || {
            let _place = place;
            reading(&service)
        });
        read.await.unwrap_or_else(|_| Err(failed()))
    }

    pub(super) fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        // A text of this length always exceeds the model's limit, and tokenizing it would delay
        // other requests.
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

/// Returns the rank that a router has chosen.
fn rank(headers: &HeaderMap, ranks: usize) -> Result<Option<usize>> {
    let Some(written) = headers.get(RANK) else { return Ok(None) };
    let rank = written.to_str().ok().and_then(|written| written.trim().parse().ok());
    match rank.filter(|rank| *rank < ranks) {
        Some(rank) => Ok(Some(rank)),
        None => Err(ApiError::bad(format!(
            "X-data-parallel-rank is out of range: it counts the engines of this server from 0 to \
             {}",
            ranks - 1
        ))),
    }
}
