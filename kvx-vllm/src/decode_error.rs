//! The error of bytes that cannot be decoded.

use std::fmt;

/// An error from decoding a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeError {
    kind: DecodeErrorKind,
    message: String,
}

/// The kind of a [`DecodeError`], for programs to branch on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DecodeErrorKind {
    /// The bytes are not a message of this form, or exceed a limit.
    Malformed,
    /// The bytes belong to an older protocol.
    Incompatible,
    /// The bytes ask for a feature that is not implemented.
    Unsupported,
    /// The budget for messages in memory is used up.
    Exhausted,
    /// The peer rejects the connection.
    Refused,
}

impl DecodeError {
    pub(crate) fn new(kind: DecodeErrorKind, message: impl Into<String>) -> Self {
        DecodeError { kind, message: message.into() }
    }

    /// Returns the kind of the error.
    pub fn kind(&self) -> DecodeErrorKind {
        self.kind
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for DecodeError {}

#[cfg(feature = "config")]
impl From<DecodeError> for kvx_core::Error {
    fn from(error: DecodeError) -> Self {
        use kvx_core::ErrorKind;
        let kind = match error.kind {
            DecodeErrorKind::Malformed => ErrorKind::Malformed,
            DecodeErrorKind::Incompatible => ErrorKind::Incompatible,
            DecodeErrorKind::Unsupported => ErrorKind::Unsupported,
            DecodeErrorKind::Exhausted => ErrorKind::Exhausted,
            DecodeErrorKind::Refused => ErrorKind::PeerLost,
        };
        kvx_core::Error::new(kind, error.message)
    }
}
