//! `kvx doctor` against fleets with misconfigurations.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use kvx_testkit::{free_port, output, test};
use serde_json::{Value, json};

use crate::serve::hosts::{Hosts, secret};
use crate::serve::server::{LIMIT, Server, ServerArgs, model};

/// Returns what `kvx doctor` says about a fleet of these servers, and its exit status.
fn examine(prefills: &[&Server], decodes: &[&Server]) -> (Value, Option<i32>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command.args(["doctor", "--skip-host", "--json"]);
    for (role, servers) in [("--prefill", prefills), ("--decode", decodes)] {
        for server in servers {
            command.args([role, &format!("http://127.0.0.1:{}", server.port)]);
        }
    }
    read(&mut command)
}

fn read(command: &mut Command) -> (Value, Option<i32>) {
    let said = output(command, 2 * LIMIT);
    let text = String::from_utf8_lossy(&said.stdout);
    let report = serde_json::from_str(&text)
        .unwrap_or_else(|_| panic!("{text}\n{}", String::from_utf8_lossy(&said.stderr)));
    (report, said.status.code())
}

/// Returns all texts of the findings of a level.
fn texts(findings: &Value, level: &str) -> String {
    let all = findings.as_array().expect("findings").iter();
    let of_level = all.filter(|finding| finding["level"] == level);
    of_level
        .map(|finding| format!("{}: {}\n{}\n", finding["topic"], finding["what"], finding["cure"]))
        .collect()
}

fn llama() -> PathBuf {
    model(&["--arch", "llama"])
}

fn engine(extra: &Value, more: &[&str], variables: &[(&str, &str)]) -> Server {
    let fields = json!({"kv_connector_extra_config": extra});
    let told = ServerArgs { arguments: more, variables };
    Server::configured(&llama(), "TCP", &fields, told)
}

#[test]
fn doctor_says_which_pairs_of_a_fleet_move_blocks_and_why_others_do_not() {
    let both = json!({"backends": ["SHM", "TCP"], "load_timeout": 5});
    let fits = engine(&both, &[], &[]);
    let key = secret().to_str().expect("a path of text");
    let with_secret = engine(&both, &[], &[("KVX_SECRET_FILE", key)]);
    let other_size = engine(&both, &["--block-size", "32"], &[]);
    // The side channels of two engines: at the second's address, the third names the first.
    let port = free_port(1).expect("a free port").to_string();
    let first = engine(&both, &[], &[("VLLM_NIXL_SIDE_CHANNEL_PORT", &port)]);
    let mut elsewhere = both.clone();
    elsewhere["side_channel_bind"] = "127.0.0.2".into();
    let names_first = engine(&elsewhere, &[], &[("VLLM_NIXL_SIDE_CHANNEL_PORT", &port)]);
    let nobody = [("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.3")];
    elsewhere["side_channel_bind"] = "127.0.0.1".into();
    let names_nobody = engine(&elsewhere, &[], &nobody);
    let decode = engine(&both, &[], &[]);
    let over_tcp = engine(&json!({"backends": ["TCP"], "load_timeout": 5}), &[], &[]);
    let no_transfer = Server::start(&llama(), ServerArgs::default());

    let (works, status) = examine(&[&fits], &[&decode]);
    assert_eq!(status, Some(0), "{works:#}");
    let pair = &works["fleet"]["pairs"][0];
    assert_eq!((&pair["outcome"], &pair["prompt_tokens"]), (&json!("moved"), &json!(512)));
    assert_eq!(pair["transfer"]["backends"], json!(["SHM"]), "{works:#}");
    assert!(pair["transfer"]["bytes"].as_u64() > Some(0), "{works:#}");
    assert_eq!(works["fleet"]["verdict"], "P/D works: blocks move through the pair.");
    assert_eq!((&works["problems"], &works["warnings"]), (&json!(0), &json!(0)), "{works:#}");

    for (prefill, decode, level, expected) in [
        (&with_secret, &decode, "problem", "give both the same KVX_SECRET_FILE"),
        (&other_size, &decode, "problem", "the prefill has 32, the decode 16"),
        (&names_first, &decode, "problem", "another engine answers at 127.0.0.1"),
        (&names_nobody, &decode, "problem", "tells decodes to ask 127.0.0.3"),
        (&fits, &no_transfer, "problem", "an engine without --kv-transfer-config"),
        (&fits, &over_tcp, "warning", "are one host, and use TCP"),
    ] {
        let (report, status) = examine(&[prefill], &[decode]);
        let said = texts(&report["fleet"]["findings"], level);
        assert!(said.contains(expected), "{expected}: {report:#}");
        assert_eq!(status, Some(i32::from(level == "problem")), "{report:#}");
    }
    drop(first);

    let (quiet, _) = examine(&[&fits], &[&no_transfer]);
    let verdict = quiet["fleet"]["verdict"].as_str().expect("a verdict");
    assert!(verdict.contains("quietly not P/D"), "{verdict}");

    let port = decode.port;
    drop(decode);
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command.args(["doctor", "--skip-host", "--json", "--prefill"]);
    command.arg(format!("http://127.0.0.1:{}", fits.port));
    command.args(["--decode", &format!("http://127.0.0.1:{port}")]);
    let (down, status) = read(&mut command);
    assert_eq!(status, Some(1));
    assert!(texts(&down["fleet"]["findings"], "problem").contains("is not usable"), "{down:#}");
    assert_eq!(down["fleet"]["pairs"][0]["outcome"], "untried");
}

