//! Tests of the requests that both legs of a completion send.

use kvx_proxy::{Proxy, Setup};
use serde_json::{Value, json};

use crate::client::post;
use crate::upstream::{self, Upstream};

/// Starts a router in front of a prefill instance that answers with these blocks, and of a decode
/// instance.
async fn router(blocks: &Value) -> (std::net::SocketAddr, Upstream, Upstream) {
    let params = json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": blocks, "remote_engine_id": "e",
        "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1,
    });
    let choices = json!([{"index": 0, "text": "a", "finish_reason": "length"}]);
    let answer = json!({"choices": choices, "kv_transfer_params": params});
    let prefill = Upstream::start(upstream::json(&answer)).await;
    let decode = Upstream::start(upstream::json(&json!({ "choices": choices }))).await;
    let setup = format!(
        "port = 0\naccess_log = 'off'\nconnector = 'NixlConnector'\n\
         [[pool]]\nprefill = ['http://{}']\ndecode = ['http://{}']",
        prefill.address, decode.address
    );
    let mut proxy = Proxy::bind(Setup::from_toml(&setup).unwrap()).await.unwrap();
    proxy.check_instances().await;
    let address = proxy.local_addr();
    tokio::spawn(proxy.run());
    (address, prefill, decode)
}

/// Returns the value of a header.
fn header<'a>(head: &'a str, name: &str) -> &'a str {
    let value = |line: &'a str| line.strip_prefix(name)?.strip_prefix(": ");
    head.lines().find_map(value).unwrap_or_else(|| panic!("no {name}: {head}"))
}

#[tokio::test]
async fn block_ids_are_written_as_their_prefill_instance_wrote_them() {
    let asked = json!({"model": "m", "prompt": "some words", "max_tokens": 5});
    // vLLM 0.16 and 0.17 write one flat list; later versions write a list for each group.
    for blocks in [json!([4, 5, 6]), json!([[4, 5, 6]]), json!([[4, 5], [6]])] {
        let (router, _prefill, decode) = router(&blocks).await;
        let (head, _) = post(router, "/v1/completions", "", &asked).await;
        assert!(
            head.starts_with("http/1.1 200") && head.contains("x-kvx-route: disaggregated"),
            "{head}"
        );
        let [body] = &decode.bodies()[..] else { panic!("one decode leg: {:?}", decode.heads()) };
        let params = &body["kv_transfer_params"];
        assert_eq!(params["remote_block_ids"], blocks, "{body}");
        assert_eq!(
            (&params["remote_engine_id"], &body["max_tokens"]),
            (&json!("e"), &json!(5)),
            "{body}"
        );
    }
}

#[tokio::test]
async fn a_request_without_a_trace_gets_one_for_both_legs() {
    let (router, prefill, decode) = router(&json!([[1]])).await;
    let asked = json!({"model": "m", "prompt": "some words", "max_tokens": 1});
    // An invalid `traceparent` counts as none.
    for lines in ["", "tracestate: a=b\r\n", "traceparent: 00-0-0-00\r\ntracestate: a=b\r\n"] {
        let (head, _) = post(router, "/v1/completions", lines, &asked).await;
        assert!(
            head.starts_with("http/1.1 200") && head.contains("x-kvx-route: disaggregated"),
            "{head}"
        );
    }
    let trace = |head: &String| {
        assert!(!head.contains("tracestate"), "of a trace that was replaced: {head}");
        let parts: Vec<_> = header(head, "traceparent").split('-').map(str::to_owned).collect();
        let [version, trace, span, flags] = &parts[..] else { panic!("four parts: {head}") };
        let is_id = |text: &str, length| {
            text.len() == length
                && text.bytes().all(|byte| byte.is_ascii_hexdigit())
                && text.bytes().any(|byte| byte != b'0')
        };
        assert_eq!((version.as_str(), flags.as_str()), ("00", "00"), "{head}");
        assert!(is_id(trace, 32) && is_id(span, 16), "{head}");
        trace.clone()
    };
    let traces: Vec<_> = prefill.heads().iter().map(trace).collect();
    assert_eq!(
        traces,
        decode.heads().iter().map(trace).collect::<Vec<_>>(),
        "both legs of a request"
    );
    let different: std::collections::HashSet<_> = traces.iter().collect();
    assert_eq!((traces.len(), different.len()), (3, 3), "each request has its own: {traces:?}");
}
