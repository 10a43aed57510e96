//! The connection of a host of further data-parallel ranks to the head, whose requests it answers.

use std::future::Future;
use std::pin::{Pin, pin};
use std::time::Duration;

use axum::{Router, middleware};
use hyper::server::conn::http2::Builder;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use super::client;
use super::handshake::{
    ANSWER_TIMEOUT, JOIN_TIMEOUT, JoinRequest, KEEP_ALIVE, RETRY_INTERVAL, check_reach,
    read_message, write_message,
};
use super::noise::{self, Connection, Role};
use crate::kv::Secret;
use crate::model::{ModelError, Result};

/// The most requests that a host answers concurrently.
const MOST_REQUESTS: u32 = 4096;

/// Answers the head's requests until `stop` is ready and answers have ended, at most `drain` later.
/// Joins again after the head is lost. Calls `joined` after the first join.
///
/// # Errors
///
/// Fails if the head rejects this host or is unreachable; the message says what to do.
pub(crate) async fn follow(
    head: &(String, u16),
    joining: &JoinRequest,
    secret: Option<&Secret>,
    router: Router,
    joined: impl FnOnce(),
    mut stop: Pin<&mut (impl Future<Output = ()> + Send)>,
    drain: Duration,
) -> Result<()> {
    let mut joined = Some(joined);
    loop {
        let stream = tokio::select! {
            stream = join(head, joining, secret) => stream?,
            () = &mut stop => return Ok(()),
        };
        if let Some(joined) = joined.take() {
            joined();
        }
        let mut serving = Builder::new(TokioExecutor::new());
        serving
            .timer(TokioTimer::new())
            .keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE);
        serving.max_concurrent_streams(MOST_REQUESTS);
        let router = router.clone().layer(middleware::from_fn(client::set_by_head));
        let service = TowerToHyperService::new(router);
        let mut connection = pin!(serving.serve_connection(TokioIo::new(stream), service));
        tokio::select! {
            ended = &mut connection => {
                let why = ended.err().map_or_else(String::new, |why| format!(": {why}"));
                tracing::warn!("lost the head at {}:{}{why}; reconnecting", head.0, head.1);
            }
            () = &mut stop => {
                connection.as_mut().graceful_shutdown();
                // Ignore whether the connection has ended or the time is over.
                let _ = timeout(drain, connection).await;
                return Ok(());
            }
        }
    }
}

/// Connects to the head and joins it.
pub(super) async fn join(
    (host, port): &(String, u16),
    joining: &JoinRequest,
    secret: Option<&Secret>,
) -> Result<Box<dyn Connection>> {
    let until = Instant::now() + JOIN_TIMEOUT;
    let stream = loop {
        let why = match timeout(ANSWER_TIMEOUT, TcpStream::connect((host.as_str(), *port))).await {
            Ok(Ok(stream)) => break stream,
            Ok(Err(why)) => why.to_string(),
            Err(_) => "no answer".to_owned(),
        };
        if Instant::now() > until {
            return Err(ModelError::new(format!(
                "no head at {host}:{port} within {JOIN_TIMEOUT:?}: {why}; set \
                 --data-parallel-address and --data-parallel-rpc-port to those of the head"
            )));
        }
        sleep(RETRY_INTERVAL).await;
    };
    check_reach(stream.peer_addr().map_err(ModelError::of)?, secret)?;
    let unlike = |why: &str| {
        let secret = match secret {
            Some(_) => "",
            None => ", or does it have a secret, which KVX_SECRET_FILE must name here too",
        };
        ModelError::new(format!(
            "{host}:{port} does not answer like a head{why}: is it one{secret}?"
        ))
    };
    let (stream, refused): (_, Option<String>) = timeout(ANSWER_TIMEOUT, async {
        let mut stream = noise::authenticate(stream, secret, Role::Host).await?;
        let refused = match write_message(&mut stream, joining).await {
            Ok(()) => read_message(&mut stream).await,
            Err(why) => Err(why),
        };
        Ok((stream, refused.map_err(|why| unlike(&format!(" ({why})")))?))
    })
    .await
    .unwrap_or_else(|_| Err(unlike("")))?;
    match refused {
        Some(words) => Err(ModelError::new(words)),
        None => Ok(stream),
    }
}
