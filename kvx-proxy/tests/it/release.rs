//! Tests of when the router releases a prefill's blocks, and when it must not.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvx_proxy::{
    BlockReleaser, Handle, KeptBlocks, Proxy, ReleaseBlocks, ReleaseError, ReleaseFuture, Setup,
};
use kvx_vllm::Version;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinHandle;

use crate::CUT_OFF;
use crate::client::post;
use crate::upstream::{self, Pieces, Upstream};

/// Records the releases, and ends each with a result.
#[derive(Clone, Debug)]
struct Recorder {
    seen: Arc<Mutex<Vec<KeptBlocks>>>,
    result: Result<(), ReleaseError>,
}

impl ReleaseBlocks for Recorder {
    fn release<'a>(&'a self, blocks: &'a KeptBlocks) -> ReleaseFuture<'a> {
        self.seen.lock().unwrap().push(blocks.clone());
        Box::pin(async move { self.result.clone() })
    }
}

/// A router in front of a prefill instance that keeps blocks for each request.
struct Rig {
    router: SocketAddr,
    handle: Handle,
    running: JoinHandle<kvx_proxy::Result<()>>,
    recorder: Recorder,
    _prefill: Upstream,
}

/// Parameters of vLLM 0.33.
fn params() -> Value {
    json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2]],
        "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 5600,
        "tp_size": 2, "pp_size": 1, "dcp_size": 1, "remote_num_tokens": 20, "transfer_mode": "pull",
        "remote_blocks_expiry_time": null, "remote_registration_generation": 0,
    })
}

fn asked() -> Value {
    json!({"model": "m", "prompt": "some words", "max_tokens": 5})
}

impl Rig {
    async fn start(decodes: &[SocketAddr], params: &Value) -> Self {
        Rig::with_result(decodes, params, Ok(())).await
    }

    async fn with_result(
        decodes: &[SocketAddr],
        params: &Value,
        result: Result<(), ReleaseError>,
    ) -> Self {
        let choices = json!([{"index": 0, "text": "a", "finish_reason": "length"}]);
        let answer = json!({"choices": choices, "kv_transfer_params": params});
        let prefill = Upstream::start(upstream::json(&answer)).await;
        let decodes: Vec<_> = decodes.iter().map(|decode| format!("http://{decode}")).collect();
        let setup = format!(
            "port = 0\naccess_log = 'off'\ndrain = '100ms'\nconnector = 'NixlConnector'\n\
             [health]\nevery = '1h'\neject_after = 1000\n[retries]\nattempts = 1\n\
             [[pool]]\nprefill = ['http://{}']\ndecode = {decodes:?}",
            prefill.address
        );
        let recorder = Recorder { seen: Arc::default(), result };
        let mut setup = Setup::from_toml(&setup).unwrap();
        setup.releaser = Some(BlockReleaser::new(recorder.clone()));
        let mut proxy = Proxy::bind(setup).await.unwrap();
        proxy.check_instances().await;
        let (router, handle) = (proxy.local_addr(), proxy.handle());
        let running = tokio::spawn(proxy.run());
        Rig { router, handle, running, recorder, _prefill: prefill }
    }

