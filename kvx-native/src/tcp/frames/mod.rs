//! The wire format.
//!
//! A link consists of one small lane and some bulk lanes: TCP connections that the initiator opens.
//! A lane carries frames in both directions. A frame is a header of 16 bytes and `len` bytes after
//! it; all numbers are little-endian:
//!
//! ```text
//! kind: u8 | zero: u8 | zero: u16 | len: u32 | id: u64
//!
//! initiator                                   owner
//! HELLO     versions; requested seal     ->
//!                                        <-   WELCOME    version; seal (or MISTAKEN, or REFUSE)
//! CONFIRM   identity, link and lane      ->
//!                                        <-   ENTERED
//! (everything after this is sealed as agreed)
//! READ id   described blocks             ->
//!                                        <-   DATA id …  (any number, together the blocks in order)
//!                                        <-   END id     (empty: success; otherwise a refusal)
//! WRITE id  described blocks             ->
//! DATA id … (together the blocks)        ->
//!                                        <-   END id     (after the last byte, or a refusal before)
//! STOP id                                ->              (no more DATA follows for this write)
//! CANCEL id lane                         ->              (small lane; END on the request's lane)
//! NOTIFY id payload                      ->
//!                                        <-   ACK id     (the agent has it)
//! PING                                   ->
//!                                        <-   ALIVE
//! ```
//!
//! HELLO, WELCOME and MISTAKEN carry messages of Noise (`auth`), CONFIRM and ENTERED the first
//! messages that are sealed with its keys. Later frames may be sealed too, which makes them longer
//! (`seal`). REFUSE is not authenticated.
//!
//! `described blocks` is [`Described`](crate::described::Described): regions with keys, grids, and
//! an index list. The payload of a DATA frame contains only bytes of those blocks; each end derives
//! their places from the description. The ids of a lane's requests increase, and each request is
//! answered by one END. A sender that must stop in the middle of a DATA frame fills it with zeros
//! or, if payload is sealed, with the bytes that it has already sealed; the following frame (STOP
//! or END) says that they do not count.
//!
//! CANCEL overtakes the DATA of its write, and may overtake the request: the owner does nothing
//! more for the request. An initiator that has cancelled a write begins nothing else on the link
//! before its END, so that a late piece of it never overwrites a later write.

pub(crate) mod auth;
pub(crate) mod input;
pub(crate) mod output;

use kvx_backend::control::Refusal;
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{Error, ErrorKind, Result, backend};

use crate::described;

/// The length of a header in bytes.
pub(crate) const HEADER: usize = 16;
/// The limit in bytes for a frame before both ends are authenticated.
pub(crate) const MAX_GREETING: usize = 1024;
/// The limit in bytes for the payload of a DATA frame.
pub(crate) const MAX_DATA: usize = 1 << 20;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Frame {
    Hello = 1,
    Welcome = 2,
    Confirm = 3,
    Entered = 4,
    /// Has the same number in every version, like `Hello`, to report that versions differ.
    Refuse = 5,
    Mistaken = 6,
    Read = 16,
    Write = 17,
    Data = 18,
    End = 19,
    Cancel = 20,
    Notify = 21,
    Ack = 22,
    Ping = 23,
    Alive = 24,
    Stop = 25,
}

impl Frame {
    const ALL: [Frame; 16] = [
        Frame::Hello,
        Frame::Welcome,
        Frame::Confirm,
        Frame::Entered,
        Frame::Refuse,
        Frame::Mistaken,
        Frame::Read,
        Frame::Write,
        Frame::Data,
        Frame::End,
        Frame::Cancel,
        Frame::Notify,
        Frame::Ack,
        Frame::Ping,
        Frame::Alive,
        Frame::Stop,
    ];

    /// Returns true if the frame belongs to the handshake.
    pub(crate) fn is_greeting(self) -> bool {
        (self as u8) < Frame::Read as u8
    }

    /// Returns the limit for the bytes after its header.
    fn max_len(self) -> usize {
        match self {
            Frame::Read | Frame::Write => described::MAX_BYTES,
            Frame::Data => MAX_DATA,
            Frame::End => Refusal::MAX_BYTES,
            Frame::Notify => backend::MAX_NOTIFICATION,
            Frame::Cancel => 1,
            Frame::Stop | Frame::Ack | Frame::Ping | Frame::Alive => 0,
            _ => MAX_GREETING,
        }
    }
}

/// A frame's first 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) frame: Frame,
    pub(crate) len: usize,
    pub(crate) id: u64,
}

