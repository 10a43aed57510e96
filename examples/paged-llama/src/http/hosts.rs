//! Ranks of data parallelism on other hosts, behind the one server that clients know: the head. A
//! host joins it by one connection and is asked over it by HTTP/2, so that it needs no port of its
//! own, and its loss shows at once. Beyond loopback both ends have to have the fleet's secret.

use std::collections::BTreeMap;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use axum::middleware;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};

use super::client::{self, CLIENT, Client};
use super::error::ApiError;
use super::noise::{self, Connection};
use crate::kv::Secret;
use crate::model::{ModelError, Result};

/// The header by which a router chooses a rank of data parallelism.
pub(crate) const RANK: &str = "x-data-parallel-rank";
/// How long a host may take to say who it is, or to answer for its metrics.
const WORD: Duration = Duration::from_secs(5);
/// A connection that is silent for as long is asked whether it lives, and has as long to say so.
const SILENT: Duration = Duration::from_secs(5);
/// How long a head waits for its hosts, and a host for its head.
pub(crate) const MEETING: Duration = Duration::from_secs(300);
/// Between two tries to reach the head.
const AGAIN: Duration = Duration::from_millis(200);
/// Bytes of what a host says of itself, and of the answer.
const LONGEST_WORD: u32 = 64 << 10;
/// Bytes of a host's metrics.
const LONGEST_METRICS: usize = 16 << 20;
/// Connections that have not proven yet who they are.
const MOST_PENDING: usize = 16;
/// Requests that a host is asked at once.
const REQUESTS: u32 = 4096;
/// The headers of a client that a host gets. Credentials, such as `Authorization`, are for the head
/// alone.
const FORWARDED: [HeaderName; 2] = [CONTENT_TYPE, HeaderName::from_static("x-request-id")];

/// The configuration that all ranks must share.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SharedConfig {
    pub(crate) model: String,
    pub(crate) data_parallel_size: usize,
    pub(crate) model_len: usize,
    pub(crate) block_size: usize,
}

impl SharedConfig {
    /// What a host has that is not as here, if anything is.
    fn difference(&self, host: &SharedConfig) -> Option<String> {
        let (here, host) = (json!(self), json!(host));
        let fields =
            here.as_object()?.iter().filter(|(name, value)| host[name.as_str()] != **value);
        let told = |(name, value): (&String, &Value)| {
            format!("{name} is {value} at the head and {} at this host", host[name.as_str()])
        };
        let told: Vec<_> = fields.map(told).collect();
        (!told.is_empty()).then(|| told.join(", "))
    }
}

/// A host's request to join the head.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct JoinRequest {
    pub(crate) ranks: Range<usize>,
    #[serde(rename = "alike")]
    pub(crate) config: SharedConfig,
}

/// The ranks that are on other hosts.
#[derive(Debug)]
pub(crate) struct Hosts {
    config: SharedConfig,
    secret: Option<Secret>,
    /// Which they are; those before them are here.
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
    /// These ranks are on other hosts, and those before them here; none has joined yet.
    pub(crate) fn new(
        config: SharedConfig,
        elsewhere: Range<usize>,
        secret: Option<Secret>,
    ) -> Self {
        Hosts { config, secret, elsewhere, joined: Mutex::default(), news: Notify::new() }
    }

    /// All ranks, here and on other hosts.
    pub(crate) fn size(&self) -> usize {
        self.elsewhere.end
    }

