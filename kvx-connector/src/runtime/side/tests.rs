//! Both ends of the side channel: against each other, against pyzmq and msgspec, and against
//! faults.

mod python;

use std::net::TcpListener;
use std::time::{Duration, Instant};

use kvx_core::{ErrorKind, Result, Secret};

use super::*;
use crate::runtime::clock::Clock;
use crate::runtime::tests::run_within;
use kvx_vllm::Version;
use kvx_vllm::engine::{Address, RemoteEngine, SideChannels, WorkerRank};
use kvx_vllm::wire::{CompatibilityHash, Expectation, NixlAgentMetadata};

pub(super) const RANK: WorkerRank = WorkerRank { pp: 0, tp: 0 };
pub(super) const SHORT: Duration = Duration::from_millis(300);

pub(super) fn run<F: Future>(test: F) -> F::Output {
    run_within(Duration::from_secs(60), test)
}

pub(super) fn hash() -> CompatibilityHash {
    CompatibilityHash::foreign("ab".repeat(32))
}

fn secret(byte: u8) -> Option<Secret> {
    Some(Secret::from_bytes([byte; 32]))
}

pub(super) fn settings(host: &str, secret: Option<Secret>) -> SideSettings {
    let host: std::sync::Arc<str> = host.into();
    SideSettings {
        advertise: host.clone(),
        bind: host,
        ports: vec![0],
        secret,
        warnings: Vec::new(),
    }
}

/// The metadata of a worker, with NIXL's blob, which a vLLM needs, or without it.
pub(super) fn metadata(nixl: bool) -> NixlAgentMetadata {
    let mut metadata = NixlAgentMetadata::new("prefill-0", Version::V0_33);
    metadata.block_size = 16;
    metadata.kv_caches_base_addr = vec![0x7f00_0000_0000];
    (metadata.block_lens, metadata.block_strides, metadata.num_blocks) =
        (vec![4096], vec![4096], 8);
    metadata.agent_metadata = if nixl { b"nixl".to_vec() } else { Vec::new() };
    metadata.kvx_metadata = Some(b"kvx".to_vec());
    metadata
}

pub(super) async fn server(secret: Option<Secret>, nixl: bool) -> SideServer {
    let server =
        SideServer::bind(&settings("127.0.0.1", secret), hash(), Clock::new()).await.unwrap();
    server.publish(RANK, &metadata(nixl));
    server
}

pub(super) fn at(host: &str, port: u16) -> RemoteEngine {
    RemoteEngine::new("prefill-0", Address { host: host.into(), port })
}

pub(super) fn asker(secret: Option<Secret>) -> SideClient {
    SideClient::new(Clock::new(), secret, SideChannels::OfEngine).with_limit(SHORT * 3)
}

pub(super) fn expectation() -> Expectation {
    Expectation::new(Version::V0_33, "prefill-0", hash())
}

async fn ask(server: &SideServer, secret: Option<Secret>) -> Result<HandshakeOutcome> {
    asker(secret).ask(&at("127.0.0.1", server.address().port), &[RANK], expectation()).await
}

// vLLM 1: a kvx decode proves the shared secret in the handshake, and receives all metadata after
//     it
#[test]
fn a_kvx_decode_is_told_everything_once_it_may_be() {
    run(async {
        let same = secret(3);
        for nixl in [false, true] {
            for (shared, standing) in [(None, PeerKind::Kvx), (same.clone(), PeerKind::Proven)] {
                let server = server(shared.clone(), nixl).await;
                let asked = ask(&server, shared).await.unwrap();
                assert_eq!(
                    (asked.standing, &asked.peer.workers[&RANK]),
                    (standing, &metadata(nixl))
                );
                assert!(asked.peer.clock.unwrap().seconds.abs() < 5.0);
            }
        }
    });
}

#[test]
fn another_secret_or_none_is_denied_on_both_sides() {
    run(async {
        let (a, b) = (secret(3), secret(4));
        for (theirs, ours) in [(a.clone(), b.clone()), (a.clone(), None), (None, b)] {
            let server = server(theirs, true).await;
            let error = ask(&server, ours).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Authentication, "{error}");
            assert!(error.sentence().contains("KVX_SECRET_FILE"), "{error}");
        }
    });
}

