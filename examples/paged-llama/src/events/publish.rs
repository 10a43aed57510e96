//! The sockets of a publisher: PUB for batches, ROUTER for replays.

use std::sync::Arc;
use std::time::Duration;

use kvx_proxy::server::zmtp::{
    Budget, Command, EventConnection, Input, MessageLimits, SocketType, parse_endpoint,
};
use kvx_vllm::events::replay_end;
use serde::Deserialize;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, interval_at, timeout};

use super::CachePublisher;
use crate::model::{ModelError, Result};

/// The connections to a socket.
const CONNECTIONS: usize = 64;
/// A subscription, or a request for a replay, is short.
const REQUEST: MessageLimits = MessageLimits { frames: 3, bytes: 1024 };
/// The subscriptions of a connection.
const SUBSCRIPTIONS: usize = 16;
/// The time for a greeting.
const GREETING: Duration = Duration::from_secs(5);
/// The time after which a silent connection is closed. Subscribers answer pings.
const IDLE: Duration = Duration::from_secs(90);
/// The time between two pings of a subscriber.
const PING: Duration = Duration::from_secs(30);
/// The time in which a subscriber must read a message.
const SEND: Duration = Duration::from_secs(10);
/// The time in which it must read a replay: this server keeps the snapshot until then.
const REPLAY: Duration = Duration::from_secs(60);

/// vLLM's `--kv-events-config`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EventsConfig {
    /// Publishes events.
    pub enable_kv_cache_events: bool,
    /// `zmq`, or `null` for none; by default `zmq` if events are enabled.
    pub publisher: Option<String>,
    /// The address of the PUB socket. `tcp://*:PORT` is all addresses of this host.
    pub endpoint: String,
    /// The address of the socket for replays, if there is one.
    pub replay_endpoint: Option<String>,
    /// The number of batches that are kept for replays.
    pub buffer_steps: usize,
    /// The number of batches that a subscriber may be behind, or 0 for `buffer_steps`.
    pub hwm: usize,
    /// Accepted for vLLM's command lines: there is no queue before the kept batches.
    pub max_queue_size: usize,
    /// The topic of all messages.
    pub topic: String,
}

impl Default for EventsConfig {
    fn default() -> Self {
        EventsConfig {
            enable_kv_cache_events: false,
            publisher: None,
            endpoint: "tcp://127.0.0.1:5557".to_owned(),
            replay_endpoint: None,
            buffer_steps: 10_000,
            hwm: 100_000,
            max_queue_size: 100_000,
            topic: String::new(),
        }
    }
}

impl EventsConfig {
    /// Parses the JSON of `--kv-events-config`.
    ///
    /// # Errors
    ///
    /// Fails if a key is unknown or a value is invalid.
    pub fn from_json(json: &str) -> Result<Self> {
        let failed =
            |why: &dyn std::fmt::Display| ModelError::new(format!("--kv-events-config: {why}"));
        let config: EventsConfig = serde_json::from_str(json).map_err(|error| failed(&error))?;
        let endpoints = [Some(&config.endpoint), config.replay_endpoint.as_ref()];
        for endpoint in endpoints.into_iter().flatten() {
            parse_endpoint(endpoint).map_err(|error| failed(&error))?;
        }
        match config.publisher.as_deref() {
            None | Some("zmq" | "null") => Ok(config),
            Some(other) => Err(failed(&format!(
                "publisher is {other:?}; this server has \"zmq\" and \"null\""
            ))),
        }
    }

    /// Returns true if events are published.
    pub fn is_on(&self) -> bool {
        self.enable_kv_cache_events && self.publisher.as_deref() != Some("null")
    }
}

