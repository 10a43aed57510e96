//! Reassembly of whole messages, in order, from frames that arrive in any order.
//!
//! Each link has two *sessions*, one on either side, with random numbers. A message is cut into
//! frames that the library delivers in any order. A frame names both sessions and its place in the
//! stream of its sender, from which the receiver restores the messages in the order in which they
//! were sent.

use std::collections::{BTreeMap, VecDeque};

use kvx_core::backend::MAX_NAME;
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{Error, ErrorKind, Result};

use crate::control::{ENTRY_OVERHEAD, MAX_MESSAGE};

/// The limit in bytes for a library's address.
pub(super) const MAX_ADDRESS: usize = 1 << 20;
/// The limit in bytes for the first message, a hello.
const MAX_FIRST_MESSAGE: usize = MAX_ADDRESS + 4 * MAX_NAME;

/// The limit for frames that arrive ahead of a missing one.
const MAX_EARLY: usize = 1024;
/// The limit in bytes for frames that arrive ahead of a missing one.
const MAX_EARLY_BYTES: usize = 4 << 20;

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrameHeader {
    /// The receiver's session; 0 in a hello, whose sender does not know it yet.
    pub(super) to: u64,
    /// The sender's session.
    pub(super) from: u64,
    /// The index of the frame in its sender's stream.
    pub(super) place: u32,
    /// True if the message continues in the next frame.
    pub(super) more: bool,
}

impl FrameHeader {
    pub(super) const LEN: usize = 1 + 8 + 8 + 4 + 1;
    const VERSION: u8 = 1;

    pub(super) fn frame(&self, part: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::LEN + part.len());
        out.put_u8(Self::VERSION);
        out.put_u64(self.to);
        out.put_u64(self.from);
        out.put_u32(self.place);
        out.put_u8(u8::from(self.more));
        out.put(part);
        out
    }

    /// Splits a frame into its header and its part of the message. Returns `Malformed` for an
    /// invalid one.
    pub(super) fn read(frame: &[u8]) -> Result<(Self, &[u8])> {
        let mut reader = Reader::new("link frame", frame);
        let version = reader.u8()?;
        if version != Self::VERSION {
            return Err(reader.malformed(format_args!("unknown frame version {version}")));
        }
        let (to, from, place) = (reader.u64()?, reader.u64()?, reader.u32()?);
        let more = match reader.u8()? {
            0 => false,
            1 => true,
            other => {
                return Err(
                    reader.malformed(format_args!("{other} is not a valid continuation flag"))
                );
            }
        };
        Ok((FrameHeader { to, from, place, more }, reader.bytes(reader.left())?))
    }
}

/// The sending half: numbers frames and keeps those that the library has not taken.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    place: u32,
    queue: VecDeque<Vec<u8>>,
    bytes: usize,
}

impl Outgoing {
    /// Cuts a message into frames of at most `max` bytes and queues them.
    pub(super) fn push(&mut self, to: u64, from: u64, message: &[u8], max: usize) {
        let part = max.saturating_sub(FrameHeader::LEN).max(1);
        let mut parts = message.chunks(part).peekable();
        while let Some(part) = parts.next() {
            let header = FrameHeader { to, from, place: self.place, more: parts.peek().is_some() };
            self.place = self.place.wrapping_add(1);
            let frame = header.frame(part);
            self.bytes += frame.len() + ENTRY_OVERHEAD;
            self.queue.push_back(frame);
        }
    }

    /// Returns the next frame to send.
    pub(super) fn front(&self) -> Option<&[u8]> {
        self.queue.front().map(Vec::as_slice)
    }

    /// Removes the frame that was sent.
    pub(super) fn pop(&mut self) {
        self.bytes -= self.queue.pop_front().map_or(0, |frame| frame.len() + ENTRY_OVERHEAD);
    }

    /// Returns the number of waiting frames.
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Returns the bytes of memory that the queued frames take.
    pub(super) fn held(&self) -> usize {
        self.bytes
    }

    /// Drops all unsent frames.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.bytes = 0;
    }
}

/// The receiving half: restores the order of frames and assembles messages.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    place: u32,
    early: BTreeMap<u32, (bool, Box<[u8]>)>,
    early_bytes: usize,
    partial: Vec<u8>,
    /// True once the first message is complete. That one may be longer than the others.
    begun: bool,
}

