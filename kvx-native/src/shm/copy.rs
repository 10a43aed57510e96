//! The copying engine: plain copies out of mappings, and batched `process_vm_readv` out of other
//! processes.

use kvx_core::Error;
use kvx_core::backend::{Extents, Hop, Segments, copy_shared};
use rustix::io::Errno;

use super::error::{error, readv_refused};
use super::host::PeerProcess;
use super::memory::CopySource;

/// The limit for vectors in one call, which is the kernel's.
const MAX_VECTORS: usize = 1024;
/// The limit in bytes for one call, and for one piece.
pub(crate) const MAX_BATCH: u64 = 1 << 20;
/// The limit in bytes for one plain copy: a long copy is a tenth slower than a series of these.
const MAX_COPY: usize = 64 << 10;
/// The number of plain copies that are gathered before the first of them is made.
const MAX_COPIES: usize = 64;
/// The number of bytes at the beginning of the next copy that are prefetched during the current
/// one.
const AHEAD: usize = 512;
/// The size of a cache line in bytes.
const LINE: usize = 64;

/// A contiguous piece of a transfer, from a peer's memory into local memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyPiece {
    /// The index of the place that it reads from.
    pub(crate) from: u32,
    pub(crate) from_offset: u64,
    /// The index of the target that it writes to.
    pub(crate) into: u32,
    pub(crate) into_offset: u64,
    pub(crate) len: u64,
}

/// The reason why a copy ended early.
#[derive(Debug)]
pub(crate) enum CopyError {
    /// The owner's process has ended; the most recent copies do not count.
    OwnerGone,
    /// This transfer cannot continue.
    Failed(Error),
}

/// The result of a turn of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyTurn {
    pub(crate) moved: u64,
    /// True if there were no more pieces.
    pub(crate) finished: bool,
}

/// A plain copy that waits to be made.
struct Copy {
    from: *const u8,
    into: *mut u8,
    len: usize,
}

/// Makes plain copies out of mappings in series, with a list that it allocates once.
pub(crate) struct Copier {
    copies: Vec<Copy>,
}

// SAFETY: the list is empty between calls; during a call only the calling thread uses it.
unsafe impl Send for Copier {}

impl Copier {
    pub(crate) fn new() -> Self {
        Copier { copies: Vec::with_capacity(MAX_COPIES) }
    }

    /// Copies pieces until there are no more or about `budget` bytes have moved.
    ///
    /// # Safety
    ///
    /// The caller ensures that each piece lies within its place and its target, that the targets
    /// are writable memory without references into it, and that `places` keeps the places mapped.
    pub(crate) unsafe fn turn(
        &mut self,
        pieces: &mut impl Iterator<Item = CopyPiece>,
        places: &[CopySource],
        targets: &[u64],
        budget: u64,
    ) -> CopyTurn {
        let mut moved = 0;
        let mut finished = false;
        while moved < budget {
            let Some(piece) = pieces.next() else {
                finished = true;
                break;
            };
            let place = &places[piece.from as usize];
            let into = (targets[piece.into as usize] + piece.into_offset) as *mut u8;
            let from = (place.base + piece.from_offset) as *const u8;
            // SAFETY: the caller ensures that the piece lies within both sides.
            unsafe { self.gather(from, into, piece.len as usize) };
            moved += piece.len;
        }
        // SAFETY: the gathered copies come from pieces for which the caller guarantees this.
        unsafe { self.copy() };
        CopyTurn { moved, finished }
    }

    /// Makes all of these copies.
    ///
    /// # Safety
    ///
    /// The caller ensures that each hop reads readable memory and writes writable memory without
    /// references into it, at a different address.
    pub(crate) unsafe fn copy_hops(&mut self, hops: &[Hop]) {
        for hop in hops {
            // SAFETY: the caller guarantees this for each hop.
            unsafe { self.gather(hop.from as *const u8, hop.to as *mut u8, hop.len) };
        }
        // SAFETY: only the hops above were gathered, for which the caller guarantees this.
        unsafe { self.copy() };
    }

    /// # Safety
    ///
    /// As for [`copy_hops`](Self::copy_hops).
    #[inline]
    unsafe fn gather(&mut self, from: *const u8, into: *mut u8, len: usize) {
        for at in (0..len).step_by(MAX_COPY) {
            let (from, into) = (from.wrapping_add(at), into.wrapping_add(at));
            self.copies.push(Copy { from, into, len: MAX_COPY.min(len - at) });
            if self.copies.len() == MAX_COPIES {
                // SAFETY: the caller guarantees this for all gathered copies.
                unsafe { self.copy() };
            }
        }
    }

