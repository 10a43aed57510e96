//! The CPU time of idle agents.

use std::time::Duration;

use crate::tcp_pair::Pair;
use kvx_core::ErrorKind;
use kvx_testkit::test;

/// Returns the CPU time of this process's threads with that name, and their number.
fn spent(name: &str) -> (Duration, usize) {
    let mut found = (Duration::ZERO, 0);
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        let Ok(own) = std::fs::read_to_string(task.join("comm")) else { continue };
        if own.starts_with(name) {
            let times = std::fs::read_to_string(task.join("schedstat")).unwrap();
            found.0 += Duration::from_nanos(times.split(' ').next().unwrap().parse().unwrap());
            found.1 += 1;
        }
    }
    found
}

#[test(own_process)]
fn connected_agents_without_work_sleep() {
    let pair = Pair::new(1 << 20);
    pair.still_works();
    let (before, threads) = spent("kvx-tcp");
    assert_eq!(threads, 4, "each agent has a thread for turns and one that watches them");
    let quiet = pair.owner.wait_for_senders(b"never sent", 1, Duration::from_secs(3));
    assert_eq!(
        quiet.wait_blocking(Duration::from_secs(10)).unwrap_err().kind(),
        ErrorKind::TimedOut
    );
    let (after, _) = spent("kvx-tcp");
    assert!(after - before <= Duration::from_millis(10), "{:?} in 3 s", after - before);
    pair.still_works();
}
