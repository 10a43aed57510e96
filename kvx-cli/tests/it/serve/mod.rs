//! Tests of `kvx serve` from the view of its clients and operators.

mod backends;
mod clients;
mod demo;
mod events;
mod faults;
mod fleets;
pub(crate) mod guides;
mod headless;
pub(crate) mod hosts;
mod matrix;
mod program;
mod ranks;
pub(crate) mod registered;
mod registration;
#[cfg(feature = "release")]
mod releases;
pub(crate) mod server;
pub(crate) mod transfers;

use std::collections::BTreeMap;

use kvx_testkit::test;
use serde_json::{Value, json};

use crate::serve::server::{Server, ServerArgs, VOCABULARY, model};

pub(crate) fn ids(answer: &Value) -> Vec<u64> {
    let ids = answer["choices"][0]["token_ids"].as_array().expect("token ids were asked for");
    ids.iter().map(|id| id.as_u64().expect("a token")).collect()
}

/// Asserts that both answers have the same tokens, chosen by bitwise equal logits.
#[track_caller]
fn assert_same(answer: &Value, right: &Value, what: impl std::fmt::Display) {
    assert_eq!(ids(answer), ids(right), "{what}");
    let (logits, right) = (logits(answer), logits(right));
    for (at, (logits, right)) in logits.iter().zip(&right).enumerate() {
        assert!(logits == right, "{what}: the logits of token {at}");
    }
}

/// Returns the logits of all tokens, at each position of the answer.
#[track_caller]
fn logits(answer: &Value) -> Vec<BTreeMap<&str, u64>> {
    let places =
        answer["choices"][0]["logprobs"]["top_logprobs"].as_array().expect("logits were asked for");
    assert_eq!(places.len(), ids(answer).len());
    places.iter().map(bits).collect()
}

#[track_caller]
fn bits(place: &Value) -> BTreeMap<&str, u64> {
    let logits = place.as_object().expect("logits");
    assert_eq!(logits.len(), VOCABULARY);
    logits
        .iter()
        .map(|(name, logit)| (name.as_str(), logit.as_f64().expect("a logit").to_bits()))
        .collect()
}

#[test]
fn a_completion_is_the_same_whole_streamed_by_tokens_and_among_others() {
    let server = Server::start(&model(&["--arch", "llama"]), ServerArgs::default());
    let prompt = "The quick brown fox jumps over the lazy dog.";
    let whole = server.tokens(&json!(prompt), 20, None);
    assert_eq!((&whole["object"], &whole["model"]), (&json!("text_completion"), &json!("m")));
    assert_eq!(whole["usage"]["completion_tokens"], 20);
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(ids(&whole).len(), 20);

    let events = server.events(
        "/v1/completions",
        &json!({"model": "m", "prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": true, "stream": true,
                "stream_options": {"include_usage": true}}),
    );
    let text: String =
        events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(whole["choices"][0]["text"], text);
    assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], 20);

    let tokens = whole["choices"][0]["prompt_token_ids"].clone();
    assert_eq!(ids(&server.tokens(&tokens, 20, None)), ids(&whole));
    let several = json!({"model": "m", "prompt": ["other words", prompt, "more of them, so many that they fill blocks"],
                         "max_tokens": 20, "temperature": 0, "ignore_eos": true, "return_token_ids": true});
    let (status, several) = server.post("/v1/completions", &several);
    assert_eq!(status, 200);
    assert_eq!(several["choices"][1]["token_ids"], whole["choices"][0]["token_ids"]);
}

