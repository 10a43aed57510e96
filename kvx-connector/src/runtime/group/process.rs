//! A handle to another process, to notice its end.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A process of this host, as a pidfd.
#[derive(Debug)]
pub(in crate::runtime) struct ProcessHandle(OwnedFd);

impl ProcessHandle {
    /// Opens a handle. Returns `None` if the process does not exist.
    pub(super) fn open(pid: i32) -> Option<Arc<Self>> {
        let life = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        Some(Arc::new(ProcessHandle(life)))
    }

    /// Returns whether the process has ended, or does so within this time. Blocks the thread.
    pub(super) fn has_ended(&self, within: Duration) -> bool {
        let limit =
            Timespec { tv_sec: within.as_secs() as i64, tv_nsec: within.subsec_nanos().into() };
        poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&limit)) == Ok(1)
    }
}