impl Header {
    /// Decodes a header. The length is within the limit of its kind.
    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Result<Self> {
        let mut reader = Reader::new("frame header", bytes);
        let (kind, zero, zeros) = (reader.u8()?, reader.u8()?, reader.u16()?);
        let (len, id) = (reader.u32()? as usize, reader.u64()?);
        let Some(frame) = Frame::ALL.into_iter().find(|frame| *frame as u8 == kind) else {
            return Err(reader.malformed(format_args!("unknown frame kind {kind}")));
        };
        if zero != 0 || zeros != 0 {
            return Err(reader.malformed("reserved bytes are not zero"));
        }
        if len > frame.max_len() {
            let max = frame.max_len();
            return Err(reader.malformed(format_args!(
                "{frame:?} has {len} bytes, but at most {max} are allowed"
            )));
        }
        if frame.is_greeting() && id != 0 {
            return Err(reader.malformed(format_args!("{frame:?} must not have an id")));
        }
        if frame == Frame::Data && len == 0 {
            return Err(reader.malformed("Data has no bytes"));
        }
        Ok(Header { frame, len, id })
    }

    /// Returns the number of bytes after a local header, among frames without payload.
    pub(crate) fn body_len_of_own(head: &[u8; HEADER]) -> usize {
        let len = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
        if head[0] == Frame::Data as u8 { 0 } else { len as usize }
    }

    /// Encodes the header.
    pub(crate) fn encode(self, out: &mut Vec<u8>) {
        let mut bytes = [0; HEADER];
        bytes[0] = self.frame as u8;
        bytes[4..8].copy_from_slice(&(self.len as u32).to_le_bytes());
        bytes[8..].copy_from_slice(&self.id.to_le_bytes());
        out.extend_from_slice(&bytes);
    }
}

/// Appends a frame without a body.
pub(crate) fn put_bare(out: &mut Vec<u8>, frame: Frame, id: u64) {
    Header { frame, len: 0, id }.encode(out);
}

/// Appends a frame whose body `body` writes.
pub(crate) fn put_frame(out: &mut Vec<u8>, frame: Frame, id: u64, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    Header { frame, len: 0, id }.encode(out);
    body(out);
    let len = (out.len() - start - HEADER) as u32;
    out[start + 4..start + 8].copy_from_slice(&len.to_le_bytes());
}

/// Appends a CANCEL of a request that was sent on `lane`.
pub(crate) fn put_cancel(out: &mut Vec<u8>, id: u64, lane: u8) {
    put_frame(out, Frame::Cancel, id, |out| out.put_u8(lane));
}

/// Appends the END of a request.
pub(crate) fn put_end(out: &mut Vec<u8>, id: u64, result: Result<(), &Error>) {
    put_frame(out, Frame::End, id, |out| {
        if let Err(error) = result {
            Refusal::from(error).encode(out);
        }
    });
}

/// Decodes the body of an END.
pub(crate) fn read_end(body: &[u8]) -> Result<Result<()>> {
    if body.is_empty() {
        return Ok(Ok(()));
    }
    let mut reader = Reader::new("End", body);
    let refusal = Refusal::decode(&mut reader)?;
    reader.end()?;
    Ok(Err(refusal.into_error()))
}

/// The versions of this protocol that this release speaks.
pub(crate) const VERSIONS: Versions = Versions { min: 3, max: 3 };

/// A range of versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Versions {
    pub(crate) min: u16,
    pub(crate) max: u16,
}

impl Versions {
    /// Returns the highest version that both support.
    pub(crate) fn common(self, other: Versions) -> Option<u16> {
        let highest = self.max.min(other.max);
        (highest >= self.min && highest >= other.min).then_some(highest)
    }
}

impl std::fmt::Display for Versions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} to {}", self.min, self.max)
    }
}

/// The first bytes of every HELLO.
const MAGIC: [u8; 8] = *b"kvx-tcp\n";

/// The first message of a lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello<'a> {
    pub(crate) versions: Versions,
    /// The first message of Noise, with invitation and secret.
    pub(crate) invited: &'a [u8],
    /// The first message of Noise, with the secret alone; empty without one.
    pub(crate) mistaken: &'a [u8],
}

impl<'a> Hello<'a> {
    /// Returns the bytes before the messages of Noise, which authenticate them.
    pub(crate) fn head(versions: Versions) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.put_u16(versions.min);
        out.put_u16(versions.max);
        out
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Self::head(self.versions);
        out.put_block(self.invited);
        out.put_block(self.mistaken);
        out
    }

    /// Decodes the sender's versions, which have the same encoding in every version.
    pub(crate) fn versions(body: &[u8]) -> Result<(Versions, Reader<'_>)> {
        let mut reader = Reader::new("Hello", body);
        if reader.array()? != MAGIC {
            return Err(reader.malformed("this is not kvx"));
        }
        Ok((Versions { min: reader.u16()?, max: reader.u16()? }, reader))
    }

    /// Decodes a hello of this version.
    pub(crate) fn decode(body: &'a [u8]) -> Result<Self> {
        let (versions, mut reader) = Self::versions(body)?;
        let hello = Hello {
            versions,
            invited: reader.block(MAX_GREETING)?,
            mistaken: reader.block(MAX_GREETING)?,
        };
        reader.end()?;
        Ok(hello)
    }
}

