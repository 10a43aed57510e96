//! The ports of UCX under attack, by peers that have no metadata: a known gap on each version.
//!
//! UCX accepts connections and parses their bytes before kvx sees them. It limits neither their
//! number nor their time, takes 256 KiB or more for each, and trusts the lengths of messages: 1.13
//! checks them with assertions, which end the process, and 1.22 and 1.23 corrupt memory.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvx_core::{Agent, Options, Secret};
use kvx_testkit::{
    ATTACKER_CONNECTS, AttackBytes, Bounds, Child, Failure, Listener, connect_from, gap_held,
    listening_addresses, own_if_asked, readers, test, unhex,
};

use crate::{registry, versions};

/// Set in a process that owns a region.
const ROLE: &str = "KVX_UCX_LISTENER_TEST";
const PATIENCE: Duration = Duration::from_secs(10);
/// The connections of the crowd.
const CONNECTIONS: usize = 256;
/// The first 8 bytes of each connection.
const MAGIC: u64 = 0xcafe_babe_1234_5678;
/// The kind of UCX's messages about connections.
const CONNECTION: u8 = 32;

fn agent(name: &str) -> Agent {
    let options = Options::parse(r#"{"ucx": {"net_devices": ["lo"]}}"#).unwrap();
    let builder = Agent::builder(name).backends(["UCX"]).options(options);
    let secret = Secret::from_bytes([3; 32]);
    builder.secret(secret).registry(registry("")).build().unwrap()
}

/// Owns a region until the parent ends, if this process was started for that.
pub(crate) fn play_if_asked() {
    own_if_asked(ROLE, || agent("owner"));
}

/// Encodes the beginning of a message of this kind and length.
fn header(kind: u8, length: u32) -> Vec<u8> {
    [&[kind][..], &length.to_le_bytes()].concat()
}

/// Returns a request to connect, from this port of the loopback interface.
fn request(port: u16) -> Vec<u8> {
    let address = [&[2, 0][..], &port.to_be_bytes(), &[127, 0, 0, 1], &[0; 8]].concat();
    let content = [&1_u32.to_le_bytes()[..], &[0], &address, &[7; 8]].concat();
    [header(CONNECTION, content.len() as u32), content].concat()
}

#[test]
fn unauthenticated_peers_of_ucx_are_a_known_gap() {
    const NAME: &str = "listeners::unauthenticated_peers_of_ucx_are_a_known_gap";
    versions::on_each(NAME, |version| match attack(version.label) {
        Ok(()) => panic!("{} withstands the attack: it is no gap any more", version.label),
        Err(why) => {
            eprintln!("{why}");
            // A process that then ends badly would hide the gap.
            if !version.ends_badly {
                gap_held(NAME, "UCX neither limits connections nor checks lengths");
            }
        }
    });
}

fn attack(name: &'static str) -> Result<(), Failure> {
    let owner = Child::start_self(ROLE, "1")?;
    let metadata = unhex(&owner.hear(PATIENCE)?);
    let addresses = listening_addresses(owner.pid())?;
    assert!(!addresses.is_empty(), "UCX listens nowhere");
    let next = AtomicUsize::new(0);
    let connection = || {
        let address = addresses[next.fetch_add(1, Ordering::Relaxed) % addresses.len()];
        Ok(connect_from(Ipv4Addr::LOCALHOST, address, ATTACKER_CONNECTS)?.into())
    };
    let bytes = AttackBytes {
        prelude: MAGIC.to_le_bytes().to_vec(),
        message: request(9),
        claims: [(CONNECTION, 1 << 20), (CONNECTION, u32::MAX), (0, 256 << 10), (0, u32::MAX)]
            .map(|(kind, length)| header(kind, length))
            .to_vec(),
        longest: header(CONNECTION, 1 << 20),
    };
    let cost = Listener {
        name,
        process: owner.pid(),
        bounds: Bounds::unlimited(CONNECTIONS, PATIENCE),
        clients: readers(|| agent("reader"), &metadata)?,
    }
    .attack(connection, &bytes)?;
    eprintln!("{cost}");
    Ok(())
}
