//! `kvx-interop-mistralrs MODEL PORT BLOCKS --kv-transfer-config …` serves OpenAI's completions
//! with mistral.rs. It prefills for other servers or decodes what they have prefilled, as a
//! request's `kv_transfer_params` say.

mod kv;

use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow, ensure};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse as _, Response as Answer};
use axum::serve::ListenerExt as _;
use axum::{Json, Router, routing};
use either::Either::Right;
use kv::{Kv, Requests};
use kvx::config::{KvTransferConfig, Surroundings};
use mistralrs::{Model, ModelDType, TextModelBuilder};
use mistralrs_core::{NormalRequest, OUTSIDE_KV, Request, RequestMessage, Response, SamplingParams};
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// The most tokens of an answer.
const LONGEST: u64 = 1 << 16;

struct Server {
    model: Model,
    kv: Option<Kv>,
    requests: Requests,
}

fn failed(status: StatusCode, why: impl std::fmt::Display) -> Answer {
    let error = json!({"error": {"message": format!("{why:#}"), "code": status.as_u16()}});
    (status, Json(error)).into_response()
}

/// Reads a request: the tokens of its prompt, which is a text or a list of tokens, and the sampling
/// parameters.
async fn asked(model: &Model, body: &Value) -> Result<(Vec<u32>, SamplingParams)> {
    let unknown = ["best_of", "stop", "echo", "suffix"].into_iter().find(|name| !body[name].is_null());
    ensure!(unknown.is_none(), "this server does not support {}; leave it out", unknown.unwrap_or_default());
    ensure!(body["n"].as_u64().unwrap_or(1) == 1, "this server requires n = 1");
    let is_prefill = body["kv_transfer_params"]["do_remote_decode"] == true;
    ensure!(
        body["stream"] != true || !is_prefill,
        "kv_transfer_params for a decode cannot be streamed; set stream to false"
    );
    let prompt: Vec<u32> = match &body["prompt"] {
        Value::String(text) => model.tokenize(Right(text.clone()), None, true, false, None).await?,
        tokens => serde_json::from_value(tokens.clone()).context("prompt must be a text or a list of tokens")?,
    };
    ensure!(!prompt.is_empty(), "the prompt has no tokens");
    let mut sampling = SamplingParams::deterministic();
    sampling.max_len = Some(body["max_tokens"].as_u64().unwrap_or(16).clamp(1, LONGEST) as usize);
    if let Some(temperature @ 0.01..) = body["temperature"].as_f64().or(Some(1.0)) {
        (sampling.temperature, sampling.top_p) = (Some(temperature), body["top_p"].as_f64());
        sampling.top_k = None;
    }
    Ok((prompt, sampling))
}

async fn complete(server: State<Arc<Server>>, headers: HeaderMap, Json(body): Json<Value>) -> Answer {
    // In a separate task: mistral.rs ends if nobody receives an answer because the client has
    // disconnected.
    let answered = tokio::spawn(async move { answer(&server, &headers, &body).await }).await;
    let answered = answered.unwrap_or_else(|why| Err(why.into()));
    answered.unwrap_or_else(|why| failed(StatusCode::INTERNAL_SERVER_ERROR, why))
}

