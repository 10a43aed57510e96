//! L8: a client writes the id of another client's stored response into its own request, and the
//! router looks for that response at the wrong instance.

use kvx_testkit::test;
use serde_json::{Value, json};

use crate::attacks::http::{Upstream, get, post};
use crate::proxy::fleet::Proxy;

const LINES: &str = "connection: close\r\ncontent-type: application/json\r\n";

/// Starts an instance that writes texts of the request before the id of its stored response.
fn instance(id: &'static str) -> Upstream {
    Upstream::start(move |received| {
        let body: Value = serde_json::from_slice(&received.body).unwrap_or_default();
        format!(r#"{{"instructions":{},"id":"{id}"}}"#, body["instructions"])
    })
}

#[test]
fn texts_of_a_client_do_not_move_stored_responses() {
    let instances = ["resp_one", "resp_other"].map(instance);
    let urls = [&*instances[0].url, &*instances[1].url];
    let arguments =
        ["--port", "0", "--choice", "round-robin", "--decode", urls[0], "--decode", urls[1]];
    let proxy = Proxy::start(&arguments, &[]);
    let ask = |instructions: &str| {
        let body = json!({"model": "m", "input": "a", "instructions": instructions}).to_string();
        let answer = post(proxy.port, "/v1/responses", LINES, body.as_bytes());
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    };
    // In turn: each instance stores its response, then writes the id of the other one's.
    for _ in 0..2 {
        ask("none");
    }
    for id in ["resp_one", "resp_other"] {
        for _ in 0..2 {
            ask(id);
        }
    }
    for (index, id) in ["resp_one", "resp_other"].into_iter().enumerate() {
        let path = format!("/v1/responses/{id}");
        let answer = get(proxy.port, &path, "connection: close\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        let asked = |one: &Upstream| {
            one.received().iter().any(|received| received.head.starts_with(&format!("get {path} ")))
        };
        assert!(asked(&instances[index]) && !asked(&instances[1 - index]), "{id} is not there");
    }
}
