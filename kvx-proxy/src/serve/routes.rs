//! The handlers of each path.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::{Router, middleware};
use bytes::Bytes;
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::{Request, Response, StatusCode};
use tracing::{Instrument as _, Span};

use super::{admin, explain, page, realtime, requests};
use crate::admission::BodyPermit;
use crate::body::{BodyError, read_body};
use crate::fleet::missing::{self, BOTH};
use crate::relay::api_error::{ApiError, json_response};
use crate::relay::core::{Core, LiveSetup};
use crate::relay::job::{Job, JobResult};
use crate::relay::{decode_only, disaggregated, tokens};
use crate::request::{CompletionRequest, PassthroughRequest, headers, plain_path};

type Shared = State<Arc<Core>>;

/// Builds the router of all paths.
pub(crate) fn router(core: Arc<Core>) -> Router {
    let clients = Router::new()
        .route("/v1/completions", post(completion))
        .route("/v1/chat/completions", post(completion))
        .route("/v1/models", get(models))
        .fallback(pass)
        .layer(middleware::from_fn_with_state(Arc::clone(&core), admit));
    // They name the instances.
    let operators = Router::new()
        .route("/metrics", get(metrics))
        .route("/status", get(page::status))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&core), admit));
    Router::new()
        .route("/health", get(|| async { StatusCode::OK }))
        .route("/healthcheck", get(healthcheck))
        .route("/ready", get(ready))
        .route("/instances", get(admin::list).post(admin::add).delete(admin::remove))
        .route("/explain", post(explain::explain))
        .route("/requests", get(requests::requests))
        .route("/", get(page::page))
        .merge(operators)
        .fallback_service(clients.with_state(Arc::clone(&core)))
        .with_state(core)
}

/// Rejects clients without a key where keys are configured.
async fn admit(
    State(core): Shared,
    request: Request<Body>,
    next: middleware::Next,
) -> Response<Body> {
    let keys = core.live().keys.clone();
    match keys {
        Some(keys) if !keys.admit(request.headers()) => {
            let refusal = ApiError::unauthorized();
            core.metrics.request(refusal.outcome);
            refusal.response()
        }
        _ => next.run(request).await,
    }
}

/// Counts and answers an error before a job exists.
fn refuse(core: &Core, refusal: &ApiError) -> Response<Body> {
    core.metrics.request(refusal.outcome);
    refusal.response()
}

fn respond(ended: JobResult) -> Response<Body> {
    match ended {
        Ok(response) => response,
        Err(ended) => {
            let (mut record, refusal) = *ended;
            record.ended(refusal.outcome, refusal.status.as_u16());
            record.set_error_if_none(&refusal.message);
            let mut response = refusal.response();
            if let Ok(id) = HeaderValue::from_str(&record.id) {
                response.headers_mut().insert(headers::REQUEST_ID, id);
            }
            response
        }
    }
}

fn out_of_memory() -> ApiError {
    ApiError::unavailable(BodyError::NoMemory.to_string())
}

/// Reads a client's body within the limits of length and time. Also returns its share of the memory
/// for all bodies.
async fn body_of(
    live: &LiveSetup,
    headers: &HeaderMap,
    body: Body,
) -> Result<(Bytes, BodyPermit), ApiError> {
    if headers.get_all(CONTENT_TYPE).iter().nth(1).is_some() {
        return Err(ApiError::bad_request("the body has two Content-Types; send one"));
    }
    if headers.get_all(CONTENT_ENCODING).iter().any(|value| value != "identity") {
        let words = "the body has a Content-Encoding; send it unencoded";
        return Err(ApiError::client(StatusCode::UNSUPPORTED_MEDIA_TYPE, words));
    }
    let read = read_body(live.admission.bodies(), &live.setup.limits, headers, body).await;
    read.map_err(|error| match error {
        BodyError::NoMemory => out_of_memory(),
        error => ApiError::client(error.status(), error.to_string()),
    })
}

/// Bodies above this are parsed on a thread that may block, so that other requests do not wait.
const LONG: usize = 64 << 10;

