//! HTTP/2 clients, which control the windows of their streams: a connection on which nothing can be
//! written looks idle.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2::{self, SendRequest};
use hyper::{Request, Response, Version};
use hyper_util::rt::{TokioExecutor, TokioIo};
use kvx_proxy::{Handle, Proxy, Setup};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::tls::{connect, file};
use crate::upstream::{Pieces, Upstream};
use crate::{CUT_OFF, within};

const STALL: Duration = Duration::from_secs(1);

/// Starts a router in front of one decode instance, over TLS.
async fn router(instance: &Upstream) -> (SocketAddr, Handle) {
    router_with(instance, "").await
}

async fn router_with(instance: &Upstream, limits: &str) -> (SocketAddr, Handle) {
    let setup = format!(
        "port = 0\naccess_log = 'off'\nconnector = 'NixlConnector'\ntls_cert = {:?}\ntls_key = {:?}\n\
         [timeouts]\nidle = '5s'\n[limits]\nstall = '{}ms'\n{limits}\n[[pool]]\ndecode = ['http://{}']",
        file("cert.pem"),
        file("key.pem"),
        STALL.as_millis(),
        instance.address
    );
    let mut proxy = Proxy::bind(Setup::from_toml(&setup).unwrap()).await.unwrap();
    proxy.check_instances().await;
    let (address, handle) = (proxy.local_addr(), proxy.handle());
    tokio::spawn(proxy.run());
    (address, handle)
}

/// Connects a client whose streams have this window, in bytes.
pub(crate) async fn client(address: SocketAddr, window: u32) -> SendRequest<Full<Bytes>> {
    let stream = connect(address, &[b"h2"]).await;
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder.initial_stream_window_size(window);
    let (sender, connection) = within(builder.handshake(TokioIo::new(stream))).await;
    tokio::spawn(connection);
    sender
}

async fn send(
    client: &mut SendRequest<Full<Bytes>>,
    request: Request<Full<Bytes>>,
) -> Response<hyper::body::Incoming> {
    let response = within(client.send_request(request)).await;
    assert_eq!((response.status().as_u16(), response.version()), (200, Version::HTTP_2));
    response
}

fn completion(path: &str) -> Request<Full<Bytes>> {
    let body = r#"{"model": "m", "prompt": "a", "max_tokens": 9, "stream": true}"#;
    let request = Request::post(format!("https://localhost{path}"))
        .header("content-type", "application/json");
    request.body(Full::new(Bytes::from_static(body.as_bytes()))).unwrap()
}

fn get(path: &str) -> Request<Full<Bytes>> {
    Request::get(format!("https://localhost{path}")).body(Full::default()).unwrap()
}

/// Returns the beginning of a stream that does not end.
fn stream_without_end() -> Pieces {
    let event = "data: {\"choices\": [{\"text\": \"a\"}]}\n\n";
    let head =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    vec![(Duration::ZERO, format!("{head}{:x}\r\n{event}\r\n", event.len()).into_bytes())]
}

#[tokio::test]
async fn a_client_that_opens_no_window_holds_no_request_for_long() {
    let mut instance = Upstream::start(stream_without_end()).await;
    let (address, _handle) = router(&instance).await;
    let mut closed = client(address, 0).await;
    let _unread = send(&mut closed, completion("/v1/completions")).await;
    instance.left_alone().await;
    send(&mut closed, get("/health")).await; // the connection itself is still fine
    let metrics = send(&mut client(address, 1 << 20).await, get("/metrics")).await;
    let metrics = within(metrics.into_body().collect()).await.to_bytes();
    let metrics = std::str::from_utf8(&metrics).unwrap();
    for line in ["kvx_proxy_in_flight 0", "kvx_proxy_requests_total{outcome=\"client_gone\"} 1"] {
        assert!(metrics.lines().any(|one| one == line), "{line}: {metrics}");
    }
}

#[tokio::test]
async fn slow_clients_and_clients_of_slow_instances_get_the_whole_answer() {
    const LENGTH: usize = 600_000;
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: {LENGTH}\r\n\r\nx"
    );
    // The instance itself is silent for longer than a client may be.
    let pieces = vec![(Duration::ZERO, head.into_bytes()), (STALL * 2, vec![b'x'; LENGTH - 1])];
    let instance = Upstream::start(pieces).await;
    let (address, _handle) = router(&instance).await;
    let mut slow = client(address, 40_000).await;
    let mut body = send(&mut slow, completion("/v1/embeddings")).await.into_body();
    let (mut read, mut rested) = (0, 0);
    while let Some(frame) = tokio::time::timeout(CUT_OFF, body.frame()).await.unwrap() {
        read += frame.unwrap().into_data().unwrap().len();
        if read - rested >= LENGTH / 40 {
            rested = read;
            tokio::time::sleep(STALL / 20).await; // deliberately slow: in total longer than the stall
        }
    }
    assert_eq!(read, LENGTH);
}

/// The life of idle connections in these tests.
const HEADER_TIME: Duration = Duration::from_millis(300);

async fn router_with_short_lives(instance: &Upstream) -> SocketAddr {
    let limits = format!("header_time = '{}ms'", HEADER_TIME.as_millis());
    router_with(instance, &limits).await.0
}

#[tokio::test]
async fn idle_connections_are_closed_whatever_their_clients_do() {
    let instance = Upstream::start(stream_without_end()).await;
    let address = router_with_short_lives(&instance).await;
    // A usual client, after a request.
    let stream = connect(address, &[b"h2"]).await;
    let builder = http2::Builder::new(TokioExecutor::new());
    let (mut sender, connection) = within(builder.handshake(TokioIo::new(stream))).await;
    let connection = tokio::spawn(connection);
    drop(send(&mut sender, get("/health")).await);
    let _ = within(connection).await; // an error: the proxy's `close_notify` was not awaited
    // A client that sends nothing, not even HTTP/2's preface.
    let mut silent = connect(address, &[b"h2"]).await;
    // An error: the proxy closes without TLS's `close_notify`.
    let _ = tokio::time::timeout(CUT_OFF, silent.read_to_end(&mut Vec::new())).await.unwrap();
    // A client that only sends pings.
    let mut pinging = connect(address, &[b"h2"]).await;
    within(pinging.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")).await;
    let (mut answers, mut pings) = tokio::io::split(pinging);
    let pinging = async {
        while pings.write_all(b"\0\0\x08\x06\0\0\0\0\0a ping..").await.is_ok() {
            tokio::time::sleep(HEADER_TIME / 10).await; // often enough to keep a connection
        }
    };
    let mut heard = Vec::new();
    let closed = async {
        tokio::select! {
            () = pinging => {}
            _ = answers.read_to_end(&mut heard) => {}
        }
    };
    tokio::time::timeout(CUT_OFF, closed).await.unwrap();
}

#[tokio::test]
async fn connections_with_a_request_are_not_idle() {
    let instance = Upstream::start(stream_without_end()).await;
    let address = router_with_short_lives(&instance).await;
    let mut client = client(address, 1 << 20).await;
    let mut stream = send(&mut client, completion("/v1/completions")).await.into_body();
    let first = tokio::time::timeout(CUT_OFF, stream.frame()).await.unwrap();
    assert!(!first.unwrap().unwrap().into_data().unwrap().is_empty());
    tokio::time::sleep(HEADER_TIME * 3).await; // the life of an idle connection passes
    send(&mut client, get("/health")).await;
}