    async fn get(&self, path: &str) -> String {
        let talk = async {
            let mut stream = TcpStream::connect(self.router).await.unwrap();
            let head = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
            stream.write_all(head.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        };
        tokio::time::timeout(CUT_OFF, talk).await.unwrap()
    }

    /// Waits until `/metrics` has this line.
    async fn has_metric(&self, line: &str) {
        let shown = async {
            while !self.get("/metrics").await.lines().any(|one| one == line) {
                tokio::time::sleep(Duration::from_millis(5)).await; // between polls
            }
        };
        tokio::time::timeout(CUT_OFF, shown).await.unwrap_or_else(|_| panic!("no {line}"));
    }

    /// Waits until this many releases have ended.
    async fn released(&self, result: &str, count: usize) -> Vec<KeptBlocks> {
        self.has_metric(&format!("kvx_proxy_releases_total{{result=\"{result}\"}} {count}")).await;
        self.recorder.seen.lock().unwrap().clone()
    }

    /// Ends the router, which waits for its releases, and returns them.
    async fn ended(self) -> Vec<KeptBlocks> {
        self.handle.drain();
        let ended = tokio::time::timeout(CUT_OFF, self.running).await;
        ended.expect("it drains").unwrap().unwrap();
        self.recorder.seen.lock().unwrap().clone()
    }
}

/// A decode instance that is healthy, and takes no requests: it refuses connections, or lets them
/// wait.
struct Deaf {
    address: SocketAddr,
    listener: Option<Arc<TcpListener>>,
    healthy: Option<JoinHandle<()>>,
    waiting: Vec<TcpStream>,
}

impl Deaf {
    fn start() -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = Arc::new(socket.listen(1).unwrap());
        let address = listener.local_addr().unwrap();
        let accepts = Arc::clone(&listener);
        let healthy = tokio::spawn(async move {
            loop {
                let (mut stream, _) = accepts.accept().await.unwrap();
                // Requests of a router are short, and arrive in one piece.
                if stream.read(&mut [0; 4096]).await.unwrap() == 0 {
                    continue;
                }
                let ok = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
                stream.write_all(ok).await.unwrap();
            }
        });
        Deaf { address, listener: Some(listener), healthy: Some(healthy), waiting: Vec::new() }
    }

    async fn stop(&mut self) {
        let healthy = self.healthy.take().expect("it stops once");
        healthy.abort();
        assert!(healthy.await.is_err(), "it accepts until then");
    }

    /// Refuses connections from now on.
    async fn refuse(&mut self) {
        self.stop().await;
        self.listener = None;
    }

    /// Lets connections wait from now on.
    async fn fill(&mut self) {
        self.stop().await;
        let connect =
            || tokio::time::timeout(Duration::from_millis(300), TcpStream::connect(self.address));
        while let Ok(connected) = connect().await {
            self.waiting.push(connected.unwrap());
            assert!(self.waiting.len() < 100, "its backlog is never full");
        }
    }
}

fn status(code: u16) -> Pieces {
    let error = r#"{"error": {"message": "no"}}"#;
    let answer = format!(
        "HTTP/1.1 {code} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{error}",
        error.len()
    );
    vec![(Duration::ZERO, answer.into_bytes())]
}

