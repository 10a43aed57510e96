//! Notifications: forms that are never sent, and malformed ones that are read safely.

use kvx_core::ErrorKind;
use kvx_testkit::test;
use kvx_vllm::wire::{EngineNotification, PushGrant, PushRegistration};

/// A notification without a colon, without a number after the last colon, or not in UTF-8 stops
/// vLLM's engine.
#[test]
fn malformed_notifications_are_errors() {
    let long = vec![b'x'; EngineNotification::MAX_LEN + 1];
    let bad: [&[u8]; 14] = [
        b"",
        b"r",
        b"r:",
        b":1",
        b"r:0",
        b"r:-1",
        b"r:+1",
        b"r:01",
        b"r:1x",
        b"r:4294967296",
        b"\xff:1",
        b"HB:",
        b"HB:a,,b",
        &long,
    ];
    for bytes in bad {
        let error = EngineNotification::decode(bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{:?}", bytes.escape_ascii().to_string());
        assert!(error.to_string().len() < 400, "{error}");
    }
}

#[test]
fn a_release_has_any_proof_and_any_request_id() {
    for id in ["cmpl-u-0-bbb18847", "with:colons:", ":"] {
        for proof in ["12:ab", ""] {
            let release = EngineNotification::release(id, proof).unwrap();
            assert_eq!(EngineNotification::decode(&release.encode()).unwrap(), release);
        }
    }
    assert!(EngineNotification::release("", "12:ab").is_err());
    let bad: [&[u8]; 4] =
        [b"KVX_RELEASE:", b"KVX_RELEASE:12:ab", b"KVX_RELEASE:12:ab:", b"KVX_RELEASE:::"];
    for bytes in bad {
        let error = EngineNotification::decode(bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{}", bytes.escape_ascii());
    }
    // A completion of such a request would be read as a release.
    assert!(EngineNotification::done("KVX_RELEASE:12:ab:r", 1).is_err());
}

// vLLM 47: malformed push registrations are errors, not crashes
#[test]
fn malformed_registrations_are_errors_that_name_the_key() {
    for (map, named) in [
        (&b""[..], "bytes expected"),
        (b"\x80", "request_id"),
        (b"\x81\xaarequest_id\x07", "request_id"),
        (b"\x82\xaarequest_id\xa1r\xaflocal_block_ids\x91\x07", "local_block_ids"),
        (b"\x82\xaarequest_id\xa1r\xabdecode_port\xce\x00\x01\x00\x00", "decode_port"),
        (b"\x82\xaarequest_id\xa1r\xaedecode_tp_size\x00", "decode_tp_size"),
        (b"\x82\xaarequest_id\xa1r\xaarequest_id\xa1r", "duplicate key"),
        (b"\x81\xaarequest_id\xa1r\x00", "unexpected bytes"),
        (b"\x90", "a map"),
    ] {
        let error = EngineNotification::decode(&[b"PUSH_REG:", map].concat()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed);
        assert!(error.to_string().contains(named), "{named}: {error}");
    }
}

#[test]
fn a_registration_keeps_what_it_does_not_know() {
    let bytes = b"PUSH_REG:\x83\xa5later\x92\x01\xc0\xaarequest_id\xa1r\xaflocal_block_ids\x90";
    let read = EngineNotification::decode(bytes).unwrap();
    let EngineNotification::Registration(registration) = &read else { panic!("{read:?}") };
    assert_eq!(registration.unknown().collect::<Vec<_>>(), [("later", &b"\x92\x01\xc0"[..])]);
    assert_eq!(registration.request_id, "r");
    assert_eq!(read.encode(), bytes);
}

#[test]
fn a_registration_without_addresses_omits_them() {
    let registration = PushRegistration::new("r", vec![vec![7], vec![]]);
    let bytes = EngineNotification::Registration(Box::new(registration.clone())).encode();
    assert_eq!(
        EngineNotification::decode(&bytes).unwrap(),
        EngineNotification::Registration(Box::new(registration))
    );
    assert!(!bytes.windows(6).any(|window| window == b"decode"), "unknown fields are omitted");
}

#[test]
fn notifications_that_would_be_misread_are_not_created() {
    for id in ["", "HB:a", "PUSH_REG:a"] {
        assert_eq!(EngineNotification::done(id, 1).unwrap_err().kind(), ErrorKind::Invalid, "{id}");
    }
    assert_eq!(EngineNotification::done("r", 0).unwrap_err().kind(), ErrorKind::Invalid);
    for ids in [&[][..], &[""], &["a,b"], &["a", ""]] {
        assert_eq!(
            EngineNotification::heartbeat(ids.iter().copied()).unwrap_err().kind(),
            ErrorKind::Invalid,
            "{ids:?}"
        );
    }
    assert_eq!(EngineNotification::done("a:b,c", 3).unwrap().encode(), b"a:b,c:3");
}

// vLLM 37: many requests share heartbeat messages
#[test]
fn many_requests_share_heartbeats_that_every_transport_carries() {
    let ids: Vec<String> = (0..5000).map(|index| format!("cmpl-{index:036}-0-0123abcd")).collect();
    let beats = EngineNotification::heartbeats(ids.clone()).unwrap();
    let mut seen = Vec::new();
    for beat in &beats {
        let bytes = beat.encode();
        assert!(bytes.len() <= EngineNotification::MAX_HEARTBEAT);
        let EngineNotification::Heartbeat { request_ids, .. } =
            EngineNotification::decode(&bytes).unwrap()
        else {
            panic!("{beat:?}")
        };
        seen.extend(request_ids);
    }
    assert_eq!(seen, ids);
    let total: usize = ids.iter().map(|id| id.len() + 1).sum();
    assert_eq!(
        beats.len(),
        total.div_ceil(EngineNotification::MAX_HEARTBEAT - 60),
        "only the last may be less than half full"
    );
    assert_eq!(EngineNotification::heartbeats(Vec::<String>::new()).unwrap(), []);
    let edge = "x".repeat(EngineNotification::MAX_HEARTBEAT - 3);
    assert_eq!(EngineNotification::heartbeats([edge.clone(), "y".to_owned()]).unwrap().len(), 2);
    assert_eq!(
        EngineNotification::heartbeats([edge + "x"]).unwrap_err().kind(),
        ErrorKind::Invalid
    );
}

#[test]
fn grants_are_read_as_they_were_written_and_bounded() {
    let mut registration = PushRegistration::new("r", vec![vec![7]]);
    let grant = |tp| PushGrant { pp: 1, tp, regions: vec![vec![0, 255, tp as u8], Vec::new()] };
    registration.kvx_grants = vec![grant(0), grant(300)];
    let sent = EngineNotification::Registration(Box::new(registration));
    assert_eq!(EngineNotification::decode(&sent.encode()).unwrap(), sent);
    let mut many = PushRegistration::new("r", vec![vec![7]]);
    many.kvx_grants = vec![grant(0); PushGrant::MAX + 1];
    let error =
        EngineNotification::decode(&EngineNotification::Registration(Box::new(many)).encode())
            .unwrap_err();
    assert!(error.to_string().contains("kvx_grants"), "{error}");
    let bytes = sent.encode();
    let at = bytes.windows(10).position(|part| part == b"kvx_grants").unwrap() + 11;
    assert_eq!(bytes[at], 0x93, "an array of three");
    let two = [&bytes[..at], &[0x92], &bytes[at + 1..]].concat();
    assert!(EngineNotification::decode(&two).is_err());
}
