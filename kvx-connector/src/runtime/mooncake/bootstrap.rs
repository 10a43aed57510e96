//! The bootstrap server of a prefill instance. Its workers register where they listen, and decodes
//! look them up.
//!
//! It serves vLLM's `POST /register` and `GET /query` over HTTP. [`BootstrapRegister`] decides what
//! to remember. This module has the socket, its limits and the authentication of workers
//! ([`proof`]).

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

/// The number of connections. A further one replaces the oldest.
pub(super) const CONNECTIONS: usize = 256;
/// The time limit for a request, from the start of the connection or the previous answer, and for
/// the reading of an answer.
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

/// An answer: the status with its reason, an optional nonce for a header, and the body.
struct HttpAnswer {
    status: &'static str,
    nonce: Option<String>,
    body: Vec<u8>,
}

impl BootstrapServer {
    /// Serves all connections, on tasks of the current runtime.
    pub(super) fn serve(listener: TcpListener, clock: Clock, secret: Option<Secret>) -> Self {
        let (register, refusals) = (Mutex::default(), RefusalLog::default());
        let state = Arc::new(BootstrapState { clock, secret, register, refusals });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&state))).abort_handle();
        BootstrapServer { state, accepting }
    }

    /// Registers a worker of this process.
    pub(super) fn register(&self, registration: WorkerRegistration) -> Result<()> {
        self.state.register.lock().register(self.state.clock.now(), registration)
    }

    /// Forgets a worker of this process.
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
    // Dropping it ends the tasks of all connections.
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
    // The nonce of the last answer, good for one registration on this connection.
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

/// Builds an answer for an error, in the form of vLLM's server.
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
                        "workers of this fleet have to prove its shared secret: set \
                         KVX_SECRET_FILE",
                    )
                },
                Err(error) => {
                    if let Some(suppressed) = self.refusals.count() {
                        tracing::warn!(%error, suppressed, "the bootstrap server refused a registration");
                    }
                    refusal(&error)
                }
            },
            (_, "/query" | "/register") => detail("405 Method Not Allowed", "Method Not Allowed"),
            _ => detail("404 Not Found", "Not Found"),
        }
    }

    /// Takes a registration. Returns a nonce if the worker has to prove the secret with it first.
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
