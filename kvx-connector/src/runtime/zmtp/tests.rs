//! Sockets against hostile, half-open and dead peers. The side channel's tests cover ZeroMQ itself.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::ErrorKind;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::super::tests::run_within;
use super::*;
use kvx_vllm::zmtp::{self, Command};

const LIMIT: Duration = Duration::from_secs(5);
const SHORT: Duration = Duration::from_millis(200);

/// Answers with the question and a count.
struct Echo;

impl Handler for Echo {
    type Session = u8;

    fn answer(&self, count: &mut u8, message: &[Vec<u8>]) -> Option<Vec<Arc<[u8]>>> {
        *count += 1;
        let frames = message.iter().map(|frame| Arc::from(frame.as_slice()));
        (message.last().map(Vec::as_slice) != Some(b"bye"))
            .then(|| frames.chain([[*count].into()]).collect())
    }
}

/// Sends a message after a ping, which is not a question.
struct AfterAPing;

impl ConnectionHandler for AfterAPing {
    async fn talk(&self, mut peer: RouterConnection) -> kvx_core::Result<()> {
        loop {
            match peer.receive_one().await? {
                Received::Command => peer.send(&[b"later"]).await?,
                Received::Message(_) => {}
                Received::End => return Ok(()),
            }
        }
    }
}

fn run<F: Future>(test: F) -> F::Output {
    run_within(Duration::from_secs(30), test)
}

fn limits(patience: Duration, connections: usize) -> RouterLimits {
    let message = MessageLimits { frames: 4, bytes: 1 << 20 };
    let peers = PeerLimits { connections, message, bytes: 4 << 20 };
    RouterLimits { unauthenticated: peers, authenticated: peers, answers: 4 << 20, patience }
}

async fn echo(patience: Duration, connections: usize) -> (Router, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let limits = limits(patience, connections);
    let router = Router::serve(listener, limits, Arc::new(Echo)).unwrap();
    let address = router.local();
    (router, address)
}

/// Echoes messages, and authenticates peers that send `secret`.
struct AuthenticatingEcho;

impl ConnectionHandler for AuthenticatingEcho {
    async fn talk(&self, mut peer: RouterConnection) -> kvx_core::Result<()> {
        while let Some(message) = peer.receive().await? {
            let frame = message.frames()[1].clone();
            drop(message);
            if frame == b"secret" {
                peer.set_authenticated()?;
            }
            peer.send(&[frame]).await?;
        }
        Ok(())
    }
}

/// Serves four unauthenticated peers with messages of 64 bytes, and four authenticated ones.
async fn authenticating_echo() -> Router {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut limits = limits(LIMIT, 4);
    limits.unauthenticated.message.bytes = 64;
    Router::serve_by(listener, limits, Arc::new(AuthenticatingEcho)).unwrap()
}

/// Opens a connection from another address of this host, which has greeted and may send any bytes.
async fn raw_from(last: u8, address: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from(([127, 0, 0, last], 0))).unwrap();
    greeted(socket.connect(address).await.unwrap()).await
}

async fn client(kind: SocketType, address: SocketAddr) -> kvx_core::Result<Client> {
    let limits = MessageLimits { frames: 4, bytes: 1 << 20 };
    Client::connect(kind, &[address], limits, &Budget::new(2 << 20), LIMIT).await
}

/// Opens a connection that has greeted and may send any bytes.
async fn raw(address: SocketAddr) -> TcpStream {
    greeted(TcpStream::connect(address).await.unwrap()).await
}

async fn greeted(mut stream: TcpStream) -> TcpStream {
    let mut out = zmtp::greeting().to_vec();
    Command::Ready { kind: Some(SocketType::Dealer), identity: b"me".to_vec() }.put(&mut out);
    stream.write_all(&out).await.unwrap();
    let mut greeting = [0; zmtp::GREETING];
    stream.read_exact(&mut greeting).await.unwrap();
    let mut head = [0; 2];
    stream.read_exact(&mut head).await.unwrap();
    let mut ready = vec![0; head[1].into()];
    stream.read_exact(&mut ready).await.unwrap();
    stream
}

