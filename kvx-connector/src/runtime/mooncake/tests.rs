//! The bootstrap server and the side channel against unauthenticated peers, and clients against
//! faulty servers.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kvx_core::{ErrorKind, Secret};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::super::clock::Clock;
use super::super::tests::{built, register, run_within};
use super::super::zmtp::{Budget, Client, MessageLimits, SocketType};
use super::super::{Connector, Decode, Loaded, Prefill};
use super::bootstrap::{BootstrapServer, CONNECTIONS};
use super::{client, own_request};
use kvx_vllm::engine::{Address, BlockLists, WorkerRank};
use kvx_vllm::params::BootstrapRequest;
use kvx_vllm::wire::mooncake::{
    Directory, OlderPullRequest, PullRequest, PullResponse, PullStatus, PulledRequest,
    WorkerRegistration,
};

const LIMIT: Duration = Duration::from_secs(10);
const SHORT: Duration = Duration::from_millis(300);

fn run<F: Future>(test: F) -> F::Output {
    run_within(Duration::from_secs(30), test)
}

async fn server(secret: Option<u8>) -> (BootstrapServer, Address) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = Address { host: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() };
    let secret = secret.map(|byte| Secret::from_bytes([byte; 32]));
    (BootstrapServer::serve(listener, Clock::new(), secret, false), address)
}

fn registration(engine: &str, port: u16) -> WorkerRegistration {
    let (rank, kvx_ttl) = (WorkerRank::default(), Some(30));
    WorkerRegistration {
        engine_id: engine.into(),
        dp_rank: 0,
        rank,
        addr: format!("tcp://127.0.0.1:{port}"),
        kvx_ttl,
    }
}

/// Returns the answer to these bytes until the server closes the connection.
async fn answered(address: &Address, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect((&*address.host, address.port)).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.ok();
    String::from_utf8(answer).unwrap()
}

fn post(body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "POST /register HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .into()
}

