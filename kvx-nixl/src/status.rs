//! NIXL's status codes.

use kvx::{Error, ErrorKind};

/// A `nixl_status_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum NixlStatus {
    InProgress = 1,
    Success = 0,
    NotPosted = -1,
    InvalidParam = -2,
    Backend = -3,
    NotFound = -4,
    Mismatch = -5,
    Active = -7,
    NotSupported = -9,
    RemoteDisconnect = -10,
    Cancelled = -11,
}

/// The result of a call: done, or the reason why not.
pub(crate) type NixlResult<T = ()> = Result<T, NixlStatus>;

impl From<&Error> for NixlStatus {
    fn from(error: &Error) -> Self {
        match error.kind() {
            ErrorKind::PeerLost | ErrorKind::PeerRestarted => NixlStatus::RemoteDisconnect,
            ErrorKind::Cancelled => NixlStatus::Cancelled,
            ErrorKind::Invalid | ErrorKind::OutOfBounds | ErrorKind::Overlap => {
                NixlStatus::InvalidParam
            }
            ErrorKind::Incompatible | ErrorKind::Malformed => NixlStatus::Mismatch,
            ErrorKind::Unregistered | ErrorKind::Revoked => NixlStatus::NotFound,
            ErrorKind::Unsupported => NixlStatus::NotSupported,
            _ => NixlStatus::Backend,
        }
    }
}
