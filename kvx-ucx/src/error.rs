//! Maps UCX's status codes to kvx's errors.

use std::fmt::Display;

use kvx_core::{Error, ErrorKind};

use crate::ffi::Status;
use crate::ffi::bindings_1_13::*;

/// The backend's name.
pub(crate) const NAME: &str = "UCX";

const GONE: &str = "check whether the peer still runs, and the network to it";
const SCARCE: &str =
    "raise the limits of this process (ulimit -l, -n; /dev/shm) or transfer less at once";
const CONFIGURED: &str = "check the options of the table ucx and the variables UCX_*; UCX_LOG_LEVEL=info says what UCX has found";
const APART: &str = "both ends need a common transport that detects peer failures: tcp, RDMA, or shared memory with \
     UCX_MM_ERROR_HANDLING=y; check UCX_TLS and UCX_NET_DEVICES on both";
const NO_DEVICE: &str = "no device of this machine matches the options of the table ucx and the variables UCX_*: \
     `ucx_info -d` lists the devices";
const UNKNOWN: &str = "UCX_LOG_LEVEL=info makes UCX say more";

/// Returns the error kind of a status, and what to do next.
fn row(status: ucs_status_t) -> (ErrorKind, &'static str) {
    match status {
        // Ranges that UCX reserves: link failures and endpoint failures.
        UCS_ERR_LAST_LINK_FAILURE..=UCS_ERR_FIRST_LINK_FAILURE
        | UCS_ERR_LAST_ENDPOINT_FAILURE..=UCS_ERR_FIRST_ENDPOINT_FAILURE
        | UCS_ERR_CONNECTION_RESET..=UCS_ERR_REJECTED
        | UCS_ERR_TIMED_OUT
        // A read from a process that has ended.
        | UCS_ERR_IO_ERROR
        // kvx cancels nothing in UCX: the endpoint failed and was closed during the operation.
        | UCS_ERR_CANCELED => (ErrorKind::PeerLost, GONE),
        UCS_ERR_UNREACHABLE => (ErrorKind::Unsupported, APART),
        UCS_ERR_NOT_IMPLEMENTED | UCS_ERR_UNSUPPORTED => (ErrorKind::Unsupported, CONFIGURED),
        UCS_ERR_NO_DEVICE => (ErrorKind::Unavailable, NO_DEVICE),
        UCS_ERR_NO_ELEM | UCS_ERR_INVALID_PARAM => (ErrorKind::Invalid, CONFIGURED),
        UCS_ERR_NO_MEMORY
        | UCS_ERR_NO_RESOURCE
        | UCS_ERR_SHMEM_SEGMENT
        | UCS_ERR_EXCEEDS_LIMIT => (ErrorKind::Exhausted, SCARCE),
        _ => (ErrorKind::Native, UNKNOWN),
    }
}

/// How to find out which limit.
const SAYS_WHICH: &str = "UCX_LOG_LEVEL=info says which";

/// Returns the error for a `status` that ended `what`, with what to do next and UCX's code and
/// text.
pub(crate) fn native(what: impl Display, status: Status) -> Error {
    let (kind, cure) = row(status.0);
    error(kind, format!("{what}: {cure}"), status)
}

fn error(kind: ErrorKind, sentence: String, status: Status) -> Error {
    Error::new(kind, sentence).with_backend(NAME).with_native(i64::from(status.0), status.text())
}

/// Returns the error for a worker that UCX did not create. No peer is involved, so the kinds of
/// peer failures do not apply.
pub(crate) fn worker_error(status: Status) -> Error {
    const WHAT: &str = "UCX cannot create a worker";
    match native(WHAT, status) {
        lost if lost.kind() == ErrorKind::PeerLost => {
            let why = format!(
                "{WHAT}: raise the limits of open files (ulimit -n) and of memory; {SAYS_WHICH}"
            );
            error(ErrorKind::Exhausted, why, status)
        }
        other => other,
    }
}