/// Listens for subscribers of a publisher. As in vLLM, the ports are those of the endpoints plus
/// the data parallel `rank`. Ends with the returned tasks.
///
/// # Errors
///
/// Fails if an endpoint is invalid or its port is taken.
pub async fn listen(
    publisher: &CachePublisher,
    config: &EventsConfig,
    rank: usize,
) -> Result<tokio::task::JoinSet<()>> {
    let mut tasks = tokio::task::JoinSet::new();
    let subscribers = bind(&config.endpoint, rank).await?;
    let settings = Arc::new(config.clone());
    tasks.spawn(accept(subscribers, publisher.clone(), Arc::clone(&settings), SocketType::Pub));
    if let Some(endpoint) = &config.replay_endpoint {
        let replays = bind(endpoint, rank).await?;
        tasks.spawn(accept(replays, publisher.clone(), settings, SocketType::Router));
    }
    Ok(tasks)
}

async fn bind(endpoint: &str, rank: usize) -> Result<TcpListener> {
    let failed = |why: &dyn std::fmt::Display| {
        ModelError::new(format!("cannot publish KV events at {endpoint} (rank {rank}): {why}"))
    };
    let (host, port) = parse_endpoint(endpoint).map_err(|error| failed(&error))?;
    let port = match port {
        0 => Some(0),
        port => u16::try_from(rank).ok().and_then(|rank| port.checked_add(rank)),
    };
    let port = port.ok_or_else(|| failed(&"the port plus the rank is above 65535"))?;
    let host = if host == "*" { "::".to_owned() } else { host };
    let mut bound = TcpListener::bind((host.as_str(), port)).await;
    if bound.is_err() && host == "::" {
        bound = TcpListener::bind(("0.0.0.0", port)).await; // a host without IPv6
    }
    let listener = bound.map_err(|error| {
        failed(&format!(
            "{error}; --kv-events-config names an address of this host and a free port"
        ))
    })?;
    let address = listener.local_addr().map_err(ModelError::of)?;
    if !address.ip().is_loopback() {
        tracing::warn!(
            "KV events are published at {address}: everyone who reaches this port can read the \
             prompts' tokens"
        );
    }
    tracing::info!(rank, "publishing KV events at {address}");
    Ok(listener)
}

/// Serves the connections of a socket.
async fn accept(
    listener: TcpListener,
    publisher: CachePublisher,
    config: Arc<EventsConfig>,
    kind: SocketType,
) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let mut serving = tokio::task::JoinSet::new();
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                // Too many open files: they may be closed later.
                Err(_) => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
            Some(_) = serving.join_next() => continue,
        };
        // Beyond the limit a connection is closed at once.
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
        let (publisher, config) = (publisher.clone(), Arc::clone(&config));
        serving.spawn(async move {
            let served = serve(stream, &publisher, &config, kind).await;
            if let Err(error) = served {
                tracing::debug!("a subscriber of KV events is gone: {error}");
            }
            drop(place);
        });
    }
}

async fn serve(
    stream: TcpStream,
    publisher: &CachePublisher,
    config: &EventsConfig,
    kind: SocketType,
) -> kvx_proxy::Result<()> {
    let budget = Budget::new(64 << 10);
    let mut connection = EventConnection::open(stream, kind, REQUEST, &budget, GREETING).await?;
    match kind {
        SocketType::Pub => subscriber(connection, publisher, config).await,
        _ => loop {
            let Ok(input) = timeout(IDLE, connection.next()).await else { return Ok(()) };
            match input? {
                None => return Ok(()),
                Some(Input::Command(command)) => answer(&mut connection, command).await?,
                Some(Input::Message(message)) => {
                    // A DEALER sends an empty frame first, and a REQ's socket does so by itself.
                    let [.., from] = message.frames() else { continue };
                    let Ok(from) = <[u8; 8]>::try_from(&from[..]) else { continue };
                    let from = u64::from_be_bytes(from);
                    let replay = replay(&mut connection, publisher, config, from);
                    let Ok(sent) = timeout(REPLAY, replay).await else { return Ok(()) };
                    sent?;
                }
            }
        },
    }
}

/// Answers a ping, which shows a subscriber that this server lives.
async fn answer(connection: &mut EventConnection, command: Command) -> kvx_proxy::Result<()> {
    match command {
        Command::Ping { context } => connection.command(&Command::Pong { context }, SEND).await,
        _ => Ok(()),
    }
}

