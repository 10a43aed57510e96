//! An instance's answers, path by path.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::blocks::Refusal;
use crate::call::{Fetched, fetch};
use crate::model;
use crate::openai::{Asked, error};
use crate::params::{self, Source, Task};
use crate::settings::{Begun, Connector, Fault, Leg, Line, Seen, WrongAnswer, now};
use crate::state::{Running, State, say};
use crate::stream::{BrokenOff, Work};

type Answer = Response<BoxBody<Bytes, BrokenOff>>;

/// The largest accepted body.
const LARGEST_BODY: usize = 64 << 20;

/// Serves on this port, whenever the state says that the instance listens.
pub(crate) async fn serve(
    state: Arc<State>,
    listener: TcpListener,
    bootstrap: bool,
) -> std::io::Result<()> {
    let address = listener.local_addr()?;
    let (mut listener, mut listens) = (Some(listener), state.listens.subscribe());
    loop {
        let Some(there) = &listener else {
            listens.wait_for(|listens| *listens).await.ok();
            listener = Some(bind(address.port())?);
            continue;
        };
        tokio::select! {
            _ = listens.wait_for(|listens| !*listens) => listener = None,
            accepted = there.accept() => {
                let (stream, _) = accepted?;
                stream.set_nodelay(true)?;
                tokio::spawn(connection(state.clone(), stream, bootstrap));
            }
        }
    }
}

/// Returns a listener on this port of loopback, which an ended process may have used.
pub(crate) fn bind(port: u16) -> std::io::Result<TcpListener> {
    let socket = tokio::net::TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(([127, 0, 0, 1], port).into())?;
    socket.listen(4096)
}

async fn connection(state: Arc<State>, stream: tokio::net::TcpStream, bootstrap: bool) {
    state.connections.fetch_add(1, Ordering::Relaxed);
    let mut listens = state.listens.subscribe();
    let peer = ClientSocket::of(&stream);
    let service = service_fn(|request| {
        let (state, peer) = (state.clone(), peer.clone());
        async move { if bootstrap { Ok(query(&state)) } else { answer(state, peer, request).await } }
    });
    let builder = auto::Builder::new(TokioExecutor::new());
    let served = builder.serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        // An error means that the client disconnected or a script broke the stream off.
        _ = served => {}
        _ = listens.wait_for(|listens| !*listens) => {}
    }
    state.connections.fetch_sub(1, Ordering::Relaxed);
}

/// Answers all requests to the bootstrap server.
fn query(state: &State) -> Answer {
    state.lock().counts.queries += 1;
    let address = format!("tcp://127.0.0.1:{}", state.port);
    let rank = |rank: u32| {
        let entry = json!({"engine_id": state.engine(rank), "worker_addr": {"0": {"0": address}}});
        (rank.to_string(), entry)
    };
    json_answer(200, &Value::Object((0..state.settings.dp_size).map(rank).collect()))
}

/// The client's end of a connection.
#[derive(Clone)]
struct ClientSocket(Option<Arc<std::net::TcpStream>>);

impl ClientSocket {
    fn of(stream: &tokio::net::TcpStream) -> Self {
        let second = stream.as_fd().try_clone_to_owned();
        ClientSocket(second.ok().map(|second| Arc::new(second.into())))
    }

    /// Returns whether the client has closed the connection, so that no one waits for an answer.
    fn has_gone(&self) -> bool {
        // The descriptor shares the stream's flags, so it does not block.
        let looked = self.0.as_ref().map(|stream| stream.peek(&mut [0]));
        !matches!(looked, Some(Ok(1..)))
            && !matches!(looked, Some(Err(error)) if error.kind() == ErrorKind::WouldBlock)
    }
}

