//! Names the process of a peer on this host and watches for its end, which proves that it holds nothing any more.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags};

use kvx_core::Result;
use kvx_core::wire::{Reader, Writer};

/// A process, as it says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessId {
    /// The kernel's run; zeros: not known.
    boot: [u8; 16],
    /// The namespace of its number.
    namespace: u64,
    number: u32,
    /// The start of the process, in the kernel's ticks: numbers are used again.
    began: u64,
}

impl ProcessId {
    /// This process.
    pub fn this() -> Self {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let boot = u128::from_str_radix(&boot.trim().replace('-', ""), 16).unwrap_or(0).to_be_bytes();
        let number = std::process::id();
        let namespace = rustix::fs::stat("/proc/self/ns/pid").map_or(0, |stat| stat.st_ino);
        ProcessId { boot, namespace, number, began: began(number).unwrap_or(0) }
    }

    /// Appends what [`decode`](ProcessId::decode) reads.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put(&self.boot);
        out.put_u64(self.namespace);
        out.put_u32(self.number);
        out.put_u64(self.began);
    }

    /// Reads a process that a peer has told. Errors: `Malformed`.
    pub fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(ProcessId {
            boot: reader.array()?,
            namespace: reader.u64()?,
            number: reader.u32()?,
            began: reader.u64()?,
        })
    }

    /// True if it is, or was, a process of this system and namespace.
    pub fn is_near(&self) -> bool {
        let this = ProcessId::this();
        let known = self.boot != [0; 16] && self.namespace != 0 && self.began != 0;
        known && (self.boot, self.namespace) == (this.boot, this.namespace)
    }

    /// Watches for its end; `None` if it is no process of this host or has ended.
    pub fn watch(&self) -> Option<Watched> {
        if !self.is_near() {
            return None;
        }
        let pid = Pid::from_raw(i32::try_from(self.number).ok()?)?;
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // Opened first: if the number was given to another process, that one began later.
        (began(self.number)? == self.began).then_some(Watched { pidfd, number: self.number })
    }
}

/// The start of a process.
fn began(number: u32) -> Option<u64> {
    field(number, 19)
}

/// A field of what the kernel tells of a process, counted from its state.
fn field(number: u32, at: usize) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
    // The name, in parentheses, may hold anything.
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(at)?.parse().ok()
}

/// The kernel's flag for a process whose end has begun.
const EXITING: u64 = 4;

/// A process of this host.
#[derive(Debug)]
pub struct Watched {
    pidfd: OwnedFd,
    number: u32,
}

impl Watched {
    /// Readable once it has ended.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// True if all of it has ended.
    pub fn ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(1))
    }

    /// True if it has ended, or is about to: its memory goes first, and what reaches for it fails before the end is
    /// seen.
    pub fn ending(&self) -> bool {
        self.ended() || field(self.number, 6).is_none_or(|flags| flags & EXITING != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_seen_to_end_and_another_of_its_number_is_not_it() {
        let mut child = std::process::Command::new("sleep").arg("10").spawn().unwrap();
        let id = ProcessId { number: child.id(), began: began(child.id()).unwrap(), ..ProcessId::this() };
        let watched = id.watch().unwrap();
        assert!(!watched.ended() && !watched.ending());
        assert!(ProcessId { began: id.began + 1, ..id }.watch().is_none());
        assert!(ProcessId { boot: [1; 16], ..id }.watch().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(watched.ended() && watched.ending());
        assert!(id.watch().is_none());
    }
}
