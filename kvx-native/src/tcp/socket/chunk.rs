//! Pieces of memory that the kernel sends from or receives into, and the memory for discarded
//! bytes.

use std::sync::Arc;

use kvx_core::Memory;
use kvx_core::backend::copy_shared;

/// The limit for pieces of one system call, with capacity for the bytes before and after the
/// payload.
pub(crate) const MAX_PIECES: usize = 1000;

/// The bytes sent in place of bytes that must not be read any more.
static ZEROS: [u8; FILLER] = [0; FILLER];
const FILLER: usize = 64 << 10;

/// Pieces of memory, in the order in which bytes are transferred.
#[derive(Default)]
pub(crate) struct Chunk {
    pieces: Vec<libc::iovec>,
    at: usize,
    left: usize,
    /// The bytes transferred since the last call of `take_moved`.
    moved: usize,
}

// SAFETY: a chunk consists of addresses and lengths. The machine that owns it decides when they are
// accessed: it keeps the memory's owner next to the chunk, and redirects the chunk before it
// releases that owner.
unsafe impl Send for Chunk {}

impl Chunk {
    /// Returns the remaining bytes.
    pub(crate) fn left(&self) -> usize {
        self.left
    }

    /// Empties the chunk.
    pub(crate) fn clear(&mut self) {
        self.pieces.clear();
        (self.at, self.left, self.moved) = (0, 0, 0);
    }

    /// Returns true if one call takes no more pieces.
    pub(crate) fn is_full(&self) -> bool {
        self.pieces.len() >= MAX_PIECES
    }

    /// Adds a piece after the others.
    pub(crate) fn push(&mut self, base: *mut u8, len: usize) {
        self.pieces.push(libc::iovec { iov_base: base.cast(), iov_len: len });
        self.left += len;
    }

    /// Returns the remaining pieces.
    pub(crate) fn pieces(&self) -> &[libc::iovec] {
        &self.pieces[self.at..]
    }

    /// Records that `count` bytes were transferred, at most as many as are left.
    pub(crate) fn advance(&mut self, count: usize) {
        debug_assert!(count <= self.left);
        self.left -= count;
        self.moved += count;
        let mut count = count;
        while count > 0 {
            let piece = &mut self.pieces[self.at];
            if count < piece.iov_len {
                piece.iov_base = piece.iov_base.wrapping_byte_add(count);
                piece.iov_len -= count;
                return;
            }
            count -= piece.iov_len;
            self.at += 1;
        }
    }

    /// Returns the bytes transferred since the last call.
    pub(crate) fn take_moved(&mut self) -> usize {
        std::mem::take(&mut self.moved)
    }

    /// Writes as many of `bytes` as fit. Returns how many.
    pub(crate) fn copy_in(&mut self, bytes: &[u8]) -> usize {
        let total = bytes.len().min(self.left);
        let mut left = &bytes[..total];
        while !left.is_empty() {
            let piece = self.pieces[self.at];
            let (now, later) = left.split_at(left.len().min(piece.iov_len));
            // SAFETY: the piece names `iov_len` bytes of writable memory that the chunk's owner
            // keeps alive; `now` is a buffer of the connection, which no region overlaps.
            unsafe { copy_shared(now.as_ptr(), piece.iov_base.cast(), now.len()) };
            self.advance(now.len());
            left = later;
        }
        total
    }

    /// Appends a copy of the next `len` bytes to `copy`, at most as many as are left.
    pub(crate) fn take(&mut self, len: usize, copy: &mut Vec<u8>) {
        let end = copy.len() + len;
        copy.reserve(len);
        while copy.len() < end {
            let piece = self.pieces[self.at];
            let now = piece.iov_len.min(end - copy.len());
            // SAFETY: the piece names `iov_len` bytes of readable memory that the chunk's owner
            // keeps alive, and that others may write to. `copy` is a vector of the connection,
            // which no region overlaps, with capacity for `now` more bytes, which are initialized
            // before its length includes them.
            unsafe {
                let to = copy.as_mut_ptr().add(copy.len());
                copy_shared(piece.iov_base.cast_const().cast(), to, now);
                copy.set_len(copy.len() + now);
            }
            self.advance(now);
        }
    }