impl Incoming {
    /// Takes a frame. Returns the messages that it completes, in order. Returns `Malformed` for
    /// frames that no conforming peer sends.
    pub(super) fn take(&mut self, header: &FrameHeader, part: &[u8]) -> Result<Vec<Vec<u8>>> {
        let ahead = header.place.wrapping_sub(self.place);
        if ahead > u32::MAX / 2 {
            return Ok(Vec::new()); // expected: the library delivered it twice
        }
        if ahead > 0 {
            let new = !self.early.contains_key(&header.place);
            if new {
                if self.early.len() >= MAX_EARLY || self.early_bytes + part.len() > MAX_EARLY_BYTES
                {
                    return Err(malformed("too many frames arrived ahead of a missing one"));
                }
                self.early_bytes += part.len();
                self.early.insert(header.place, (header.more, part.into()));
            }
            return Ok(Vec::new());
        }
        let mut whole = Vec::new();
        self.next(header.more, part, &mut whole)?;
        while let Some((more, part)) = self.early.remove(&self.place) {
            self.early_bytes -= part.len();
            self.next(more, &part, &mut whole)?;
        }
        Ok(whole)
    }

    /// Returns the bytes of memory that early frames and the unfinished message take.
    pub(super) fn held(&self) -> usize {
        self.early_bytes + self.early.len() * ENTRY_OVERHEAD + self.partial.capacity()
    }

    fn next(&mut self, more: bool, part: &[u8], whole: &mut Vec<Vec<u8>>) -> Result<()> {
        self.place = self.place.wrapping_add(1);
        let max = if self.begun { MAX_MESSAGE } else { MAX_FIRST_MESSAGE };
        if self.partial.len() + part.len() > max {
            return Err(malformed("a message is too long"));
        }
        self.partial.extend_from_slice(part);
        if !more {
            self.begun = true;
            whole.push(std::mem::take(&mut self.partial));
        }
        Ok(())
    }
}

fn malformed(why: &'static str) -> Error {
    ErrorKind::Malformed.because(format!("malformed link frame: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(messages: &[Vec<u8>], max: usize) -> Vec<Vec<u8>> {
        let mut out = Outgoing::default();
        for message in messages {
            out.push(1, 2, message, max);
        }
        let mut frames = Vec::new();
        while let Some(frame) = out.front() {
            frames.push(frame.to_vec());
            out.pop();
        }
        frames
    }

    #[test]
    fn frames_round_trip() {
        let header = FrameHeader { to: 1, from: u64::MAX, place: 3, more: true };
        let frame = header.frame(b"part");
        assert_eq!(FrameHeader::read(&frame).unwrap(), (header, &b"part"[..]));
        assert!(FrameHeader::read(&frame[..FrameHeader::LEN - 1]).is_err());
        assert!(FrameHeader::read(&[&[9], &frame[1..]].concat()).is_err());
    }

    fn take(incoming: &mut Incoming, frame: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (header, part) = FrameHeader::read(frame).unwrap();
        incoming.take(&header, part)
    }

    #[test]
    fn messages_are_whole_and_in_order_for_any_order_of_frames() {
        let messages: Vec<Vec<u8>> = (1..40).map(|n| vec![n as u8; n * 7]).collect();
        let mut frames = frames(&messages, FrameHeader::LEN + 16);
        let mut seed = 7_u64;
        for at in (1..frames.len()).rev() {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            frames.swap(at, (seed >> 33) as usize % (at + 1));
        }
        let mut incoming = Incoming::default();
        let mut whole = Vec::new();
        for frame in &frames {
            whole.extend(take(&mut incoming, frame).unwrap());
            assert!(
                take(&mut incoming, frame).unwrap().is_empty(),
                "a repeated frame completes no message"
            );
        }
        assert_eq!(whole, messages);
    }

    #[test]
    fn memory_for_a_peers_frames_is_bounded() {
        let mut incoming = Incoming::default();
        let header = |place| FrameHeader { to: 1, from: 2, place, more: false };
        let kept = (1..=MAX_EARLY as u32).all(|place| incoming.take(&header(place), b"x").is_ok());
        assert!(kept);
        assert!(incoming.take(&header(MAX_EARLY as u32 + 1), b"x").is_err());
        let mut incoming = Incoming::default();
        let long = vec![0; 1 << 20];
        let more = |place| FrameHeader { more: true, ..header(place) };
        let refused = (0..8).any(|place| incoming.take(&more(place), &long).is_err());
        assert!(refused, "an endless message is rejected");
    }

    #[test]
    fn an_empty_message_cannot_be_sent_and_frame_numbers_wrap_around() {
        let mut out = Outgoing { place: u32::MAX, ..Outgoing::default() };
        out.push(1, 2, b"ab", FrameHeader::LEN + 1);
        assert_eq!(out.len(), 2);
        let mut incoming = Incoming { place: u32::MAX, ..Incoming::default() };
        assert!(take(&mut incoming, &out.queue[1]).unwrap().is_empty());
        assert_eq!(take(&mut incoming, &out.queue[0]).unwrap(), [b"ab".to_vec()]);
    }
}
