//! Tests of fleets behind `kvx proxy`: the answers equal those of a single server.

use std::path::Path;
use std::time::Duration;

use kvx_testkit::{free_port, test};
use serde_json::json;

use crate::serve::assert_same;
use crate::serve::backends::{Backend, backends};
use crate::serve::hosts::secret;
use crate::serve::server::{LIMIT, Server, ServerArgs, completion, model, prompt};
use crate::serve::transfers::apart;

const LLAMA: &[&str] = &["--arch", "llama"];

/// Checks that each server has its turn, and that answers equal those of a single server.
fn a_fleet_answers(name: &str, usual: &str, prefills: usize, decodes: usize) {
    let model = model(LLAMA);
    let single = Server::start(&model, ServerArgs::default());
    for backend in backends(&format!("fleets::{name}"), usual) {
        let fields = json!({"kv_load_failure_policy": "fail"});
        let several = |count: usize| -> Vec<Server> {
            (0..count).map(|_| backend.server(&model, &fields, ServerArgs::default())).collect()
        };
        let (prefills, decodes) = (several(prefills), several(decodes));
        let proxy = Server::proxy(
            &prefills.iter().collect::<Vec<_>>(),
            &decodes.iter().collect::<Vec<_>>(),
            &["--choice", "round-robin"],
        );
        for at in 0..6 {
            let prompt = prompt(at, 10 + 15 * at);
            let answer = proxy.tokens(&prompt, 8, None);
            assert_same(
                &answer,
                &single.tokens(&prompt, 8, None),
                format_args!("{at} over {}", backend.name),
            );
            assert_eq!(
                answer["usage"]["prompt_tokens_details"]["cached_tokens"],
                10 + 15 * at,
                "{answer}"
            );
        }
        for prefill in &prefills {
            assert_eq!(prefill.metric("vllm:request_success_total"), 6.0 / prefills.len() as f64);
            prefill.keeps_nothing(LIMIT);
        }
        for decode in &decodes {
            let loads = decode.metric("vllm:nixl_bytes_transferred_count");
            assert_eq!(loads, 6.0 / decodes.len() as f64, "over {}", backend.name);
        }
    }
}

#[test]
fn three_prefills_and_one_decode() {
    a_fleet_answers("three_prefills_and_one_decode", "TCP", 3, 1);
}

#[test]
fn two_prefills_and_two_decodes() {
    a_fleet_answers("two_prefills_and_two_decodes", "SHM", 2, 2);
}

#[test]
fn a_prefill_pushes_its_blocks_to_the_decode() {
    blocks_are_pushed(&[], 0);
}

/// Each rank is a separate process.
#[test]
fn ranks_push_their_blocks_to_ranks() {
    blocks_are_pushed(&["--tensor-parallel-size", "2"], 1);
}

fn blocks_are_pushed(arguments: &[&str], further_ranks: usize) {
    let model = model(&["--arch", "llama", "--kv-heads", "2"]);
    let single = Server::start(&model, ServerArgs::default());
    let fields = json!({"kv_connector": "NixlPushConnector", "kv_load_failure_policy": "fail"});
    let told = ServerArgs { arguments, ..ServerArgs::default() };
    let [prefill, decode] = [(); 2].map(|()| Server::configured(&model, "TCP", &fields, told));
    let proxy = Server::proxy(&[&prefill], &[&decode], &[]);
    for at in 0..4 {
        let prompt = prompt(at, 14 + 17 * at);
        let answer = proxy.tokens(&prompt, 8, None);
        assert_same(&answer, &single.tokens(&prompt, 8, None), at);
        if at > 0 {
            // From the second request on the proxy knows that blocks are pushed.
            assert_eq!(
                answer["usage"]["prompt_tokens_details"]["cached_tokens"],
                14 + 17 * at,
                "{answer}"
            );
        }
    }
    assert!(prefill.metric("kvx_transfers_total") > 0.0, "the prefill writes");
    assert_eq!(decode.metric("vllm:nixl_bytes_transferred_count"), 0.0, "the decode reads nothing");
    for server in [&prefill, &decode] {
        assert_eq!(server.ranks().len(), further_ranks);
        server.keeps_nothing(LIMIT);
    }
}

