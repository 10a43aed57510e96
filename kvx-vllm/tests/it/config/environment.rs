//! vLLM's environment variables, the ports of ranks, leases and abort timeouts under each
//! `kv_compat`.

use std::time::Duration;

use kvx_testkit::test;
use kvx_vllm::config::{
    BlockRelease, Concern, KvCacheLayout, KvTransferConfig, LeaseTime, RankNumbers, Surroundings,
    ValueSource,
};

const COMPATS: [&str; 5] = ["0.9", "0.11", "0.16", "0.20", "0.33"];

fn try_config(
    version: &str,
    connector: &str,
    surroundings: &Surroundings,
) -> kvx_core::Result<KvTransferConfig> {
    let text = format!(
        r#"{{"kv_connector": "{connector}", "kv_role": "kv_producer", "kv_buffer_device": "cpu",
             "kv_load_failure_policy": "fail", "kv_connector_extra_config": {{"kv_compat": "{version}"}}}}"#
    );
    KvTransferConfig::from_json(&text, surroundings)
}

fn config(version: &str, connector: &str, variables: &[(&str, &str)]) -> KvTransferConfig {
    let surroundings =
        variables.iter().fold(Surroundings::default(), |surroundings, (name, value)| {
            surroundings.variable(*name, *value)
        });
    try_config(version, connector, &surroundings).expect("a valid configuration")
}

#[test]
fn without_variables_the_defaults_are_vllms() {
    let config = config("0.33", "NixlConnector", &[]);
    let environment = config.environment();
    assert_eq!(
        (environment.side_channel_host.as_str(), environment.side_channel_port),
        ("localhost", 5600)
    );
    assert_eq!(environment.abort_request_timeout, None);
    assert_eq!(environment.mooncake_bootstrap_port, 8998);
    assert_eq!(environment.mooncake_abort_request_timeout, Duration::from_secs(480));
    assert_eq!(environment.mooncake_connector_timeout, Duration::from_secs(30));
    assert_eq!(environment.kv_cache_layout, None);
    assert!(config.warnings().is_empty(), "{:?}", config.warnings());
}

