//! Tests of KV cache events: servers that publish, and routers that subscribe to them.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use kvx_proxy::server::zmtp::{
    Budget, Command as SocketCommand, EventConnection, Input, MessageLimits, SocketType,
};
use kvx_testkit::{Child, free_port, test};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};

use crate::serve::server::{LIMIT, Server, ServerArgs, greedy, model, prompt};

/// The time after which a router may not count lost blocks as cached any more.
const NO_CREDIT: Duration = Duration::from_secs(10);
const KEY: &str = "authorization: Bearer operator\r\n";
/// A prompt of 200 tokens has 12 full blocks of 16.
const TOKENS: u64 = 200;
const CACHED: u64 = 192;

/// The ports of a server that publishes events.
#[derive(Clone, Copy)]
struct Ports {
    http: u16,
    events: u16,
}

impl Ports {
    fn free() -> Self {
        let http = free_port(2).unwrap();
        Ports { http, events: http + 1 }
    }

    fn config(self) -> String {
        let endpoint = |port| format!("tcp://127.0.0.1:{port}");
        let config = json!({
            "enable_kv_cache_events": true, "publisher": "zmq",
            "endpoint": endpoint(self.events), "replay_endpoint": endpoint(self.events + 1),
        });
        config.to_string()
    }

    fn start(self, model: &Path) -> Server {
        let (http, config) = (self.http.to_string(), self.config());
        let arguments =
            ["--port", &http, "--kv-events-config", &config, "--enable-prompt-tokens-details"];
        Server::start(model, ServerArgs { arguments: &arguments, ..ServerArgs::default() })
    }

    /// Returns the name of the server, and the flags that tell a router of its events.
    fn flags(self, events: u16, has_replay: bool) -> Vec<String> {
        let of = |port: u16| format!("127.0.0.1:{}=tcp://127.0.0.1:{port}", self.http);
        let mut flags = vec!["--events".to_owned(), of(events)];
        if has_replay {
            flags.extend(["--events-replay".to_owned(), of(self.events + 1)]);
        }
        flags
    }
}

/// Starts a router in front of these servers, each of which serves alone.
fn router(servers: &[Ports], flags: &[Vec<String>]) -> Server {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command.args(["proxy", "--port", "0", "--access-log", "off"]);
    command.env("ADMIN_API_KEY", "operator");
    for ports in servers {
        command.args(["--decode", &format!("http://127.0.0.1:{}", ports.http)]);
    }
    command.args(flags.iter().flatten());
    let router = Server::spawn(command).listening();
    let until = Instant::now() + LIMIT;
    while router.get("/ready").0 != 200 {
        assert!(Instant::now() < until, "the router does not find its servers");
        std::thread::sleep(Duration::from_millis(20));
    }
    router
}

/// Returns what a router's status says about a server's cache.
fn cache(router: &Server, ports: Ports) -> Value {
    let (status, text) = router.get("/status");
    assert_eq!(status, 200, "{text}");
    let status: Value = serde_json::from_str(&text).unwrap();
    let url = format!("http://127.0.0.1:{}", ports.http);
    let instances = status["instances"].as_array().unwrap().iter();
    let mut found = instances.filter(|one| one["url"] == url.as_str());
    found.next().unwrap_or_else(|| panic!("no {url}: {text}"))["cache"].clone()
}