/// The decode checks the digests that each rank of the prefill has published for its blocks.
#[test]
fn ranks_tell_digests_of_their_blocks() {
    let model = model(&["--arch", "llama", "--kv-heads", "2"]);
    let single = Server::start(&model, ServerArgs::default());
    let extra = json!({"backends": ["SHM"], "kvx_digest": true});
    let fields = json!({"kv_load_failure_policy": "fail", "kv_connector_extra_config": extra});
    let told = ServerArgs { arguments: &["--tensor-parallel-size", "2"], ..ServerArgs::default() };
    let [prefill, decode] = [(); 2].map(|()| Server::configured(&model, "SHM", &fields, told));
    for at in 0..3 {
        let prompt = prompt(at, 14 + 17 * at);
        assert_same(&apart(&prefill, &decode, &prompt, 8), &single.tokens(&prompt, 8, None), at);
    }
    for server in [&prefill, &decode] {
        assert_eq!(server.ranks().len(), 1, "each rank is a process");
    }
}

#[test]
fn the_next_turn_loads_what_the_decode_has_added() {
    let model = model(LLAMA);
    let single = Server::start(&model, ServerArgs::default());
    for backend in backends("fleets::the_next_turn_loads_what_the_decode_has_added", "TCP") {
        the_next_turn_is_loaded(&backend, &model, &single);
    }
}