#[test]
fn doctor_names_loopback_and_a_firewall_between_hosts() {
    let Some(mut hosts) = Hosts::for_this_test(2) else { return };
    let (folder, cache) = (llama(), std::env::temp_dir());
    let folder = folder.to_str().expect("a path of text");
    let (prefill_host, decode_host) = (Hosts::address(1), Hosts::address(2));
    let start = |hosts: &mut Hosts, number: usize, port: &str, channel: &str, range: &str| {
        let config = json!({"kv_connector": "NixlConnector", "kv_role": "kv_both",
                            "kv_connector_extra_config":
                                {"backends": ["TCP"], "load_timeout": 20, "tcp.ports": range}});
        let (address, config) = (Hosts::address(number), config.to_string());
        let words = ["serve", folder, "--served-model-name", "m", "--kv-cache-memory-bytes", "16M"];
        let more = ["--host", &address, "--port", port, "--kv-transfer-config", &config];
        let words: Vec<String> = words.iter().chain(&more).map(|word| (*word).to_owned()).collect();
        let variables = [
            ("VLLM_NIXL_SIDE_CHANNEL_HOST".to_owned(), channel.to_owned()),
            ("VLLM_NIXL_SIDE_CHANNEL_PORT".to_owned(), format!("1{port}")),
        ];
        let host = &mut hosts.each[number - 1];
        let command = host.kvx(&words, &variables, &cache);
        host.run(command);
    };
    start(&mut hosts, 1, "8100", &prefill_host, "7100-7109");
    start(&mut hosts, 1, "8101", "127.0.0.1", "7200-7209");
    start(&mut hosts, 1, "8102", &prefill_host, "7300-7309");
    start(&mut hosts, 2, "8200", &decode_host, "7100-7109");
    let rule = ["-A", "INPUT", "-p", "tcp", "--dport", "7300:7309", "-j", "DROP"];
    let mut firewall = hosts.each[0].command("iptables");
    assert!(output(firewall.args(rule), Duration::from_secs(10)).status.success(), "iptables");
    for (host, port) in [(1, 8100), (1, 8101), (1, 8102), (2, 8200)] {
        hosts.each[1].wait(&format!("http://{}:{port}/health", Hosts::address(host)));
    }
    let examine = |port: u16| {
        let words = ["doctor", "--skip-host", "--json", "--prefill"].map(str::to_owned);
        let urls = [
            format!("http://{prefill_host}:{port}"),
            "--decode".to_owned(),
            format!("http://{decode_host}:8200"),
        ];
        read(&mut hosts.each[1].kvx(&[&words[..], &urls].concat(), &[], &cache)).0
    };
    let works = examine(8100);
    assert_eq!(works["fleet"]["pairs"][0]["outcome"], "moved", "{works:#}");
    assert_eq!(works["problems"], 0, "{works:#}");
    for (port, expected) in [
        (8101, "VLLM_NIXL_SIDE_CHANNEL_HOST=10.77.0.1"),
        (8102, "open its ports (`tcp.ports` or KVX_TCP_PORTS)"),
    ] {
        let report = examine(port);
        let said = texts(&report["fleet"]["findings"], "problem");
        assert!(said.contains(expected), "{expected}: {report:#}");
    }
}

#[test]
fn doctor_names_what_the_environment_of_this_host_has_wrong() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command.args(["doctor", "--json"]).envs([
        ("UCX_NET_DEVICES", "mlx5_99:1"),
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", "192.0.2.1"),
        ("KVX_SECRET_FILE", "/nonexistent/secret"),
        ("http_proxy", "http://192.0.2.1:3128"),
    ]);
    let (report, status) = read(&mut command);
    assert_eq!(status, Some(1));
    let problems = texts(&report["host"], "problem");
    for expected in ["mlx5_99:1 does not exist here", "192.0.2.1 is not an address", "secret"] {
        assert!(problems.contains(expected), "{expected}: {report:#}");
    }
    assert!(texts(&report["host"], "warning").contains("http_proxy"), "{report:#}");
    assert_eq!(report["format"], 1);
    assert!(report.get("fleet").is_none());
    let mut wrong = Command::new(env!("CARGO_BIN_EXE_kvx"));
    let said = output(wrong.args(["doctor", "--skip-host"]), LIMIT);
    assert_eq!(said.status.code(), Some(1), "nothing is left to examine");
}
