//! `/v1/realtime`: a WebSocket through the router.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::Response;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use kvx_proxy::{Handle, Proxy, Setup};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinHandle;

use crate::{CUT_OFF, within};

/// An instance that answers every WebSocket request with the same text, and reports what it
/// receives.
struct Instance {
    address: SocketAddr,
    /// The heads of WebSocket requests, then the received texts, then `None` at the end.
    got: UnboundedReceiver<Option<String>>,
}

async fn head(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    Some(String::from_utf8(head).unwrap().to_ascii_lowercase())
}

impl Instance {
    async fn start(answer: &'static str) -> Self {
        Self::of_model("m", answer).await
    }

    async fn of_model(model: &str, answer: &'static str) -> Self {
        let models = serde_json::json!({"data": [{ "id": model }]}).to_string();
        let models = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{models}", models.len());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, got) = unbounded_channel();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let (sender, models) = (sender.clone(), models.clone());
                tokio::spawn(async move {
                    while let Some(head) = head(&mut stream).await {
                        if !head.contains("upgrade: websocket") {
                            stream.write_all(models.as_bytes()).await.unwrap();
                            continue;
                        }
                        sender.send(Some(head)).unwrap();
                        stream.write_all(answer.as_bytes()).await.unwrap();
                        while answer.contains("101") {
                            let mut bytes = [0; 1024];
                            let length = stream.read(&mut bytes).await.unwrap_or(0);
                            if length == 0 {
                                sender.send(None).unwrap();
                                break;
                            }
                            let text = String::from_utf8(bytes[..length].to_vec()).unwrap();
                            stream.write_all(text.to_uppercase().as_bytes()).await.unwrap();
                            sender.send(Some(text)).unwrap();
                        }
                    }
                });
            }
        });
        Instance { address, got }
    }

    async fn hears(&mut self) -> Option<String> {
        tokio::time::timeout(CUT_OFF, self.got.recv()).await.unwrap().unwrap()
    }
}

const YES: &str = "HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n\
                   sec-websocket-accept: accepted\r\n\r\nhello";

async fn router(instances: &[&Instance], keys: &str) -> (SocketAddr, Handle, JoinHandle<()>) {
    let urls: Vec<_> = instances.iter().map(|one| format!("'http://{}'", one.address)).collect();
    let setup =
        format!("port = 0\naccess_log = 'off'\n{keys}\n[[pool]]\ndecode = [{}]", urls.join(", "));
    let mut proxy = Proxy::bind(Setup::from_toml(&setup).unwrap()).await.unwrap();
    proxy.check_instances().await;
    let (address, handle) = (proxy.local_addr(), proxy.handle());
    (address, handle, tokio::spawn(async { proxy.run().await.unwrap() }))
}

/// Requests a WebSocket. Returns the head of the answer, and the connection.
async fn ask(router: SocketAddr, path: &str, lines: &str) -> (String, TcpStream) {
    let mut stream = within(TcpStream::connect(router)).await;
    let request = format!(
        "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-key: key\r\nsec-websocket-version: 13\r\n{lines}\r\n"
    );
    within(stream.write_all(request.as_bytes())).await;
    let head = tokio::time::timeout(CUT_OFF, head(&mut stream)).await.unwrap().unwrap();
    (head, stream)
}

async fn read(stream: &mut TcpStream, length: usize) -> String {
    let mut bytes = vec![0; length];
    within(stream.read_exact(&mut bytes)).await;
    String::from_utf8(bytes).unwrap()
}

