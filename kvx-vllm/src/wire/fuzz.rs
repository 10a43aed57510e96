//! The entry points of the fuzz targets and the bounded fuzz test: no input panics, and an accepted
//! message encodes to bytes with the same meaning.

use std::fmt::Debug;

use kvx_core::backend::MAX_NOTIFICATION;
use kvx_core::{Incarnation, Result};

use super::mooncake::{Directory, OlderPullRequest, PullRequest, PullResponse, WorkerRegistration};
use super::nixl::{Assembly, Got, MAX_NOTE, NixlBlob, notes};
use super::{
    CompatibilityHash, EngineNotification, Expectation, Handshake, HandshakePayload,
    HandshakeRequest, KvxChallenge, KvxRequest, Listener, NixlAgentMetadata,
};
use crate::Version;
use crate::ids::WorkerRank;
use crate::params::recipe::{Answer, AnswerStream};
use crate::params::{MooncakeParams, TransferParams};
use crate::time::Time;

/// The targets, by the names of their corpora.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[
    ("connector_handshake_request", handshake_request),
    ("connector_handshake_payload", handshake_payload),
    ("connector_agent_metadata", agent_metadata),
    ("connector_notification", notification),
    ("connector_mooncake", mooncake),
    ("connector_bootstrap", bootstrap),
    ("connector_nixl_blob", nixl_blob),
    ("connector_nixl_notes", nixl_notes),
    ("connector_params", params),
];

/// Decodes, encodes and decodes again. Both values must be equal, and both encodings too.
pub(crate) fn stable<T: Debug + PartialEq>(
    bytes: &[u8],
    decode: impl Fn(&[u8]) -> Result<T>,
    encode: impl Fn(&T) -> Vec<u8>,
) {
    let Ok(first) = decode(bytes) else { return };
    let written = encode(&first);
    match decode(&written) {
        Ok(second) => {
            assert_eq!(first, second);
            assert_eq!(written, encode(&second));
        }
        Err(error) => panic!("{first:?} was decoded once, but not again: {error}"),
    }
}

/// Reads a request on the side channel, and passes it to a listener in different envelopes.
pub fn handshake_request(bytes: &[u8]) {
    stable(bytes, HandshakeRequest::decode, HandshakeRequest::encode);
    stable(bytes, KvxRequest::decode, KvxRequest::encode);
    stable(bytes, KvxChallenge::decode, KvxChallenge::encode);
    let mut listener = Listener::new(CompatibilityHash::foreign("h"));
    listener.publish(WorkerRank { pp: 0, tp: 0 }, &NixlAgentMetadata::new("e", Version::V0_33));
    let pieces: Vec<&[u8]> = bytes.split(|byte| *byte == 0xfe).collect();
    for frames in [vec![b"id", &b""[..], bytes], vec![b"id", bytes], pieces] {
        let Ok(answer) = listener.answer(&frames, Time::default()) else { continue };
        let sent: Vec<&[u8]> = answer.frames().collect();
        assert_eq!(sent[0], frames[0], "the answer goes to the sender");
        let payload = sent.iter().find_map(|frame| HandshakePayload::decode(frame).ok());
        let payload = payload.expect("every answer has a payload");
        assert_eq!(payload.refusal.is_some(), answer.refusal().is_some());
    }
}

/// Reads a payload from the side channel, and checks it with an expectation that does not compare
/// hashes.
pub fn handshake_payload(bytes: &[u8]) {
    stable(bytes, HandshakePayload::decode, HandshakePayload::encode);
    let hash = CompatibilityHash::foreign("h");
    let expectation = Expectation {
        enforce_handshake_compat: false,
        ..Expectation::new(Version::V0_33, "e1", hash)
    };
    let rank = WorkerRank { pp: 0, tp: 0 };
    let mut handshake = Handshake::new(expectation, [rank], (1, 1)).expect("the worker exists");
    let asked = handshake.request(Time::default());
    assert!(asked.is_some());
    let frames: Vec<&[u8]> = vec![bytes, b"\xcb\x3f\xf8\0\0\0\0\0\0"];
    let taken = handshake.received(&frames, Time::default()).is_ok();
    assert_eq!(handshake.finish().is_ok(), taken);
}