/// Runs `other` until `done` has ended.
async fn either<T>(other: impl Future, done: impl Future<Output = T>) -> T {
    let (mut other, mut done) = (std::pin::pin!(other), std::pin::pin!(done));
    let mut goes_on = true;
    std::future::poll_fn(|context| {
        goes_on = goes_on && other.as_mut().poll(context).is_pending();
        done.as_mut().poll(context)
    })
    .await
}

/// Returns whether the other end closes the connection within a generous time.
async fn is_closed(stream: &mut TcpStream) -> bool {
    let mut sink = [0; 64];
    let ended = async {
        loop {
            match stream.read(&mut sink).await {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
        }
    };
    tokio::time::timeout(LIMIT, ended).await.is_ok()
}

#[test]
fn req_and_dealer_get_answers_one_after_the_other() {
    run(async {
        let (_router, address) = echo(LIMIT, 8).await;
        for kind in [SocketType::Req, SocketType::Dealer] {
            let mut client = client(kind, address).await.unwrap();
            for count in 1..=3 {
                let question = vec![count; 1 << (8 * u32::from(count - 1)).min(19)];
                let answer = client.ask(&question, LIMIT).await.unwrap();
                assert_eq!(answer.frames(), [question, vec![count]], "{kind:?}");
            }
            let error = client.ask(b"bye", LIMIT).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        }
    });
}

#[test]
fn a_message_does_not_wait_for_a_peer_that_only_pings() {
    run(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let router = Router::serve_by(listener, limits(LIMIT, 8), Arc::new(AfterAPing)).unwrap();
        let mut peer = raw(router.local()).await;
        let mut ping = Vec::new();
        Command::Ping { context: Vec::new() }.put(&mut ping);
        peer.write_all(&ping).await.unwrap();
        let mut said = Vec::new();
        while !said.windows(5).any(|word| word == b"later") {
            let got = tokio::time::timeout(LIMIT, peer.read_buf(&mut said)).await;
            assert!(got.expect("it is said in time").unwrap() > 0);
        }
    });
}

#[test]
fn silent_connections_are_closed_and_malformed_ones_at_once() {
    run(async {
        let (router, address) = echo(SHORT, 8).await;
        let mut silent = TcpStream::connect(address).await.unwrap();
        let mut half = raw(address).await;
        half.write_all(&[0, 5, b'a']).await.unwrap(); // two bytes of five
        for nonsense in [
            &b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..],
            b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\0",
            &[0; 64],
        ] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(nonsense).await.unwrap();
            assert!(is_closed(&mut stream).await, "{nonsense:?}");
        }
        for nonsense in [
            &b"\x08\x01a"[..],                       // a flag that does not exist
            b"\x05\x06\x05READY",                    // a command with a continuation
            b"\x02\xff\xff\xff\xff\xff\xff\xff\xff", // longer than memory
            b"\x02\x00\x00\x00\x00\x00\x10\x00\x01", // a byte longer than a message may be
            b"\x01\x00\x01\x00\x01\x00\x01\x00\x01", // frames without end
            b"\x01\x01a\x04\x05\x04PONG",            // a command within a message
            b"\x06\x00\x00\x00\x00\x00\x01\x00\x00", // a command of 64 KiB
            b"\x04\x03\x04PI",                       // a command that ends within its name
        ] {
            let mut stream = raw(address).await;
            stream.write_all(nonsense).await.unwrap();
            assert!(is_closed(&mut stream).await, "{nonsense:?}");
        }
        assert!(is_closed(&mut silent).await && is_closed(&mut half).await);
        let mut well_behaved = client(SocketType::Req, address).await.unwrap();
        tokio::time::sleep(SHORT * 2).await;
        assert!(
            well_behaved.ask(b"q", LIMIT).await.is_ok(),
            "a connection may be silent between messages"
        );
        assert_eq!(router.connections(), 1);
    });
}

#[test]
fn a_connection_above_the_limit_replaces_the_most_silent_one() {
    run(async {
        let (router, address) = echo(LIMIT, 4).await;
        let mut speaker = client(SocketType::Req, address).await.unwrap();
        let mut silent = Vec::new();
        for _ in 0..12 {
            silent.push(TcpStream::connect(address).await.unwrap());
            tokio::time::sleep(Duration::from_millis(5)).await;
            speaker.ask(b"q", LIMIT).await.unwrap();
        }
        assert!(is_closed(&mut silent[0]).await);
        assert!(router.connections() <= 4);
    });
}