#[test]
fn a_question_that_was_recorded_opens_nothing() {
    use crate::runtime::zmtp::{Budget, Client, MessageLimits, SocketType};
    use kvx_vllm::wire::{HandshakePayload, HandshakeRequest, KvxChallenge, KvxRequest};

    run(async {
        let shared = secret(3);
        let server = server(shared.clone(), true).await;
        let addresses: Vec<_> = server.listens_at().collect();
        let limits = MessageLimits { frames: 4, bytes: 1 << 16 };
        let budget = Budget::new(1 << 20);
        let connect = || Client::connect(SocketType::Req, &addresses, limits, &budget, SHORT);
        let plain = HandshakeRequest::new(RANK, Version::V0_33).unwrap();
        async fn payload(client: &mut Client, question: &[u8]) -> HandshakePayload {
            let answer = client.ask(question, SHORT).await.unwrap();
            HandshakePayload::decode(&answer.frames()[0]).unwrap()
        }
        let inner = |payload: &HandshakePayload| {
            NixlAgentMetadata::decode(&payload.agent_metadata_bytes, Version::V0_33).unwrap()
        };

        let mut client = connect().await.unwrap();
        let first = payload(&mut client, &plain.encode()).await;
        assert_eq!(
            inner(&first).kvx_metadata,
            None,
            "unauthenticated peers get NIXL's metadata alone"
        );
        let challenge = KvxChallenge::decode(first.kvx_challenge.as_deref().unwrap()).unwrap();
        let request = KvxRequest { request: plain, nonce: [4; 32], proof: None };
        let request = proof::prove_question(shared.as_ref(), &challenge, request);
        let second = payload(&mut client, &request.encode()).await;
        proof::check_answer(shared.as_ref().unwrap(), &challenge, &request, &second).unwrap();
        assert!(inner(&second).kvx_metadata.is_some());
        let mut changed = second.clone();
        changed.agent_metadata_bytes[9] ^= 1;
        assert!(
            proof::check_answer(shared.as_ref().unwrap(), &challenge, &request, &changed).is_err()
        );

        // Again on the same connection, on another one, on another one after its own challenge, and
        // for another worker.
        assert!(payload(&mut client, &request.encode()).await.refusal.is_some());
        let mut other = connect().await.unwrap();
        assert!(payload(&mut other, &request.encode()).await.refusal.is_some());
        payload(&mut other, &plain.encode()).await;
        let refused = payload(&mut other, &request.encode()).await;
        assert!(refused.refusal.is_some() && refused.agent_metadata_bytes.is_empty());
        assert_eq!(refused.kvx_proof, None);
    });
}

#[test]
fn a_mismatch_is_reported_with_the_setting_to_change() {
    run(async {
        let server = server(None, true).await;
        let peer = at("127.0.0.1", server.address().port);
        let one = |expectation| {
            let (asker, peer) = (asker(None), peer.clone());
            async move { asker.ask(&peer, &[RANK], expectation).await.unwrap_err() }
        };
        let other_hash = CompatibilityHash::foreign("cd".repeat(32));
        let error = one(Expectation::new(Version::V0_33, "prefill-0", other_hash)).await;
        assert!(
            error.kind() == ErrorKind::Incompatible && error.sentence().contains("`kvx probe`")
        );
        let error = one(Expectation::new(Version::V0_33, "prefill-1", hash())).await;
        assert!(
            error.kind() == ErrorKind::PeerRestarted
                && error.sentence().contains("VLLM_NIXL_SIDE_CHANNEL_HOST")
        );
        let rank = WorkerRank { pp: 0, tp: 1 };
        let larger = RemoteEngine { tp_size: 2, ..peer.clone() };
        let error = asker(None).ask(&larger, &[rank], expectation()).await.unwrap_err();
        assert!(
            error.kind() == ErrorKind::Invalid && error.sentence().contains("tp_size"),
            "{error}"
        );
        let error = asker(None).ask(&peer, &[rank], expectation()).await.unwrap_err();
        assert!(
            error.kind() == ErrorKind::Invalid
                && error.sentence().contains("would end its listener"),
            "{error}"
        );
    });
}

// vLLM 9: a peer of a version without a clock frame receives requests in that version's form
#[test]
fn a_version_older_than_clocks_is_asked_in_its_own_form() {
    run(async {
        let server = server(secret(3), false).await;
        let peer = at("127.0.0.1", server.address().port);
        let expectation = Expectation::new(Version::V0_22, "prefill-0", hash());
        let asked = asker(secret(3)).ask(&peer, &[RANK], expectation).await.unwrap();
        assert_eq!((asked.standing, asked.peer.clock), (PeerKind::Proven, None));
    });
}

