//! Tests of the program's start and end.

use std::io::Read as _;
use std::time::Duration;

use kvx_testkit::test;
use serde_json::json;

use crate::serve::ids;
use crate::serve::server::{LIMIT, Server, ServerArgs, completion, model, prompt};
use crate::serve::transfers::{apart, published};

#[test]
fn startup_errors_say_what_to_do() {
    let here = model(&["--arch", "llama"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let empty = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    for (folder, arguments, words) in [
        (&here, vec!["--port", &port], "take another --port"),
        (&empty.to_path_buf(), vec![], "config.json"),
        (&"Qwen/Qwen3-0.6B-is-not-here".into(), vec![], "hf download Qwen/Qwen3-0.6B-is-not-here"),
        // Reported before any file is read.
        (
            &empty.to_path_buf(),
            vec!["--block-size", "24", "--kernel-block-size", "16"],
            "--block-size 24 is no multiple of --kernel-block-size 16",
        ),
        (&here, vec!["--max-model-len", "1M"], "--max-model-len is 1048576"),
        (
            &here,
            vec!["--max-model-len", "8192", "--num-gpu-blocks-override", "4"],
            "lower --max-model-len to 64",
        ),
        (&here, vec!["--prot", "1"], "did you mean --port?"),
        (&here, vec!["--kv-transfer-config", "{\"kv_connector\": \"NixlConnector\"}"], "kv_role"),
    ] {
        let (status, said) = Server::try_start(
            folder,
            ServerArgs { arguments: &arguments, ..ServerArgs::default() },
        )
        .ended();
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.contains(words), "{words}\n{said}");
    }
}

#[test]
fn flags_without_effect_are_reported() {
    let arguments = ["--gpu-memory-utilization", "0.8", "--enforce-eager", "--max-num-seqs", "1"];
    let told = ServerArgs { arguments: &arguments, variables: &[("CUDA_VISIBLE_DEVICES", "0")] };
    let server = Server::start(&model(&["--arch", "llama"]), told);
    // One request runs at a time, and both are answered.
    let body =
        json!({"prompt": ["a", "b"], "max_tokens": 1500, "temperature": 0, "ignore_eos": true});
    let both = std::thread::scope(|scope| {
        let both = scope.spawn(|| server.post("/v1/completions", &body));
        server.until("vllm:num_requests_waiting", LIMIT, |waiting| waiting == 1.0);
        assert!(server.metric("vllm:num_requests_running") <= 1.0);
        both.join().unwrap()
    });
    assert_eq!(both.0, 200, "{}", both.1);
    server.signal(rustix::process::Signal::INT);
    let (_, said) = server.ended();
    for words in [
        "--gpu-memory-utilization has no effect: there is no GPU; --kv-cache-memory-bytes sizes the pool",
        "--enforce-eager has no effect: ",
        "CUDA_VISIBLE_DEVICES has no effect: this server computes on the CPU",
    ] {
        assert!(said.contains(words), "{words}\n{said}");
    }
}

/// As in vLLM: a peer that names the model differently does not count as having the same model.
#[test]
fn peers_must_use_the_same_name_for_the_model() {
    let model = model(&["--arch", "llama"]);
    let link = model.with_extension("link");
    let _ = std::fs::remove_file(&link);
    std::os::unix::fs::symlink(&model, &link).unwrap();
    let [prefill, decode, other] =
        [&model, &model, &link].map(|written| Server::with_peers(written, "TCP", "fail", &[]));
    let prompt = prompt(3, 40);
    let right = ids(&prefill.tokens(&prompt, 6, None));
    assert_eq!(ids(&apart(&prefill, &decode, &prompt, 6)), right);
    let mut body = completion(&prompt, 6);
    body["kv_transfer_params"] = published(&prefill, &prompt);
    let (status, answer) = other.post("/v1/completions", &body);
    assert_eq!(status, 500, "{answer}");
    assert_eq!(ids(&other.tokens(&prompt, 6, None)), right, "the next request is served");
    std::fs::remove_file(link).unwrap();
}

#[test]
fn an_interrupted_server_ends_what_it_has_begun() {
    let server = Server::start(&model(&["--arch", "llama"]), ServerArgs::default());
    let body = json!({"prompt": "long", "max_tokens": 400, "temperature": 0, "ignore_eos": true, "stream": true});
    let mut stream = server.send("POST", "/v1/completions", Some(&body));
    let mut text = vec![0; 400];
    stream.read_exact(&mut text).unwrap();
    server.signal(rustix::process::Signal::INT);
    stream.read_to_end(&mut text).unwrap();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(
        text.contains("data: [DONE]") && text.contains("\"finish_reason\":\"length\""),
        "{text}"
    );
    let (status, said) = server.ended();
    assert!(status.success(), "{said}");
}

#[test]
fn several_engines_report_their_total_pool_and_end_when_interrupted() {
    let arguments =
        ["--data-parallel-size", "2", "--num-gpu-blocks-override", "8", "--max-model-len", "64"];
    let server = Server::start(
        &model(&["--arch", "llama"]),
        ServerArgs { arguments: &arguments, ..ServerArgs::default() },
    );
    server.signal(rustix::process::Signal::INT);
    let (status, said) = server.ended();
    assert!(status.success() && said.contains("a KV cache of 16 blocks"), "{said}");
}

#[test]
fn a_client_that_goes_ends_its_request_and_idle_costs_nothing() {
    let model = model(&["--arch", "llama"]);
    let alone = Server::start(&model, ServerArgs::default());
    let body = json!({"prompt": "long", "max_tokens": 4000, "temperature": 0, "ignore_eos": true});
    drop(alone.send("POST", "/v1/completions", Some(&body)));
    // Two connected servers without work.
    let [prefill, decode] = [(); 2].map(|()| Server::with_peers(&model, "TCP", "fail", &[]));
    apart(&prefill, &decode, &prompt(1, 40), 4);
    for server in [&alone, &prefill, &decode] {
        let until = std::time::Instant::now() + LIMIT;
        loop {
            let before = server.processor_time();
            std::thread::sleep(Duration::from_secs(1));
            if server.processor_time() - before <= Duration::from_millis(10) {
                break;
            }
            assert!(std::time::Instant::now() < until, "the server still computes");
        }
    }
}