// vLLM 56: a bootstrap server on a socket accepts vLLM's bodies, and rejects invalid and oversized
//     requests with an error that says why
#[test]
fn a_worker_registers_and_is_found_and_all_else_is_refused_in_words() {
    run(async {
        let (_server, address) = server(None).await;
        let good = json!({"engine_id": "e", "dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "addr": "tcp://h:1"});
        let said = answered(&address, &post(&good.to_string())).await;
        assert!(
            said.starts_with("HTTP/1.1 200 OK\r\n") && said.ends_with(r#"{"status":"ok"}"#),
            "{said}"
        );
        assert!(
            answered(&address, &post(&good.to_string())).await.starts_with("HTTP/1.1 200"),
            "it may say so again"
        );
        let mut other = good.clone();
        other["addr"] = "tcp://h:2".into();
        for (bytes, status, word) in [
            (post(&other.to_string()), "400", "listens at tcp://h:1"),
            (post("{}"), "400", "engine_id"),
            (post("not JSON"), "400", "not JSON"),
            (post(&" ".repeat(9 << 10)), "413", "more than"),
            (
                b"POST /register HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec(),
                "411",
                "length",
            ),
            (b"DELETE /query HTTP/1.0\r\n\r\n".to_vec(), "405", "Method"),
            (b"GET /metrics HTTP/1.0\r\n\r\n".to_vec(), "404", "Not Found"),
            (vec![b'x'; 9 << 10], "400", "head"),
            (b"\x16\x03\x01\0\0\r\n\r\n".to_vec(), "400", "first line"),
        ] {
            let said = answered(&address, &bytes).await;
            let (head, body) = said.split_once("\r\n\r\n").unwrap_or_default();
            assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{said}");
            let body: Value = serde_json::from_str(body).unwrap();
            assert!(body["detail"].as_str().unwrap().contains(word), "{said}");
        }
        // Two requests on a connection, in one piece.
        let query = "GET /query HTTP/1.1\r\nHost: x\r\n\r\n";
        let said =
            answered(&address, format!("{query}GET /query?x HTTP/1.0\r\n\r\n").as_bytes()).await;
        assert_eq!(
            said.matches("\"worker_addr\":{\"0\":{\"0\":\"tcp://h:1\"}}").count(),
            2,
            "{said}"
        );
        let listed = client::query(&address, None, LIMIT).await.unwrap();
        assert!(!listed.engine("e").unwrap().is_kvx, "it says nothing of that");
    });
}

// vLLM 56: a bootstrap server at its connection limit closes the oldest silent connection
#[test]
fn connections_that_say_nothing_make_room() {
    run(async {
        let (server, address) = server(None).await;
        server.register(registration("e", 1)).unwrap();
        let mut silent = Vec::new();
        for _ in 0..CONNECTIONS + 8 {
            let mut stream = TcpStream::connect((&*address.host, address.port)).await.unwrap();
            stream.write_all(b"GET /que").await.unwrap();
            silent.push(stream);
        }
        assert!(client::query(&address, None, LIMIT).await.unwrap().engine("e").is_some());
        let mut rest = Vec::new();
        assert!(
            matches!(silent[0].read_to_end(&mut rest).await, Ok(0) | Err(_)),
            "the oldest one was closed"
        );
        drop(server);
        assert_eq!(
            client::query(&address, None, LIMIT).await.unwrap_err().kind(),
            ErrorKind::PeerLost
        );
    });
}

/// Returns the answer on a connection that stays open.
async fn answer_on(stream: &mut TcpStream, request: &str) -> String {
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"}") {
        assert!(stream.read_buf(&mut answer).await.unwrap() > 0, "{}", answer.escape_ascii());
    }
    String::from_utf8(answer).unwrap()
}

#[test]
fn connections_of_clients_without_a_proof_make_room_first() {
    run(async {
        let (server, address) = server(Some(1)).await;
        server.register(registration("e", 1)).unwrap();
        let mut proven = TcpStream::connect((&*address.host, address.port)).await.unwrap();
        let mut query = async || {
            let demanded = answer_on(&mut proven, "GET /query HTTP/1.1\r\n\r\n").await;
            let nonce = demanded.split_once(BootstrapRequest::NONCE).unwrap().1;
            let nonce = nonce[1..].lines().next().unwrap().trim();
            let proof = BootstrapRequest::Query.prove(&[1; 32], nonce, b"");
            let header = format!("{}: {proof}", BootstrapRequest::PROOF);
            answer_on(&mut proven, &format!("GET /query HTTP/1.1\r\n{header}\r\n\r\n")).await
        };
        assert!(query().await.starts_with("HTTP/1.1 200"));
        let mut crowd = Vec::new();
        for _ in 0..CONNECTIONS + 8 {
            crowd.push(TcpStream::connect((&*address.host, address.port)).await.unwrap());
        }
        // The server has accepted them all: it answers the last one.
        let last = crowd.last_mut().unwrap();
        assert!(answer_on(last, "GET /query HTTP/1.1\r\n\r\n").await.starts_with("HTTP/1.1 401"));
        assert!(query().await.starts_with("HTTP/1.1 200"));
    });
}

// vLLM 56: with a fleet secret, only workers that prove knowledge of the secret can register
#[test]
fn with_a_secret_only_those_register_who_prove_it() {
    run(async {
        let (_server, address) = server(Some(1)).await;
        let (own, other) = (Secret::from_bytes([1; 32]), Secret::from_bytes([2; 32]));
        let (e, f) = (registration("e", 1), registration("f", 2));
        let refused = client::register(&address, &f, None, LIMIT).await.unwrap_err();
        assert!(
            refused.kind() == ErrorKind::Authentication
                && refused.to_string().contains("KVX_SECRET_FILE"),
            "{refused}"
        );
        let refused = client::register(&address, &f, Some(&other), LIMIT).await.unwrap_err();
        assert!(refused.to_string().contains("differ"), "{refused}");
        // A registration as vLLM sends it, and a proof from another connection.
        let body = String::from_utf8(f.encode()).unwrap();
        assert!(answered(&address, &post(&body)).await.starts_with("HTTP/1.1 401"));
        let nonce = "0".repeat(64);
        let proof = BootstrapRequest::Register.prove(own.bytes(), &nonce, body.as_bytes());
        let proven = format!("{}: {proof}\r\nHost", BootstrapRequest::PROOF);
        let replayed = String::from_utf8(post(&body)).unwrap().replacen("Host", &proven, 1);
        assert!(answered(&address, replayed.as_bytes()).await.starts_with("HTTP/1.1 401"));
        assert_eq!(client::query(&address, Some(&own), LIMIT).await.unwrap(), Directory::default());
        client::register(&address, &e, Some(&own), LIMIT).await.unwrap();
        client::register(&address, &e, Some(&own), LIMIT).await.unwrap();
        let listed = client::query(&address, Some(&own), LIMIT).await.unwrap();
        assert!(listed.engine("e").unwrap().is_kvx && listed.engine("f").is_none());
    });
}

#[test]
fn with_a_secret_queries_need_a_proof_unless_mooncake_agents_are_admitted() {
    run(async {
        let (own, other) = (Secret::from_bytes([1; 32]), Secret::from_bytes([2; 32]));
        let (proven, address) = server(Some(1)).await;
        proven.register(registration("e", 1)).unwrap();
        let plain = b"GET /query HTTP/1.0\r\nHost: x\r\n\r\n";
        let said = answered(&address, plain).await;
        assert!(said.starts_with("HTTP/1.1 401") && !said.contains("tcp://"), "{said}");
        let error = client::query(&address, None, LIMIT).await.unwrap_err();
        assert!(
            error.kind() == ErrorKind::Authentication
                && error.to_string().contains("KVX_SECRET_FILE"),
            "{error}"
        );
        let error = client::query(&address, Some(&other), LIMIT).await.unwrap_err();
        assert!(error.to_string().contains("differ"), "{error}");
        // The proof of a registration, and of another connection.
        let nonce = "0".repeat(64);
        for kind in [BootstrapRequest::Query, BootstrapRequest::Register] {
            let proof = kind.prove(own.bytes(), &nonce, b"");
            let replayed =
                format!("GET /query HTTP/1.0\r\n{}: {proof}\r\n\r\n", BootstrapRequest::PROOF);
            let said = answered(&address, replayed.as_bytes()).await;
            assert!(said.starts_with("HTTP/1.1 401"), "{said}");
        }
        assert!(client::query(&address, Some(&own), LIMIT).await.unwrap().engine("e").is_some());

        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let address = Address { host: "127.0.0.1".into(), port };
        let open = BootstrapServer::serve(listener, Clock::new(), Some(own), true);
        open.register(registration("e", 1)).unwrap();
        let said = answered(&address, plain).await;
        assert!(said.starts_with("HTTP/1.1 200") && said.contains("tcp://"), "{said}");
        let refused = client::register(&address, &registration("f", 2), None, LIMIT).await;
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Authentication);
    });
}

/// A server that answers each connection with the next of these, and then closes it. `None`: it
/// stays silent.
async fn impostor(answers: Vec<Option<Vec<u8>>>) -> Address {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = Address { host: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() };
    tokio::spawn(async move {
        let mut silent = Vec::new();
        for answer in answers {
            let Ok((mut stream, _)) = listener.accept().await else { return };
            match answer {
                Some(answer) => {
                    let mut sink = [0; 1024];
                    if stream.read(&mut sink).await.is_ok_and(|asked| asked > 0) {
                        stream.write_all(&answer).await.ok();
                    }
                }
                None => silent.push(stream),
            }
        }
        std::future::pending::<()>().await;
    });
    address
}

// vLLM 56: a slow or invalid bootstrap server is queried three times, within the time limit
#[test]
fn servers_that_are_slow_or_none_are_asked_three_times_and_cost_no_more_than_the_limit() {
    run(async {
        let body = Directory::default().encode();
        let good = [&b"HTTP/1.1 200 OK\r\n\r\n"[..], &body].concat();
        let long = [&b"HTTP/1.1 200 OK\r\n\r\n"[..], &vec![b' '; Directory::MAX_LEN + 1]].concat();
        let promised = b"HTTP/1.1 200 OK\r\nContent-Length: 4000000000\r\n\r\n".to_vec();
        for (answers, kind) in [
            (vec![Some(Vec::new()); 3], ErrorKind::PeerLost),
            (vec![Some(b"SSH-2.0-x\r\n\r\n".to_vec()); 3], ErrorKind::Malformed),
            (vec![Some(b"HTTP/1.1 500 Oh\r\n\r\n".to_vec()); 3], ErrorKind::Invalid),
            (vec![Some(b"HTTP/1.1 200 OK\r\n\r\nhello".to_vec()); 3], ErrorKind::Malformed),
            (
                vec![Some(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}".to_vec()); 3],
                ErrorKind::PeerLost,
            ),
            (vec![Some(long); 3], ErrorKind::Exhausted),
            (vec![Some(promised); 3], ErrorKind::Exhausted),
            (vec![None; 3], ErrorKind::TimedOut),
        ] {
            let address = impostor(answers).await;
            let began = Instant::now();
            let error = client::query(&address, None, SHORT * 3).await.unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains("bootstrap server 127.0.0.1"), "{error}");
            assert!(began.elapsed() < LIMIT / 2, "{:?}", began.elapsed());
        }
        let address = impostor(vec![Some(Vec::new()), None, Some(good)]).await;
        assert_eq!(
            client::query(&address, None, SHORT * 3).await.unwrap(),
            Directory::default(),
            "the third time"
        );
    });
}

async fn dealer(at: SocketAddr) -> Client {
    let limits = MessageLimits { frames: 4, bytes: 1 << 20 };
    Client::connect(SocketType::Dealer, &[at], limits, &Budget::new(2 << 20), LIMIT).await.unwrap()
}

// vLLM 61: invalid pull requests on a socket get an error that says why, and other requests
//     continue
#[test]
fn questions_that_cannot_be_right_are_answered_in_words_and_all_else_goes_on() {
    let (prefill, decode) =
        (built("MooncakeConnector", "p", "TCP", 1), built("MooncakeConnector", "d", "TCP", 1));
    register(&prefill, 0).unwrap();
    register(&decode, 0).unwrap();
    run(async {
        let listed = client::query(prefill.address(), None, LIMIT).await.unwrap();
        let at =
            &listed.engine(prefill.engine_id().as_str()).unwrap().workers[&WorkerRank::default()];
        let at: SocketAddr = at.strip_prefix("tcp://").unwrap().parse().unwrap();
        let mut question = PullRequest::new("somewhere", 7, 1, 0);
        question.kvx_engine_id = Some(prefill.engine_id().as_str().to_owned());
        (question.kv_caches_base_addr, question.block_lens) = (vec![4096], vec![1024]);
        question.kv_block_lens = vec![1024];
        let pulled = PulledRequest {
            request_id: "r".into(),
            transfer_id: "t".into(),
            block_ids: vec![vec![0]],
        };
        question.req_blocks = vec![pulled];
        let changed = |change: &dyn Fn(&mut PullRequest)| {
            let mut question = question.clone();
            change(&mut question);
            question.encode()
        };
        let mut client = dealer(at).await;
        for (bytes, word) in [
            (b"nonsense".to_vec(), "malformed"),
            (
                changed(&|question| question.kvx_engine_id = Some("former".into())),
                "query the bootstrap server again",
            ),
            (changed(&|question| question.remote_tp_rank = 9), "must not pull"),
        ] {
            let answer = client.ask(&bytes, LIMIT).await.unwrap();
            let answer = PullResponse::decode(answer.frames().last().unwrap()).unwrap();
            assert!(answer.status == PullStatus::Error && answer.kvx_settled, "{answer:?}");
            assert!(answer.err_msg.unwrap().contains(word));
        }
        let answer =
            client.ask(&changed(&|question| question.forget_layout()), LIMIT).await.unwrap();
        let answer = PullResponse::decode(answer.frames().last().unwrap()).unwrap();
        assert_eq!(answer.status, PullStatus::LayoutMiss);
        // A message above the limit.
        let mut flood = dealer(at).await;
        let sent = flood.send(&[&vec![0xc1; PullRequest::MAX_LEN + 1]], LIMIT).await;
        assert!(sent.is_err() || flood.receive(LIMIT).await.is_err());
    });
    fetches(&prefill, &decode);
}

/// Loads a prompt of one block from `prefill` to `decode`.
fn fetches(prefill: &Connector, decode: &Connector) {
    let blocks = |at: u32| BlockLists::single(&[at][..]);
    let (lease, params) = Prefill::new(prefill).publish("r", blocks(1), 16).unwrap();
    let fetch = Decode::new(decode).fetch("r", &params, 0, blocks(2), LIMIT);
    assert_eq!(fetch.wait_blocking(LIMIT).unwrap().unwrap(), Loaded { tokens: 0..16 });
    lease.wait_blocking(LIMIT).unwrap();
}

// vLLM 61: a prefill writes nothing for a pull request with a false layout or false grants
#[test]
fn layouts_and_grants_that_lie_are_written_nowhere() {
    let rank = WorkerRank::default();
    let (prefill, decode) =
        (built("MooncakeConnector", "p", "TCP", 1), built("MooncakeConnector", "d", "TCP", 1));
    register(&prefill, 0).unwrap();
    register(&decode, 0).unwrap();
    let own = decode.shared().registered(rank).unwrap();
    let granted = own.grant(99).unwrap();
    let mut fitting = own_request(decode.shared(), rank, &own).unwrap();
    fitting.layout_id = 0;
    fitting.kvx_engine_id = Some(prefill.engine_id().as_str().to_owned());
    let regions = granted.iter().map(|region| region.metadata().unwrap()).collect();
    fitting.kvx_grants = [("r".to_owned(), regions)].into();
    let wrong: [(&str, &dyn Fn(&mut PullRequest)); 7] = [
        ("grants no memory", &|question| question.kvx_grants.clear()),
        ("has not registered memory", &|question| question.kv_caches_base_addr[0] = 1 << 40),
        ("bytes", &|question| question.kv_block_lens[0] = 512),
        ("kv_block_lens", &|question| question.kv_block_lens.clear()),
        ("lies beyond a grid", &|question| question.req_blocks[0].block_ids = vec![vec![0, 4]]),
        ("twice", &|question| question.req_blocks[0].block_ids = vec![vec![2, 2]]),
        ("malformed", &|question| question.kvx_metadata = Some(b"nonsense".to_vec())),
    ];
    let blocks = BlockLists::single(&[0, 1][..]);
    let (lease, params) = Prefill::new(&prefill).publish("p-1", blocks, 32).unwrap();
    let transfer_id = params.mooncake().unwrap().transfer_id.as_str().to_owned();
    for (word, change) in wrong {
        let mut question = fitting.clone();
        let block_ids = vec![vec![0, 2]];
        let (request_id, transfer_id) = ("r".to_owned(), transfer_id.clone());
        question.req_blocks = vec![PulledRequest { request_id, transfer_id, block_ids }];
        change(&mut question);
        run(async {
            let listed = client::query(prefill.address(), None, LIMIT).await.unwrap();
            let at = listed.engine(prefill.engine_id().as_str()).unwrap().workers[&rank]
                .strip_prefix("tcp://")
                .unwrap()
                .parse()
                .unwrap();
            let answer = dealer(at).await.ask(&question.encode(), LIMIT).await.unwrap();
            let answer = PullResponse::decode(answer.frames().last().unwrap()).unwrap();
            assert_eq!(answer.err_reqs, Some(vec!["r".to_owned()]), "{word}: {answer:?}");
            let why = answer.err_msg.unwrap();
            assert!(why.contains(word), "{word}: {why}");
        });
    }
    let fetch =
        Decode::new(&decode).fetch("d-1", &params, 0, BlockLists::single(&[3, 2][..]), LIMIT);
    assert_eq!(fetch.wait_blocking(LIMIT).unwrap().unwrap(), Loaded { tokens: 0..32 });
    lease.wait_blocking(LIMIT).unwrap();
    fetches(&prefill, &decode);
}

#[test]
fn a_connection_is_kept_for_the_next_question_until_its_other_end_leaves() {
    let rank = WorkerRank::default();
    let (prefill, decode) =
        (built("MooncakeConnector", "p", "TCP", 1), built("MooncakeConnector", "d", "TCP", 1));
    register(&prefill, 0).unwrap();
    register(&decode, 0).unwrap();
    fetches(&prefill, &decode);
    run(async {
        let listed = client::query(prefill.address(), None, LIMIT).await.unwrap();
        let at = &listed.engine(prefill.engine_id().as_str()).unwrap().workers[&rank];
        let idle = &decode.shared().mooncake.idle;
        let mut kept = idle.take(at, false).expect("it has answered");
        assert!(idle.take(at, false).is_none(), "one asks by it");
        kept.send(b"nonsense", LIMIT).await.unwrap();
        let answer = PullResponse::decode(&kept.receive(LIMIT).await.unwrap()).unwrap();
        assert_eq!(answer.status, PullStatus::Error);
        idle.keep(at.as_str().into(), kept);
    });
    fetches(&prefill, &decode);
    prefill.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
    run(async {
        let idle = &decode.shared().mooncake.idle;
        let kept = idle.only().expect("it has answered again");
        let began = Instant::now();
        while kept.is_quiet() {
            assert!(began.elapsed() < LIMIT, "a prefill that has ended holds its connections");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        idle.keep("tcp://there:1".into(), kept);
        assert!(idle.take("tcp://there:1", false).is_none(), "the other end has left");
    });
}

#[test]
fn before_0_16_a_req_socket_gets_one_answer_and_other_loads_succeed() {
    let compat = |engine| {
        super::super::tests::built_with("MooncakeConnector", engine, r#""kv_compat": "0.11""#)
    };
    let (prefill, decode) = (compat("p"), compat("d"));
    register(&prefill, 0).unwrap();
    register(&decode, 0).unwrap();
    let at = SocketAddr::from(([127, 0, 0, 1], prefill.address().port));
    let mut other = PullRequest::new("somewhere", 7, 1, 0);
    other.kv_caches_base_addr = vec![4096; 9];
    other.req_blocks = vec![PulledRequest {
        request_id: "r".into(),
        transfer_id: "r".into(),
        block_ids: vec![vec![0]],
    }];
    let regions = OlderPullRequest::plain(&other).unwrap().encode();
    other.kvx_engine_id = Some("former".into());
    let former = OlderPullRequest::to_kvx(&other).encode();
    run(async {
        let limits = MessageLimits { frames: 4, bytes: 1 << 20 };
        let mut client =
            Client::connect(SocketType::Req, &[at], limits, &Budget::new(2 << 20), LIMIT)
                .await
                .unwrap();
        for bytes in [b"nonsense".to_vec(), Vec::new(), regions] {
            let answer = client.ask(&bytes, LIMIT).await.unwrap();
            assert_eq!(answer.frames(), [b"trans_error".to_vec()]);
        }
        let answer = client.ask(&former, LIMIT).await.unwrap();
        let answer = PullResponse::decode(&answer.frames()[0]).unwrap();
        assert!(
            answer.kvx_settled && answer.err_msg.unwrap().contains("for engine former"),
            "a kvx engine gets the reason"
        );
        // A message above the limit.
        let sent = client.send(&[&vec![0xc1; PullRequest::MAX_LEN + 1]], LIMIT).await;
        assert!(sent.is_err() || client.receive(LIMIT).await.is_err());
    });
    fetches(&prefill, &decode);
}
