//! UCX's status codes as kvx's errors.

use std::fmt::Display;
use std::ops::RangeInclusive;

use kvx_core::{Error, Kind};

use crate::ffi::Status;
use crate::ffi::bindings_1_13::*;

/// The backend's name.
pub(crate) const NAME: &str = "UCX";

const GONE: &str = "check whether the peer still runs, and the network to it";
const SCARCE: &str =
    "raise the limits of this process (ulimit -l, -n; /dev/shm) or transfer less at once";
const CONFIGURED: &str = "check the options of the table ucx and the variables UCX_*; UCX_LOG_LEVEL=info says what UCX has found";
const UNKNOWN: &str = "UCX_LOG_LEVEL=info makes UCX say more";

/// The meaning of a status, and what to do next. The first row that holds it counts.
const ROWS: &[(RangeInclusive<ucs_status_t>, Kind, &str)] = &[
    // Ranges that UCX reserves: a broken link, an endpoint whose peer has failed.
    (UCS_ERR_LAST_LINK_FAILURE..=UCS_ERR_FIRST_LINK_FAILURE, Kind::PeerLost, GONE),
    (UCS_ERR_LAST_ENDPOINT_FAILURE..=UCS_ERR_FIRST_ENDPOINT_FAILURE, Kind::PeerLost, GONE),
    (UCS_ERR_CONNECTION_RESET..=UCS_ERR_REJECTED, Kind::PeerLost, GONE),
    (UCS_ERR_TIMED_OUT..=UCS_ERR_TIMED_OUT, Kind::PeerLost, GONE),
    // A read of a process that has ended.
    (UCS_ERR_IO_ERROR..=UCS_ERR_IO_ERROR, Kind::PeerLost, GONE),
    // kvx cancels nothing in UCX: the endpoint was closed under the operation, as it failed.
    (UCS_ERR_CANCELED..=UCS_ERR_CANCELED, Kind::PeerLost, GONE),
    (
        UCS_ERR_UNREACHABLE..=UCS_ERR_UNREACHABLE,
        Kind::Unsupported,
        "both ends need a transport in common that notices the end of its peer: tcp, an RDMA card's, or sm with \
         UCX_MM_ERROR_HANDLING=y; check UCX_TLS and UCX_NET_DEVICES on both",
    ),
    (UCS_ERR_NOT_IMPLEMENTED..=UCS_ERR_NOT_IMPLEMENTED, Kind::Unsupported, CONFIGURED),
    (UCS_ERR_UNSUPPORTED..=UCS_ERR_UNSUPPORTED, Kind::Unsupported, CONFIGURED),
    (
        UCS_ERR_NO_DEVICE..=UCS_ERR_NO_DEVICE,
        Kind::Unavailable,
        "no device of this machine fits the options of the table ucx and the variables UCX_*: `ucx_info -d` lists what \
         there is",
    ),
    (UCS_ERR_NO_ELEM..=UCS_ERR_NO_ELEM, Kind::Invalid, CONFIGURED),
    (UCS_ERR_INVALID_PARAM..=UCS_ERR_INVALID_PARAM, Kind::Invalid, CONFIGURED),
    (UCS_ERR_NO_MEMORY..=UCS_ERR_NO_MEMORY, Kind::Exhausted, SCARCE),
    (UCS_ERR_NO_RESOURCE..=UCS_ERR_NO_RESOURCE, Kind::Exhausted, SCARCE),
    (UCS_ERR_SHMEM_SEGMENT..=UCS_ERR_SHMEM_SEGMENT, Kind::Exhausted, SCARCE),
    (UCS_ERR_EXCEEDS_LIMIT..=UCS_ERR_EXCEEDS_LIMIT, Kind::Exhausted, SCARCE),
    (ucs_status_t::MIN..=ucs_status_t::MAX, Kind::Native, UNKNOWN),
];

/// What tells more.
const SAYS_WHICH: &str = "UCX_LOG_LEVEL=info says which";

/// The error for UCX's answer to `what`, with what to do next, UCX's code and its words.
pub(crate) fn native(what: impl Display, status: Status) -> Error {
    let row = ROWS.iter().find(|(statuses, ..)| statuses.contains(&status.0));
    let (_, kind, cure) = row.expect("the last row holds every status");
    Error::new(*kind, format!("{what}: {cure}"))
        .backend(NAME)
        .native(i64::from(status.0), status.text())
}

