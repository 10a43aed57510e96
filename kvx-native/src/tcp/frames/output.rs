//! The output of a connection: a frame's first bytes, its payload, directly from its place unless
//! it is sealed, and the control frames that were queued meanwhile.

use kvx_core::Result;
use kvx_core::backend::fork::Private;
use kvx_noise::{RECORD, Sealer, TAG};

use crate::tcp::frames::{HEADER, Header, MAX_DATA};
use crate::tcp::seal::Seal;
use crate::tcp::socket;
use crate::tcp::socket::chunk::Chunk;

/// The size in bytes above which a buffer is not kept.
const KEPT: usize = 64 << 10;

/// The output: a frame's first bytes, its payload, and its tail; then the control frames that were
/// queued meanwhile.
#[derive(Default)]
pub(crate) struct Output {
    head: Vec<u8>,
    head_at: usize,
    /// The payload of the frame that is being sent.
    pub(crate) chunk: Chunk,
    /// A copy of the payload, if its source could not wait.
    spilled: Vec<u8>,
    tail: Vec<u8>,
    tail_at: usize,
    /// Complete frames without payload, which are sent before the next payload.
    pub(crate) control: Vec<u8>,
    /// Seals all frames; `seals_payload` is true if payload is sealed too. Then `chunk` is sealed
    /// payload in `spilled`.
    sealer: Option<Sealer>,
    seals_payload: bool,
    /// Frames that are about to be sealed.
    bare: Vec<u8>,
}

/// The limit in bytes for the payload of a sealed frame: the payload is copied, and stays in the
/// cache until it is sent.
const MAX_SEALED: usize = 16 * RECORD;

impl Output {
    /// Seals all later frames. Queued ones are sent unchanged.
    pub(crate) fn seal_from_here(&mut self, sealer: Sealer, seal: Seal) {
        debug_assert!(self.at_boundary(), "the other end has answered all earlier frames");
        self.begin();
        self.sealer = (seal > Seal::None).then_some(sealer);
        self.seals_payload = seal == Seal::All;
    }

    /// Returns the limit for the payload of the next frame.
    pub(crate) fn most_payload(&self, piece: usize) -> usize {
        piece.min(if self.seals_payload { MAX_SEALED } else { MAX_DATA })
    }

    pub(crate) fn at_boundary(&self) -> bool {
        self.head_at == self.head.len() && self.chunk.left() == 0 && self.tail_at == self.tail.len()
    }

    /// Returns the bytes that wait for the peer to read them.
    pub(crate) fn held(&self) -> usize {
        let frames = self.head.capacity()
            + self.tail.capacity()
            + self.control.capacity()
            + self.bare.capacity();
        frames + self.spilled.capacity()
    }

    /// Returns the buffer for the header of a DATA frame.
    pub(crate) fn head(&mut self) -> &mut Vec<u8> {
        &mut self.head
    }

    /// Returns the buffer for the frames after its payload.
    pub(crate) fn tail(&mut self) -> &mut Vec<u8> {
        &mut self.tail
    }

    /// Returns true if some of the current payload has not been sent.
    pub(crate) fn in_payload(&self) -> bool {
        self.chunk.left() > 0
    }

    /// Replaces the rest of the payload with zeros, unless it is sealed and therefore already a
    /// copy, and drops its tail. Another frame reports the reason.
    pub(crate) fn abort(&mut self) {
        if !self.in_payload() {
            return; // a tail may already be sent, so its message number is used
        }
        if !self.seals_payload {
            self.chunk.zero();
        }
        if !self.tail.is_empty()
            && let Some(sealer) = &mut self.sealer
        {
            // The tail follows the payload, of which some is unsent, so it was not sent. An END
            // without a body is one message.
            debug_assert_eq!(self.tail.len(), HEADER + TAG);
            sealer.take_back();
        }
        self.tail.clear();
        self.tail_at = 0;
    }

    /// Makes the rest of the payload a copy, because its source may change.
    pub(crate) fn spill(&mut self) {
        if !self.seals_payload {
            self.chunk.copy_out(&mut self.spilled);
        }
    }

    /// Begins with the control frames that were queued while the last frame was sent.
    pub(crate) fn begin(&mut self) {
        self.head.clear();
        self.tail.clear();
        (self.head_at, self.tail_at) = (0, 0);
        if self.head.capacity() > KEPT {
            self.head = Vec::new();
        }
        std::mem::swap(&mut self.head, &mut self.control);
    }

    /// Seals the frames that are sent next, in their order, if this connection seals.
    pub(crate) fn seal(&mut self) {
        if let Some(sealer) = &mut self.sealer {
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
        if !self.seals_payload || self.chunk.left() == 0 {
            self.spilled = Vec::new();
        }
    }

    /// Sends the bytes that the socket takes. Returns how many.
    pub(crate) fn write(
        &mut self,
        socket: &Private,
        pieces: &mut Vec<libc::iovec>,
    ) -> Result<usize> {
        self.pieces(pieces);
        // SAFETY: the pieces are buffers of this output, and the chunk's pieces, whose owner keeps
        // their memory.
        let sent = unsafe { socket::send(socket, pieces) }?.unwrap_or(0);
        self.advance(sent);
        Ok(sent)
    }

    fn pieces(&self, pieces: &mut Vec<libc::iovec>) {
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

    pub(crate) fn left(&self) -> usize {
        self.head.len() - self.head_at + self.chunk.left() + self.tail.len() - self.tail_at
    }

    fn advance(&mut self, mut count: usize) {
        let head = count.min(self.head.len() - self.head_at);
        self.head_at += head;
        count -= head;
        let payload = count.min(self.chunk.left());
        self.chunk.advance(payload);
        self.tail_at += count - payload;
    }
}

/// Seals complete frames; the last one may be the header of a payload. `bare` is a scratch buffer.
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
