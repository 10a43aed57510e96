//! What comes in and what goes out on a connection: headers and small frames by way of buffers, payload straight
//! between the socket and where it belongs, unless it is sealed.

use kvx_core::Result;
use kvx_core::fork::Private;
use kvx_noise::{Opener, RECORD, Sealer, TAG};

use super::chunk::{Bin, Chunk};
use super::conn::{Role, Scope};
use super::frames::{HEADER, Header, MAX_DATA};
use super::seal::Seal;
use super::socket;

/// Bytes read at a time when nothing is known of what comes: not less than a sealed record.
const BUFFER: usize = RECORD + TAG;
/// The same while sealed payload comes.
const BUFFER_OF_RECORDS: usize = 4 * BUFFER;
/// Bytes read behind a bulk payload: an END and the next header, sealed, and no more, because they are copied.
const BEHIND_BULK: usize = 2 * (HEADER + TAG);
/// The most that grows at a time while the body of a frame comes in.
const GROWTH: usize = 64 << 10;

/// Where the reader stands.
#[derive(Clone, Copy)]
pub(super) enum ReadState {
    Header,
    Body(Header),
    Data { left: usize },
}

/// What came in.
pub(super) struct Input {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    body: Vec<u8>,
    pub(super) state: ReadState,
    /// Where the payload that is coming in goes.
    pub(super) chunk: Chunk,
    /// There is no place for it now: a device has to copy first.
    pub(super) stalled: bool,
    /// Opens what is sealed, and whether that is payload, too.
    opener: Option<Opener>,
    opens_payload: bool,
    /// Bytes at the front of the buffer that were a record's; its tag follows.
    opened: usize,
}

impl Input {
    pub(super) fn new() -> Self {
        Input {
            buffer: Box::default(),
            start: 0,
            end: 0,
            body: Vec::new(),
            state: ReadState::Header,
            chunk: Chunk::default(),
            stalled: false,
            opener: None,
            opens_payload: false,
            opened: 0,
        }
    }

    /// From here on the other end seals.
    pub(super) fn open_from_here(&mut self, opener: Opener, seal: Seal) {
        self.opener = (seal > Seal::None).then_some(opener);
        self.opens_payload = seal == Seal::All;
    }

