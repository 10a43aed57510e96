//! What a process that stands still was sent by TCP, and has not read.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kvx_testkit::Failure;

use crate::engines::fleet::ensure;

/// How long something may take to come.
const ARRIVAL: Duration = Duration::from_secs(1);

/// Waits until a process has something to read, or to accept.
pub(crate) fn wait_for(pid: u32) -> Result<(), Failure> {
    let until = Instant::now() + ARRIVAL;
    while !has_some(pid)? {
        ensure(Instant::now() < until, || {
            format!("nothing was sent to process {pid} that stands still")
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
    // Of a socket that listens, connections; of another one, bytes.
    let table = std::fs::read_to_string("/proc/net/tcp")?;
    Ok(table.lines().skip(1).any(|line| {
        let columns: Vec<_> = line.split_whitespace().collect();
        let unread = columns.get(4).and_then(|queues| queues.rsplit(':').next());
        unread.is_some_and(|bytes| bytes.bytes().any(|digit| digit != b'0'))
            && columns.get(9).is_some_and(|inode| sockets.contains(*inode))
    }))
}