    /// Replaces the remaining pieces with a copy of their bytes, which `copy` holds.
    pub(crate) fn copy_out(&mut self, copy: &mut Vec<u8>) {
        copy.clear();
        copy.reserve_exact(self.left);
        self.take(self.left, copy);
        self.replace(copy);
    }

    /// Replaces the remaining pieces with these bytes.
    pub(crate) fn replace(&mut self, bytes: &mut [u8]) {
        self.clear();
        self.push(bytes.as_mut_ptr(), bytes.len());
    }

    /// Makes the remaining bytes go to `bin` instead, whose content does not matter.
    pub(crate) fn discard_into(&mut self, bin: &Bin) {
        let left = self.left;
        self.fill_with(bin.0.as_ptr(), bin.0.len(), left);
    }

    /// Makes the next `count` bytes go to `bin`.
    pub(crate) fn discard(&mut self, bin: &Bin, count: usize) {
        self.fill_with(bin.0.as_ptr(), bin.0.len(), count);
    }

    /// Makes the remaining bytes come from zeros instead.
    pub(crate) fn zero(&mut self) {
        let left = self.left;
        self.fill_with(ZEROS.as_ptr().cast_mut(), ZEROS.len(), left);
    }

    fn fill_with(&mut self, base: *mut u8, len: usize, count: usize) {
        self.clear();
        let mut left = count;
        while left > 0 && !self.is_full() {
            self.push(base, left.min(len));
            left -= left.min(len);
        }
    }
}

/// Memory for discarded bytes, which several threads may write concurrently.
#[derive(Clone)]
pub(crate) struct Bin(Arc<Memory>);

impl Bin {
    pub(crate) fn new() -> Self {
        Bin(Arc::new(Memory::owned(vec![0; FILLER])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn over(buffers: &mut [Vec<u8>]) -> Chunk {
        let mut chunk = Chunk::default();
        for buffer in buffers {
            chunk.push(buffer.as_mut_ptr(), buffer.len());
        }
        chunk
    }

    #[test]
    fn bytes_are_transferred_through_the_pieces_in_order() {
        let mut buffers = [vec![0; 3], vec![0; 1], vec![0; 4]];
        let mut chunk = over(&mut buffers);
        assert_eq!(chunk.copy_in(&[1, 2]), 2);
        assert_eq!(chunk.left(), 6);
        assert_eq!(chunk.copy_in(&[3, 4, 5]), 3);
        assert_eq!(chunk.pieces()[0].iov_len, 3);
        assert_eq!(chunk.copy_in(&[6, 7, 8, 9, 9]), 3);
        assert_eq!(buffers, [vec![1, 2, 3], vec![4], vec![5, 6, 7, 8]]);
    }

    #[test]
    fn redirected_bytes_leave_the_memory_alone() {
        let mut buffers = [vec![7; 100_000], vec![7; 100_000]];
        let mut chunk = over(&mut buffers);
        chunk.copy_in(&[1; 10]);
        let bin = Bin::new();
        chunk.discard_into(&bin);
        assert_eq!(chunk.left(), 199_990);
        chunk.copy_in(&[9; 10]);
        assert!(buffers[0][10..].iter().chain(&buffers[1]).all(|byte| *byte == 7));
        let mut chunk = over(&mut buffers);
        chunk.zero();
        assert_eq!(chunk.pieces().iter().map(|piece| piece.iov_len).sum::<usize>(), 200_000);
        assert!(
            chunk.pieces().iter().all(|piece| std::ptr::eq(piece.iov_base, ZEROS.as_ptr().cast()))
        );
    }
}
