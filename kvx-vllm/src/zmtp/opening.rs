//! The first bytes of a connection: both ends send a greeting and a READY.

use super::{Command, GREETING, Input, Result, SocketType, greeting, malformed};
use crate::{DecodeError, DecodeErrorKind};

/// The socket at the other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerSocket {
    /// Its type.
    pub kind: SocketType,
    /// The identity that it asks for; empty for none.
    pub identity: Vec<u8>,
}

/// Returns the greeting and the READY of a socket. Both may be sent together: with the NULL
/// mechanism READY does not depend on the peer's greeting.
pub fn opening(kind: SocketType) -> Vec<u8> {
    let mut out = Vec::with_capacity(2 * GREETING);
    out.extend(greeting());
    Command::Ready { kind: Some(kind), identity: Vec::new() }.put(&mut out);
    out
}

/// Checks the first input after the peer's greeting, which must be a READY that a socket of this
/// type can talk to.
///
/// # Errors
///
/// `Unsupported`: the sockets do not fit; `Refused`: the peer rejects the connection; `Malformed`.
pub fn check_ready(own: SocketType, input: Input) -> Result<PeerSocket> {
    match input {
        Input::Command(Command::Ready { kind: Some(kind), identity }) if own.speaks_with(kind) => {
            Ok(PeerSocket { kind, identity })
        }
        Input::Command(Command::Ready { kind, .. }) => Err(DecodeError::new(
            DecodeErrorKind::Unsupported,
            format!(
                "the other end is a {}, which does not talk to a {}; check host and port",
                kind.map_or("socket of another type", SocketType::as_str),
                own.as_str()
            ),
        )),
        Input::Command(Command::Error(why)) => Err(DecodeError::new(
            DecodeErrorKind::Refused,
            format!("the other end refused the connection: {why:?}"),
        )),
        Input::Command(_) | Input::Message(_) => Err(malformed("READY has to come first")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zmtp::{Budget, Decoder, MessageLimits};

    #[test]
    fn an_opening_is_accepted_by_the_sockets_that_fit() {
        let checked = |peer, own| {
            let mut decoder =
                Decoder::new(MessageLimits { frames: 1, bytes: 1 }, &Budget::new(1000));
            let opening = opening(peer);
            let input = decoder.next(&mut &opening[GREETING..]).unwrap().unwrap();
            check_ready(own, input)
        };
        let peer = checked(SocketType::Pub, SocketType::Sub).unwrap();
        assert_eq!(peer, PeerSocket { kind: SocketType::Pub, identity: Vec::new() });
        let error = checked(SocketType::Router, SocketType::Sub).unwrap_err();
        assert_eq!(error.kind(), DecodeErrorKind::Unsupported);
        assert!(error.to_string().contains("a ROUTER, which does not talk to a SUB"), "{error}");
    }

    #[test]
    fn anything_but_ready_is_an_error() {
        let kind = |input| check_ready(SocketType::Sub, input).unwrap_err().kind();
        let ready = Command::Ready { kind: None, identity: Vec::new() };
        assert_eq!(kind(Input::Command(ready)), DecodeErrorKind::Unsupported);
        let refused = Command::Error("no".to_owned());
        assert_eq!(kind(Input::Command(refused)), DecodeErrorKind::Refused);
        let ping = Command::Ping { context: Vec::new() };
        assert_eq!(kind(Input::Command(ping)), DecodeErrorKind::Malformed);
    }
}
