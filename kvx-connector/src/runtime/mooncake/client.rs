//! A client of bootstrap servers: of kvx, of vLLM, or any other that answers `/register` and
//! `/query`.

use std::time::{Duration, Instant};

use kvx_core::{Error, ErrorKind, Result, Secret};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::super::zmtp::resolve;
use super::http::{Exchange, HttpMessage};
use super::proof;
use kvx_vllm::engine::Address;
use kvx_vllm::wire::mooncake::{Directory, WorkerRegistration};

/// The delay between attempts, as in vLLM.
const AGAIN: Duration = Duration::from_millis(100);
/// The number of attempts of a question.
const ATTEMPTS: u32 = 3;
/// The longest answer to a registration.
const MAX_ANSWER: usize = 64 << 10;

const QUERY: &str = "GET /query";
const REGISTER: &str = "POST /register";

/// Queries what a bootstrap server knows, within `limit`.
///
/// Errors, after three attempts: `PeerLost`, `TimedOut`: nobody answers; `Invalid`, `Malformed`,
/// `Exhausted`: the answer is not usable.
pub(super) async fn query(address: &Address, limit: Duration) -> Result<Directory> {
    let until = Instant::now() + limit;
    for left in (1..=ATTEMPTS).rev() {
        // An attempt that hangs leaves time for the others.
        let share = until.saturating_duration_since(Instant::now()) / left;
        let answer = async {
            let mut connection = connect(address).await?;
            let headers = ["Connection: close"];
            let answer =
                ask(&mut connection, QUERY, address, &headers, &[], Directory::MAX_LEN).await?;
            Directory::decode(body_of(&answer)?)
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
        let mut connection = connect(address).await?;
        let headers = ["Connection: keep-alive"];
        let answer = ask(&mut connection, REGISTER, address, &headers, &body, MAX_ANSWER).await?;
        let nonce =
            answer.header(&proof::NONCE.to_ascii_lowercase()).filter(|_| answer.start[1] == "401");
        let Some(nonce) = nonce else { return body_of(&answer).map(drop) };
        let secret = secret.ok_or_else(|| {
            Error::new(
                ErrorKind::Authentication,
                "its fleet has a shared secret and this engine has none: set KVX_SECRET_FILE here \
                 to the same secret",
            )
        })?;
        let proof = format!("{}: {}", proof::PROOF, proof::prove(secret, nonce, &body));
        let headers = ["Connection: close", &proof];
        let answer = ask(&mut connection, REGISTER, address, &headers, &body, MAX_ANSWER).await?;
        body_of(&answer).map(drop)
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
            Err(context(Error::new(ErrorKind::TimedOut, format!("no answer within {limit:?}"))))
        }
    }
}

async fn connect(address: &Address) -> Result<Exchange> {
    let mut last = Error::new(ErrorKind::Invalid, "no address to connect to");
    for address in resolve(&address.host, address.port, Duration::MAX).await? {
        match TcpStream::connect(address).await {
            Ok(stream) => return Ok(Exchange::new(stream)),
            Err(error) => {
                last = Error::new(
                    ErrorKind::PeerLost,
                    format!("nobody listens at {address} ({error})"),
                );
            }
        }
    }
    Err(last)
}

async fn ask(
    connection: &mut Exchange,
    what: &str,
    Address { host, port }: &Address,
    headers: &[&str],
    body: &[u8],
    most: usize,
) -> Result<HttpMessage> {
    let host = if host.contains(':') {
        format!("Host: [{host}]:{port}")
    } else {
        format!("Host: {host}:{port}")
    };
    let headers: Vec<&str> = [&*host].into_iter().chain(headers.iter().copied()).collect();
    // Servers must not answer a request of HTTP/1.0 in chunks.
    connection.send(&format!("{what} HTTP/1.0"), &headers, body).await?;
    let none = || Error::new(ErrorKind::PeerLost, "it closed the connection without an answer");
    connection.receive(most).await?.ok_or_else(none)
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
    Err(Error::new(ErrorKind::Invalid, format!("it answered {status}: {detail}")))
}
