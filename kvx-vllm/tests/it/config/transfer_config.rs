//! The fields of `KVTransferConfig`: defaults, validation and accessors, and values that are kept,
//! warned about or rejected.

use kvx_core::ErrorKind;
use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::config::{
    BufferDevice, Concern, ConnectorKind, KvTransferConfig, LoadFailurePolicy, NUM_THREADS, Role,
    Surroundings,
};
use serde_json::json;

fn config(text: &str) -> KvTransferConfig {
    within(text, &Surroundings::default())
}

fn within(text: &str, surroundings: &Surroundings) -> KvTransferConfig {
    KvTransferConfig::from_json(text, surroundings)
        .unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn refused(text: &str) -> String {
    match KvTransferConfig::from_json(text, &Surroundings::default()) {
        Ok(config) => panic!("{text} was accepted: {:?}", config.to_json()),
        Err(error) => {
            assert!(
                matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Unsupported),
                "{text}: {error:?}"
            );
            error.to_string()
        }
    }
}

fn concerns(config: &KvTransferConfig) -> Vec<Concern> {
    config.warnings().iter().map(kvx_vllm::config::Warning::concern).collect()
}

/// Returns a configuration with `fields` and the two fields that make an instance take part.
fn nixl(fields: &str) -> String {
    format!(r#"{{"kv_connector": "NixlConnector", "kv_role": "kv_producer"{fields}}}"#)
}

#[test]
fn nothing_written_gives_every_default_of_vllm_0_33() {
    let config = within("{}", &Surroundings::default().gpu(true));
    assert_eq!(config.version(), Version::V0_33);
    assert_eq!(config.kv_connector(), None);
    assert_eq!(config.kv_buffer_device(), BufferDevice::Cuda);
    assert_eq!(config.kv_role(), None);
    assert_eq!(config.kv_port(), 14579);
    assert!(config.extra().is_empty());
    assert_eq!(config.kv_connector_module_path(), None);
    assert!(!config.enable_permute_local_kv());
    assert_eq!(config.kv_load_failure_policy(), LoadFailurePolicy::Fail);
    assert!(
        !config.is_kv_transfer_instance() && !config.is_kv_producer() && !config.is_kv_consumer()
    );
    assert!(config.warnings().is_empty(), "{:?}", config.warnings());
    // The default is the platform's device. Without a GPU that is host memory, without a warning.
    let config = self::config(&nixl(""));
    assert_eq!(config.kv_buffer_device(), BufferDevice::Cpu);
    assert!(config.warnings().is_empty(), "{:?}", config.warnings());
}

#[test]
fn the_old_versions_have_the_old_fields_and_defaults() {
    for (version, policy, device) in [
        ("0.9", LoadFailurePolicy::Recompute, BufferDevice::Cuda),
        ("0.11", LoadFailurePolicy::Recompute, BufferDevice::Cuda),
        ("0.16", LoadFailurePolicy::Recompute, BufferDevice::Cpu),
        ("0.20", LoadFailurePolicy::Fail, BufferDevice::Cpu),
        ("0.31", LoadFailurePolicy::Fail, BufferDevice::Cpu),
        ("0.33", LoadFailurePolicy::Fail, BufferDevice::Cpu),
    ] {
        let config = config(&nixl(&format!(
            r#", "kv_connector_extra_config": {{"kv_compat": "{version}"}}"#
        )));
        assert_eq!(config.version().as_str(), version);
        assert_eq!(config.kv_load_failure_policy(), policy, "{version}");
        assert_eq!(config.kv_buffer_device(), device, "{version}");
        assert_eq!(config.kv_buffer_size(), 1e9);
        assert_eq!(
            (config.kv_rank(), config.kv_parallel_size(), config.kv_ip()),
            (None, 1, "127.0.0.1")
        );
        let fields = config.to_json();
        for removed in ["kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip"] {
            assert_eq!(fields.contains_key(removed), version != "0.33", "{version} {removed}");
        }
        for added in ["enable_permute_local_kv", "kv_load_failure_policy"] {
            assert_eq!(fields.contains_key(added), version != "0.9", "{version} {added}");
        }
        assert_eq!(
            concerns(&config).contains(&Concern::Recompute),
            policy == LoadFailurePolicy::Recompute
        );
    }
}

#[test]
fn the_four_removed_fields_are_accepted_with_one_warning() {
    let old =
        r#", "kv_buffer_size": "5e8", "kv_rank": 1, "kv_parallel_size": 2, "kv_ip": "10.0.0.1""#;
    let config = config(&nixl(old));
    assert_eq!(config.kv_buffer_size(), 5e8);
    assert_eq!(
        (config.kv_rank(), config.kv_parallel_size(), config.kv_ip()),
        (Some(1), 2, "10.0.0.1")
    );
    assert_eq!(concerns(&config), [Concern::Version]);
    let sentence = config.warnings()[0].sentence();
    assert!(sentence.starts_with("kv_buffer_size, kv_rank, kv_parallel_size, kv_ip"), "{sentence}");
    let config = self::config(&nixl(&format!(
        r#"{old}, "kv_connector_extra_config": {{"kv_compat": "0.20"}}"#
    )));
    assert!(config.warnings().is_empty(), "{:?}", config.warnings());
}

#[test]
fn kv_compat_is_one_of_a_list_or_a_number() {
    for (written, meant) in [
        ("\"0.20\"", Version::V0_20),
        ("0.20", Version::V0_20),
        ("0.9", Version::V0_9),
        ("0.11", Version::V0_11),
    ] {
        let config =
            config(&format!(r#"{{"kv_connector_extra_config": {{"kv_compat": {written}}}}}"#));
        assert_eq!(config.version(), meant);
    }
    let error = refused(r#"{"kv_connector_extra_config": {"kv_compat": "0.25.1"}}"#);
    assert_eq!(
        error,
        "kv_compat is \"0.25.1\"; write the version of vLLM whose defaults apply: \"0.9\", \"0.11\", \"0.16\", \"0.20\", \
         \"0.21\", \"0.22\", \"0.26\", \"0.28\", \"0.29\", \"0.30\", \"0.31\", \"0.32\", \"0.33\"; \"0.22\" covers \
         that version"
    );
    assert!(
        refused(r#"{"kv_connector_extra_config": {"kv_compat": "new"}}"#).ends_with("\"0.33\"")
    );
    refused(r#"{"kv_connector_extra_config": {"kv_compat": true}}"#);
}

#[test]
fn a_version_covers_only_the_listed_releases() {
    for (written, said) in [
        ("0.10.2", "\"0.9\" covers that version"),
        ("0.17.1", "\"0.16\" covers that version"),
        ("0.27", "\"0.26\" covers that version"),
        ("0.20.2", "\"0.20\" covers that version"),
        ("0.19.1", "none of them covers vLLM 0.19.1, whose protocol kvx does not speak"),
        ("0.34.1", "kvx does not know later versions"),
    ] {
        let error =
            refused(&format!(r#"{{"kv_connector_extra_config": {{"kv_compat": "{written}"}}}}"#));
        assert!(error.ends_with(said), "{error}");
    }
}

// vLLM 56: before 0.16: a `kv_compat` of 0.11.1 to 0.15 is rejected with an error that says what to
//     write
#[test]
fn who_writes_a_version_before_0_16_hears_what_stands_for_its_mooncake_connector() {
    let mooncake = |version: &str| {
        format!(
            r#"{{"kv_connector": "MooncakeConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {{"kv_compat": {version}}}}}"#
        )
    };
    for written in
        ["0.11.1", "0.11.2", "0.12", "0.12.0", "0.13", "0.13.0", "0.14.1", "0.15", "0.15.1"]
    {
        let error = refused(&mooncake(&format!("\"{written}\"")));
        let said = format!(
            "none of them covers vLLM {written}, whose NixlConnector protocol kvx does not speak; for the \
             MooncakeConnector before vLLM 0.16 write \"0.11\" (kvx implements the protocol of vLLM 0.13)"
        );
        assert!(error.ends_with(&said), "{error}");
    }
    assert!(refused(&mooncake("0.13")).contains("write \"0.11\""), "a number is accepted");
    for written in ["\"0.11\"", "\"0.9\""] {
        assert!(config(&mooncake(written)).version() < Version::V0_16);
    }
}

#[test]
fn factors_of_the_hash_are_an_object_without_fractions_and_misspelt_ones_are_warned_about() {
    let factors = |factors: &str| {
        nixl(&format!(r#", "kv_connector_extra_config": {{"factors": {factors}}}"#))
    };
    let right = config(&factors(
        r#"{"model": "Qwen/Qwen3-0.6B", "vllm_version": "0.33.0+cu129", "num_kv_heads": 8}"#,
    ));
    assert!(right.warnings().is_empty(), "{:?}", right.warnings());
    assert_eq!(right.nixl().factors["vllm_version"], "0.33.0+cu129");
    let misspelt = config(&factors(r#"{"modell": "m"}"#));
    assert_eq!(concerns(&misspelt), [Concern::Unknown]);
    assert!(misspelt.warnings()[0].sentence().ends_with("did you mean model?"));
    assert!(refused(&factors(r#"["model"]"#)).contains("write an object of factors"));
    assert!(refused(&factors(r#"{"head_size": 128.5}"#)).contains("head_size without a fraction"));
}

#[test]
fn an_unknown_field_is_an_error_that_names_the_nearest() {
    let error = refused(r#"{"kv_conector": "NixlConnector"}"#);
    assert!(
        error.starts_with(
            "unexpected keyword argument \"kv_conector\": KVTransferConfig has no such field; did you mean \
             kv_connector?"
        ),
        "{error}"
    );
    assert!(refused(r#"{"backends": ["UCX"]}"#).contains("fields: kv_connector, engine_id"));
    assert!(refused(r#"{"kv-ip": "h"}"#).contains("did you mean kv_ip?"));
}

#[test]
fn kv_role_is_a_closed_set_and_goes_with_the_connector() {
    for (role, producer, consumer) in
        [("kv_producer", true, false), ("kv_both", true, true), ("kv_consumer", false, true)]
    {
        let config =
            config(&format!(r#"{{"kv_connector": "MooncakeConnector", "kv_role": "{role}"}}"#));
        assert!(config.is_kv_transfer_instance());
        assert_eq!(
            (config.is_kv_producer(), config.is_kv_consumer()),
            (producer, consumer),
            "{role}"
        );
        assert_eq!(config.kv_role().map(Role::as_str), Some(role));
        // A role without a connector does not make a KV transfer instance.
        let config = self::config(&format!(r#"{{"kv_role": "{role}"}}"#));
        assert!(
            !config.is_kv_transfer_instance()
                && !config.is_kv_producer()
                && !config.is_kv_consumer()
        );
    }
    let error = refused(r#"{"kv_connector": "NixlConnector", "kv_role": "producer"}"#);
    assert_eq!(
        error,
        "kv_role is \"producer\"; supported: kv_producer, kv_both, kv_consumer; did you mean kv_producer?"
    );
    for without in [
        r#"{"kv_connector": "NixlConnector"}"#,
        r#"{"kv_connector": "NixlConnector", "kv_role": null}"#,
    ] {
        assert_eq!(
            refused(without),
            "kv_connector is \"NixlConnector\" without a kv_role; write kv_role, supported roles are kv_producer, \
             kv_both, kv_consumer"
        );
    }
}

// vLLM guide R10: `kv_role` does not change what NixlConnector does
#[test]
fn kv_role_does_not_change_what_nixl_connector_does() {
    let variants = ["kv_producer", "kv_both", "kv_consumer"].map(|role| {
        config(&format!(
            r#"{{"kv_connector": "NixlConnector", "kv_role": "{role}", "engine_id": "e",
                 "kv_connector_extra_config": {{"backends": ["TCP"], "kv_lease_duration": 60}}}}"#
        ))
    });
    for config in &variants {
        assert_eq!(config.connector(), variants[0].connector());
        assert_eq!(config.nixl(), variants[0].nixl());
        assert_eq!(config.block_release(), variants[0].block_release());
        assert_eq!(config.environment(), variants[0].environment());
        assert_eq!(config.kv_load_failure_policy(), variants[0].kv_load_failure_policy());
    }
    assert_eq!(concerns(&variants[1]), [Concern::Version], "kv_both is deprecated");
    assert!(variants[0].warnings().is_empty() && variants[2].warnings().is_empty());
}

#[test]
fn the_failure_policy_is_a_closed_set_and_recompute_warns_with_the_reason() {
    let config = config(&nixl(r#", "kv_load_failure_policy": "recompute""#));
    assert_eq!(config.kv_load_failure_policy(), LoadFailurePolicy::Recompute);
    assert_eq!(concerns(&config), [Concern::Recompute]);
    assert!(config.warnings()[0].sentence().contains("decode instance does prefill work"));
    let error = refused(&nixl(r#", "kv_load_failure_policy": "recomput""#));
    assert_eq!(
        error,
        "kv_load_failure_policy is \"recomput\"; supported: fail, recompute; did you mean recompute?"
    );
}

#[test]
fn a_warning_is_logged_once_by_a_process() {
    // The warning names the key, which no other test of this process writes.
    let text = r#"{"kv_connector_extra_config": {"only_in_this_test": 1}}"#;
    let first = config(text);
    assert_eq!(first.warnings().len(), 1);
    assert_eq!(first.log_warnings_once(), 1);
    assert_eq!(first.log_warnings_once(), 0);
    assert_eq!(config(text).log_warnings_once(), 0);
}

#[test]
fn values_are_coerced_as_pydantic_does() {
    for (written, meant) in [
        ("true", true),
        ("\"True\"", true),
        ("\"on\"", true),
        ("1", true),
        ("false", false),
        ("\"false\"", false),
        ("0.0", false),
    ] {
        let config = config(&format!(r#"{{"enable_permute_local_kv": {written}}}"#));
        assert_eq!(config.enable_permute_local_kv(), meant, "{written}");
    }
    for wrong in ["\"maybe\"", "1.5", "2", "null", "[]"] {
        assert!(
            refused(&format!(r#"{{"enable_permute_local_kv": {wrong}}}"#))
                .ends_with("write true or false")
        );
    }
    for (written, meant) in [("\"14579\"", 14579), ("14580.0", 14580), ("14k", 14000)] {
        assert_eq!(config(&format!(r#"{{"kv_port": {written}}}"#)).kv_port(), meant);
    }
    for wrong in ["1.5", "\"1.5\"", "\"maybe\"", "65536", "-1", "null", "true"] {
        assert_eq!(
            refused(&format!(r#"{{"kv_port": {wrong}}}"#)),
            format!("kv_port is {wrong}; write a whole number from 0 to 65535")
        );
    }
    assert_eq!(
        refused(r#"{"engine_id": 7}"#),
        r#"engine_id is 7; write a string; as a dotted argument: '"7"'"#
    );
    assert_eq!(
        refused(r#"{"kv_connector_extra_config": null}"#),
        "kv_connector_extra_config is null; write an object, {…}"
    );
}

#[test]
fn an_engine_id_is_a_fresh_uuid_unless_written() {
    let (a, b) = (config("{}"), config("{}"));
    assert_ne!(a.engine_id(), b.engine_id());
    let id = a.engine_id();
    assert_eq!(id.len(), 36);
    assert_eq!(id.split('-').map(str::len).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
    assert!(id.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit()), "{id}");
    assert_eq!(&id[14..15], "4", "version 4");
    assert!(matches!(&id[19..20], "8" | "9" | "a" | "b"), "{id}");
    assert_eq!(a.clone().engine_id(), id);
    let config = config(r#"{"engine_id": "prefill-0"}"#);
    assert_eq!(
        (config.engine_id(), config.engine_id_of_rank(3).as_str()),
        ("prefill-0", "prefill-0_dp3")
    );
    assert!(self::config(r#"{"engine_id": null}"#).engine_id().len() == 36);
    refused(r#"{"engine_id": ""}"#);
}

#[test]
fn an_absent_buffer_device_falls_back_to_host_memory_with_one_warning() {
    let cuda = nixl(r#", "kv_buffer_device": "cuda""#);
    let config = config(&cuda);
    assert_eq!(
        (config.kv_buffer_device(), config.buffer_device()),
        (BufferDevice::Cuda, BufferDevice::Cpu)
    );
    assert_eq!(concerns(&config), [Concern::HostMemory]);
    let config = within(&cuda, &Surroundings::default().gpu(true));
    assert_eq!(config.buffer_device(), BufferDevice::Cuda);
    assert!(config.warnings().is_empty());
    let config =
        within(&nixl(r#", "kv_buffer_device": "xpu""#), &Surroundings::default().gpu(true));
    assert_eq!(
        (config.buffer_device(), concerns(&config)),
        (BufferDevice::Cpu, vec![Concern::HostMemory])
    );
    let config =
        within(&nixl(r#", "kv_buffer_device": "cpu""#), &Surroundings::default().gpu(true));
    assert_eq!((config.buffer_device(), concerns(&config)), (BufferDevice::Cpu, vec![]));
    assert!(refused(&nixl(r#", "kv_buffer_device": "cudda""#)).ends_with("did you mean cuda?"));
}

#[test]
fn an_unknown_connector_is_refused_with_the_nearest_and_vllms_others_by_name() {
    let error = refused(r#"{"kv_connector": "NixlConector", "kv_role": "kv_both"}"#);
    assert!(
        error.starts_with("Unsupported connector type: NixlConector; supported: NixlConnector, "),
        "{error}"
    );
    assert!(error.ends_with("did you mean NixlConnector?"), "{error}");
    let text = r#"{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}"#;
    let error = KvTransferConfig::from_json(text, &Surroundings::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(
        error.to_string().contains("kvx does not support vLLM's LMCacheConnectorV1"),
        "{error}"
    );
    for (name, connector) in [
        ("NixlConnector", ConnectorKind::NixlPull),
        ("NixlPullConnector", ConnectorKind::NixlPull),
        ("NixlPushConnector", ConnectorKind::NixlPush),
        ("MooncakeConnector", ConnectorKind::Mooncake),
    ] {
        let config = config(&format!(r#"{{"kv_connector": "{name}", "kv_role": "kv_consumer"}}"#));
        assert_eq!((config.connector(), config.kv_connector()), (Some(&connector), Some(name)));
        assert!(config.has_connector(name) && !config.has_connector("MultiConnector"));
    }
}

#[test]
fn a_module_path_needs_a_registered_connector() {
    let text = r#"{"kv_connector": "Mine", "kv_role": "kv_both", "kv_connector_module_path": "my.module"}"#;
    let error = refused(text);
    assert!(error.contains("has not registered a connector under the name \"Mine\""), "{error}");
    let program = Surroundings::default().connector("Mine");
    let config = within(text, &program);
    assert_eq!(config.connector(), Some(&ConnectorKind::Own("Mine".into())));
    assert_eq!(config.kv_connector_module_path(), Some("my.module"));
    assert!(within(r#"{"kv_connector": "Mine", "kv_role": "kv_both"}"#, &program).is_kv_producer());
    for empty in [
        r#"{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_module_path": ""}"#,
        r#"{"kv_connector_module_path": "x"}"#,
    ] {
        assert!(refused(empty).starts_with("kv_connector_module_path is "));
    }
}

#[test]
fn kvx_connector_is_read_as_vllm_is_given_it() {
    let text = r#"{"kv_connector": "KvxConnector", "kv_role": "kv_consumer", "kv_connector_module_path": "kvx.vllm"}"#;
    let config = config(text);
    assert_eq!(config.connector(), Some(&ConnectorKind::NixlPull));
    assert!(config.has_connector("KvxConnector"));
    for without in [
        r#"{"kv_connector": "KvxConnector", "kv_role": "kv_both"}"#,
        r#"{"kv_connector": "KvxConnector", "kv_role": "kv_both", "kv_connector_module_path": "kvx"}"#,
    ] {
        let error = refused(without);
        assert!(error.contains(r#"needs "kv_connector_module_path": "kvx.vllm""#), "{error}");
    }
    // The name means kvx's connector only with kvx's module: a program may register another.
    let program = Surroundings::default().connector("KvxConnector");
    let own = within(r#"{"kv_connector": "KvxConnector", "kv_role": "kv_both"}"#, &program);
    assert_eq!(own.connector(), Some(&ConnectorKind::Own("KvxConnector".into())));
}

#[test]
fn multi_connector_looks_into_its_children() {
    let text = r#"{"kv_connector": "MultiConnector", "kv_role": "kv_producer", "engine_id": "e",
        "kv_connector_extra_config": {"kv_compat": "0.20", "connectors": [
            {"kv_connector": "NixlConnector", "kv_role": "kv_producer"},
            {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer", "kv_load_failure_policy": "recompute"}]}}"#;
    let config = config(text);
    for name in ["MultiConnector", "NixlConnector", "MooncakeConnector"] {
        assert!(config.has_connector(name), "{name}");
    }
    assert!(!config.has_connector("NixlPushConnector"));
    assert_eq!(config.children().len(), 2);
    for child in config.children() {
        assert_eq!((child.engine_id(), child.version()), ("e", Version::V0_20));
    }
    assert_eq!(concerns(&config), [Concern::Recompute]);
    let sentence = config.warnings()[0].sentence();
    assert!(
        sentence.starts_with("kv_connector_extra_config.connectors[1]: kv_load_failure_policy"),
        "{sentence}"
    );

    let child = |child: &str| {
        refused(&format!(
            r#"{{"kv_connector": "MultiConnector", "kv_role": "kv_both",
                 "kv_connector_extra_config": {{"connectors": {child}}}}}"#
        ))
    };
    let error = child(r#"[{"kv_connector": "NixlConnector", "kv_role": "x"}]"#);
    assert!(
        error.starts_with("kv_connector_extra_config.connectors[0]: kv_role is \"x\""),
        "{error}"
    );
    for wrong in ["[]", "3", "[1]"] {
        assert!(child(wrong).contains("must list the children"), "{wrong}");
    }
}

#[test]
fn kvx_tables_reject_unknown_keys_and_other_keys_are_kept_with_a_warning() {
    let extra = |extra: &str| nixl(&format!(r#", "kv_connector_extra_config": {extra}"#));
    let config = config(&extra(
        r#"{"tcp": {"bind": "10.0.0.1", "ports": "7000-7010"}, "my_key": {"a": 1}}"#,
    ));
    assert_eq!(config.extra()["my_key"], json!({"a": 1}), "kept");
    assert_eq!(config.extra()["tcp"]["bind"], "10.0.0.1");
    assert_eq!(concerns(&config), [Concern::Unknown]);
    assert!(
        config.warnings()[0].sentence().starts_with("kv_connector_extra_config.my_key is kept")
    );

    let error = refused(&extra(r#"{"tcp": {"bnd": "10.0.0.1"}}"#));
    assert!(
        error.starts_with(
            "kv_connector_extra_config.tcp.bnd is not an option; did you mean tcp.bind?; known: "
        ),
        "{error}"
    );
    assert!(
        refused(&extra(r#"{"tcp": 3}"#))
            .contains("kv_connector_extra_config.tcp is 3; write an object")
    );
    assert!(
        refused(&extra(r#"{"TCP": {}}"#))
            .ends_with("is not a table; write kv_connector_extra_config.tcp")
    );
    assert!(
        refused(&extra(r#"{"nixl": {}}"#))
            .ends_with("is not a table; write kv_connector_extra_config.rixl")
    );

    let config = self::config(&extra(r#"{"backend": ["UCX"]}"#));
    assert!(config.warnings()[0].sentence().ends_with("did you mean backends?"));
}

#[test]
fn a_flat_key_of_a_kvx_table_means_the_nested_one() {
    let extra = |extra: &str| nixl(&format!(r#", "kv_connector_extra_config": {extra}"#));
    let config = config(&extra(
        r#"{"tcp.seal": "all", "tcp": {"bind": "10.0.0.1"}, "ucx.set": {"TLS": "tcp"}}"#,
    ));
    assert_eq!(config.extra()["tcp"], json!({"bind": "10.0.0.1", "seal": "all"}));
    assert_eq!(config.extra()["ucx"], json!({"set": {"TLS": "tcp"}}));
    assert_eq!(concerns(&config), []);
    assert!(refused(&extra(r#"{"tcp.sael": "all"}"#)).contains("did you mean tcp.seal?"));
    assert!(
        refused(&extra(r#"{"TCP.seal": "all"}"#)).ends_with("write kv_connector_extra_config.tcp")
    );
    let twice = refused(&extra(r#"{"tcp.seal": "all", "tcp": {"seal": "none"}}"#));
    assert!(twice.contains("is set twice"), "{twice}");
    // Other keys with a dot are kept as written.
    let config = self::config(&extra(r#"{"mine.seal": "all"}"#));
    assert_eq!(config.extra()["mine.seal"], "all");
}

#[test]
fn a_misspelt_security_key_is_an_error() {
    let refused = |key: &str| {
        refused(&nixl(&format!(r#", "kv_connector_extra_config": {{"{key}": "all"}}"#)))
    };
    for (key, words) in [
        ("seal", "write kv_connector_extra_config.tcp.seal"),
        ("allowed_host", "did you mean allowed_hosts?"),
        ("side_channel_bnd", "did you mean side_channel_bind?"),
        ("unauthenticatd", "did you mean unauthenticated?"),
        ("secret_file", "KVX_SECRET_FILE"),
        ("KVX_SECRET", "KVX_SECRET_FILE"),
    ] {
        let error = refused(key);
        assert!(error.contains(words), "{key}: {error}");
    }
}

#[test]
fn keys_of_other_connectors_are_accepted() {
    // Keys of the LMCache, offloading, P2P and shared-storage connectors.
    for key in [
        "discard_partial_chunks",
        "lmcache_rpc_port",
        "use_native",
        "shared_storage_path",
        "send_type",
        "nccl_num_channels",
        "http_port",
        "proxy_ip",
        "proxy_port",
        "mem_pool_size_gb",
        "cpu_bytes_to_use",
        "num_cpu_blocks",
        "block_size",
        "spec_name",
        "spec_module_path",
        "eviction_policy",
        "skip_last_n_tokens",
        "kv_buffer_ttl",
        "host_ip",
    ] {
        let config = config(&nixl(&format!(r#", "kv_connector_extra_config": {{"{key}": 1}}"#)));
        assert_eq!(concerns(&config), [Concern::Unknown], "{key}");
    }
}

#[test]
fn keys_of_another_version_are_ignored_and_warned_about() {
    let config = config(&nixl(
        r#", "kv_connector_extra_config": {"kv_compat": "0.20", "kv_lease_duration": 60}"#,
    ));
    assert_eq!(concerns(&config), [Concern::Version]);
    assert_eq!(config.nixl().kv_lease_duration.as_secs(), 30);
    let config = self::config(&nixl(
        r#", "kv_connector_extra_config": {"enable_cross_layers_blocks": "True"}"#,
    ));
    assert_eq!(concerns(&config), [Concern::Version]);
    assert!(!config.nixl().enable_cross_layers_blocks);
    let config = self::config(&nixl(
        r#", "kv_connector_extra_config": {"enable_cross_layers_blocks": "True", "kv_compat": "0.16"}"#,
    ));
    assert!(config.nixl().enable_cross_layers_blocks);
}

#[test]
fn nixl_settings_have_vllms_types_and_but_for_the_threads_its_defaults() {
    let defaults = config(&nixl(""));
    let nixl_settings = defaults.nixl();
    assert_eq!(nixl_settings.num_threads, NUM_THREADS, "the value that kvx uses");
    assert_eq!(nixl_settings.kv_lease_duration.as_secs(), 30);
    assert_eq!(nixl_settings.load_timeout.as_secs(), 120);
    assert_eq!(nixl_settings.decoder_kv_blocks_ttl.as_secs(), 480);
    assert_eq!(nixl_settings.push_registration_timeout.as_secs(), 480);
    assert_eq!(nixl_settings.kv_recompute_threshold, 64);
    assert_eq!(nixl_settings.engine_ttl.map(|ttl| ttl.as_secs()), Some(3600));
    assert!(!nixl_settings.bidirectional_kv_xfer && nixl_settings.enforce_handshake_compat);
    assert!(defaults.backends().unwrap().is_none());

    let config = config(&nixl(
        r#", "kv_connector_extra_config": {"backends": ["ucx", "Libfabric"], "num_threads": "8", "engine_ttl": 0,
            "decoder_kv_blocks_ttl": 600, "bidirectional_kv_xfer": "true", "enforce_handshake_compat": false}"#,
    ));
    let settings = config.nixl();
    assert_eq!(
        config.backends().unwrap().unwrap(),
        ["ucx", "Libfabric"],
        "as written, in the same order"
    );
    assert_eq!((settings.num_threads, settings.engine_ttl), (8, None));
    assert_eq!(settings.decoder_kv_blocks_ttl.as_secs(), 600);
    assert_eq!(settings.push_registration_timeout.as_secs(), 600, "follows the time to live");
    assert!(settings.bidirectional_kv_xfer && !settings.enforce_handshake_compat);
    assert!(config.warnings().is_empty(), "{:?}", config.warnings());

    for (wrong, begins) in [
        (
            r#"{"num_threads": -1}"#,
            "kv_connector_extra_config.num_threads is -1; write a whole number",
        ),
        (
            r#"{"kv_lease_duration": 0}"#,
            "kv_connector_extra_config.kv_lease_duration is 0; write a number of seconds",
        ),
        (
            r#"{"enforce_handshake_compat": "perhaps"}"#,
            "kv_connector_extra_config.enforce_handshake_compat is",
        ),
        (
            r#"{"backends": [1]}"#,
            "kv_connector_extra_config.backends is [1]; write a list of strings",
        ),
        (r#"{"backends": []}"#, "kv_connector_extra_config.backends is []: it names no backend"),
        (
            r#"{"backends": [""]}"#,
            "kv_connector_extra_config.backends is [\"\"]: it names no backend",
        ),
    ] {
        let error = refused(&nixl(&format!(r#", "kv_connector_extra_config": {wrong}"#)));
        assert!(error.starts_with(begins), "{error}");
    }
}

#[test]
fn mooncake_settings_have_vllms_defaults() {
    let config = config(
        r#"{"kv_connector": "MooncakeConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {"num_workers": 4, "bootstrap_server_address": "10.0.0.1:8998"}}"#,
    );
    let settings = config.mooncake();
    assert_eq!(settings.num_workers, 4);
    assert_eq!((settings.mooncake_protocol.as_str(), settings.device_name.as_str()), ("rdma", ""));
    assert_eq!(settings.bootstrap_server_address.as_deref(), Some("10.0.0.1:8998"));
    assert!(!settings.prefill_side_swa_replay);
    assert_eq!(self::config("{}").mooncake().num_workers, 10);
}

#[test]
fn a_key_without_effect_is_warned_about() {
    let with = |value: bool| {
        let extra = format!(r#"{{"prefill_side_swa_replay": {value}}}"#);
        let config = config(&format!(
            r#"{{"kv_connector": "MooncakeConnector", "kv_role": "kv_producer",
                "kv_connector_extra_config": {extra}}}"#,
        ));
        config.warnings().iter().map(|warning| warning.sentence().to_owned()).collect::<Vec<_>>()
    };
    let warned =
        "kv_connector_extra_config.prefill_side_swa_replay has no effect in kvx; remove it";
    assert_eq!(with(true), [warned]);
    assert!(with(false).is_empty());
}

#[test]
fn json_text_takes_human_readable_numbers_and_errors_show_the_place() {
    let config =
        config(r#"{"kv_port": 14k, "kv_connector_extra_config": {"x": 80m, "y": 1K, "z": "80m"}}"#);
    assert_eq!(config.kv_port(), 14000);
    assert_eq!(config.extra()["x"], 80_000_000);
    assert_eq!(config.extra()["y"], 1024);
    assert_eq!(config.extra()["z"], "80m");
    assert!(refused(r#"{"kv_port": 1.5K}"#).starts_with("1.5K: "));
    assert!(refused(r#"{"kv_port": 1,}"#).starts_with("this is not JSON: trailing comma, near `"));
    assert!(refused("[]").starts_with("the KV transfer configuration is []; write an object"));
    assert!(refused("").starts_with("this is not JSON: EOF"));
}

#[test]
fn printed_configurations_read_back_the_same() {
    let surroundings = Surroundings::default().engine_id("e");
    let config = within(
        &nixl(
            r#", "enable_permute_local_kv": "True", "kv_connector_extra_config": {"backends": ["TCP"], "k": 1}"#,
        ),
        &surroundings,
    );
    let again = KvTransferConfig::from_json(
        &serde_json::Value::Object(config.to_json()).to_string(),
        &Surroundings::default(),
    )
    .unwrap();
    assert_eq!(again.to_json(), config.to_json());
    assert_eq!(again.engine_id(), "e");
    assert!(again.enable_permute_local_kv());
}
