//! The router's listener with TLS under attack by clients without a key: during TLS's handshake,
//! and over HTTP/2 after it.

use std::io::{self, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::TokioIo;
use kvx_proxy::{Proxy, Setup};
use kvx_testkit::{
    ATTACKER_CONNECTS, AttackBytes, Bounds, Child, Client, Failure, Listener, connect_from,
};
use tokio::net::{TcpSocket, UnixStream};
use tokio::runtime::Runtime;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConnection;

use crate::tls::{client_config, connect, file};
use crate::upstream::{Upstream, json};
use crate::{CUT_OFF, http2};

/// The variable with the setup of a router in another process.
const ROLE: &str = "KVX_PROXY_LISTENER_TEST_SETUP";
/// The words before the port of that router.
const LISTENS: &str = "the router listens at ";
/// The key of the clients.
const KEY: &str = "hush";
/// The most connections of one address, and the time limit for a handshake, for headers, bodies,
/// and answers that are not read.
const CONNECTIONS: usize = 64;
const TIME: Duration = Duration::from_secs(2);
/// The second address of the loopback interface, for attackers, whose address has a limit.
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// Runs a router until its parent ends, if this process was started for that.
#[test]
fn a_router_in_another_process() {
    let Ok(setup) = std::env::var(ROLE) else { return };
    let runtime = Runtime::new().unwrap();
    runtime.block_on(async {
        let mut proxy = Proxy::bind(Setup::from_toml(&setup).unwrap()).await.unwrap();
        proxy.check_instances().await;
        println!("\n{LISTENS}{}", proxy.local_addr().port());
        io::stdout().flush().unwrap();
        proxy.run().await.unwrap();
    });
}

/// A router in another process, in front of an instance in this one.
struct Attacked {
    router: Child,
    address: SocketAddr,
    runtime: Runtime,
    keys: std::path::PathBuf,
}

impl Drop for Attacked {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.keys);
    }
}

