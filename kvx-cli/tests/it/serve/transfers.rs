//! Tests of prefill and decode on separate servers: the tokens equal those of a single server, and
//! the prefill may be lost.

use kvx_testkit::test;
use serde_json::{Value, json};

use crate::serve::backends::backends;
use crate::serve::server::{LIMIT, Server, ServerArgs, model};
use crate::serve::{assert_same, ids};

/// Sends a request to a prefill, then to a decode, as a proxy does.
pub(crate) fn apart(prefill: &Server, decode: &Server, prompt: &Value, count: usize) -> Value {
    let params = published(prefill, prompt);
    decode.tokens(prompt, count, Some(&params))
}

/// Returns the parameters that a prefill publishes for the decode.
pub(crate) fn published(prefill: &Server, prompt: &Value) -> Value {
    let answer = prefill.tokens(
        prompt,
        1,
        Some(
            &json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
                     "remote_block_ids": null, "remote_host": null, "remote_port": null}),
        ),
    );
    let params = answer["kv_transfer_params"].clone();
    assert_eq!(params["do_remote_prefill"], true, "{answer}");
    params
}

/// Returns a hundred prompts of up to eight blocks.
fn many() -> Vec<Value> {
    let tokens =
        |at: u64| (0..1 + at * 7 % 120).map(|token| 33 + (at + token * 3) % 80).collect::<Vec<_>>();
    (0..100).map(|at| json!(tokens(at))).collect()
}

/// Runs over one backend in the usual run, and over each in the whole one.
#[test]
fn many_requests_at_once_are_all_right_and_no_block_stays() {
    let model = model(&["--arch", "llama"]);
    let single = Server::start(&model, ServerArgs::default());
    let right: Vec<(Value, Value)> =
        many().into_iter().map(|prompt| (single.tokens(&prompt, 10, None), prompt)).collect();
    let name = "transfers::many_requests_at_once_are_all_right_and_no_block_stays";
    for backend in backends(name, "TCP") {
        let fields = json!({"kv_load_failure_policy": "fail"});
        let start = |arguments: &[&str]| {
            backend.server(&model, &fields, ServerArgs { arguments, ..ServerArgs::default() })
        };
        let prefill = start(&[]);
        let decode = start(&["--num-gpu-blocks-override", "130", "--max-model-len", "1024"]);
        std::thread::scope(|scope| {
            let ask = |(right, prompt): &(Value, Value)| {
                let answer = apart(&prefill, &decode, prompt, 10);
                assert_same(&answer, right, format_args!("{prompt} over {}", backend.name));
            };
            let asked: Vec<_> = right.iter().map(|one| scope.spawn(move || ask(one))).collect();
            for asked in asked {
                asked.join().expect("an answer is wrong");
            }
        });
        prefill.keeps_nothing(LIMIT);
        decode.keeps_nothing(LIMIT);
    }
}

// vLLM 29: with policy `fail`, `kvx serve` answers a failed load with HTTP 500, or with an error
//     event in a stream
// vLLM guide R11: after a failed load, policy `fail` ends the request, and `recompute` computes its
//     blocks on the decode
#[test]
fn a_prefill_that_is_gone_fails_the_request_or_it_is_computed_here() {
    let model = model(&["--arch", "llama"]);
    let prompt = json!((0..100).map(|at| 40 + at % 50).collect::<Vec<_>>());
    for policy in ["fail", "recompute"] {
        let prefill = Server::with_peers(&model, "TCP", policy, &[]);
        let decode = Server::with_peers(&model, "TCP", policy, &[]);
        let params = published(&prefill, &prompt);
        drop(prefill);
        if policy == "fail" {
            let body = json!({"prompt": prompt, "max_tokens": 4, "kv_transfer_params": params});
            let (status, answer) = decode.post("/v1/completions", &body);
            assert_eq!(
                (status, &answer["error"]["message"]),
                (500, &json!("Internal server error"))
            );
            let mut streamed = body;
            streamed["stream"] = true.into();
            let events = decode.events("/v1/completions", &streamed);
            assert_eq!(events[0]["error"]["code"], 500);
        } else {
            let answer = decode.tokens(&prompt, 6, Some(&params));
            let single = Server::start(&model, ServerArgs::default());
            assert_same(&answer, &single.tokens(&prompt, 6, None), "computed here");
            assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
        }
        // The next request is served.
        assert_eq!(ids(&decode.tokens(&json!("next"), 3, None)).len(), 3);
    }
}
