//! `kv_transfer_params`: every version is read, parameters that would stop an engine are never
//! written, and errors name the key.

mod recipes;

use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::params::{
    MooncakeLeg, MooncakeParams, MooncakeTransferId, RemoteBlocks, TransferMode, TransferParams,
    XRequestId,
};
use serde_json::{Value, json};

fn remote() -> RemoteBlocks {
    RemoteBlocks::new("prefill-0", "cmpl-u-0-bbb18847", "10.0.0.1", 5600, vec![vec![28, 29, 30]])
}

fn written(params: &TransferParams, version: Version) -> Value {
    params.to_value(version).unwrap()
}

/// Returns the keys of vLLM 0.16 and 0.20, with ids in the form of 0.16.
fn of_0_16() -> Value {
    json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [28, 29, 30],
        "remote_engine_id": "prefill-0", "remote_request_id": "cmpl-u-0-bbb18847",
        "remote_host": "10.0.0.1", "remote_port": 5600, "tp_size": 1,
    })
}

#[test]
fn each_version_writes_its_own_keys() {
    let write = |version| written(&TransferParams::prefilled(remote(), version), version);
    let mut expected = of_0_16();
    assert_eq!(write(Version::V0_16), expected);
    expected["remote_block_ids"] = json!([[28, 29, 30]]);
    assert_eq!(write(Version::V0_20), expected);
    for (key, value) in [
        ("dcp_size", json!(1)),
        ("pp_size", json!(1)),
        ("remote_num_tokens", json!(0)),
        ("remote_blocks_expiry_time", Value::Null),
        ("transfer_mode", json!("pull")),
    ] {
        expected[key] = value;
    }
    assert_eq!(write(Version::V0_32), expected);
    expected["remote_registration_generation"] = json!(0);
    assert_eq!(write(Version::V0_33), expected);
}

#[test]
fn every_version_reads_back_as_what_was_meant() {
    let mut meant = remote();
    (meant.tp_size, meant.num_tokens, meant.registration_generation) = (4, Some(331), 3);
    meant.block_reference = Some("000000000000feed000000000000000c".to_owned());
    for version in Version::SPOKEN {
        let value = written(&TransferParams::prefilled(meant.clone(), version), version);
        let read = TransferParams::from_value(&value).unwrap();
        assert!(read.do_remote_prefill && !read.do_remote_decode);
        let mut expected = meant.clone();
        if version < Version::V0_21 {
            expected.num_tokens = None;
        }
        if version < Version::V0_33 {
            expected.registration_generation = 0;
        }
        assert_eq!(read.remote_blocks().unwrap(), expected, "{version}");
        assert_eq!(written(&read, version), value, "{version}");
    }
}

#[test]
fn serde_reads_and_writes_the_form_of_the_engine() {
    for version in Version::SPOKEN {
        let written = json!(TransferParams::prefilled(remote(), version));
        let expected = TransferParams::prefilled(remote(), version).to_value(version).unwrap();
        assert_eq!(written, expected, "{version}");
        let read: TransferParams = serde_json::from_value(written).unwrap();
        assert_eq!(read, TransferParams::prefilled(remote(), version), "{version}");
    }
    let wrong = serde_json::from_str::<TransferParams>(r#"{"remote_port": "5600"}"#).unwrap_err();
    assert!(wrong.to_string().contains("remote_port"), "{wrong}");
    let mut both = TransferParams::ask_prefill();
    both.do_remote_prefill = true;
    assert!(serde_json::to_value(both).unwrap_err().to_string().contains("do_remote_decode"));
}

#[test]
fn flat_block_ids_are_one_group() {
    let flat = TransferParams::from_value(&of_0_16()).unwrap();
    assert_eq!(flat.remote_block_ids, Some(vec![vec![28, 29, 30]]));
    assert_eq!(written(&flat, Version::V0_16), of_0_16(), "an older engine gets flat ids again");
    assert_eq!(
        written(&flat, Version::V0_33)["remote_block_ids"],
        json!([[28, 29, 30]]),
        "a newer engine never gets them"
    );
    assert_eq!(json!(flat), of_0_16(), "serde writes the form that was read");

    let mut two = flat;
    two.remote_block_ids = Some(vec![vec![1], vec![2]]);
    assert_eq!(two.to_value(Version::V0_16).unwrap_err().key(), "remote_block_ids");
    let mut empty = of_0_16();
    for none in [json!([]), json!([[]]), json!([[], []])] {
        empty["remote_block_ids"] = none;
        assert_eq!(
            TransferParams::from_value(&empty).unwrap().remote_blocks().unwrap().block_count(),
            0
        );
    }
}

// vLLM 46: a decode's answer has `do_remote_decode` true and an expiry time
#[test]
fn a_bidirectional_answer_carries_when_the_blocks_go() {
    let mut held = remote();
    held.expiry_time = Some(4920.25);
    let value = written(&TransferParams::decoded(held, Version::V0_33), Version::V0_33);
    assert_eq!(
        (&value["do_remote_decode"], &value["do_remote_prefill"]),
        (&json!(true), &json!(false))
    );
    assert_eq!(value["remote_blocks_expiry_time"], json!(4920.25));
    let read = TransferParams::from_value(&value).unwrap();
    assert_eq!(read.remote_blocks().unwrap().expiry_time, Some(4920.25));
}

#[test]
fn the_request_to_a_prefill_instance_is_vllms() {
    let asked = TransferParams::ask_prefill();
    assert!(!asked.names_remote());
    for version in Version::SPOKEN {
        assert_eq!(
            written(&asked, version),
            json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
                   "remote_block_ids": null, "remote_host": null, "remote_port": null})
        );
    }
    assert_eq!(TransferParams::from_value(&written(&asked, Version::V0_33)).unwrap(), asked);
}

