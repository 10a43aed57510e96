//! The processes of this host: boot id, namespaces, credentials, and whether peer processes live.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use kvx_core::backend::LinkProcess;
use kvx_core::{ErrorKind, Result};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::error::{error, no_connection};

/// The identity of a host and of a network namespace on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    /// The kernel's random id of this boot, which containers share.
    pub(crate) boot: [u8; 16],
    /// The number of the network namespace, within which abstract sockets are visible; 0 if
    /// unknown.
    pub(crate) network: u64,
}

impl Host {
    /// Returns this host. Returns `Unavailable` if the kernel does not report its boot id.
    pub(crate) fn current() -> Result<Self> {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(|cause| {
            error(ErrorKind::Unavailable, format!("cannot read the boot id in /proc: {cause}"))
                .with_source(cause)
        })?;
        let boot = boot_id(&text).ok_or_else(|| {
            error(ErrorKind::Unavailable, format!("the boot id {:?} is invalid", text.trim()))
        })?;
        Ok(Host { boot, network: network_namespace().unwrap_or(0) })
    }

    /// Checks that a process on `other` can be reached from here. Returns `Unsupported` with the
    /// reason and what to do otherwise.
    pub(crate) fn reaches(&self, other: &Host) -> Result<()> {
        if self.boot != other.boot {
            return Err(error(
                ErrorKind::Unsupported,
                "the peer runs on another host, which shared memory does not reach",
            ));
        }
        if self.network != 0 && other.network != 0 && self.network != other.network {
            return Err(error(
                ErrorKind::Unsupported,
                "the peer runs on this host in another network namespace: give both containers one \
                 network (hostNetwork, one pod, --network=container:…)",
            ));
        }
        Ok(())
    }
}

fn boot_id(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.trim().chars().filter(|character| *character != '-').collect();
    if digits.len() != 32 {
        return None;
    }
    u128::from_str_radix(&digits, 16).ok().map(u128::to_be_bytes)
}

fn network_namespace() -> Option<u64> {
    let link = std::fs::read_link("/proc/self/ns/net").ok()?;
    link.to_str()?.strip_prefix("net:[")?.strip_suffix(']')?.parse().ok()
}

/// The process at the other end of a socket: its identity, and whether it lives.
#[derive(Debug)]
pub(crate) struct PeerProcess {
    /// The process's number in the local PID namespace; 0 if it runs in one that is not visible
    /// here.
    pub(crate) pid: i32,
    /// The process's user, as seen in the local user namespace.
    pub(crate) uid: u32,
    life: Life,
}

#[derive(Debug)]
enum Life {
    /// A pidfd, which is readable once the process has ended.
    Watched(OwnedFd),
    /// The process had ended before it could be watched.
    Ended,
    /// The process cannot be watched; only the end of its socket shows its end.
    Unknown,
}

/// The longest time between a process's closing its files and its end.
const A_MOMENT: Duration = Duration::from_millis(5);

/// The socket option of kernel 6.5 and newer that returns a pidfd of the process that connected or
/// listened.
const SO_PEERPIDFD: libc::c_int = 77;

impl PeerProcess {
    /// Returns the process at the other end of a connected Unix socket, as the kernel recorded it
    /// at connect or listen.
    pub(crate) fn behind(socket: BorrowedFd<'_>) -> Result<Self> {
        let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: `who` and `len` are valid for the call, and `len` names the size of `who`.
        let rc = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut who).cast(),
                &raw mut len,
            )
        };
        if rc != 0 {
            let cause = std::io::Error::last_os_error();
            return Err(kvx_core::Error::os(
                "the kernel does not report the process at the other end",
                cause,
            ));
        }
        let life = match pidfd_behind(socket) {
            Some(life) => life,
            None => pidfd_of(who.pid).map_err(no_connection)?,
        };
        Ok(PeerProcess { pid: who.pid, uid: who.uid, life })
    }

    /// Returns the process as devices expect it, which open memory of no other one.
    pub(crate) fn of_link(&self) -> LinkProcess<'_> {
        LinkProcess { number: u32::try_from(self.pid).unwrap_or(0), pidfd: self.life() }
    }

    /// Returns a descriptor that becomes readable when the process ends.
    pub(crate) fn life(&self) -> Option<BorrowedFd<'_>> {
        match &self.life {
            Life::Watched(life) => Some(life.as_fd()),
            Life::Ended | Life::Unknown => None,
        }
    }

    /// Returns true if the process is known to have ended.
    pub(crate) fn has_ended(&self) -> bool {
        match &self.life {
            Life::Watched(life) => {
                matches!(poll_now(&mut [PollFd::new(life, PollFlags::IN)]), Ok(1..))
            }
            Life::Ended => true,
            Life::Unknown => false,
        }
    }

    /// Returns true if the process, the end of whose `socket` was seen, has ended or is exiting. An
    /// exiting process closes its files before it counts as ended, on a busy machine long before. A
    /// live one that leaves closes one direction first.
    pub(crate) fn has_ended_with(&self, socket: BorrowedFd<'_>) -> bool {
        let hung_up = matches!(
            poll_now(&mut [PollFd::from_borrowed_fd(socket, PollFlags::empty())]),
            Ok(1..)
        );
        if let (true, Life::Watched(life)) = (hung_up, &self.life) {
            // In an invisible namespace only its end can tell.
            if self.is_exiting() {
                return true;
            }
            let moment =
                rustix::time::Timespec { tv_sec: 0, tv_nsec: A_MOMENT.subsec_nanos().into() };
            rustix::event::poll(&mut [PollFd::new(life, PollFlags::IN)], Some(&moment)).ok();
        }
        self.has_ended()
    }

    /// Returns true if the kernel has begun to end all threads of the process: a live process may
    /// have ended its first one. The caller has not seen the process's end, so its number was not
    /// reused.
    pub(crate) fn is_exiting(&self) -> bool {
        let Ok(threads) = std::fs::read_dir(format!("/proc/{}/task", self.pid)) else {
            return false;
        };
        let mut seen = 0;
        let all = threads.into_iter().all(|thread| {
            seen += 1;
            let stat =
                thread.and_then(|thread| std::fs::read_to_string(thread.path().join("stat")));
            stat.is_ok_and(|stat| has_begun_to_exit(&stat))
        });
        all && seen > 0
    }

    /// Returns true if the process still holds its end of `socket`, and so is the one that
    /// connected: it has neither ended nor been replaced by another program.
    pub(crate) fn still_behind(&self, socket: BorrowedFd<'_>) -> bool {
        let mut polled = [
            PollFd::from_borrowed_fd(socket, PollFlags::empty()),
            PollFd::from_borrowed_fd(socket, PollFlags::empty()),
        ];
        let watched = match &self.life {
            Life::Watched(life) => {
                polled[1] = PollFd::new(life, PollFlags::IN);
                &mut polled[..]
            }
            Life::Ended => return false,
            Life::Unknown => &mut polled[..1],
        };
        matches!(poll_now(watched), Ok(0))
    }
}

