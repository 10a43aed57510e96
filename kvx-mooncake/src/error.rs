//! Maps the engine's error codes to kvx's errors.

use kvx_core::{Error, ErrorKind};

/// The backend's name.
pub(crate) const NAME: &str = "MOONCAKE";

/// The engine's error codes: calls return the code or its negative.
const CODES: &[(i32, ErrorKind, &str)] = &[
    (1, ErrorKind::Invalid, "invalid argument"),
    (2, ErrorKind::Exhausted, "too many requests for the batch"),
    (3, ErrorKind::Unregistered, "the address is not registered"),
    (4, ErrorKind::Busy, "the batch is busy"),
    (6, ErrorKind::Unavailable, "no such device"),
    (7, ErrorKind::Overlap, "the address range overlaps memory that is registered already"),
    (8, ErrorKind::Unsupported, "no transport serves the peer's segment"),
    (101, ErrorKind::PeerLost, "the peer's name does not resolve"),
    (
        102,
        ErrorKind::PeerLost,
        "the socket failed: no process listens there, or it does not answer",
    ),
    (103, ErrorKind::Malformed, "malformed JSON"),
    (104, ErrorKind::PeerLost, "the peer rejected the handshake"),
    (200, ErrorKind::PeerLost, "the peer's metadata could not be fetched"),
    (201, ErrorKind::Native, "the endpoint failed"),
    (202, ErrorKind::Native, "the device's context failed"),
    (300, ErrorKind::Native, "a NUMA call failed"),
    (301, ErrorKind::Native, "a clock call failed"),
    (302, ErrorKind::Exhausted, "out of memory"),
    (303, ErrorKind::Unsupported, "not implemented"),
    (999, ErrorKind::Unsupported, "not implemented"),
];

/// Returns the error for a call's result; `said` is the engine's own message.
pub(crate) fn of_code(doing: &str, code: i32, said: Option<String>) -> Error {
    let known = CODES.iter().find(|(known, ..)| Some(*known) == code.checked_abs());
    let (kind, text) =
        known.map_or((ErrorKind::Native, "an unknown error"), |(_, kind, text)| (*kind, text));
    let text = said.map_or_else(|| text.to_owned(), |said| format!("{text}: {said}"));
    Error::new(kind, format!("Mooncake failed in {doing}; its log on standard error may say more"))
        .with_native(i64::from(code), text)
}

/// Returns whether `submitTransfer` returns this code before it passes anything to a transport.
pub(crate) fn is_before_start(code: i32) -> bool {
    matches!(code, 1 | 2 | 8)
}

/// Returns the code and text of a piece's state that is neither in progress nor completed.
pub(crate) fn of_state(state: i32) -> (i64, &'static str) {
    let text = match state {
        2 => "invalid",
        3 => "cancelled",
        5 => "timed out",
        6 => "failed",
        _ => "an unknown state",
    };
    (i64::from(state), text)
}

/// Returns the error for a peer at whose address no process listens.
pub(crate) fn lost(to: &str) -> Error {
    ErrorKind::PeerLost
        .because(format!("no process listens at {to} any more: connect again once the peer runs"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_signs_of_a_code_are_one_error_with_text() {
        for code in [-102, 102] {
            let error = of_code("sending", code, None);
            assert_eq!(error.kind(), ErrorKind::PeerLost);
            assert!(error.to_string().contains("socket"), "{error}");
        }
        assert_eq!(of_code("x", -303, None).kind(), of_code("x", 999, None).kind());
        assert_eq!(of_code("x", i32::MIN, None).kind(), ErrorKind::Native);
        assert!(of_code("x", 2, Some("batch of 3".into())).to_string().contains("batch of 3"));
    }
}