impl Attacked {
    fn start(name: &str) -> Result<Self, Failure> {
        let runtime = Runtime::new()?;
        let answer = json(&serde_json::json!({}));
        let instance = runtime.block_on(Upstream::start(answer)).address;
        let keys = std::env::temp_dir().join(format!("{name}-{}.keys", std::process::id()));
        std::fs::write(&keys, KEY)?;
        std::fs::set_permissions(&keys, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        let seconds = TIME.as_secs();
        let setup = format!(
            "port = 0\naccess_log = 'off'\napi_key_file = {keys:?}\ntls_cert = {:?}\n\
             tls_key = {:?}\n[limits]\nconnections = {}\nconnections_per_address = {CONNECTIONS}\n\
             header_time = '{seconds}s'\nbody_time = '{seconds}s'\nstall = '{seconds}s'\n\
             [[pool]]\ndecode = ['http://{instance}']",
            file("cert.pem"),
            file("key.pem"),
            2 * CONNECTIONS
        );
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--exact", "listeners::a_router_in_another_process", "--nocapture"]);
        command.env(ROLE, setup);
        let router = Child::start(command)?;
        let port = loop {
            if let Some(port) = router.hear(CUT_OFF)?.strip_prefix(LISTENS) {
                break port.parse().unwrap();
            }
        };
        Ok(Attacked { router, address: (Ipv4Addr::LOCALHOST, port).into(), runtime, keys })
    }

    /// Attacks the router while clients with a key work, over each version of HTTP.
    fn attack(
        &self,
        name: &'static str,
        bounds: Bounds,
        connection: impl Fn() -> io::Result<OwnedFd> + Sync,
        bytes: &AttackBytes,
    ) -> Result<(), Failure> {
        let Attacked { router, address, runtime, .. } = self;
        let mut kept = runtime.block_on(http2::client(*address, 1 << 20));
        let mut used = Instant::now();
        let clients = vec![
            Client::new("a kept connection, HTTP/2", || {
                runtime.block_on(async {
                    // The router closes a connection that was idle for this time.
                    if used.elapsed() > TIME / 2 {
                        kept = http2::client(*address, 1 << 20).await;
                    }
                    let asked = ask(&mut kept).await;
                    used = Instant::now();
                    asked
                })
            }),
            Client::new("a new connection, HTTP/2", || {
                runtime.block_on(async { ask(&mut http2::client(*address, 1 << 20).await).await })
            }),
            Client::new("a new connection, HTTP/1.1", || runtime.block_on(ask_http1(*address))),
        ];
        let listener = Listener { name, process: router.pid(), bounds, clients };
        listener.attack(connection, bytes).map(|cost| eprintln!("{cost}"))
    }
}

fn request() -> Request<Full<Bytes>> {
    let request = Request::post("https://localhost/v1/embeddings")
        .header("host", "localhost")
        .header("authorization", format!("Bearer {KEY}"))
        .header("content-type", "application/json");
    request.body(Full::new(Bytes::from_static(br#"{"model": "m", "input": "a"}"#))).unwrap()
}

/// Sends a request, and fails unless an answer with status 200 arrives.
async fn ask(client: &mut SendRequest<Full<Bytes>>) -> Result<(), Failure> {
    let answer = tokio::time::timeout(CUT_OFF, async {
        client.ready().await?;
        let answer = client.send_request(request()).await?;
        let status = answer.status();
        answer.into_body().collect().await.map(|_| status)
    });
    succeeds(answer.await)
}

async fn ask_http1(to: SocketAddr) -> Result<(), Failure> {
    let stream = TokioIo::new(connect(to, &[b"http/1.1"]).await);
    let answer = tokio::time::timeout(CUT_OFF, async {
        let (mut client, connection) = hyper::client::conn::http1::handshake(stream).await?;
        tokio::spawn(connection);
        let answer = client.send_request(request()).await?;
        let status = answer.status();
        answer.into_body().collect().await.map(|_| status)
    });
    succeeds(answer.await)
}

fn succeeds(
    answer: Result<hyper::Result<hyper::StatusCode>, tokio::time::error::Elapsed>,
) -> Result<(), Failure> {
    let status = answer.map_err(|late| Failure::new(late.to_string()))?;
    let status = status.map_err(|error| Failure::new(format!("{error:?}")))?;
    if status == 200 { Ok(()) } else { Err(Failure::new(status.to_string())) }
}

#[test]
fn clients_cost_little_during_the_handshake_of_tls() -> Result<(), Failure> {
    let attacked = Attacked::start("tls")?;
    let mut hello = Vec::new();
    let config = Arc::new(client_config(&[b"h2"]));
    let mut client = ClientConnection::new(config, "localhost".try_into().unwrap()).unwrap();
    client.write_tls(&mut hello)?;
    // A record of a handshake and its length; a ClientHello and its length.
    let record = |length: u16| [&[22, 3, 1][..], &length.to_be_bytes()].concat();
    let hello_of = |length: u32| [&[1][..], &length.to_be_bytes()[1..]].concat();
    let bytes = AttackBytes {
        message: hello,
        claims: vec![
            record(1 << 14),
            record(u16::MAX),
            [record(4), hello_of(0xff_ffff), record(1 << 14)].concat(),
            // Alerts, and data before a handshake.
            vec![21, 3, 3, 0xff, 0xff],
            vec![23, 3, 3, 0x40, 0],
        ],
        longest: [record(1 << 14), hello_of(0xffff)].concat(),
        ..AttackBytes::default()
    };
    let address = attacked.address;
    let connection = || Ok(connect_from(ELSEWHERE, address, ATTACKER_CONNECTS)?.into());
    attacked.attack("kvx proxy, TLS", Bounds::new(CONNECTIONS, TIME), connection, &bytes)
}

/// Encodes a frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, content: &[u8]) -> Vec<u8> {
    [&frame_of(content.len() as u32, kind, flags, stream)[..], content].concat()
}

/// Returns the beginning of a frame with this length.
fn frame_of(length: u32, kind: u8, flags: u8, stream: u32) -> Vec<u8> {
    [&length.to_be_bytes()[1..], &[kind, flags], &stream.to_be_bytes()].concat()
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;

/// Returns the headers of a request without a key, whose body does not follow.
fn headers() -> Vec<u8> {
    let text = |name: &[u8], value: &str| [name, &[value.len() as u8], value.as_bytes()].concat();
    // `POST`, `https`, and texts with names from HPACK's static table.
    let (path, length) = (text(&[4], "/v1/completions"), text(&[0x0f, 13], "1073741824"));
    [&[0x83, 0x87][..], &path, &text(&[1], "localhost"), &length].concat()
}

/// Returns requests on this many streams; each is followed by these bytes.
fn requests(count: u32, after: impl Fn(u32) -> Vec<u8>) -> Vec<u8> {
    let streams = (0..count).map(|number| 2 * number + 1);
    let request =
        |stream| [frame(HEADERS, END_HEADERS, stream, &headers()), after(stream)].concat();
    streams.flat_map(request).collect()
}

/// Returns headers that name a long one, which they define once, as often as a frame allows.
fn repeated_header() -> Vec<u8> {
    const LONG: usize = 4000;
    // A name of one letter, and the length of the value in three bytes.
    let rest = LONG - 127;
    let defined = [0x40, 1, b'a', 0x7f, (rest % 128) as u8 | 0x80, (rest / 128) as u8];
    let block = [&headers()[..], &defined, &vec![b'a'; LONG]].concat();
    let repeated = vec![0xbe; (1 << 14) - block.len()];
    frame(HEADERS, END_HEADERS, 1, &[block, repeated].concat())
}

/// The attackers speak TLS, which they do at the other end of a socket of this process.
#[test]
fn clients_cost_little_over_http2() -> Result<(), Failure> {
    let attacked = Attacked::start("http2")?;
    let settings = frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]);
    let bytes = AttackBytes {
        // The settings open no window for answers.
        prelude: [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &settings[..]].concat(),
        message: frame(PING, 0, 0, b"a ping.."),
        claims: vec![
            frame_of(0xff_ffff, DATA, 0, 1),
            frame_of(1 << 14, HEADERS, 0, 1),
            requests(1, |_| Vec::new()),
            requests(1024, |_| Vec::new()),
            requests(1024, |stream| frame(RST_STREAM, 0, stream, &[0, 0, 0, 8])),
            repeated_header(),
            [frame(HEADERS, 0, 1, &headers()), frame(CONTINUATION, 0, 1, &[]).repeat(4096)]
                .concat(),
        ],
        longest: frame_of(1 << 14, HEADERS, 0, 1),
    };
    let address = attacked.address;
    let connection = || {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        theirs.set_nonblocking(true)?;
        attacked.runtime.block_on(async {
            let socket = TcpSocket::new_v4()?;
            socket.set_reuseaddr(true)?;
            socket.bind((ELSEWHERE, 0).into())?;
            let connector = TlsConnector::from(Arc::new(client_config(&[b"h2"])));
            let handshake = async {
                let stream = socket.connect(address).await?;
                connector.connect("localhost".try_into().unwrap(), stream).await
            };
            let mut stream = tokio::time::timeout(CUT_OFF, handshake).await??;
            let mut theirs = UnixStream::from_std(theirs)?;
            tokio::spawn(async move {
                // An error: the router has closed the connection.
                let _ = tokio::io::copy(&mut theirs, &mut stream).await;
            });
            Ok(ours.into())
        })
    };
    let bounds = Bounds {
        // All of them have places: one without a place would have no handshake.
        crowd: CONNECTIONS,
        // An idle connection has to end, and is closed after the same time.
        ..Bounds::new(CONNECTIONS, 2 * TIME)
    };
    attacked.attack("kvx proxy, HTTP/2", bounds, connection, &bytes)
}
