//! H1: a body of the router's limits takes a hundred times its length once it is parsed.

use kvx_testkit::test;
use serde_json::json;

use crate::attacks::http::{Upstream, post};
use crate::proxy::fleet::{Proxy, SetupFile};

/// The length of a body.
const LENGTH: usize = 4 << 20;
/// `limits.bodies`, in KiB.
const BODIES: u64 = 16 << 10;

/// Returns about this many bytes of a piece, again and again.
fn repeated(piece: &str) -> String {
    piece.repeat(LENGTH / piece.len())
}

#[test]
fn bodies_stay_within_their_memory_whatever_their_shape() {
    let params = json!({
        "do_remote_prefill": true, "remote_block_ids": [[1]], "remote_engine_id": "e", "remote_request_id": "r",
        "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1,
    });
    let choice = json!({"index": 0, "text": "a", "finish_reason": "length"});
    let answer = json!({"choices": [choice], "kv_transfer_params": params}).to_string();
    let instances = [answer.clone(), answer].map(|answer| Upstream::start(move |_| answer.clone()));
    let file = SetupFile::new(&format!(
        "port = 0\nconnector = 'NixlPullConnector'\n[limits]\nbody = '8MiB'\nbodies = '{BODIES}KiB'\n\
         [[pool]]\nprefill = ['{}']\ndecode = ['{}']\n",
        instances[0].url, instances[1].url
    ));
    let proxy = Proxy::start(&["--config", file.path()], &[]);
    let before = proxy.peak();
    let lines = "connection: close\r\ncontent-type: application/json\r\n";
    let shapes = [
        ("objects", format!("[{}0]", repeated("{\"\":0},"))),
        ("numbers", format!("[{}0]", repeated("0,"))),
        ("lists", format!("[{}0]", repeated("[],"))),
        ("escapes", format!("\"{}\"", repeated("\\n"))),
    ];
    let most = 4 * BODIES;
    for (shape, value) in &shapes {
        for path in &["/v1/completions", "/v1/embeddings"] {
            let body = format!(
                r#"{{"model": "m", "prompt": {value}, "kv_transfer_params": {{"remote_host": "evil"}}}}"#
            );
            let answer = post(proxy.port, path, lines, body.as_bytes());
            assert!(answer.starts_with("HTTP/1.1 200 "), "{path}, {shape}: {answer}");
            // Texts and token ids.
            let both = *path == "/v1/completions" && ["escapes", "numbers"].contains(shape);
            assert_eq!(answer.contains("x-kvx-route: disaggregated"), both, "{path}, {shape}");
            let grown = proxy.peak() - before;
            assert!(grown < most, "{path}, {shape}: {grown} KiB");
        }
    }
    // Many keys are no request of any API.
    let keys: String = (0..LENGTH / 10).map(|key| format!("\"{key}\":0,")).collect();
    let answer = post(proxy.port, "/v1/completions", lines, format!("{{{keys}\"\":0}}").as_bytes());
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    // More bodies at once than there is memory for: some are answered, and others have to wait.
    let body = format!(r#"{{"model": "m", "prompt": {}}}"#, shapes[0].1);
    let answers = std::thread::scope(|threads| {
        let posts: Vec<_> = (0..6)
            .map(|_| threads.spawn(|| post(proxy.port, "/v1/embeddings", lines, body.as_bytes())))
            .collect();
        posts.into_iter().map(|post| post.join().unwrap()).collect::<Vec<_>>()
    });
    for answer in answers {
        let status = answer.get(9..12).unwrap_or_default();
        // Empty: the router closed the connection before the client had sent its body.
        assert!(matches!(status, "200" | "503" | ""), "{answer}");
    }
    let grown = proxy.peak() - before;
    println!("{grown} KiB for bodies, of at most {most}");
    assert!(grown < most, "{grown} KiB");
    assert_eq!(post(proxy.port, "/v1/embeddings", lines, b"{}").get(9..12), Some("200"));
    for received in instances.iter().flat_map(Upstream::received) {
        let body = String::from_utf8_lossy(&received.body);
        assert!(!body.contains("evil"), "{}{body:.500}", received.head);
    }
}
