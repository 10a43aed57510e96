//! Errors with what failed, with which peer, and what to do.

use std::net::SocketAddr;

use kvx_core::{Error, ErrorKind, Identity};
use rustix::io::Errno;

/// The backend's name.
pub(crate) const NAME: &str = "TCP";

/// Adds the backend and the peer to an error.
pub(crate) fn of_peer(error: Error, peer: &Identity) -> Error {
    error.with_backend(NAME).with_peer(peer.name.clone())
}

/// Returns the error of a failed connect.
pub(crate) fn unreachable(address: SocketAddr, errno: Errno) -> Error {
    if matches!(errno, Errno::MFILE | Errno::NFILE) {
        let error = Error::os(
            format!(
                "cannot create a socket to connect to {address}: raise the limit of open files"
            ),
            errno,
        );
        return error.with_kind(ErrorKind::Exhausted);
    }
    if matches!(errno, Errno::NOMEM | Errno::NOBUFS | Errno::AGAIN) {
        let error = Error::os(
            format!(
                "this machine has no memory for a connection to {address}: free memory, then post \
                 or connect again"
            ),
            errno,
        );
        return error.with_kind(ErrorKind::Exhausted);
    }
    let hint = match errno {
        Errno::CONNREFUSED => {
            "no socket listens there: check that the peer runs and that its metadata is current"
        }
        _ => "check the route and \"tcp.advertise\" of the peer",
    };
    Error::os(format!("cannot connect to {address}; {hint}"), errno).with_kind(ErrorKind::PeerLost)
}

/// Returns the error of a handshake that was not finished in time.
pub(crate) fn no_answer(address: SocketAddr) -> Error {
    ErrorKind::PeerLost.because(format!(
        "no answer from {address} in time: check that the peer runs, that a kvx agent listens \
         there, and that no firewall drops packets to this port"
    ))
}

/// Returns the error of work on a link that has been lost.
pub(crate) fn gone() -> Error {
    Error::new(ErrorKind::PeerLost, "the link to the peer has ended: connect again")
        .with_backend(NAME)
}

/// Returns the error of work on something that was closed.
pub(crate) fn closed(what: &'static str) -> Error {
    ErrorKind::Closed.because(format!("{what} was closed")).with_backend(NAME)
}
