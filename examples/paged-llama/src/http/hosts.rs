//! Data-parallel ranks on other hosts, behind the head, the one server that clients know.
//!
//! A host joins with one connection, over which the head sends it requests by HTTP/2. The host
//! needs no port, and the head notices its loss at once. Beyond loopback both ends authenticate
//! with the fleet's secret.

use std::net::IpAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use kvx_proxy::server::counted_address;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::client::{CLIENT, Client};
use super::error::ApiError;
use super::handshake::{
    ANSWER_TIMEOUT, JoinRequest, KEEP_ALIVE, RETRY_INTERVAL, SharedConfig, read_message,
    write_message,
};
use super::metrics::merge;
use super::noise::{self, Role};
use crate::kv::Secret;
use crate::model::{ModelError, Result};

/// The header in which a router chooses a data-parallel rank.
pub(crate) const RANK: &str = "x-data-parallel-rank";
/// The longest metrics of a host, in bytes.
const LONGEST_METRICS: usize = 16 << 20;
/// The most connections that are not authenticated yet.
const MOST_PENDING: usize = 16;
/// The client's headers that the head forwards. Credentials such as `Authorization` are for the
/// head only.
const FORWARDED: [HeaderName; 2] = [CONTENT_TYPE, HeaderName::from_static("x-request-id")];

/// The ranks on other hosts.
#[derive(Debug)]
pub(crate) struct Hosts {
    config: SharedConfig,
    secret: Option<Secret>,
    /// The range of ranks on other hosts; lower ranks are on the head.
    elsewhere: Range<usize>,
    joined: Mutex<Vec<JoinedHost>>,
    news: Notify,
}

#[derive(Clone, Debug)]
struct JoinedHost {
    ranks: Range<usize>,
    asking: SendRequest<Body>,
}

impl Hosts {
    /// Returns these ranks with no host joined yet. Lower ranks are on the head.
    pub(crate) fn new(
        config: SharedConfig,
        elsewhere: Range<usize>,
        secret: Option<Secret>,
    ) -> Self {
        Hosts { config, secret, elsewhere, joined: Mutex::default(), news: Notify::new() }
    }

    /// Returns the number of all ranks, on the head and on other hosts.
    pub(crate) fn size(&self) -> usize {
        self.elsewhere.end
    }

