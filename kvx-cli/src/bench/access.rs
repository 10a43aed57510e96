//! Access to the other side's memory without kvx: through a mapping, through the kernel, or over a
//! bare connection.

use std::io::{Error, Result};
use std::net::TcpStream;
use std::os::fd::AsRawFd as _;

use super::bare::{self, BareConnection, List};
use super::deadlines::ANSWER_DEADLINE;
use super::points::Shape;
use super::pools::PoolLocation;
use super::sealed;

/// Copies a list once from memory of another process: from a mapping if there is one, else through
/// the kernel.
///
/// # Safety
/// Both memories have all blocks of the list, and nobody holds references into the destination.
pub(crate) unsafe fn fetch(
    mapped: Option<u64>,
    from: PoolLocation,
    to: u64,
    list: List<'_>,
) -> Result<()> {
    match mapped {
        Some(mapped) => {
            // SAFETY: the caller guarantees that both memories have all blocks and that no
            // references exist; a mapping stays for the life of this process.
            unsafe { bare::copy(mapped, to, list) };
            Ok(())
        }
        // SAFETY: the caller guarantees the destination; the kernel checks the source.
        None => unsafe { bare::read(from.process, from.base, to, list) },
    }
}

/// Maps the memory file of another process's pool for reading, with every page present, and returns
/// the address. Maps it only the first time, and keeps it mapped. Returns `None` for a pool without
/// a file.
pub(crate) fn map(from: PoolLocation, mapped: &mut Option<u64>) -> Result<Option<u64>> {
    let Some(file) = from.file else { return Ok(None) };
    if mapped.is_none() {
        *mapped = Some(map_file(from.process, file, from.len)?);
    }
    Ok(*mapped)
}

fn map_file(process: u32, file: i32, len: usize) -> Result<u64> {
    let file = std::fs::File::open(format!("/proc/{process}/fd/{file}"))?;
    let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
    // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
    let base = unsafe {
        libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, flags, file.as_raw_fd(), 0)
    };
    if base == libc::MAP_FAILED { Err(Error::last_os_error()) } else { Ok(base as u64) }
}

/// Creates one end of a bare connection, with its share of each list. `of` is the lane's number and
/// the number of lanes; `memory` is the start of the blocks, and true if they are sealed.
pub(crate) fn share(
    socket: TcpStream,
    memory: (u64, bool),
    shape: Shape,
    blocks: &[u32],
    of: (usize, usize),
) -> Result<BareConnection> {
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(ANSWER_DEADLINE))?;
    socket.set_write_timeout(Some(ANSWER_DEADLINE))?;
    let lists = (0..u64::from(shape.lists)).map(|transfer| {
        let list = &blocks[shape.part(transfer)];
        list[list.len() * of.0 / of.1..list.len() * (of.0 + 1) / of.1].to_vec()
    });
    let (base, length) = (memory.0, shape.block as usize);
    let mover = memory.1.then(|| sealed::mover(base, length));
    Ok(BareConnection { socket, base, length, lists: lists.collect(), next: 0, mover })
}
