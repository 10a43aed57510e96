//! Errors as core's: what broke, with whom, and what to do.

use std::net::SocketAddr;

use kvx_core::{Error, Identity, Kind};
use rustix::io::Errno;

/// The backend's name.
pub(super) const NAME: &str = "TCP";

/// Names the backend and the peer.
pub(super) fn of_peer(error: Error, peer: &Identity) -> Error {
    error.backend(NAME).peer(peer.name.clone())
}

/// A connect that did not come about.
pub(super) fn unreachable(address: SocketAddr, errno: Errno) -> Error {
    if matches!(errno, Errno::MFILE | Errno::NFILE) {
        let error = Error::os(
            format!("no socket for a connection to {address}: raise the limit of open files"),
            errno,
        );
        return error.kind_is(Kind::Exhausted);
    }
    if matches!(errno, Errno::NOMEM | Errno::NOBUFS | Errno::AGAIN) {
        let error = Error::os(
            format!(
                "this machine has no room for a connection to {address} now: free memory, then post or connect again"
            ),
            errno,
        );
        return error.kind_is(Kind::Exhausted);
    }
    let hint = match errno {
        Errno::CONNREFUSED => {
            "nobody listens there: check that the peer runs and that its metadata is current"
        }
        _ => "check the route and \"tcp.advertise\" of the peer",
    };
    Error::os(format!("no connection to {address}; {hint}"), errno).kind_is(Kind::PeerLost)
}

/// A handshake that was not finished in time.
pub(super) fn no_answer(address: SocketAddr) -> Error {
    Error::new(
        Kind::PeerLost,
        format!(
            "no answer from {address} in time: check that the peer runs and that a kvx agent listens there"
        ),
    )
}

/// Work on a link that was lost before its user heard of it.
pub(super) fn gone() -> Error {
    Error::new(Kind::PeerLost, "the link to the peer is gone: connect again").backend(NAME)
}

/// Work on something that was closed.
pub(super) fn closed(what: &'static str) -> Error {
    Error::new(Kind::Closed, format!("{what} was closed")).backend(NAME)
}