#[test]
fn no_number_of_unauthenticated_connections_closes_an_authenticated_one() {
    run(async {
        let router = authenticating_echo().await;
        let mut waiting = client(SocketType::Dealer, router.local()).await.unwrap();
        waiting.ask(b"secret", LIMIT).await.unwrap();
        let mut crowd = Vec::new();
        for _ in 0..3 * 4 {
            crowd.push(raw_from(1, router.local()).await);
        }
        assert!(is_closed(&mut crowd[0]).await);
        assert_eq!(router.connections(), 4 + 1);
        waiting.ask(&vec![1; 1 << 19], LIMIT).await.unwrap();
    });
}

#[test]
fn a_connection_of_the_address_that_has_most_is_closed_first() {
    run(async {
        let (router, address) = echo(LIMIT, 4).await;
        // This one is the most silent.
        let mut waiting = client(SocketType::Dealer, address).await.unwrap();
        let mut crowd = Vec::new();
        for _ in 0..3 * 4 {
            crowd.push(raw_from(2, address).await);
        }
        assert!(is_closed(&mut crowd[0]).await);
        assert_eq!(router.connections(), 4);
        waiting.ask(b"q", LIMIT).await.unwrap();
    });
}

#[test]
fn an_unauthenticated_peer_sends_only_short_messages() {
    run(async {
        let router = authenticating_echo().await;
        let mut peer = raw(router.local()).await;
        peer.write_all(b"\x00\x41").await.unwrap(); // the head of 65 bytes
        assert!(is_closed(&mut peer).await);
    });
}

#[test]
fn unfinished_messages_of_one_address_leave_memory_for_others() {
    run(async {
        let (_router, address) = echo(LIMIT, 16).await;
        let mut crowd = Vec::new();
        for _ in 0..6 {
            let mut peer = raw_from(2, address).await;
            // All but the last byte of the longest message. An error: it was closed.
            let head = b"\x02\x00\x00\x00\x00\x00\x10\x00\x00";
            let _ = peer.write_all(&[&head[..], &vec![0; (1 << 20) - 1]].concat()).await;
            crowd.push(peer);
        }
        let mut other = client(SocketType::Dealer, address).await.unwrap();
        other.ask(&vec![1; (1 << 20) - 64], LIMIT).await.unwrap();
    });
}

#[test]
fn a_ping_is_answered_with_its_context() {
    run(async {
        let (_router, address) = echo(LIMIT, 8).await;
        let mut stream = raw(address).await;
        let mut ping = Vec::new();
        Command::Ping { context: b"ctx".to_vec() }.put(&mut ping);
        stream.write_all(&ping).await.unwrap();
        let mut pong = [0; 10];
        stream.read_exact(&mut pong).await.unwrap();
        assert_eq!(&pong, b"\x04\x08\x04PONGctx");
    });
}

#[test]
fn a_flood_of_commands_delays_no_other_peer_and_is_closed() {
    use std::io::Write as _;

    run(async {
        let (router, address) = echo(LIMIT, 8).await;
        let mut well_behaved = client(SocketType::Req, address).await.unwrap();
        let mut flood = raw(address).await.into_std().unwrap();
        flood.set_nonblocking(false).unwrap();
        flood.set_write_timeout(Some(LIMIT)).unwrap();
        let until = Instant::now() + LIMIT;
        let flooding = std::thread::spawn(move || {
            // Commands without a name, faster than they are decoded.
            let many = b"\x04\x01\x00".repeat(1 << 16);
            while Instant::now() < until && flood.write_all(&many).is_ok() {}
        });
        tokio::time::sleep(SHORT).await;
        well_behaved.ask(b"q", LIMIT).await.unwrap();
        flooding.join().unwrap();
        assert!(
            Instant::now() < until,
            "it was answered, and the flood closed, before the flood had to end"
        );
        assert_eq!(router.connections(), 1);
    });
}