#[test]
fn unknown_keys_and_nulls_are_written_unchanged() {
    let mut value = of_0_16();
    value["remote_block_ids"] = json!([[28]]);
    value["new_in_0.40"] = json!({"a": [1, null]});
    value["dcp_size"] = Value::Null;
    let read = TransferParams::from_value(&value).unwrap();
    assert_eq!(read.dcp_size, None);
    assert_eq!(written(&read, Version::V0_33), value);
    let mut set = read;
    set.dcp_size = Some(2);
    assert_eq!(
        written(&set, Version::V0_33)["dcp_size"],
        json!(2),
        "a field that is set is written"
    );
    set.rest.insert("tp_size".to_owned(), json!(8));
    assert_eq!(
        set.to_value(Version::V0_33).unwrap_err().key(),
        "rest",
        "a known key has one place"
    );
}

#[test]
fn the_error_of_a_wrong_type_names_the_expected_type() {
    for (key, value, takes) in [
        ("do_remote_prefill", json!("yes"), "true or false"),
        ("remote_block_ids", json!("1,2"), "a list of block ids for each KV cache group"),
        ("remote_block_ids", json!([[1], 2]), "a list of block ids"),
        ("remote_block_ids", json!([1, [2]]), "a list of block ids"),
        ("remote_block_ids", json!([[-1]]), "a list of block ids"),
        ("remote_block_ids", json!([[4_294_967_296_u64]]), "a list of block ids"),
        ("remote_engine_id", json!(""), "a non-empty string"),
        ("remote_request_id", json!(7), "a non-empty string"),
        ("remote_port", json!("5600"), "a port number"),
        ("remote_port", json!(0), "a port number"),
        ("remote_port", json!(65_536), "a port number"),
        ("tp_size", json!(0), "a positive integer"),
        ("pp_size", json!(1.5), "a positive integer"),
        ("remote_num_tokens", json!(-1), "a non-negative integer"),
        ("remote_blocks_expiry_time", json!("soon"), "seconds"),
        ("transfer_mode", json!("drag"), "\"pull\" or \"push\""),
        ("kvx_block_reference", json!([]), "a non-empty string"),
    ] {
        let error = TransferParams::from_value(&json!({key: value})).unwrap_err();
        assert_eq!(error.key(), key);
        assert!(
            error.to_string().starts_with(&format!("{key} is {value}; expected {takes}")),
            "{error}"
        );
    }
    let long = json!({"remote_port": "x".repeat(10_000)});
    assert!(
        TransferParams::from_value(&long).unwrap_err().to_string().len() < 200,
        "a long value is cut"
    );
    assert_eq!(TransferParams::from_value(&json!([])).unwrap_err().key(), "kv_transfer_params");
}

/// Each of these changes stops the engine of a vLLM decode instance that reads the parameters.
#[test]
fn parameters_that_stop_an_engine_are_never_written() {
    let good = TransferParams::prefilled(remote(), Version::V0_33);
    let changes: [(&str, fn(&mut TransferParams)); 9] = [
        ("remote_block_ids", |params| params.remote_block_ids = None),
        ("remote_block_ids", |params| params.remote_block_ids = Some(vec![vec![], vec![]])),
        ("remote_engine_id", |params| params.remote_engine_id = None),
        ("remote_request_id", |params| params.remote_request_id = None),
        ("remote_request_id", |params| params.remote_request_id = Some(String::new())),
        ("remote_host", |params| params.remote_host = None),
        ("remote_port", |params| params.remote_port = None),
        ("tp_size", |params| params.tp_size = Some(0)),
        ("remote_blocks_expiry_time", |params| params.remote_blocks_expiry_time = Some(f64::NAN)),
    ];
    for (key, change) in changes {
        let mut params = good.clone();
        change(&mut params);
        assert_eq!(params.to_value(Version::V0_33).unwrap_err().key(), key);
    }
    let mut alone = TransferParams::default();
    alone.do_remote_prefill = true;
    assert_eq!(
        alone.to_value(Version::V0_33).unwrap_err().key(),
        "remote_block_ids",
        "a decode leg without a remote"
    );
    let mut both = good.clone();
    both.do_remote_decode = true;
    assert_eq!(both.to_value(Version::V0_33).unwrap_err().key(), "do_remote_decode");
    let mut half = TransferParams::ask_prefill();
    half.remote_host = Some("h".to_owned());
    assert_eq!(
        half.to_value(Version::V0_33).unwrap_err().key(),
        "remote_block_ids",
        "an incomplete remote is not written"
    );
}

