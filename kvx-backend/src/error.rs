//! Errors that every transport reports with the same sentence.

use kvx_core::backend::{MAX_NOTIFICATION, Unavailable};
use kvx_core::{Error, ErrorKind, Identity, Result};

/// Returns the error of work on a transport that has been shut down.
pub fn closed() -> Error {
    ErrorKind::Closed.because("the transport has been shut down")
}

/// Returns the error of work on a link that is lost.
pub fn link_lost() -> Error {
    ErrorKind::PeerLost.because("the link to the peer has ended: connect again")
}

/// Returns the error of metadata for an agent or incarnation other than the `linked` one.
pub fn other_peer(linked: &Identity, named: &Identity) -> Error {
    ErrorKind::PeerRestarted.because(format!("this link leads to {linked:?}, not {named:?}"))
}

/// Checks the length of a notification.
///
/// # Errors
/// `Invalid` for more than [`MAX_NOTIFICATION`] bytes.
pub fn check_notification(bytes: &[u8]) -> Result<()> {
    let len = bytes.len();
    if len <= MAX_NOTIFICATION {
        return Ok(());
    }
    let why = format!("a notification has {len} bytes, and at most {MAX_NOTIFICATION} are allowed");
    Err(ErrorKind::Invalid.because(why))
}

/// Returns the error of opening a transport whose library is unavailable.
pub fn unavailable(backend: &'static str, why: Unavailable) -> Error {
    ErrorKind::Unavailable.because(why.to_string()).with_backend(backend)
}
