//! Both legs of requests captured from live vLLM instances: the recipes produce the captured
//! bodies.

use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::params::recipe::{Answer, AnswerStream, sequential};
use kvx_vllm::params::{TransferParams, XRequestId};
use serde_json::{Value, json};

use crate::golden;

/// Returns every file in `http/` with both legs, by name.
fn captures() -> Vec<(String, Value)> {
    let folder = golden::directory().join("http");
    let files =
        std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let names = files.filter_map(|file| file.ok()?.file_name().into_string().ok());
    let captures: Vec<_> = names
        .filter(|name| name.ends_with(".json"))
        .map(|name| (name.clone(), golden::json(&format!("http/{name}"))))
        .filter(|(_, capture)| capture.get("prefill").is_some() && capture.get("decode").is_some())
        .collect();
    let names = captures.iter().map(|(name, _)| name.as_str());
    golden::require_captures(
        "http",
        names,
        &["chat.json", "first.json", "logprobs.json", "prefix_hit.json"],
    );
    captures
}

/// Returns the client's body: the decode leg's body without the router's additions.
fn client(capture: &Value) -> Value {
    let mut body = capture["decode"]["request"].clone();
    body.as_object_mut().unwrap().remove("kv_transfer_params");
    body
}

#[test]
fn golden_prefill_legs() {
    for (name, capture) in captures() {
        assert_eq!(
            sequential::prefill_leg(&client(&capture)).unwrap(),
            capture["prefill"]["request"],
            "{name}"
        );
    }
}

#[test]
fn golden_decode_legs() {
    for (name, capture) in captures() {
        let answer = Answer::from_body(&capture["prefill"]["response"]).unwrap();
        assert!(answer.finish_reason.is_some(), "{name}");
        let leg = sequential::decode_leg(&client(&capture), &answer, Version::V0_32).unwrap();
        assert!(leg.transfers, "{name}");
        assert_eq!(leg.body, capture["decode"]["request"], "{name}");
        Answer::from_body(&capture["decode"]["response"]).unwrap();
    }
}

#[test]
fn golden_params_read_and_write_back() {
    let captures = captures();
    let mut all: Vec<(&str, &Value)> = captures
        .iter()
        .map(|(name, capture)| {
            (name.as_str(), &capture["prefill"]["response"]["kv_transfer_params"])
        })
        .collect();
    all.extend(captures.iter().map(|(name, capture)| {
        (name.as_str(), &capture["prefill"]["request"]["kv_transfer_params"])
    }));
    let blocks = golden::json("kv_blocks/request.json");
    all.push(("kv_blocks/request.json", &blocks["kv_transfer_params"]));
    for (name, value) in all {
        let params = TransferParams::from_value(value).unwrap();
        assert_eq!(&params.to_value(Version::V0_32).unwrap(), value, "{name}");
        let unknown: Vec<_> = params.rest.iter().filter(|(_, value)| !value.is_null()).collect();
        assert!(unknown.is_empty() || !golden::own(), "{name}: {unknown:?} have no type");
    }
}

/// A kvx prefill instance writes the same keys as vLLM.
// vLLM 13: a prefill's answer has the captured keys, with `remote_num_tokens`
#[test]
fn golden_params_are_written_anew_as_they_were_captured() {
    for (name, capture) in captures() {
        let value = &capture["prefill"]["response"]["kv_transfer_params"];
        let version = match (value.get("remote_registration_generation"), value.get("dcp_size")) {
            (Some(_), _) => Version::V0_33,
            (None, Some(_)) => Version::V0_32,
            (None, None) => Version::V0_20,
        };
        let remote = TransferParams::from_value(value).unwrap().remote_blocks().unwrap();
        let new = TransferParams::prefilled(remote, version);
        assert_eq!(&new.to_value(version).unwrap(), value, "{name}");
    }
}

#[test]
fn golden_request_ids() {
    for (name, capture) in captures() {
        let id = XRequestId::new(capture["x_request_id"].as_str().unwrap()).unwrap();
        let chat = capture["prefill"]["path"].as_str().unwrap().contains("chat");
        let (public, engine) =
            if chat { (id.chat(), id.chat()) } else { (id.completion(), id.prompt(0)) };
        for leg in ["prefill", "decode"] {
            assert_eq!(capture[leg]["response"]["id"], public.as_str(), "{name}");
        }
        let params =
            TransferParams::from_value(&capture["prefill"]["response"]["kv_transfer_params"])
                .unwrap();
        let remote = params.remote_request_id.unwrap();
        let suffix = remote.strip_prefix(&engine).and_then(|suffix| suffix.strip_prefix('-'));
        assert_eq!(suffix.map(str::len), Some(8), "{name}: {remote}");
    }
}

/// A streamed answer carries the parameters in its last chunk.
#[test]
fn golden_params_from_a_stream() {
    for (name, capture) in captures() {
        let response = &capture["prefill"]["response"];
        let mut stream = String::new();
        for index in 0..3 {
            let choice = json!({"index": 0, "text": index.to_string(), "finish_reason": null});
            let chunk = json!({"id": response["id"], "choices": [choice]});
            stream.push_str(&format!("data: {chunk}\n\n"));
        }
        stream.push_str(&format!("data: {response}\n\ndata: [DONE]\n\n"));
        for size in [1, 7, 4096, stream.len()] {
            let mut reader = AnswerStream::default();
            stream.as_bytes().chunks(size).for_each(|piece| reader.push(piece).unwrap());
            assert!(reader.done(), "{name}");
            assert_eq!(reader.answer(), &Answer::from_body(response).unwrap(), "{name}");
        }
    }
}

/// The answers of a live decode instance to wrong parameters. kvx also considers the accepted ones
/// complete. kvx never writes those that stopped its engine and can be recognised without the
/// prompt.
#[test]
fn golden_fail_modes() {
    let (_, capture) = captures().swap_remove(0);
    let good = &capture["prefill"]["response"]["kv_transfer_params"];
    let without = |keys: &[&str]| {
        let mut value = good.clone();
        keys.iter().for_each(|key| drop(value.as_object_mut().unwrap().remove(*key)));
        value
    };
    let optional = [
        "tp_size",
        "dcp_size",
        "pp_size",
        "remote_num_tokens",
        "remote_blocks_expiry_time",
        "transfer_mode",
    ];
    let cases = golden::json("http/fail_modes.json");
    let case = |name: &str| cases.as_array().unwrap().iter().find(|case| case["case"] == name);
    if let Some(served) = case("only the needed parameters") {
        assert_eq!(served["status"], 200);
        let params = TransferParams::from_value(&without(&optional)).unwrap();
        let remote = params.remote_blocks().unwrap();
        assert_eq!((remote.tp_size, remote.dcp_size, remote.pp_size), (1, 1, 1));
        params.to_value(Version::V0_32).unwrap();
    }
    let needed =
        ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"];
    for key in needed {
        let params = TransferParams::from_value(&without(&[key])).unwrap();
        assert_eq!(params.remote_blocks().unwrap_err().key(), key);
        assert_eq!(params.to_value(Version::V0_32).unwrap_err().key(), key);
        let answer = Answer { params: Some(params), finish_reason: None };
        assert!(sequential::decode_leg(&client(&capture), &answer, Version::V0_32).is_err());
    }
    let mut flat = good.clone();
    let [group] = &good["remote_block_ids"].as_array().unwrap()[..] else { return };
    flat["remote_block_ids"] = group.clone();
    let written = TransferParams::from_value(&flat).unwrap().to_value(Version::V0_32).unwrap();
    assert_eq!(&written, good, "flat ids reach a newer engine as one group");
}
