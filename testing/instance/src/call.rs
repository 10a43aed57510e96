//! Fetches blocks from another instance, in place of the side channel and the fabric.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};

use crate::params::Source;

/// The time to wait for blocks that are not computed yet.
const WATCHDOG: Duration = Duration::from_secs(20);
/// The time that a reachable instance may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// The result of a fetch.
#[derive(Debug, PartialEq)]
pub(crate) enum Fetched {
    Cache(u64),
    /// The blocks were read before or are free. A real engine would read them without noticing.
    Stale,
    /// The instance is unreachable, or another engine has taken its place.
    Unreachable(String),
}

pub(crate) async fn fetch(source: &Source, handshake: Duration) -> Fetched {
    match try_fetch(source).await {
        Ok((StatusCode::OK, answer)) => match answer["cache"].as_u64() {
            Some(cache) => Fetched::Cache(cache),
            None => Fetched::Unreachable(format!("unexpected answer: {answer}")),
        },
        Ok((StatusCode::NOT_FOUND, _)) => Fetched::Stale,
        Ok((status, answer)) => Fetched::Unreachable(format!("{status}: {answer}")),
        Err(error) => {
            tokio::time::sleep(handshake).await; // vLLM retries for this time
            Fetched::Unreachable(error)
        }
    }
}

async fn try_fetch(source: &Source) -> Result<(StatusCode, Value), String> {
    let mut port = source.port;
    if source.bootstrap {
        let (_, answer) =
            within(ANSWER, call(Method::GET, &source.host, port, "/query", Value::Null)).await?;
        let ranks = answer.as_object().ok_or("the bootstrap server's answer is not an object")?;
        let rank = ranks
            .values()
            .find(|rank| rank["engine_id"] == source.engine.as_str())
            .ok_or("the bootstrap server does not list this engine")?;
        let address = rank["worker_addr"]["0"]["0"].as_str().unwrap_or_default();
        port = address
            .rsplit_once(':')
            .and_then(|(_, port)| port.parse().ok())
            .ok_or("the bootstrap server lists no worker")?;
    }
    let wanted = json!({"name": source.name, "engine_id": source.engine, "waits": source.waits});
    let limit = if source.waits { WATCHDOG } else { ANSWER };
    within(limit, call(Method::POST, &source.host, port, "/kv/read", wanted)).await
}

async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    tokio::time::timeout(limit, call).await.map_err(|_| "no answer in time".to_owned())?
}

async fn call(
    method: Method,
    host: &str,
    port: u16,
    path: &str,
    body: Value,
) -> Result<(StatusCode, Value), String> {
    let said = |error: &dyn std::fmt::Display| error.to_string();
    let stream =
        tokio::net::TcpStream::connect((host, port)).await.map_err(|error| said(&error))?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| said(&error))?;
    let connection = tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", host)
        .body(Full::new(Bytes::from(body.to_string())))
        .map_err(|error| said(&error))?;
    let response = sender.send_request(request).await.map_err(|error| said(&error))?;
    let status = response.status();
    let body = response.into_body().collect().await.map_err(|error| said(&error))?.to_bytes();
    connection.abort();
    Ok((status, serde_json::from_slice(&body).unwrap_or(Value::Null)))
}