async fn answer(
    state: Arc<State>,
    peer: ClientSocket,
    request: Request<Incoming>,
) -> Result<Answer, BrokenOff> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().to_owned();
    if path == "/health" {
        state.lock().counts.health_looks += 1;
        let (health, dead) = {
            let inner = state.lock();
            (inner.health, inner.dead)
        };
        return match health {
            None => std::future::pending().await,
            Some(_) if dead => Ok(whole(503, None, Bytes::new())),
            Some(status) => Ok(whole(status, None, Bytes::new())),
        };
    }
    let Ok(body) = Limited::new(body, LARGEST_BODY).collect().await else {
        return Ok(json_answer(413, &error(413, "the body is too long")));
    };
    let body = body.to_bytes();
    if path == "/kv/read" {
        return Ok(hand_over(&state, &serde_json::from_slice(&body).unwrap_or(Value::Null)).await);
    }
    let header = |name: &str| {
        parts.headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
    };
    let headers: BTreeMap<_, _> = parts
        .headers
        .keys()
        .filter_map(|name| Some((name.as_str().to_owned(), header(name.as_str())?)))
        .collect();
    let mut seen = Seen {
        method: parts.method.to_string(),
        path: parts.uri.path_and_query().map_or_else(String::new, ToString::to_string),
        version: format!("{:?}", parts.version),
        headers,
        body: serde_json::from_slice(&body).unwrap_or(Value::Null),
        leg: None,
    };
    let wanted = state.settings.api_key.as_ref().map(|key| format!("Bearer {key}"));
    if wanted.is_some() && wanted != header("authorization") {
        state.note(seen);
        return Ok(json_answer(401, &json!({"error": "Unauthorized"})));
    }
    let chat = path == "/v1/chat/completions";
    if parts.method == Method::POST && (chat || path == "/v1/completions") {
        let id = header("x-request-id").unwrap_or_else(|| state.internal_id("own"));
        let rank = header("x-data-parallel-rank").and_then(|rank| rank.parse().ok());
        return complete(state, peer, seen, chat, &id, rank).await;
    }
    if let Some(params) = seen.body.get("kv_transfer_params").filter(|params| !params.is_null()) {
        state.violation(&format!("{path} has kv_transfer_params {params}"), false);
    }
    // A GET requests no work: routers use it for their checks.
    seen.leg = (parts.method == Method::POST).then_some(Leg::Alone);
    state.note(seen);
    Ok(other(&state, &parts, &path, body))
}

/// Answers requests other than completions.
fn other(state: &State, parts: &hyper::http::request::Parts, path: &str, body: Bytes) -> Answer {
    let content_type = parts.headers.get("content-type").cloned();
    match path {
        "/v1/models" => {
            let model = |name: &String| json!({"id": name, "object": "model", "owned_by": "vllm", "max_model_len": 4096});
            let models: Vec<_> = state.settings.models.iter().map(model).collect();
            json_answer(200, &json!({"object": "list", "data": models}))
        }
        "/version" => json_answer(200, &json!({"version": "0.33.0"})),
        "/tokenize" => {
            let asked: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
            let prompt = asked["prompt"]
                .as_str()
                .map(str::to_owned)
                .or_else(|| model::chat(&asked["messages"]));
            match prompt {
                Some(prompt) => json_answer(
                    200,
                    &json!({"count": model::count_tokens(&prompt), "max_model_len": 4096}),
                ),
                None => json_answer(400, &error(400, "prompt: Field required")),
            }
        }
        "/v1/responses" => {
            let asked: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
            let text = model::answer_to(asked["input"].as_str().unwrap_or_default(), 8);
            json_answer(
                200,
                &json!({"id": "resp-1", "object": "response", "output_text": text, "status": "completed"}),
            )
        }
        // Returns the body unchanged, with its content type and encoding.
        "/v1/embeddings"
        | "/v1/rerank"
        | "/score"
        | "/pooling"
        | "/v1/audio/transcriptions"
        | "/v1/messages" => {
            let mut answer = whole(200, content_type, body);
            if let Some(coding) = parts.headers.get("content-encoding") {
                answer.headers_mut().insert("content-encoding", coding.clone());
            }
            answer.headers_mut().insert("x-instance", hyper::header::HeaderValue::from(state.port));
            answer
        }
        _ => json_answer(404, &json!({"detail": "Not Found"})),
    }
}

/// Hands blocks over to another instance.
async fn hand_over(state: &State, wanted: &Value) -> Answer {
    let (name, engine) =
        (wanted["name"].as_str().unwrap_or(""), wanted["engine_id"].as_str().unwrap_or(""));
    let ours = (0..state.settings.dp_size).any(|rank| state.engine(rank) == engine);
    if !ours {
        return json_answer(409, &json!({"detail": "another engine"}));
    }
    loop {
        let published = state.published.notified();
        let taken = state.lock().blocks.take(name, engine);
        match taken {
            Ok(cache) => return json_answer(200, &json!({ "cache": cache })),
            Err(Refusal::Unknown) if wanted["waits"] == true => published.await,
            Err(Refusal::Unknown) => return json_answer(404, &json!({"detail": "unknown"})),
            Err(Refusal::OtherEngine) => {
                return json_answer(409, &json!({"detail": "another rank"}));
            }
        }
    }
}

