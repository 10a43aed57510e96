//! A bounded, seeded mutation fuzz over every decoder: any bytes give an error or a value that is written and read
//! back the same, never a panic. `kvx-connector/fuzz` runs the same functions without bounds.
#![cfg(feature = "protocol")]

mod golden;

use kvx_connector::wire::fuzz;

const CASES: u64 = 20_000;

struct Xorshift(u64);

impl Xorshift {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

/// Markers of msgpack at their limits, and text that JSON and events are made of.
const PIECES: &[&[u8]] = &[
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff",
    b"\xc0",
    b"\x80",
    b"\x90",
    b"\x91",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xd3\x80\0\0\0\0\0\0\0",
    b"\xcb\x7f\xf8\0\0\0\0\0\0",
    b"\xa1\xff",
    b"\xc1",
    b"HB:",
    b"PUSH_REG:",
    b":",
    b",",
    b":1",
    b"data: ",
    b"\n",
    b"[DONE]",
    b"null",
    b"[[",
    b"]",
    b"{",
    b"\"",
    b"-1",
    b"1e999",
    b"\xfe",
];

fn mutated(random: &mut Xorshift, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = seeds[random.below(seeds.len())].clone();
    for _ in 0..=random.below(6) {
        let at = random.below(bytes.len() + 1);
        match random.below(6) {
            0 if at < bytes.len() => bytes[at] = random.next() as u8,
            1 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            2 => drop(bytes.splice(at..at, PIECES[random.below(PIECES.len())].iter().copied())),
            3 => bytes.truncate(at),
            4 => {
                let end = (at + random.below(9)).min(bytes.len());
                drop(bytes.drain(at..end));
            }
            _ => {
                let other = &seeds[random.below(seeds.len())];
                let from = random.below(other.len() + 1);
                let piece = other[from..(from + random.below(40)).min(other.len())].to_vec();
                drop(bytes.splice(at..at, piece));
            }
        }
    }
    bytes
}

fn run(name: &str, seeds: &[Vec<u8>], check: fn(&[u8])) {
    assert!(!seeds.is_empty());
    for seed in seeds {
        check(seed);
    }
    for case in 1..=CASES {
        let mut random = Xorshift(case.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let bytes = mutated(&mut random, seeds);
        if let Err(panic) = std::panic::catch_unwind(|| check(&bytes)) {
            eprintln!("{name}, case {case}: {:?}", bytes.escape_ascii().to_string());
            std::panic::resume_unwind(panic);
        }
    }
}

/// The cases of `msgpack_cases.json` whose bytes start like this.
fn cases(starts: &[&[u8]]) -> Vec<Vec<u8>> {
    let file = golden::json("msgpack_cases.json");
    let all = file["cases"]
        .as_array()
        .expect("cases")
        .iter()
        .map(|case| golden::hex(case["hex"].as_str().expect("hex")));
    all.filter(|bytes| starts.iter().any(|start| bytes.starts_with(start))).collect()
}

#[test]
fn handshake_requests() {
    run("request", &cases(&[b"\x92", b"\x93"]), fuzz::handshake_request);
}

#[test]
fn handshake_payloads() {
    run(
        "payload",
        &[cases(&[b"\x82\xb2"]), vec![golden::bytes("handshake/prefill.reply0.bin")]].concat(),
        fuzz::handshake_payload,
    );
}

#[test]
fn agent_metadata() {
    run("metadata", &cases(&[b"\xde", b"\x8c"]), fuzz::agent_metadata);
}

#[test]
fn notifications() {
    let mut seeds = cases(&[b"PUSH_REG:"]);
    seeds.extend([&b"cmpl-u-0-bbb18847:1"[..], b"HB:one,two,three", b"a:b:2"].map(<[u8]>::to_vec));
    run("notification", &seeds, fuzz::notification);
}

#[test]
fn mooncake_messages() {
    run("mooncake", &cases(&[b"\x88\xaf", b"\x82\xa6", b"\x85\xa6"]), fuzz::mooncake);
}

#[test]
fn params_and_streams() {
    let capture = golden::json("http/first.json");
    let params = &capture["prefill"]["response"]["kv_transfer_params"];
    let mut seeds: Vec<Vec<u8>> = [params, &capture["prefill"]["request"]["kv_transfer_params"]]
        .map(|value| value.to_string().into_bytes())
        .to_vec();
    let mooncake = serde_json::json!({
        "do_remote_decode": false, "do_remote_prefill": true, "remote_bootstrap_addr": "http://h:8998",
        "remote_engine_id": "e", "transfer_id": "x",
    });
    let chunk = serde_json::json!({"choices": [{"finish_reason": "length"}], "kv_transfer_params": params});
    seeds.push(mooncake.to_string().into_bytes());
    seeds.push(format!("data: {chunk}\n\ndata: [DONE]\n\n").into_bytes());
    run("params", &seeds, fuzz::params);
}
