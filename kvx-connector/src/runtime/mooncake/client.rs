//! A client of bootstrap servers: of kvx, of vLLM, or any other that answers `/register` and
//! `/query`.

use std::time::{Duration, Instant};

use kvx_core::{Error, ErrorKind, Result, Secret};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::super::zmtp::resolve;
use super::http::{Exchange, HttpMessage};
use kvx_vllm::engine::Address;
use kvx_vllm::params::BootstrapRequest;
use kvx_vllm::wire::mooncake::{Directory, WorkerRegistration};

/// The delay between attempts, as in vLLM.
const AGAIN: Duration = Duration::from_millis(100);
/// The number of attempts of a question.
const ATTEMPTS: u32 = 3;
/// The longest answer to a registration.
const MAX_ANSWER: usize = 64 << 10;

/// Queries what a bootstrap server knows, within `limit`.
///
/// Errors, after three attempts: `PeerLost`, `TimedOut`: nobody answers; `Authentication`: the
/// server demands a proof that this engine cannot give; `Invalid`, `Malformed`, `Exhausted`: the
/// answer is not usable.
pub(super) async fn query(
    address: &Address,
    secret: Option<&Secret>,
    limit: Duration,
) -> Result<Directory> {
    let until = Instant::now() + limit;
    for left in (1..=ATTEMPTS).rev() {
        // An attempt that hangs leaves time for the others.
        let share = until.saturating_duration_since(Instant::now()) / left;
        let answer = async {
            let request =
                Request { kind: BootstrapRequest::Query, body: &[], max: Directory::MAX_LEN };
            Directory::decode(body_of(&request.send(address, secret).await?)?)
        };
        match within(share, address, answer).await {
            Err(error) if left > 1 => {
                tracing::debug!(%error, "a query of a bootstrap server failed; retrying")
            }
            answered => return answered,
        }
        tokio::time::sleep(AGAIN).await;
    }
    unreachable!("the last attempt is returned")
}

/// Registers a worker, within `limit`.
///
/// Errors: `PeerLost`, `TimedOut`: nobody answers; `Authentication`: the server demands a proof
/// that this engine cannot give; `Invalid`: the server's error.
pub(super) async fn register(
    address: &Address,
    registration: &WorkerRegistration,
    secret: Option<&Secret>,
    limit: Duration,
) -> Result<()> {
    let body = registration.encode();
    let all = async {
        let request = Request { kind: BootstrapRequest::Register, body: &body, max: MAX_ANSWER };
        body_of(&request.send(address, secret).await?).map(drop)
    };
    within(limit, address, all).await
}

async fn within<T>(
    limit: Duration,
    address: &Address,
    done: impl Future<Output = Result<T>>,
) -> Result<T> {
    let Address { host, port } = address;
    let context =
        |error: Error| Error::new(error.kind(), format!("bootstrap server {host}:{port}: {error}"));
    match timeout(limit, done).await {
        Ok(done) => done.map_err(context),
        Err(_) => {
            Err(context(ErrorKind::TimedOut.because(format!("no answer within {limit:.1?}"))))
        }
    }
}

async fn connect(address: &Address) -> Result<Exchange> {
    let mut last = ErrorKind::Invalid.because("no address to connect to");
    for address in resolve(&address.host, address.port, Duration::MAX).await? {
        match TcpStream::connect(address).await {
            Ok(stream) => return Ok(Exchange::new(stream)),
            Err(error) => {
                last =
                    ErrorKind::PeerLost.because(format!("nobody listens at {address} ({error})"));
            }
        }
    }
    Err(last)
}

/// A request to a bootstrap server.
struct Request<'a> {
    kind: BootstrapRequest,
    body: &'a [u8],
    /// The longest body of an answer.
    max: usize,
}

impl Request<'_> {
    /// Connects and sends the request, and again with a proof if the server demands one.
    async fn send(&self, address: &Address, secret: Option<&Secret>) -> Result<HttpMessage> {
        let mut connection = connect(address).await?;
        // Only a query without a secret cannot have a second request.
        let keep = secret.is_some() || self.kind == BootstrapRequest::Register;
        let keep = if keep { "Connection: keep-alive" } else { "Connection: close" };
        let answer = self.ask(&mut connection, address, &[keep]).await?;
        let nonce = answer
            .header(&BootstrapRequest::NONCE.to_ascii_lowercase())
            .filter(|_| answer.start[1] == "401");
        let Some(nonce) = nonce else { return Ok(answer) };
        let secret = secret.ok_or_else(|| {
            ErrorKind::Authentication.because(
                "its fleet has a shared secret, and this worker or decode has none: set \
                 KVX_SECRET_FILE here to the same secret",
            )
        })?;
        let proof = self.kind.prove(secret.bytes(), nonce, self.body);
        let proof = format!("{}: {proof}", BootstrapRequest::PROOF);
        self.ask(&mut connection, address, &["Connection: close", &proof]).await
    }

    async fn ask(
        &self,
        connection: &mut Exchange,
        Address { host, port }: &Address,
        headers: &[&str],
    ) -> Result<HttpMessage> {
        let what = match self.kind {
            BootstrapRequest::Query => "GET /query",
            BootstrapRequest::Register => "POST /register",
        };
        let host = if host.contains(':') {
            format!("Host: [{host}]:{port}")
        } else {
            format!("Host: {host}:{port}")
        };
        let headers: Vec<&str> = [&*host].into_iter().chain(headers.iter().copied()).collect();
        // Servers must not answer a request of HTTP/1.0 in chunks.
        connection.send(&format!("{what} HTTP/1.0"), &headers, self.body).await?;
        let none = || ErrorKind::PeerLost.because("it closed the connection without an answer");
        connection.receive(self.max).await?.ok_or_else(none)
    }
}

/// Returns the body of an answer that is not an error. Errors: `Invalid`, with the server's text.
fn body_of(answer: &HttpMessage) -> Result<&[u8]> {
    let status = answer.start[1].as_str();
    if status == "200" {
        return Ok(&answer.body);
    }
    let body: Option<serde_json::Value> = serde_json::from_slice(&answer.body).ok();
    let detail =
        body.as_ref().and_then(|body| body.get("detail")?.as_str()).unwrap_or("it gives no reason");
    let detail: String = detail.chars().take(500).collect();
    Err(ErrorKind::Invalid.because(format!("it answered {status}: {detail}")))
}
