//! A process of another user attacks everything on which an owner listens, while other readers
//! connect.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::tcp_pair;
use crate::tcp_pair::CUT_OFF;
use kvx_core::backend::Invitation;
use kvx_core::{Agent, Memory, Registry, Secret};
use kvx_testkit::{Child, hex, newcomer, skip, test};

const SECONDS: u64 = 4;

fn agent(name: &str, backend: &str, secret: Option<u8>) -> Agent {
    let mut registry = Registry::new();
    registry.add(kvx_native::Shm).and_then(|registry| registry.add(kvx_native::Tcp)).unwrap();
    let builder = Agent::builder(name).backends([backend]);
    let builder = secret
        .into_iter()
        .fold(builder, |builder, secret| builder.secret(Secret::from_bytes([secret; 32])));
    builder.registry(registry.clone()).build().unwrap()
}

fn pool(agent: &Agent) -> kvx_core::Region {
    agent.register("kv", Memory::pool(1 << 16).build().unwrap()).unwrap()
}

#[test(own_process)]
fn another_user_delays_no_reader_and_learns_nothing() {
    const TITLE: &str = "another_user_delays_no_reader_and_learns_nothing";
    if !rustix::process::geteuid().is_root() {
        return skip(
            TITLE,
            "a process of another user is started by root only",
            "run the tests as root",
        );
    }
    for secret in [None, Some(3)] {
        // SHM also listens under the name, which must be free.
        let name = format!("an unknown owner {}", std::process::id());
        let owners = ["SHM", "TCP"].map(|backend| (backend, agent(&name, backend, secret)));
        let _regions = owners.each_ref().map(|(_, owner)| pool(owner));
        let mut python = Command::new("python3");
        python.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/alone/attackers.py"));
        python.args([SECONDS, u64::from(std::process::id())].map(|number| number.to_string()));
        python.arg(hex(&tcp_pair::raw::hello(&Invitation::from_bytes([9; 32]))));
        let attacker = match Child::start(python) {
            Ok(attacker) => attacker,
            Err(why) => return skip(TITLE, &format!("python3: {why}"), "install python3"),
        };
        assert_eq!(attacker.hear(CUT_OFF).unwrap(), "begun");
        let mut waits = [const { Vec::new() }; 2];
        let until = Instant::now() + Duration::from_secs(SECONDS - 1);
        while Instant::now() < until {
            for ((backend, owner), waits) in owners.iter().zip(&mut waits) {
                let reader = agent("reader", backend, secret);
                waits.push(newcomer(&reader, &owner.metadata().unwrap()).unwrap());
            }
        }
        for ((backend, _), mut waits) in owners.iter().zip(waits) {
            // Concurrent tests may delay some of them.
            waits.sort_unstable();
            let median = waits[waits.len() / 2];
            assert!(median < Duration::from_secs(1), "readers over {backend} waited {waits:?}");
        }
        for family in ["AF_INET", "AF_UNIX", "AF_UNIX"] {
            let said = attacker.hear(CUT_OFF + Duration::from_secs(SECONDS)).unwrap();
            let [its, connections, heard] = said.splitn(3, ' ').collect::<Vec<_>>()[..] else {
                panic!("{said}")
            };
            assert_eq!(its, family, "{said}");
            assert!(connections.parse::<u32>().unwrap() > 100, "{said}");
            assert!(
                family == "AF_UNIX" || !heard.is_empty(),
                "an unauthenticated hello is answered over TCP: {said}"
            );
            for (_, owner) in &owners {
                for word in [name.as_bytes(), &owner.identity().incarnation.0].map(hex) {
                    assert!(!heard.contains(&word), "{said}");
                }
            }
        }
        for (_, owner) in owners {
            owner.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
        }
    }
}