fn the_next_turn_is_loaded(backend: &Backend, model: &Path, single: &Server) {
    // The decode would compute a few tokens again: these must be loaded.
    let extra = json!({"backends": [backend.name], "kv_lease_duration": 6, "bidirectional_kv_xfer": true,
                       "kv_recompute_threshold": 1});
    let fields = json!({"kv_load_failure_policy": "fail", "kv_connector_extra_config": extra});
    // RIXL's library does not support a secret. With other backends, both sides sign the metadata
    // that they publish for each other.
    let secret = (backend.name != "RIXL").then(|| ("KVX_SECRET_FILE", secret().to_str().unwrap()));
    let told = ServerArgs { arguments: &[], variables: secret.as_slice() };
    let [prefill, decode] = [(); 2].map(|()| backend.server(model, &fields, told));
    let file =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fleets-{}.toml", std::process::id()));
    let config = format!(
        "[[pool]]\nbidirectional = true\nprefill = ['http://127.0.0.1:{}']\ndecode = ['http://127.0.0.1:{}']\n",
        prefill.port, decode.port
    );
    std::fs::write(&file, config).unwrap();
    let proxy = Server::proxy(&[], &[], &["--config", file.to_str().unwrap()]);
    let ask = |server: &Server, prompt: &str| {
        let mut body = completion(&json!(prompt), 4);
        body["conversation_id"] = "one".into();
        let (status, answer) = server.post("/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer
    };
    // Random weights may generate invalid UTF-8; a later turn can only repeat an answer that is
    // text.
    let (first, right) = (0..200)
        .find_map(|at| {
            // The answer fills the third block, so that the decode has one block more than the
            // prefill.
            let prompt = format!("{:.<46}", format!("{at}: a turn of a conversation"));
            let right = ask(single, &prompt);
            let text = right["choices"][0]["text"].as_str()?.to_owned();
            let (_, again) =
                single.post("/tokenize", &json!({"prompt": format!("{prompt}{text}")}));
            again["tokens"]
                .as_array()?
                .ends_with(right["choices"][0]["token_ids"].as_array()?)
                .then_some((prompt, right))
        })
        .expect("an answer that is text");
    assert_same(&ask(&proxy, &first), &right, "the first turn");
    assert_eq!(prefill.metric("vllm:nixl_bytes_transferred_count"), 0.0);
    let second =
        format!("{first}{} And on it goes.", right["choices"][0]["text"].as_str().unwrap());
    assert_same(&ask(&proxy, &second), &ask(single, &second), "the second turn");
    assert_eq!(
        prefill.metric("vllm:nixl_bytes_transferred_count"),
        1.0,
        "the prefill reads from the decode"
    );
    std::fs::remove_file(file).unwrap();
}

/// Uses the variables of vLLM's guides.
// vLLM guide R7: `kvx serve` frees blocks that nobody fetched after
//     `VLLM_NIXL_ABORT_REQUEST_TIMEOUT`
// vLLM guide R17: `kvx serve` frees blocks that nobody fetched after
//     `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`
#[test]
fn blocks_that_nobody_fetches_are_free_after_the_time_that_is_said() {
    let model = model(LLAMA);
    let port = free_port(1).unwrap().to_string();
    let prompt = prompt(1, 60);
    for (connector, variable) in [
        ("NixlConnector", "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"),
        ("MooncakeConnector", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"),
    ] {
        let fields = json!({"kv_connector": connector, "kv_role": "kv_producer",
                            "kv_connector_extra_config": {"backends": ["TCP"]}});
        let variables = [(variable, "1"), ("VLLM_MOONCAKE_BOOTSTRAP_PORT", port.as_str())];
        let prefill = Server::configured(
            &model,
            "TCP",
            &fields,
            ServerArgs { arguments: &[], variables: &variables },
        );
        let mut body = completion(&prompt, 1);
        body["kv_transfer_params"] = json!({"do_remote_decode": true, "transfer_id": "one"});
        let (status, answer) = prefill.post("/v1/completions", &body);
        assert_eq!(status, 200, "{connector}: {answer}");
        assert!(prefill.metric("kvx_blocks_kept") > 0.0, "{connector}");
        // The defaults without the variable: half a minute, and eight minutes.
        prefill.keeps_nothing(Duration::from_secs(3));
    }
}

// vLLM guide R4: `kvx serve` gives each data-parallel rank its own side-channel port and engine
//     name
#[test]
fn engines_of_data_parallelism_have_names_and_ports_of_their_own() {
    let model = model(LLAMA);
    let single = Server::start(&model, ServerArgs::default());
    let fields = json!({"kv_load_failure_policy": "fail"});
    // Each engine has its own port; the second engine has the next one.
    let base = free_port(1).unwrap();
    let port = base.to_string();
    let variables = [("VLLM_NIXL_SIDE_CHANNEL_PORT", port.as_str())];
    let two = ["--data-parallel-size", "2"];
    let prefill = Server::configured(
        &model,
        "TCP",
        &fields,
        ServerArgs { arguments: &two, variables: &variables },
    );
    let second = [&two[..], &["--data-parallel-rank", "1"]].concat();
    let decode = Server::configured(
        &model,
        "TCP",
        &fields,
        ServerArgs { arguments: &second, variables: &[] },
    );
    for engine in [0, 1] {
        let prompt = prompt(engine, 50);
        let leg = json!({"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true}});
        let (status, answer) = prefill.post_to(engine as usize, "/v1/completions", &leg);
        let params = &answer["kv_transfer_params"];
        assert_eq!(
            (status, &params["remote_port"]),
            (200, &json!(u64::from(base) + engine)),
            "{answer}"
        );
        let name = params["remote_engine_id"].as_str().unwrap();
        assert!(name.ends_with(&format!("_dp{engine}")), "{name}");
        assert_same(
            &decode.tokens(&prompt, 8, Some(params)),
            &single.tokens(&prompt, 8, None),
            engine,
        );
    }
    let (status, answer) = prefill.post_to(2, "/v1/completions", &json!({"prompt": "a"}));
    assert!(
        status == 400 && answer["error"]["message"].as_str().unwrap().contains("out of range"),
        "{answer}"
    );
    // Requests without a rank are served in turn.
    for _ in 0..4 {
        prefill.tokens(&prompt(9, 20), 1, None);
    }
    for engine in [r#"engine="0""#, r#"engine="1""#] {
        assert_eq!(prefill.metric_of("vllm:request_success_total", engine), 3.0, "{engine}");
    }
    assert_eq!(decode.metric_of("vllm:nixl_bytes_transferred_count", r#"engine="1""#), 2.0);
    prefill.keeps_nothing(LIMIT);
}