/// Returns the error of a failed piece of a transfer.
pub(crate) fn piece_error(status: Status) -> Error {
    const WHAT: &str = "UCX could not move a piece of the transfer";
    match native(WHAT, status) {
        // UCX reports this status also when the peer has ended and its memory is gone.
        scarce if scarce.kind() == ErrorKind::Exhausted => {
            let why = format!("{WHAT}: check whether the peer still runs; if it does, {SCARCE}");
            error(ErrorKind::Exhausted, why, status)
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_worker_is_not_reported_as_a_peers_fault() {
        let error = worker_error(Status(-3));
        assert_eq!(error.kind(), ErrorKind::Exhausted);
        assert!(error.sentence().contains("ulimit -n"), "{error}");
        assert_eq!(
            native("", Status(-3)).kind(),
            ErrorKind::PeerLost,
            "all other statuses have this kind"
        );
    }

    #[test]
    fn each_status_has_its_kind_and_a_cure() {
        for (status, kind, cure) in [
            (UCS_ERR_CONNECTION_RESET, ErrorKind::PeerLost, "still runs"),
            (UCS_ERR_NOT_CONNECTED, ErrorKind::PeerLost, "still runs"),
            (UCS_ERR_REJECTED, ErrorKind::PeerLost, "still runs"),
            (UCS_ERR_ENDPOINT_TIMEOUT, ErrorKind::PeerLost, "still runs"),
            (UCS_ERR_FIRST_LINK_FAILURE, ErrorKind::PeerLost, "still runs"),
            (UCS_ERR_LAST_LINK_FAILURE, ErrorKind::PeerLost, "still runs"),
            (UCS_ERR_FIRST_ENDPOINT_FAILURE, ErrorKind::PeerLost, "still runs"),
            (UCS_ERR_LAST_ENDPOINT_FAILURE, ErrorKind::PeerLost, "still runs"),
            (UCS_ERR_TIMED_OUT, ErrorKind::PeerLost, "still runs"),
            (UCS_ERR_IO_ERROR, ErrorKind::PeerLost, "still runs"),
            (UCS_ERR_CANCELED, ErrorKind::PeerLost, "still runs"),
            (UCS_ERR_UNREACHABLE, ErrorKind::Unsupported, "UCX_TLS"),
            (UCS_ERR_UNSUPPORTED, ErrorKind::Unsupported, "table ucx"),
            (UCS_ERR_NO_DEVICE, ErrorKind::Unavailable, "ucx_info -d"),
            (UCS_ERR_INVALID_PARAM, ErrorKind::Invalid, "table ucx"),
            (UCS_ERR_NO_ELEM, ErrorKind::Invalid, "table ucx"),
            (UCS_ERR_NO_MEMORY, ErrorKind::Exhausted, "ulimit"),
            (UCS_ERR_NO_RESOURCE, ErrorKind::Exhausted, "ulimit"),
            (UCS_ERR_SHMEM_SEGMENT, ErrorKind::Exhausted, "/dev/shm"),
            (UCS_ERR_NO_MESSAGE, ErrorKind::Native, "UCX_LOG_LEVEL"),
            (UCS_ERR_INVALID_ADDR, ErrorKind::Native, "UCX_LOG_LEVEL"),
            (UCS_ERR_LAST, ErrorKind::Native, "UCX_LOG_LEVEL"),
            (-90, ErrorKind::Native, "UCX_LOG_LEVEL"),
            (UCS_INPROGRESS, ErrorKind::Native, "UCX_LOG_LEVEL"),
        ] {
            let error = native("a trial", Status(status));
            assert_eq!(error.kind(), kind, "{status}");
            assert!(
                error.sentence().starts_with("a trial: ") && error.sentence().contains(cure),
                "{error}"
            );
            assert_eq!(error.native().map(|native| native.code), Some(i64::from(status)));
            assert_eq!(error.backend(), Some("UCX"));
        }
    }
}
