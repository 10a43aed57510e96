//! Compatibility hashes: computed from their factors, and captured from a live vLLM.

use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::params::TransferMode;
use kvx_vllm::wire::{CompatibilityFactors, HandshakePayload, SpeculativeFactors};
use serde_json::Value;

use crate::golden;

fn text(value: &Value) -> String {
    value.as_str().expect("text").to_owned()
}

fn number(value: &Value) -> u32 {
    value.as_u64().and_then(|number| number.try_into().ok()).expect("a number")
}

/// Returns the version with these factors.
fn version(factors: &Value) -> Version {
    match (
        factors.get("transfer_mode"),
        factors.get("is_hma_enabled"),
        number(&factors["nixl_connector_version"]),
    ) {
        (Some(_), _, 15..) => Version::V0_33,
        (Some(_), _, _) => Version::V0_32,
        (None, Some(_), _) => Version::V0_20,
        (None, None, _) => Version::V0_16,
    }
}

fn factors(value: &Value) -> CompatibilityFactors {
    let mut factors = CompatibilityFactors::new(version(value), text(&value["model"]));
    factors.vllm_version = text(&value["vllm_version"]);
    factors.connector_version = number(&value["nixl_connector_version"]);
    factors.dtype = text(&value["dtype"]);
    factors.num_kv_heads = number(&value["num_kv_heads"]);
    factors.head_size = number(&value["head_size"]);
    factors.num_hidden_layers = number(&value["num_hidden_layers"]);
    factors.attn_backend_name = text(&value["attn_backend_name"]);
    factors.cache_dtype = text(&value["cache_dtype"]);
    factors.is_hma_enabled = value["is_hma_enabled"].as_bool().unwrap_or(false);
    factors.cross_layers_blocks = value["cross_layers_blocks"].as_bool().unwrap_or(false);
    if value["transfer_mode"] == "push" {
        factors.transfer_mode = TransferMode::Push;
    }
    let speculative = &value["speculative_config"];
    if !speculative.is_null() {
        let layers = speculative["auxiliary_layer_ids"].as_array();
        factors.speculative = Some(SpeculativeFactors {
            method: text(&speculative["method"]),
            model: text(&speculative["model"]),
            revision: speculative["revision"].as_str().map(str::to_owned),
            code_revision: speculative["code_revision"].as_str().map(str::to_owned),
            parallel_drafting: speculative["parallel_drafting"].as_bool().unwrap_or(false),
            kv_cache_dtype: Some(text(&speculative["kv_cache_dtype"])),
            auxiliary_layer_ids: layers.map(|layers| layers.iter().map(number).collect()),
        });
    }
    factors
}

// vLLM 2: the exact JSON text and hash follow from the compatibility factors
#[test]
fn golden_hashes_from_their_factors() {
    let entries = golden::json("compatibility_hash.json");
    let entries = entries.as_array().expect("a list");
    assert!(!entries.is_empty());
    for entry in entries {
        let name = &entry["name"];
        let factors = factors(&entry["factors"]);
        assert_eq!(factors.json().unwrap(), text(&entry["input"]), "{name}");
        assert_eq!(factors.hash().unwrap().as_str(), text(&entry["sha256"]), "{name}");
    }
}

// vLLM 2: compatibility hashes equal those that a live vLLM sent
#[test]
fn golden_hashes_that_a_live_vllm_sent() {
    let entries = golden::json("compatibility_hash.json");
    let seen =
        entries.as_array().expect("a list").iter().filter(|entry| entry["seen_in"].is_string());
    let mut count = 0;
    for entry in seen {
        let payload =
            HandshakePayload::decode(&golden::bytes(entry["seen_in"].as_str().unwrap())).unwrap();
        assert_eq!(
            payload.compatibility_hash,
            factors(&entry["factors"]).hash().unwrap(),
            "{}",
            entry["name"]
        );
        count += 1;
    }
    golden::require(count, "hash from a capture");
}
