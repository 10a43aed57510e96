//! The input of a connection: headers and small frames through a buffer, payload directly from the
//! socket to its place unless it is sealed.

use kvx_core::Result;
use kvx_core::backend::fork::Private;
use kvx_noise::{Opener, RECORD, TAG};

use crate::tcp::frames::{HEADER, Header};
use crate::tcp::seal::Seal;
use crate::tcp::socket;
use crate::tcp::socket::chunk::{Bin, Chunk};

/// The bytes read at a time if the next frame is unknown: at least a sealed record.
const BUFFER: usize = RECORD + TAG;
/// The bytes read at a time while sealed payload arrives.
const BUFFER_OF_RECORDS: usize = 4 * BUFFER;
/// The bytes read after a bulk payload: an END and the next header, sealed. No more, because they
/// are copied.
const BEHIND_BULK: usize = 2 * (HEADER + TAG);
/// The limit by which the buffer for the body of a frame grows at a time.
const GROWTH: usize = 64 << 10;

/// The state of the reader.
#[derive(Clone, Copy)]
pub(crate) enum ReadState {
    Header,
    Body(Header),
    Data { left: usize },
}

/// The input of a connection.
pub(crate) struct Input {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    body: Vec<u8>,
    pub(crate) state: ReadState,
    /// The places of the payload that is being received.
    pub(crate) chunk: Chunk,
    /// True if there is no place for the payload now, because a device must copy first.
    pub(crate) stalled: bool,
    /// Decrypts sealed bytes; `opens_payload` is true if payload is sealed too.
    opener: Option<Opener>,
    opens_payload: bool,
    /// The number of decrypted bytes at the front of the buffer that belong to a record; its tag
    /// follows.
    opened: usize,
}

impl Input {
    pub(crate) fn new() -> Self {
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

    /// Decrypts everything from here on, because the other end seals.
    pub(crate) fn open_from_here(&mut self, opener: Opener, seal: Seal) {
        self.opener = (seal > Seal::None).then_some(opener);
        self.opens_payload = seal == Seal::All;
    }

    /// Reads as many bytes as the socket and the places for them allow. Returns how many bytes it
    /// read, and how many it requested.
    pub(crate) fn read(
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
        // SAFETY: the first pieces are the chunk's, whose owner keeps their memory and permits
        // writes to it; the last one is the free part of the buffer.
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

    /// Returns the number of bytes to read at a time on a lane whose payload is sealed. The buffer
    /// grows when much payload arrives.
    fn room_for_records(&mut self) -> usize {
        let much = matches!(self.state, ReadState::Data { left } if left > BUFFER);
        if much && self.buffer.len() < BUFFER_OF_RECORDS {
            let mut buffer = vec![0; BUFFER_OF_RECORDS];
            buffer[..self.end].copy_from_slice(&self.buffer[..self.end]);
            self.buffer = buffer.into();
        }
        self.buffer.len()
    }

    /// Copies as many buffered bytes as fit into the chunk. Returns true if there were any. Returns
    /// an error for an altered record.
    pub(crate) fn drain_into_chunk(&mut self, left: usize) -> Result<bool> {
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

    /// Decrypts the next record of the payload if it has arrived; `left` bytes of the payload are
    /// in no decrypted record yet.
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

    pub(crate) fn has_backlog(&self) -> bool {
        match self.state {
            ReadState::Header => self.buffered() >= self.header_len(),
            // Bytes that were left when it was stalled.
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

    /// Returns true while payload is being received.
    pub(crate) fn in_payload(&self) -> bool {
        matches!(self.state, ReadState::Data { .. })
    }

    /// Discards the rest of the payload that is being received.
    pub(crate) fn abort(&mut self, bin: &Bin) {
        self.chunk.discard_into(bin);
        self.stalled = false;
    }

    /// Returns the next header if it has arrived. Returns an error for a malformed or altered one.
    pub(crate) fn header(&mut self) -> Result<Option<Header>> {
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

    /// Returns the body of a frame once it has arrived completely: in the buffer if it fits,
    /// otherwise collected. Returns an error for an altered record.
    pub(crate) fn body(&mut self, len: usize) -> Result<Option<&[u8]>> {
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

    /// Returns the bytes of an unfinished frame, and of a buffer that has grown.
    pub(crate) fn held(&self) -> usize {
        self.body.capacity() + self.buffer.len().saturating_sub(BUFFER)
    }

    pub(crate) fn body_end(&mut self) {
        self.body.clear();
        self.body.shrink_to(GROWTH);
        self.state = ReadState::Header;
    }

    /// Moves the remaining bytes to the front of the buffer.
    fn compact(&mut self) {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
    }
}