    fn joined(&self) -> MutexGuard<'_, Vec<JoinedHost>> {
        let mut joined = self.joined.lock().unwrap_or_else(PoisonError::into_inner);
        joined.retain(|host| !host.asking.is_closed());
        joined
    }

    /// Whether requests for this rank can be answered.
    pub(crate) fn has(&self, rank: usize) -> bool {
        rank < self.elsewhere.start || self.joined().iter().any(|host| host.ranks.contains(&rank))
    }

    /// Lets hosts join, for ever.
    pub(crate) async fn accept(self: Arc<Self>, listener: TcpListener) {
        let mut unknown = PendingConnections::default();
        loop {
            match listener.accept().await {
                Ok((stream, from)) => {
                    let (hosts, is_known) = (self.clone(), Arc::new(AtomicBool::new(false)));
                    let known = is_known.clone();
                    let task = tokio::spawn(async move {
                        match timeout(WORD, hosts.admit(stream, &known)).await {
                            Ok(Ok(ranks)) => {
                                tracing::info!("{} have joined from {from}", rank_names(&ranks))
                            }
                            Ok(Err(why)) => {
                                tracing::warn!("a host at {from} has not joined: {why}")
                            }
                            Err(_) => tracing::warn!("a host at {from} said nothing for {WORD:?}"),
                        }
                    });
                    unknown.add(PendingConnection {
                        from: from.ip(),
                        task: task.abort_handle(),
                        is_known,
                    });
                }
                Err(why) => {
                    tracing::warn!("hosts cannot join: {why}");
                    sleep(AGAIN).await;
                }
            }
        }
    }

    /// Sets `known` as soon as the other end is a host: it has proven the secret, or said what one
    /// says.
    async fn admit(&self, stream: TcpStream, known: &AtomicBool) -> Result<Range<usize>> {
        let mut stream = noise::accept(stream, self.secret.as_ref()).await?;
        known.store(self.secret.is_some(), Ordering::Relaxed);
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
            .keep_alive_interval(SILENT)
            .keep_alive_timeout(SILENT)
            .keep_alive_while_idle(true)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(ModelError::of)?;
        {
            let mut joined = self.joined();
            // Two may have come at once: the second one finds its connection closed, and asks
            // again.
            if let Some(taken) = overlap(&joined, &ranks) {
                return Err(ModelError::new(taken));
            }
            joined.push(JoinedHost { ranks: ranks.clone(), asking });
        }
        let gone = ranks.clone();
        tokio::spawn(async move {
            let why = connection.await.err().map_or_else(String::new, |why| format!(": {why}"));
            tracing::error!(
                "{} have gone{why}; start them again and they join again",
                rank_names(&gone)
            );
        });
        self.news.notify_one();
        Ok(ranks)
    }

    /// Why a host cannot join.
    fn refusal(&self, joining: &JoinRequest) -> Option<String> {
        let JoinRequest { ranks, config } = joining;
        if let Some(different) = self.config.difference(config) {
            return Some(format!("{different}: start both with the same"));
        }
        if ranks.is_empty() || ranks.start < self.elsewhere.start || ranks.end > self.elsewhere.end
        {
            return Some(format!(
                "{} cannot join: {} are on other hosts than the head; see --data-parallel-start-rank and \
                 --data-parallel-size-local",
                rank_names(ranks),
                rank_names(&self.elsewhere)
            ));
        }
        overlap(&self.joined(), ranks)
    }

    /// Ready when all ranks have joined.
    ///
    /// # Errors
    ///
    /// Some have not, for as long; the words say which.
    pub(crate) async fn all(&self, within: Duration) -> Result<()> {
        let missing = || self.elsewhere.clone().filter(|rank| !self.has(*rank)).collect::<Vec<_>>();
        let all = async {
            while !missing().is_empty() {
                self.news.notified().await;
            }
        };
        timeout(within, all).await.map_err(|_| {
            ModelError::new(format!(
                "ranks {:?} have not joined for {within:?}: start them with --headless, --data-parallel-start-rank and \
                 this head's --data-parallel-address",
                missing()
            ))
        })
    }

    /// Asks the host of a rank, which answers as this server would. An answer takes as long as it
    /// takes; that of a host that is lost ends when its connection does, twice [`SILENT`] later at
    /// most.
    pub(crate) async fn ask(
        &self,
        rank: usize,
        path: &str,
        client: Client,
        headers: &HeaderMap,
        body: Bytes,
    ) -> std::result::Result<Response<Body>, ApiError> {
        let gone = || ApiError::internal(format!("rank {rank} has gone; the head's log says when"));
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
        // A host counts its own from 0.
        request.headers_mut().insert(RANK, HeaderValue::from(rank - ranks.start));
        asking.ready().await.map_err(|_| gone())?;
        let answer = asking.send_request(request).await.map_err(|why| {
            tracing::error!("a request to rank {rank} has no answer: {why}");
            gone()
        })?;
        Ok(answer.map(Body::new))
    }

    /// What this server counts, and the engines on other hosts; those that do not tell are left
    /// out.
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
        if texts.len() == 1 { texts.swap_remove(0) } else { merged(&texts) }
    }
}

/// A connection whose peer is not authenticated yet.
struct PendingConnection {
    from: IpAddr,
    task: AbortHandle,
    is_known: Arc<AtomicBool>,
}

/// All of these connections, the oldest first.
#[derive(Default)]
struct PendingConnections(Vec<PendingConnection>);

impl PendingConnections {
    /// Beyond [`MOST_PENDING`] the oldest connection of the address with most of them ends: silent ones
    /// keep no host out.
    fn add(&mut self, connection: PendingConnection) {
        let all = &mut self.0;
        all.push(connection);
        all.retain(|each| !each.task.is_finished() && !each.is_known.load(Ordering::Relaxed));
        if all.len() > MOST_PENDING {
            let count = |from: IpAddr| all.iter().filter(|each| each.from == from).count();
            let most = all.iter().map(|each| count(each.from)).max();
            if let Some(at) = all.iter().position(|each| Some(count(each.from)) == most) {
                all.remove(at).task.abort();
            }
        }
    }
}

