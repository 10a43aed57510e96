//! Ends an endpoint's connections although others have its sockets open.
//!
//! libfabric (1.17 over `tcp`) lets a program that is started while an agent is open inherit its
//! sockets, and at the end closes descriptors only. The connections would live on with that
//! program: peers would keep theirs, one for each such end, and an agent that is new at the address
//! would wait for an answer.
//!
//! What belongs to an endpoint is what its queue waits for, as the kernel tells it of an epoll.

use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use kvx_core::backend::fork;
use rustix::net::{AddressFamily, Shutdown};

/// How deep queues wait for queues: an endpoint's waits for one of connections and one of messages.
/// The inner ones live as long as it does: all queues have one number as files.
const DEPTH: usize = 3;

/// Sockets over IP, by descriptors of its own: libfabric's may be closed.
#[derive(Default)]
pub(crate) struct Connections(Vec<OwnedFd>);

impl Connections {
    /// Finds the sockets that a queue waits for, itself or through others. Finds none in a forked
    /// child, which must not end them.
    pub(crate) fn of(queue: RawFd) -> Self {
        let mut found = Connections::default();
        if fork::count() == 0 {
            found.look(queue, DEPTH);
        }
        found
    }

    fn look(&mut self, queue: RawFd, depth: usize) {
        // The program's own queues, perhaps.
        let Some(deeper) = depth.checked_sub(1) else { return };
        // Another thread may close a descriptor meanwhile.
        let Ok(told) = fs::read_to_string(format!("/proc/self/fdinfo/{queue}")) else { return };
        for (number, inode) in told.lines().filter_map(waited_for) {
            // SAFETY: takes numbers.
            let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
            if copy < 0 {
                continue;
            }
            // SAFETY: it was made just now.
            let copy = unsafe { OwnedFd::from_raw_fd(copy) };
            // A descriptor that was closed while others have the socket open is still told of, and
            // its number may be somebody else's.
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
                    self.0.push(copy);
                }
                _ => self.look(copy.as_raw_fd(), deeper),
            }
        }
    }

    /// Shuts the connections down in every process that has them open. Sent bytes arrive, and peers
    /// are notified.
    pub(crate) fn end(self) {
        for socket in self.0 {
            // One that its peer has ended has nothing to end.
            let _ended = rustix::net::shutdown(&socket, Shutdown::Both);
        }
    }
}

/// The descriptor and the file's number in a line of what the kernel tells of an epoll.
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
    fn what_a_queue_waits_for_ends_although_another_has_it_open_and_nothing_else_does() {
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

        // The queue goes on to tell of a number that becomes another's.
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
        assert_eq!(of_others.read(&mut [0]).unwrap_err().kind(), open, "nobody's but its own");
        assert_eq!(signalled.read(&mut [0]).unwrap_err().kind(), open, "it is not over IP");
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