    fn joined(&self) -> MutexGuard<'_, Vec<JoinedHost>> {
        let mut joined = self.joined.lock().unwrap_or_else(PoisonError::into_inner);
        joined.retain(|host| !host.asking.is_closed());
        joined
    }

    /// Returns true if requests for this rank can be answered.
    pub(crate) fn has(&self, rank: usize) -> bool {
        rank < self.elsewhere.start || self.joined().iter().any(|host| host.ranks.contains(&rank))
    }

    /// Accepts hosts forever.
    pub(crate) async fn accept(self: Arc<Self>, listener: TcpListener) {
        let mut unknown = PendingConnections::default();
        loop {
            match listener.accept().await {
                Ok((stream, from)) => {
                    let (hosts, is_known) = (self.clone(), Arc::new(AtomicBool::new(false)));
                    let known = is_known.clone();
                    let task = tokio::spawn(async move {
                        match timeout(ANSWER_TIMEOUT, hosts.admit(stream, &known)).await {
                            Ok(Ok(ranks)) => {
                                tracing::info!("{} have joined from {from}", rank_names(&ranks))
                            }
                            Ok(Err(why)) => {
                                tracing::warn!("a host at {from} cannot join: {why}")
                            }
                            Err(_) => tracing::warn!(
                                "a host at {from} sent nothing for {ANSWER_TIMEOUT:?}"
                            ),
                        }
                    });
                    let replaced =
                        unknown.add(PendingConnection { from: from.ip(), task, is_known });
                    if let Some(replaced) = replaced {
                        // Its descriptor is closed once its task has ended, until which further
                        // connections wait.
                        let _cancelled = replaced.await;
                    }
                }
                Err(why) => {
                    tracing::warn!("cannot accept hosts: {why}");
                    sleep(RETRY_INTERVAL).await;
                }
            }
        }
    }

    /// Lets a host join. Sets `known` once the peer has sent a request to join. With a secret, this
    /// proves it: a recorded first message of Noise can be repeated, but not what follows.
    async fn admit(&self, stream: TcpStream, known: &AtomicBool) -> Result<Range<usize>> {
        let mut stream = noise::authenticate(stream, self.secret.as_ref(), Role::Head).await?;
        let joining: JoinRequest = read_message(&mut stream).await?;
        known.store(true, Ordering::Relaxed);
        let refused = self.refusal(&joining);
        write_message(&mut stream, &refused).await?;
        if let Some(words) = refused {
            return Err(ModelError::new(words));
        }
        let ranks = joining.ranks;
        let (asking, connection) = Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE)
            .keep_alive_while_idle(true)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(ModelError::of)?;
        {
            let mut joined = self.joined();
            // Of two hosts that join concurrently, the second finds its connection closed, and
            // tries again.
            if let Some(taken) = overlap(&joined, &ranks) {
                return Err(ModelError::new(taken));
            }
            joined.push(JoinedHost { ranks: ranks.clone(), asking });
        }
        let gone = ranks.clone();
        tokio::spawn(async move {
            let why = connection.await.err().map_or_else(String::new, |why| format!(": {why}"));
            tracing::error!("lost {}{why}; start them again to let them rejoin", rank_names(&gone));
        });
        self.news.notify_one();
        Ok(ranks)
    }

    /// Returns why a host cannot join, if it cannot.
    fn refusal(&self, joining: &JoinRequest) -> Option<String> {
        let JoinRequest { ranks, config } = joining;
        if let Some(different) = self.config.difference(config) {
            return Some(format!("{different}: start both with the same configuration"));
        }
        if ranks.is_empty() || ranks.start < self.elsewhere.start || ranks.end > self.elsewhere.end
        {
            return Some(format!(
                "{} cannot join: the other hosts have {}; see --data-parallel-start-rank and \
                 --data-parallel-size-local",
                rank_names(ranks),
                rank_names(&self.elsewhere)
            ));
        }
        overlap(&self.joined(), ranks)
    }

    /// Waits until all ranks have joined.
    ///
    /// # Errors
    ///
    /// Fails if some have not joined in time; the message names them.
    pub(crate) async fn all(&self, within: Duration) -> Result<()> {
        let missing = || self.elsewhere.clone().filter(|rank| !self.has(*rank)).collect::<Vec<_>>();
        let all = async {
            while !missing().is_empty() {
                self.news.notified().await;
            }
        };
        timeout(within, all).await.map_err(|_| {
            ModelError::new(format!(
                "ranks {:?} have not joined within {within:?}: start them with --headless, \
                 --data-parallel-start-rank and this head's --data-parallel-address",
                missing()
            ))
        })
    }

    /// Sends a request to the host of a rank, which answers as this server would. The answer has no
    /// deadline. If the host is lost, the answer ends with its connection, at most twice
    /// [`KEEP_ALIVE`] later.
    pub(crate) async fn ask(
        &self,
        rank: usize,
        path: &str,
        client: Client,
        headers: &HeaderMap,
        body: Bytes,
    ) -> std::result::Result<Response<Body>, ApiError> {
        let gone = || {
            ApiError::internal(format!("rank {rank} is lost; see the head's log for the reason"))
        };
        let host = self.joined().iter().find(|host| host.ranks.contains(&rank)).cloned();
        let JoinedHost { ranks, mut asking } = host.ok_or_else(gone)?;
        let mut request = Request::post(format!("http://rank-{rank}{path}"))
            .body(Body::from(body))
            .map_err(|_| gone())?;
        for name in FORWARDED {
            if let Some(value) = headers.get(&name) {
                request.headers_mut().insert(name, value.clone());
            }
        }
        request.headers_mut().insert(CLIENT, client.header());
        // A host counts its ranks from 0.
        request.headers_mut().insert(RANK, HeaderValue::from(rank - ranks.start));
        asking.ready().await.map_err(|_| gone())?;
        let answer = asking.send_request(request).await.map_err(|why| {
            tracing::error!("a request to rank {rank} failed: {why}");
            gone()
        })?;
        Ok(answer.map(Body::new))
    }

    /// Returns the metrics of this server and of the engines on other hosts, except for hosts that
    /// do not answer.
    pub(crate) async fn metrics(&self, here: String) -> String {
        let asked: Vec<_> = self
            .joined()
            .iter()
            .map(|host| tokio::spawn(fetch_metrics(host.asking.clone())))
            .collect();
        let mut texts = vec![here];
        for each in asked {
            texts.extend(each.await.ok().flatten());
        }
        if texts.len() == 1 { texts.swap_remove(0) } else { merge(&texts) }
    }
}