/// The subscriptions of a connection.
#[derive(Default)]
struct Topics(Vec<Vec<u8>>);

impl Topics {
    fn add(&mut self, topic: &[u8]) {
        if self.0.len() < SUBSCRIPTIONS {
            self.0.push(topic.to_owned());
        }
    }

    /// Removes one of equal subscriptions.
    fn remove(&mut self, topic: &[u8]) {
        if let Some(at) = self.0.iter().position(|known| known == topic) {
            self.0.swap_remove(at);
        }
    }

    fn contain(&self, topic: &[u8]) -> bool {
        self.0.iter().any(|known| topic.starts_with(known))
    }
}

/// Sends each new batch to a subscriber of the topic.
async fn subscriber(
    mut connection: EventConnection,
    publisher: &CachePublisher,
    config: &EventsConfig,
) -> kvx_proxy::Result<()> {
    let mut published = publisher.0.published.subscribe();
    let mut next = *published.borrow_and_update();
    let mut topics = Topics::default();
    let (mut pings, mut last_input) = (interval_at(Instant::now() + PING, PING), Instant::now());
    loop {
        tokio::select! {
            _ = pings.tick() => {
                if last_input.elapsed() > IDLE {
                    return Ok(());
                }
                let ping = Command::Ping { context: Vec::new() };
                connection.command(&ping, SEND).await?;
                continue;
            }
            input = connection.next() => match input.inspect(|_| last_input = Instant::now())? {
                None => return Ok(()),
                Some(Input::Command(Command::Subscribe(topic))) => topics.add(&topic),
                Some(Input::Command(Command::Cancel(topic))) => topics.remove(&topic),
                Some(Input::Command(command)) => answer(&mut connection, command).await?,
                // Sockets before ZMTP 3.1 subscribe by messages.
                Some(Input::Message(message)) => {
                    match message.frames().first().and_then(|frame| frame.split_first()) {
                        Some((1, topic)) => topics.add(topic),
                        Some((0, topic)) => topics.remove(topic),
                        _ => {}
                    }
                }
            },
            changed = published.changed() => {
                if changed.is_err() {
                    return Ok(());
                }
            }
        }
        let newest = *published.borrow_and_update();
        if !topics.contain(config.topic.as_bytes()) {
            next = newest;
            continue;
        }
        // As a PUB socket does, drop what a slow subscriber does not take. 0 is no limit.
        if config.hwm > 0 {
            next = next.max(newest.saturating_sub(config.hwm as u64));
        }
        while next < newest {
            let Some((number, batch)) = publisher.log().from(next) else { break };
            let number_frame = number.to_be_bytes();
            let frames: [&[u8]; 3] = [config.topic.as_bytes(), &number_frame, &batch];
            connection.send(&frames, SEND).await?;
            next = number + 1;
        }
    }
}

/// Sends the kept batches from a number on, or a snapshot if some of them are not kept any more.
async fn replay(
    connection: &mut EventConnection,
    publisher: &CachePublisher,
    config: &EventsConfig,
    from: u64,
) -> kvx_proxy::Result<()> {
    let topic = config.topic.as_bytes();
    let (end, is_lost) = {
        let log = publisher.log();
        (log.next(), log.is_lost(from))
    };
    let mut next = from;
    if is_lost {
        let Some(snapshot) = publisher.snapshot().await else {
            return Err("slow readers hold all snapshots".to_owned().into());
        };
        for (number, batch) in &snapshot.batches {
            connection.send(&[&b""[..], topic, &number.to_be_bytes(), batch], SEND).await?;
        }
        next = snapshot.next;
    }
    while next < end {
        let Some((number, batch)) = publisher.log().from(next) else { break };
        connection.send(&[&b""[..], topic, &number.to_be_bytes(), &batch], SEND).await?;
        next = number + 1;
    }
    connection.send(&replay_end(&config.topic), SEND).await
}
