//! OpenAI's HTTP API as vLLM serves it.
//!
//! Layers, each of which imports only from those before it: `error`, `json`, `limits`, `metrics` and
//! `noise`; `fields`; `api_key`, `client` and `handshake`; `head` and `hosts`; `service`; `body`;
//! `prompt`; `request`; `response`; `stream` and `tokenize`; and this module, which routes and
//! serves.

mod api_key;
mod body;
mod client;
mod error;
mod fields;
pub(crate) mod fuzz;
mod handshake;
mod head;
mod hosts;
mod json;
mod limits;
mod metrics;
mod noise;
mod prompt;
mod request;
mod response;
mod service;
mod stream;
mod tokenize;

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, Response, StatusCode};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::{Router, middleware};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use self::body::RequestBody;
use self::client::Client;
pub(crate) use self::client::RefusedParams;
use self::error::{ApiError, Result, answer};
use self::fields::parse_json;
pub(crate) use self::handshake::{JOIN_TIMEOUT, JoinRequest, SharedConfig, check_reach};
pub(crate) use self::head::follow;
pub(crate) use self::hosts::Hosts;
pub use self::limits::RequestLimits;
pub use self::metrics::Recorder;
use self::request::CompletionRequest;
use self::response::PartialAnswer;
use self::service::Shared;
pub use self::service::{Readers, Service};
pub use kvx_proxy::server::Keys;
use kvx_proxy::server::serve_http1;

const COMPLETIONS: &str = "/v1/completions";
const CHAT_COMPLETIONS: &str = "/v1/chat/completions";

/// Serves clients until `stop` is ready and running answers have ended, at most `drain` later. With
/// `keys`, clients need one of them.
pub async fn serve(
    listener: TcpListener,
    service: Arc<Service>,
    keys: Option<Keys>,
    stop: impl Future<Output = ()>,
    drain: Duration,
) {
    let limits = service.request_limits.clients.clone();
    let router = match keys {
        Some(keys) => router(service).layer(middleware::from_fn_with_state(keys, api_key::check)),
        None => router(service),
    };
    serve_http1(listener, router, &limits, client::set_by_address, stop, drain).await;
}

pub(crate) fn router(service: Arc<Service>) -> Router {
    Router::new()
        .route(COMPLETIONS, post(complete::<false>))
        .route(CHAT_COMPLETIONS, post(complete::<true>))
        .route("/v1/models", get(models))
        .route("/tokenize", tokenize::answer_with(tokenize::tokens))
        .route("/detokenize", tokenize::answer_with(tokenize::text))
        .route("/health", get(health))
        .route("/ping", get(health).post(health))
        .route("/version", get(version))
        .route("/metrics", get(show_metrics))
        .fallback(|| async { ApiError::new(StatusCode::NOT_FOUND, "Not Found") })
        .method_not_allowed_fallback(|| async {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
        })
        .with_state(service)
}

async fn complete<const CHAT: bool>(
    State(service): Shared,
    client: Client,
    headers: HeaderMap,
    body: RequestBody,
) -> Result<Response<Body>> {
    let rank = service.rank(&headers)?;
    let Some(engine) = service.engines.get(rank) else {
        let path = if CHAT { CHAT_COMPLETIONS } else { COMPLETIONS };
        return service.hosts.ask(rank, path, client, &headers, body.bytes().clone()).await;
    };
    let read = move |service: &Service| {
        CompletionRequest::read(
            service,
            CHAT,
            client,
            &headers,
            &parse_json(&headers, body.bytes())?,
        )
    };
    let asked = service.read(read).await?;
    let lost =
        || ApiError::internal("EngineCore encountered an issue; the server's log says which.");
    if !service.is_alive() {
        return Err(lost());
    }
    let submit = |index| engine.submit(asked.request(&service, index));
    let mut answers: Vec<_> = (0..asked.answers()).map(submit).collect();
    if asked.stream {
        return Ok(stream::response(service, asked, answers));
    }
    let mut partial: Vec<PartialAnswer> =
        answers.iter().map(|_| PartialAnswer::default()).collect();
    for (answer, partial) in answers.iter_mut().zip(&mut partial) {
        while !partial.has_ended() {
            match answer.next().await {
                Some(Ok(piece)) => partial.add(piece),
                Some(Err(failure)) => return Err(ApiError::internal(failure.0)),
                None => return Err(lost()),
            }
        }
    }
    Ok(answer(StatusCode::OK, &asked.whole(&mut partial, &service)))
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
