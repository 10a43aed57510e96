//! What an idle agent costs.
#![cfg(feature = "tcp")]
#![allow(clippy::unwrap_used)]

mod tcp_pair;

use std::time::Duration;

use kvx_core::Kind;
use tcp_pair::Pair;

/// CPU time of this process's threads of that name, in clock ticks (10 ms), and how many there are.
fn ticks(name: &str) -> (u64, usize) {
    let mut found = (0, 0);
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let Ok(stat) = std::fs::read_to_string(task.unwrap().path().join("stat")) else { continue };
        let (head, tail) = stat.rsplit_once(')').unwrap();
        if head.split_once('(').unwrap().1.starts_with(name) {
            let fields: Vec<&str> = tail.split_whitespace().collect();
            found.0 += fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
            found.1 += 1;
        }
    }
    found
}

#[test]
fn connected_agents_without_work_sleep() {
    let pair = Pair::new(1 << 20);
    pair.still_works();
    let (before, threads) = ticks("kvx-tcp");
    assert_eq!(threads, 2);
    let quiet = pair.owner.expect(b"never sent", 1, Duration::from_secs(3));
    assert_eq!(quiet.wait(Duration::from_secs(10)).unwrap_err().kind(), Kind::TimedOut);
    let (after, _) = ticks("kvx-tcp");
    assert!(after - before <= 1, "{} ticks in 3 s", after - before);
    pair.still_works();
}