async fn answer(server: &Server, headers: &HeaderMap, body: &Value) -> Result<Answer> {
    let (prompt, sampling) = match asked(&server.model, body).await {
        Ok(asked) => asked,
        Err(why) => return Ok(failed(StatusCode::BAD_REQUEST, why)),
    };
    let (id, length, params) =
        (server.model.inner().next_request_id(), prompt.len(), &body["kv_transfer_params"]);
    let name = headers.get("x-request-id").and_then(|name| name.to_str().ok()).unwrap_or("request");
    let name = format!("{name}-{id}");
    let caches = match &server.kv {
        Some(kv) if params.is_object() => kv.load(&name, params, length).await?,
        _ => None,
    };
    // The channel has space for all answers, because the engine waits for no receiver.
    let (send, mut answers) = mpsc::channel(sampling.max_len.unwrap_or(1) + 2);
    let mut ended = server.requests.begin(&send, caches);
    let prompt = RequestMessage::CompletionTokens(prompt);
    let mut request = NormalRequest::new_simple(prompt, sampling, send, id, None, None);
    request.is_streaming = body["stream"] == true;
    server.model.inner().get_sender(None)?.send(Request::Normal(Box::new(request))).await?;
    if body["stream"] == true {
        let events = futures::stream::unfold(Some((answers, ended)), |more| async {
            let (mut answers, ended) = more?;
            let (event, is_last) = match answers.recv().await? {
                Response::CompletionChunk(chunk) => {
                    (json!(chunk), chunk.choices.iter().any(|choice| choice.finish_reason.is_some()))
                }
                Response::InternalError(why) | Response::ValidationError(why) => {
                    (json!({"error": {"message": why.to_string()}}), true)
                }
                _ => (json!({"error": {"message": "the model failed"}}), true),
            };
            let event = Event::default().data(event.to_string());
            Some((Ok::<_, std::convert::Infallible>(event), (!is_last).then_some((answers, ended))))
        });
        let end = futures::stream::iter([Ok(Event::default().data("[DONE]"))]);
        return Ok(Sse::new(futures::StreamExt::chain(events, end)).into_response());
    }
    let mut done = match answers.recv().await.context("mistral.rs has ended")? {
        Response::CompletionDone(done) => serde_json::to_value(done)?,
        Response::ValidationError(why) => return Ok(failed(StatusCode::BAD_REQUEST, why)),
        Response::InternalError(why) => return Err(anyhow!("{why}")),
        _ => return Err(anyhow!("the model failed")),
    };
    let ended = ended.try_recv().context("mistral.rs did not pass its caches to the hook")?;
    done["choices"][0]["token_ids"] = ended.tokens[length..].into();
    done["usage"]["prompt_tokens_details"] = json!({"cached_tokens": ended.loaded});
    if let (Some(kv), true) = (&server.kv, params["do_remote_decode"] == true) {
        done["kv_transfer_params"] = kv.publish(&name, length, &ended)?;
    }
    Ok(Json(done).into_response())
}

#[tokio::main]
async fn main() -> Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(tracing::Level::INFO).init();
    let words = std::env::args().skip(1);
    let (config, words) = KvTransferConfig::from_arguments(words, &Surroundings::of_process())?;
    let [name, port, blocks] = &words[..] else {
        return Err(anyhow!("usage: kvx-interop-mistralrs MODEL PORT BLOCKS --kv-transfer-config …"));
    };
    let kv = Kv::open(&config, name, blocks.parse()?).await?;
    let requests = Requests::default();
    OUTSIDE_KV.set(Box::new(requests.clone())).ok().context("the hook is set once")?;
    // Disables mistral.rs's prefix cache, so that all tokens it does not compute came from a peer.
    let builder = TextModelBuilder::new(name).with_force_cpu().with_dtype(ModelDType::F32);
    let model = builder.with_prefix_cache_n(None).build().await?;
    let server = Arc::new(Server { model, kv, requests });
    let routes = Router::new()
        .route("/v1/completions", routing::post(complete))
        .route("/health", routing::get(|| async {}))
        .with_state(server.clone());
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port.parse()?)).await?;
    let mut told = signal(SignalKind::terminate())?;
    let stop = async move {
        tokio::select! { _ = told.recv() => {} _ = tokio::signal::ctrl_c() => {} }
    };
    // Disables Nagle's algorithm, so that small messages do not wait for the client's
    // acknowledgements.
    let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
    axum::serve(listener, routes).with_graceful_shutdown(stop).await?;
    match &server.kv {
        Some(kv) => kv.end().await,
        None => Ok(()),
    }
}
