//! Tests of keys, limits, and secrets in logs.

use std::time::{Duration, Instant};

use hyper::Method;
use kvx_instance::{Instance, Settings};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::proxy::client::{CUT_OFF, Call, completion};
use crate::proxy::fleet::{Fleet, Plan, Proxy, SetupFile};
use crate::proxy::recipes::COMPLETIONS;

const LIMITS: &str = "[limits]\nheaders = \"8KiB\"\nbody = \"64KiB\"\nbodies = \"128KiB\"\nheader_time = \"700ms\"\nbody_time = \"700ms\"\n";

/// Sends these bytes, and reads until the server closes or answers.
async fn raw(port: u16, bytes: &[u8]) -> String {
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.expect("it listens");
    stream.write_all(bytes).await.ok(); // an error: the server closed early
    let mut answer = Vec::new();
    let read = tokio::time::timeout(CUT_OFF, stream.read_to_end(&mut answer)).await;
    assert!(read.is_ok(), "it holds the connection: {:?}", String::from_utf8_lossy(bytes));
    String::from_utf8_lossy(&answer).into_owned()
}

pub(crate) async fn it_binds_loopback_by_default() {
    let fleet = Fleet::new(1, 1).await;
    let port = format!(":{:04X}", fleet.port());
    let listening: Vec<_> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|file| std::fs::read_to_string(file).ok())
        .flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>())
        .filter(|line| line.split_whitespace().nth(3) == Some("0A"))
        .filter_map(|line| line.split_whitespace().nth(1).map(str::to_owned))
        .filter(|address| address.ends_with(&port))
        .collect();
    assert_eq!(listening, [format!("0100007F{port}")]);
}

pub(crate) async fn clients_need_a_key_where_there_are_keys() {
    let keys = SetupFile::new("first key\nsecond-key\n");
    let setup = format!("api_key_file = \"{}\"", keys.path());
    let mut fleet = Plan::of(1, 1, &Settings::default())
        .setup(&setup)
        .variable("OPENAI_API_KEY", "upstream-key")
        .variable("ADMIN_API_KEY", "admin-key")
        .start()
        .await;
    let call = || Call::post(fleet.proxy.port, COMPLETIONS, &completion("let me", 1));
    for wrong in [
        None,
        Some("Bearer second-ke"),
        Some("Bearer second-keyy"),
        Some("Basic second-key"),
        Some("Bearer "),
    ] {
        let call = match wrong {
            Some(key) => call().header("authorization", key),
            None => call(),
        };
        let answer = call.send().await;
        assert_eq!(answer.status, 401, "{wrong:?}");
        assert!(answer.json()["error"]["message"].is_string());
    }
    for right in ["Bearer second-key", "Bearer first key"] {
        assert_eq!(call().header("authorization", right).send().await.status, 200, "{right}");
    }
    for open in ["/health", "/ready"] {
        assert_eq!(Call::get(fleet.port(), open).send().await.status, 200, "{open}");
    }
    assert_eq!(Call::get(fleet.port(), "/v1/models").send().await.status, 401);
    let said = format!("{}{}", fleet.proxy.errors(), fleet.proxy.output());
    for secret in ["second-key", "first key", "upstream-key", "admin-key"] {
        assert!(!said.contains(secret), "{secret} is in the logs: {said}");
    }
    fleet.wait_until_idle();
}

pub(crate) async fn requests_that_are_too_long_or_too_slow_are_rejected() {
    let fleet = Plan::of(1, 1, &Settings::default()).setup(LIMITS).start().await;
    let long =
        Call::post(fleet.port(), COMPLETIONS, &completion(&"x".repeat(70_000), 1)).send().await;
    assert_eq!(long.status, 413, "{}", long.text());
    let wide =
        Call::get(fleet.port(), "/v1/models").header("x-wide", "x".repeat(20_000)).try_send().await;
    assert!(wide.as_ref().map_or(true, |answer| answer.status == 431), "{wide:?}");
    let start = Instant::now();
    let chunked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n4\r\n{\"mo\r\n";
    let slow_body = raw(fleet.port(), chunked).await;
    assert!(slow_body.starts_with("HTTP/1.1 408") || slow_body.is_empty(), "{slow_body}");
    let slow_head = raw(fleet.port(), b"GET /health HTTP/1.1\r\nhos").await;
    assert!(slow_head.starts_with("HTTP/1.1 408") || slow_head.is_empty(), "{slow_head}");
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}", start.elapsed());
    let endless = Call::new(fleet.port(), Method::POST, COMPLETIONS)
        .header("content-type", "application/json")
        .body("[".repeat(60_000))
        .send()
        .await;
    assert_eq!(endless.status, 400, "{}", endless.text());
    let ids = json!({"model": "m", "prompt": vec![1; 25_000], "max_tokens": 1});
    let wide = Call::post(fleet.port(), COMPLETIONS, &ids).send().await;
    assert_eq!(wide.status, 413, "with its legs it is three times as long: {}", wide.text());
    assert_eq!(
        Call::post(fleet.port(), COMPLETIONS, &completion("well", 1)).send().await.status,
        200
    );
}

pub(crate) async fn invalid_http_is_answered_and_closed() {
    let fleet = Plan::of(1, 1, &Settings::default()).setup(LIMITS).start().await;
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        b"\0\0\0\0\0\0\0\0\r\n\r\n",
    ] {
        let answer = raw(fleet.port(), bytes).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{bytes:?}: {answer}");
    }
    for (kind, body) in [
        ("application/json", "{"),
        ("application/json", "[]"),
        ("application/json", "\"x\""),
        ("text/plain", "{}"),
    ] {
        let answer = Call::new(fleet.port(), Method::POST, COMPLETIONS)
            .header("content-type", kind)
            .body(body)
            .send()
            .await;
        assert!((400..500).contains(&answer.status), "{kind} {body}: {}", answer.text());
    }
    let traversal = Call::get(fleet.port(), "/v1/../kv/read").send().await;
    assert!((400..500).contains(&traversal.status), "{}", traversal.text());
    assert_eq!(
        Call::post(fleet.port(), COMPLETIONS, &completion("well", 1)).send().await.status,
        200
    );
}

pub(crate) async fn an_instance_with_a_key_gets_the_clients() {
    let settings = Settings { api_key: Some("theirs".to_owned()), ..Settings::default() };
    let (prefill, decode) = (Instance::start(settings.clone()), Instance::start(settings));
    let text = format!(
        "port = 0\n[[pool]]\nprefill = [\"{}\"]\ndecode = [\"{}\"]\n",
        prefill.url(),
        decode.url()
    );
    let file = SetupFile::new(&text);
    let proxy = Proxy::start(&["--config", file.path()], &[("OPENAI_API_KEY", "theirs")]);
    proxy.wait_until("/ready", "it is ready", |status, _| status == 200).await;
    let call = || Call::post(proxy.port, COMPLETIONS, &completion("keys", 1));
    assert_eq!(call().send().await.status, 200);
    assert_eq!(call().header("authorization", "Bearer another").send().await.status, 401);
}