// vLLM 47: push parameters have `tp_size` in place of block ids
#[test]
fn push_needs_the_size_in_place_of_the_blocks() {
    let mut pushed = remote();
    (pushed.mode, pushed.block_ids) = (TransferMode::Push, Vec::new());
    let mut params = TransferParams::prefilled(pushed, Version::V0_33);
    params.remote_block_ids = None;
    params.to_value(Version::V0_33).unwrap();
    params.tp_size = None;
    assert_eq!(params.to_value(Version::V0_33).unwrap_err().key(), "tp_size");

    // A router of push connectors does not name the mode; the engine knows it.
    let unnamed = json!({"do_remote_prefill": true, "remote_engine_id": "e", "remote_host": "h", "remote_port": 1,
                         "remote_request_id": "r", "tp_size": 2, "pp_size": 1});
    let params = TransferParams::from_value(&unnamed).unwrap();
    assert_eq!(params.remote_blocks().unwrap_err().key(), "remote_block_ids");
    assert_eq!(params.remote_blocks_for(TransferMode::Push).unwrap().tp_size, 2);
    let pull = TransferParams::prefilled(remote(), Version::V0_33);
    assert_eq!(pull.remote_blocks_for(TransferMode::Push).unwrap_err().key(), "transfer_mode");
}

#[test]
fn mooncake_params_name_the_key_that_is_missing() {
    let value = json!({"do_remote_decode": false, "do_remote_prefill": true, "remote_bootstrap_addr": "http://h:8998",
                       "remote_engine_id": "e", "transfer_id": "xfer-1", "later": [1]});
    let read = MooncakeParams::from_value(&value).unwrap();
    let leg = MooncakeLeg::Decode {
        remote_engine_id: "e".to_owned(),
        remote_bootstrap_addr: "http://h:8998".to_owned(),
    };
    assert_eq!((&read.transfer_id, &read.leg), (&MooncakeTransferId::new("xfer-1").unwrap(), &leg));
    assert_eq!(read.to_value().unwrap(), value);
    for key in ["transfer_id", "remote_engine_id", "remote_bootstrap_addr"] {
        let mut without = value.clone();
        without.as_object_mut().unwrap().remove(key);
        assert_eq!(MooncakeParams::from_value(&without).unwrap_err().key(), key);
    }
    for flags in [(false, false), (true, true)] {
        let mut neither = value.clone();
        (neither["do_remote_decode"], neither["do_remote_prefill"]) =
            (flags.0.into(), flags.1.into());
        assert_eq!(MooncakeParams::from_value(&neither).unwrap_err().key(), "do_remote_decode");
    }
    let empty = MooncakeLeg::Decode {
        remote_engine_id: String::new(),
        remote_bootstrap_addr: "a".to_owned(),
    };
    let params = MooncakeParams::new(MooncakeTransferId::new("x").unwrap(), empty);
    assert_eq!(params.to_value().unwrap_err().key(), "remote_engine_id");
    assert_eq!(MooncakeTransferId::new("").unwrap_err().key(), "transfer_id");
}

#[test]
fn request_ids_fit_in_headers_and_heartbeats() {
    for good in ["4b6933e4-6190-4199-b423-3127bbe00204", "a:b", "x"] {
        assert_eq!(XRequestId::new(good).unwrap().as_str(), good);
    }
    let long = "x".repeat(XRequestId::MAX_LEN + 1);
    for bad in ["", "a,b", "a b", "a\nb", "ä", long.as_str()] {
        assert_eq!(XRequestId::new(bad).unwrap_err().key(), "X-Request-Id", "{bad}");
    }
    let made = XRequestId::from_random([0xff; 16]);
    assert_eq!(made.as_str(), "ffffffff-ffff-4fff-bfff-ffffffffffff");
    assert_eq!(XRequestId::new(made.as_str()).unwrap(), made);
}

/// vLLM's listener ends on a question in another version's form.
#[test]
fn the_keys_tell_in_which_form_an_engine_is_asked() {
    for version in Version::SPOKEN {
        let params = TransferParams::prefilled(remote(), version);
        let read = TransferParams::from_value(&written(&params, version)).unwrap();
        assert!(read.version() <= version, "{version}");
        let asks = |version: Version| version.asks_for_pipeline_rank();
        assert_eq!(asks(read.version()), asks(version), "{version}: {:?}", read.version());
    }
}
