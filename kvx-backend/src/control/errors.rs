//! Why links, transfers and regions end: the sentences that all transports say alike.

use std::time::Duration;

use kvx_core::{Error, ErrorKind, RegionId};

/// The peer's process has ended.
pub fn peer_died() -> Error {
    Error::new(
        ErrorKind::PeerLost,
        "the peer's process has ended: connect again once it is restarted",
    )
}

/// The peer closed its end while its process lives on.
pub fn peer_closed() -> Error {
    Error::new(
        ErrorKind::PeerLost,
        "the peer closed the link: its agent was shut down, or dropped this link",
    )
}

/// The peer owes an answer and has been silent for the whole `peer_timeout`.
pub fn peer_silent(timeout: Duration) -> Error {
    let seconds = timeout.as_secs_f64();
    let why = format!(
        "the peer has not answered for {seconds} s with work in flight: it is stopped or hangs; peer_timeout sets \
         the limit"
    );
    Error::new(ErrorKind::PeerLost, why)
}

/// The handshake took too long.
pub fn no_handshake() -> Error {
    let why = "the peer has not answered the handshake: it is stopped, hangs or is gone, or it answers no unauthenticated peer, \
               because it was restarted or has another secret";
    Error::new(ErrorKind::PeerLost, why)
}

/// The link was closed on this side.
pub fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the link was closed on this side")
}

/// A transfer was cancelled.
pub fn cancelled() -> Error {
    Error::new(ErrorKind::Cancelled, "the transfer was cancelled before all of it had moved")
}

/// The owner took a region back.
pub fn revoked(id: RegionId) -> Error {
    Error::new(
        ErrorKind::Revoked,
        format!("region {id} was revoked: its owner took the memory back"),
    )
}

/// The transport ended before a peer had let go of a region.
pub fn still_shared(id: RegionId) -> Error {
    let why = format!("a peer had not let go of region {id} when the transport was shut down");
    Error::new(ErrorKind::StillShared, why)
}

/// The peer broke the protocol.
pub fn malformed(why: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Malformed, format!("malformed link message: {why}"))
}
