//! The port of libfabric's provider `tcp;ofi_rxm` under attack, by peers that have no metadata.
//!
//! libfabric accepts connections and parses their bytes before kvx sees them. It neither limits
//! their number nor their time, so that only their cost and the service of authenticated peers are
//! bounds here.

use std::net::Ipv4Addr;

use kvx_core::{Agent, Options, Secret};
use kvx_testkit::{
    ATTACKER_CONNECTS, AttackBytes, Bounds, Check, Child, Failure, Listener, connect_from,
    is_own_process, listening_addresses, own_if_asked, readers, run_in_own_process, skip, test,
    unhex,
};

use crate::buffers::{LIMIT, SIZE};
use crate::processes::{PATIENCE, options};
use crate::registry;

/// Set in a process that owns a region.
const ROLE: &str = "KVX_LIBFABRIC_LISTENER_TEST";
const PROVIDER: &str = "tcp;ofi_rxm";
/// The connections of the crowd.
const CONNECTIONS: usize = 256;

fn agent(name: &str) -> Agent {
    let builder = Agent::builder(name).backends(["LIBFABRIC"]);
    let builder = builder.options(Options::parse(&options(PROVIDER)).unwrap());
    let secret = Secret::from_bytes([3; 32]);
    builder.secret(secret).registry(registry("")).build().unwrap()
}

/// Owns a region until the parent ends, if this process was started for that.
pub(crate) fn play_if_asked() {
    own_if_asked(ROLE, || agent("owner"));
}

/// Returns a request to connect that announces this much data. Its version is that of 1.17.
fn request(data: u16) -> Vec<u8> {
    [&[3, 0][..], &data.to_be_bytes(), &[0; 28]].concat()
}

#[test]
fn unauthenticated_peers_of_libfabric_over_sockets_cost_little() -> Check {
    const NAME: &str = "listeners::unauthenticated_peers_of_libfabric_over_sockets_cost_little";
    if is_own_process() {
        return attack();
    }
    match registry("").require("LIBFABRIC", &Options::parse(&options(PROVIDER))?) {
        Ok(_) => run_in_own_process(NAME, |command| _ = command.envs([SIZE, LIMIT])),
        Err(why) => {
            skip(NAME, &why.to_string(), "cargo xtask test --install on Debian 12");
            Ok(())
        }
    }
}

fn attack() -> Check {
    let owner = Child::start_self(ROLE, "1")?;
    let metadata = unhex(&owner.hear(PATIENCE)?);
    // libfabric's sockets are inherited, also those of concurrent tests.
    let inherited = listening_addresses(std::process::id())?;
    let mut addresses = listening_addresses(owner.pid())?;
    addresses.retain(|address| !inherited.contains(address));
    let [address] = addresses[..] else {
        return Err(Failure::new(format!("libfabric listens at {addresses:?}")));
    };
    let connection = || Ok(connect_from(Ipv4Addr::LOCALHOST, address, ATTACKER_CONNECTS)?.into());
    // A part of a request, as the length of its data.
    let part = |data| request(data)[..8].to_vec();
    let bytes = AttackBytes {
        message: [request(16), vec![0; 16]].concat(),
        claims: vec![part(256), part(u16::MAX), request(256), request(u16::MAX)],
        longest: request(256),
        ..AttackBytes::default()
    };
    let cost = Listener {
        name: PROVIDER,
        process: owner.pid(),
        bounds: Bounds::unlimited(CONNECTIONS, PATIENCE),
        clients: readers(|| agent("reader"), &metadata)?,
    }
    .attack(connection, &bytes)?;
    eprintln!("{cost}");
    Ok(())
}
