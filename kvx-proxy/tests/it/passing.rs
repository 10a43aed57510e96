//! Tests of answers that the router forwards without reading them.

use std::net::SocketAddr;
use std::time::Duration;

use kvx_proxy::{Proxy, Setup};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::client::post;
use crate::upstream::{self, Upstream};
use crate::within;

/// Starts a router in front of these decode instances; it ends with the test's runtime.
async fn router(decode: &[Upstream]) -> SocketAddr {
    router_with(decode, "[timeouts]\nidle = '300ms'").await
}

async fn router_with(decode: &[Upstream], lines: &str) -> SocketAddr {
    let urls: Vec<_> = decode.iter().map(|one| format!("'http://{}'", one.address)).collect();
    let setup =
        format!("port = 0\naccess_log = 'off'\n{lines}\n[[pool]]\ndecode = [{}]", urls.join(", "));
    let mut proxy = Proxy::bind(Setup::from_toml(&setup).unwrap()).await.unwrap();
    proxy.check_instances().await;
    let address = proxy.local_addr();
    tokio::spawn(proxy.run());
    address
}

#[tokio::test]
async fn compressed_answers_pass_unchanged() {
    // A gzip header without compressed data.
    let body = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03not really";
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let decode = [Upstream::start(vec![(Duration::ZERO, [head.as_bytes(), body].concat())]).await];
    let router = router(&decode).await;
    let asked = json!({"model": "m", "prompt": "a", "max_tokens": 1});
    let (head, got) = post(router, "/v1/completions", "accept-encoding: gzip\r\n", &asked).await;
    assert!(head.starts_with("http/1.1 200") && head.contains("content-encoding: gzip"), "{head}");
    assert_eq!(got, body);
    assert!(decode[0].heads()[0].contains("accept-encoding: gzip"), "{:?}", decode[0].heads());
}

#[tokio::test]
async fn a_compressed_stream_that_stops_breaks_the_connection_without_an_event() {
    for (coding, piece) in
        [("", "data: {\"choices\": []}\n\n"), ("content-encoding: gzip\r\n", "\x1f\x08\x00")]
    {
        let chunk = format!("{:x}\r\n{piece}\r\n", piece.len());
        let head =
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n";
        let pieces = vec![(Duration::ZERO, format!("{head}{coding}\r\n{chunk}").into_bytes())];
        let decode = [Upstream::start(pieces).await];
        let router = router(&decode).await;
        let asked = json!({"model": "m", "prompt": "a", "max_tokens": 1, "stream": true});
        let (head, got) = post(router, "/v1/completions", "", &asked).await;
        assert!(head.starts_with("http/1.1 200"), "{coding}: {head}");
        let got = String::from_utf8(got).unwrap();
        match coding {
            "" => {
                assert!(got.contains("upstream_timeout") && got.ends_with("0\r\n\r\n"), "{got:?}")
            }
            _ => assert_eq!(got, chunk, "no more, and not the end of a body"),
        }
    }
}

