//! The listeners of the program under attack, by peers without the key or the secret that their
//! clients have.

mod data_parallel;
mod mooncake;
mod proxy;
mod serve;
mod side_channel;

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use kvx_testkit::{ATTACKER_CONNECTS, AttackBytes, Failure, Listener, connect_from};

/// The second address of the loopback interface, for attackers whose address has a limit.
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
/// The key of the clients.
const KEY: &str = "hush";
const WITH_KEY: &str = "authorization: Bearer hush\r\n";
/// The time limit of greetings and handshakes.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Opens connections of attackers at this address to a port of this host.
fn from(address: Ipv4Addr, port: u16) -> impl Fn() -> io::Result<OwnedFd> + Sync {
    move || Ok(connect_from(address, (Ipv4Addr::LOCALHOST, port), ATTACKER_CONNECTS)?.into())
}

fn attack(
    listener: Listener<'_>,
    connect: impl Fn() -> io::Result<OwnedFd> + Sync,
    bytes: &AttackBytes,
) -> Result<(), Failure> {
    listener.attack(connect, bytes).map(|cost| eprintln!("{cost}"))
}

/// Fails unless this is an answer with status 200.
fn succeeds(answer: &str) -> Result<(), Failure> {
    let is_ok = answer.to_ascii_lowercase().starts_with("http/1.1 200 ");
    if is_ok { Ok(()) } else { Err(Failure::new(answer)) }
}

/// Requests without a key.
fn requests() -> AttackBytes {
    let begin = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
    let of_length = |length: u64| format!("{begin}content-length: {length}\r\n\r\n").into_bytes();
    let chunk = format!("{begin}transfer-encoding: chunked\r\n\r\nfffffff\r\n").into_bytes();
    AttackBytes {
        message: b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(),
        claims: vec![of_length(1 << 30), of_length(u64::MAX), chunk],
        longest: of_length(8 << 20),
        ..AttackBytes::default()
    }
}

/// Encodes a single frame of ZeroMQ.
fn frame(content: &[u8]) -> Vec<u8> {
    [&[0, content.len() as u8][..], content].concat()
}

/// Returns the beginning of a frame of ZeroMQ with this length.
fn frame_of(length: u64) -> Vec<u8> {
    [&[2][..], &length.to_be_bytes()].concat()
}
