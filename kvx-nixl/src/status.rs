//! What NIXL is told, in its own numbers.

use kvx::{Error, Kind};

/// A `nixl_status_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Status {
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

/// What comes of a call: done, or why not.
pub(crate) type Outcome<T = ()> = Result<T, Status>;

impl From<&Error> for Status {
    fn from(error: &Error) -> Self {
        match error.kind() {
            Kind::PeerLost | Kind::PeerRestarted => Status::RemoteDisconnect,
            Kind::Cancelled => Status::Cancelled,
            Kind::Invalid | Kind::OutOfBounds | Kind::Overlap => Status::InvalidParam,
            Kind::Incompatible | Kind::Malformed => Status::Mismatch,
            Kind::Unregistered | Kind::Revoked => Status::NotFound,
            Kind::Unsupported => Status::NotSupported,
            _ => Status::Backend,
        }
    }
}