#[test]
fn registering_anew_is_counted_once_for_scheduler_and_listener() {
    run(async {
        let server = server(secret(3), true).await;
        assert_eq!(server.publish(RANK, &metadata(true)), 0, "nothing has changed");
        let mut other = metadata(true);
        other.kvx_metadata = Some(b"another life".to_vec());
        assert_eq!(
            server.publish(RANK, &other),
            1,
            "although the answer to unauthenticated peers is the same"
        );
        assert_eq!(server.withdraw(RANK), 2);
        let error = ask(&server, secret(3)).await.unwrap_err();
        assert!(error.sentence().contains("no worker has registered its memory"), "{error}");
        assert_eq!(server.publish(RANK, &other), 2);
    });
}

#[test]
fn a_taken_port_is_reported_with_a_free_one() {
    run(async {
        let first = server(None, true).await;
        let port = first.address().port;
        let taken = SideSettings { ports: vec![port], ..settings("127.0.0.1", None) };
        let error = SideServer::bind(&taken, hash(), Clock::new()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted);
        let said = error.sentence().to_owned();
        assert!(said.contains(&format!("port {port} of 127.0.0.1")), "{said}");
        assert!(said.contains("VLLM_NIXL_SIDE_CHANNEL_PORT to a free port, such as "), "{said}");
        let free = said.split("such as ").nth(1).unwrap().split(' ').next().unwrap();
        TcpListener::bind(("127.0.0.1", free.parse::<u16>().unwrap())).unwrap();

        for host in ["192.0.2.1", "no-such-host.invalid"] {
            let error =
                SideServer::bind(&settings(host, None), hash(), Clock::new()).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
            assert!(error.sentence().contains("side_channel_bind"), "{error}");
        }
        assert!(ask(&first, None).await.is_ok(), "the first engine still serves");
    });
}

#[test]
fn ipv6_works_and_workers_may_have_separate_ports() {
    run(async {
        if TcpListener::bind("[::1]:0").is_err() {
            let test = "ipv6_works_and_workers_may_have_separate_ports";
            return kvx_testkit::skip(test, "no IPv6 loopback", "switch IPv6 on");
        }
        let wide = SideSettings { bind: "::1".into(), ..settings("::1", None) };
        let server = SideServer::bind(&wide, hash(), Clock::new()).await.unwrap();
        server.publish(RANK, &metadata(false));
        for host in ["::1", "[::1]"] {
            let peer = at(host, server.address().port);
            asker(None)
                .ask(&peer, &[RANK], expectation())
                .await
                .unwrap_or_else(|error| panic!("{host}: {error}"));
        }

        let base = kvx_testkit::free_port(1).unwrap();
        let ports = vec![base, base + 1];
        let several = SideSettings { ports, ..settings("127.0.0.1", None) };
        let server = SideServer::bind(&several, hash(), Clock::new()).await.unwrap();
        let ranks = [RANK, WorkerRank { pp: 0, tp: 1 }];
        for rank in ranks {
            server.publish(rank, &metadata(true));
        }
        let peer = RemoteEngine { tp_size: 2, ..at("127.0.0.1", base) };
        let asker = SideClient::new(Clock::new(), None, SideChannels::OfWorkers);
        let asked = asker.ask(&peer, &ranks, expectation()).await.unwrap();
        assert_eq!(asked.peer.workers.len(), 2);
    });
}

#[test]
fn workers_of_which_some_are_kvx_and_some_not_are_refused() {
    use std::sync::Arc;

    use crate::runtime::zmtp::{Handler, MessageLimits, PeerLimits, Router, RouterLimits};
    use kvx_vllm::wire::{HandshakePayload, KvxChallenge};

    /// Answers one question as vLLM would, the other as kvx does.
    struct Mixed(bool);

    impl Handler for Mixed {
        type Session = u8;

        fn answer(&self, count: &mut u8, message: &[Vec<u8>]) -> Option<Vec<Arc<[u8]>>> {
            let mut payload = HandshakePayload::new(hash(), metadata(true).encode());
            if self.0 == (*count == 0) {
                payload.kvx_challenge =
                    Some(KvxChallenge { secret: false, nonce: [7; 32] }.encode());
            }
            *count += 1;
            Some(vec![message[0].as_slice().into(), [].into(), payload.encode().into()])
        }
    }

    run(async {
        for kvx_first in [false, true] {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let message = MessageLimits { frames: 4, bytes: 1 << 16 };
            let peers = PeerLimits { connections: 8, message, bytes: 1 << 20 };
            let limits = RouterLimits {
                unauthenticated: peers,
                authenticated: peers,
                answers: 1 << 20,
                patience: SHORT,
            };
            let router = Router::serve(listener, limits, Arc::new(Mixed(kvx_first))).unwrap();
            let peer = RemoteEngine { tp_size: 2, ..at("127.0.0.1", router.local().port()) };
            let ranks = [RANK, WorkerRank { pp: 0, tp: 1 }];
            let expectation = Expectation::new(Version::V0_22, "prefill-0", hash());
            let error = asker(None).ask(&peer, &ranks, expectation).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
            assert!(error.sentence().contains("some of its workers are kvx's"), "{error}");
        }
    });
}

