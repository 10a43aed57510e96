//! Errors that every transport reports in the same sentence.

use kvx_core::{Error, ErrorKind};

/// The error of work on a transport that has been shut down.
pub fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the transport has been shut down")
}

/// The error of work on a link that is lost.
pub fn link_lost() -> Error {
    Error::new(ErrorKind::PeerLost, "the link to the peer is gone: connect again")
}
