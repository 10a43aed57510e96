//! The bootstrap server of a prefill instance. Its workers register where they listen, and decodes
//! look them up.
//!
//! It serves vLLM's `POST /register` and `GET /query` over HTTP. [`BootstrapRegister`] decides what
//! to remember. This module has the socket, its limits and the authentication of clients
//! ([`BootstrapRequest`]).

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvx_core::backend::sync::Mutex;
use kvx_core::{Error, ErrorKind, Result, Secret};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;

use super::super::clock::Clock;
use super::super::refusal_log::RefusalLog;
use super::super::zmtp::counted;
use super::http::{Exchange, HttpMessage};
use kvx_vllm::engine::WorkerRank;
use kvx_vllm::engine::mooncake::BootstrapRegister;
use kvx_vllm::params::BootstrapRequest;
use kvx_vllm::wire::mooncake::WorkerRegistration;

/// The number of connections. A further one replaces another.
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
    /// The secret that clients have to prove.
    secret: Option<Secret>,
    /// True if queries need no proof.
    open_queries: bool,
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
    /// Serves all connections, on tasks of the current runtime. With a secret, workers have to
    /// prove it, and unless `open_queries` decodes and routers too.
    pub(super) fn serve(
        listener: TcpListener,
        clock: Clock,
        secret: Option<Secret>,
        open_queries: bool,
    ) -> Self {
        let (register, refusals) = (Mutex::default(), RefusalLog::default());
        let state = Arc::new(BootstrapState { clock, secret, open_queries, register, refusals });
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

/// A connection of a client.
struct ClientConnection {
    from: IpAddr,
    /// True once the client has proved the secret.
    is_proven: Arc<AtomicBool>,
    task: AbortHandle,
}

/// The connections, the oldest first.
#[derive(Default)]
struct ClientConnections(VecDeque<ClientConnection>);

impl ClientConnections {
    /// Closes a connection if there are [`CONNECTIONS`].
    fn make_room(&mut self) {
        self.remove_ended();
        if self.0.len() >= CONNECTIONS {
            self.close_one();
        }
    }

    fn remove_ended(&mut self) {
        self.0.retain(|one| !one.task.is_finished());
    }

    /// Closes the oldest connection of the address that has most, if possible one of a client that
    /// has not proved the secret.
    fn close_one(&mut self) {
        self.remove_ended();
        let mut crowds = HashMap::<IpAddr, usize>::new();
        for one in &self.0 {
            *crowds.entry(one.from).or_default() += 1;
        }
        let first_to_go = self.0.iter().enumerate().min_by_key(|(at, one)| {
            let crowd = crowds.get(&one.from).copied();
            (one.is_proven.load(Ordering::Relaxed), Reverse(crowd), *at)
        });
        if let Some(closed) = first_to_go.map(|(at, _)| at).and_then(|at| self.0.remove(at)) {
            closed.task.abort();
        }
    }
}

async fn accept(listener: TcpListener, state: Arc<BootstrapState>) {
    // Dropping it ends the tasks of all connections.
    let mut open = JoinSet::new();
    let mut connections = ClientConnections::default();
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                while open.try_join_next().is_some() {}
                connections.make_room();
                let is_proven = Arc::<AtomicBool>::default();
                let talk = converse(stream, from, Arc::clone(&state), Arc::clone(&is_proven));
                let task = open.spawn(talk);
                connections.0.push_back(ClientConnection { from: counted(from), is_proven, task });
                // Lets the task of a closed connection end, which frees its descriptor.
                tokio::task::yield_now().await;
            }
            Err(error) => {
                tracing::warn!(%error, "a connection to the bootstrap server was not accepted");
                connections.close_one();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

async fn converse(
    stream: TcpStream,
    from: SocketAddr,
    state: Arc<BootstrapState>,
    is_proven: Arc<AtomicBool>,
) {
    let mut exchange = Exchange::new(stream);
    // The nonce of the last answer, good for one request on this connection.
    let mut nonce: Option<String> = None;
    loop {
        let (answer, goes_on) =
            match timeout(PATIENCE, exchange.receive(WorkerRegistration::MAX_LEN)).await {
                Err(_) | Ok(Ok(None)) => return,
                Ok(Ok(Some(request))) => {
                    (state.answer(&request, nonce.take(), &is_proven), request.keeps_alive())
                }
                Ok(Err(error)) if error.kind() == ErrorKind::PeerLost => return,
                Ok(Err(error)) => (refusal(&error), false),
            };
        nonce.clone_from(&answer.nonce);
        let start = format!("HTTP/1.1 {}", answer.status);
        let nonce_line = answer.nonce.map(|nonce| format!("{}: {nonce}", BootstrapRequest::NONCE));
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
    detail(status, &error.to_string())
}

/// Builds an answer with a sentence, in the form of vLLM's server.
fn detail(status: &'static str, detail: &str) -> HttpAnswer {
    let body = json!({"detail": detail}).to_string().into_bytes();
    HttpAnswer { status, nonce: None, body }
}

impl BootstrapState {
    fn answer(
        &self,
        request: &HttpMessage,
        nonce: Option<String>,
        is_proven: &AtomicBool,
    ) -> HttpAnswer {
        let [method, target, _] = &request.start;
        let path = target.split('?').next().unwrap_or_default();
        let kind = match (method.as_str(), path) {
            ("GET", "/query") => BootstrapRequest::Query,
            ("POST", "/register") => BootstrapRequest::Register,
            (_, "/query" | "/register") => {
                return detail("405 Method Not Allowed", "Method Not Allowed");
            }
            _ => return detail("404 Not Found", "Not Found"),
        };
        let answered = match self.challenge(kind, request, nonce, is_proven) {
            Ok(Some(nonce)) => {
                let why = "this fleet has a shared secret, which workers, decodes and routers have \
                           to prove: set KVX_SECRET_FILE; vLLM cannot prove it: name MOONCAKE in \
                           kv_connector_extra_config.unauthenticated of the prefill to let it in";
                return HttpAnswer { nonce: Some(nonce), ..detail("401 Unauthorized", why) };
            }
            Ok(None) => self.serve(kind, &request.body),
            Err(error) => Err(error),
        };
        answered.map_or_else(
            |error| {
                if let Some(suppressed) = self.refusals.count() {
                    tracing::warn!(%error, suppressed, "the bootstrap server refused a request");
                }
                refusal(&error)
            },
            |body| HttpAnswer { status: "200 OK", nonce: None, body },
        )
    }

    /// Returns a nonce if the client has to prove the secret with it first. Sets `is_proven` if it
    /// has.
    ///
    /// Errors: `Authentication`: its proof is wrong.
    fn challenge(
        &self,
        kind: BootstrapRequest,
        request: &HttpMessage,
        nonce: Option<String>,
        is_proven: &AtomicBool,
    ) -> Result<Option<String>> {
        let is_open = kind == BootstrapRequest::Query && self.open_queries;
        let Some(secret) = self.secret.as_ref().filter(|_| !is_open) else { return Ok(None) };
        let Some(proof) = request.header(&BootstrapRequest::PROOF.to_ascii_lowercase()) else {
            let fresh = kvx_core::backend::random_key()?;
            return Ok(Some(fresh.iter().map(|byte| format!("{byte:02x}")).collect()));
        };
        let proves = |nonce: &str| kind.is_proven(secret.bytes(), nonce, &request.body, proof);
        if nonce.as_deref().is_some_and(proves) {
            is_proven.store(true, Ordering::Relaxed);
            return Ok(None);
        }
        let who = match kind {
            BootstrapRequest::Register => "this worker",
            BootstrapRequest::Query => "this decode or router",
        };
        Err(ErrorKind::Authentication.because(format!(
            "the shared secrets of {who} and the bootstrap server differ: set KVX_SECRET_FILE of \
             both to the same secret"
        )))
    }

    /// Serves a request of a client that may send it. Returns the body of the answer.
    fn serve(&self, kind: BootstrapRequest, body: &[u8]) -> Result<Vec<u8>> {
        let now = self.clock.now();
        match kind {
            BootstrapRequest::Query => Ok(self.register.lock().directory(now).encode()),
            BootstrapRequest::Register => {
                let registration = WorkerRegistration::decode(body)?;
                self.register.lock().register(now, registration)?;
                Ok(json!({"status": "ok"}).to_string().into_bytes())
            }
        }
    }
}