    /// Reads what is there, as far as there is a place for it. Says how many bytes came, and how many were wanted.
    pub(super) fn read(
        &mut self,
        socket: &Private,
        small: bool,
        pieces: &mut Vec<libc::iovec>,
    ) -> Result<(Option<usize>, usize)> {
        if self.buffer.is_empty() {
            self.buffer = vec![0; BUFFER].into();
        }
        if let ReadState::Body(header) = self.state
            && self.opener.is_none()
            && header.len - self.body.len() > BUFFER
        {
            let (old, want) = (self.body.len(), (header.len - self.body.len()).min(GROWTH));
            self.body.resize(old + want, 0);
            let piece =
                libc::iovec { iov_base: self.body[old..].as_mut_ptr().cast(), iov_len: want };
            // SAFETY: the piece is the new end of `body`, which outlives the call.
            let got = unsafe { socket::receive(socket, &mut [piece]) };
            self.body.truncate(old + got.as_ref().ok().copied().flatten().unwrap_or(0));
            return Ok((got?, want));
        }
        pieces.clear();
        let (mut behind, mut want) = (BUFFER, 0);
        if self.opens_payload {
            behind = self.room_for_records();
        } else if let ReadState::Data { left } = self.state {
            pieces.extend_from_slice(self.chunk.pieces());
            want = self.chunk.left();
            behind = match (want == left, small) {
                (false, _) => 0,
                (true, true) => BUFFER,
                (true, false) => BEHIND_BULK,
            };
        }
        self.compact();
        let room = &mut self.buffer[self.end..];
        let behind = behind.min(room.len());
        if behind > 0 {
            pieces.push(libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: behind });
        }
        // SAFETY: the first pieces are the chunk's, whose owner keeps their memory and lets it be written; the last is
        // the free part of the buffer.
        let got = unsafe { socket::receive(socket, pieces) }?;
        let count = got.unwrap_or(0);
        let payload = count.min(want);
        self.chunk.advance(payload);
        self.end += count - payload;
        if let ReadState::Data { left } = &mut self.state {
            *left -= payload;
        }
        Ok((got, want + behind))
    }

    /// How much is read at a time on a lane whose payload is sealed. The buffer grows when much payload comes.
    fn room_for_records(&mut self) -> usize {
        let much = matches!(self.state, ReadState::Data { left } if left > BUFFER);
        if much && self.buffer.len() < BUFFER_OF_RECORDS {
            let mut buffer = vec![0; BUFFER_OF_RECORDS];
            buffer[..self.end].copy_from_slice(&self.buffer[..self.end]);
            self.buffer = buffer.into();
        }
        self.buffer.len()
    }

    /// Puts buffered bytes into the chunk, as many as fit. Says whether there were any. Errors: a record that is not
    /// what was sealed.
    pub(super) fn drain_into_chunk(&mut self, left: usize) -> Result<bool> {
        if self.opens_payload && self.opened == 0 && !self.open_record(left)? {
            return Ok(false);
        }
        let there = if self.opens_payload { self.opened } else { self.buffered() };
        if there == 0 {
            return Ok(false);
        }
        let count = self.chunk.copy_in(&self.buffer[self.start..self.start + there]);
        self.start += count;
        if self.opens_payload {
            self.opened -= count;
            self.start += if self.opened == 0 { TAG } else { 0 };
        }
        self.state = ReadState::Data { left: left - count };
        Ok(true)
    }

    /// Opens the next record of the payload, of which `left` bytes are in no record that was opened, if it is there.
    fn open_record(&mut self, left: usize) -> Result<bool> {
        let len = left.min(RECORD);
        let is_there = self.buffered() >= len + TAG;
        if is_there && let Some(opener) = &mut self.opener {
            opener.open(&mut self.buffer[self.start..self.start + len + TAG])?;
            self.opened = len;
        }
        Ok(is_there)
    }

    fn buffered(&self) -> usize {
        self.end - self.start
    }

    pub(super) fn has_backlog(&self) -> bool {
        match self.state {
            ReadState::Header => self.buffered() >= self.header_len(),
            // Left over when it was stalled.
            ReadState::Data { left } if self.opens_payload => {
                self.opened > 0 || self.buffered() >= left.min(RECORD) + TAG
            }
            ReadState::Data { .. } => self.buffered() > 0,
            ReadState::Body(_) => false,
        }
    }

    fn header_len(&self) -> usize {
        HEADER + if self.opener.is_some() { TAG } else { 0 }
    }

    /// Whether payload is coming in.
    pub(super) fn in_payload(&self) -> bool {
        matches!(self.state, ReadState::Data { .. })
    }

    /// The rest of the payload that is coming in goes nowhere.
    pub(super) fn abort(&mut self, bin: &Bin) {
        self.chunk.discard_into(bin);
        self.stalled = false;
    }

    /// The next header, when it is there. Errors: one that is malformed, or not what was sealed.
    pub(super) fn header(&mut self) -> Result<Option<Header>> {
        let len = self.header_len();
        if self.buffered() < len {
            return Ok(None);
        }
        let bytes = &mut self.buffer[self.start..self.start + len];
        if let Some(opener) = &mut self.opener {
            opener.open(bytes)?;
        }
        let Some(header) = bytes.first_chunk::<HEADER>() else { return Ok(None) };
        let header = Header::decode(header)?;
        self.start += len;
        Ok(Some(header))
    }

    /// The body of a frame, when it is there as a whole: in the buffer if it fits in there, else gathered. Errors: one
    /// that is not what was sealed.
    pub(super) fn body(&mut self, len: usize) -> Result<Option<&[u8]>> {
        let Some(opener) = &mut self.opener else { return Ok(self.bare_body(len)) };
        if len == 0 {
            return Ok(Some(&[]));
        }
        while self.body.len() < len {
            let next = (len - self.body.len()).min(RECORD);
            let (from, to) = (self.start, self.start + next);
            if self.end < to + TAG {
                return Ok(None);
            }
            opener.open(&mut self.buffer[from..to + TAG])?;
            self.start = to + TAG;
            if next == len {
                return Ok(Some(&self.buffer[from..to]));
            }
            self.body.extend_from_slice(&self.buffer[from..to]);
        }
        Ok(Some(&self.body))
    }

    fn bare_body(&mut self, len: usize) -> Option<&[u8]> {
        let buffered = self.buffered();
        if len <= BUFFER {
            let body = self.buffer.get(self.start..self.start + len).filter(|_| buffered >= len)?;
            self.start += len;
            return Some(body);
        }
        let more = buffered.min(len - self.body.len());
        self.body.extend_from_slice(&self.buffer[self.start..self.start + more]);
        self.start += more;
        (self.body.len() == len).then_some(&*self.body)
    }

    /// Bytes of an unfinished frame, and of a buffer that has grown.
    pub(super) fn held(&self) -> usize {
        self.body.capacity() + self.buffer.len().saturating_sub(BUFFER)
    }

    pub(super) fn body_end(&mut self) {
        self.body.clear();
        self.body.shrink_to(GROWTH);
        self.state = ReadState::Header;
    }

    /// Moves what is left in the buffer to its front.
    fn compact(&mut self) {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
    }
}

