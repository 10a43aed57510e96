//! L6: clients of a fleet with bidirectional transfer begin many conversations with long answers,
//! which the router keeps for their next turns.

use kvx_testkit::test;
use serde_json::json;

use crate::attacks::http::{Upstream, post};
use crate::proxy::fleet::{Proxy, SetupFile};

/// Enough for a router that keeps the answers to take more than its budget of 64 MiB.
const TURNS: usize = 96;
const ANSWER: usize = 1_000_000;

/// Starts an instance that answers with this many letters, and with blocks that it keeps.
fn instance(letters: usize, wanted: &str) -> Upstream {
    let params = json!({
        wanted: true, "remote_block_ids": [[1]], "remote_engine_id": "e", "remote_request_id": "r",
        "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1,
    });
    let choice = json!({"index": 0, "text": "x".repeat(letters), "finish_reason": "length"});
    let answer = json!({"choices": [choice], "kv_transfer_params": params}).to_string();
    Upstream::start(move |_| answer.clone())
}

#[test]
fn conversations_have_one_budget() {
    let (prefill, decode) =
        (instance(1, "do_remote_prefill"), instance(ANSWER, "do_remote_decode"));
    let file = SetupFile::new(&format!(
        "port = 0\nconnector = 'NixlPullConnector'\n[[pool]]\nbidirectional = true\nprefill = ['{}']\ndecode = ['{}']\n",
        prefill.url, decode.url
    ));
    let proxy = Proxy::start(&["--config", file.path()], &[]);
    let turn = |turn: usize| {
        let body = json!({"model": "m", "prompt": "a", "max_tokens": 1, "conversation_id": turn.to_string()});
        let lines = "connection: close\r\ncontent-type: application/json\r\n";
        let answer = post(proxy.port, "/v1/completions", lines, body.to_string().as_bytes());
        let is_answer = answer.starts_with("HTTP/1.1 200 ") && answer.len() > ANSWER;
        assert!(is_answer, "{answer:.500}");
        assert!(answer.contains("x-kvx-route: disaggregated"), "{answer:.500}");
    };
    (0..4).for_each(turn);
    let before = proxy.resident();
    (4..TURNS).for_each(turn);
    let grown = proxy.resident().saturating_sub(before);
    println!("{grown} KiB for {} turns", TURNS - 4);
    assert!(grown < 64 << 10, "{grown} KiB for {} turns", TURNS - 4);
}
