//! Errors that end links, transfers and regions, in the same sentences for all transports.

use std::time::Duration;

use kvx_core::{Error, ErrorKind, RegionId};

/// Returns the error of a link whose peer's process has ended.
pub fn peer_died() -> Error {
    ErrorKind::PeerLost.because("the peer's process has ended: connect again once it is restarted")
}

/// Returns the error of a link that the peer closed while its process continues.
pub fn peer_closed() -> Error {
    ErrorKind::PeerLost
        .because("the peer closed the link: its agent was shut down, or dropped this link")
}

/// Returns the error of a peer that owes an answer and was silent for the whole `peer_timeout`.
pub fn peer_silent(timeout: Duration) -> Error {
    let seconds = timeout.as_secs_f64();
    let why = format!(
        "the peer has not answered for {seconds} s with work in flight: it is stopped or hangs; \
         peer_timeout sets the limit"
    );
    ErrorKind::PeerLost.because(why)
}

/// Returns the error of a handshake that took too long.
pub fn no_handshake() -> Error {
    let why = "the peer has not answered the handshake: it is stopped, hangs or has ended, or it \
               was restarted or has another secret and therefore ignores this end";
    ErrorKind::PeerLost.because(why)
}

/// Returns the error of work on a link that this side has closed.
pub fn closed() -> Error {
    ErrorKind::Closed.because("the link was closed on this side")
}

/// Returns the error of a cancelled transfer.
pub fn cancelled() -> Error {
    ErrorKind::Cancelled.because("the transfer was cancelled before all of it had moved")
}

/// Returns the error of a region that its owner has revoked.
pub fn revoked(id: RegionId) -> Error {
    ErrorKind::Revoked.because(format!("region {id} was revoked: its owner took the memory back"))
}

/// Returns the error of a transport that ended before a peer released a region.
pub fn still_shared(id: RegionId) -> Error {
    let why = format!("a peer had not released region {id} when the transport was shut down");
    ErrorKind::StillShared.because(why)
}

/// Returns the error of a peer that violates the protocol.
pub fn malformed(why: impl std::fmt::Display) -> Error {
    ErrorKind::Malformed.because(format!("malformed link message: {why}"))
}