/// A connection whose peer is not authenticated yet.
struct PendingConnection {
    from: IpAddr,
    task: JoinHandle<()>,
    is_known: Arc<AtomicBool>,
}

/// The unauthenticated connections, the oldest first.
#[derive(Default)]
struct PendingConnections(Vec<PendingConnection>);

impl PendingConnections {
    /// Adds a connection. Beyond [`MOST_PENDING`] it closes the oldest connection of the address
    /// (IPv6: of the /64) that has most of them, so that silent peers cannot keep a host from
    /// joining. Returns the task of that connection.
    fn add(&mut self, mut connection: PendingConnection) -> Option<JoinHandle<()>> {
        connection.from = counted_address(connection.from);
        let all = &mut self.0;
        all.push(connection);
        all.retain(|each| !each.task.is_finished() && !each.is_known.load(Ordering::Relaxed));
        if all.len() <= MOST_PENDING {
            return None;
        }
        let count = |from: IpAddr| all.iter().filter(|each| each.from == from).count();
        let most = all.iter().map(|each| count(each.from)).max();
        let oldest = all.iter().position(|each| Some(count(each.from)) == most)?;
        let replaced = all.remove(oldest).task;
        replaced.abort();
        Some(replaced)
    }
}

fn rank_names(ranks: &Range<usize>) -> String {
    format!("ranks {} to {}", ranks.start, ranks.end.saturating_sub(1))
}

fn overlap(joined: &[JoinedHost], ranks: &Range<usize>) -> Option<String> {
    let taken =
        joined.iter().find(|host| host.ranks.start < ranks.end && ranks.start < host.ranks.end)?;
    Some(format!(
        "{} cannot join: {} have already joined; end that host first",
        rank_names(ranks),
        rank_names(&taken.ranks)
    ))
}

