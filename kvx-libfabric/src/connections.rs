//! Ends an endpoint's connections even if other processes have its sockets open.
//!
//! A program that is started while an agent is open inherits libfabric's sockets (1.17 over `tcp`),
//! and libfabric closes only its own descriptors. The connections would then stay open as long as
//! that program: peers would keep one descriptor for each such connection, and a new agent at the
//! same address would wait for an answer.
//!
//! A forked child inherits them too. It would hide the death of its parent: peers would wait for
//! answers on these connections, and new peers at the address of the parent. So a forked child
//! closes them ([`LibraryDescriptors`]).
//!
//! An endpoint's sockets are those that its completion queue waits for: the kernel lists them for
//! an epoll.

use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use kvx_core::backend::fork::{self, LibraryDescriptors};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_acceptconn};
use rustix::net::{AddressFamily, Shutdown};

/// The maximum nesting of epolls: an endpoint's waits for one of connections and one of messages.
/// The inner ones live as long as the outer one: all epolls have the same inode number.
const DEPTH: usize = 3;
/// How long libfabric may wait for the data of a request to connect, which peers send with the
/// request.
const REQUEST_TIME: Duration = Duration::from_millis(10);

/// Returns a guard for as long as the queue is open: forked children do not keep open the sockets
/// that it waits for at the fork.
pub(crate) fn kept_from_children(queue: RawFd) -> LibraryDescriptors {
    LibraryDescriptors::new(move |numbers| {
        numbers.extend(Connections::of(queue).0.iter().map(|socket| socket.number));
    })
}

/// IP sockets of libfabric.
#[derive(Default)]
pub(crate) struct Connections(Vec<Socket>);

struct Socket {
    /// libfabric's own descriptor, which it may close at any time.
    number: RawFd,
    copy: OwnedFd,
}

impl Connections {
    /// Finds the sockets that a queue waits for, directly or through other queues. Finds none in a
    /// forked child, which must not end the connections.
    pub(crate) fn of(queue: RawFd) -> Self {
        let mut found = Connections::default();
        if fork::count() == 0 {
            found.look(queue, DEPTH);
        }
        found
    }

    fn look(&mut self, queue: RawFd, depth: usize) {
        // A queue that is nested more deeply belongs to the program, if it exists at all.
        let Some(deeper) = depth.checked_sub(1) else { return };
        // Another thread may close the descriptor concurrently.
        let Ok(told) = fs::read_to_string(format!("/proc/self/fdinfo/{queue}")) else { return };
        for (number, inode) in told.lines().filter_map(waited_for) {
            // SAFETY: takes only integers.
            let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
            if copy < 0 {
                continue;
            }
            // SAFETY: `fcntl` has just created it.
            let copy = unsafe { OwnedFd::from_raw_fd(copy) };
            // The kernel still lists a closed descriptor if others have its socket open, and its
            // number may then belong to another file.
            if !rustix::fs::fstat(&copy).is_ok_and(|file| file.st_ino == inode) {
                continue;
            }
            match rustix::net::getsockname(&copy) {
                Ok(name)
                    if matches!(
                        name.address_family(),
                        AddressFamily::INET | AddressFamily::INET6
                    ) =>
                {
                    self.0.push(Socket { number, copy });
                }
                _ => self.look(copy.as_raw_fd(), deeper),
            }
        }
    }

    /// Bounds the time that libfabric reads a request to connect. Over `tcp`, 1.17 does so without
    /// a limit, on the thread that serves all peers. Accepted sockets inherit the limit of the one
    /// that listens; it does not apply to other reads, because these do not block.
    pub(crate) fn limit_requests(&self) {
        for Socket { copy, .. } in &self.0 {
            if socket_acceptconn(copy) != Ok(true) {
                continue;
            }
            if let Err(errno) = set_socket_timeout(copy, Timeout::Recv, Some(REQUEST_TIME)) {
                tracing::warn!(%errno, "a peer that sends half a request can block this agent");
            }
        }
    }

    /// Shuts the connections down in all processes that have them open. Sent bytes still arrive,
    /// and peers are notified.
    pub(crate) fn end(self) {
        for Socket { copy, .. } in self.0 {
            // Fails if the peer has already ended the connection.
            let _ended = rustix::net::shutdown(&copy, Shutdown::Both);
        }
    }
}

/// Parses the descriptor and the inode number in a line of an epoll's `fdinfo`.
fn waited_for(line: &str) -> Option<(RawFd, u64)> {
    let mut words = line.strip_prefix("tfd:")?.split_whitespace();
    let number = words.next()?.parse().ok()?;
    let inode = words.find_map(|word| word.strip_prefix("ino:"))?;
    Some((number, u64::from_str_radix(inode, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use rustix::event::epoll;

    use super::*;

    fn queue_of(waited_for: &[&dyn AsFd]) -> OwnedFd {
        let queue = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        for (at, file) in waited_for.iter().enumerate() {
            let data = epoll::EventData::new_u64(at as u64);
            epoll::add(&queue, file.as_fd(), data, epoll::EventFlags::IN).unwrap();
        }
        queue
    }

    #[test]
    fn only_connections_that_a_queue_waits_for_end_even_if_shared() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let pair = || {
            let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (near, listener.accept().unwrap().0)
        };
        let ((ours, mut theirs), (others, mut of_others)) = (pair(), pair());
        let (signal, mut signalled) = UnixStream::pair().unwrap();
        let copy = ours.try_clone().unwrap();
        let inner = queue_of(&[&ours, &signal]);
        let outer = queue_of(&[&inner]);

        // The queue still lists a descriptor whose number now belongs to another socket.
        let number = ours.as_raw_fd();
        drop(ours);
        let stale = rustix::io::fcntl_dupfd_cloexec(&others, number).unwrap();
        Connections::of(outer.as_raw_fd()).end();
        drop(stale);

        Connections::of(queue_of(&[&queue_of(&[&copy, &signal])]).as_raw_fd()).end();
        assert_eq!(theirs.read(&mut [0]).unwrap(), 0, "the connection has ended");
        of_others.set_nonblocking(true).unwrap();
        signalled.set_nonblocking(true).unwrap();
        let open = std::io::ErrorKind::WouldBlock;
        assert_eq!(
            of_others.read(&mut [0]).unwrap_err().kind(),
            open,
            "a socket that the queue does not wait for"
        );
        assert_eq!(signalled.read(&mut [0]).unwrap_err().kind(), open, "it is not an IP socket");
    }

    #[test]
    fn only_lines_of_an_epoll_are_read() {
        let line = "tfd:        9 events:       19 data: 55e0ffff  pos:0 ino:3ac0ffe sdev:9";
        assert_eq!(waited_for(line), Some((9, 0x3ac_0ffe)));
        for other in ["pos:\t0", "tfd:", "tfd: x ino:1", "tfd: 9 events: 19", "tfd: 9 ino:-", ""] {
            assert_eq!(waited_for(other), None, "{other}");
        }
    }
}
