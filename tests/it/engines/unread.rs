//! Detects TCP data that was sent to a stopped process, which has not read it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kvx_testkit::Failure;

use crate::engines::fleet::ensure;

/// The time limit for the arrival of data.
const ARRIVAL: Duration = Duration::from_secs(1);

/// Waits until a process has data to read or a connection to accept.
pub(crate) fn wait_for(pid: u32) -> Result<(), Failure> {
    let until = Instant::now() + ARRIVAL;
    while !has_some(pid)? {
        ensure(Instant::now() < until, || {
            format!("nothing was sent to the stopped process {pid}")
        })?;
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn has_some(pid: u32) -> Result<bool, Failure> {
    let mut sockets = BTreeSet::new();
    for descriptor in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let target = std::fs::read_link(descriptor?.path())?.display().to_string();
        sockets.extend(
            target.strip_prefix("socket:[").map(|rest| rest.trim_end_matches(']').to_owned()),
        );
    }
    // The receive queue counts connections of a listening socket, and bytes of any other.
    let table = std::fs::read_to_string("/proc/net/tcp")?;
    Ok(table.lines().skip(1).any(|line| {
        let columns: Vec<_> = line.split_whitespace().collect();
        let unread = columns.get(4).and_then(|queues| queues.rsplit(':').next());
        unread.is_some_and(|bytes| bytes.bytes().any(|digit| digit != b'0'))
            && columns.get(9).is_some_and(|inode| sockets.contains(*inode))
    }))
}
