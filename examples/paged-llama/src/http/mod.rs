//! OpenAI's interface as vLLM serves it.

mod answers;
mod asked;
mod chat;
mod client;
mod fields;
mod hosts;
mod metrics;
mod refusal;
mod sealed;
mod stream;
mod tokens;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, Response, StatusCode};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::serve::Listener;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use self::answers::Grown;
use self::asked::Asked;
use self::client::Client;
use self::fields::Read;
pub(crate) use self::hosts::{Alike, Hosts, Joining, MEETING, check_reach, follow};
pub use self::metrics::Recorder;
use self::refusal::{Refusal, answer};
use crate::engine::{Engine, Limits};
use crate::kv::ParamsTrust;
use crate::tokenizer::Tokenizer;

const COMPLETIONS: &str = "/v1/completions";
const CHAT_COMPLETIONS: &str = "/v1/chat/completions";

/// A longer body is refused.
const LONGEST_BODY: usize = 16 << 20;

/// A text with more bytes a token of the model's length is not read.
const MOST_BYTES_A_TOKEN: usize = 64;

/// Requests that are read at once.
const READERS: usize = 4;

/// What every request needs.
pub struct Service {
    /// What computes the answers: at least one.
    pub engines: Vec<Engine>,
    /// Of the model.
    pub tokenizer: Arc<Tokenizer>,
    /// The names that the model goes by; the first one is its own.
    pub models: Vec<String>,
    /// What the model was started as: a folder, or a name.
    pub root: String,
    /// Tokens that the model knows.
    pub vocabulary: usize,
    /// Usage says how many tokens of the prompt were not computed.
    pub prompt_details: bool,
    /// Probabilities that a request may have of each token.
    pub most_logprobs: usize,
    /// What `/metrics` shows.
    pub recorder: Recorder,
    /// Whoever reads a request has one of these.
    pub readers: Readers,
    /// Counts the requests that ranks answer in turn.
    pub turn: AtomicUsize,
    /// The ranks that are on other hosts.
    pub(crate) hosts: Arc<Hosts>,
    /// Decides which `kv_transfer_params` are used; `None` without peers, where they mean nothing.
    pub(crate) trust: Option<ParamsTrust>,
}

/// How many requests are read at once: a long text takes seconds.
#[derive(Clone, Debug)]
pub struct Readers(Arc<Semaphore>);

impl Default for Readers {
    fn default() -> Self {
        Readers(Arc::new(Semaphore::new(READERS)))
    }
}

type Shared = State<Arc<Service>>;

impl Service {
    /// What every engine was made with.
    fn limits(&self) -> &Limits {
        self.engines[0].limits()
    }

    fn is_alive(&self) -> bool {
        self.engines.iter().all(Engine::is_alive)
    }

    /// The rank that a request has chosen, counted from 0, or the next one in turn of those that
    /// are there.
    fn rank(&self, headers: &HeaderMap) -> Read<usize> {
        let ranks = self.hosts.size();
        if let Some(chosen) = asked::rank(headers, ranks)? {
            return Ok(chosen);
        }
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        Ok((0..ranks)
            .map(|more| (turn + more) % ranks)
            .find(|rank| self.hosts.has(*rank))
            .unwrap_or(0))
    }

    /// The name of a model that a request asks for; without one, this server's.
    fn model(&self, asked: Option<&str>) -> Read<String> {
        let asked = asked.unwrap_or(&self.models[0]);
        if self.models.iter().any(|model| model == asked) {
            return Ok(asked.to_owned());
        }
        let words = format!("The model `{asked}` does not exist.");
        Err(Refusal { field: Some("model"), ..Refusal::new(StatusCode::NOT_FOUND, words) })
    }

    /// Reads a request on a thread where it holds up no other: texts become tokens, and messages a
    /// prompt.
    async fn read<T: Send + 'static>(
        self: &Arc<Self>,
        reading: impl FnOnce(&Self) -> Read<T> + Send + 'static,
    ) -> Read<T> {
        let failed =
            || Refusal::internal("the request could not be read; the server's log says why");
        // The thread keeps its place also when the client has gone.
        let place = self.readers.0.clone().acquire_owned().await.map_err(|_| failed())?;
        let service = self.clone();
        let read = tokio::task::spawn_blocking(move || {
            let _place = place;
            reading(&service)
        });
        read.await.unwrap_or_else(|_| Err(failed()))
    }

    fn encode(&self, text: &str, special: bool) -> Read<Vec<u32>> {
        // Whatever its tokens are, this is longer than the model takes, and reading it would hold
        // up others.
        let most = self.limits().model_len.saturating_mul(MOST_BYTES_A_TOKEN);
        if text.len() > most {
            return Err(Refusal::bad(format!(
                "a text of {} bytes is too long; send at most {most}",
                text.len()
            )));
        }
        self.tokenizer.encode(text, special).map_err(|error| Refusal::bad(error.to_string()))
    }
}

