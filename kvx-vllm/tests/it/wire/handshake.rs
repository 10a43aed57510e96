//! The handshake: the checks and their order, and the reaction of each end to unexpected messages.

use std::time::Duration;

use kvx_core::{Error, ErrorKind, Result};
use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::engine::{Time, WorkerRank};
use kvx_vllm::params::{RemoteBlocks, TransferMode, TransferParams};
use kvx_vllm::wire::{
    ClockReading, CompatibilityFactors, CompatibilityHash, Expectation, Handshake,
    HandshakePayload, HandshakeRequest, HandshakenPeer, Listener, NixlAgentMetadata,
    SpeculativeFactors,
};

fn rank(pp: u32, tp: u32) -> WorkerRank {
    WorkerRank { pp, tp }
}

fn at(milliseconds: u64) -> Time {
    Time::from_origin(Duration::from_millis(milliseconds))
}

fn factors() -> CompatibilityFactors {
    let mut factors = CompatibilityFactors::new(Version::V0_33, "m");
    factors.num_kv_heads = 8;
    factors.head_size = 128;
    factors.num_hidden_layers = 28;
    factors
}

fn hash() -> CompatibilityHash {
    factors().hash().expect("no fractions")
}

fn metadata(engine: &str) -> NixlAgentMetadata {
    let mut metadata = NixlAgentMetadata::new(engine, Version::V0_33);
    metadata.agent_metadata = b"the agent's own bytes".to_vec();
    metadata.kv_caches_base_addr = vec![0x1000, 0x9000];
    metadata.block_lens = vec![64, 64];
    metadata.block_strides = vec![64, 128];
    metadata.num_blocks = 4;
    metadata.block_size = 16;
    metadata.kv_cache_layout = "LBHNC".to_owned();
    metadata.attn_backend_name = "FLASH_ATTN".to_owned();
    metadata
}

fn payload(metadata: &NixlAgentMetadata) -> Vec<u8> {
    HandshakePayload::new(hash(), metadata.encode()).encode()
}

fn expectation() -> Expectation {
    Expectation::new(Version::V0_33, "prefill", hash())
}

/// Runs a whole handshake between kvx's two ends.
fn shake(listener: &Listener, mut handshake: Handshake) -> Result<HandshakenPeer> {
    while let Some(request) = handshake.request(at(10)) {
        let message = [&b"d"[..], b"", &request];
        let answer = listener.answer(&message, at(100))?;
        let frames: Vec<&[u8]> = answer.frames().skip(2).collect();
        handshake.received(&frames, at(14))?;
    }
    handshake.finish()
}

// vLLM 1: a prefill's handshake arrives with the agent's bytes unchanged
#[test]
fn the_agents_bytes_arrive_as_the_prefill_side_published_them() {
    let mut listener = Listener::new(hash());
    listener.publish(rank(0, 0), &metadata("prefill"));
    let peer =
        shake(&listener, Handshake::new(expectation(), [rank(0, 0)], (1, 1)).unwrap()).unwrap();
    assert_eq!(peer.workers[&rank(0, 0)].agent_metadata, b"the agent's own bytes");
    assert_eq!(peer.workers[&rank(0, 0)], metadata("prefill"));
}

// vLLM 8: metadata is kept by (pp, tp)
#[test]
fn metadata_is_kept_by_pipeline_and_tensor_rank() {
    let mut listener = Listener::new(hash());
    for pp in 0..2 {
        for tp in 0..3 {
            let mut worker = metadata("prefill");
            worker.device_id = u64::from(10 * pp + tp);
            listener.publish(rank(pp, tp), &worker);
        }
    }
    let wanted = [rank(0, 1), rank(1, 1), rank(0, 2), rank(1, 2)];
    let peer = shake(&listener, Handshake::new(expectation(), wanted, (2, 3)).unwrap()).unwrap();
    let devices: Vec<_> =
        peer.workers.iter().map(|(rank, worker)| (rank.pp, rank.tp, worker.device_id)).collect();
    assert_eq!(devices, [(0, 1, 1), (0, 2, 2), (1, 1, 11), (1, 2, 12)]);
}