async fn fetch_metrics(mut asking: SendRequest<Body>) -> Option<String> {
    let request = Request::get("http://rank/metrics").body(Body::empty()).ok()?;
    let text = async {
        asking.ready().await.ok()?;
        let answer = asking.send_request(request).await.ok()?;
        let body =
            axum::body::to_bytes(Body::new(answer.into_body()), LONGEST_METRICS).await.ok()?;
        String::from_utf8(body.to_vec()).ok()
    };
    timeout(ANSWER_TIMEOUT, text).await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use axum::Router;
    use axum::http::StatusCode;
    use tokio::io::AsyncWriteExt as _;
    use tokio::sync::oneshot::{self, error::TryRecvError};
    use tokio::time::Instant;

    use super::super::head::{follow, join};
    use super::*;

    fn config() -> SharedConfig {
        SharedConfig { model: "m".into(), data_parallel_size: 4, model_len: 64, block_size: 16 }
    }

    #[test]
    fn hosts_with_another_model_or_with_ranks_of_the_head_cannot_join() {
        let hosts = Hosts::new(config(), 2..4, None);
        let refusal = |ranks, config| hosts.refusal(&JoinRequest { ranks, config });
        assert_eq!(refusal(2..4, config()), None);
        for ranks in [1..3, 3..5, 3..3, Range { start: 7, end: 2 }] {
            assert!(
                refusal(ranks.clone(), config())
                    .is_some_and(|words| words.contains("ranks 2 to 3")),
                "{ranks:?}"
            );
        }
        let other = SharedConfig { model: "other".into(), ..config() };
        assert!(refusal(2..4, other).is_some_and(|words| words.contains("\"other\"")));
    }

    #[tokio::test]
    async fn the_oldest_connection_of_the_largest_crowd_makes_room() {
        let mut unknown = PendingConnections::default();
        let mut add = |from: IpAddr, is_known: bool| {
            let (open, has_ended) = oneshot::channel::<()>();
            let task = tokio::spawn(async move {
                let _open = open;
                std::future::pending::<()>().await;
            });
            unknown.add(PendingConnection { from, task, is_known: Arc::new(is_known.into()) });
            has_ended
        };
        // Each of the crowd has another address of its /64.
        let member = |host: usize| IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, host as u16]);
        let mut alone = add([10, 0, 0, 1].into(), false);
        let mut known = add(member(0), true);
        let crowd: Vec<_> = (0..3 * MOST_PENDING).map(|at| add(member(at), false)).collect();
        for (at, has_ended) in crowd.into_iter().enumerate() {
            let ended = timeout(RETRY_INTERVAL, has_ended).await.is_ok();
            assert_eq!(ended, at < 2 * MOST_PENDING + 1, "{at}");
        }
        for open in [&mut alone, &mut known] {
            assert_eq!(open.try_recv(), Err(TryRecvError::Empty));
        }
    }

    #[tokio::test]
    async fn strangers_at_the_heads_port_are_bounded_and_let_nobody_in() {
        for secret in [None, Some(Secret::from_bytes([1; Secret::LEN]))] {
            meet_at_a_port_with_strangers(secret).await;
        }
    }

    /// Answers with the names of the request's headers.
    async fn headers_of(headers: HeaderMap) -> String {
        let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        names.join(" ")
    }

    async fn meet_at_a_port_with_strangers(secret: Option<Secret>) {
        let hosts = Arc::new(Hosts::new(config(), 2..4, secret.clone()));
        let secret = secret.as_ref();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let head = ("127.0.0.1".to_owned(), listener.local_addr().unwrap().port());
        tokio::spawn(hosts.clone().accept(listener));
        let mut strangers = Vec::new();
        for word in [
            &b"\xff\xff\xff\xff"[..],
            b"\x00\x00\x00\x02{}",
            b"\x00\x00\x00\x01",
            b"GET / HTTP/1.1\r\n\r\n",
        ] {
            let mut stream = TcpStream::connect((head.0.as_str(), head.1)).await.unwrap();
            stream.write_all(word).await.unwrap();
            strangers.push(stream);
        }
        for _ in 0..4 * MOST_PENDING {
            strangers.push(TcpStream::connect((head.0.as_str(), head.1)).await.unwrap());
        }
        // A host with another data-parallel size gets an error that says so; one with the same size
        // joins.
        let other =
            JoinRequest { ranks: 2..4, config: SharedConfig { data_parallel_size: 5, ..config() } };
        assert!(
            join(&head, &other, secret)
                .await
                .err()
                .unwrap()
                .to_string()
                .contains("data_parallel_size is 4 at the head")
        );
        let ours = JoinRequest { ranks: 2..4, config: config() };
        let there = Router::new()
            .route("/metrics", axum::routing::get(|| async { "x{engine=\"2\"} 1\n" }))
            .route("/headers", axum::routing::post(headers_of));
        let (stop, stopped) = oneshot::channel::<()>();
        let (at, joining, proven) = (head.clone(), ours.clone(), secret.cloned());
        let following = tokio::spawn(async move {
            let stopped = pin!(async {
                let _ = stopped.await;
            });
            follow(&at, &joining, proven.as_ref(), there, || {}, stopped, ANSWER_TIMEOUT).await
        });
        hosts.all(ANSWER_TIMEOUT).await.unwrap();
        assert!(hosts.has(0) && hosts.has(3));
        assert!(
            join(&head, &ours, secret)
                .await
                .err()
                .unwrap()
                .to_string()
                .contains("have already joined")
        );
        let other = Secret::from_bytes([2; Secret::LEN]);
        assert!(join(&head, &ours, Some(&other)).await.is_err());
        assert_eq!(
            join(&head, &ours, None).await.err().unwrap().to_string().contains("KVX_SECRET_FILE"),
            secret.is_some()
        );
        let of_client = ["authorization", "content-type", "cookie", "x-api-key", "x-request-id"];
        let headers =
            of_client.map(|name| (HeaderName::from_static(name), HeaderValue::from_static("a")));
        let answer = hosts
            .ask(2, "/headers", Client::Elsewhere, &HeaderMap::from_iter(headers), Bytes::new())
            .await
            .unwrap();
        let names = axum::body::to_bytes(answer.into_body(), 1 << 10).await.unwrap();
        assert_eq!(
            names,
            "content-length content-type x-data-parallel-rank x-kvx-client x-request-id"
        );
        assert_eq!(hosts.metrics(String::new()).await, "x{engine=\"2\"} 1\n");
        stop.send(()).unwrap();
        timeout(ANSWER_TIMEOUT, following).await.unwrap().unwrap().unwrap();
        let until = Instant::now() + ANSWER_TIMEOUT;
        while hosts.has(3) && Instant::now() < until {
            sleep(RETRY_INTERVAL).await;
        }
        let refusal = hosts
            .ask(3, "/", Client::ThisMachine, &HeaderMap::new(), Bytes::new())
            .await
            .unwrap_err();
        assert_eq!(
            (refusal.status, refusal.words.contains("rank 3 is lost")),
            (StatusCode::INTERNAL_SERVER_ERROR, true)
        );
    }
}