// vLLM guide R17: `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT` sets the time until a prefill frees its
//     blocks
#[test]
fn every_variable_is_read() {
    let config = config(
        "0.33",
        "NixlConnector",
        &[
            ("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.7"),
            ("VLLM_NIXL_SIDE_CHANNEL_PORT", "5700"),
            ("VLLM_HOST_IP", "10.0.0.8"),
            ("VLLM_MOONCAKE_BOOTSTRAP_PORT", "9000"),
            ("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "60"),
            ("VLLM_MOONCAKE_CONNECTOR_TIMEOUT", "7.5"),
            ("VLLM_KV_CACHE_LAYOUT", "LBHNC"),
        ],
    );
    let environment = config.environment();
    assert_eq!(
        (environment.side_channel_host.as_str(), environment.side_channel_port),
        ("10.0.0.7", 5700)
    );
    assert_eq!(environment.host_ip.as_deref(), Some("10.0.0.8"));
    assert_eq!(environment.mooncake_bootstrap_port, 9000);
    assert_eq!(environment.mooncake_abort_request_timeout, Duration::from_secs(60));
    assert_eq!(environment.mooncake_connector_timeout, Duration::from_millis(7500));
    assert_eq!(environment.kv_cache_layout, Some(KvCacheLayout::Lbhnc));
}

#[test]
fn an_invalid_variable_is_named_with_a_remedy() {
    for (name, value, cure) in [
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", "x", "write a port from 1 to 65535"),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", "65536", "write a port from 1 to 65535"),
        ("VLLM_MOONCAKE_BOOTSTRAP_PORT", "0", "write a port from 1 to 65535"),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", "", "is empty; give it a value or unset it"),
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", " ", "is empty; give it a value or unset it"),
        ("VLLM_NIXL_ABORT_REQUEST_TIMEOUT", "1.5", "write a whole number of seconds above 0"),
        ("VLLM_MOONCAKE_BOOTSTRAP_PORT", "70000", "write a port from 1 to 65535"),
        ("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "never", "write a whole number of seconds above 0"),
        ("VLLM_MOONCAKE_CONNECTOR_TIMEOUT", "-1", "write a number of seconds above 0"),
        ("VLLM_KV_CACHE_LAYOUT", "HDN", "did you mean HND?"),
    ] {
        let surroundings = Surroundings::default().variable(name, value);
        let error = try_config("0.33", "NixlConnector", &surroundings).unwrap_err().to_string();
        assert!(error.starts_with(name) && error.contains(cure), "{error}");
    }
    let surroundings = Surroundings::default().variable("VLLM_KV_CACHE_LAYOUT", "LBHNC");
    let error = try_config("0.20", "NixlConnector", &surroundings).unwrap_err().to_string();
    assert!(error.contains("vLLM 0.20 knows NHD and HND"), "{error}");
}

// vLLM guide R4: each data-parallel rank has its own port: the base port plus the rank
// vLLM guide R5: each worker has its own port in the versions of `kv_compat` with the older rule
#[test]
fn side_channel_ports_follow_the_rule_of_each_version() {
    let worker = |dp, tp| RankNumbers { dp, tp, tp_size: 4 };
    for version in COMPATS {
        let config = config(version, "NixlConnector", &[("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")]);
        let port = |dp, tp| config.side_channel_port(worker(dp, tp)).unwrap();
        let per_worker = matches!(version, "0.9" | "0.11");
        // base + dp × tp size + tp rank, or base + dp rank.
        let expected = if per_worker { [5600, 5603, 5604, 5611] } else { [5600, 5600, 5601, 5602] };
        assert_eq!([port(0, 0), port(0, 3), port(1, 0), port(2, 3)], expected, "{version}");
        let unset = self::config(version, "NixlConnector", &[]);
        let default = if per_worker { 5557 } else { 5600 };
        assert_eq!(unset.side_channel_port(RankNumbers::default()).unwrap(), default, "{version}");
    }
}

// vLLM guide R16: `VLLM_MOONCAKE_BOOTSTRAP_PORT` defaults to 8998, and before 0.16 each worker has
//     its own port
#[test]
fn mooncake_has_one_bootstrap_port_and_before_a_port_for_each_worker() {
    let port = |version, dp, tp| {
        config(version, "MooncakeConnector", &[])
            .mooncake_port(RankNumbers { dp, tp, tp_size: 2 })
            .unwrap()
    };
    for version in ["0.16", "0.20", "0.33"] {
        assert_eq!(
            [port(version, 0, 0), port(version, 0, 1), port(version, 3, 1)],
            [8998; 3],
            "{version}"
        );
    }
    assert_eq!([port("0.11", 0, 0), port("0.11", 0, 1), port("0.11", 3, 1)], [8998, 8999, 9005]);
}

#[test]
fn impossible_ranks_and_ports_are_errors() {
    let config = config("0.33", "NixlConnector", &[("VLLM_NIXL_SIDE_CHANNEL_PORT", "65535")]);
    let any = self::config("0.33", "NixlConnector", &[("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")]);
    assert_eq!(any.side_channel_port(RankNumbers { dp: 1, tp: 0, tp_size: 1 }).unwrap(), 0);
    let error =
        config.side_channel_port(RankNumbers { dp: 1, tp: 0, tp_size: 1 }).unwrap_err().to_string();
    assert!(error.contains("above 65535; lower VLLM_NIXL_SIDE_CHANNEL_PORT"), "{error}");
    let error =
        config.side_channel_port(RankNumbers { dp: 0, tp: 2, tp_size: 2 }).unwrap_err().to_string();
    assert!(error.contains("tp rank 2 of 2 does not exist"), "{error}");
    config.mooncake_port(RankNumbers { dp: u32::MAX, tp: 0, tp_size: u32::MAX }).unwrap();
    let old = self::config("0.9", "NixlConnector", &[]);
    old.side_channel_port(RankNumbers { dp: u32::MAX, tp: u32::MAX - 1, tp_size: u32::MAX })
        .unwrap_err();
}

#[test]
fn blocks_are_released_by_timeout_until_0_21_and_by_lease_from_0_22() {
    let seconds = Duration::from_secs;
    for (version, expected) in [
        ("0.9", BlockRelease::After(seconds(120))),
        ("0.11", BlockRelease::After(seconds(120))),
        ("0.16", BlockRelease::After(seconds(480))),
        ("0.20", BlockRelease::After(seconds(480))),
        ("0.21", BlockRelease::After(seconds(480))),
        ("0.22", BlockRelease::Lease(LeaseTime { duration: seconds(30) })),
        ("0.31", BlockRelease::Lease(LeaseTime { duration: seconds(30) })),
        ("0.33", BlockRelease::Lease(LeaseTime { duration: seconds(30) })),
    ] {
        assert_eq!(config(version, "NixlConnector", &[]).block_release(), expected, "{version}");
    }
    let lease = LeaseTime { duration: seconds(30) };
    assert_eq!((lease.heartbeat(), lease.extension()), (seconds(5), seconds(20)));
    let short = LeaseTime { duration: seconds(3) };
    assert_eq!((short.heartbeat(), short.extension()), (Duration::from_millis(500), seconds(2)));
}

// vLLM guide R7: `VLLM_NIXL_ABORT_REQUEST_TIMEOUT` sets the time until blocks that nobody fetched
//     are free
// vLLM guide R8: `VLLM_NIXL_ABORT_REQUEST_TIMEOUT` of the older guide works for each `kv_compat`
#[test]
fn the_abort_timeout_wins_when_set_and_warns_under_0_33() {
    for version in COMPATS {
        let config = config(version, "NixlConnector", &[("VLLM_NIXL_ABORT_REQUEST_TIMEOUT", "77")]);
        assert_eq!(
            config.block_release(),
            BlockRelease::After(Duration::from_secs(77)),
            "{version}"
        );
        let warned = config.warnings().iter().any(|warning| {
            warning.concern() == Concern::Version
                && warning.sentence().starts_with("VLLM_NIXL_ABORT_REQUEST_TIMEOUT is set")
        });
        assert_eq!(warned, version == "0.33", "{version}");
    }
}

// vLLM guide R1: `NCCL_*` variables have no effect, and a warning says so
#[test]
fn nccl_variables_give_one_hint_that_names_them() {
    let variables = [("NCCL_SOCKET_IFNAME", "eth0"), ("NCCL_IB_HCA", "mlx5")];
    let nixl = config("0.33", "NixlConnector", &variables);
    assert_eq!(nixl.warnings().len(), 1);
    assert_eq!(nixl.warnings()[0].concern(), Concern::Nccl);
    let sentence = nixl.warnings()[0].sentence();
    assert!(
        sentence.starts_with(
            "NCCL_IB_HCA, NCCL_SOCKET_IFNAME are set, but NixlConnector does not use NCCL"
        ),
        "{sentence}"
    );
    assert!(sentence.contains("UCX_NET_DEVICES"));
    // Without a connector there are no transfers.
    let surroundings = Surroundings::default().variable("NCCL_IB_HCA", "x");
    assert!(KvTransferConfig::from_json("{}", &surroundings).unwrap().warnings().is_empty());
}

#[test]
fn the_process_environment_is_read_only_for_what_concerns_kv_transfer() {
    // Reading works with any environment of this machine, and unrelated variables are not part of
    // the value.
    let surroundings = format!("{:?}", Surroundings::of_process());
    assert!(!surroundings.contains("\"PATH\""), "{surroundings}");
    assert_eq!(ValueSource::Environment("X".into()).to_string(), "environment X");
}