/// A buffer that has grown beyond this is not kept.
const KEPT: usize = 64 << 10;

/// What goes out: a frame's first bytes, its payload, and what follows it; then what has come up meanwhile.
#[derive(Default)]
pub(super) struct Output {
    head: Vec<u8>,
    head_at: usize,
    /// The payload of the frame that is going out.
    pub(super) chunk: Chunk,
    /// What the payload was copied to, when its source could not wait.
    spilled: Vec<u8>,
    tail: Vec<u8>,
    tail_at: usize,
    /// Whole frames without payload; they go before the next payload.
    pub(super) control: Vec<u8>,
    /// Seals all of it, and whether that is payload, too. Then `chunk` is sealed payload in `spilled`.
    sealer: Option<Sealer>,
    seals_payload: bool,
    /// Frames that are about to be sealed.
    bare: Vec<u8>,
}

/// The most payload of a frame that is sealed with it: it is copied, and stays in the cache until it is sent.
const MAX_SEALED: usize = 16 * RECORD;

impl Output {
    /// What was said so far goes out as it is; what comes is sealed.
    pub(super) fn seal_from_here(&mut self, sealer: Sealer, seal: Seal) {
        debug_assert!(self.at_boundary(), "the other end has answered what was said before");
        self.begin();
        self.sealer = (seal > Seal::None).then_some(sealer);
        self.seals_payload = seal == Seal::All;
    }

    /// The most payload of the next frame.
    pub(super) fn most_payload(&self, piece: usize) -> usize {
        piece.min(if self.seals_payload { MAX_SEALED } else { MAX_DATA })
    }

    pub(super) fn at_boundary(&self) -> bool {
        self.head_at == self.head.len() && self.chunk.left() == 0 && self.tail_at == self.tail.len()
    }

    /// Bytes that wait for the peer to take them.
    pub(super) fn held(&self) -> usize {
        let frames = self.head.capacity()
            + self.tail.capacity()
            + self.control.capacity()
            + self.bare.capacity();
        frames + self.spilled.capacity()
    }

    /// Where a DATA frame writes its header.
    pub(super) fn head(&mut self) -> &mut Vec<u8> {
        &mut self.head
    }

    /// Where it writes what follows its payload.
    pub(super) fn tail(&mut self) -> &mut Vec<u8> {
        &mut self.tail
    }

    /// Whether the payload that is going out has not gone out as a whole.
    pub(super) fn in_payload(&self) -> bool {
        self.chunk.left() > 0
    }

