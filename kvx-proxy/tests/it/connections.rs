//! Tests with more clients than allowed connections.

use std::net::SocketAddr;
use std::time::Duration;

use kvx_proxy::{Proxy, Setup};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::within;

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
