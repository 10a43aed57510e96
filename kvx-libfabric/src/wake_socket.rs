//! Wakes a peer on this host whose provider has no descriptor to sleep on.
//!
//! A write to shared memory wakes no process, and polling costs CPU or latency. So each agent over
//! such a provider has a socket in the kernel's abstract namespace. An agent that has left data for
//! a peer sends an empty datagram to its socket. If the socket is full, the datagram may be
//! dropped: the peer is about to wake anyway.

use std::os::fd::{AsFd, AsRawFd, RawFd};

use kvx_core::backend::fork::Private;
use kvx_core::{Error, ErrorKind, Result};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::error::NAME;

/// The maximum length of a name from a peer.
pub(crate) const MAX_NAME: usize = 64;
/// The number of wakes taken per call. They carry no data, but a non-empty socket stays readable.
const WAKES: usize = 64;

/// This agent's socket, by which peers wake it.
pub(crate) struct WakeSocket {
    socket: Private,
    name: Vec<u8>,
}

impl WakeSocket {
    /// Creates the socket. Errors: `Exhausted`.
    pub(crate) fn new() -> Result<Self> {
        let os = |cause: Errno| {
            Error::os("could not create the socket that wakes this agent: raise ulimit -n", cause)
                .with_kind(ErrorKind::Exhausted)
                .with_backend(NAME)
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)
            .map_err(os)?;
        let mut random = [0_u8; 16];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty()).map_err(os)?;
        let name = format!("kvx-libfabric-{:032x}", u128::from_ne_bytes(random)).into_bytes();
        let at = SocketAddrUnix::new_abstract_name(&name).map_err(os)?;
        rustix::net::bind(&socket, &at).map_err(os)?;
        Ok(WakeSocket { socket: socket.into(), name })
    }

    /// Returns the name by which peers know the socket.
    pub(crate) fn name(&self) -> &[u8] {
        &self.name
    }

    pub(crate) fn descriptor(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Takes the wakes that have arrived. Returns whether there were any.
    pub(crate) fn take_wakes(&self) -> bool {
        let mut nothing = [0_u8; 1];
        let mut wakes = (0..WAKES).map(|_| {
            rustix::net::recv(self.socket.as_fd(), &mut nothing[..], RecvFlags::DONTWAIT).is_ok()
        });
        let woken = wakes.next() == Some(true);
        woken && {
            wakes.take_while(|woken| *woken).count();
            true
        }
    }

    /// Wakes a peer by its socket. Errors: `PeerLost` if the socket does not exist.
    pub(crate) fn wake(&self, at: &SocketAddrUnix) -> Result<()> {
        match rustix::net::sendto(self.socket.as_fd(), &[], SendFlags::DONTWAIT, at) {
            Ok(_) | Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR) => Ok(()),
            Err(cause) => {
                let why = "the peer's wake-up socket does not exist: its agent has ended, or runs in another network namespace";
                Err(Error::os(why, cause).with_kind(ErrorKind::PeerLost).with_backend(NAME))
            }
        }
    }
}

/// Returns the address of a peer's socket. Errors: `Malformed`.
pub(crate) fn socket_of(name: &[u8]) -> Result<SocketAddrUnix> {
    let wrong = || {
        Error::new(
            ErrorKind::Malformed,
            "malformed LIBFABRIC address: the name of its socket is invalid",
        )
        .with_backend(NAME)
    };
    if !(1..=MAX_NAME).contains(&name.len()) {
        return Err(wrong());
    }
    SocketAddrUnix::new_abstract_name(name).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wakes_stay_until_they_are_taken_and_waking_a_closed_socket_fails() {
        let (ours, theirs) = (WakeSocket::new().unwrap(), WakeSocket::new().unwrap());
        let to = socket_of(theirs.name()).unwrap();
        let is_woken = |socket: &WakeSocket| {
            let mut ready =
                [rustix::event::PollFd::new(&socket.socket, rustix::event::PollFlags::IN)];
            let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut ready, Some(&now)).unwrap() == 1
        };
        assert!(!is_woken(&theirs));
        for _ in 0..3 {
            ours.wake(&to).unwrap();
        }
        assert!(is_woken(&theirs) && !is_woken(&ours));
        assert!(theirs.take_wakes());
        assert!(!theirs.take_wakes() && !ours.take_wakes());
        assert!(!is_woken(&theirs));
        for _ in 0..2000 {
            ours.wake(&to).unwrap(); // also when it is full
        }
        drop(theirs);
        assert_eq!(ours.wake(&to).unwrap_err().kind(), ErrorKind::PeerLost);
    }

    #[test]
    fn only_valid_socket_names_are_accepted() {
        assert!(socket_of(b"").is_err());
        assert!(socket_of(&[7; MAX_NAME + 1]).is_err());
        assert!(socket_of(&[7; MAX_NAME]).is_ok());
    }
}