/// Serves clients until `stop` is ready, and then as long as clients wait for answers; at most
/// `drain` longer.
///
/// # Errors
///
/// The listener's.
pub async fn serve(
    listener: TcpListener,
    service: Arc<Service>,
    stop: impl Future<Output = ()> + Send + 'static,
    drain: Duration,
) -> std::io::Result<()> {
    let (stopped, mut stopping) = tokio::sync::watch::channel(false);
    let stop = async move {
        stop.await;
        stopped.send_replace(true);
    };
    let router = router(service).into_make_service_with_connect_info::<Client>();
    let serving = axum::serve(Clients(listener), router).with_graceful_shutdown(stop);
    let late = async move {
        // An error: it has been stopped.
        let _ = stopping.wait_for(|stopped| *stopped).await;
        tokio::time::sleep(drain).await;
    };
    tokio::select! {
        served = serving => served,
        () = late => Ok(()),
    }
}

/// Clients to whom each piece of an answer is sent at once. Else the second one waits until the
/// first is acknowledged, which a client may leave for 40 ms.
pub(crate) struct Clients(TcpListener);

impl Listener for Clients {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        let (stream, address) = Listener::accept(&mut self.0).await;
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "a client was gone before it was served");
        }
        (stream, address)
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

pub(crate) fn router(service: Arc<Service>) -> Router {
    Router::new()
        .route(COMPLETIONS, post(completions))
        .route(CHAT_COMPLETIONS, post(chat_completions))
        .route("/v1/models", get(models))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/health", get(health))
        .route("/ping", get(health).post(health))
        .route("/version", get(version))
        .route("/metrics", get(show_metrics))
        .fallback(|| async { Refusal::new(StatusCode::NOT_FOUND, "Not Found") })
        .method_not_allowed_fallback(|| async {
            Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
        })
        .layer(DefaultBodyLimit::max(LONGEST_BODY))
        .with_state(service)
}

async fn completions(
    State(service): Shared,
    client: Client,
    headers: HeaderMap,
    body: Bytes,
) -> Read<Response<Body>> {
    complete(service, false, client, headers, body).await
}

async fn chat_completions(
    State(service): Shared,
    client: Client,
    headers: HeaderMap,
    body: Bytes,
) -> Read<Response<Body>> {
    complete(service, true, client, headers, body).await
}

async fn complete(
    service: Arc<Service>,
    chat: bool,
    client: Client,
    headers: HeaderMap,
    body: Bytes,
) -> Read<Response<Body>> {
    let rank = service.rank(&headers)?;
    let Some(engine) = service.engines.get(rank) else {
        let path = if chat { CHAT_COMPLETIONS } else { COMPLETIONS };
        return service.hosts.ask(rank, path, client, &headers, body).await;
    };
    let read = move |service: &Service| {
        Asked::read(service, chat, client, &headers, &read_json(&headers, &body)?)
    };
    let asked = service.read(read).await?;
    if !service.is_alive() {
        return Err(Refusal::internal(
            "EngineCore encountered an issue; the server's log says which.",
        ));
    }
    let submit = |index| engine.submit(asked.request(&service, index));
    let mut answers: Vec<_> = (0..asked.answers()).map(submit).collect();
    if asked.stream {
        return Ok(stream::response(service, asked, answers));
    }
    let mut grown: Vec<Grown> = answers.iter().map(|_| Grown::default()).collect();
    for (answer, grown) in answers.iter_mut().zip(&mut grown) {
        while !grown.has_ended() {
            match answer.next().await {
                Some(Ok(piece)) => grown.add(piece),
                Some(Err(failure)) => return Err(Refusal::internal(failure.0)),
                None => {
                    return Err(Refusal::internal(
                        "EngineCore encountered an issue; the server's log says which.",
                    ));
                }
            }
        }
    }
    Ok(answer(StatusCode::OK, &asked.whole(&mut grown, &service)))
}

/// A body of JSON that says that it is.
fn read_json(headers: &HeaderMap, body: &[u8]) -> Read<Value> {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if kind != "application/json" {
        let words = "Unsupported Media Type: Only 'application/json' is allowed";
        return Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, words));
    }
    serde_json::from_slice(body)
        .map_err(|error| Refusal::bad(format!("JSON decode error: {error}")))
}

async fn models(State(service): Shared) -> Response<Body> {
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let length = service.limits().model_len;
    let card = |model: &String| {
        json!({"id": model, "object": "model", "created": created, "owned_by": "kvx", "root": service.root,
        "parent": null, "max_model_len": length, "permission": [{
            "id": format!("modelperm-{model}"), "object": "model_permission", "created": created,
            "allow_create_engine": false, "allow_sampling": true, "allow_logprobs": true,
            "allow_search_indices": false, "allow_view": true, "allow_fine_tuning": false,
            "organization": "*", "group": null, "is_blocking": false,
        }]})
    };
    let data: Vec<Value> = service.models.iter().map(card).collect();
    answer(StatusCode::OK, &json!({"object": "list", "data": data}))
}

async fn health(State(service): Shared) -> StatusCode {
    if service.is_alive() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn version() -> Response<Body> {
    answer(StatusCode::OK, &json!({"version": concat!("kvx-", env!("CARGO_PKG_VERSION"))}))
}

async fn show_metrics(State(service): Shared) -> Response<Body> {
    let kind = [(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, service.hosts.metrics(service.recorder.to_string()).await).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn no_piece_of_an_answer_waits_for_the_one_before_it() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut clients = Clients(listener);
        let (client, served) = tokio::join!(TcpStream::connect(address), clients.accept());
        assert!(served.0.nodelay().unwrap());
        drop(client.unwrap());
    }
}