    /// Makes the gathered copies. Copying each at once would be slower: computation between two
    /// copies waits for the stores of the first, and the start of the next block, which no
    /// prefetcher predicts, waits for memory.
    ///
    /// # Safety
    ///
    /// As for [`copy_hops`](Self::copy_hops).
    unsafe fn copy(&mut self) {
        for (at, Copy { from, into, len }) in self.copies.iter().enumerate() {
            if let Some(next) = self.copies.get(at + 1) {
                fetch_ahead(next.from, next.into, next.len.min(AHEAD));
            }
            // SAFETY: the caller guarantees this; a mapping and local memory have different
            // addresses.
            unsafe { copy_shared(*from, *into, *len) };
        }
        self.copies.clear();
    }
}

/// Reads out of other processes, many pieces per call, with lists that it allocates once.
pub(crate) struct Vectors {
    ours: Vec<libc::iovec>,
    theirs: Vec<libc::iovec>,
    bytes: u64,
}

impl Vectors {
    pub(crate) fn new() -> Self {
        Vectors {
            ours: Vec::with_capacity(MAX_VECTORS),
            theirs: Vec::with_capacity(MAX_VECTORS),
            bytes: 0,
        }
    }

    /// Reads all `hops`. The bytes count only if the process is still the original one, which the
    /// caller checks.
    ///
    /// # Safety
    ///
    /// The caller ensures that the local side is writable memory without references into it.
    pub(crate) unsafe fn read_hops(
        &mut self,
        process: &PeerProcess,
        hops: &[Hop],
    ) -> Result<(), CopyError> {
        for Hop { from, to, len } in hops {
            if self.ours.len() == MAX_VECTORS || self.bytes + *len as u64 > MAX_BATCH {
                // SAFETY: the caller guarantees this for the local side of each hop.
                unsafe { self.flush(process) }?;
            }
            self.ours.push(libc::iovec { iov_base: *to as *mut libc::c_void, iov_len: *len });
            self.theirs.push(libc::iovec { iov_base: *from as *mut libc::c_void, iov_len: *len });
            self.bytes += *len as u64;
        }
        // SAFETY: the vectors name only the local sides of `hops`, for which the caller guarantees
        // this.
        unsafe { self.flush(process) }
    }

    /// Reads the gathered vectors.
    ///
    /// # Safety
    ///
    /// The caller ensures that the local side of the gathered vectors is writable memory.
    unsafe fn flush(&mut self, process: &PeerProcess) -> Result<(), CopyError> {
        let mut done = 0;
        // An invisible process has number 0.
        let mut result = if process.pid > 0 { Ok(()) } else { Err(Errno::SRCH) };
        while result.is_ok() && done < self.ours.len() {
            // SAFETY: both lists live through the call; the caller ensures that the local side is
            // writable, and the kernel checks the other side.
            let got = unsafe { readv(process.pid, &self.ours[done..], &self.theirs[done..]) };
            match got {
                Ok(got) => {
                    let before = done;
                    let mut left = got;
                    // The kernel stops between vectors, except that it may read the last one in
                    // part.
                    while done < self.ours.len() && left >= self.ours[done].iov_len {
                        left -= self.ours[done].iov_len;
                        done += 1;
                    }
                    if left > 0 {
                        for vector in [&mut self.ours[done], &mut self.theirs[done]] {
                            vector.iov_base = vector.iov_base.wrapping_byte_add(left);
                            vector.iov_len -= left;
                        }
                    } else if done == before {
                        result = Err(Errno::FAULT);
                        break;
                    }
                }
                Err(Errno::INTR) => {}
                Err(errno) => {
                    result = Err(errno);
                    break;
                }
            }
        }
        self.ours.clear();
        self.theirs.clear();
        self.bytes = 0;
        result.map_err(|errno| match errno {
            // The process existed during the handshake, so it is ending: its memory is freed before
            // its sockets.
            Errno::SRCH if process.pid > 0 => CopyError::OwnerGone,
            Errno::FAULT => CopyError::Failed(
                Error::os(
                    "the peer's memory is no longer mapped: the peer unmapped it without revoking \
                     the region",
                    errno,
                )
                .with_backend(super::error::NAME),
            ),
            errno => CopyError::Failed(readv_refused(
                "the kernel stopped a transfer from foreign memory",
                errno,
            )),
        })
    }
}

/// Prefetches the first `len` bytes of both sides; only a hint to the processor.
#[inline]
fn fetch_ahead(from: *const u8, into: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..len).step_by(LINE) {
        use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch has no effect that a program could observe, at any address.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at).cast());
            _mm_prefetch::<_MM_HINT_ET0>(into.wrapping_add(at).cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, into, len, LINE);
}

