//! A bounded, seeded mutation fuzz of JSON text and dotted arguments. Any input gives an error or a
//! configuration that reads back the same, never a panic. `cargo xtask fuzz` runs the same
//! functions without bounds; inputs that it found are tested here.

use kvx_testkit::test;
use kvx_vllm::config::fuzz;

const CASES: u64 = 20_000;

const JSON_SEEDS: &[&str] = &[
    r#"{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_port": 14k}"#,
    r#"{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "engine_id": "e", "kv_buffer_device": "cuda",
        "kv_connector_extra_config": {"backends": ["UCX", "TCP"], "tcp": {"bind": "h"}, "kv_compat": 0.16, "x": 80m}}"#,
    r#"{"kv_connector": "MultiConnector", "kv_role": "kv_consumer", "kv_connector_extra_config":
        {"connectors": [{"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}], "engine_ttl": -1.5e3}}"#,
    r#"{"kv_rank": null, "kv_parallel_size": "2", "kv_ip": "h", "kv_buffer_size": 1e9,
            "enable_permute_local_kv": "y"}"#,
];

const DOTTED_SEEDS: &[&str] = &[
    "serve\n--kv-transfer-config.kv_connector\nNixlConnector\n--kv-transfer-config.kv_role\nkv_both\n--port\n1",
    "--kv-transfer-config.kv_connector_extra_config.backends+=LIBFABRIC,TCP\n--kv_transfer_config.kv_port=14k",
    "--kv-transfer-config\n{\"a\": {\"b\": [1]}}\n--kv-transfer-config.a.b=[2]\n--kv-transfer-config.a=1.5K",
    "--kv-transfer-config.kv_role=kv_producer\n--kv-transfer-config.kv_connector=MooncakeConnector\n--\n-x",
];

const PIECES: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    "\"",
    ":",
    ",",
    "\\",
    ".",
    "=",
    "+",
    "-",
    "--",
    "_",
    "\n",
    " ",
    "1k",
    "1.5K",
    "9e999",
    "null",
    "99999999999999999999",
    "-0",
    "true",
    "é",
    "\u{0}",
    "kv_role",
    "kv_both",
    "0.9",
    "\"kv_compat\": ",
    "tcp",
    "{}",
    "--kv-transfer-config",
    "--kv-transfer-config.",
    "kv_connector_extra_config",
    "\"connectors\": [{}]",
    "e5",
    "\\u00",
];

fn run(name: &str, seeds: &[&str], target: fn(&[u8])) {
    kvx_testkit::fuzz(name, seeds, PIECES, CASES, target);
}

#[test]
fn mutated_json_text_never_panics() {
    run("JSON text", JSON_SEEDS, fuzz::json_text);
}

#[test]
fn mutated_dotted_arguments_never_panic() {
    run("dotted arguments", DOTTED_SEEDS, fuzz::dotted);
}

#[test]
fn deep_text_is_an_error_and_not_a_stack_overflow() {
    for text in [
        "[".repeat(100_000),
        "{\"a\":".repeat(100_000),
        format!("{{\"x\": {}", "[".repeat(100_000)),
    ] {
        fuzz::json_text(text.as_bytes());
        fuzz::dotted(format!("--kv-transfer-config={text}").as_bytes());
        fuzz::dotted(format!("--kv-transfer-config.a={text}").as_bytes());
        fuzz::dotted(format!("--kv-transfer-config{}=1", ".a".repeat(100_000)).as_bytes());
    }
    // At the limits, with a key that only JSON can express.
    for depth in [60, 66, 67, 68, 99, 100, 125, 126] {
        let value = format!("{}1{}", "{\"a\":".repeat(depth), "}".repeat(depth));
        for keys in [1, 31, 32, 33] {
            let dotted = format!("--kv-transfer-config{}={value}", ".a".repeat(keys));
            fuzz::dotted(format!("--kv-transfer-config={{\"\":1}}\n{dotted}").as_bytes());
        }
        fuzz::json_text(value.as_bytes());
    }
}

#[test]
fn what_fuzzing_found_is_held() {
    kvx_testkit::replay(fuzz::TARGETS);
}