#[tokio::test]
async fn blocks_that_no_decode_takes_are_released_once() {
    let mut deaf = Deaf::start();
    let rig = Rig::start(&[deaf.address], &params()).await;
    deaf.refuse().await;
    let (head, _) = post(rig.router, "/v1/completions", "", &asked()).await;
    assert!(head.starts_with("http/1.1 50"), "{head}");
    let seen = rig.released("sent", 1).await;
    let [blocks] = &seen[..] else { panic!("one release: {seen:?}") };
    assert_eq!((&*blocks.remote.engine_id, &*blocks.remote.request_id), ("e", "r"));
    assert_eq!((&*blocks.remote.host, blocks.remote.port), ("127.0.0.1", 5600));
    assert_eq!((blocks.remote.tp_size, blocks.version), (2, Version::V0_33));
    let status = rig.get("/status").await;
    assert!(
        status.contains(r#""by":"notification""#) && status.contains(r#""sent":1"#),
        "{status}"
    );
}

#[tokio::test]
async fn blocks_that_every_decode_turns_away_are_released() {
    for code in [503, 429, 401, 403, 413] {
        let decode = Upstream::start(status(code)).await;
        let rig = Rig::start(&[decode.address], &params()).await;
        let (head, _) = post(rig.router, "/v1/completions", "", &asked()).await;
        assert!(head.starts_with(&format!("http/1.1 {code}")), "{head}");
        assert_eq!(rig.released("sent", 1).await.len(), 1, "{code}");
    }
}

/// A decode that has begun may read, or notifies the prefill itself.
#[tokio::test]
async fn blocks_that_a_decode_may_be_reading_are_not_released() {
    let silent = vec![(Duration::ZERO, Vec::new())];
    let ok = upstream::json(&json!({"choices": [{"index": 0, "text": "a"}]}));
    for answer in [ok, status(500), status(400), status(404), silent] {
        let says = String::from_utf8_lossy(&answer[0].1).into_owned();
        let is_silent = answer[0].1.is_empty();
        let mut decode = Upstream::start(answer).await;
        let rig = Rig::start(&[decode.address], &params()).await;
        if is_silent {
            // The client leaves while the decode works.
            let mut client = TcpStream::connect(rig.router).await.unwrap();
            let body = asked().to_string();
            let head = format!(
                "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
                 content-length: {}\r\n\r\n{body}",
                body.len()
            );
            client.write_all(head.as_bytes()).await.unwrap();
            let arrived = async {
                while decode.heads().is_empty() {
                    tokio::time::sleep(Duration::from_millis(5)).await; // between polls
                }
            };
            tokio::time::timeout(CUT_OFF, arrived).await.unwrap();
            drop(client);
            decode.left_alone().await;
        } else {
            post(rig.router, "/v1/completions", "", &asked()).await;
        }
        assert_eq!(decode.heads().len(), 1, "{says}: the decode has begun");
        assert_eq!(rig.ended().await.len(), 0, "{says}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_while_no_decode_takes_its_leg_leaves_no_blocks() {
    let mut deaf = Deaf::start();
    let rig = Rig::start(&[deaf.address], &params()).await;
    deaf.fill().await;
    let router = rig.router;
    let client = tokio::spawn(async move {
        post(router, "/v1/completions", "", &asked()).await;
    });
    rig.has_metric("kvx_proxy_legs_total{leg=\"prefill\",outcome=\"ok\"} 1").await;
    assert_eq!(rig.recorder.seen.lock().unwrap().len(), 0, "the decode leg is still tried");
    client.abort();
    assert_eq!(rig.released("sent", 1).await.len(), 1);
}

#[tokio::test]
async fn pushed_blocks_and_answers_without_blocks_are_not_released() {
    let pushed = |params: &mut Value| params["transfer_mode"] = "push".into();
    let empty = |params: &mut Value| params["remote_block_ids"] = json!([[]]);
    let long = |params: &mut Value| params["remote_request_id"] = "r".repeat(2000).into();
    let changes: [&dyn Fn(&mut Value); 3] = [&pushed, &empty, &long];
    for change in changes {
        let mut changed = params();
        change(&mut changed);
        let mut deaf = Deaf::start();
        let rig = Rig::start(&[deaf.address], &changed).await;
        deaf.refuse().await;
        post(rig.router, "/v1/completions", "", &asked()).await;
        assert_eq!(rig.ended().await.len(), 0, "{changed}");
    }
}

#[tokio::test]
async fn releases_that_fail_are_counted_and_said() {
    for (error, result) in [
        (ReleaseError::Refused("another secret".to_owned()), "refused"),
        (ReleaseError::Failed("nobody answers".to_owned()), "failed"),
    ] {
        let mut deaf = Deaf::start();
        let rig = Rig::with_result(&[deaf.address], &params(), Err(error)).await;
        deaf.refuse().await;
        post(rig.router, "/v1/completions", "", &asked()).await;
        rig.released(result, 1).await;
        let status = rig.get("/status").await;
        assert!(status.contains(&format!("release of blocks: {result}: ")), "{status}");
    }
}

#[tokio::test]
async fn without_a_releaser_the_status_says_that_leases_rule() {
    let setup = "port = 0\naccess_log = 'off'\n[[pool]]\ndecode = ['http://127.0.0.1:1']";
    let proxy = Proxy::bind(Setup::from_toml(setup).unwrap()).await.unwrap();
    let (router, handle) = (proxy.local_addr(), proxy.handle());
    let running = tokio::spawn(proxy.run());
    let recorder = Recorder { seen: Arc::default(), result: Ok(()) };
    let prefill = Upstream::start(Vec::new()).await;
    let rig = Rig { router, handle, running, recorder, _prefill: prefill };
    let status = rig.get("/status").await;
    assert!(status.contains(r#""by":"lease""#), "{status}");
}

#[tokio::test]
async fn a_router_that_ends_releases_the_blocks_of_the_requests_that_it_breaks_off() {
    let mut deaf = Deaf::start();
    let rig = Rig::start(&[deaf.address], &params()).await;
    deaf.fill().await;
    let router = rig.router;
    let client = tokio::spawn(async move { post(router, "/v1/completions", "", &asked()).await });
    rig.has_metric("kvx_proxy_legs_total{leg=\"prefill\",outcome=\"ok\"} 1").await;
    assert_eq!(rig.ended().await.len(), 1);
    client.abort();
}
