//! The output of `kvx config`, compared with golden files.

use std::path::Path;

use kvx_testkit::test;
use kvx_vllm::config::{ConfigReport, KvTransferConfig, Opening, Surroundings};

use super::LIBFABRIC_COMMAND;

fn report(line: &[&str], surroundings: &Surroundings) -> ConfigReport {
    let (config, rest) = KvTransferConfig::from_arguments(line.iter().copied(), surroundings)
        .unwrap_or_else(|error| panic!("{line:?}: {error}"));
    ConfigReport::new(&config, &rest)
}

fn golden(name: &str, line: &[&str], surroundings: &Surroundings) {
    let text = format!("$ kvx config {}\n\n{}", line.join(" "), report(line, surroundings));
    insta::with_settings!({
        snapshot_path => Path::new("golden"),
        prepend_module_to_snapshot => false,
        omit_expression => true,
    }, { insta::assert_snapshot!(name, text) });
}

#[test]
fn golden_nothing() {
    golden("nothing", &[], &Surroundings::default());
}

#[test]
fn golden_guide_libfabric() {
    golden("guide_libfabric", &LIBFABRIC_COMMAND, &Surroundings::default());
}

#[test]
fn golden_prefill_of_eight_ranks() {
    let line = [
        "--port",
        "8000",
        "--tensor-parallel-size",
        "8",
        "--data-parallel-size=2",
        "--kv-transfer-config",
        r#"{"kv_connector":"NixlConnector","kv_role":"kv_producer","kv_load_failure_policy":"fail"}"#,
    ];
    let surroundings =
        Surroundings::default().gpu(true).variable("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.1");
    golden("prefill_of_eight_ranks", &line, &surroundings);
}

#[test]
fn golden_old_version_with_everything_odd() {
    let line = [
        "--config",
        "serve.yaml",
        "-tp",
        "2",
        "--kv-transfer-config",
        r#"{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_rank": 0, "kv_buffer_size": 1g,
            "kv_connector_extra_config": {"kv_compat": 0.11, "backends": ["nixl", "UXC"]}}"#,
        "--kv-transfer-config.kv_connector_extra_config.backends+=TCP",
        "--kv-transfer-config.kv_connector_extra_config.kv_lease_duration=60",
        "--kv-transfer-config.kv_connector_extra_config.tcp.ports=7000-7010",
        "--kv-transfer-config.kv_connector_extra_config.backend=x",
        "--kv-transfer-config.kv_role=kv_consumer",
        "--kv-transfer-config.kv_role=kv_both",
    ];
    let surroundings = Surroundings::default().variable("NCCL_IB_HCA", "mlx5");
    golden("old_version_with_everything_odd", &line, &surroundings);
}

#[test]
fn golden_mooncake() {
    let line = [
        "--kv-transfer-config",
        r#"{"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer",
            "kv_connector_extra_config": {"num_workers": 4, "mooncake_protocol": "tcp"}}"#,
    ];
    let surroundings = Surroundings::default().variable("VLLM_MOONCAKE_BOOTSTRAP_PORT", "9100");
    golden("mooncake", &line, &surroundings);
}

#[test]
fn golden_removed_fields_and_abort_timeout() {
    let line = [
        r#"--kv_transfer_config={"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_ip": "10.0.0.1",
            "kv_buffer_device": "cuda", "kv_load_failure_policy": "recompute"}"#,
    ];
    let surroundings = Surroundings::default().variable("VLLM_NIXL_ABORT_REQUEST_TIMEOUT", "480");
    golden("removed_fields_and_abort_timeout", &line, &surroundings);
}

#[test]
fn a_registry_replaces_the_backends_as_written() {
    let line = ["--kv-transfer-config.kv_connector_extra_config.backends+=tcp,uxc"];
    let report = report(&line, &Surroundings::default());
    assert!(report.to_string().contains("order of preference\n  tcp\n  uxc\n"), "{report}");
    let opening = |name: &str, note: &str| Opening { name: name.into(), note: note.into() };
    let report = report.openings(vec![opening("TCP", ""), opening("uxc", "unknown")]);
    assert!(
        report.to_string().contains("order of preference\n  TCP\n  uxc: unknown\n"),
        "{report}"
    );
    assert_eq!(report.to_json()["backends"][1]["note"], "unknown");
}

#[test]
fn without_a_backend_list_the_report_mentions_vllm_peers() {
    let said = |arguments: &[&str]| {
        let role = "--kv-transfer-config.kv_role=kv_both";
        let report = report(&[&[role], arguments].concat(), &Surroundings::default());
        let derived = report.to_json()["derived"].as_array().unwrap().clone();
        let text = derived.into_iter().find(|line| line["name"] == "vLLM peers")?["text"].clone();
        let text = text.as_str().unwrap().to_owned();
        assert!(report.to_string().contains(&format!("\n  vLLM peers: {text}\n")), "{report}");
        Some(text)
    };
    let nixl = "--kv-transfer-config.kv_connector=NixlConnector";
    let text = said(&[nixl]).unwrap();
    assert!(
        text.starts_with("they cannot load from this engine") && text.contains("add RIXL to"),
        "{text}"
    );
    // A list shows the reachable peers of each backend, and Mooncake engines are not vLLM peers.
    assert_eq!(
        said(&[nixl, "--kv-transfer-config.kv_connector_extra_config.backends+=RIXL"]),
        None
    );
    assert_eq!(said(&["--kv-transfer-config.kv_connector=MooncakeConnector"]), None);
}

#[test]
fn the_report_says_where_tcp_listens() {
    let said = |host: &str, bind: Option<&'static str>| {
        let here = Surroundings::default().variable("VLLM_NIXL_SIDE_CHANNEL_HOST", host);
        let mut line = vec!["--kv-transfer-config.kv_connector=NixlConnector"];
        line.push("--kv-transfer-config.kv_role=kv_both");
        line.extend(bind);
        report(&line, &here).to_string()
    };
    let bind = "--kv-transfer-config.kv_connector_extra_config.tcp.bind=10.0.0.9";
    for (host, bind, line) in [
        ("localhost", None, "kvx's TCP: listens at 127.0.0.1; for peers on other hosts set"),
        ("10.0.0.1", None, "kvx's TCP: listens at 10.0.0.1 if that is an address of this machine"),
        ("10.0.0.1", Some(bind), "kvx's TCP: listens at 10.0.0.9 (tcp.bind)\n"),
    ] {
        let text = said(host, bind);
        assert!(text.contains(line), "{text}");
    }
}

#[test]
fn the_json_report_has_the_same_content() {
    let line = [
        "--kv-transfer-config.kv_connector=NixlConnector",
        "--kv-transfer-config.kv_role=kv_both",
        "-q",
    ];
    let json = report(&line, &Surroundings::default()).to_json();
    assert_eq!(json["kv_compat"], "0.33");
    assert_eq!(json["merged"]["kv_connector"], "NixlConnector");
    let connector = json["values"]
        .as_array()
        .unwrap()
        .iter()
        .find(|line| line["name"] == "kv_connector")
        .unwrap();
    assert_eq!(connector["value"], "\"NixlConnector\"");
    assert_eq!(connector["from"][0], "--kv-transfer-config.kv_connector");
    assert_eq!(json["backends"].as_array().map(Vec::len), Some(0));
    assert_eq!(json["warnings"][0]["concern"], "version");
    assert_eq!(json["ignored"][0], "-q");
}
