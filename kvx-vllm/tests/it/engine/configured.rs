//! The settings that a configuration gives the two halves.

use std::time::Duration;

use kvx_core::ErrorKind;
use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::config::{BlockRelease, KvTransferConfig, Surroundings};
use kvx_vllm::engine::{Address, Settings, SideChannels, WorkerRank};
use kvx_vllm::params::TransferMode;
use kvx_vllm::wire::CompatibilityFactors;

use super::rig::{Rig, at, prefilled};

fn configured(connector: &str, extra: &str, surroundings: &Surroundings) -> KvTransferConfig {
    let text = format!(
        r#"{{"kv_connector": "{connector}", "kv_role": "kv_both", "engine_id": "e",
             "kv_connector_extra_config": {{{extra}}}}}"#
    );
    KvTransferConfig::from_json(&text, surroundings).unwrap()
}

fn settings(connector: &str, extra: &str) -> kvx_core::Result<Settings> {
    let config = configured(connector, extra, &Surroundings::default());
    Settings::from_config(&config, 0, Address { host: "h".into(), port: 5600 })
}

// vLLM 37: heartbeats go to every peer whose version uses leases, however this engine frees its own
//     blocks; an older vLLM never gets one
#[test]
fn heartbeats_follow_from_the_dialect_and_not_from_how_this_engine_frees_its_own_blocks() {
    let fixed = Surroundings::default().variable("VLLM_NIXL_ABORT_REQUEST_TIMEOUT", "77");
    let config = configured("NixlConnector", "", &fixed);
    let settings_of = |config: &KvTransferConfig| {
        Settings::from_config(config, 0, Address { host: "h".into(), port: 5600 }).unwrap()
    };
    let settings = settings_of(&config);
    assert_eq!(settings.release, BlockRelease::After(Duration::from_secs(77)));
    let mut decode = Rig::new(settings);
    decode.arrive(0.0, "r", 40, &prefilled("p", "p-r", 40));
    assert_eq!(
        decode.scheduler.build_connector_meta(at(0.0)).heartbeats.len(),
        1,
        "a vLLM of this version leases"
    );
    assert_eq!(decode.scheduler.build_connector_meta(at(5.0)).heartbeats.len(), 1);

    // A heartbeat would stop the engine of an older vLLM.
    let config = configured("NixlConnector", r#""kv_compat": "0.21""#, &Surroundings::default());
    let mut decode = Rig::new(settings_of(&config));
    decode.arrive(0.0, "r", 40, &prefilled("p", "p-r", 40));
    assert!(decode.scheduler.build_connector_meta(at(0.0)).heartbeats.is_empty());
}

#[test]
fn only_connectors_that_speak_the_protocol_have_settings() {
    assert_eq!(settings("NixlConnector", "").unwrap().mode, TransferMode::Pull);
    assert_eq!(settings("NixlPullConnector", "").unwrap().mode, TransferMode::Pull);
    assert_eq!(settings("NixlPushConnector", "").unwrap().mode, TransferMode::Push);
    for (connector, extra) in [
        ("MooncakeConnector", ""),
        ("NixlPushConnector", r#""kv_compat": "0.20""#),
        (
            "MultiConnector",
            r#""connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}]"#,
        ),
    ] {
        let error = settings(connector, extra).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("NixlConnector"), "{error}");
    }
}

#[test]
fn timeouts_come_from_the_configuration() {
    let set =
        settings("NixlConnector", r#""load_timeout": 7, "push_registration_timeout": 9"#).unwrap();
    assert_eq!(
        (set.load_timeout, set.push_timeout),
        (Duration::from_secs(7), Duration::from_secs(9))
    );
    let unset = settings("NixlConnector", "").unwrap();
    assert_eq!(
        (unset.load_timeout, unset.push_timeout),
        (Duration::from_secs(120), Duration::from_secs(480))
    );
}

#[test]
fn every_kv_compat_has_a_dialect_and_the_oldest_the_ports_of_their_time() {
    for (compat, version, ports) in [
        ("0.9", Version::V0_33, SideChannels::OfWorkers),
        ("0.11", Version::V0_33, SideChannels::OfWorkers),
        ("0.16", Version::V0_16, SideChannels::OfEngine),
        ("0.22", Version::V0_22, SideChannels::OfEngine),
        ("0.28", Version::V0_28, SideChannels::OfEngine),
        ("0.33", Version::V0_33, SideChannels::OfEngine),
    ] {
        let settings = settings("NixlConnector", &format!(r#""kv_compat": "{compat}""#)).unwrap();
        assert_eq!((settings.version, settings.ports), (version, ports), "{compat}");
    }
    let base = Address { host: "h".into(), port: 5557 };
    let third = WorkerRank { pp: 0, tp: 2 };
    assert_eq!(SideChannels::OfWorkers.of(&base, third).unwrap().port, 5559);
    assert_eq!(SideChannels::OfEngine.of(&base, third).unwrap().port, 5557);
    let last = Address { port: u16::MAX, ..base };
    assert!(
        SideChannels::OfWorkers.of(&last, third).unwrap_err().to_string().contains("above 65535")
    );
}

// vLLM 2: compatibility factors in the configuration override those that kvx derives
#[test]
fn factors_of_the_configuration_win_over_what_kvx_knows() {
    let extra = r#""kv_compat": "0.28", "factors": {"model": "/models/qwen", "vllm_version": "0.28.0+cu129",
                   "attn_backend_name": "FLASHINFER", "num_kv_heads": 4}"#;
    let config = configured("NixlPushConnector", extra, &Surroundings::default());
    let text = CompatibilityFactors::from_config(&config, "qwen").json().unwrap();
    for said in [
        r#""model": "/models/qwen""#,
        r#""vllm_version": "0.28.0+cu129""#,
        r#""attn_backend_name": "FLASHINFER""#,
        r#""num_kv_heads": 4"#,
        r#""cache_dtype": "auto""#,
        r#""nixl_connector_version": 7"#,
        r#""cross_layers_blocks": false"#,
        r#""transfer_mode": "push""#,
    ] {
        assert!(text.contains(said), "{said}: {text}");
    }
}
