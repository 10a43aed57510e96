//! The settings that a configuration gives a MooncakeConnector.

use std::time::Duration;

use kvx_core::{ErrorKind, Result};
use kvx_testkit::test;
use kvx_vllm::config::{BlockRelease, KvTransferConfig, LoadFailurePolicy, Role, Surroundings};
use kvx_vllm::engine::mooncake::{Bootstrap, Mooncake};
use kvx_vllm::engine::{Address, Settings, WorkerRank};

fn config(
    connector: &str,
    role: &str,
    extra: &str,
    variables: &[(&str, &str)],
) -> KvTransferConfig {
    let text = format!(
        r#"{{"kv_connector": "{connector}", "kv_role": "{role}", "engine_id": "e",
             "kv_connector_extra_config": {{{extra}}}}}"#
    );
    let surroundings = variables
        .iter()
        .fold(Surroundings::default(), |all, (name, value)| all.variable(*name, *value));
    KvTransferConfig::from_json(&text, &surroundings).unwrap()
}

fn of(config: &KvTransferConfig, data_parallel: u32) -> Result<Settings> {
    Settings::of_mooncake(config, data_parallel, Address { host: "h".into(), port: 1 })
}

fn settings(
    connector: &str,
    role: &str,
    extra: &str,
    variables: &[(&str, &str)],
) -> Result<Settings> {
    of(&config(connector, role, extra, variables), 1)
}

fn mooncake(role: &str, extra: &str, variables: &[(&str, &str)]) -> Mooncake {
    settings("MooncakeConnector", role, extra, variables).unwrap().mooncake.unwrap()
}

#[test]
fn the_defaults_are_vllms() {
    let set = settings("MooncakeConnector", "kv_both", "", &[]).unwrap();
    assert_eq!(set.mooncake, Some(Mooncake::new(Role::Both)));
    assert_eq!(set.release, BlockRelease::After(Duration::from_secs(480)));
    assert_eq!(set.push_timeout, Duration::from_secs(540), "the wait for an answer is 60 s longer");
    assert_eq!((set.heartbeat, set.policy), (None, LoadFailurePolicy::Fail));
    assert_eq!(set.engine.as_str(), "e_dp1");
    let mooncake = set.mooncake.unwrap();
    assert_eq!(
        (mooncake.connect_timeout, mooncake.bootstrap),
        (Duration::from_secs(30), Bootstrap::Own(8998))
    );
}

