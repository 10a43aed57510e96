//! What is sealed on a lane whose handshake is done: frames, and payload too if the ends want that.
//!
//! A header is sealed on its own. What follows it is a stretch: records of [`RECORD`] bytes, the last one shorter, each
//! with its tag. The messages of one direction are numbered, and none of them says its number: one that was altered,
//! left out, repeated or moved is not what the other end expects, and ends the connection.

use std::fmt;

use kvx_core::{Error, Kind, Result};
use snow::HandshakeState;
use snow::types::Cipher as _;

use super::noise::{AesGcm, TAG};

/// Payload of a record: with its tag it is 16 KiB.
pub(super) const RECORD: usize = (16 << 10) - TAG;
/// Messages by one key, then both ends take the next one. That is 16 GiB at most, far below the bounds of AES-GCM.
const ONE_KEY: u64 = 1 << 20;

/// How much of what follows a handshake is sealed: `tcp.seal`. The stricter of both ends' wishes counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Seal {
    None,
    Control,
    All,
}

impl Seal {
    /// All of them, as options name them.
    pub(super) const NAMED: [(&str, Seal); 3] =
        [("none", Seal::None), ("control", Seal::Control), ("all", Seal::All)];

    /// As it travels.
    pub(super) fn number(self) -> u8 {
        self as u8
    }

    /// Errors: `Malformed`.
    pub(super) fn of_number(number: u8) -> Result<Self> {
        let found = Self::NAMED.into_iter().find(|(_, seal)| seal.number() == number);
        found.map(|(_, seal)| seal).ok_or_else(|| {
            Error::new(
                Kind::Malformed,
                format!(
                    "malformed handshake: nothing is sealed in way {number}; bring both ends to one release"
                ),
            )
        })
    }
}

impl fmt::Display for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Seal::None => "nothing is sealed",
            Seal::Control => "control is sealed, payload is not",
            Seal::All => "everything is sealed",
        })
    }
}

/// Both directions of a lane, as its handshake gives them.
pub(super) struct Seals {
    pub(super) sealer: Sealer,
    pub(super) opener: Opener,
}

impl Seals {
    /// Of a handshake that is done.
    pub(super) fn of(noise: &mut HandshakeState) -> Self {
        debug_assert!(noise.is_handshake_finished(), "its keys are not made by both ends yet");
        let is_initiator = noise.is_initiator();
        let (to_owner, to_initiator) = noise.dangerously_get_raw_split();
        let (ours, theirs) = if is_initiator { (to_owner, to_initiator) } else { (to_initiator, to_owner) };
        Seals { sealer: Sealer(Direction::of(&ours)), opener: Opener(Direction::of(&theirs)) }
    }
}

/// The messages of one direction.
struct Direction {
    cipher: AesGcm,
    /// Of the next message.
    number: u64,
}

impl Direction {
    fn of(key: &[u8; 32]) -> Self {
        Direction { cipher: AesGcm::new(key), number: 0 }
    }

    /// The number of the next message, by whose key it goes.
    fn next(&mut self) -> u64 {
        if self.number == ONE_KEY {
            self.cipher.rekey();
            self.number = 0;
        }
        self.number += 1;
        self.number - 1
    }
}

/// Seals what goes out.
pub(super) struct Sealer(Direction);

impl Sealer {
    /// Seals the last `len` bytes of `out`, at most a record, and appends the tag.
    pub(super) fn seal_end(&mut self, len: usize, out: &mut Vec<u8>) {
        let (number, at) = (self.0.next(), out.len() - len);
        let tag = self.0.cipher.seal(number, &[], (&mut out[at..]).into());
        out.extend_from_slice(&tag);
    }

    /// Seals a stretch.
    pub(super) fn seal(&mut self, stretch: &[u8], out: &mut Vec<u8>) {
        for record in stretch.chunks(RECORD) {
            out.extend_from_slice(record);
            self.seal_end(record.len(), out);
        }
    }

    /// The message that was sealed last has not left, and never will: the next one goes by its number.
    pub(super) fn take_back(&mut self) {
        self.0.number -= 1;
    }
}

/// Opens what comes in.
pub(super) struct Opener(Direction);

impl Opener {
    /// Opens a message that lies before its tag, where it lies. Errors: `Malformed`.
    pub(super) fn open(&mut self, message: &mut [u8]) -> Result<()> {
        let number = self.0.next();
        let is_whole = message
            .split_last_chunk_mut()
            .is_some_and(|(message, tag)| self.0.cipher.open(number, &[], message.into(), tag));
        let why = "what the peer sent was altered, lost or repeated on its way, so the connection was closed: find out \
                   who is between the two hosts";
        if is_whole { Ok(()) } else { Err(Error::new(Kind::Malformed, why)) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fuzz::seals;
    use super::*;

    #[test]
    fn messages_are_opened_in_their_order_and_in_their_direction_only() {
        let (mut ours, mut theirs) = seals();
        let mut seal = |text: &[u8]| {
            let mut sealed = Vec::new();
            ours.sealer.seal(text, &mut sealed);
            sealed
        };
        let (first, second, third) = (seal(b"first"), seal(b"second"), seal(b"third"));
        assert!(ours.opener.open(&mut first.clone()).is_err(), "its own words come back");
        let mut again = first.clone();
        theirs.opener.open(&mut again).unwrap();
        assert_eq!(again[..5], *b"first");
        theirs.opener.open(&mut second.clone()).unwrap();
        // Each of these is an end for the connection: what comes behind it is not opened either.
        assert_eq!(theirs.opener.open(&mut second.clone()).unwrap_err().kind(), Kind::Malformed, "repeated");
        assert!(theirs.opener.open(&mut third.clone()).is_err());
    }

    #[test]
    fn what_was_taken_back_is_not_missed() {
        let (mut ours, mut theirs) = seals();
        let mut sealed = Vec::new();
        ours.sealer.seal(b"never sent", &mut sealed);
        ours.sealer.take_back();
        sealed.clear();
        ours.sealer.seal(b"sent", &mut sealed);
        theirs.opener.open(&mut sealed).unwrap();
    }

    #[test]
    fn keys_change_at_both_ends_at_once() {
        let (mut ours, mut theirs) = seals();
        let mut pass = |at: Option<u64>| {
            if let Some(at) = at {
                (ours.sealer.0.number, theirs.opener.0.number) = (at, at);
            }
            let mut sealed = Vec::new();
            ours.sealer.seal(b"the same", &mut sealed);
            theirs.opener.open(&mut sealed.clone()).unwrap();
            sealed
        };
        let (first, last) = (pass(None), pass(Some(ONE_KEY - 1)));
        let next = pass(None);
        assert!(next != first && next != last, "by the old key");
        assert_eq!(ours.sealer.0.number, 1);
    }

    #[test]
    fn the_stricter_wish_is_the_greater_one() {
        assert_eq!(Seal::None.max(Seal::Control).max(Seal::All), Seal::All);
        for (_, seal) in Seal::NAMED {
            assert_eq!(Seal::of_number(seal.number()).unwrap(), seal);
        }
        assert_eq!(Seal::of_number(3).unwrap_err().kind(), Kind::Malformed);
    }
}
