//! The bootstrap server of a prefill instance: its workers say where they listen, and whoever wants
//! their blocks asks.
//!
//! vLLM's `POST /register` and `GET /query` over HTTP. What is remembered is decided by
//! [`BootstrapRegister`]; here are the socket, its bounds, and who may register ([`proof`]).

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::sync::Mutex;
use kvx_core::{Error, ErrorKind, Result, Secret};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;

use super::super::clock::Clock;
use super::super::refusal_log::RefusalLog;
use super::http::{Exchange, HttpMessage};
use super::proof;
use kvx_vllm::engine::WorkerRank;
use kvx_vllm::engine::mooncake::BootstrapRegister;
use kvx_vllm::wire::mooncake::WorkerRegistration;

/// Connections at a time. For a further one the oldest is closed.
pub(super) const CONNECTIONS: usize = 256;
/// How long a request may take to come, from the connection or the answer before it on, and an
/// answer to be read.
const PATIENCE: Duration = Duration::from_secs(5);

/// A bootstrap server that listens until it is dropped.
#[derive(Debug)]
pub(super) struct BootstrapServer {
    state: Arc<BootstrapState>,
    accepting: AbortHandle,
}

#[derive(Debug)]
struct BootstrapState {
    clock: Clock,
    secret: Option<Secret>,
    register: Mutex<BootstrapRegister>,
    refusals: RefusalLog,
}

/// What is answered: the status with its reason, further headers, the body.
struct HttpAnswer {
    status: &'static str,
    nonce: Option<String>,
    body: Vec<u8>,
}

impl BootstrapServer {
    /// Serves whoever connects, on tasks of the runtime that it is called in.
    pub(super) fn serve(listener: TcpListener, clock: Clock, secret: Option<Secret>) -> Self {
        let (register, refusals) = (Mutex::default(), RefusalLog::default());
        let state = Arc::new(BootstrapState { clock, secret, register, refusals });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&state))).abort_handle();
        BootstrapServer { state, accepting }
    }

    /// A worker of this process says where it listens.
    pub(super) fn register(&self, registration: WorkerRegistration) -> Result<()> {
        self.state.register.lock().register(self.state.clock.now(), registration)
    }

    /// A worker of this process is no longer there.
    pub(super) fn forget(&self, engine: &str, dp: u32, rank: WorkerRank) {
        self.state.register.lock().forget(engine, dp, rank);
    }
}

impl Drop for BootstrapServer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, state: Arc<BootstrapState>) {
    // Dropped with this task, which ends all of them.
    let mut open = JoinSet::new();
    let mut order: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                while open.try_join_next().is_some() {}
                order.retain(|task| !task.is_finished());
                if order.len() >= CONNECTIONS
                    && let Some(oldest) = order.pop_front()
                {
                    oldest.abort();
                }
                order.push_back(open.spawn(converse(stream, from, Arc::clone(&state))));
            }
            Err(error) => {
                tracing::warn!(%error, "a connection to the bootstrap server was not accepted");
                if let Some(oldest) = order.pop_front() {
                    oldest.abort();
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

async fn converse(stream: TcpStream, from: SocketAddr, state: Arc<BootstrapState>) {
    let mut exchange = Exchange::new(stream);
    // Good for one registration on this connection.
    let mut nonce: Option<String> = None;
    loop {
        let (answer, goes_on) =
            match timeout(PATIENCE, exchange.receive(WorkerRegistration::MAX_LEN)).await {
                Err(_) | Ok(Ok(None)) => return,
                Ok(Ok(Some(request))) => {
                    (state.answer(&request, nonce.take()), request.keeps_alive())
                }
                Ok(Err(error)) if error.kind() == ErrorKind::PeerLost => return,
                Ok(Err(error)) => (refusal(&error), false),
            };
        nonce.clone_from(&answer.nonce);
        let start = format!("HTTP/1.1 {}", answer.status);
        let nonce_line = answer.nonce.map(|nonce| format!("{}: {nonce}", proof::NONCE));
        let mut headers =
            vec![if goes_on { "Connection: keep-alive" } else { "Connection: close" }];
        headers.extend(nonce_line.as_deref());
        match timeout(PATIENCE, exchange.send(&start, &headers, &answer.body)).await {
            Ok(Ok(())) if goes_on => {}
            Ok(Ok(())) => return,
            Ok(Err(error)) => {
                return tracing::debug!(%from, %error, "an answer of the bootstrap server was not read");
            }
            Err(_) => {
                return tracing::debug!(%from, "an answer of the bootstrap server was not read in time");
            }
        }
    }
}

/// As vLLM's server words what it refuses.
fn refusal(error: &Error) -> HttpAnswer {
    let status = match error.kind() {
        ErrorKind::Exhausted => "413 Content Too Large",
        ErrorKind::Unsupported => "411 Length Required",
        ErrorKind::Authentication => "401 Unauthorized",
        ErrorKind::Busy => "503 Service Unavailable",
        _ => "400 Bad Request",
    };
    HttpAnswer {
        status,
        nonce: None,
        body: json!({"detail": error.to_string()}).to_string().into_bytes(),
    }
}

impl BootstrapState {
    fn answer(&self, request: &HttpMessage, nonce: Option<String>) -> HttpAnswer {
        let [method, target, _] = &request.start;
        let path = target.split('?').next().unwrap_or_default();
        let ok = |body: Vec<u8>| HttpAnswer { status: "200 OK", nonce: None, body };
        let detail = |status, detail: &str| HttpAnswer {
            status,
            nonce: None,
            body: json!({"detail": detail}).to_string().into_bytes(),
        };
        match (method.as_str(), path) {
            ("GET", "/query") => {
                let listed = self.register.lock().directory(self.clock.now());
                ok(listed.encode())
            }
            ("POST", "/register") => match self.registered(request, nonce) {
                Ok(None) => ok(json!({"status": "ok"}).to_string().into_bytes()),
                Ok(Some(nonce)) => HttpAnswer {
                    nonce: Some(nonce),
                    ..detail(
                        "401 Unauthorized",
                        "workers of this fleet prove its shared secret: set KVX_SECRET_FILE",
                    )
                },
                Err(error) => {
                    if let Some(unsaid) = self.refusals.count() {
                        tracing::warn!(%error, unsaid, "the bootstrap server refused a registration");
                    }
                    refusal(&error)
                }
            },
            (_, "/query" | "/register") => detail("405 Method Not Allowed", "Method Not Allowed"),
            _ => detail("404 Not Found", "Not Found"),
        }
    }

    /// Takes a registration. `Some`: it has to be proven first, by this nonce.
    fn registered(&self, request: &HttpMessage, nonce: Option<String>) -> Result<Option<String>> {
        if let Some(secret) = &self.secret {
            let Some(proof) = request.header(&proof::PROOF.to_ascii_lowercase()) else {
                let fresh = kvx_core::backend::random_key()?;
                return Ok(Some(fresh.iter().map(|byte| format!("{byte:02x}")).collect()));
            };
            proof::check(secret, nonce.as_deref(), &request.body, proof)?;
        }
        let registration = WorkerRegistration::decode(&request.body)?;
        self.register.lock().register(self.clock.now(), registration)?;
        Ok(None)
    }
}