async fn metrics(router: SocketAddr) -> String {
    let mut stream = within(TcpStream::connect(router)).await;
    within(stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"))
        .await;
    let mut text = String::new();
    within(stream.read_to_string(&mut text)).await;
    text
}

async fn wait_for(router: SocketAddr, line: &str) {
    let end = tokio::time::Instant::now() + CUT_OFF;
    loop {
        let text = metrics(router).await;
        if text.lines().any(|one| one == line) {
            return;
        }
        assert!(tokio::time::Instant::now() < end, "not in time: {line}; {text}");
        tokio::time::sleep(Duration::from_millis(10)).await; // between polls
    }
}

#[tokio::test]
async fn bytes_pass_both_ways_until_one_side_ends() {
    let mut instance = Instance::start(YES).await;
    let (router, _handle, _running) = router(&[&instance], "").await;
    let path = "/v1/realtime?model=m";
    let (answer, mut stream) =
        ask(router, path, "x-request-id: mine\r\nx-prefiller-url: http://evil\r\n").await;
    for part in [
        "http/1.1 101",
        "upgrade: websocket",
        "connection: upgrade",
        "sec-websocket-accept: accepted",
    ] {
        assert!(answer.contains(part), "{part}: {answer}");
    }
    assert!(
        answer.contains("x-request-id: mine") && answer.contains("x-kvx-route: passed"),
        "{answer}"
    );
    let asked = instance.hears().await.unwrap();
    for part in [
        "connection: upgrade",
        "upgrade: websocket",
        "sec-websocket-key: key",
        "x-request-id: mine",
        path,
    ] {
        assert!(asked.contains(part), "{part}: {asked}");
    }
    assert!(!asked.contains("evil"), "{asked}");
    assert_eq!(read(&mut stream, 5).await, "hello", "the bytes that arrived with the answer");
    for word in ["one", "another"] {
        within(stream.write_all(word.as_bytes())).await;
        assert_eq!(instance.hears().await.as_deref(), Some(word));
        assert_eq!(read(&mut stream, word.len()).await, word.to_uppercase());
    }
    wait_for(router, "kvx_proxy_in_flight 1").await;
    drop(stream);
    assert_eq!(instance.hears().await, None, "the client went away");
    wait_for(router, "kvx_proxy_in_flight 0").await;
    wait_for(router, "kvx_proxy_requests_total{outcome=\"ok\"} 1").await;
}

#[tokio::test]
async fn an_instances_rejection_reaches_the_client() {
    let no = Instance::start("HTTP/1.1 403 Forbidden\r\ncontent-length: 6\r\n\r\nnobody").await;
    let (address, ..) = router(&[&no], "").await;
    let (answer, mut stream) = ask(address, "/v1/realtime", "").await;
    assert!(answer.starts_with("http/1.1 403") && !answer.contains("upgrade"), "{answer}");
    assert_eq!(read(&mut stream, 6).await, "nobody");
    // A busy instance is skipped for another one.
    let busy =
        Instance::start("HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n").await;
    let mut other = Instance::start(YES).await;
    let (address, ..) = router(&[&busy, &other], "choice = 'round-robin'").await;
    for _ in 0..2 {
        let (answer, stream) = ask(address, "/v1/realtime", "").await;
        assert!(answer.starts_with("http/1.1 101"), "{answer}");
        assert!(other.hears().await.is_some());
        drop(stream);
        assert_eq!(other.hears().await, None);
    }
}

#[tokio::test]
async fn the_model_in_the_query_chooses_the_instance() {
    let mut instances =
        [Instance::of_model("a", YES).await, Instance::of_model("org/b", YES).await];
    let (router, ..) = router(&[&instances[0], &instances[1]], "").await;
    for (model, place) in
        [("org%2Fb", 1), ("org%2Fb", 1), ("a", 0), ("a", 0), ("org/b", 1), ("org/b", 1)]
    {
        let (answer, stream) = ask(router, &format!("/v1/realtime?model={model}"), "").await;
        assert!(answer.starts_with("http/1.1 101"), "{answer}");
        assert!(instances[place].hears().await.is_some(), "{model}");
        drop(stream);
        assert_eq!(instances[place].hears().await, None);
        assert!(instances[1 - place].got.try_recv().is_err(), "{model}");
    }
    // If no instance serves the model, one of them answers with its own error.
    assert!(ask(router, "/v1/realtime?model=c", "").await.0.starts_with("http/1.1 101"));
}

/// Starts an instance that supports HTTP/2 only.
async fn http2() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let instance = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let service = service_fn(|_| async {
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
            });
            let builder = http2::Builder::new(TokioExecutor::new());
            tokio::spawn(builder.serve_connection(TokioIo::new(stream), service));
        }
    });
    instance
}