#[test]
fn a_chat_uses_the_models_template_and_seeds_repeat() {
    let probabilities =
        ServerArgs { arguments: &["--logprobs-mode", "raw_logprobs"], ..ServerArgs::default() };
    let server = Server::start(&model(&["--arch", "qwen3"]), probabilities);
    let messages = json!([{"role": "user", "content": "Hello!"}]);
    let body = json!({"messages": messages, "max_tokens": 12, "seed": 5, "temperature": 1.1, "top_p": 0.9, "top_k": 40,
                      "ignore_eos": true, "logprobs": true, "top_logprobs": 2, "return_token_ids": true});
    let (status, first) = server.post("/v1/chat/completions", &body);
    assert_eq!(status, 200, "{first}");
    assert_eq!(
        server.post("/v1/chat/completions", &body).1["choices"][0]["token_ids"],
        first["choices"][0]["token_ids"]
    );
    assert_eq!(first["choices"][0]["message"]["role"], "assistant");
    let content = first["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 12);
    assert!(content.iter().all(|one| one["top_logprobs"].as_array().unwrap().len() == 2
        && one["logprob"].as_f64() < Some(0.0)));
    let (_, prompt) = server.post("/tokenize", &json!({"messages": messages}));
    assert_eq!(prompt["tokens"], first["prompt_token_ids"]);
    let (_, text) = server.post("/detokenize", &json!({"tokens": prompt["tokens"]}));
    let text = text["prompt"].as_str().unwrap();
    assert!(text.contains("user\nHello!") && text.ends_with("assistant\n"), "{text}");
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = server.events("/v1/chat/completions", &streamed);
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let text: String = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(first["choices"][0]["message"]["content"], text);
}

#[test]
fn several_answers_logprobs_echo_and_stops_are_as_requested() {
    let server = Server::start(&model(&["--arch", "llama"]), ServerArgs::default());
    let ask = |more: Value| {
        let mut body =
            json!({"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, answer) = server.post("/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer
    };
    let three = ask(json!({"n": 3, "temperature": 1.0, "seed": 1}));
    assert_eq!(three["choices"].as_array().unwrap().len(), 3);
    assert_ne!(three["choices"][0]["text"], three["choices"][1]["text"]);
    let echo = ask(json!({"echo": true, "logprobs": 1}));
    let logprobs = &echo["choices"][0]["logprobs"];
    assert!(echo["choices"][0]["text"].as_str().unwrap().starts_with("abc"));
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 3 + 8);
    assert_eq!(logprobs["tokens"].as_array().unwrap()[..3], [json!("a"), json!("b"), json!("c")]);
    assert!(logprobs["token_logprobs"][0].is_null() && logprobs["token_logprobs"][1].is_f64());
    assert_eq!(ask(json!({"echo": true, "max_tokens": 0}))["choices"][0]["text"], "abc");
    // One token of the answer, where a stop ends it.
    let plain = ask(json!({"return_token_ids": true}));
    let stop = ids(&plain)[3];
    let at = ids(&plain).iter().position(|id| *id == stop).unwrap();
    let stopped = ask(json!({"stop_token_ids": [stop], "return_token_ids": true}));
    assert_eq!(
        (ids(&stopped).len(), &stopped["choices"][0]["stop_reason"]),
        (at + 1, &json!(stop))
    );
}

#[test]
fn an_echo_counts_towards_the_size_limit_of_answers() {
    let told = ServerArgs {
        arguments: &["--max-model-len", "256", "--max-logprobs", "20"],
        ..ServerArgs::default()
    };
    let server = Server::start(&model(&["--arch", "llama"]), told);
    let body =
        json!({"prompt": vec![7; 200], "n": 256, "echo": true, "logprobs": 20, "max_tokens": 0});
    let (status, answer) = server.post("/v1/completions", &body);
    assert_eq!(status, 400, "{answer}");
    assert!(answer.to_string().contains("too many probabilities"), "{answer}");
    for more in [-1, 21] {
        let (status, answer) =
            server.post("/v1/completions", &json!({"prompt": "a", "logprobs": more}));
        let words = format!("logprobs must be in [0, 20], got {more}.");
        assert_eq!((status, &answer["error"]["message"]), (400, &json!(words)));
    }
}

#[test]
fn errors_have_vllms_messages() {
    let server = Server::start(
        &model(&["--arch", "llama"]),
        ServerArgs { arguments: &["--max-model-len", "64"], ..ServerArgs::default() },
    );
    for (status, field, words, body) in [
        (400, "prompt", "out of vocabulary", json!({"prompt": [1_000_000]})),
        (400, "", "prompt: Field required", json!({"model": "m"})),
        (404, "model", "The model `x` does not exist.", json!({"model": "x", "prompt": "a"})),
        (
            400,
            "stream_options",
            "stream=True",
            json!({"prompt": "a", "stream_options": {"include_usage": true}}),
        ),
        (
            400,
            "min_tokens",
            "less than or equal to max_tokens=2",
            json!({"prompt": "a", "max_tokens": 2, "min_tokens": 3}),
        ),
        (400, "max_tokens", "at least 1, got 0", json!({"prompt": "a", "max_tokens": 0})),
        (400, "temperature", "temperature must be", json!({"prompt": "a", "temperature": -1})),
        (400, "top_p", "(0, 1]", json!({"prompt": "a", "top_p": 0})),
        (400, "n", "at least 1", json!({"prompt": "a", "n": 0})),
        (400, "max_tokens", "valid integer", json!({"prompt": "a", "max_tokens": "many"})),
        (400, "prompt", "maximum context length is 64", json!({"prompt": "a", "max_tokens": 64})),
        (400, "guided_regex", "not supported", json!({"prompt": "a", "guided_regex": "a+"})),
        (400, "cache_salt", "not supported", json!({"prompt": "a", "cache_salt": "mine"})),
        (400, "priority", "not supported", json!({"prompt": "a", "priority": 1})),
        (400, "kv_transfer_params", "", json!({"prompt": "a", "kv_transfer_params": "all"})),
        (
            400,
            "kv_transfer_params",
            "one answer",
            json!({"prompt": "a", "n": 2, "kv_transfer_params": {"do_remote_decode": true}}),
        ),
    ] {
        let (got, answer) = server.post("/v1/completions", &body);
        let error = &answer["error"];
        assert_eq!((got, &error["code"]), (status, &json!(status)), "{body}: {answer}");
        assert!(error["message"].as_str().unwrap().contains(words), "{body}: {answer}");
        assert_eq!(error["param"].as_str().unwrap_or_default(), field, "{answer}");
    }
    let messages = json!([{"role": "user", "content": "a"}]);
    for (field, value) in [
        ("chat_template", json!("{{ messages }}")),
        ("documents", json!([{"text": "a"}])),
        ("reasoning_effort", json!("low")),
        ("mm_processor_kwargs", json!({"size": 1})),
        ("function_call", json!("auto")),
        ("tool_choice", json!("auto")),
        ("echo", json!(true)),
    ] {
        let (status, answer) = server.post(
            "/v1/chat/completions",
            &json!({"messages": messages, "max_tokens": 1, field: value}),
        );
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(field)), "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains("leave it out"), "{answer}");
    }
    // Parameters without effect are accepted.
    let idle = json!({"messages": messages, "max_tokens": 1, "tool_choice": "none", "function_call": "none", "priority": 0,
                      "documents": [], "chat_template": null, "echo": false});
    assert_eq!(server.post("/v1/chat/completions", &idle).0, 200);
    // A prompt of twice the model's length can still be counted; a far longer one is not read.
    let (status, counted) = server.post("/tokenize", &json!({"prompt": "a".repeat(128)}));
    assert_eq!((status, &counted["count"]), (200, &json!(128)));
    for (path, body) in [
        ("/tokenize", json!({"prompt": "a".repeat(64 * 64 + 1)})),
        ("/tokenize", json!({"messages": [{"role": "user", "content": "a".repeat(64 * 64)}]})),
        ("/detokenize", json!({"tokens": vec![97; 65]})),
    ] {
        let (status, answer) = server.post(path, &body);
        let words = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && words.contains("send at most"), "{answer}");
    }
    assert_eq!(server.get("/v1/nothing").0, 404);
    assert_eq!(server.get("/v1/completions").0, 405);
    assert_eq!(server.get("/health"), (200, String::new()));
    let models: Value = serde_json::from_str(&server.get("/v1/models").1).unwrap();
    let row = &models["data"][0];
    assert_eq!(
        (&row["id"], &row["max_model_len"], &row["parent"]),
        (&json!("m"), &json!(64), &Value::Null)
    );
    // As in vLLM: the name that the model was started with, and one permission.
    assert_eq!(row["root"], model(&["--arch", "llama"]).to_str().unwrap());
    assert_eq!(row["permission"][0]["object"], "model_permission");
}

#[test]
fn metrics_have_vllms_names() {
    let server = Server::start(&model(&["--arch", "llama"]), ServerArgs::default());
    for _ in 0..2 {
        server.tokens(&json!("a prompt of more than one block of tokens, by far"), 3, None);
    }
    let (status, text) = server.get("/metrics");
    assert_eq!(status, 200);
    for line in [
        r#"vllm:generation_tokens_total{engine="0",model_name="m"} 6"#,
        r#"vllm:request_success_total{finished_reason="length",engine="0",model_name="m"} 2"#,
        r#"vllm:prefix_cache_hits_total{engine="0",model_name="m"} 48"#,
        r#"vllm:num_requests_running{engine="0",model_name="m"} 0"#,
        r#"vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 2"#,
    ] {
        assert!(text.lines().any(|shown| shown == line), "{line}\n{text}");
    }
}
