//! Bare moves on this host: the same list of blocks between the same memory, without a protocol.
//!
//! This module uses none of the library's code, which could slow the limit down or speed it up.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

/// The most vectors in one call: the kernel's own limit.
const VECTORS: usize = 1024;
/// The most bytes in one call on a socket.
const CALL: usize = 1 << 20;

/// A list of blocks of `length` bytes: block `from[i]` of the source goes to block `to[i]` of the
/// destination.
#[derive(Clone, Copy)]
pub(crate) struct List<'a> {
    pub(crate) length: usize,
    pub(crate) from: &'a [u32],
    pub(crate) to: &'a [u32],
}

/// Copies within this process.
///
/// # Safety
/// All blocks of the list lie in valid memory at both addresses, and nobody holds references into
/// the destination.
pub(crate) unsafe fn copy(from: u64, to: u64, list: List<'_>) {
    for (source, destination) in list.from.iter().zip(list.to) {
        let source = (from as usize + *source as usize * list.length) as *const u8;
        let destination = (to as usize + *destination as usize * list.length) as *mut u8;
        // SAFETY: the caller guarantees that both blocks are valid and that no references into the
        // destination exist.
        unsafe { std::ptr::copy_nonoverlapping(source, destination, list.length) };
    }
}

fn vector(base: u64, block: u32, length: usize, skipped: usize) -> libc::iovec {
    let base = base as usize + block as usize * length + skipped;
    libc::iovec { iov_base: base as *mut libc::c_void, iov_len: length - skipped }
}

/// Reads from another process, on this thread.
///
/// # Safety
/// As [`copy`], for the destination. The kernel checks the source.
pub(crate) unsafe fn read(process: u32, from: u64, to: u64, list: List<'_>) -> Result<()> {
    let (mut theirs, mut ours) = (Vec::with_capacity(VECTORS), Vec::with_capacity(VECTORS));
    let some = VECTORS.min((1 << 30) / list.length).max(1);
    for blocks in list.from.chunks(some).zip(list.to.chunks(some)) {
        for (vectors, base, blocks) in [(&mut theirs, from, blocks.0), (&mut ours, to, blocks.1)] {
            vectors.clear();
            vectors.extend(blocks.iter().map(|block| vector(base, *block, list.length, 0)));
        }
        let n = ours.len() as libc::c_ulong;
        // SAFETY: the lists live through the call; the caller promises that the destination is
        // valid and that no references to it exist.
        let moved = unsafe {
            libc::process_vm_readv(process as i32, ours.as_ptr(), n, theirs.as_ptr(), n, 0)
        };
        if moved != (ours.len() * list.length) as isize {
            return Err(Error::last_os_error());
        }
    }
    Ok(())
}

/// A function that sends or receives the blocks of a list in another form than as they are. Returns
/// false as [`BareConnection`]'s own way does.
pub(crate) type Mover = Box<dyn FnMut(&mut TcpStream, &[u32], bool) -> Result<bool> + Send>;

/// One end of a connection, and the blocks that go over it: one list each time, in turn.
pub(crate) struct BareConnection {
    pub(crate) socket: TcpStream,
    /// The start of memory that outlives the lane, and that nobody holds references into.
    pub(crate) base: u64,
    pub(crate) length: usize,
    pub(crate) lists: Vec<Vec<u32>>,
    pub(crate) next: usize,
    pub(crate) mover: Option<Mover>,
}

impl BareConnection {
    /// Sends or receives the next list. Returns false if the other end closed instead of sending
    /// the first byte.
    fn all(&mut self, send: bool) -> Result<bool> {
        let blocks = &self.lists[self.next];
        self.next = (self.next + 1) % self.lists.len();
        if let Some(mover) = &mut self.mover {
            return mover(&mut self.socket, blocks, send);
        }
        let mut vectors = Vec::with_capacity(VECTORS);
        let (mut at, mut within) = (0, 0); // block of the list, byte of the block
        while at < blocks.len() {
            vectors.clear();
            let (mut bytes, mut skipped) = (0, within);
            for block in blocks[at..].iter().take(VECTORS) {
                let mut piece = vector(self.base, *block, self.length, skipped);
                piece.iov_len = piece.iov_len.min(CALL - bytes);
                (bytes, skipped) = (bytes + piece.iov_len, 0);
                vectors.push(piece);
                if bytes == CALL {
                    break;
                }
            }
            let (socket, n) = (self.socket.as_raw_fd(), vectors.len());
            // SAFETY: zeros are a message without name and control data.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            (message.msg_iov, message.msg_iovlen) = (vectors.as_mut_ptr(), n as _);
            let moved = match send {
                // SAFETY: the vectors live through the call, and lie in memory that outlives the
                // lane.
                true => unsafe { libc::sendmsg(socket, &message, 0) },
                // SAFETY: the vectors live through the call, and no references exist to the memory
                // that is written.
                false => unsafe { libc::readv(socket, vectors.as_ptr(), n as i32) },
            };
            match moved {
                0 if at + within == 0 => return Ok(false),
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                moved if moved < 0 => return Err(Error::last_os_error()),
                moved => within += moved as usize,
            }
            (at, within) = (at + within / self.length, within % self.length);
        }
        Ok(true)
    }

    /// Serves requests: sends its blocks for each byte received, or answers received blocks with a
    /// byte.
    pub(crate) fn serve(&mut self, sends: bool) -> Result<()> {
        while (!sends || self.socket.read(&mut [0])? == 1) && self.all(sends)? {
            self.socket.write_all(&[1][..usize::from(!sends)])?;
        }
        Ok(())
    }

    /// Makes `times` requests.
    fn ask(&mut self, sends: bool, times: u64) -> Result<()> {
        (0..times).try_for_each(|_| {
            self.socket.write_all(&[1][..usize::from(!sends)])?;
            self.all(sends)?;
            self.socket.read_exact(&mut [0][..usize::from(sends)])
        })
    }
}

/// Moves the next lists of all lanes `times` times: the first lane on this thread, and each other
/// lane on its own thread.
pub(crate) fn ask(lanes: &mut [BareConnection], sends: bool, times: u64) -> Result<()> {
    let Some((first, others)) = lanes.split_first_mut() else { return Ok(()) };
    std::thread::scope(|scope| {
        let others: Vec<_> =
            others.iter_mut().map(|lane| scope.spawn(move || lane.ask(sends, times))).collect();
        first.ask(sends, times)?;
        others
            .into_iter()
            .try_for_each(|other| other.join().unwrap_or_else(|_| Err(ErrorKind::Other.into())))
    })
}
