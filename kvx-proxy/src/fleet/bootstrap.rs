//! Queries to the Mooncake bootstrap servers of prefill instances.

use bytes::Bytes;
use http_body_util::Empty;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::HOST;
use hyper::{Method, Request, Response, StatusCode, body::Incoming};
use hyper_util::rt::TokioIo;
use kvx_vllm::params::BootstrapRequest;
use kvx_vllm::params::recipe::concurrent::MooncakeTarget;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::instance::Instance;
use crate::relay::core::LiveSetup;
use crate::setup::InstanceSetup;
use crate::upstream::{Fault, WHOLE, whole, words};

/// The default port of a Mooncake bootstrap server.
const PORT: u16 = 8998;

/// The reason why a query has no usable answer.
#[derive(Debug)]
pub(crate) enum QueryFault {
    /// The server demands a proof of the fleet's secret, which this proxy cannot give.
    Denied(Fault),
    /// No bootstrap server has answered usably.
    Failed(Fault),
}

impl From<QueryFault> for Fault {
    fn from(fault: QueryFault) -> Fault {
        match fault {
            QueryFault::Denied(fault) | QueryFault::Failed(fault) => fault,
        }
    }
}

/// Returns the URL of an instance's bootstrap server, as decode legs name it.
pub(crate) fn address(setup: &InstanceSetup) -> String {
    let port = setup.bootstrap_port.unwrap_or(PORT);
    format!("http://{}:{port}", setup.url.host().unwrap_or_default())
}

/// Queries a bootstrap server for the ranks of its instance.
pub(crate) async fn query(
    live: &LiveSetup,
    instance: &Instance,
) -> Result<Vec<MooncakeTarget>, QueryFault> {
    let address = address(&instance.setup);
    let broken = |why: String| Fault::Broken(format!("bootstrap server {address}: {why}"));
    let timeout = live.setup.health.timeout.min(live.upstream.connect_timeout());
    let (status, body, demands_proof) =
        ask(live, &address, Instant::now() + timeout).await.map_err(QueryFault::Failed)?;
    if status == StatusCode::UNAUTHORIZED && demands_proof {
        let why = "it demands a proof of the fleet's secret: set KVX_SECRET_FILE of this proxy to \
                   the same secret as the prefill's";
        return Err(QueryFault::Denied(broken(why.to_owned())));
    }
    let answer = serde_json::from_slice(&body).ok().filter(|_| status.is_success());
    let targets = answer
        .ok_or_else(|| format!("GET /query answered {} without JSON", status.as_u16()))
        .and_then(|answer| {
            MooncakeTarget::from_query(&address, &answer).map_err(|error| error.to_string())
        })
        .map_err(|why| QueryFault::Failed(broken(why)))?;
    match targets.is_empty() {
        true => Err(QueryFault::Failed(broken("no rank has registered yet".to_owned()))),
        false => Ok(targets),
    }
}

/// Sends `GET /query`, and again with a proof if the server demands one. Both requests need the
/// same connection, so this uses none of the pooled ones. Returns the status and body of the
/// answer, and whether the server has demanded a proof.
async fn ask(
    live: &LiveSetup,
    address: &str,
    until: Instant,
) -> Result<(StatusCode, Bytes, bool), Fault> {
    let host = address.trim_start_matches("http://");
    let late = |_| Fault::Late("no answer in time".to_owned());
    let stream = timeout_at(until, TcpStream::connect(host))
        .await
        .map_err(|_| Fault::Unreached(format!("no connection to {host} in time")))?
        .map_err(|error| Fault::Refused(format!("{host}: {error}")))?;
    let (mut sender, connection) = timeout_at(until, http1::handshake(TokioIo::new(stream)))
        .await
        .map_err(late)?
        .map_err(|error| Fault::Broken(words(&error)))?;
    // Ends the connection when this returns.
    let mut tasks = JoinSet::new();
    tasks.spawn(connection);
    let mut proof = None;
    loop {
        let response = timeout_at(until, send(&mut sender, host, proof.as_deref()))
            .await
            .map_err(late)?
            .map_err(|error| Fault::Broken(words(&error)))?;
        let status = response.status();
        let nonce = response.headers().get(BootstrapRequest::NONCE).cloned();
        let body = whole(response.into_body(), WHOLE, until).await?;
        let nonce = nonce.as_ref().and_then(|nonce| nonce.to_str().ok());
        match (&live.setup.fleet_secret, nonce) {
            (Some(secret), Some(nonce))
                if status == StatusCode::UNAUTHORIZED && proof.is_none() =>
            {
                proof = Some(BootstrapRequest::Query.prove(secret.bytes(), nonce, &[]));
            }
            _ => return Ok((status, body, proof.is_some() || nonce.is_some())),
        }
    }
}

async fn send(
    sender: &mut SendRequest<Empty<Bytes>>,
    host: &str,
    proof: Option<&str>,
) -> hyper::Result<Response<Incoming>> {
    sender.ready().await?;
    let mut request = Request::builder().method(Method::GET).uri("/query").header(HOST, host);
    if let Some(proof) = proof {
        request = request.header(BootstrapRequest::PROOF, proof);
    }
    let request = request.body(Empty::new()).expect("hosts of URLs and proofs are header values");
    sender.send_request(request).await
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;
    use crate::setup::FleetSecret;

    const NONCE: &str = "6e6f6e6365";

    /// Serves one connection: demands a proof of the secret `[1; 32]`, and lists an engine to those
    /// who give it.
    async fn bootstrap_server() -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let right = BootstrapRequest::Query.prove(&[1; 32], NONCE, b"");
            loop {
                let mut asked = Vec::new();
                while !asked.ends_with(b"\r\n\r\n") {
                    if stream.read_buf(&mut asked).await.unwrap_or(0) == 0 {
                        return;
                    }
                }
                let asked = String::from_utf8(asked).unwrap().to_ascii_lowercase();
                let (head, body) = match asked.contains("x-kvx-proof") {
                    true if asked.contains(&right) => {
                        ("200 OK", r#"{"0":{"engine_id":"e","worker_addr":{}}}"#)
                    }
                    true => ("401 Unauthorized", "{}"),
                    false => ("401 Unauthorized\r\nX-Kvx-Nonce: 6e6f6e6365", "{}"),
                };
                let length = body.len();
                let answer = format!("HTTP/1.1 {head}\r\nContent-Length: {length}\r\n\r\n{body}");
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        port
    }

    #[tokio::test]
    async fn a_server_that_demands_a_proof_gets_it_on_the_same_connection() {
        for (secret, is_right) in [(None, false), (Some(2), false), (Some(1), true)] {
            let port = bootstrap_server().await;
            let text = format!(
                "[[pool]]\nprefill = [{{ url = 'http://127.0.0.1:1', bootstrap_port = {port} }}]"
            );
            let mut setup = crate::Setup::from_toml(&text).unwrap();
            setup.fleet_secret = secret.map(|byte| FleetSecret::new([byte; 32]));
            let live = LiveSetup::new(setup, None).unwrap();
            match query(&live, &live.fleet.prefill[0]).await {
                Ok(targets) => assert!(is_right && targets[0].engine_id == "e"),
                Err(QueryFault::Denied(fault)) => {
                    assert!(!is_right && fault.to_string().contains("KVX_SECRET_FILE"), "{fault}");
                }
                Err(QueryFault::Failed(fault)) => panic!("{fault}"),
            }
        }
    }
}