/// Parses the body of an admitted request, whose share of the memory it keeps. Nothing is parsed
/// before admission, so that at most `limits.in_flight` bodies are.
async fn parsed<T: Send + 'static>(
    body: Bytes,
    permit: BodyPermit,
    parse: impl FnOnce(Bytes) -> Result<T, String> + Send + 'static,
) -> Result<(T, BodyPermit), ApiError> {
    let is_long = body.len() > LONG;
    let parse = move || match parse(body) {
        Ok(parsed) => Ok((parsed, permit)),
        Err(words) => Err(ApiError::bad_request(words)),
    };
    match is_long {
        false => parse(),
        true => match tokio::task::spawn_blocking(parse).await {
            Ok(parsed) => parsed,
            // It panicked, or the program ends.
            Err(error) => {
                tracing::error!(%error, "a body was not parsed");
                Err(ApiError::unavailable("the body was not parsed: try again later"))
            }
        },
    }
}

/// Runs a request within its span, until the proxy must end.
async fn until_the_end(
    core: &Core,
    span: Span,
    work: impl Future<Output = JobResult>,
) -> Response<Body> {
    let mut end = core.end.subscribe();
    tokio::select! {
        ended = work.instrument(span) => respond(ended),
        _ = end.wait_for(|end| *end) => ApiError::draining().response(),
    }
}

async fn completion(State(core): Shared, request: Request<Body>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let job = match Job::begin(&core, &parts) {
        Ok(job) => job,
        Err(refusal) => return refuse(&core, &refusal),
    };
    let span = job.record.span.clone();
    let work = async {
        let is_json = parts.headers.get(CONTENT_TYPE).is_none_or(|value| {
            value.to_str().is_ok_and(|value| value.to_ascii_lowercase().contains("json"))
        });
        if !is_json {
            let words = "the body's Content-Type is not application/json";
            return Err(job.refused(ApiError::client(StatusCode::UNSUPPORTED_MEDIA_TYPE, words)));
        }
        let (body, permit) = match body_of(&job.live, &parts.headers, body).await {
            Ok(body) => body,
            Err(refusal) => return Err(job.refused(refusal)),
        };
        let mut job = job.admit().await?;
        let prefix_tokens = job.live.setup.prefix_tokens;
        let parse = move |body| CompletionRequest::new(body, prefix_tokens);
        let (mut asked, mut permit) = match parsed(body, permit, parse).await {
            Ok(parsed) => parsed,
            Err(refusal) => return Err(job.refused(refusal)),
        };
        let held = asked.held();
        if held > job.live.setup.limits.bodies {
            let words = "the body needs more memory than limits.bodies of this proxy allows";
            return Err(job.refused(ApiError::client(StatusCode::PAYLOAD_TOO_LARGE, words)));
        }
        if !job.live.admission.widen(&mut permit, held) {
            return Err(job.refused(out_of_memory()));
        }
        job.record.model(asked.model.as_deref());
        job.record.prompt(&asked);
        tokens::find(&core, &job.live, &job.headers, &mut asked).await;
        job.record.prompt_tokens(asked.prompt_tokens);
        disaggregated::completion(job, asked).await
    };
    until_the_end(&core, span, work).await
}

/// Returns true for vLLM's other paths that are forwarded. Paths that change the state of an
/// instance are not.
fn is_passed(path: &str) -> bool {
    const VLLM: [&str; 12] = [
        "/tokenize",
        "/detokenize",
        "/pooling",
        "/classify",
        "/score",
        "/rerank",
        "/v2/rerank",
        "/version",
        "/ping",
        "/invocations",
        "/tokenizer_info",
        "/v2/embed",
    ];
    let changes = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"];
    (path.starts_with("/v1/") && !changes.contains(&path)) || VLLM.contains(&path)
}

