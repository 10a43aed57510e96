//! Maps libfabric's error numbers to kvx's errors.

use std::fmt::Display;

use kvx_backend::error::link_lost;
use kvx_core::{Error, ErrorKind};

use crate::ffi::bindings_1_17::*;
use crate::ffi::{Errno, FailedOperation};

/// The backend's name.
pub(crate) const NAME: &str = "LIBFABRIC";

const GONE: &str = "check whether the peer still runs, and the network to it";
const SCARCE: &str =
    "raise the limits of this process (ulimit -l, -n; /dev/shm) or transfer less at once";
const CONFIGURED: &str = "check the options of the table libfabric and the variables FI_*; `fi_info` lists what libfabric has";
const REFUSED: &str = "the peer's provider denies access: the region was revoked, or the metadata belongs to another agent";
const QUEUE: &str = "ofi_rxm asks the card for a completion queue for 256 peers, and some cards have no queue of that length: set FI_UNIVERSE_SIZE to the number of peers, such as 16";
const UNKNOWN: &str = "set FI_LOG_LEVEL=warn for details from libfabric";

/// Returns the error kind of an error number, and what to do next.
fn row(errno: i32) -> (ErrorKind, &'static str) {
    // libfabric's own numbers are an unsigned enumeration in C.
    const OVERRUN: i32 = FI_EOVERRUN.cast_signed();
    const NO_KEY: i32 = FI_ENOKEY.cast_signed();
    const NO_ADDRESS: i32 = FI_ENOAV.cast_signed();
    const TRUNCATED: i32 = FI_ETRUNC.cast_signed();
    const NO_RECEIVE: i32 = FI_ENORX.cast_signed();
    match errno {
        libc::ECONNRESET
        | libc::ECONNREFUSED
        | libc::ECONNABORTED
        | libc::ENOTCONN
        | libc::ESHUTDOWN
        | libc::EPIPE
        | libc::ETIMEDOUT
        | libc::EHOSTUNREACH
        | libc::EHOSTDOWN
        | libc::ENETUNREACH
        | libc::ENETDOWN
        | libc::ENETRESET
        // The other process, or its shared memory, has gone.
        | libc::ESRCH
        | libc::ENOENT
        // kvx cancels nothing in libfabric: the connection failed and was closed during the
        // operation.
        | libc::ECANCELED => (ErrorKind::PeerLost, GONE),
        libc::EACCES | libc::EPERM | libc::EKEYREJECTED | NO_KEY => (ErrorKind::Native, REFUSED),
        libc::ENOMEM | libc::ENOBUFS | libc::ENOSPC | libc::EMFILE | libc::ENFILE | OVERRUN | NO_RECEIVE => {
            (ErrorKind::Exhausted, SCARCE)
        }
        libc::ENOSYS | libc::EOPNOTSUPP | libc::ENOPROTOOPT => (ErrorKind::Unsupported, CONFIGURED),
        libc::ENODEV | libc::ENODATA => (ErrorKind::Unavailable, CONFIGURED),
        libc::EINVAL | libc::EADDRNOTAVAIL | NO_ADDRESS | TRUNCATED => (ErrorKind::Invalid, CONFIGURED),
        _ => (ErrorKind::Native, UNKNOWN),
    }
}

/// Returns the error for an error number that `what` ended with: what to do next, the number and
/// its text.
pub(crate) fn native(what: impl Display, errno: Errno) -> Error {
    let (kind, cure) = row(errno.0);
    Error::new(kind, format!("{what}: {cure}"))
        .with_backend(NAME)
        .with_native(i64::from(errno.0), errno.text())
}

/// Returns the error of an endpoint that `provider` did not open on `domain`.
pub(crate) fn endpoint_error(provider: &str, domain: &str, errno: Errno) -> Error {
    let what = format!("libfabric could not open {provider} on {domain}");
    // The card refuses the size of the completion queue (libfabric's issue 10692).
    let is_queue_too_large = matches!(errno.0, libc::EINVAL | libc::ENOMEM);
    if is_queue_too_large && provider.starts_with("verbs") && provider.contains("ofi_rxm") {
        return native(format!("{what}: {QUEUE}"), errno);
    }
    native(what, errno)
}

/// Returns the error of a failed operation.
pub(crate) fn operation_error(what: &str, failed: FailedOperation) -> Error {
    let FailedOperation { errno, provider, .. } = failed;
    let (kind, cure) = row(errno.0);
    let text = format!("{}; the provider's error code is {provider}", errno.text());
    let error = Error::new(kind, format!("libfabric could not move {what}: {cure}"));
    error.with_backend(NAME).with_native(i64::from(errno.0), text)
}

/// Returns the error of operations on a lost link.
pub(crate) fn lost_link() -> Error {
    link_lost().with_backend(NAME)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_queue_that_a_card_refuses_is_named() {
        let names_it = |provider, errno| {
            let error = endpoint_error(provider, "rxe0", Errno(errno));
            assert!(error.sentence().contains("rxe0"), "{error}");
            error.sentence().contains("FI_UNIVERSE_SIZE")
        };
        assert!(names_it("verbs;ofi_rxm", libc::EINVAL) && names_it("verbs;ofi_rxm", libc::ENOMEM));
        assert!(!names_it("verbs;ofi_rxm", libc::ENODEV) && !names_it("tcp;ofi_rxm", libc::EINVAL));
    }

    #[test]
    fn each_number_has_its_kind_and_a_cure() {
        for (errno, kind, cure) in [
            (libc::ECONNRESET, ErrorKind::PeerLost, "still runs"),
            (libc::ESRCH, ErrorKind::PeerLost, "still runs"),
            (libc::ECANCELED, ErrorKind::PeerLost, "still runs"),
            (FI_ENOKEY.cast_signed(), ErrorKind::Native, "was revoked"),
            (libc::EACCES, ErrorKind::Native, "was revoked"),
            (libc::ENOMEM, ErrorKind::Exhausted, "ulimit"),
            (FI_EOVERRUN.cast_signed(), ErrorKind::Exhausted, "ulimit"),
            (libc::ENOSYS, ErrorKind::Unsupported, "table libfabric"),
            (libc::ENODATA, ErrorKind::Unavailable, "fi_info"),
            (libc::EINVAL, ErrorKind::Invalid, "FI_*"),
            (FI_EOTHER.cast_signed(), ErrorKind::Native, "FI_LOG_LEVEL"),
            (libc::EIO, ErrorKind::Native, "FI_LOG_LEVEL"),
        ] {
            let error = native("a trial", Errno(errno));
            assert_eq!(error.kind(), kind, "{errno}");
            assert!(
                error.sentence().starts_with("a trial: ") && error.sentence().contains(cure),
                "{error}"
            );
            assert_eq!(error.native().map(|native| native.code), Some(i64::from(errno)));
            assert_eq!(error.backend(), Some(NAME));
        }
    }
}