#[test]
fn missing_and_dead_peers_are_reported_in_time_with_both_settings() {
    run(async {
        let dead = TcpListener::bind("127.0.0.1:0").unwrap(); // listens, and never accepts
        let port = dead.local_addr().unwrap().port();
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        for (host, port, kind) in [
            ("127.0.0.1", port, ErrorKind::TimedOut),
            ("localhost", closed, ErrorKind::PeerLost),
            ("no-such-host.invalid", 1, ErrorKind::PeerLost),
        ] {
            let began = Instant::now();
            let error = asker(None).ask(&at(host, port), &[RANK], expectation()).await.unwrap_err();
            assert!(began.elapsed() < SHORT * 10);
            assert_eq!(error.kind(), kind, "{error}");
            assert!(!handshake_failure(&error).setup);
            assert!(error.sentence().contains("VLLM_NIXL_SIDE_CHANNEL_HOST"), "{error}");
            assert!(
                kind != ErrorKind::PeerLost
                    || host != "localhost"
                    || error.sentence().contains("tcp.bind")
            );
        }
    });
}

/// Resident memory of this process, in bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn a_thousand_half_open_and_hostile_connections_cost_little_and_block_no_decode() {
    use std::io::Write as _;

    /// Set in a process that runs this test alone, because other tests take memory too.
    const ALONE: &str = "KVX_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name = std::thread::current().name().map(str::to_owned).unwrap();
        let program = std::env::current_exe().unwrap();
        let output = std::process::Command::new(program)
            .args([&name, "--exact"])
            .env(ALONE, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let listening = run_on_a_thread(secret(3));
    let (server, address) = (&listening.server, listening.server.address().clone());
    let peer = at(&address.host, address.port);
    let ask = || run(asker(secret(3)).ask(&peer, &[RANK], expectation()));
    ask().unwrap();
    let before = resident();
    let greeting = kvx_vllm::zmtp::greeting();
    let ready = b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x06DEALER";
    let begun = b"\x02\0\0\0\0\0\0\x0f\xff"; // a message of 4,095 bytes, whose last one never comes
    let says: [Vec<u8>; 4] = [
        Vec::new(),
        greeting[..11].to_vec(),
        [&greeting[..], &ready[..6]].concat(),
        [&greeting[..], ready, begun, &[7; 4094]].concat(),
    ];
    let mut hostile = Vec::new();
    for index in 0..1000 {
        let mut stream = std::net::TcpStream::connect((&*address.host, address.port)).unwrap();
        // One that was closed already in favour of a newer one gets nothing.
        stream.write_all(&says[index % says.len()]).ok();
        hostile.push(stream);
        if index % 100 == 99 {
            ask().unwrap_or_else(|error| panic!("after {index}: {error}"));
        }
    }
    let cost = resident().saturating_sub(before);
    assert!(cost < 32 << 20, "{cost} bytes");
    assert!(server.connections() > 100, "they are held: {}", server.connections());
    let until = Instant::now() + Duration::from_secs(10);
    while server.connections() > 0 {
        assert!(Instant::now() < until, "a silent connection is closed in time");
        std::thread::sleep(Duration::from_millis(20));
    }
    ask().unwrap();
}

/// A server on a runtime of its own, so that this thread may block.
struct PeerSockets {
    server: SideServer,
    _runtime: tokio::runtime::Runtime,
}

fn run_on_a_thread(secret: Option<Secret>) -> PeerSockets {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = runtime.block_on(server(secret, true));
    PeerSockets { server, _runtime: runtime }
}