/// Waits until a router's knowledge of a server's cache fits.
#[track_caller]
fn until(router: &Server, ports: Ports, within: Duration, fits: impl Fn(&Value) -> bool) {
    let end = Instant::now() + within;
    loop {
        let cache = cache(router, ports);
        if fits(&cache) {
            return;
        }
        assert!(Instant::now() < end, "after {within:?}: {cache}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[track_caller]
fn knows(router: &Server, ports: Ports, knowledge: &str, blocks: u64) {
    until(router, ports, LIMIT, |cache| {
        cache["knowledge"] == knowledge && cache["blocks"].as_u64() >= Some(blocks)
    });
}

/// Returns the winner's port, and what the router says about one server.
fn explain(router: &Server, body: &Value, ports: Ports) -> (u16, Value) {
    let (status, text) = router.call_with(KEY, "POST", "/explain", Some(body));
    assert_eq!(status, 200, "{text}");
    let explained: Value = serde_json::from_str(&text).unwrap();
    let side = &explained["decode"];
    let name = format!("127.0.0.1:{}", ports.http);
    let mut candidates = side["candidates"].as_array().unwrap().iter();
    let one = candidates.find(|one| one["instance"] == name.as_str()).unwrap().clone();
    let winner = side["winner"].as_str().and_then(|winner| winner.rsplit_once(':'));
    (winner.map_or(0, |(_, port)| port.parse().unwrap()), one)
}

/// Asks a server or a router, and returns how many tokens were cached.
fn ask(server: &Server, body: &Value) -> u64 {
    let (status, answer) = server.post("/v1/completions", body);
    assert_eq!(status, 200, "{answer}");
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
}

#[test]
fn routers_know_by_events_what_others_have_sent() {
    let model = model(&["--arch", "llama"]);
    let ports = [Ports::free(), Ports::free()];
    let servers = ports.map(|ports| ports.start(&model));
    let flags = ports.map(|ports| ports.flags(ports.events, true));
    let routers = [(); 2].map(|()| router(&ports, &flags));
    for router in &routers {
        ports.iter().for_each(|ports| knows(router, *ports, "exact", 0));
    }
    let text: String = (0..300).map(|at| char::from(97 + (at * 7 % 26) as u8)).collect();
    let text = json!({"model": "m", "prompt": text, "max_tokens": 1, "temperature": 0});
    let mut blocks = 0;
    for (body, cached) in [(greedy(&prompt(1, TOKENS), 1), CACHED), (text, 256)] {
        // No router has seen it.
        assert_eq!(ask(&servers[1], &body), 0);
        blocks += cached / 16;
        for router in &routers {
            knows(router, ports[1], "exact", blocks);
            let (winner, one) = explain(router, &body, ports[1]);
            assert_eq!(winner, ports[1].http, "{one}");
            assert!(one["cached_tokens"].as_u64() >= Some(cached), "{one}");
            assert_eq!(one["knowledge"], "exact");
            assert!(ask(router, &body) >= cached);
        }
    }
    for router in &routers {
        let asked = router.metric_of("kvx_proxy_tokenizations_total", "result=\"ok\"");
        assert!(asked >= 2.0, "the text's tokens were asked for");
        assert_eq!(router.metric_of("kvx_proxy_tokenizations_total", "result=\"failed\""), 0.0);
        let other = format!("127.0.0.1:{}", ports[0].http);
        assert_eq!(router.metric_of("kvx_proxy_instance_requests_total", &other), 0.0);
        assert_eq!(router.metric("kvx_proxy_instance_cache_knowledge"), 4.0, "both are exact");
    }
}

#[test]
fn a_server_that_is_killed_and_restarted_under_its_name_has_no_stale_credit() {
    let model = model(&["--arch", "llama"]);
    let ports = [Ports::free(), Ports::free()];
    let [_one, two] = ports.map(|ports| ports.start(&model));
    let router = router(&ports, &ports.map(|ports| ports.flags(ports.events, true)));
    let bodies: Vec<Value> = (0..4).map(|from| greedy(&prompt(from, TOKENS), 1)).collect();
    bodies.iter().for_each(|body| assert_eq!(ask(&two, body), 0));
    // The prompt that the router sends there must not count afterwards either.
    knows(&router, ports[1], "exact", 40);
    assert_eq!(ask(&router, &bodies[0]), CACHED);
    drop(two); // kills it
    until(&router, ports[1], NO_CREDIT, |cache| {
        cache["knowledge"] == "history" && cache["blocks"] == 0
    });
    for body in &bodies {
        let (_, one) = explain(&router, body, ports[1]);
        assert_eq!(one["cached_tokens"], 0, "{one}");
        assert_eq!(ask(&router, body), 0, "the other server computes it");
    }
    let two = ports[1].start(&model);
    knows(&router, ports[1], "exact", 0);
    for body in &bodies {
        let (_, one) = explain(&router, body, ports[1]);
        assert_eq!(one["cached_tokens"], 0, "it is another life: {one}");
    }
    let new = greedy(&prompt(9, TOKENS), 1);
    assert_eq!(ask(&two, &new), 0);
    knows(&router, ports[1], "exact", CACHED / 16);
    let (_, one) = explain(&router, &new, ports[1]);
    assert_eq!((&one["cached_tokens"], &one["knowledge"]), (&json!(CACHED), &json!("exact")));
}

/// Passes events on, and drops them while `drops` is set.
#[derive(Default)]
struct Relay {
    drops: AtomicBool,
    /// The number of connections whose subscription the server has taken.
    subscribed: AtomicU64,
    /// The number of connections that have dropped a batch.
    have_dropped: AtomicU64,
}

impl Relay {
    fn start(from: u16) -> (Arc<Relay>, u16) {
        let relay = Arc::new(Relay::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::clone(&relay);
        std::thread::spawn(move || {
            let local = tokio::task::LocalSet::new();
            local.block_on(&runtime, async {
                while let Ok((stream, _)) = listener.accept().await {
                    let relay = Arc::clone(&shared);
                    // It ends with its connections.
                    tokio::task::spawn_local(async move { relay.pass(stream, from).await });
                }
            });
        });
        (relay, port)
    }

    async fn pass(&self, to_router: TcpStream, from: u16) -> Option<()> {
        let (limits, budget) = (MessageLimits { frames: 4, bytes: 1 << 20 }, Budget::new(4 << 20));
        let open = |stream, kind| EventConnection::open(stream, kind, limits, &budget, LIMIT);
        let mut to = open(to_router, SocketType::Pub).await.ok()?;
        let from = TcpStream::connect(("127.0.0.1", from)).await.ok()?;
        let mut from = open(from, SocketType::Sub).await.ok()?;
        let (mut has_dropped, own) = (false, b"relay".to_vec());
        loop {
            tokio::select! {
                input = from.next() => match input.ok()?? {
                    Input::Message(batch) => {
                        if !self.drops.load(SeqCst) {
                            to.send(batch.frames(), LIMIT).await.ok()?;
                        } else if !std::mem::replace(&mut has_dropped, true) {
                            self.have_dropped.fetch_add(1, SeqCst);
                        }
                    }
                    Input::Command(SocketCommand::Pong { context }) if context == own => {
                        self.subscribed.fetch_add(1, SeqCst);
                    }
                    Input::Command(command) => to.command(&command, LIMIT).await.ok()?,
                },
                input = to.next() => match input.ok()?? {
                    Input::Message(subscription) => {
                        from.send(subscription.frames(), LIMIT).await.ok()?;
                        let ping = SocketCommand::Ping { context: own.clone() };
                        from.command(&ping, LIMIT).await.ok()?;
                    }
                    Input::Command(command) => from.command(&command, LIMIT).await.ok()?,
                },
            }
        }
    }
}

#[track_caller]
fn reaches(counter: &AtomicU64, count: u64) {
    let end = Instant::now() + LIMIT;
    while counter.load(SeqCst) < count {
        assert!(Instant::now() < end, "{count} are expected, not {counter:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn dropped_events_are_replayed_or_leave_no_credit() {
    let model = model(&["--arch", "llama"]);
    let ports = Ports::free();
    let server = ports.start(&model);
    let (relay, port) = Relay::start(ports.events);
    let [replays, none] = [true, false].map(|has| router(&[ports], &[ports.flags(port, has)]));
    knows(&replays, ports, "exact", 0);
    knows(&none, ports, "degraded", 0);
    reaches(&relay.subscribed, 2);
    let bodies: Vec<Value> = (0..3).map(|from| greedy(&prompt(from, TOKENS), 1)).collect();
    let blocks = CACHED / 16;
    ask(&server, &bodies[0]);
    // The first batch of all shows that none is missing.
    [&replays, &none].into_iter().for_each(|router| knows(router, ports, "exact", blocks));
    relay.drops.store(true, SeqCst);
    ask(&server, &bodies[1]);
    reaches(&relay.have_dropped, 2);
    relay.drops.store(false, SeqCst);
    ask(&server, &bodies[2]);
    until(&replays, ports, LIMIT, |cache| cache["gaps"].as_u64() >= Some(1));
    knows(&replays, ports, "exact", 3 * blocks);
    until(&none, ports, NO_CREDIT, |cache| cache["knowledge"] == "degraded");
    for (at, body) in bodies.iter().enumerate() {
        let (_, one) = explain(&replays, body, ports);
        assert_eq!(one["cached_tokens"], CACHED, "{at}: {one}");
        if at < 2 {
            let (_, one) = explain(&none, body, ports);
            assert_eq!(one["cached_tokens"], 0, "{at}: {one}");
        }
    }
    assert!(cache(&none, ports)["gaps"].as_u64() >= Some(1));
}

#[test]
fn predictions_equal_what_prefills_report() {
    let model = model(&["--arch", "llama"]);
    let ports = Ports::free();
    let (http, config) = (ports.http.to_string(), ports.config());
    let arguments = ["--port", &http, "--kv-events-config", &config];
    let prefill = Server::with_peers(&model, "TCP", "fail", &arguments);
    let decode = Server::with_peers(&model, "TCP", "fail", &[]);
    let flags = ports.flags(ports.events, true);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let proxy = Server::proxy(&[&prefill], &[&decode], &flags);
    knows(&proxy, ports, "exact", 0);
    let body = greedy(&prompt(1, TOKENS), 4);
    ask(&proxy, &body);
    knows(&proxy, ports, "exact", CACHED / 16);
    for _ in 0..3 {
        ask(&proxy, &body);
    }
    for of in ["predicted", "reported"] {
        let name = format!("kvx_proxy_instance_{of}_cached_tokens_total");
        assert_eq!(proxy.metric_of(&name, "role=\"prefill\""), 3.0 * CACHED as f64, "{of}");
    }
    assert_eq!(proxy.metric("kvx_proxy_cache_drifts_total"), 0.0);
}

/// ZeroMQ's own sockets, as vLLM and routers in Python use them.
const PYTHON: &str = r#"
import json, sys, msgspec, zmq
how, events, replays = sys.argv[1], *(f"tcp://127.0.0.1:{port}" for port in sys.argv[2:])
context = zmq.Context()

def socket(kind):
    one = context.socket(kind)
    one.setsockopt(zmq.RCVTIMEO, 20_000)
    one.setsockopt(zmq.LINGER, 0)
    return one

if how == "subscribe":
    subscriber = socket(zmq.SUB)
    subscriber.connect(events)
    subscriber.subscribe("")
    topic, number, batch = subscriber.recv_multipart()
    dealer = socket(zmq.DEALER)
    dealer.connect(replays)
    dealer.send_multipart([b"", (0).to_bytes(8, "big")])
    batches = []
    while True:
        empty, topic, number, batch = dealer.recv_multipart()
        if number == b"\xff" * 8:
            break
        batches.append(msgspec.msgpack.decode(batch))
    first = batches[0][1][0]
    print(json.dumps([first["type"], len(first["token_ids"]), len(first["block_hashes"])]), flush=True)
else:
    def batch(first, parent):
        tokens = list(range(first, first + 32))
        stored = ["BlockStored", [first, first + 1], parent, tokens, 16, None, "GPU", None, [None, None], 0, "full_attention", None]
        return msgspec.msgpack.encode([1.5, [stored], 0])
    publisher, router = socket(zmq.PUB), socket(zmq.ROUTER)
    publisher.bind(events)
    router.bind(replays)
    print("bound", flush=True)
    peer, empty, number = router.recv_multipart()
    assert (empty, number) == (b"", bytes(8)), (empty, number)
    router.send_multipart([peer, b"", b"", bytes(8), batch(0, None)])
    router.send_multipart([peer, b"", b"", b"\xff" * 8, b""])
    publisher.send_multipart([b"", (1).to_bytes(8, "big"), batch(32, 1)])
    sys.stdin.read()
"#;

fn python(test: &str, how: &str, ports: Ports) -> Option<Child> {
    let nixl = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/peers/nixl");
    let python = nixl.join("venv/bin/python");
    if !python.exists() {
        kvx_testkit::skip(test, "pyzmq is not installed", "cargo xtask test --install");
        return None;
    }
    let mut command = Command::new(python);
    command.args(["-c", PYTHON, how, &ports.events.to_string(), &(ports.events + 1).to_string()]);
    Some(Child::start(command).unwrap())
}

#[test]
fn zeromq_itself_subscribes_to_a_server() {
    let name = "serve::events::zeromq_itself_subscribes_to_a_server";
    let ports = Ports::free();
    let Some(subscriber) = python(name, "subscribe", ports) else { return };
    let server = ports.start(&model(&["--arch", "llama"]));
    // Its subscription arrives at some time.
    let end = Instant::now() + 2 * LIMIT;
    let line = (0..).find_map(|from| {
        assert!(Instant::now() < end, "it receives no batch");
        ask(&server, &greedy(&prompt(from, TOKENS), 1));
        subscriber.hear(Duration::from_millis(200)).ok()
    });
    let first: Value = serde_json::from_str(&line.unwrap()).unwrap();
    let blocks = CACHED / 16;
    assert_eq!(first, json!(["BlockStored", 16 * blocks, blocks]));
}

#[test]
fn routers_subscribe_to_zeromq_itself() {
    let name = "serve::events::routers_subscribe_to_zeromq_itself";
    let ports = Ports::free();
    let Some(publisher) = python(name, "publish", ports) else { return };
    assert_eq!(publisher.hear(LIMIT).unwrap(), "bound");
    let http = ports.http.to_string();
    let arguments = ["--port", &http];
    let _server = Server::start(
        &model(&["--arch", "llama"]),
        ServerArgs { arguments: &arguments, ..ServerArgs::default() },
    );
    let router = router(&[ports], &[ports.flags(ports.events, true)]);
    // The array of vLLM 0.23 in a replay, and the batch that was published after it.
    knows(&router, ports, "exact", 4);
    let body = greedy(&json!((0..65).collect::<Vec<u32>>()), 1);
    let (_, one) = explain(&router, &body, ports);
    assert_eq!((&one["cached_tokens"], &one["knowledge"]), (&json!(64), &json!("exact")));
}