async fn pass(State(core): Shared, request: Request<Body>) -> Response<Body> {
    let (mut parts, body) = request.into_parts();
    let path = parts.uri.path().to_owned();
    if let Err(words) = plain_path(&path) {
        return refuse(&core, &ApiError::bad_request(words));
    }
    if !is_passed(&path) {
        let words = format!("{} {path} is not a request that this proxy forwards", parts.method);
        return refuse(&core, &ApiError::client(StatusCode::NOT_FOUND, words));
    }
    if matches!(path.as_str(), "/v1/completions" | "/v1/chat/completions") {
        return refuse(
            &core,
            &ApiError::client(StatusCode::METHOD_NOT_ALLOWED, format!("{path} takes POST")),
        );
    }
    let job = match Job::begin(&core, &parts) {
        Ok(job) => job,
        Err(refusal) => return refuse(&core, &refusal),
    };
    let span = job.record.span.clone();
    let websocket = realtime::asked(&mut parts);
    let work = async {
        let (body, permit) = match body_of(&job.live, &parts.headers, body).await {
            Ok(body) => body,
            Err(refusal) => return Err(job.refused(refusal)),
        };
        match websocket {
            Some(client) if body.is_empty() => return realtime::realtime(job, client).await,
            Some(_) => {
                return Err(job.refused(ApiError::bad_request("a WebSocket begins without a body")));
            }
            None => {}
        }
        let mut job = job.admit().await?;
        let kind = parts.headers.get(CONTENT_TYPE).cloned();
        let parse = move |body| {
            let boundary = kind.as_ref().map_or(Ok(None), headers::form_boundary)?;
            PassthroughRequest::new(body, boundary)
        };
        let (asked, _permit) = match parsed(body, permit, parse).await {
            Ok(parsed) => parsed,
            Err(refusal) => return Err(job.refused(refusal)),
        };
        // Only the instance that stored a response can serve it.
        let named = path.strip_prefix("/v1/responses/").and_then(|rest| rest.split('/').next());
        let stored_by =
            named.or(asked.before.as_deref()).and_then(|response| core.stored_by(response));
        job.record.model(asked.model.as_deref());
        decode_only::passthrough(job, asked, stored_by).await
    };
    until_the_end(&core, span, work).await
}

async fn models(State(core): Shared, request: Request<Body>) -> Response<Body> {
    let live = core.live();
    let fleet = &live.fleet;
    let mut union = std::collections::BTreeMap::new();
    for decode in &fleet.decode {
        for (id, card) in decode.state.models.cards().iter() {
            let model = fleet.names.named(id);
            let mut prefill = fleet.prefill.iter().filter(|one| one.pool == decode.pool).peekable();
            // A pool without prefill instances serves all models of its decode instances.
            if prefill.peek().is_none() || prefill.any(|one| one.state.models.serve(model)) {
                union.entry(id.clone()).or_insert_with(|| card.clone());
            }
        }
    }
    // No instance has listed models, perhaps for lack of a key: let one answer the client.
    if union.is_empty() && !fleet.decode.iter().any(|one| !one.state.models.cards().is_empty()) {
        return pass(State(core), request).await;
    }
    let data: Vec<_> = union.into_values().collect();
    json_response(StatusCode::OK, &serde_json::json!({"object": "list", "data": data}))
}

async fn healthcheck(State(core): Shared) -> Response<Body> {
    let live = core.live();
    let (prefill, decode) = (live.fleet.prefill.len(), live.fleet.decode.len());
    json_response(
        StatusCode::OK,
        &serde_json::json!({"status": "ok", "prefill_instances": prefill, "decode_instances": decode}),
    )
}

async fn ready(State(core): Shared) -> Response<Body> {
    let live = core.live();
    let missing = live.fleet.missing(None, &BOTH);
    let (ready, why) = match core.is_draining() {
        true => (false, "this proxy is shutting down".to_owned()),
        false if missing.is_empty() => (live.fleet.is_ready(), "there is no instance".to_owned()),
        false => (live.fleet.is_ready(), missing::words(&missing)),
    };
    let mut body = serde_json::json!({"ready": ready});
    // A pool may lack a side while another one serves.
    if !ready || !missing.is_empty() {
        body["why"] = why.into();
        body["missing"] = serde_json::json!(missing);
    }
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    json_response(status, &body)
}

async fn metrics(State(core): Shared) -> Response<Body> {
    let text = core.metrics.text(&core.live().fleet);
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(CONTENT_TYPE, kind)], text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_of_clients_are_passed() {
        for path in
            ["/v1/embeddings", "/tokenize", "/v1/responses/resp_1", "/v1/messages", "/version"]
        {
            assert!(is_passed(path), "{path}");
        }
        for path in [
            "/reset_prefix_cache",
            "/sleep",
            "/v1/load_lora_adapter",
            "/v1",
            "/instances/x",
            "/server_info",
        ] {
            assert!(!is_passed(path), "{path}");
        }
    }
}
