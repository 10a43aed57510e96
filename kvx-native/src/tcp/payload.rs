//! Where the bytes of DATA frames come from and go to: the blocks of one side of a request, as the kernel wants them.

use std::sync::Arc;

use kvx_core::{Bound, Extents, RegionId};

use super::memory::Served;

/// The most pieces of one system call, with room for what goes before and after the payload.
pub(super) const MAX_PIECES: usize = 1000;

/// Bytes that are sent in place of bytes that may not be read any more.
static ZEROS: [u8; FILLER] = [0; FILLER];
const FILLER: usize = 64 << 10;

/// The blocks of one side of a request: a source or a sink of payload that is worked off from the front.
pub(super) struct Blocks {
    memory: Held,
    cursor: Extents,
}

/// What keeps the blocks' memory alive.
enum Held {
    /// The initiator's: the plan.
    Plan(Arc<Bound>),
    /// The owner's: its regions, in the order of the request.
    Served(Vec<Arc<Served>>),
}

impl Blocks {
    /// The local side of a part of a plan.
    pub(super) fn local(plan: Arc<Bound>, cursor: Extents) -> Self {
        Blocks { memory: Held::Plan(plan), cursor }
    }

    /// Blocks that a peer asked for; the cursor's grids have been checked against the regions.
    pub(super) fn served(regions: Vec<Arc<Served>>, cursor: Extents) -> Self {
        Blocks { memory: Held::Served(regions), cursor }
    }

    /// Bytes that are left.
    pub(super) fn left(&self) -> u64 {
        self.cursor.left()
    }

    /// Whether it touches a region of the owner's.
    pub(super) fn touches(&self, region: RegionId) -> bool {
        matches!(&self.memory, Held::Served(regions) if regions.iter().any(|served| served.id == region))
    }

    /// Moves the next pieces into `chunk`: at most `max` bytes and as many pieces as one call takes.
    pub(super) fn gather(&mut self, chunk: &mut Chunk, max: usize) {
        let mut room = max as u64;
        while room > 0
            && chunk.pieces.len() < MAX_PIECES
            && let Some(extent) = self.cursor.take(room)
        {
            let memory = match &self.memory {
                Held::Plan(plan) => &plan.local(extent.region).memory,
                Held::Served(regions) => &regions[extent.region as usize].memory,
            };
            debug_assert!(extent.offset + extent.len <= memory.len() as u64);
            // In bounds: grids are checked against their regions before a cursor walks them.
            chunk.push(memory.as_ptr().wrapping_add(extent.offset as usize), extent.len as usize);
            room -= extent.len;
        }
    }
}

/// Pieces of memory in the order in which bytes go through them.
#[derive(Default)]
pub(super) struct Chunk {
    pieces: Vec<libc::iovec>,
    at: usize,
    left: usize,
}

// SAFETY: a chunk is addresses and lengths; who touches them when is up to the machine that owns it, which keeps the
// memory's owner beside it and redirects the chunk before it lets go of that.
unsafe impl Send for Chunk {}

impl Chunk {
    /// Bytes that are left.
    pub(super) fn left(&self) -> usize {
        self.left
    }

    /// Empties it.
    pub(super) fn clear(&mut self) {
        self.pieces.clear();
        (self.at, self.left) = (0, 0);
    }

    fn push(&mut self, base: *mut u8, len: usize) {
        self.pieces.push(libc::iovec { iov_base: base.cast(), iov_len: len });
        self.left += len;
    }

    /// The pieces that are left.
    pub(super) fn pieces(&self) -> &[libc::iovec] {
        &self.pieces[self.at..]
    }

    /// `count` bytes went through; not more than are left.
    pub(super) fn advance(&mut self, count: usize) {
        debug_assert!(count <= self.left);
        self.left -= count;
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

    /// Writes as many of `bytes` as fit, and says how many.
    pub(super) fn copy_in(&mut self, bytes: &[u8]) -> usize {
        let total = bytes.len().min(self.left);
        let mut left = &bytes[..total];
        while !left.is_empty() {
            let piece = self.pieces[self.at];
            let (now, later) = left.split_at(left.len().min(piece.iov_len));
            // SAFETY: the piece names `iov_len` bytes of memory that the chunk's owner keeps alive and may write; `now`
            // is a buffer of the connection, which no region overlaps.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), piece.iov_base.cast(), now.len()) };
            self.advance(now.len());
            left = later;
        }
        total
    }

    /// Makes what is left go into `bin` instead, whose content does not matter.
    pub(super) fn discard_into(&mut self, bin: &mut Bin) {
        let left = self.left;
        self.fill_with(bin.0.as_mut_ptr(), bin.0.len(), left);
    }

    /// The next `count` bytes go into `bin`.
    pub(super) fn discard(&mut self, bin: &mut Bin, count: usize) {
        self.fill_with(bin.0.as_mut_ptr(), bin.0.len(), count);
    }

    /// Makes what is left come from zeros instead.
    pub(super) fn zero(&mut self) {
        let left = self.left;
        self.fill_with(ZEROS.as_ptr().cast_mut(), ZEROS.len(), left);
    }

    fn fill_with(&mut self, base: *mut u8, len: usize, count: usize) {
        self.clear();
        let mut left = count;
        while left > 0 && self.pieces.len() < MAX_PIECES {
            self.push(base, left.min(len));
            left -= left.min(len);
        }
    }
}

/// Where bytes go that nobody wants.
pub(super) struct Bin(Box<[u8]>);

impl Bin {
    pub(super) fn new() -> Self {
        Bin(vec![0; FILLER].into())
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
    fn bytes_go_through_the_pieces_in_order() {
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
        let mut bin = Bin::new();
        chunk.discard_into(&mut bin);
        assert_eq!(chunk.left(), 199_990);
        chunk.copy_in(&[9; 10]);
        assert!(buffers[0][10..].iter().chain(&buffers[1]).all(|byte| *byte == 7));
        let mut chunk = over(&mut buffers);
        chunk.zero();
        assert_eq!(chunk.pieces().iter().map(|piece| piece.iov_len).sum::<usize>(), 200_000);
        assert!(chunk.pieces().iter().all(|piece| std::ptr::eq(piece.iov_base, ZEROS.as_ptr().cast())));
    }
}
