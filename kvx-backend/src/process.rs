//! Identifies the process of a peer on this host and watches for its end, which proves that the
//! peer no longer holds anything.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use kvx_core::backend::LinkProcess;
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{Error, ErrorKind, Result};

/// The identity that a process claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessId {
    /// The boot id of the kernel; zeros if unknown.
    boot: [u8; 16],
    /// The PID namespace of the process number.
    namespace: u64,
    number: u32,
    /// The start time of the process in the kernel's ticks, because process numbers are reused.
    started: u64,
}

impl ProcessId {
    /// Returns the identity of this process.
    pub fn current() -> Self {
        let ((boot, namespace), number) = (host_identity().unwrap_or_default(), std::process::id());
        ProcessId {
            boot,
            namespace,
            number,
            started: start_time(number).ok().flatten().unwrap_or(0),
        }
    }

    /// Appends the encoded identity.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put(&self.boot);
        out.put_u64(self.namespace);
        out.put_u32(self.number);
        out.put_u64(self.started);
    }

    /// Decodes a peer's identity.
    ///
    /// # Errors
    /// `Malformed`.
    pub fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(ProcessId {
            boot: reader.array()?,
            namespace: reader.u64()?,
            number: reader.u32()?,
            started: reader.u64()?,
        })
    }

    /// Returns true if the id is of a current or former process of this system and PID namespace.
    ///
    /// # Errors
    ///
    /// `Exhausted` if this process has no descriptor left to read its own namespace.
    pub fn is_local(&self) -> Result<bool> {
        host_identity().map(|host| self.is_process_of(host)).map_err(no_descriptor)
    }

    fn is_process_of(&self, host: ([u8; 16], u64)) -> bool {
        let known = self.boot != [0; 16] && self.namespace != 0 && self.started != 0;
        known && (self.boot, self.namespace) == host
    }

    /// Watches for the end of the process. Returns `None` if the process has ended or is not on
    /// this host.
    ///
    /// # Errors
    ///
    /// `Exhausted` if this process has no descriptor left for the watch.
    pub fn watch(&self) -> Result<Option<ProcessWatch>> {
        if !self.is_local()? {
            return Ok(None);
        }
        let Some(pid) = i32::try_from(self.number).ok().and_then(Pid::from_raw) else {
            return Ok(None);
        };
        let pidfd = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(full @ (Errno::MFILE | Errno::NFILE)) => return Err(no_descriptor(full.into())),
            Err(_) => return Ok(None),
        };
        // The watch was opened first: if the number was reused, the new process started later.
        let same = start_time(self.number).map_err(no_descriptor)? == Some(self.started);
        Ok(same.then_some(ProcessWatch { pidfd, number: self.number }))
    }

    /// Watches the process if it is the one at the other end of a link: a peer may claim the
    /// identity of any process.
    ///
    /// # Errors
    ///
    /// `PermissionDenied` if it is another process, `PeerLost` if it has ended, `Unsupported` if it
    /// cannot be watched, `Exhausted` if this process has no descriptor left for the watch.
    pub fn watch_peer(&self, peer: LinkProcess<'_>) -> Result<ProcessWatch> {
        let other = || {
            let why = format!(
                "the peer is process {}, and names another one, {}",
                peer.number, self.number
            );
            ErrorKind::PermissionDenied.because(why)
        };
        if !self.is_local()? || self.number != peer.number {
            return Err(other());
        }
        let Some(pidfd) = peer.pidfd else {
            let why = "the kernel does not let this process watch the peer's process";
            return Err(ErrorKind::Unsupported.because(why));
        };
        let pidfd = pidfd.try_clone_to_owned().map_err(no_descriptor)?;
        let started = start_time(self.number).map_err(no_descriptor)?;
        let watch = ProcessWatch { pidfd, number: self.number };
        // The number belonged to the peer when the start time was read, unless the peer has ended.
        if watch.has_ended() {
            return Err(ErrorKind::PeerLost.because("the peer's process has ended"));
        }
        if started == Some(self.started) { Ok(watch) } else { Err(other()) }
    }
}

fn no_descriptor(cause: io::Error) -> Error {
    let why = "no descriptor to watch the peer's process with: raise ulimit -n, then try again";
    Error::os(why, cause).with_kind(ErrorKind::Exhausted)
}

