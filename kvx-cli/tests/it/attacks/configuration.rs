//! C1: an operator misspells an option that protects the fleet, and gets only a warning.

use kvx_testkit::test;
use serde_json::json;

use crate::attacks::kvx;

fn config(extra: &serde_json::Value) -> (bool, String) {
    let config = json!({"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra});
    kvx(&["config", "--kv-transfer-config", &config.to_string()])
}

#[test]
fn the_documented_seal_option_seals() {
    let (flat, said) = config(&json!({"tcp.seal": "all"}));
    let (nested, right) = config(&json!({"tcp": {"seal": "all"}}));
    assert!(flat && nested, "{said}");
    let of_tcp = |said: &str| {
        said.lines().filter(|line| line.contains("seal")).collect::<Vec<_>>().join("\n")
    };
    assert_eq!(of_tcp(&said), of_tcp(&right), "{said}\n{right}");
    assert!(of_tcp(&said).contains("all") && !said.contains("nothing in kvx"), "{said}");
}

#[test]
fn a_misspelled_security_option_stops_the_start() {
    for (extra, words) in [
        (json!({"tcp.sael": "all"}), "did you mean tcp.seal?"),
        (json!({"seal": "all"}), "tcp.seal"),
        (json!({"allowed_host": ["10.0.0.1"]}), "did you mean allowed_hosts?"),
        (json!({"secret_file": "/run/fleet"}), "KVX_SECRET_FILE"),
    ] {
        let (succeeded, said) = config(&extra);
        assert!(!succeeded && said.contains(words), "{extra}: {said}");
    }
}