/// # Safety
///
/// The caller ensures that `ours` names writable memory.
pub(crate) unsafe fn readv(
    pid: i32,
    ours: &[libc::iovec],
    theirs: &[libc::iovec],
) -> Result<usize, Errno> {
    #[cfg(test)]
    let ours = &*super::pair::cut::short(ours)?;
    // SAFETY: the lists outlive the call and their lengths are passed; the caller guarantees the
    // local side.
    let got = unsafe {
        libc::process_vm_readv(
            pid,
            ours.as_ptr(),
            ours.len() as libc::c_ulong,
            theirs.as_ptr(),
            theirs.len() as libc::c_ulong,
            0,
        )
    };
    usize::try_from(got)
        .map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}

/// Reads a few bytes of another process. Returns `SRCH` for an invisible process (pid 0).
pub(crate) fn read_exactly(pid: i32, address: u64, into: &mut [u8]) -> Result<(), Errno> {
    if pid <= 0 {
        return Err(Errno::SRCH);
    }
    let ours = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let theirs = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: into.len() };
    // SAFETY: `into` is exclusively borrowed for the length of the call.
    let got = unsafe { readv(pid, &[ours], &[theirs]) }?;
    if got == into.len() { Ok(()) } else { Err(Errno::FAULT) }
}

/// Checks that this process may read memory of `pid` by reading known bytes. Returns `Unsupported`
/// if it may not.
pub(crate) fn probe(pid: i32, probe: &super::messages::Probe, whom: &str) -> Result<(), Error> {
    let mut seen = [0; 32];
    read_exactly(pid, probe.address, &mut seen).map_err(|errno| readv_refused(whom, errno))?;
    if seen != probe.bytes {
        return Err(error(
            kvx_core::ErrorKind::Unsupported,
            format!(
                "{whom}: process {pid} is a different one in the peer's namespace; share the \
                 process namespace, use kvx pools, or TCP"
            ),
        ));
    }
    Ok(())
}

/// Checks that the kernel lets other processes read this memory, which it does not for memory that
/// a driver maps into a process. Returns `Unsupported` if it does not.
pub(crate) fn readable_by_others(memory: &kvx_core::Memory) -> Result<(), Error> {
    let Some(last) = (memory.len() as u64).checked_sub(1) else { return Ok(()) };
    let us = rustix::process::getpid().as_raw_nonzero().get();
    for offset in [0, last] {
        let mut byte = [0u8];
        if let Err(Errno::FAULT) = read_exactly(us, memory.address() + offset, &mut byte) {
            return Err(error(
                kvx_core::ErrorKind::Unsupported,
                "this memory cannot be read by other processes (a device's driver maps it): \
                 register a kvx pool, or use TCP",
            ));
        }
    }
    Ok(())
}

/// The pieces of a read: from remote memory into local memory.
pub(crate) struct ReadPieces(pub(crate) Segments);

impl Iterator for ReadPieces {
    type Item = CopyPiece;

    #[inline]
    fn next(&mut self) -> Option<CopyPiece> {
        let segment = self.0.next()?;
        Some(CopyPiece {
            from: segment.remote_region,
            from_offset: segment.remote_offset,
            into: segment.local_region,
            into_offset: segment.local_offset,
            len: segment.len,
        })
    }
}

/// The pieces of a pull, whose two sides agree on the order of bytes, but not on where pieces end.
#[derive(Debug)]
pub(crate) struct PullPieces {
    from: Extents,
    into: Extents,
    /// The rest of the last extent of each side, one of which is always empty.
    from_rest: Option<kvx_core::backend::Extent>,
    into_rest: Option<kvx_core::backend::Extent>,
}

impl PullPieces {
    pub(crate) fn new(from: Extents, into: Extents) -> Self {
        PullPieces { from, into, from_rest: None, into_rest: None }
    }
}

impl Iterator for PullPieces {
    type Item = CopyPiece;