/// Why there is no worker: no peer has part in that, whatever UCX's answer is to mean elsewhere.
pub(crate) fn of_worker(status: Status) -> Error {
    const WHAT: &str = "UCX gives no worker";
    let error = native(WHAT, status);
    match error.kind() {
        Kind::PeerLost => {
            let why = format!(
                "{WHAT}: raise the limits of open files (ulimit -n) and of memory; {SAYS_WHICH}"
            );
            Error::new(Kind::Exhausted, why)
                .backend(NAME)
                .native(i64::from(status.0), status.text())
        }
        _ => error,
    }
}

/// Why a piece of a transfer has failed.
pub(crate) fn of_piece(status: Status) -> Error {
    let error = native("UCX could not move a piece of the transfer", status);
    match error.kind() {
        // So it says also when the peer's memory is gone with the peer.
        Kind::Exhausted => {
            let why = format!(
                "UCX could not move a piece of the transfer: check whether the peer still runs; if it does, {SCARCE}"
            );
            Error::new(Kind::Exhausted, why)
                .backend(NAME)
                .native(i64::from(status.0), status.text())
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_there_is_none_of_is_no_peers_fault() {
        let error = of_worker(Status(-3));
        assert_eq!(error.kind(), Kind::Exhausted);
        assert!(error.sentence().contains("ulimit -n"), "{error}");
        assert_eq!(
            native("", Status(-3)).kind(),
            Kind::PeerLost,
            "else nothing is told apart here"
        );
    }

    #[test]
    fn each_status_has_its_kind_and_a_cure() {
        for (status, kind, cure) in [
            (UCS_ERR_CONNECTION_RESET, Kind::PeerLost, "still runs"),
            (UCS_ERR_NOT_CONNECTED, Kind::PeerLost, "still runs"),
            (UCS_ERR_REJECTED, Kind::PeerLost, "still runs"),
            (UCS_ERR_ENDPOINT_TIMEOUT, Kind::PeerLost, "still runs"),
            (UCS_ERR_FIRST_LINK_FAILURE, Kind::PeerLost, "still runs"),
            (UCS_ERR_LAST_LINK_FAILURE, Kind::PeerLost, "still runs"),
            (UCS_ERR_FIRST_ENDPOINT_FAILURE, Kind::PeerLost, "still runs"),
            (UCS_ERR_LAST_ENDPOINT_FAILURE, Kind::PeerLost, "still runs"),
            (UCS_ERR_TIMED_OUT, Kind::PeerLost, "still runs"),
            (UCS_ERR_IO_ERROR, Kind::PeerLost, "still runs"),
            (UCS_ERR_CANCELED, Kind::PeerLost, "still runs"),
            (UCS_ERR_UNREACHABLE, Kind::Unsupported, "UCX_TLS"),
            (UCS_ERR_UNSUPPORTED, Kind::Unsupported, "table ucx"),
            (UCS_ERR_NO_DEVICE, Kind::Unavailable, "ucx_info -d"),
            (UCS_ERR_INVALID_PARAM, Kind::Invalid, "table ucx"),
            (UCS_ERR_NO_ELEM, Kind::Invalid, "table ucx"),
            (UCS_ERR_NO_MEMORY, Kind::Exhausted, "ulimit"),
            (UCS_ERR_NO_RESOURCE, Kind::Exhausted, "ulimit"),
            (UCS_ERR_SHMEM_SEGMENT, Kind::Exhausted, "/dev/shm"),
            (UCS_ERR_NO_MESSAGE, Kind::Native, "UCX_LOG_LEVEL"),
            (UCS_ERR_INVALID_ADDR, Kind::Native, "UCX_LOG_LEVEL"),
            (UCS_ERR_LAST, Kind::Native, "UCX_LOG_LEVEL"),
            (-90, Kind::Native, "UCX_LOG_LEVEL"),
            (UCS_INPROGRESS, Kind::Native, "UCX_LOG_LEVEL"),
        ] {
            let error = native("a trial", Status(status));
            assert_eq!(error.kind(), kind, "{status}");
            assert!(
                error.sentence().starts_with("a trial: ") && error.sentence().contains(cure),
                "{error}"
            );
            assert_eq!(error.native_detail().map(|native| native.code), Some(i64::from(status)));
            assert_eq!(error.failed_backend(), Some("UCX"));
        }
    }

    #[test]
    fn no_row_is_out_of_reach() {
        for (at, (statuses, ..)) in ROWS.iter().enumerate() {
            let first =
                |status: ucs_status_t| ROWS.iter().position(|(row, ..)| row.contains(&status));
            assert!(statuses.clone().any(|status| first(status) == Some(at)), "{statuses:?}");
        }
    }
}
