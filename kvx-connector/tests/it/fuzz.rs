//! A bounded, seeded mutation fuzz over what a socket receives. `cargo xtask fuzz` runs the same functions without
//! bounds, and what that found is tried again.

use kvx_connector::fuzz;
use kvx_testkit::test;

const CASES: u64 = 20_000;

/// Commands and lengths at their limits.
const PIECES: &[&[u8]] = &[
    b"\x04\x19\x05READY",
    b"\x02\0\0\0\0\0\0\x40\0",
    b"\x02\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x01\0",
    b"\x0bSocket-Type\0\0\0\x03REQ",
    b"\xfe",
    b"\xc1",
];

#[test]
fn frames_of_zeromq() {
    let request = b"\x01\x00\x00\x10\x93\xc4\x0cget_meta_msg\x00\x01".to_vec();
    let ready = b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x03REQ\x08Identity\0\0\0\0".to_vec();
    let long = [&b"\x02\0\0\0\0\0\0\x02\0"[..], &[0x55; 512]].concat();
    let greeting = [&b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL"[..], &[0; 48]].concat();
    let others = [b"\x04\x0a\x04PING\0\x05ctx".to_vec(), b"\x04\x09\x05ERROR\x02no".to_vec()];
    let all = [ready.clone(), request.clone()].concat();
    let seeds = [&[request, ready, long, greeting, all][..], &others].concat();
    kvx_testkit::fuzz("zmtp", &seeds, PIECES, CASES, fuzz::zmtp);
}

#[test]
fn what_fuzzing_found_is_held() {
    kvx_testkit::replay(fuzz::TARGETS);
}