/// Appends a refusal before the ends are authenticated.
pub(crate) fn put_refuse(out: &mut Vec<u8>, error: &Error) {
    put_frame(out, Frame::Refuse, 0, |out| Refusal::from(error).encode(out));
}

/// Decodes a REFUSE, which is not authenticated.
pub(crate) fn read_refuse(body: &[u8]) -> Error {
    match read_end(body) {
        Ok(Err(error)) => error,
        Ok(Ok(())) => {
            ErrorKind::Authentication.because("the peer refused the connection without a reason")
        }
        Err(error) => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_every_version_keep_their_numbers() {
        assert_eq!((Frame::Hello as u8, Frame::Refuse as u8), (1, 5));
    }

    #[test]
    fn headers_round_trip() {
        for frame in Frame::ALL {
            let id = if frame.is_greeting() { 0 } else { 0x1122_3344_5566_7788 };
            let header = Header { frame, len: usize::from(frame == Frame::Data), id };
            let mut bytes = Vec::new();
            header.encode(&mut bytes);
            assert_eq!(Header::decode(&bytes.try_into().unwrap()).unwrap(), header);
        }
    }

    #[test]
    fn a_length_above_the_limit_of_its_frame_is_malformed() {
        for frame in Frame::ALL {
            let mut bytes = Vec::new();
            Header { frame, len: frame.max_len() + 1, id: 0 }.encode(&mut bytes);
            assert_eq!(
                Header::decode(&bytes.try_into().unwrap()).unwrap_err().kind(),
                ErrorKind::Malformed
            );
        }
    }

    #[test]
    fn every_bit_flip_of_a_header_is_an_error_or_a_bounded_frame() {
        for frame in Frame::ALL {
            let mut bytes = Vec::new();
            Header { frame, len: 1, id: 7 }.encode(&mut bytes);
            for bit in 0..HEADER * 8 {
                let mut flipped: [u8; HEADER] = bytes.clone().try_into().unwrap();
                flipped[bit / 8] ^= 1 << (bit % 8);
                if let Ok(header) = Header::decode(&flipped) {
                    assert!(header.len <= header.frame.max_len());
                }
            }
        }
    }

    #[test]
    fn a_refusal_keeps_kind_and_sentence() {
        let mut bytes = Vec::new();
        put_end(&mut bytes, 9, Err(&ErrorKind::WrongKey.because("wrong key for region #3")));
        let error = read_end(&bytes[HEADER..]).unwrap().unwrap_err();
        assert_eq!(
            (error.kind(), error.sentence()),
            (ErrorKind::WrongKey, "wrong key for region #3")
        );
        let long = ErrorKind::Busy.because("ä".repeat(5000));
        bytes.clear();
        put_end(&mut bytes, 9, Err(&long));
        assert!(bytes.len() - HEADER <= Frame::End.max_len());
        assert_eq!(read_end(&bytes[HEADER..]).unwrap().unwrap_err().kind(), ErrorKind::Native);
    }

    #[test]
    fn versions_agree_on_the_highest_common_one() {
        let range = |min, max| Versions { min, max };
        assert_eq!(range(1, 3).common(range(2, 9)), Some(3));
        assert_eq!(range(1, 3).common(range(4, 9)), None);
        assert_eq!(range(1, 3).common(range(3, 1)), None);
    }

    #[test]
    fn mutated_bodies_are_errors_or_bounded_messages() {
        let hello = Hello { versions: VERSIONS, invited: &[1; 49], mistaken: &[2; 48] }.encode();
        let mut end = Vec::new();
        put_end(&mut end, 1, Err(&ErrorKind::Revoked.because("region #3 wäs revoked")));
        end.drain(..HEADER);
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut draw = |below: usize| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 33) as usize % below
        };
        for _ in 0..20_000 {
            for good in [&hello, &end] {
                let mut body = good.clone();
                for _ in 0..1 + draw(4) {
                    let at = draw(body.len());
                    match draw(4) {
                        0 => body.truncate(at.max(1)),
                        1 => body.insert(at, draw(256) as u8),
                        _ => body[at] ^= 1 << draw(8),
                    }
                }
                Hello::decode(&body).ok();
                if let Ok(Err(error)) = read_end(&body) {
                    assert!(error.sentence().len() <= Refusal::MAX_BYTES);
                    assert!(!error.sentence().contains(char::is_control));
                }
            }
        }
    }
}