/// Returns the boot id and the PID namespace. Returns an error if no descriptor is left.
fn host_identity() -> io::Result<([u8; 16], u64)> {
    static HOST: OnceLock<([u8; 16], u64)> = OnceLock::new();
    if let Some(host) = HOST.get() {
        return Ok(*host);
    }
    let boot = read_kernel_file("/proc/sys/kernel/random/boot_id")?.unwrap_or_default();
    let boot = u128::from_str_radix(&boot.trim().replace('-', ""), 16).unwrap_or(0).to_be_bytes();
    let namespace = rustix::fs::stat("/proc/self/ns/pid").map_or(0, |stat| stat.st_ino);
    Ok(*HOST.get_or_init(|| (boot, namespace)))
}

/// Reads a file of the kernel; `None` if it is unreadable. Returns an error if no descriptor is
/// left.
fn read_kernel_file(file: &str) -> io::Result<Option<String>> {
    match std::fs::read_to_string(file) {
        Ok(text) => Ok(Some(text)),
        Err(cause) => match Errno::from_io_error(&cause) {
            Some(Errno::MFILE | Errno::NFILE) => Err(cause),
            _ => Ok(None),
        },
    }
}

/// Returns the start time of a process.
fn start_time(number: u32) -> io::Result<Option<u64>> {
    stat_field(number, 19)
}

/// Returns a field of `/proc/PID/stat`, counted from the state. Returns an error if no descriptor
/// is left.
fn stat_field(number: u32, at: usize) -> io::Result<Option<u64>> {
    let Some(stat) = read_kernel_file(&format!("/proc/{number}/stat"))? else { return Ok(None) };
    // The name, in parentheses, may contain any characters.
    let after = stat.rsplit_once(')').map(|(_, after)| after);
    Ok(after.and_then(|after| after.split_ascii_whitespace().nth(at)?.parse().ok()))
}

/// The kernel's flag `PF_EXITING`, for a process that has begun to exit.
const EXITING: u64 = 4;

/// A watch on a process of this host.
#[derive(Debug)]
pub struct ProcessWatch {
    pidfd: OwnedFd,
    number: u32,
}

impl ProcessWatch {
    /// Returns a descriptor that is readable once the process has ended.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Returns true if all threads of the process have ended.
    pub fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(1))
    }

    /// Returns true if the process has ended or is exiting. Its memory is freed first, and accesses
    /// to it fail before the end is visible. Without a free descriptor only the end itself is
    /// visible.
    pub fn is_exiting(&self) -> bool {
        let exits = |flags: Option<u64>| flags.is_none_or(|flags| flags & EXITING != 0);
        self.has_ended() || stat_field(self.number, 6).is_ok_and(exits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_process_is_seen_and_a_reused_number_is_not_the_same_process() {
        let mut child = std::process::Command::new("sleep").arg("10").spawn().unwrap();
        let id = ProcessId {
            number: child.id(),
            started: start_time(child.id()).unwrap().unwrap(),
            ..ProcessId::current()
        };
        let watched = id.watch().unwrap().unwrap();
        assert!(!watched.has_ended() && !watched.is_exiting());
        assert!(ProcessId { started: id.started + 1, ..id }.watch().unwrap().is_none());
        assert!(ProcessId { boot: [1; 16], ..id }.watch().unwrap().is_none());
        let peer = LinkProcess { number: child.id(), pidfd: Some(watched.fd()) };
        let refused = |id: ProcessId, peer| id.watch_peer(peer).unwrap_err().kind();
        assert!(!id.watch_peer(peer).unwrap().has_ended());
        let denied = ErrorKind::PermissionDenied;
        assert_eq!(refused(ProcessId::current(), peer), denied, "it claims to be this process");
        assert_eq!(refused(ProcessId { started: id.started + 1, ..id }, peer), denied);
        assert_eq!(refused(ProcessId { boot: [1; 16], ..id }, peer), denied);
        let invisible = LinkProcess { number: 0, ..peer };
        assert_eq!(refused(id, invisible), denied);
        assert_eq!(refused(id, LinkProcess { pidfd: None, ..peer }), ErrorKind::Unsupported);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(watched.has_ended() && watched.is_exiting());
        assert!(id.watch().unwrap().is_none());
        assert_eq!(refused(id, peer), ErrorKind::PeerLost);
    }
}
