//! Notifications captured from a live vLLM, and others made by its rules.

use kvx_testkit::test;
use kvx_vllm::wire::EngineNotification;
use serde_json::Value;

use crate::golden;

fn entries(kind: &str) -> Vec<Value> {
    let file = golden::json("notifications.json");
    let entries: Vec<_> = ["captured", "by_rule"]
        .iter()
        .flat_map(|origin| file[origin][kind].as_array().cloned().unwrap_or_default())
        .collect();
    golden::require(entries.len(), kind);
    entries
}

fn check(entry: &Value, expected: EngineNotification) {
    let bytes = golden::hex(entry["hex"].as_str().unwrap());
    assert_eq!(bytes, entry["text"].as_str().unwrap().as_bytes());
    let read = EngineNotification::decode(&bytes).unwrap();
    assert_eq!(read, expected);
    assert_eq!(read.encode(), bytes);
}

// vLLM 43: a completion carries the number of readers
#[test]
fn golden_completions() {
    for entry in entries("completion") {
        let count = entry["consumers"].as_u64().unwrap().try_into().unwrap();
        check(
            &entry,
            EngineNotification::done(entry["remote_request_id"].as_str().unwrap(), count).unwrap(),
        );
    }
}

// vLLM 37: heartbeats have vLLM's format, carry several ids, and are bounded in length
#[test]
fn golden_heartbeats() {
    for entry in entries("heartbeat") {
        let ids = entry["request_ids"].as_array().unwrap().iter().map(|id| id.as_str().unwrap());
        check(&entry, EngineNotification::heartbeat(ids).unwrap());
    }
}
