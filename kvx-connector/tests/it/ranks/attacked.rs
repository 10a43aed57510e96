//! The port at which ranks of other hosts join, under attack.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use kvx_connector::{JoinedRank, Rank};
use kvx_testkit::{
    ATTACKER_CONNECTS, AttackBytes, Bounds, Check, Child, Client, Failure, Listener, connect_from,
    free_port, is_own_process, run_in_own_process,
};
use kvx_vllm::engine::WorkerRank;
use libtest_mimic::Trial;

use super::distant::{VARIABLE as SECRET, a_secret};
use super::fleet::{OVER_TCP, heard};
use super::rank::VARIABLE;
use crate::runtime::rig::{LIMIT, registry};

/// The ranks of the engine, all but one of which join during the attack.
const RANKS: u32 = 8;
/// The least time between two ranks that join.
const PAUSE: Duration = Duration::from_millis(500);
/// The connections of one address without a proof, and how long each may take to give it.
const CONNECTIONS: usize = 48;
const TIME: Duration = Duration::from_secs(3);
/// The second address of the loopback interface. The first one is that of the ranks.
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

pub(crate) fn trial() -> Trial {
    let name = "ranks::peers_of_the_port_for_ranks_without_the_secret_cost_little";
    kvx_testkit::trial(name, move || -> Check {
        if is_own_process() {
            return attack();
        }
        let secret = a_secret("attacked");
        let attacked = run_in_own_process(name, |command| _ = command.env(SECRET, &secret));
        std::fs::remove_file(secret)?;
        attacked
    })
}

fn join(at: SocketAddr, tp: u32) -> Result<JoinedRank, Failure> {
    let rank = WorkerRank { pp: 0, tp };
    Ok(Rank::join_over_tcp(&at.to_string(), rank, registry(), LIMIT)?)
}

fn attack() -> Check {
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port(0)?));
    let engine = Child::start_self(VARIABLE, &format!("{RANKS} {OVER_TCP}{at}"))?;
    assert_eq!(heard(&engine), "listens");
    let first = join(at, 0)?;
    let (mut joined, mut last) = (Vec::new(), Instant::now());
    // As long as a message of Noise, and a part of one.
    let bytes =
        AttackBytes { message: vec![7; 48], longest: vec![7; 16], ..AttackBytes::default() };
    let cost = Listener {
        name: "ranks over TCP",
        process: engine.pid(),
        bounds: Bounds { spare: u64::from(RANKS), ..Bounds::new(CONNECTIONS, TIME) },
        clients: vec![
            Client::new("a rank that has joined", move || {
                match first.ended_blocking(Duration::from_millis(20)) {
                    None => Ok(()),
                    Some(ended) => Err(Failure::new(format!("{ended:?}"))),
                }
            }),
            Client::new("a rank that joins", || {
                let next = joined.len() as u32 + 1;
                if next < RANKS && last.elapsed() >= PAUSE {
                    joined.push(join(at, next)?);
                    last = Instant::now();
                }
                Ok(())
            }),
        ],
    }
    .attack(|| Ok(connect_from(ELSEWHERE, at, ATTACKER_CONNECTS)?.into()), &bytes)?;
    eprintln!("{cost}");
    assert!(joined.len() > 2, "{} ranks have joined", joined.len());
    Ok(())
}