async fn router_of(decode: &str) -> SocketAddr {
    let setup = format!("port = 0\naccess_log = 'off'\n[[pool]]\ndecode = [{decode}]");
    let mut proxy = Proxy::bind(Setup::from_toml(&setup).unwrap()).await.unwrap();
    proxy.check_instances().await;
    let router = proxy.local_addr();
    tokio::spawn(proxy.run());
    router
}

#[tokio::test]
async fn http2_instances_open_no_websocket() {
    let instance = http2().await;
    let router = router_of(&format!("{{ url = 'http://{instance}', http = 'h2c' }}")).await;
    let (answer, mut stream) = ask(router, "/v1/realtime", "").await;
    assert!(answer.starts_with("http/1.1 501"), "{answer}");
    let said = read(&mut stream, 100).await;
    assert!(said.contains("all decode instances use HTTP/2"), "{said}");
}

#[tokio::test]
async fn http2_instances_are_skipped_for_one_that_opens_it() {
    let (http2, plain) = (http2().await, Instance::start(YES).await);
    let decode = format!("{{ url = 'http://{http2}', http = 'h2c' }}, 'http://{}'", plain.address);
    let router = router_of(&decode).await;
    for turn in 0..4 {
        let (answer, _stream) = ask(router, "/v1/realtime", "").await;
        assert!(answer.starts_with("http/1.1 101"), "{turn}: {answer}");
    }
}

#[tokio::test]
async fn no_other_path_is_a_websocket() {
    let mut instance = Instance::start(YES).await;
    let (router, ..) = router(&[&instance], "").await;
    for (path, status) in [
        ("/v1/completions", "405"), // as every GET
        ("/v1/chat/completions", "405"),
        ("/v1/responses", "200"), // as a plain GET
        ("/v1/%72ealtime", "400"),
        ("/metrics", "200"),
    ] {
        let (answer, _stream) = ask(router, path, "").await;
        assert!(answer.starts_with(&format!("http/1.1 {status}")), "{path}: {answer}");
    }
    let (answer, mut stream) = ask(router, "/v1/realtime", "content-length: 2\r\n\r\n{}").await;
    assert!(answer.starts_with("http/1.1 400"), "{answer}");
    let said = read(&mut stream, 70).await;
    assert!(said.contains("without a body"), "{said}");
    assert!(instance.got.try_recv().is_err(), "none of it has reached the instance");
}

#[tokio::test]
async fn silence_and_a_drain_end_it() {
    let mut instance = Instance::start(YES).await;
    let (quiet, ..) = router(&[&instance], "[timeouts]\nidle = '200ms'").await;
    let (_, mut stream) = ask(quiet, "/v1/realtime", "").await;
    assert_eq!(read(&mut stream, 5).await, "hello");
    assert!(instance.hears().await.is_some());
    assert_eq!(within(stream.read(&mut [0])).await, 0, "the connection was silent for too long");
    assert_eq!(instance.hears().await, None);
    wait_for(quiet, "kvx_proxy_requests_total{outcome=\"timeout\"} 1").await;

    let (draining, handle, running) = router(&[&instance], "drain = '300ms'").await;
    let (_, mut stream) = ask(draining, "/v1/realtime", "").await;
    assert_eq!(read(&mut stream, 5).await, "hello");
    assert!(instance.hears().await.is_some());
    handle.drain();
    within(stream.write_all(b"still here")).await;
    assert_eq!(read(&mut stream, 10).await, "STILL HERE", "it has until the deadline");
    assert_eq!(instance.hears().await.as_deref(), Some("still here"));
    assert_eq!(within(stream.read(&mut [0])).await, 0);
    assert_eq!(instance.hears().await, None);
    within(running).await;
}