/// Answers a completion or chat completion.
async fn complete(
    state: Arc<State>,
    peer: ClientSocket,
    mut seen: Seen,
    chat: bool,
    outer: &str,
    rank: Option<u32>,
) -> Result<Answer, BrokenOff> {
    let body = seen.body.clone();
    let asked = Asked::read(chat, &body, &state.settings.models);
    let id = if chat { format!("chatcmpl-{outer}") } else { format!("cmpl-{outer}") };
    // The engine's name of a completion's request contains the index of its prompt.
    let name = if chat { id.clone() } else { format!("{id}-0") };
    let tokens = asked.as_ref().map_or(1, |asked| model::count_tokens(asked.prompt(0).0));
    let task = params::read(&body["kv_transfer_params"], state.settings.connector, tokens, &name);
    let leg = match &task {
        Ok(Task::Alone) => Leg::Alone,
        Ok(Task::Prefill { .. }) => Leg::Prefill,
        Ok(Task::Decode(_)) | Err(_) => Leg::Decode,
    };
    seen.leg = Some(leg);
    state.note(seen);
    if state.settings.tells {
        let begun = Begun { id: outer.to_owned(), leg, at: now() };
        // A request that was aborted while this process was stopped does not count.
        if !peer.has_gone() {
            say(&Line::Begun(begun));
        }
    }
    if state.lock().dead {
        return Ok(json_answer(
            500,
            &error(
                500,
                "EngineCore encountered an issue. See stack trace (above) for the root cause.",
            ),
        ));
    }
    let asked = match asked {
        Ok(asked) => asked,
        Err((status, sentence)) => return Ok(json_answer(status, &error(status, &sentence))),
    };
    let task = match task {
        Ok(task) => task,
        Err(broken) => {
            state.violation(&format!("{id}: {}", broken.sentence), broken.stops);
            return Ok(json_answer(
                500,
                &error(
                    500,
                    "EngineCore encountered an issue. See stack trace (above) for the root cause.",
                ),
            ));
        }
    };
    if leg != Leg::Alone && asked.choices() > 1 {
        state.violation(&format!("{id}: one transfer for {} answers", asked.choices()), true);
    }
    let fault = state.fault(leg);
    if let Some(Fault::Status(status)) = fault {
        return Ok(json_answer(status, &error(status, &state.fault_message("scripted"))));
    }
    let running = Running::new(&state, leg);
    match task {
        Task::Prefill { transfer_id, earlier } => {
            prefill(
                &state,
                Prefill { asked, id, name, transfer_id, earlier, rank: rank.unwrap_or(0) },
                fault,
                running,
            )
            .await
        }
        Task::Alone => decode(state, Work { asked, id, source: None, fault, running, leg }).await,
        Task::Decode(source) => {
            decode(state, Work { asked, id, source: Some(source), fault, running, leg }).await
        }
    }
}

struct Prefill {
    asked: Asked,
    id: String,
    name: String,
    transfer_id: Option<String>,
    earlier: Option<Source>,
    rank: u32,
}

async fn prefill(
    state: &Arc<State>,
    prefill: Prefill,
    fault: Option<Fault>,
    running: Running,
) -> Result<Answer, BrokenOff> {
    let Prefill { asked, id, name, transfer_id, earlier, rank } = prefill;
    if asked.max_tokens != 1 || asked.stream {
        state.violation(
            &format!("{id}: a prefill of {} tokens, stream {}", asked.max_tokens, asked.stream),
            false,
        );
    }
    if rank >= state.settings.dp_size {
        return Ok(json_answer(400, &error(400, "data_parallel_rank is out of range")));
    }
    if let Some(earlier) = earlier {
        let fetched = fetch(&earlier, Duration::from_millis(state.settings.handshake_ms)).await;
        if matches!(fetched, Fetched::Cache(_)) {
            state.lock().counts.turns_loaded += 1;
        }
    }
    let delays = state.lock().delays;
    if delays.prefill_ms > 0 {
        tokio::time::sleep(Duration::from_millis(delays.prefill_ms)).await;
    }
    let (prompt, cache) = asked.prompt(0);
    let tokens = model::count_tokens(prompt);
    let internal = state.internal_id(&name);
    let kept_as = match state.settings.connector {
        Connector::Pull => &internal,
        Connector::Push => &name,
        Connector::Mooncake => transfer_id.as_ref().unwrap_or(&internal),
    };
    let engine = state.engine(rank);
    let blocks = if state.settings.fetches {
        state.lock().blocks.keep(kept_as, engine.clone(), cache, model::count_blocks(tokens))
    } else {
        (0..model::count_blocks(tokens) as u32).collect()
    };
    state.published.notify_waiters();
    running.complete();
    let mut params = json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [blocks], "remote_engine_id": engine,
        "remote_request_id": internal, "remote_host": "127.0.0.1", "remote_port": state.port, "tp_size": 1, "dcp_size": 1,
        "pp_size": 1, "remote_num_tokens": tokens, "remote_blocks_expiry_time": null,
        "remote_registration_generation": 0, "transfer_mode": "pull",
    });
    match state.settings.connector {
        Connector::Pull => {}
        Connector::Push => {
            params["transfer_mode"] = "push".into();
            if let Some(params) = params.as_object_mut() {
                params.remove("remote_blocks_expiry_time");
                params.remove("remote_registration_generation");
            }
        }
        Connector::Mooncake => params = Value::Null,
    }
    let mut body = asked.whole(&id, &[cache], true, &params);
    match fault {
        Some(Fault::CloseFirst) => return Err(BrokenOff),
        Some(Fault::HangFirst) => return std::future::pending().await,
        Some(Fault::Wrong(wrong)) => return Ok(wrong_answer(wrong, &mut body)),
        _ => {}
    }
    Ok(json_answer(200, &body))
}