#[tokio::test]
async fn hop_by_hop_headers_of_an_instance_are_removed() {
    const KEPT: &str = "x-own: kept";
    let body =
        json!({"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}).to_string();
    for (status, path) in [
        ("200 OK", "/v1/completions"),
        ("200 OK", "/v1/embeddings"),
        ("400 Bad Request", "/v1/completions"),
        ("500 Internal Server Error", "/v1/completions"),
    ] {
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{KEPT}\r\n\
             connection: keep-alive, X-Mine\r\nx-mine: 1\r\nkeep-alive: timeout=5\r\nproxy-connection: keep-alive\r\n\
             proxy-authenticate: Basic\r\ntrailer: x-sum\r\nupgrade: h2c\r\n\r\n{body}",
            body.len()
        );
        let router =
            router(&[Upstream::start(vec![(Duration::ZERO, head.into_bytes())]).await]).await;
        let asked = json!({"model": "m", "prompt": "a", "max_tokens": 1});
        let (head, got) = post(router, path, "", &asked).await;
        let status = status.to_ascii_lowercase();
        assert!(head.starts_with(&format!("http/1.1 {status}")) && head.contains(KEPT), "{head}");
        assert_eq!(got, body.as_bytes(), "{status} {path}");
        for name in
            ["x-mine", "keep-alive", "proxy-connection", "proxy-authenticate", "trailer", "upgrade"]
        {
            assert!(!head.contains(&format!("\r\n{name}:")), "{name}: {head}");
        }
        // The client requested this one.
        let connection: Vec<_> =
            head.lines().filter(|line| line.starts_with("connection:")).collect();
        assert_eq!(connection, ["connection: close"], "{head}");
    }
}

#[tokio::test]
async fn a_stored_response_is_served_by_the_instance_that_stored_it() {
    let answer = || upstream::json(&json!({"id": "resp_1", "object": "response"}));
    let decode = [
        Upstream::start(answer()).await,
        Upstream::start(answer()).await,
        Upstream::start(answer()).await,
    ];
    let router = router(&decode).await;
    let first = json!({"model": "m", "input": "hello"});
    assert!(post(router, "/v1/responses", "", &first).await.0.starts_with("http/1.1 200"));
    let stored_by: Vec<_> = decode.iter().map(|one| one.heads().len()).collect();
    for count in 0..6 {
        let next = json!({"model": "m", "input": count, "previous_response_id": "resp_1"});
        assert!(post(router, "/v1/responses", "", &next).await.0.starts_with("http/1.1 200"));
    }
    let got: Vec<_> = decode.iter().map(|one| one.heads().len()).collect();
    let expected: Vec<_> = stored_by.iter().map(|first| first * 7).collect();
    assert_eq!(got, expected);
    // That instance also gets the cancellation. Any instance gets that of an unknown response.
    for _ in 0..6 {
        let cancel = post(router, "/v1/responses/resp_1/cancel", "", &json!({})).await;
        assert!(
            cancel.0.starts_with("http/1.1 200") && cancel.0.contains("x-kvx-route: passed"),
            "{}",
            cancel.0
        );
    }
    let cancels = |id: &str| -> Vec<_> {
        let line = format!("post /v1/responses/{id}/cancel ");
        decode
            .iter()
            .map(|one| one.heads().iter().filter(|head| head.starts_with(&line)).count())
            .collect()
    };
    let expected: Vec<_> = stored_by.iter().map(|first| first * 6).collect();
    assert_eq!(cancels("resp_1"), expected);
    let unknown = post(router, "/v1/responses/resp_2/cancel", "", &json!({})).await;
    assert!(unknown.0.starts_with("http/1.1 200"), "{}", unknown.0);
    assert_eq!(cancels("resp_2").iter().sum::<usize>(), 1);
}

#[tokio::test]
async fn a_client_that_reads_nothing_holds_no_instance_for_long() {
    // More than the sockets' buffers hold.
    let length = 64 << 20;
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: {length}\r\n\r\n"
    );
    let pieces = vec![(Duration::ZERO, head.into_bytes()), (Duration::ZERO, vec![b'x'; length])];
    let mut decode = [Upstream::start(pieces).await];
    let router = router_with(&decode, "[limits]\nstall = '500ms'").await;
    let mut stream = within(TcpStream::connect(router)).await;
    let request = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
    within(stream.write_all(request)).await;
    let mut first = [0; 12];
    within(stream.read_exact(&mut first)).await;
    assert_eq!(&first, b"HTTP/1.1 200");
    decode[0].left_alone().await;
    // Another client reads slowly, in total for longer than the stall.
    let mut slow = within(TcpStream::connect(router)).await;
    within(slow.write_all(request)).await;
    let (mut read, mut bytes) = (0, vec![0; 2 << 20]);
    while read < length {
        let some = within(slow.read(&mut bytes)).await;
        assert!(some > 0, "it ended after {read} bytes");
        read += some;
        if read / (4 << 20) > (read - some) / (4 << 20) {
            tokio::time::sleep(Duration::from_millis(60)).await; // deliberately slow
        }
    }
}
