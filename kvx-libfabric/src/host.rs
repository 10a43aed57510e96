//! Copies between processes of this host by the kernel, which are what libfabric's shared memory moves bytes with.

use std::io;
use std::sync::atomic::AtomicU64;

use kvx_core::{Error, Kind, Op, Result};

use crate::error::NAME;

/// What stands where a peer looks.
const VALUE: u64 = 0x6b76_785f_7072_6f62;
static PROBE: AtomicU64 = AtomicU64::new(VALUE);

/// Where a peer looks.
pub(crate) fn probe() -> u64 {
    (&raw const PROBE).addr() as u64
}

/// Looks there in another process. Errors: `PeerLost` if it is gone, `Unsupported` if it may not be copied from.
pub(crate) fn check(process: u32, probe: u64) -> Result<()> {
    let mut value = 0_u64;
    // SAFETY: the eight bytes are ours.
    let copied = unsafe { copy_some(process, Op::Read, (&raw mut value).cast(), probe, 8) };
    let refused = |why: String| {
        let cure = "check kernel.yama.ptrace_scope, and that both run as one user in one container; or use the backend SHM or TCP";
        Err(Error::new(
            Kind::Unsupported,
            format!("memory of the peer's process cannot be copied ({why}): {cure}"),
        )
        .backend(NAME))
    };
    match copied {
        Ok(8) if value == VALUE => Ok(()),
        Ok(_) => refused(format!("process {process} is another one here")),
        Err(cause) if cause.raw_os_error() == Some(libc::ESRCH) => Err(ended(process, cause)),
        Err(cause) => refused(cause.to_string()),
    }
}

/// Reads a piece from the memory of another process, or writes it there. Errors: `PeerLost`, or the kernel's, with a part of it
/// copied.
///
/// # Safety
/// `len` bytes from `local` on are the caller's to write for a read, and nobody writes to them for a write.
pub(crate) unsafe fn copy(process: u32, op: Op, local: *mut u8, remote: u64, len: usize) -> Result<()> {
    let mut done = 0;
    while done < len {
        // SAFETY: it is the rest of what the caller promises.
        match unsafe { copy_some(process, op, local.add(done), remote + done as u64, len - done) } {
            Ok(0) => return Err(Error::new(Kind::Native, "the kernel copies nothing").backend(NAME)),
            Ok(count) => done += count,
            Err(cause) if cause.raw_os_error() == Some(libc::ESRCH) => return Err(ended(process, cause)),
            Err(cause) => {
                let why = format!("{len} bytes of process {process} could not be copied");
                return Err(Error::os(why, cause).backend(NAME));
            }
        }
    }
    Ok(())
}

/// As [`copy`], as far as the kernel comes in one call.
unsafe fn copy_some(process: u32, op: Op, local: *mut u8, remote: u64, len: usize) -> io::Result<usize> {
    let local = libc::iovec { iov_base: local.cast(), iov_len: len };
    let remote = libc::iovec { iov_base: remote as *mut _, iov_len: len };
    let process = process.cast_signed();
    // SAFETY: here the kernel touches nothing but the local range, which is the caller's promise.
    let copied = unsafe {
        match op {
            Op::Read => libc::process_vm_readv(process, &local, 1, &remote, 1, 0),
            Op::Write => libc::process_vm_writev(process, &local, 1, &remote, 1, 0),
        }
    };
    usize::try_from(copied).map_err(|_| io::Error::last_os_error())
}

fn ended(process: u32, cause: io::Error) -> Error {
    let why = format!("the peer's process {process} has ended");
    Error::os(why, cause).kind_is(Kind::PeerLost).backend(NAME)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_what_stands_in_it() {
        check(std::process::id(), probe()).unwrap();
        let other = AtomicU64::new(7);
        let elsewhere = (&raw const other).addr() as u64;
        assert_eq!(check(std::process::id(), elsewhere).unwrap_err().kind(), Kind::Unsupported);
        assert_eq!(check(std::process::id(), 8).unwrap_err().kind(), Kind::Unsupported);
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert_eq!(check(child.id(), probe()).unwrap_err().kind(), Kind::PeerLost);
    }

    #[test]
    fn a_piece_is_copied_both_ways_or_says_why_not() {
        let here = std::process::id();
        let (mut near, mut far) = ([1_u8; 100], [2_u8; 100]);
        let theirs = (&raw mut far).addr() as u64;
        // SAFETY: the array is ours, and so long.
        let mut copy = |op, process, remote| unsafe { copy(process, op, near.as_mut_ptr(), remote, 60) };
        copy(Op::Read, here, theirs + 40).unwrap();
        copy(Op::Write, here, theirs).unwrap();
        assert_eq!(copy(Op::Read, here, 8).unwrap_err().kind(), Kind::Native);
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert_eq!(copy(Op::Write, child.id(), theirs).unwrap_err().kind(), Kind::PeerLost);
        assert!(near[..60] == [2; 60] && near[60..] == [1; 40]);
        assert_eq!(far, [2; 100]);
    }
}
