//! Checks whether a process listens at a peer's socket.
//!
//! libfabric's connectionless endpoints connect implicitly, and retry forever if no process listens
//! (seen with `tcp;ofi_rxm` of 1.17). So when a peer has accepted no message for a while, kvx
//! connects to it with a separate socket, if the provider listens on a TCP port of the kernel.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use kvx_core::{Error, ErrorKind, Result};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::error::NAME;

/// How long a peer may accept no message before it is probed; the pause doubles after each probe,
/// because a peer that listened may have ended since.
const PATIENCE: Duration = Duration::from_millis(20);

/// Probes a peer that has accepted no message yet.
pub(crate) struct PeerProbe {
    at: SocketAddr,
    next: Instant,
    pause: Duration,
    socket: Option<OwnedFd>,
}

impl PeerProbe {
    /// Returns `None` if the address is not a socket address.
    pub(crate) fn new(address: &[u8]) -> Option<Self> {
        let (at, next) = (socket_address(address)?, Instant::now() + PATIENCE);
        Some(PeerProbe { at, next, pause: PATIENCE, socket: None })
    }

    /// Probes if it is time, and checks the result. Errors: `PeerLost` if no process listens.
    pub(crate) fn check(&mut self) -> Result<()> {
        let now = Instant::now();
        let answer = match &self.socket {
            _ if now >= self.next => {
                self.pause *= 2;
                self.next = now + self.pause;
                self.ask()
            }
            Some(socket) => rustix::net::sockopt::socket_error(socket).unwrap_or(Ok(())),
            None => Ok(()),
        };
        match answer {
            Err(cause @ (Errno::CONNREFUSED | Errno::HOSTUNREACH | Errno::NETUNREACH)) => {
                let why = format!("no process listens at {}: the peer's agent has ended", self.at);
                Err(Error::os(why, cause).with_kind(ErrorKind::PeerLost).with_backend(NAME))
            }
            _ => Ok(()), // it listens, or has not answered yet
        }
    }

    fn ask(&mut self) -> Result<(), Errno> {
        let family = if self.at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        let answer = rustix::net::connect(&socket, &self.at);
        self.socket = Some(socket);
        answer
    }
}

/// Parses a C socket address.
pub(crate) fn socket_address(bytes: &[u8]) -> Option<SocketAddr> {
    let family = i32::from(u16::from_ne_bytes(*bytes.first_chunk()?));
    let port = u16::from_be_bytes(*bytes.get(2..)?.first_chunk()?);
    match family {
        libc::AF_INET => {
            let address: [u8; 4] = *bytes.get(4..)?.first_chunk()?;
            Some((Ipv4Addr::from(address), port).into())
        }
        libc::AF_INET6 => {
            let address: [u8; 16] = *bytes.get(8..)?.first_chunk()?;
            let scope = u32::from_ne_bytes(*bytes.get(24..)?.first_chunk()?);
            Some(std::net::SocketAddrV6::new(Ipv6Addr::from(address), port, 0, scope).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_peer_is_detected_after_a_while_and_a_listening_one_is_not_lost() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port().to_be_bytes();
        let family = (libc::AF_INET as u16).to_ne_bytes();
        let address = [&family[..], &port, &[127, 0, 0, 1], &[0; 8]].concat();
        let mut there = PeerProbe::new(&address).unwrap();
        there.next -= PATIENCE;
        assert!(there.check().is_ok() && there.check().is_ok());
        drop(listener);
        let mut nobody = PeerProbe::new(&address).unwrap();
        nobody.next -= PATIENCE;
        // The first was accepted before, and detects the end when it probes again.
        for probe in [&mut there, &mut nobody] {
            let until = Instant::now() + Duration::from_secs(10);
            let why = loop {
                match probe.check() {
                    Err(why) => break why,
                    Ok(()) => assert!(Instant::now() < until, "the absence was not detected"),
                }
            };
            assert_eq!(why.kind(), ErrorKind::PeerLost);
        }
    }

    #[test]
    fn only_socket_addresses_are_read() {
        let mut six = vec![0; 28];
        six[..4].copy_from_slice(&[libc::AF_INET6 as u8, 0, 0x1f, 0x90]);
        six[23] = 1;
        assert_eq!(socket_address(&six), Some("[::1]:8080".parse().unwrap()));
        assert!(PeerProbe::new(b"fi_shm://7\0").is_none() && PeerProbe::new(b"").is_none());
        assert!(PeerProbe::new(&six[..20]).is_none());
    }
}