fn rank_names(ranks: &Range<usize>) -> String {
    format!("ranks {} to {}", ranks.start, ranks.end.saturating_sub(1))
}

fn overlap(joined: &[JoinedHost], ranks: &Range<usize>) -> Option<String> {
    let taken =
        joined.iter().find(|host| host.ranks.start < ranks.end && ranks.start < host.ranks.end)?;
    Some(format!(
        "{} cannot join: {} are there; end that host first",
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
    timeout(WORD, text).await.ok().flatten()
}

/// One text of several of Prometheus's. Of all but the first there is what an engine has counted:
/// the rest has no label that would tell it apart.
fn merged(texts: &[String]) -> String {
    let mut families: BTreeMap<&str, (Vec<&str>, Vec<&str>)> = BTreeMap::new();
    for (at, text) in texts.iter().enumerate() {
        let mut name = "";
        for line in text.lines() {
            let Some(head) = line.strip_prefix("# ") else {
                if at == 0 || line.contains("engine=\"") {
                    families.entry(name).or_default().1.push(line);
                }
                continue;
            };
            name = head.split(' ').nth(1).unwrap_or_default();
            let heads = &mut families.entry(name).or_default().0;
            if !heads.contains(&line) {
                heads.push(line);
            }
        }
    }
    let lines = families.into_values().filter(|(_, lines)| !lines.is_empty());
    lines
        .flat_map(|(heads, lines)| heads.into_iter().chain(lines))
        .flat_map(|line| [line, "\n"])
        .collect()
}

/// Errors: `address` is beyond loopback, and there is no secret to prove there.
pub(crate) fn check_reach(address: SocketAddr, secret: Option<&Secret>) -> Result<()> {
    if address.ip().to_canonical().is_loopback() || secret.is_some() {
        return Ok(());
    }
    Err(ModelError::new(format!(
        "a server and its further hosts meet at {address}, beyond this machine, where both prove to have the fleet's \
         secret, and there is none here: `kvx secret FILE` makes one, KVX_SECRET_FILE names it, at all of them the same"
    )))
}

/// Answers the head's requests until `stop` is ready and answers have ended, at most `drain` later.
/// A head that is lost is looked for again. `joined` is told the first time.
///
/// # Errors
///
/// The head refuses, or is not to be reached; the words say what to do.
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
        let mut serving = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        serving.timer(TokioTimer::new()).keep_alive_interval(SILENT).keep_alive_timeout(SILENT);
        serving.max_concurrent_streams(REQUESTS);
        let router = router.clone().layer(middleware::from_fn(client::set_by_head));
        let service = TowerToHyperService::new(router);
        let mut connection = pin!(serving.serve_connection(TokioIo::new(stream), service));
        tokio::select! {
            ended = &mut connection => {
                let why = ended.err().map_or_else(String::new, |why| format!(": {why}"));
                tracing::warn!("the head at {}:{} has gone{why}; looking for it", head.0, head.1);
            }
            () = &mut stop => {
                connection.as_mut().graceful_shutdown();
                // It has ended, or its answers have taken too long.
                let _ = timeout(drain, connection).await;
                return Ok(());
            }
        }
    }
}