/// The kernel's flag `PF_EXITING` (`sched.h`).
const EXITING: u64 = 0x4;

/// Returns true if the flags in a `/proc/<pid>/stat` contain it: the seventh field after the name,
/// which may contain any characters.
fn has_begun_to_exit(stat: &str) -> bool {
    let mut words = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    words
        .nth(6)
        .and_then(|flags| flags.parse::<u64>().ok())
        .is_some_and(|flags| flags & EXITING != 0)
}

fn poll_now(fds: &mut [PollFd<'_>]) -> Result<usize, Errno> {
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    loop {
        match rustix::event::poll(fds, Some(&now)) {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

/// Returns `None` if this kernel does not know the option.
fn pidfd_behind(socket: BorrowedFd<'_>) -> Option<Life> {
    let mut fd: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `fd` and `len` are valid for the call, and `len` names the size of `fd`.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut len,
        )
    };
    if rc != 0 || fd < 0 {
        let gone = std::io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
        return gone.then_some(Life::Ended);
    }
    // SAFETY: the kernel has just created this descriptor, so no other code owns it.
    Some(Life::Watched(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Opens a pidfd. Returns an error if this process has no descriptor left.
fn pidfd_of(pid: i32) -> Result<Life, Errno> {
    let Some(pid) = rustix::process::Pid::from_raw(pid) else { return Ok(Life::Unknown) };
    match rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
        Ok(life) => Ok(Life::Watched(life)),
        Err(Errno::SRCH) => Ok(Life::Ended),
        Err(full @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => Err(full),
        Err(_) => Ok(Life::Unknown),
    }
}

/// Returns the effective user of this process.
pub(crate) fn our_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_reaches_itself_and_no_other() {
        let this = Host::current().unwrap();
        this.reaches(&this).unwrap();
        let other = Host { boot: [0; 16], ..this };
        let refused = this.reaches(&other).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert!(refused.to_string().contains("another host"), "{refused}");
        let apart = Host { network: this.network + 1, ..this };
        if this.network != 0 {
            assert!(this.reaches(&apart).unwrap_err().to_string().contains("network namespace"));
        }
    }

    #[test]
    fn boot_ids_are_parsed_strictly() {
        assert_eq!(boot_id("00000000-0000-0000-0000-0000000000ff\n").map(|id| id[15]), Some(255));
        assert_eq!(boot_id("xyz"), None);
    }

    #[test]
    fn an_exiting_process_is_recognised() {
        for (stat, exits) in [
            ("7 (a) b) R 1 7 7 0 -1 4194304 95 0", false),
            ("7 (a 1 1 1 1 1 1 4) R 1 7 7 0 -1 4194304 95 0", false),
            ("7 (a) b) R 1 7 7 0 -1 4194308 95 0", true),
            ("7 (a)", false),
            ("", false),
        ] {
            assert_eq!(has_begun_to_exit(stat), exits, "{stat}");
        }
        let process =
            |pid: u32| PeerProcess { pid: pid.cast_signed(), uid: 0, life: Life::Unknown };
        assert!(!process(std::process::id()).is_exiting());
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert!(!process(child.id()).is_exiting());
        child.kill().unwrap();
        let until = std::time::Instant::now() + Duration::from_secs(10);
        while !process(child.id()).is_exiting() {
            assert!(std::time::Instant::now() < until, "the end of the child is not recognised");
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!process(child.id()).is_exiting(), "it does not exist");
    }

    #[test]
    fn this_process_is_at_the_other_end_of_its_own_socket_and_lives() {
        let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = PeerProcess::behind(one.as_fd()).unwrap();
        assert_eq!(peer.pid as u32, std::process::id());
        assert_eq!(peer.uid, our_uid());
        assert!(peer.life().is_some());
        assert!(!peer.has_ended() && peer.still_behind(one.as_fd()));
        drop(other);
        assert!(!peer.still_behind(one.as_fd()));
    }
}