    #[inline]
    fn next(&mut self) -> Option<CopyPiece> {
        let mut from = self.from_rest.take().or_else(|| self.from.take(MAX_BATCH))?;
        let mut into = self.into_rest.take().or_else(|| self.into.take(MAX_BATCH))?;
        let len = from.len.min(into.len);
        let piece = CopyPiece {
            from: from.region,
            from_offset: from.offset,
            into: into.region,
            into_offset: into.offset,
            len,
        };
        if from.len > len {
            from.offset += len;
            from.len -= len;
            self.from_rest = Some(from);
        } else if into.len > len {
            into.offset += len;
            into.len -= len;
            self.into_rest = Some(into);
        }
        Some(piece)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use kvx_core::Grid;
    use kvx_core::backend::PlacedGrid;

    use super::*;

    fn extents(grids: &[Grid], indices: &[u32]) -> Extents {
        Extents::new(
            grids
                .iter()
                .enumerate()
                .map(|(at, grid)| PlacedGrid { region: at as u32, grid: *grid })
                .collect(),
            indices.into(),
        )
    }

    /// Returns the hops of a pull from one buffer to another.
    fn hops(pieces: PullPieces, from: u64, into: u64) -> Vec<Hop> {
        let hop = |piece: CopyPiece| Hop {
            from: from + piece.from_offset,
            to: into + piece.into_offset,
            len: piece.len as usize,
        };
        pieces.map(hop).collect()
    }

    /// Copies between two buffers of this process as if one belonged to another process, and
    /// compares the result with a loop over bytes.
    #[test]
    fn pulls_move_each_byte_to_its_place() {
        let source: Vec<u8> = (0..200_000u32).map(|at| (at * 31 % 251) as u8).collect();
        let mut target = vec![0u8; 200_000];
        // 96 bytes per index on both sides, divided differently.
        let from = extents(
            &[Grid::packed(64, 1000), Grid { base: 70_000, stride: 48, length: 32, count: 1000 }],
            &[5, 6, 7, 900, 3],
        );
        let into =
            extents(&[Grid { base: 9, stride: 100, length: 96, count: 1000 }], &[1, 2, 999, 4, 8]);
        let mut expected = target.clone();
        let order = |mut extents: Extents| {
            let mut bytes = Vec::new();
            while let Some(extent) = extents.take(u64::MAX) {
                bytes.extend(extent.offset..extent.offset + extent.len);
            }
            bytes
        };
        for (a, b) in order(from.clone()).into_iter().zip(order(into.clone())) {
            expected[b as usize] = source[a as usize];
        }
        let (socket, _other) = UnixStream::pair().unwrap();
        let process = PeerProcess::behind(socket.as_fd()).unwrap();
        let hops =
            hops(PullPieces::new(from, into), source.as_ptr() as u64, target.as_mut_ptr() as u64);
        let mut vectors = Vectors::new();
        for hops in hops.chunks(3) {
            // SAFETY: the grids lie within both buffers, which no other code uses.
            unsafe { vectors.read_hops(&process, hops) }.unwrap();
        }
        assert_eq!(hops.iter().map(|hop| hop.len).sum::<usize>(), 5 * 96);
        assert!(target == expected);
    }

    #[test]
    fn thousands_of_vectors_go_in_batches_and_holes_are_errors() {
        let source: Vec<u8> = (0..8 * 5000u32).map(|at| (at % 241) as u8).collect();
        let mut target = vec![0u8; 8 * 5000];
        let (socket, _other) = UnixStream::pair().unwrap();
        let process = PeerProcess::behind(socket.as_fd()).unwrap();
        let grid = Grid { base: 0, stride: 8, length: 5, count: 5000 };
        let indices: Vec<u32> = (0..5000).map(|at| at * 7 % 5000).collect();
        let mut vectors = Vectors::new();
        let mut run = |base: u64, target: &mut [u8]| {
            let pieces = PullPieces::new(extents(&[grid], &indices), extents(&[grid], &indices));
            let hops = hops(pieces, base, target.as_mut_ptr() as u64);
            // SAFETY: the grid lies within the target, which no other code uses; the kernel checks
            // the source.
            unsafe { vectors.read_hops(&process, &hops) }
        };
        run(source.as_ptr() as u64, &mut target).unwrap();
        assert!(target.iter().zip(&source).enumerate().all(|(at, (a, b))| if at % 8 < 5 {
            a == b
        } else {
            *a == 0
        }));
        assert!(matches!(run(0x1000, &mut target), Err(CopyError::Failed(_))));
    }

    #[test]
    fn a_probe_distinguishes_the_right_process_from_another() {
        let bytes = [42; 32];
        let there = super::super::messages::Probe { address: bytes.as_ptr() as u64, bytes };
        let us = std::process::id() as i32;
        probe(us, &there, "").unwrap();
        let other = super::super::messages::Probe { bytes: [7; 32], ..there };
        for refused in [
            probe(us, &other, ""),
            probe(0, &there, ""),
            probe(us, &super::super::messages::Probe { address: 16, ..there }, ""),
        ] {
            assert_eq!(refused.unwrap_err().kind(), kvx_core::ErrorKind::Unsupported);
        }
    }
}