fn wrong_answer(wrong: WrongAnswer, body: &mut Value) -> Answer {
    let kind = Some(hyper::header::HeaderValue::from_static("application/json"));
    let params = &mut body["kv_transfer_params"];
    match wrong {
        WrongAnswer::NoRequestId => params["remote_request_id"] = Value::Null,
        WrongAnswer::FlatBlocks => {
            params["remote_block_ids"] = params["remote_block_ids"][0].clone()
        }
        WrongAnswer::BothFlags => params["do_remote_decode"] = true.into(),
        WrongAnswer::NoObject => *params = "everything is well".into(),
        WrongAnswer::OtherHost => {
            params["remote_host"] = "127.0.0.1".into();
            params["remote_port"] = 1.into();
        }
        WrongAnswer::ErrorWith200 => *body = error(500, "scripted"),
        WrongAnswer::NoJson => return whole(200, kind, Bytes::from_static(b"{\"choices\": [")),
        WrongAnswer::Empty => return whole(200, kind, Bytes::new()),
        WrongAnswer::Huge => body["padding"] = "x".repeat(64 << 20).into(),
    }
    json_answer(200, body)
}

async fn decode(state: Arc<State>, work: Work) -> Result<Answer, BrokenOff> {
    let streamed_first = matches!(work.fault, Some(Fault::CloseFirst | Fault::HangFirst));
    if work.asked.stream && !streamed_first {
        let body = work.start(state).boxed();
        let kind = ("content-type", "text/event-stream; charset=utf-8");
        return Ok(built(Response::builder().header(kind.0, kind.1), body));
    }
    let delays = state.lock().delays;
    let computed = work.source.is_none();
    let caches = match work.caches(&state).await {
        Ok(caches) => caches,
        Err(sentence) => return Ok(json_answer(500, &error(500, &sentence))),
    };
    let millis =
        if computed { delays.prefill_ms } else { 0 } + delays.token_ms * work.asked.max_tokens;
    if millis > 0 {
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }
    match work.fault {
        Some(Fault::CloseFirst) => return Err(BrokenOff),
        Some(Fault::HangFirst) => return std::future::pending().await,
        _ => {}
    }
    let params = work.kept(&state, &caches);
    let body = work.asked.whole(&work.id, &caches, computed, &params);
    work.running.complete();
    Ok(json_answer(200, &body))
}

fn json_answer(status: u16, body: &Value) -> Answer {
    let kind = hyper::header::HeaderValue::from_static("application/json");
    whole(status, Some(kind), Bytes::from(body.to_string()))
}

fn whole(status: u16, kind: Option<hyper::header::HeaderValue>, body: Bytes) -> Answer {
    let mut builder = Response::builder().status(status).header("server", "uvicorn");
    if let Some(kind) = kind {
        builder = builder.header("content-type", kind);
    }
    built(builder, Full::new(body).map_err(|never| match never {}).boxed())
}

#[expect(clippy::expect_used, reason = "this file or a test chooses the statuses and headers")]
fn built(builder: hyper::http::response::Builder, body: BoxBody<Bytes, BrokenOff>) -> Answer {
    builder.body(body).expect("status and headers are valid")
}