    /// Zeros in place of the rest of the payload (as it was sealed, if it was: that is a copy), and nothing behind it:
    /// another frame says why.
    pub(super) fn abort(&mut self) {
        if !self.in_payload() {
            return; // a tail that may have left stays: its number is used
        }
        if !self.seals_payload {
            self.chunk.zero();
        }
        if !self.tail.is_empty()
            && let Some(sealer) = &mut self.sealer
        {
            // It goes behind the payload, of which some is left; and an END without a body is one message.
            debug_assert_eq!(self.tail.len(), HEADER + TAG);
            sealer.take_back();
        }
        self.tail.clear();
        self.tail_at = 0;
    }

    /// The rest of the payload goes out from a copy: its source may change.
    pub(super) fn spill(&mut self) {
        if !self.seals_payload {
            self.chunk.copy_out(&mut self.spilled);
        }
    }

    pub(super) fn next(&mut self, role: &mut Role, scope: &mut Scope) {
        self.begin();
        if let Some(lane) = role.up_mut() {
            lane.next_frame(self, scope);
        }
        self.seal();
        if !self.seals_payload || self.chunk.left() == 0 {
            self.spilled = Vec::new();
        }
    }

    /// All has gone out: what has come up meanwhile goes next.
    fn begin(&mut self) {
        self.head.clear();
        self.tail.clear();
        (self.head_at, self.tail_at) = (0, 0);
        if self.head.capacity() > KEPT {
            self.head = Vec::new();
        }
        std::mem::swap(&mut self.head, &mut self.control);
    }

    /// Seals what goes next, in the order in which it goes.
    fn seal(&mut self) {
        let Some(sealer) = &mut self.sealer else { return };
        seal_frames(sealer, &mut self.head, &mut self.bare);
        if self.seals_payload && self.chunk.left() > 0 {
            let payload = self.chunk.left();
            self.spilled.clear();
            self.spilled.reserve_exact(payload + payload.div_ceil(RECORD) * TAG);
            while self.chunk.left() > 0 {
                let len = self.chunk.left().min(RECORD);
                self.chunk.take(len, &mut self.spilled);
                sealer.seal_end(len, &mut self.spilled);
            }
            self.chunk.replace(&mut self.spilled);
        }
        seal_frames(sealer, &mut self.tail, &mut self.bare);
        if self.bare.capacity() > KEPT {
            self.bare = Vec::new();
        }
    }

    pub(super) fn pieces(&self, pieces: &mut Vec<libc::iovec>) {
        let piece = |bytes: &[u8]| libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        pieces.clear();
        if self.head_at < self.head.len() {
            pieces.push(piece(&self.head[self.head_at..]));
        }
        pieces.extend_from_slice(self.chunk.pieces());
        if self.tail_at < self.tail.len() {
            pieces.push(piece(&self.tail[self.tail_at..]));
        }
    }

    pub(super) fn left(&self) -> usize {
        self.head.len() - self.head_at + self.chunk.left() + self.tail.len() - self.tail_at
    }

    pub(super) fn advance(&mut self, mut count: usize) {
        let head = count.min(self.head.len() - self.head_at);
        self.head_at += head;
        count -= head;
        let payload = count.min(self.chunk.left());
        self.chunk.advance(payload);
        self.tail_at += count - payload;
    }
}

/// Seals whole frames; the last one may be the header of a payload. `bare` is a buffer.
fn seal_frames(sealer: &mut Sealer, frames: &mut Vec<u8>, bare: &mut Vec<u8>) {
    if frames.is_empty() {
        return;
    }
    std::mem::swap(frames, bare);
    frames.clear();
    let mut left = &bare[..];
    while let Some((head, rest)) = left.split_first_chunk::<HEADER>() {
        sealer.seal(head, frames);
        let (body, rest) = rest.split_at(Header::body_len_of_own(head));
        sealer.seal(body, frames);
        left = rest;
    }
    bare.clear();
}
