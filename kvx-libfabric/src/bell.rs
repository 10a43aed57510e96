//! Waking a peer of this host whose provider has nothing to sleep on.
//!
//! Shared memory tells nobody that something was put there, and polling costs either CPU or time. So each agent over such
//! a provider has a socket in the kernel's own namespace, and whoever has put something before a peer sends an empty
//! datagram to it. One that is lost because the socket is full is no loss: the peer is about to wake.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use kvx_core::{Error, Kind, Result};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::error::NAME;

/// The longest name that is taken from a peer.
pub(crate) const MAX_NAME: usize = 64;
/// How many rings are taken off at a time: they say nothing, but a full socket would stay readable.
const RINGS: usize = 64;

/// Our own.
pub(crate) struct Bell {
    socket: OwnedFd,
    name: Vec<u8>,
}

impl Bell {
    /// Errors: `Exhausted`.
    pub(crate) fn new() -> Result<Self> {
        let os = |cause: Errno| {
            Error::os("no socket to be woken by: raise ulimit -n", cause)
                .kind_is(Kind::Exhausted)
                .backend(NAME)
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None).map_err(os)?;
        let mut random = [0_u8; 16];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty()).map_err(os)?;
        let name = format!("kvx-libfabric-{:032x}", u128::from_ne_bytes(random)).into_bytes();
        let at = SocketAddrUnix::new_abstract_name(&name).map_err(os)?;
        rustix::net::bind(&socket, &at).map_err(os)?;
        Ok(Bell { socket, name })
    }

    /// By what peers know it.
    pub(crate) fn name(&self) -> &[u8] {
        &self.name
    }

    pub(crate) fn descriptor(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Takes off what has rung. Says whether anything had.
    pub(crate) fn hush(&self) -> bool {
        let mut nothing = [0_u8; 1];
        let mut rings = (0..RINGS)
            .map(|_| rustix::net::recv(self.socket.as_fd(), &mut nothing[..], RecvFlags::DONTWAIT).is_ok());
        let rang = rings.next() == Some(true);
        rang && {
            rings.take_while(|rang| *rang).count();
            true
        }
    }

    /// Rings a peer's. Errors: `PeerLost` when nobody is there.
    pub(crate) fn ring(&self, at: &SocketAddrUnix) -> Result<()> {
        match rustix::net::sendto(self.socket.as_fd(), &[], SendFlags::DONTWAIT, at) {
            Ok(_) | Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR) => Ok(()),
            Err(cause) => {
                let why =
                    "nobody is at the peer's end: its agent has ended, or runs in another network namespace";
                Err(Error::os(why, cause).kind_is(Kind::PeerLost).backend(NAME))
            }
        }
    }
}

/// Where a peer's is. Errors: `Malformed`.
pub(crate) fn at(name: &[u8]) -> Result<SocketAddrUnix> {
    let wrong =
        || Error::new(Kind::Malformed, "malformed LIBFABRIC address: no such bell can be").backend(NAME);
    if !(1..=MAX_NAME).contains(&name.len()) {
        return Err(wrong());
    }
    SocketAddrUnix::new_abstract_name(name).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bell_is_heard_until_it_is_hushed_and_nobody_hears_one_that_is_gone() {
        let (ours, theirs) = (Bell::new().unwrap(), Bell::new().unwrap());
        let there = at(theirs.name()).unwrap();
        let rings = |bell: &Bell| {
            let mut ready = [rustix::event::PollFd::new(&bell.socket, rustix::event::PollFlags::IN)];
            let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut ready, Some(&now)).unwrap() == 1
        };
        assert!(!rings(&theirs));
        for _ in 0..3 {
            ours.ring(&there).unwrap();
        }
        assert!(rings(&theirs) && !rings(&ours));
        assert!(theirs.hush());
        assert!(!theirs.hush() && !ours.hush());
        assert!(!rings(&theirs));
        for _ in 0..2000 {
            ours.ring(&there).unwrap(); // also when it is full
        }
        drop(theirs);
        assert_eq!(ours.ring(&there).unwrap_err().kind(), Kind::PeerLost);
    }

    #[test]
    fn only_names_that_a_socket_can_have_are_taken() {
        assert!(at(b"").is_err());
        assert!(at(&[7; MAX_NAME + 1]).is_err());
        assert!(at(&[7; MAX_NAME]).is_ok());
    }
}