#[test]
fn pings_of_a_living_peer_are_answered_however_long_it_says_nothing_else() {
    run(async {
        let (_router, address) = echo(LIMIT, 8).await;
        let mut stream = raw(address).await;
        let mut ping = Vec::new();
        Command::Ping { context: Vec::new() }.put(&mut ping);
        for _ in 0..3 {
            stream.write_all(&ping.repeat(50)).await.unwrap();
            let mut pongs = [0; 7 * 50];
            stream.read_exact(&mut pongs).await.unwrap();
            assert_eq!(pongs[..7], *b"\x04\x05\x04PONG");
            tokio::time::sleep(Duration::from_millis(1100)).await;
        }
    });
}

/// Listens, and does something to the first connection.
async fn trap(then: impl AsyncFnOnce(TcpStream) + 'static) -> (SocketAddr, impl Future) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (address, async move { then(listener.accept().await.unwrap().0).await })
}

#[test]
fn dead_peers_cost_no_more_than_their_time_limit() {
    async fn asked(address: SocketAddr) -> ErrorKind {
        let limits = MessageLimits { frames: 4, bytes: 1 << 16 };
        let budget = Budget::new(1 << 20);
        match Client::connect(SocketType::Req, &[address], limits, &budget, SHORT).await {
            Err(error) => error.kind(),
            Ok(mut client) => client.ask(b"q", SHORT).await.unwrap_err().kind(),
        }
    }
    async fn greets(stream: &mut TcpStream, kind: SocketType) {
        let mut out = zmtp::greeting().to_vec();
        Command::Ready { kind: Some(kind), identity: Vec::new() }.put(&mut out);
        stream.write_all(&out).await.unwrap();
    }
    async fn wait(stream: TcpStream) {
        tokio::time::sleep(LIMIT).await;
        drop(stream);
    }
    run(async {
        let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        assert_eq!(asked(closed).await, ErrorKind::PeerLost);

        let (address, silent) = trap(wait).await;
        let began = Instant::now();
        either(silent, async { assert_eq!(asked(address).await, ErrorKind::TimedOut) }).await;

        let (address, closes) = trap(async |stream| drop(stream)).await;
        either(closes, async { assert_eq!(asked(address).await, ErrorKind::PeerLost) }).await;

        let (address, greets_only) = trap(async |mut stream: TcpStream| {
            greets(&mut stream, SocketType::Router).await;
            wait(stream).await;
        })
        .await;
        either(greets_only, async { assert_eq!(asked(address).await, ErrorKind::TimedOut) }).await;

        let (address, another) = trap(async |mut stream: TcpStream| {
            greets(&mut stream, SocketType::Req).await;
            wait(stream).await;
        })
        .await;
        either(another, async { assert_eq!(asked(address).await, ErrorKind::Unsupported) }).await;

        // An answer that never ends: a byte now and then, announced as the longest that is taken.
        let (address, drips) = trap(async |mut stream: TcpStream| {
            greets(&mut stream, SocketType::Router).await;
            stream.write_all(b"\x01\x00\x02\0\0\0\0\0\0\xff\xff").await.ok();
            loop {
                stream.write_all(b"x").await.ok();
                tokio::time::sleep(SHORT / 10).await;
            }
        })
        .await;
        either(drips, async { assert_eq!(asked(address).await, ErrorKind::TimedOut) }).await;
        assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());
    });
}

#[test]
fn bytes_in_memory_are_bounded_for_all_connections_together() {
    run(async {
        let (_router, address) = echo(LIMIT, 8).await;
        let limits = MessageLimits { frames: 4, bytes: 1 << 20 };
        let budget = Budget::new((1 << 20) + (1 << 19));
        let mut first =
            Client::connect(SocketType::Req, &[address], limits, &budget, LIMIT).await.unwrap();
        let mut second =
            Client::connect(SocketType::Req, &[address], limits, &budget, LIMIT).await.unwrap();
        let held = first.ask(&vec![1; (1 << 20) - 64], LIMIT).await.unwrap();
        let error = second.ask(&vec![2; (1 << 20) - 64], LIMIT).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
        drop((held, second));
        let mut third =
            Client::connect(SocketType::Req, &[address], limits, &budget, LIMIT).await.unwrap();
        assert!(third.ask(&vec![3; (1 << 20) - 64], LIMIT).await.is_ok());
    });
}
