//! Errors as core's: what broke, with whom, and what to do.

use std::net::SocketAddr;

use kvx_core::{Error, ErrorKind, Identity};
use rustix::io::Errno;

/// The backend's name.
pub(crate) const NAME: &str = "TCP";

/// Names the backend and the peer.
pub(crate) fn of_peer(error: Error, peer: &Identity) -> Error {
    error.with_backend(NAME).with_peer(peer.name.clone())
}

/// A connect that did not come about.
pub(crate) fn unreachable(address: SocketAddr, errno: Errno) -> Error {
    if matches!(errno, Errno::MFILE | Errno::NFILE) {
        let error = Error::os(
            format!("no socket for a connection to {address}: raise the limit of open files"),
            errno,
        );
        return error.with_kind(ErrorKind::Exhausted);
    }
    if matches!(errno, Errno::NOMEM | Errno::NOBUFS | Errno::AGAIN) {
        let error = Error::os(
            format!(
                "this machine has no memory for a connection to {address} now: free memory, then post or connect again"
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
    Error::os(format!("no connection to {address}; {hint}"), errno).with_kind(ErrorKind::PeerLost)
}

/// A handshake that was not finished in time.
pub(crate) fn no_answer(address: SocketAddr) -> Error {
    Error::new(
        ErrorKind::PeerLost,
        format!(
            "no answer from {address} in time: check that the peer runs and that a kvx agent listens there"
        ),
    )
}

/// Work on a link that was lost before its user heard of it.
pub(crate) fn gone() -> Error {
    Error::new(ErrorKind::PeerLost, "the link to the peer is gone: connect again")
        .with_backend(NAME)
}

/// Work on something that was closed.
pub(crate) fn closed(what: &'static str) -> Error {
    Error::new(ErrorKind::Closed, format!("{what} was closed")).with_backend(NAME)
}
