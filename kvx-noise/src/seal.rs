//! Sealed messages after a handshake, numbered in each direction. The numbers are not sent.

use std::fmt;

use kvx_core::{ErrorKind, Result};
use snow::types::Cipher as _;

use crate::handshake::{AesGcm, KEY, TAG};

/// The maximum number of bytes of a message; with its tag it is 16 KiB.
pub const RECORD: usize = (16 << 10) - TAG;
/// The number of bytes of the length before a sealed piece of a stream.
const LENGTH: usize = 2;
/// The number of messages per key, after which both ends derive the next key. That is at most 16
/// GiB, far below the limits of AES-GCM.
const ONE_KEY: u64 = 1 << 20;

/// The two directions of a connection after its handshake.
pub struct Seals {
    /// Seals this end's messages.
    pub sealer: Sealer,
    /// Opens the other end's messages.
    pub opener: Opener,
}

impl Seals {
    pub(crate) fn of(ours: &[u8; KEY], theirs: &[u8; KEY]) -> Self {
        Seals { sealer: Sealer(Direction::of(ours)), opener: Opener(Direction::of(theirs)) }
    }
}

impl fmt::Debug for Seals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Seals")
    }
}

/// The messages of one direction.
struct Direction {
    cipher: AesGcm,
    /// The number of the next message.
    number: u64,
}

impl Direction {
    fn of(key: &[u8; KEY]) -> Self {
        Direction { cipher: AesGcm::new(key), number: 0 }
    }

    /// Returns the number of the next message, after changing the key if necessary.
    fn next(&mut self) -> u64 {
        if self.number == ONE_KEY {
            self.cipher.rekey();
            self.number = 0;
        }
        self.number += 1;
        self.number - 1
    }
}

/// Seals outgoing messages.
pub struct Sealer(Direction);

impl Sealer {
    /// Seals the last `len` bytes of `out`, at most a record, and appends the tag.
    pub fn seal_end(&mut self, len: usize, out: &mut Vec<u8>) {
        let (number, at) = (self.0.next(), out.len() - len);
        let tag = self.0.cipher.seal(number, &[], (&mut out[at..]).into());
        out.extend_from_slice(&tag);
    }

    /// Seals a byte range.
    pub fn seal(&mut self, stretch: &[u8], out: &mut Vec<u8>) {
        for record in stretch.chunks(RECORD) {
            out.extend_from_slice(record);
            self.seal_end(record.len(), out);
        }
    }

    /// Seals bytes of a stream, in pieces of at most a record, each with its length in front.
    pub fn seal_stream(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        for piece in bytes.chunks(RECORD) {
            let length = u16::try_from(piece.len() + TAG).expect("a record is shorter than 64 KiB");
            out.extend_from_slice(&length.to_be_bytes());
            self.seal(piece, out);
        }
    }

    #[cfg(test)]
    pub(crate) fn rekey_for_test(&mut self) {
        self.0.cipher.rekey();
    }

    /// Reuses the number of the last sealed message for the next one, because the message was not
    /// sent and never will be.
    pub fn take_back(&mut self) {
        self.0.number -= 1;
    }
}

/// Opens incoming messages.
pub struct Opener(Direction);

impl Opener {
    /// Opens a message in place; its tag follows it. Errors: `Malformed`.
    pub fn open(&mut self, message: &mut [u8]) -> Result<()> {
        let number = self.0.next();
        let is_whole = message
            .split_last_chunk_mut()
            .is_some_and(|(message, tag)| self.0.cipher.open(number, &[], message.into(), tag));
        let why = "what the peer sent was altered, lost or repeated on its way, so the connection was closed: find out \
                   who is between the two hosts";
        if is_whole { Ok(()) } else { Err(ErrorKind::Malformed.because(why)) }
    }

    /// Opens the complete pieces of a stream: appends their contents to `out`, and leaves the rest
    /// in `sealed`. Errors: `Malformed`.
    pub fn open_stream(&mut self, sealed: &mut Vec<u8>, out: &mut Vec<u8>) -> Result<()> {
        let mut opened = 0;
        while let Some((length, rest)) = sealed[opened..].split_first_chunk_mut::<LENGTH>() {
            let length = usize::from(u16::from_be_bytes(*length));
            if !(TAG..=RECORD + TAG).contains(&length) {
                let most = RECORD + TAG;
                let why = format!("a sealed piece has {length} bytes, but the limit is {most}");
                return Err(ErrorKind::Malformed.because(why));
            }
            let Some(piece) = rest.get_mut(..length) else { break };
            self.open(piece)?;
            out.extend_from_slice(&piece[..length - TAG]);
            opened += LENGTH + length;
        }
        sealed.drain(..opened);
        Ok(())
    }
}

#[cfg(test)]
mod exhaustive;
#[cfg(test)]
mod tests {
    use super::*;
    use crate::NoiseHandshake;

    /// Returns both ends after a handshake.
    fn seals() -> (Seals, Seals) {
        let mut initiator = NoiseHandshake::initiator(&[1; KEY], &[]).unwrap();
        let mut responder = NoiseHandshake::responder(&[1; KEY], &[]).unwrap();
        let mut said = Vec::new();
        initiator.write(&[], &mut said).unwrap();
        responder.read(&said).unwrap();
        said.clear();
        responder.write(&[], &mut said).unwrap();
        initiator.read(&said).unwrap();
        (initiator.seals(), responder.seals())
    }

    #[test]
    fn messages_are_opened_in_their_order_and_in_their_direction_only() {
        let (mut ours, mut theirs) = seals();
        let mut seal = |text: &[u8]| {
            let mut sealed = Vec::new();
            ours.sealer.seal(text, &mut sealed);
            sealed
        };
        let (first, second, third) = (seal(b"first"), seal(b"second"), seal(b"third"));
        assert!(ours.opener.open(&mut first.clone()).is_err(), "its own message is reflected");
        let mut again = first.clone();
        theirs.opener.open(&mut again).unwrap();
        assert_eq!(again[..5], *b"first");
        theirs.opener.open(&mut second.clone()).unwrap();
        // Each of these ends the connection: later messages are not opened either.
        assert_eq!(
            theirs.opener.open(&mut second.clone()).unwrap_err().kind(),
            ErrorKind::Malformed,
            "repeated"
        );
        assert!(theirs.opener.open(&mut third.clone()).is_err());
    }

    #[test]
    fn a_stream_is_opened_as_it_arrives() {
        let (mut ours, mut theirs) = seals();
        let said: Vec<u8> = (0..2 * RECORD + 5).map(|at| at as u8).collect();
        let mut sealed = Vec::new();
        ours.sealer.seal_stream(&said, &mut sealed);
        let (mut coming, mut heard) = (Vec::new(), Vec::new());
        for bytes in sealed.chunks(4999) {
            coming.extend_from_slice(bytes);
            theirs.opener.open_stream(&mut coming, &mut heard).unwrap();
        }
        assert!(heard == said && coming.is_empty());
        for wrong in [vec![0, 15], vec![0x40, 1], [&[0, 20][..], &[0; 20]].concat()] {
            let error = theirs.opener.open_stream(&mut wrong.clone(), &mut heard).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Malformed, "{wrong:?}");
        }
    }

    #[test]
    fn a_message_that_was_taken_back_leaves_no_gap() {
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
        assert!(next != first && next != last, "with the old key");
        assert_eq!(ours.sealer.0.number, 1);
    }
}
