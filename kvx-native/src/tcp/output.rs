//! What goes out on a connection.

use super::chunk::Chunk;
use super::conn::{Role, Scope};

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