// vLLM 8: a legacy version cannot ask for a pipeline stage
#[test]
fn a_legacy_dialect_cannot_ask_for_a_pipeline_stage() {
    for version in [Version::V0_16, Version::V0_20] {
        let expectation = Expectation { version, ..expectation() };
        let error = Handshake::new(expectation, [rank(0, 0), rank(1, 0)], (2, 1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(
            HandshakeRequest::new(rank(0, 3), version).unwrap().encode(),
            *b"\x92\xc4\x0cget_meta_msg\x03"
        );
    }
}

// vLLM 2: a difference in any factor is rejected, unless the check is disabled
// vLLM 5: the transfer mode changes the compatibility hash
#[test]
fn a_different_factor_is_a_different_hash_and_is_refused() {
    let changes: [(&str, fn(&mut CompatibilityFactors)); 12] = [
        ("vllm_version", |factors| factors.vllm_version = "0.33.1".to_owned()),
        ("connector_version", |factors| factors.connector_version = 14),
        ("model", |factors| factors.model = "n".to_owned()),
        ("dtype", |factors| factors.dtype = "torch.float16".to_owned()),
        ("cache_dtype", |factors| factors.cache_dtype = "fp8".to_owned()),
        ("num_kv_heads", |factors| factors.num_kv_heads = 4),
        ("num_hidden_layers", |factors| factors.num_hidden_layers = 27),
        ("head_size", |factors| factors.head_size = 64),
        ("attn_backend_name", |factors| factors.attn_backend_name = "FLASHINFER".to_owned()),
        ("is_hma_enabled", |factors| factors.is_hma_enabled = false),
        ("transfer_mode", |factors| factors.transfer_mode = TransferMode::Push),
        ("a further one", |factors| drop(factors.further.insert("rope".to_owned(), 1.into()))),
    ];
    for (name, change) in changes {
        let mut other = factors();
        change(&mut other);
        let payload =
            HandshakePayload::new(other.hash().unwrap(), metadata("prefill").encode()).encode();
        let error = expectation().check(&payload).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Incompatible, "{name}");
        assert!(
            error.to_string().contains(&other.hash().unwrap().as_str()[..8]),
            "{name}: {error}"
        );
        let knowing = Expectation { factors: Some(factors()), ..expectation() };
        let error = knowing.check(&payload).unwrap_err().to_string();
        match name {
            "connector_version" | "model" | "a further one" => {
                assert!(error.contains("the model's name"), "{error}")
            }
            found => assert!(error.contains(&format!("{found} is ")), "{found}: {error}"),
        }
        let lenient = Expectation { enforce_handshake_compat: false, ..expectation() };
        assert_eq!(
            lenient.check(&payload).unwrap(),
            metadata("prefill"),
            "{name}: the check can be disabled"
        );
    }
}

// vLLM 2: block size and layout are not part of the compatibility hash
#[test]
fn block_size_and_layout_are_no_factors() {
    let mut other = metadata("prefill");
    other.block_size = 8;
    other.kv_cache_layout = "LBNHC".to_owned();
    assert_eq!(expectation().check(&payload(&other)).unwrap().block_size, 8);
}

fn draft(change: impl FnOnce(&mut SpeculativeFactors)) -> CompatibilityHash {
    let mut speculative = SpeculativeFactors {
        method: "eagle3".to_owned(),
        model: "draft".to_owned(),
        ..SpeculativeFactors::default()
    };
    change(&mut speculative);
    let mut with = factors();
    with.speculative = Some(speculative);
    with.hash().unwrap()
}

// vLLM 4: method, model and revisions of a draft model change the compatibility hash
#[test]
fn what_a_draft_model_is_changes_the_hash() {
    let plain = draft(|_| ());
    assert_ne!(plain, hash(), "with and without");
    assert_ne!(plain, draft(|factors| factors.method = "mtp".to_owned()));
    assert_ne!(plain, draft(|factors| factors.model = "other".to_owned()));
    assert_ne!(plain, draft(|factors| factors.revision = Some("r2".to_owned())));
    assert_ne!(plain, draft(|factors| factors.code_revision = Some("r2".to_owned())));
    assert_ne!(plain, draft(|factors| factors.parallel_drafting = true));
    assert_ne!(plain, draft(|factors| factors.auxiliary_layer_ids = Some(vec![2, 14, 25])));
    assert_ne!(plain, draft(|factors| factors.kv_cache_dtype = Some("fp8".to_owned())));
}

// vLLM 4: a draft model's inherited cache type hashes like an explicit one
#[test]
fn a_draft_model_that_inherits_the_targets_cache_type_is_the_same_as_one_that_names_it() {
    assert_eq!(draft(|_| ()), draft(|factors| factors.kv_cache_dtype = Some("auto".to_owned())));
}

/// The draft's attention backend is visible in its blocks, which are checked after the handshake.
// vLLM 4: a draft model's attention backend is not part of the compatibility hash
#[test]
fn a_draft_models_attention_backend_is_no_factor() {
    let mut with = factors();
    with.speculative =
        Some(SpeculativeFactors { method: "eagle".to_owned(), ..SpeculativeFactors::default() });
    let text = with.json().unwrap();
    assert_eq!(text.matches("attn_backend_name").count(), 1, "{text}");
    assert!(!text.contains("attention_backend"), "{text}");
}

#[test]
fn older_dialects_have_the_factors_that_they_had() {
    let keys = |version| {
        let text = CompatibilityFactors::new(version, "m").json().unwrap();
        ["cross_layers_blocks", "is_hma_enabled", "speculative_config", "transfer_mode"]
            .map(|key| text.contains(key))
    };
    assert_eq!(keys(Version::V0_16), [true, false, false, false]);
    assert_eq!(keys(Version::V0_20), [true, true, false, false]);
    assert_eq!(keys(Version::V0_26), [true, true, false, false]);
    assert_eq!(keys(Version::V0_28), [true, true, true, true]);
    assert_eq!(keys(Version::V0_29), [false, true, true, true]);
    assert_eq!(keys(Version::V0_33), [false, true, true, true]);
}

// vLLM 5: transfer parameters carry `tp_size`, `dcp_size` and `transfer_mode`
#[test]
fn parameters_tell_the_topology_and_the_mode() {
    let mut remote = RemoteBlocks::new("prefill", "r", "h", 5600, vec![vec![1]]);
    (remote.tp_size, remote.dcp_size, remote.pp_size, remote.mode) = (4, 2, 1, TransferMode::Push);
    let written =
        TransferParams::prefilled(remote, Version::V0_33).to_value(Version::V0_33).unwrap();
    assert_eq!(
        (&written["tp_size"], &written["dcp_size"], &written["pp_size"]),
        (&4.into(), &2.into(), &1.into())
    );
    assert_eq!(written["transfer_mode"], "push");
    for absent in ["remote_blocks_expiry_time", "remote_registration_generation"] {
        assert!(written.get(absent).is_none(), "push leaves {absent} out");
    }
}

// vLLM 3: invalid msgpack and missing fields, outer and inner, are errors
#[test]
fn bytes_that_cannot_be_read_are_an_error_of_their_own() {
    let truncated = |mut bytes: Vec<u8>| {
        bytes.truncate(bytes.len() - 1);
        bytes
    };
    let with_inner = |inner: Vec<u8>| HandshakePayload::new(hash(), inner).encode();
    for (name, payload, named) in [
        ("payload, no msgpack", b"\xc1".to_vec(), "0xc1"),
        (
            "payload, a field missing",
            b"\x81\xb2compatibility_hash\xa1h".to_vec(),
            "agent_metadata_bytes",
        ),
        ("payload, too short", truncated(payload(&metadata("prefill"))), "bytes expected"),
        ("metadata, no msgpack", with_inner(b"\xc1".to_vec()), "a map"),
        (
            "metadata, fields missing",
            with_inner(b"\x81\xa9engine_id\xa7prefill".to_vec()),
            "block_lens",
        ),
        (
            "metadata, too short",
            with_inner(truncated(metadata("prefill").encode())),
            "agent metadata",
        ),
    ] {
        let error = expectation().check(&payload).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{name}: {error}");
        if name != "metadata, no msgpack" {
            assert!(error.to_string().contains(named), "{name}: {error}");
        }
    }
}

/// As in vLLM, a peer of another version gets a version error, not one about unreadable metadata.
// vLLM 3: the handshake's checks run in vLLM's order
#[test]
fn the_checks_come_in_vllms_order() {
    let other_hash = CompatibilityHash::foreign("other");
    let mut wrong = metadata("somebody else");
    (wrong.pcp_size, wrong.dcp_size) = (4, 2);
    wrong.block_lens.pop();
    let steps: [(ErrorKind, &dyn Fn(&mut Vec<u8>, &mut NixlAgentMetadata, &mut CompatibilityHash));
        5] = [
        (ErrorKind::Incompatible, &|_, _, _| ()),
        (ErrorKind::Malformed, &|_, _, theirs| *theirs = hash()),
        (ErrorKind::Unsupported, &|inner, metadata, _| *inner = metadata.encode()),
        (ErrorKind::PeerRestarted, &|inner, metadata, _| {
            metadata.dcp_size = 4;
            *inner = metadata.encode();
        }),
        (ErrorKind::Malformed, &|inner, metadata, _| {
            metadata.engine_id = "prefill".to_owned();
            *inner = metadata.encode();
        }),
    ];
    let (mut inner, mut theirs) = (b"no metadata".to_vec(), other_hash);
    for (kind, repair) in steps {
        repair(&mut inner, &mut wrong, &mut theirs);
        let error = expectation()
            .check(&HandshakePayload::new(theirs.clone(), inner.clone()).encode())
            .unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
    }
    wrong.block_lens.push(64);
    expectation().check(&HandshakePayload::new(theirs, wrong.encode()).encode()).unwrap();
}

#[test]
fn context_parallel_sizes_must_go_together() {
    let check = |ours: (u32, u32), theirs: (u32, u32)| {
        let mut peer = metadata("prefill");
        (peer.pcp_size, peer.dcp_size) = theirs;
        Expectation { pcp_size: ours.0, dcp_size: ours.1, ..expectation() }
            .check(&payload(&peer))
            .map(drop)
    };
    for (ours, theirs) in [
        ((1, 1), (1, 1)),
        ((1, 1), (4, 4)),
        ((1, 2), (1, 4)),
        ((4, 1), (4, 1)),
        ((2, 2), (4, 4)),
        ((1, 1), (4, 1)),
    ] {
        check(ours, theirs).unwrap_or_else(|error| panic!("{ours:?} {theirs:?}: {error}"));
    }
    for (ours, theirs) in [((1, 1), (4, 2)), ((4, 1), (1, 2)), ((4, 1), (4, 4)), ((1, 2), (4, 1))] {
        assert_eq!(
            check(ours, theirs).unwrap_err().kind(),
            ErrorKind::Unsupported,
            "{ours:?} {theirs:?}"
        );
    }
}

#[test]
fn another_engine_at_the_address_is_named() {
    let error = expectation().check(&payload(&metadata("a later life"))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerRestarted);
    assert!(error.to_string().contains("expected prefill, got a later life"), "{error}");
}

#[test]
fn metadata_whose_addresses_cannot_be_is_refused() {
    let changes: [(&str, fn(&mut NixlAgentMetadata)); 8] = [
        ("block_strides", |metadata| metadata.block_strides = vec![1]),
        ("region_num_blocks", |metadata| metadata.region_num_blocks = Some(vec![1])),
        ("region_group_ids", |metadata| metadata.region_group_ids = Some(vec![0, 0, 0])),
        ("region_members", |metadata| metadata.region_members = vec![vec![]]),
        ("block_size", |metadata| metadata.block_size = 0),
        ("region 1 of 4 blocks", |metadata| metadata.kv_caches_base_addr[1] = u64::MAX - 100),
        ("region 1 of 4 blocks", |metadata| {
            metadata.kv_caches_base_addr[1] = u64::MAX - 3 * 128 - 10
        }),
        ("region 1 of 9 blocks", |metadata| {
            metadata.region_num_blocks = Some(vec![1, 9]);
            metadata.block_strides[1] = u64::MAX / 4;
        }),
    ];
    for (named, change) in changes {
        let mut peer = metadata("prefill");
        change(&mut peer);
        let error = expectation().check(&payload(&peer)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed);
        assert!(error.to_string().contains(named), "{named}: {error}");
    }
}

#[test]
fn metadata_of_older_dialects_reads_with_the_defaults_of_its_time() {
    for version in [Version::V0_16, Version::V0_20] {
        let mut old = NixlAgentMetadata::new("prefill", version);
        old.kv_caches_base_addr = vec![0x1000];
        old.block_lens = vec![64];
        old.block_strides = vec![64];
        old.block_size = 16;
        let bytes = old.encode();
        let keys = if version == Version::V0_16 { 8 } else { 10 };
        assert_eq!(bytes[0], 0x80 | keys, "{version} writes {keys} keys");
        let read = NixlAgentMetadata::decode(&bytes, version).unwrap();
        assert_eq!((&read, read.block_strides[0]), (&old, 64));
        let error = NixlAgentMetadata::decode(&bytes, Version::V0_33).unwrap_err();
        assert!(error.to_string().contains("absent"), "{error}");
    }
}

#[test]
fn keys_that_a_version_lacks_are_written_only_with_non_default_values() {
    let mut old = NixlAgentMetadata::new("prefill", Version::V0_20);
    old.block_lens = vec![64];
    old.block_strides = vec![128];
    old.kvx_metadata = Some(vec![1, 2, 3]);
    let read = NixlAgentMetadata::decode(&old.encode(), Version::V0_20).unwrap();
    assert_eq!((read.block_strides, read.kvx_metadata), (vec![128], Some(vec![1, 2, 3])));
}

// vLLM 9: the listener appends its clock for versions that can read it
#[test]
fn the_answer_carries_the_clock_for_who_can_read_it() {
    let mut listener = Listener::new(hash());
    listener.publish(rank(0, 0), &metadata("prefill"));
    let newer = HandshakeRequest::new(rank(0, 0), Version::V0_33).unwrap().encode();
    let older = HandshakeRequest::new(rank(0, 0), Version::V0_20).unwrap().encode();
    let envelope = [&b"d"[..], b""];
    let frames = |request: &[u8]| -> Vec<Vec<u8>> {
        let message = [envelope[0], envelope[1], request];
        let answer = listener.answer(&message, at(1500)).unwrap();
        answer.frames().map(<[u8]>::to_vec).collect()
    };
    assert_eq!(frames(&newer).len(), 4);
    assert_eq!(frames(&newer)[3], ClockReading(1.5).encode());
    assert_eq!(frames(&older).len(), 3, "an older REQ socket expects one frame");
    assert_eq!(frames(&newer)[2], frames(&older)[2]);
}

// vLLM 9: the clock offset is that of the shortest round trip
#[test]
fn the_clock_offset_is_that_of_the_shortest_round_trip() {
    let mut handshake =
        Handshake::new(expectation(), [rank(0, 0), rank(0, 1), rank(0, 2)], (1, 3)).unwrap();
    for (asked, answered, there) in [(1000, 1400, 7.0), (2000, 2100, 52.5), (3000, 3900, 9.0)] {
        handshake.request(at(asked)).unwrap();
        let clock = ClockReading(there).encode();
        handshake.received(&[&payload(&metadata("prefill"))[..], &clock], at(answered)).unwrap();
    }
    let clock = handshake.finish().unwrap().clock.unwrap();
    assert_eq!(clock.round_trip, Duration::from_millis(100));
    assert!((clock.seconds - (52.5 - 2.05)).abs() < 1e-9);
}

#[test]
fn an_answer_must_come_in_time() {
    let start = || Handshake::new(expectation(), [rank(0, 0)], (1, 1)).unwrap();
    let mut handshake = start();
    assert_eq!(handshake.answer_by(), None);
    handshake.request(at(1000)).unwrap();
    assert_eq!(handshake.answer_by(), Some(at(6000)));
    assert_eq!(handshake.request(at(1001)), None, "a REQ socket has one request in flight");
    handshake.tick(at(5999)).unwrap();
    assert_eq!(handshake.tick(at(6000)).unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!(handshake.request(at(6001)), None, "it is over");
    assert_eq!(handshake.finish().unwrap_err().kind(), ErrorKind::Invalid);

    let mut late = start();
    late.request(at(0)).unwrap();
    let frames = [payload(&metadata("prefill")), ClockReading(0.0).encode().to_vec()];
    assert_eq!(late.received(&frames, at(5000)).unwrap_err().kind(), ErrorKind::TimedOut);

    let mut patient = start().with_limit(Duration::from_secs(60));
    patient.request(at(0)).unwrap();
    patient.received(&frames, at(59_999)).unwrap();
    patient.finish().unwrap();
}

#[test]
fn an_answer_of_another_form_ends_the_handshake() {
    let good = payload(&metadata("prefill"));
    let clock = ClockReading(0.0).encode().to_vec();
    let nan = [b"\xcb\x7f\xf8\0\0\0\0\0\0".to_vec(), vec![0xc0], Vec::new()];
    let mut answers =
        vec![vec![], vec![good.clone()], vec![good.clone(), clock.clone(), clock.clone()]];
    answers.extend(nan.map(|clock| vec![good.clone(), clock]));
    for frames in answers {
        let mut handshake = Handshake::new(expectation(), [rank(0, 0)], (1, 1)).unwrap();
        handshake.request(at(0)).unwrap();
        assert_eq!(
            handshake.received(&frames, at(1)).unwrap_err().kind(),
            ErrorKind::Malformed,
            "{frames:?}"
        );
        assert!(handshake.finish().is_err());
    }
    let mut handshake = Handshake::new(expectation(), [rank(0, 0)], (1, 1)).unwrap();
    assert_eq!(
        handshake.received(&[&good, &clock], at(1)).unwrap_err().kind(),
        ErrorKind::Malformed,
        "nobody asked"
    );
}

/// vLLM's listener does not survive a request for such a worker.
#[test]
fn a_worker_that_does_not_exist_is_never_asked_for() {
    for (wanted, sizes) in [(rank(0, 2), (1, 2)), (rank(1, 0), (1, 2)), (rank(0, 0), (0, 0))] {
        assert_eq!(
            Handshake::new(expectation(), [wanted], sizes).unwrap_err().kind(),
            ErrorKind::Invalid
        );
    }
    assert_eq!(Handshake::new(expectation(), [], (1, 1)).unwrap_err().kind(), ErrorKind::Invalid);
}

/// Returns the reason for a kvx peer, the text in place of the hash for a vLLM peer, and the number
/// of frames.
fn refusal(listener: &Listener, frames: &[&[u8]]) -> Result<(String, String, usize), Error> {
    let answer = listener.answer(frames, at(0))?;
    let sent: Vec<&[u8]> = answer.frames().collect();
    assert_eq!(sent[0], frames[0]);
    let payload = sent
        .iter()
        .find_map(|frame| HandshakePayload::decode(frame).ok())
        .expect("an answer has a payload");
    assert!(answer.refusal().is_some());
    assert!(payload.agent_metadata_bytes.is_empty());
    let refusal = payload.refusal.expect("these requests are refused");
    Ok((refusal, payload.compatibility_hash.to_string(), sent.len()))
}

#[test]
fn an_unknown_rank_gets_a_refusal_with_a_reason() {
    let mut listener = Listener::new(hash());
    let request = HandshakeRequest::new(rank(0, 5), Version::V0_33).unwrap().encode();
    let frames: [&[u8]; 3] = [b"d", b"", &request];
    assert!(
        refusal(&listener, &frames).unwrap().0.contains("no worker has registered its memory yet")
    );
    listener.publish(rank(0, 1), &metadata("prefill"));
    let (words, in_place_of_hash, _) = refusal(&listener, &frames).unwrap();
    assert!(
        words.contains("there is no worker pp 0 tp 5: the last worker of this engine is pp 0 tp 1"),
        "{words}"
    );
    assert_eq!(in_place_of_hash, format!("refused by kvx: {words}"));

    // A kvx peer reads the reason. A vLLM without the hash check fails at the empty metadata.
    let enforced = |enforce| Expectation { enforce_handshake_compat: enforce, ..expectation() };
    for enforce in [true, false] {
        let mut handshake = Handshake::new(enforced(enforce), [rank(0, 5)], (1, 8)).unwrap();
        let asked = handshake.request(at(0)).unwrap();
        let message = [&b"d"[..], b"", &asked];
        let answer = listener.answer(&message, at(0)).unwrap();
        let frames: Vec<&[u8]> = answer.frames().skip(2).collect();
        let error = handshake.received(&frames, at(1)).unwrap_err();
        assert!(error.to_string().contains("there is no worker pp 0 tp 5"), "{error}");
    }
    assert!(NixlAgentMetadata::decode(b"", Version::V0_33).is_err());
}

#[test]
fn a_listener_survives_every_malformed_request() {
    let mut listener = Listener::new(hash());
    listener.publish(rank(0, 0), &metadata("prefill"));
    let huge = vec![0x91; 1 << 20];
    let requests: [&[u8]; 14] = [
        b"",
        b"\xc1",
        b"hello",
        b"\x93\xc4\x05hello\x00\x00",
        b"\x93\xc4\x0cget_meta_msg\x00",
        b"\x93\xc4\x0cget_meta_msg\x00\x00\x00",
        b"\x93\xc4\x0cget_meta_msg\xff\x00",
        b"\x93\xc4\x0cget_meta_msg\x00\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x93\xc4\x0cget_meta_msg\x00\xa10",
        b"\x91\xc4\x0cget_meta_msg",
        b"\x94\xc4\x0cget_meta_msg\x00\x00\x00",
        b"\x83\xc4\x0cget_meta_msg\x00\x00\x00\x00\x00",
        b"\xdd\xff\xff\xff\xff",
        &huge,
    ];
    for request in requests {
        let (words, _, frames) = refusal(&listener, &[b"d", b"", request]).unwrap();
        assert!(words.contains("handshake request"), "{words}");
        assert_eq!(frames, 4, "a newer peer expects two frames");
    }
    let good = HandshakeRequest::new(rank(0, 0), Version::V0_33).unwrap().encode();
    let (words, ..) = refusal(&listener, &[b"d", b"", &good, &good]).unwrap();
    assert!(words.contains("expected 1 frame, found 2"), "{words}");
    assert!(refusal(&listener, &[b"d", b""]).unwrap().0.contains("expected 1 frame, found 0"));
    let unanswerable: [Vec<&[u8]>; 4] =
        [vec![], vec![b""], vec![&[7; 300], b"", &good], vec![b"", b"d", &good]];
    for frames in unanswerable {
        let error = listener.answer(&frames, at(0)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed);
    }
    // After all these requests, the listener still answers.
    let peer =
        shake(&listener, Handshake::new(expectation(), [rank(0, 0)], (1, 1)).unwrap()).unwrap();
    assert_eq!(peer.workers[&rank(0, 0)], metadata("prefill"));
}

#[test]
fn every_zeromq_envelope_is_returned() {
    let mut listener = Listener::new(hash());
    listener.publish(rank(0, 0), &metadata("prefill"));
    let request = HandshakeRequest::new(rank(0, 0), Version::V0_33).unwrap().encode();
    for envelope in
        [vec![&b"d"[..], b""], vec![b"d"], vec![b"broker", b"d", b""], vec![&[255; 255][..], b""]]
    {
        let mut message = envelope.clone();
        message.push(&request);
        let answer = listener.answer(&message, at(0)).unwrap();
        let sent: Vec<&[u8]> = answer.frames().collect();
        assert_eq!(sent[..envelope.len()], envelope);
        assert_eq!(sent.len(), envelope.len() + 2);
        assert!(answer.refusal().is_none());
    }
}

#[test]
fn the_tag_may_be_text_as_vllm_takes_it() {
    let mut listener = Listener::new(hash());
    listener.publish(rank(0, 0), &metadata("prefill"));
    let message = [&b"d"[..], b"", b"\x93\xacget_meta_msg\x00\x00"];
    assert!(listener.answer(&message, at(0)).unwrap().refusal().is_none());
}

// vLLM 8: an engine with pipeline stages rejects a legacy peer
#[test]
fn an_engine_with_stages_refuses_a_peer_that_cannot_name_them() {
    let mut listener = Listener::new(hash());
    listener.publish(rank(0, 0), &metadata("prefill"));
    listener.publish(rank(1, 0), &metadata("prefill"));
    let older = HandshakeRequest::new(rank(0, 0), Version::V0_20).unwrap().encode();
    let (words, _, frames) = refusal(&listener, &[b"d", b"", &older]).unwrap();
    assert!(words.contains("pipeline stages"), "{words}");
    assert_eq!(frames, 3, "an older peer expects one frame");
}

// vLLM 41: a changed registration raises the generation that the parameters carry
#[test]
fn a_changed_registration_is_a_new_generation() {
    let mut listener = Listener::new(hash());
    let mut worker = metadata("prefill");
    listener.publish(rank(0, 0), &worker);
    listener.publish(rank(0, 0), &worker);
    listener.publish(rank(0, 1), &worker);
    assert_eq!(
        listener.registration_generation(),
        0,
        "the same metadata changes nothing, nor does another worker"
    );
    worker.agent_metadata = b"after sleep and wake".to_vec();
    listener.publish(rank(0, 0), &worker);
    assert_eq!(listener.registration_generation(), 1);
    let peer =
        shake(&listener, Handshake::new(expectation(), [rank(0, 0)], (1, 1)).unwrap()).unwrap();
    assert_eq!(peer.workers[&rank(0, 0)].agent_metadata, b"after sleep and wake");
}

#[test]
fn both_ends_reject_a_vllm_that_is_too_old() {
    // Up to 0.11.0 the request is only the tag.
    let mut listener = Listener::new(hash());
    listener.publish(rank(0, 0), &metadata("prefill"));
    let message = [&b"d"[..], b"", b"get_meta_msg"];
    let answer = listener.answer(&message, at(0)).unwrap();
    assert!(
        answer.refusal().unwrap().to_string().contains("the request is from vLLM 0.11.0 or older")
    );
    // Before 0.13 the answer is the metadata without a hash.
    let error = expectation().check(&metadata("prefill").encode()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("the peer runs vLLM before 0.13"), "{error}");
}