/// A connection to the head, which has let this host in.
async fn join(
    (host, port): &(String, u16),
    joining: &JoinRequest,
    secret: Option<&Secret>,
) -> Result<Box<dyn Connection>> {
    let until = Instant::now() + MEETING;
    let stream = loop {
        let why = match timeout(WORD, TcpStream::connect((host.as_str(), *port))).await {
            Ok(Ok(stream)) => break stream,
            Ok(Err(why)) => why.to_string(),
            Err(_) => "no answer".to_owned(),
        };
        if Instant::now() > until {
            return Err(ModelError::new(format!(
                "no head at {host}:{port} for {MEETING:?}: {why}; --data-parallel-address and --data-parallel-rpc-port are \
                 those that the head was started with"
            )));
        }
        sleep(AGAIN).await;
    };
    check_reach(stream.peer_addr().map_err(ModelError::of)?, secret)?;
    let unlike = |why: &str| {
        let secret = match secret {
            Some(_) => "",
            None => ", or has it a secret, which is to be in KVX_SECRET_FILE here too",
        };
        ModelError::new(format!(
            "{host}:{port} does not answer as a head does{why}: is it one{secret}?"
        ))
    };
    let (stream, refused): (_, Option<String>) = timeout(WORD, async {
        let mut stream = noise::connect(stream, secret).await?;
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

async fn write_message(stream: &mut impl Connection, word: &impl Serialize) -> Result<()> {
    let word = serde_json::to_vec(word).map_err(ModelError::of)?;
    let framed = [&(word.len() as u32).to_be_bytes()[..], &word].concat();
    stream.write_all(&framed).await.map_err(ModelError::of)
}

async fn read_message<T: DeserializeOwned>(stream: &mut impl Connection) -> Result<T> {
    let len = stream.read_u32().await.map_err(ModelError::of)?;
    if len > LONGEST_WORD {
        return Err(ModelError::new(format!(
            "a word of {len} bytes is none of a host's: another program's port?"
        )));
    }
    let mut word = vec![0; len as usize];
    stream.read_exact(&mut word).await.map_err(ModelError::of)?;
    serde_json::from_slice(&word).map_err(ModelError::of)
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;

    use super::*;

    fn config() -> SharedConfig {
        SharedConfig { model: "m".into(), data_parallel_size: 4, model_len: 64, block_size: 16 }
    }

    #[test]
    fn hosts_of_another_model_or_of_ranks_that_are_here_do_not_join() {
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

    #[test]
    fn metrics_of_all_engines_are_one_text() {
        let here = "# TYPE a counter\na{engine=\"0\"} 1\n# TYPE b gauge\nb 2\n".to_owned();
        let there = "# TYPE a counter\na{engine=\"1\"} 3\n# TYPE b gauge\nb 4\n".to_owned();
        let one = "# TYPE a counter\na{engine=\"0\"} 1\na{engine=\"1\"} 3\n# TYPE b gauge\nb 2\n";
        assert_eq!(merged(&[here, there]), one);
    }

    #[test]
    fn without_a_secret_hosts_meet_on_this_machine_only() {
        let secret = Secret::from_bytes([1; Secret::LEN]);
        for (address, is_near) in [
            ("127.0.0.1:1", true),
            ("[::1]:1", true),
            ("[::ffff:127.0.0.1]:1", true),
            ("10.0.0.1:1", false),
            ("0.0.0.0:1", false),
        ] {
            let address = address.parse().unwrap();
            assert_eq!(check_reach(address, None).is_ok(), is_near, "{address}");
            assert!(check_reach(address, Some(&secret)).is_ok());
        }
    }

    #[tokio::test]
    async fn the_oldest_connection_of_the_largest_crowd_makes_room() {
        let mut unknown = PendingConnections::default();
        let mut add = |host: u8, is_known: bool| {
            let task = tokio::spawn(std::future::pending::<()>());
            let (from, is_known) =
                (IpAddr::from([10, 0, 0, host]), Arc::new(AtomicBool::new(is_known)));
            unknown.add(PendingConnection { from, task: task.abort_handle(), is_known });
            task
        };
        let alone = add(1, false);
        let known = add(2, true);
        let crowd: Vec<_> = (0..3 * MOST_PENDING).map(|_| add(2, false)).collect();
        for (at, task) in crowd.into_iter().enumerate() {
            let ended = timeout(AGAIN, task).await.is_ok();
            assert_eq!(ended, at < 2 * MOST_PENDING + 1, "{at}");
        }
        assert!(!alone.is_finished() && !known.is_finished());
    }

    #[tokio::test]
    async fn strangers_at_the_heads_port_are_bounded_and_let_nobody_in() {
        for secret in [None, Some(Secret::from_bytes([1; Secret::LEN]))] {
            meet_at_a_port_with_strangers(secret).await;
        }
    }

    /// Answers with the names of the headers that a request had.
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
        // One that is of another size is told why; one that fits is let in.
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
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (at, joining, proven) = (head.clone(), ours.clone(), secret.cloned());
        let following = tokio::spawn(async move {
            let stopped = pin!(async {
                let _ = stopped.await;
            });
            follow(&at, &joining, proven.as_ref(), there, || {}, stopped, WORD).await
        });
        hosts.all(WORD).await.unwrap();
        assert!(hosts.has(0) && hosts.has(3));
        assert!(join(&head, &ours, secret).await.err().unwrap().to_string().contains("are there"));
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
        timeout(WORD, following).await.unwrap().unwrap().unwrap();
        let until = Instant::now() + WORD;
        while hosts.has(3) && Instant::now() < until {
            sleep(AGAIN).await;
        }
        let refusal = hosts
            .ask(3, "/", Client::ThisMachine, &HeaderMap::new(), Bytes::new())
            .await
            .unwrap_err();
        assert_eq!(
            (refusal.status, refusal.words.contains("rank 3 has gone")),
            (StatusCode::INTERNAL_SERVER_ERROR, true)
        );
    }
}
