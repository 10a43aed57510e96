//! Tests with more clients than allowed connections.

use std::net::SocketAddr;
use std::time::Duration;

use kvx_proxy::{Proxy, Setup};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

use crate::{CUT_OFF, within};

/// The silence after which a connection counts as waiting.
const SILENCE: Duration = Duration::from_millis(500);

async fn ask(to: SocketAddr) -> TcpStream {
    let mut stream = within(TcpStream::connect(to)).await;
    ask_again(&mut stream).await;
    stream
}

async fn ask_again(stream: &mut TcpStream) {
    within(stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")).await;
}

/// Checks the beginning of an answer.
async fn answered(stream: &mut TcpStream) {
    let mut answer = [0; 1024];
    let length = within(stream.read(&mut answer)).await;
    assert!(answer[..length].starts_with(b"HTTP/1.1 200"), "{}", answer[..length].escape_ascii());
}

#[tokio::test]
async fn a_connection_beyond_the_limit_is_served_when_another_has_ended() {
    let setup = "port = 0\naccess_log = 'off'\n[limits]\nconnections = 2\n[[pool]]\ndecode = ['http://127.0.0.1:1']";
    let proxy = Proxy::bind(Setup::from_toml(setup).unwrap()).await.unwrap();
    let address = proxy.local_addr();
    tokio::spawn(proxy.run());
    let (mut first, mut second) = (ask(address).await, ask(address).await);
    answered(&mut first).await;
    answered(&mut second).await;
    let mut third = ask(address).await;
    let early = tokio::time::timeout(SILENCE, third.read_u8()).await;
    assert!(early.is_err(), "the third of two connections is not served yet: {early:?}");
    ask_again(&mut first).await;
    answered(&mut first).await; // existing connections continue
    drop(second);
    answered(&mut third).await;
}

#[tokio::test]
async fn an_address_with_many_connections_leaves_places_for_others() {
    let setup = "port = 0\naccess_log = 'off'\n[limits]\nconnections = 4\nconnections_per_address = 2\n\
                 [[pool]]\ndecode = ['http://127.0.0.1:1']";
    let proxy = Proxy::bind(Setup::from_toml(setup).unwrap()).await.unwrap();
    let address = proxy.local_addr();
    tokio::spawn(proxy.run());
    let from = async |source: &str| {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(source.parse().unwrap()).unwrap();
        within(socket.connect(address)).await
    };
    let mut crowd = Vec::new();
    for _ in 0..2 {
        let mut stream = from("127.0.0.2:0").await;
        ask_again(&mut stream).await;
        answered(&mut stream).await;
        crowd.push(stream);
    }
    for _ in 0..4 {
        let mut more = from("127.0.0.2:0").await;
        // An error: the router closed it before it read the request.
        let _ = more.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(CUT_OFF, more.read_to_end(&mut answer)).await.unwrap();
        assert!(answer.is_empty(), "{}", answer.escape_ascii());
    }
    answered(&mut ask(address).await).await;
    ask_again(&mut crowd[0]).await;
    answered(&mut crowd[0]).await; // existing connections continue
    drop(crowd.remove(0));
    // Until the router has noticed it, new connections are closed.
    let until = tokio::time::Instant::now() + CUT_OFF;
    loop {
        let mut stream = from("127.0.0.2:0").await;
        let _ = stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
        let mut first = [0; 12];
        if tokio::time::timeout(CUT_OFF, stream.read_exact(&mut first)).await.unwrap().is_ok() {
            assert_eq!(&first, b"HTTP/1.1 200");
            break;
        }
        assert!(tokio::time::Instant::now() < until, "its place is not freed");
        tokio::time::sleep(Duration::from_millis(10)).await; // between polls
    }
}