/// Reads agent metadata in every version.
pub fn agent_metadata(bytes: &[u8]) {
    for version in Version::SPOKEN {
        stable(bytes, |bytes| NixlAgentMetadata::decode(bytes, version), NixlAgentMetadata::encode);
        if let Ok(metadata) = NixlAgentMetadata::decode(bytes, version)
            && metadata.check_regions().is_ok()
        {
            for region in 0..metadata.regions() {
                let last =
                    metadata.blocks_of(region).expect("every region has blocks").saturating_sub(1);
                let start =
                    metadata.kv_caches_base_addr[region] + last * metadata.block_strides[region];
                assert!(start.checked_add(metadata.block_lens[region]).is_some());
            }
        }
    }
}

/// Reads a notification.
pub fn notification(bytes: &[u8]) {
    stable(bytes, EngineNotification::decode, EngineNotification::encode);
}

/// Reads the MooncakeConnector's two messages, and the older request, which converts to the current
/// one.
pub fn mooncake(bytes: &[u8]) {
    stable(bytes, PullRequest::decode, PullRequest::encode);
    stable(bytes, PullResponse::decode, PullResponse::encode);
    stable(bytes, OlderPullRequest::decode, OlderPullRequest::encode);
    let mut own = PullRequest::new("here", 1, 2, 1);
    own.kv_caches_base_addr = vec![4096, 8192];
    if let Ok(older) = OlderPullRequest::decode(bytes)
        && let Ok(question) = older.clone().as_pull_request(&own)
    {
        let again = OlderPullRequest::plain(&question).expect("each of its requests has one list");
        let again = again.as_pull_request(&own).expect("it was accepted before");
        assert_eq!(again, question, "{older:?}");
    }
}

/// Reads the bodies of a bootstrap server.
pub fn bootstrap(bytes: &[u8]) {
    stable(bytes, WorkerRegistration::decode, WorkerRegistration::encode);
    stable(bytes, Directory::decode, Directory::encode);
    if let Ok(directory) = Directory::decode(bytes) {
        for engine in directory.engines.values() {
            if let Ok((tp, pp)) = engine.sizes() {
                assert_eq!(engine.workers.len() as u64, u64::from(tp) * u64::from(pp));
            }
        }
    }
}

/// Reads a NIXL agent's metadata.
pub fn nixl_blob(bytes: &[u8]) {
    stable(bytes, NixlBlob::decode, |blob| blob.encode().expect("a decoded blob can be encoded"));
    if let Ok(blob) = NixlBlob::decode(bytes) {
        assert_eq!(blob.encode().ok().as_deref(), Some(bytes), "only one form is accepted");
    }
}

/// Reads the pieces between `0xfe` bytes as notifications of an agent with the backend KVX. None is
/// longer than the input, and everything that is sent arrives.
pub fn nixl_notes(bytes: &[u8]) {
    let mut assembly = Assembly::default();
    for (at, note) in bytes.split(|byte| *byte == 0xfe).enumerate() {
        let from = Incarnation([(at % 3) as u8; 16]);
        if let Got::Whole(whole) = assembly.take(from, note) {
            assert!(whole.len() <= bytes.len());
        }
    }
    let long = bytes.repeat(1 + MAX_NOTIFICATION / (1 + bytes.len()));
    for sent in [bytes, &long].into_iter().filter(|sent| sent.len() <= MAX_NOTE) {
        let notes = notes(1, sent).expect("it is short enough");
        let from = Incarnation([9; 16]);
        let got: Vec<_> = notes.iter().rev().map(|note| assembly.take(from, note)).collect();
        assert_eq!(got.last(), Some(&Got::Whole(sent.into())));
    }
}

/// Reads `kv_transfer_params` as JSON, and the same bytes as a streamed answer in two pieces.
pub fn params(bytes: &[u8]) {
    let mut stream = AnswerStream::with_max_line(4096);
    let (first, second) = bytes.split_at(bytes.len() / 2);
    let _ = stream.push(first).and_then(|()| stream.push(second));
    let Ok(value) = serde_json::from_slice::<serde_json::Value>(bytes) else { return };
    let _ = Answer::from_body(&value);
    if let Ok(params) = MooncakeParams::from_value(&value) {
        let written = params.to_value().expect("decoded parameters can be encoded");
        assert_eq!(MooncakeParams::from_value(&written).as_ref(), Ok(&params));
    }
    let Ok(params) = TransferParams::from_value(&value) else { return };
    for version in Version::SPOKEN {
        if let Ok(written) = params.to_value(version) {
            assert_eq!(TransferParams::from_value(&written).as_ref(), Ok(&params));
        }
    }
}
