//! What comes in and what goes out on a connection: headers and small frames by way of buffers, payload straight
//! between the socket and where it belongs.

use kvx_core::Result;
use kvx_core::fork::Private;

use super::chunk::{Bin, Chunk};
use super::conn::{Role, Scope};
use super::frames::{HEADER, Header};
use super::socket;

/// Bytes read at a time when nothing is known of what comes.
const BUFFER: usize = 16 << 10;
/// Bytes read behind a bulk payload: an END and the next header, no more, because they are copied.
const BEHIND_BULK: usize = 4 * HEADER;
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
        }
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
            && header.len - self.body.len() > BUFFER
        {
            let (old, want) = (self.body.len(), (header.len - self.body.len()).min(GROWTH));
            self.body.resize(old + want, 0);
            let piece = libc::iovec { iov_base: self.body[old..].as_mut_ptr().cast(), iov_len: want };
            // SAFETY: the piece is the new end of `body`, which outlives the call.
            let got = unsafe { socket::receive(socket, &mut [piece]) };
            self.body.truncate(old + got.as_ref().ok().copied().flatten().unwrap_or(0));
            return Ok((got?, want));
        }
        pieces.clear();
        let (mut behind, mut want) = (BUFFER, 0);
        if let ReadState::Data { left } = self.state {
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

    /// Puts buffered bytes into the chunk, as many as fit. Says whether there were any.
    pub(super) fn drain_into_chunk(&mut self, left: usize) -> bool {
        if self.start == self.end {
            return false;
        }
        let count = self.chunk.copy_in(&self.buffer[self.start..self.end]);
        self.start += count;
        self.state = ReadState::Data { left: left - count };
        true
    }

    pub(super) fn has_backlog(&self) -> bool {
        match self.state {
            ReadState::Header => self.end - self.start >= HEADER,
            ReadState::Data { .. } => self.end > self.start, // left over when it was stalled
            ReadState::Body(_) => false,
        }
    }

    /// Whether payload is coming in.
    pub(super) fn in_payload(&self) -> bool {
        matches!(self.state, ReadState::Data { .. })
    }

    /// The rest of the payload that is coming in goes nowhere.
    pub(super) fn abort(&mut self, bin: &mut Bin) {
        self.chunk.discard_into(bin);
        self.stalled = false;
    }

    pub(super) fn header(&mut self) -> Result<Option<Header>> {
        let Some(bytes) = self.buffer[self.start..self.end].first_chunk::<HEADER>() else { return Ok(None) };
        let header = Header::decode(bytes)?;
        self.start += HEADER;
        Ok(Some(header))
    }

    /// The body of a frame, when it is there as a whole: in the buffer if it fits in there, else gathered.
    pub(super) fn body(&mut self, len: usize) -> Option<&[u8]> {
        let buffered = self.end - self.start;
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

    /// Bytes of an unfinished frame.
    pub(super) fn held(&self) -> usize {
        self.body.capacity()
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
}

impl Output {
    pub(super) fn at_boundary(&self) -> bool {
        self.head_at == self.head.len() && self.chunk.left() == 0 && self.tail_at == self.tail.len()
    }

    /// Bytes that wait for the peer to take them.
    pub(super) fn held(&self) -> usize {
        self.head.capacity() + self.spilled.capacity() + self.tail.capacity() + self.control.capacity()
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

    /// Zeros in place of the rest of the payload, and nothing behind it: another frame says why.
    pub(super) fn abort(&mut self) {
        debug_assert!(self.in_payload());
        self.chunk.zero();
        self.tail.clear();
        self.tail_at = 0;
    }

    /// The rest of the payload goes out from a copy: its source may change.
    pub(super) fn spill(&mut self) {
        self.chunk.copy_out(&mut self.spilled);
    }

    pub(super) fn next(&mut self, role: &mut Role, scope: &mut Scope) {
        self.head.clear();
        self.tail.clear();
        (self.head_at, self.tail_at) = (0, 0);
        self.spilled = Vec::new();
        if self.head.capacity() > KEPT {
            self.head = Vec::new();
        }
        std::mem::swap(&mut self.head, &mut self.control);
        if let Some(lane) = role.up_mut() {
            lane.next_frame(self, scope);
        }
    }

    pub(super) fn pieces(&self, pieces: &mut Vec<libc::iovec>) {
        let piece =
            |bytes: &[u8]| libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
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