#[test]
fn variables_and_keys_are_used() {
    let set = settings(
        "MooncakeConnector",
        "kv_producer",
        r#""bootstrap_server_address": "10.0.0.9:9000", "load_timeout": 7, "allowed_hosts": ["a"]"#,
        &[
            ("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "77"),
            ("VLLM_MOONCAKE_CONNECTOR_TIMEOUT", "2.5"),
        ],
    )
    .unwrap();
    assert_eq!(set.release, BlockRelease::After(Duration::from_secs(77)));
    assert_eq!(
        (set.load_timeout, set.allowed_hosts),
        (Duration::from_secs(7), Some(vec!["a".to_owned()]))
    );
    let external = Bootstrap::External(Address { host: "10.0.0.9".into(), port: 9000 });
    let mooncake_set = set.mooncake.unwrap();
    assert_eq!(
        (mooncake_set.connect_timeout, mooncake_set.bootstrap),
        (Duration::from_millis(2500), external)
    );
    let port = mooncake("kv_producer", "", &[("VLLM_MOONCAKE_BOOTSTRAP_PORT", "9100")]);
    assert_eq!(port.bootstrap, Bootstrap::Own(9100));
}

// vLLM 56: the worker with TP, PP and DP rank 0 owns the bootstrap server
#[test]
fn the_first_rank_of_a_prefill_serves_the_bootstrap_server() {
    let first = WorkerRank::default();
    for (role, serves) in [("kv_producer", true), ("kv_both", true), ("kv_consumer", false)] {
        let own = mooncake(role, "", &[]);
        assert_eq!(own.serves_bootstrap(0, first), serves, "{role}");
        assert!(!own.serves_bootstrap(1, first), "another data-parallel rank");
        for rank in [WorkerRank { pp: 0, tp: 1 }, WorkerRank { pp: 1, tp: 0 }] {
            assert!(!own.serves_bootstrap(0, rank));
        }
        let external = mooncake(role, r#""bootstrap_server_address": "h:1""#, &[]);
        assert!(!external.serves_bootstrap(0, first));
    }
}

#[test]
fn other_data_parallel_ranks_register_at_the_host_of_the_first() {
    let bootstrap = |data_parallel, host: &str, extra| {
        let config = config("MooncakeConnector", "kv_both", extra, &[]).with_first_rank_at(host);
        of(&config, data_parallel).unwrap().mooncake.unwrap().bootstrap
    };
    let at = |host: &str, port| Bootstrap::External(Address { host: host.into(), port });
    assert_eq!(bootstrap(1, "10.0.0.1", ""), at("10.0.0.1", 8998));
    assert_eq!(bootstrap(1, "[fd00::1]", ""), at("fd00::1", 8998));
    assert_eq!(bootstrap(0, "10.0.0.1", ""), Bootstrap::Own(8998), "it is the first");
    for this_host in ["localhost", "127.0.0.1", "[::1]"] {
        assert_eq!(bootstrap(1, this_host, ""), Bootstrap::Own(8998), "{this_host}");
    }
    let named = r#""bootstrap_server_address": "10.0.0.9:1""#;
    assert_eq!(bootstrap(1, "10.0.0.1", named), at("10.0.0.9", 1));
}

// vLLM 56: an invalid external address of the bootstrap server is rejected
#[test]
fn an_external_address_that_is_none_is_refused_by_its_key() {
    for bad in ["h", "h:0", ":1", "h:65536", "http://h:1", "::1:80"] {
        let extra = format!(r#""bootstrap_server_address": "{bad}""#);
        let error = settings("MooncakeConnector", "kv_both", &extra, &[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{bad}");
        assert!(error.to_string().contains("bootstrap_server_address"), "{error}");
    }
    let v6 = mooncake("kv_both", r#""bootstrap_server_address": "[::1]:80""#, &[]);
    assert_eq!(v6.bootstrap, Bootstrap::External(Address { host: "::1".into(), port: 80 }));
}

#[test]
fn other_connectors_are_rejected_with_a_reason() {
    let error = settings("NixlConnector", "kv_both", "", &[]).unwrap_err();
    assert!(error.to_string().contains("Settings::from_config"), "{error}");
}

#[test]
fn before_0_16_there_is_no_bootstrap_server() {
    let first = WorkerRank::default();
    for compat in ["0.9", "0.11"] {
        let older = mooncake("kv_both", &format!(r#""kv_compat": "{compat}""#), &[]);
        assert!(older.is_older() && older.prefills() && older.decodes());
        assert!(!older.serves_bootstrap(0, first));
    }
    assert!(!mooncake("kv_both", r#""kv_compat": "0.16""#, &[]).is_older());
    let extra = r#""kv_compat": "0.11", "bootstrap_server_address": "h:1""#;
    assert!(mooncake("kv_both", extra, &[]).is_older(), "a key of later versions is not read");
}

#[test]
fn a_multi_connector_is_rejected_with_an_alternative() {
    let text = r#"{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config":
        {"connectors": [{"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}]}}"#;
    let config = KvTransferConfig::from_json(text, &Surroundings::default()).unwrap();
    let address = Address { host: "h".into(), port: 1 };
    for error in [
        Settings::from_config(&config, 0, address.clone()).unwrap_err(),
        Settings::of_mooncake(&config, 0, address.clone()).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        for connector in ["NixlConnector", "NixlPushConnector", "MooncakeConnector"] {
            assert!(error.to_string().contains(connector), "{error}");
        }
    }
}
