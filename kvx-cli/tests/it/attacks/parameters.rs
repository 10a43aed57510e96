//! H5: a client of a decode writes other block numbers into its own `kv_transfer_params`, and
//! receives another request's answer.

use kvx_testkit::test;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::serve::hosts::{Host, Hosts, secret};
use crate::serve::ids;
use crate::serve::server::{Server, ServerArgs, completion, greedy, model, prompt};
use crate::serve::transfers::published;

const TOKENS: usize = 6;

fn refused(decode: &Server, prompt: &Value, params: Value, what: &str) {
    let mut body = completion(prompt, TOKENS);
    body["kv_transfer_params"] = params;
    let (status, answer) = decode.post("/v1/completions", &body);
    assert_eq!(status, 403, "{what}: {answer}");
    assert!(
        answer["error"]["message"].as_str().unwrap().contains("signature") || what == "unsigned",
        "{answer}"
    );
}

#[test]
fn a_client_cannot_read_the_blocks_of_another_request() {
    let variables = [("KVX_SECRET_FILE", secret().to_str().unwrap())];
    let model = model(&["--arch", "llama"]);
    let servers = [(); 2].map(|()| {
        let told = ServerArgs { arguments: &[], variables: &variables };
        Server::configured(&model, "TCP", &json!({"kv_load_failure_policy": "fail"}), told)
    });
    let [prefill, decode] = &servers;
    // Equally long, so that the requests differ in their blocks only.
    let (own, victims) = (prompt(1, 40), prompt(2, 40));
    let (mine, of_victim) = (published(prefill, &own), published(prefill, &victims));
    assert_ne!(mine["remote_block_ids"], of_victim["remote_block_ids"]);
    let with = |key: &str, value: &Value| {
        let mut params = mine.clone();
        params[key] = value.clone();
        params
    };
    refused(decode, &own, with("remote_block_ids", &of_victim["remote_block_ids"]), "other blocks");
    let mut forged = with("remote_block_ids", &of_victim["remote_block_ids"]);
    forged["kvx_block_reference"] = of_victim["kvx_block_reference"].clone();
    refused(decode, &own, forged, "other blocks by their reference");
    let longer = json!("0123456789abcdefffffffffffffffff");
    refused(
        decode,
        &own,
        with("kvx_block_reference", &longer),
        "a reference that no reuse is above",
    );
    refused(
        decode,
        &own,
        with("remote_request_id", &of_victim["remote_request_id"]),
        "another request",
    );
    let mut unsigned = mine.clone();
    unsigned.as_object_mut().unwrap().remove("kvx_signature");
    refused(decode, &own, unsigned, "unsigned");
    // With the prefill's own parameters, the decode loads the blocks.
    let answer = decode.tokens(&own, TOKENS, Some(&mine));
    assert_eq!(ids(&answer), ids(&prefill.tokens(&own, TOKENS, None)));
    assert_eq!(decode.metric("vllm:nixl_bytes_transferred_count"), 1.0);
    // The refusals do not flood the log.
    let [_, decode] = servers;
    decode.signal(Signal::TERM);
    let (_, log) = decode.ended();
    let refusals: Vec<_> = log.lines().filter(|line| line.contains("refused kv_tr")).collect();
    assert!((1..5).contains(&refusals.len()), "five refusals: {log}");
    assert!(refusals.iter().all(|line| line.contains("KVX_SECRET_FILE")), "{log}");
}

/// Uses clients on other hosts than the decode's, without a secret.
#[test]
fn without_a_secret_parameters_from_other_hosts_are_refused() {
    let Some(mut hosts) = Hosts::for_this_test(2) else { return };
    let folder = model(&["--arch", "llama"]);
    let serve = |allowed: &str| {
        let config = json!({"kv_connector": "NixlConnector", "kv_role": "kv_both",
                            "kv_connector_extra_config": {"backends": ["TCP"], "allow_unsigned_params": [allowed]}});
        [
            "serve",
            folder.to_str().unwrap(),
            "--host",
            "0.0.0.0",
            "--served-model-name",
            "m",
            "--kv-transfer-config",
            &config.to_string(),
        ]
        .map(str::to_owned)
    };
    let own = [("VLLM_NIXL_SIDE_CHANNEL_HOST".to_owned(), Hosts::address(1))];
    let start = |host: &mut Host, port: &str, allowed: &str| {
        let arguments = [&serve(allowed)[..], &["--port".to_owned(), port.to_owned()]].concat();
        let mut own = own.to_vec();
        own.push(("VLLM_NIXL_SIDE_CHANNEL_PORT".to_owned(), format!("5{}", &port[..3])));
        let mut command = host.kvx(&arguments, &own, &std::env::temp_dir());
        command.env_remove("KVX_SECRET_FILE");
        host.run(command);
    };
    let host = &mut hosts.each[0];
    start(host, "8100", "10.99.0.1");
    start(host, "8200", "10.99.0.1");
    start(host, "8300", &Hosts::address(1));
    for port in [8100, 8200, 8300] {
        host.wait(&format!("http://localhost:{port}/health"));
    }
    let url = |port: u16| format!("http://{}:{port}/v1/completions", Hosts::address(1));
    // A client gets parameters for its own prompt, and sends them to a decode.
    let load = |client: &Host, decode: &str| {
        let mut ask = greedy(&prompt(1, 40), 1);
        ask["kv_transfer_params"] = json!({"do_remote_decode": true});
        let answer = client.curl(&url(8100), Some(&ask)).expect("the prefill answers");
        ask["kv_transfer_params"] = answer["kv_transfer_params"].clone();
        client.ask(decode, Some(&ask), None)
    };
    let [decodes, elsewhere] = &hosts.each[..] else { unreachable!("two hosts") };
    let (status, answer) = load(elsewhere, &url(8200));
    assert!(status == 403 && answer.contains("allow_unsigned_params"), "{status} {answer}");
    // A decode with `allow_unsigned_params` for that engine, and a client on the decode's machine.
    for (client, decode) in
        [(elsewhere, url(8300)), (decodes, "http://localhost:8200/v1/completions".into())]
    {
        let (status, answer) = load(client, &decode);
        assert_eq!(status, 200, "{decode}: {answer}");
    }
}
