//! Copies between processes of this host through the kernel, as libfabric's shared memory provider
//! does.
//!
//! kvx copies itself because the provider of 1.17 holds a lock in the target's shared memory while
//! the kernel copies, and all other users of that memory spin on it. A process that was killed
//! during a copy left its target, and all of the target's other peers, spinning forever.

use std::io;
use std::sync::atomic::AtomicU64;

use kvx_core::{Error, ErrorKind, Op, Result};

use crate::error::NAME;
use crate::ffi::Range;

/// The value at the probe's address.
const VALUE: u64 = 0x6b76_785f_7072_6f62;
static PROBE: AtomicU64 = AtomicU64::new(VALUE);

/// Returns the address of the probe, which peers read.
pub(crate) fn probe() -> u64 {
    (&raw const PROBE).addr() as u64
}

/// Reads the probe of another process. Errors: `PeerLost` if the process has ended, `Unsupported`
/// if the kernel denies the copy.
pub(crate) fn check(process: u32, probe: u64) -> Result<()> {
    let mut value = 0_u64;
    let ours = libc::iovec { iov_base: (&raw mut value).cast(), iov_len: 8 };
    // SAFETY: the eight bytes belong to this function.
    let copied = unsafe { copy_some(process, Op::Read, &[ours], &[at(probe, 8)]) };
    let refused = |why: String| {
        let cure = "check kernel.yama.ptrace_scope, and that both run as one user in one container; or use the backend SHM or TCP";
        Err(Error::new(
            ErrorKind::Unsupported,
            format!("memory of the peer's process cannot be copied ({why}): {cure}"),
        )
        .with_backend(NAME))
    };
    match copied {
        Ok(8) if value == VALUE => Ok(()),
        Ok(_) => refused(format!("process {process} is another process in this PID namespace")),
        Err(cause) if cause.raw_os_error() == Some(libc::ESRCH) => Err(ended(process, cause)),
        Err(cause) => refused(cause.to_string()),
    }
}

/// The maximum number of ranges per copy.
pub(crate) const TOGETHER: usize = 64;

/// Reads ranges from the memory of another process, or writes them to it: at most [`TOGETHER`].
/// Errors: `PeerLost`, or the kernel's, after a partial copy.
///
/// # Safety
/// For a read, the caller owns the local ranges; for a write, nobody writes to them.
pub(crate) unsafe fn copy(process: u32, op: Op, ranges: &[Range]) -> Result<()> {
    let (mut ours, mut theirs) = ([at(0, 0); TOGETHER], [at(0, 0); TOGETHER]);
    for (place, Range { local, len, remote, .. }) in ranges.iter().enumerate() {
        ours[place] = libc::iovec { iov_base: local.cast(), iov_len: *len };
        theirs[place] = at(remote.address, *len);
    }
    let (mut ours, mut theirs) = (&mut ours[..ranges.len()], &mut theirs[..ranges.len()]);
    while !ours.is_empty() {
        // SAFETY: the remaining part of the ranges that the caller guarantees.
        match unsafe { copy_some(process, op, ours, theirs) } {
            Ok(0) if ours.iter().any(|range| range.iov_len > 0) => {
                return Err(ErrorKind::Native
                    .because("the kernel copied no bytes")
                    .with_backend(NAME));
            }
            Ok(count) => (ours, theirs) = (behind(ours, count), behind(theirs, count)),
            Err(cause) if cause.raw_os_error() == Some(libc::ESRCH) => {
                return Err(ended(process, cause));
            }
            Err(cause) => {
                let why = format!("memory of process {process} could not be copied");
                return Err(Error::os(why, cause).with_backend(NAME));
            }
        }
    }
    Ok(())
}

/// Returns a range of another process.
fn at(address: u64, len: usize) -> libc::iovec {
    libc::iovec { iov_base: address as *mut _, iov_len: len }
}

/// Returns the part of the ranges after the first `count` bytes.
fn behind(ranges: &mut [libc::iovec], mut count: usize) -> &mut [libc::iovec] {
    let whole = ranges.iter().take_while(|range| {
        let done = range.iov_len <= count;
        count -= if done { range.iov_len } else { 0 };
        done
    });
    let done = whole.count();
    let left = &mut ranges[done..];
    if let Some(first) = left.first_mut() {
        *first = libc::iovec {
            iov_base: first.iov_base.wrapping_byte_add(count),
            iov_len: first.iov_len - count,
        };
    }
    left
}

/// Works like [`copy`], but returns after one call of the kernel.
///
/// # Safety
/// As for [`copy`].
unsafe fn copy_some(
    process: u32,
    op: Op,
    ours: &[libc::iovec],
    theirs: &[libc::iovec],
) -> io::Result<usize> {
    let (process, count) = (process.cast_signed(), ours.len() as libc::c_ulong);
    // SAFETY: in this process the kernel accesses only the local ranges, which the caller
    // guarantees.
    let copied = unsafe {
        match op {
            Op::Read => {
                libc::process_vm_readv(process, ours.as_ptr(), count, theirs.as_ptr(), count, 0)
            }
            Op::Write => {
                libc::process_vm_writev(process, ours.as_ptr(), count, theirs.as_ptr(), count, 0)
            }
        }
    };
    usize::try_from(copied).map_err(|_| io::Error::last_os_error())
}

fn ended(process: u32, cause: io::Error) -> Error {
    let why = format!("the peer's process {process} has ended");
    Error::os(why, cause).with_kind(ErrorKind::PeerLost).with_backend(NAME)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::{PeerNumber, RemoteRange};

    /// Returns the id of a process that has ended.
    fn ended() -> u32 {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        child.id()
    }

    #[test]
    fn a_process_is_recognised_by_its_probe() {
        check(std::process::id(), probe()).unwrap();
        let other = AtomicU64::new(7);
        let elsewhere = (&raw const other).addr() as u64;
        assert_eq!(
            check(std::process::id(), elsewhere).unwrap_err().kind(),
            ErrorKind::Unsupported
        );
        assert_eq!(check(std::process::id(), 8).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(check(ended(), probe()).unwrap_err().kind(), ErrorKind::PeerLost);
    }

    #[test]
    fn ranges_are_copied_both_ways_or_an_error_says_why_not() {
        let this_process = std::process::id();
        let (mut near, mut far) = ([1_u8; 100], [2_u8; 100]);
        let theirs = (&raw mut far).addr() as u64;
        let ours = near.as_mut_ptr();
        let range = |from: usize, len, remote| Range {
            local: ours.wrapping_add(from),
            len,
            descriptor: std::ptr::null_mut(),
            remote: RemoteRange { peer: PeerNumber::none(), address: remote, key: 0 },
        };
        // SAFETY: the arrays belong to the test, and have that length.
        let copy = |op, process, ranges: &[Range]| unsafe { copy(process, op, ranges) };
        copy(
            Op::Read,
            this_process,
            &[range(0, 20, theirs + 40), range(20, 0, theirs), range(40, 20, theirs)],
        )
        .unwrap();
        copy(Op::Write, this_process, &[range(20, 60, theirs)]).unwrap();
        assert_eq!(
            copy(Op::Read, this_process, &[range(0, 9, 8)]).unwrap_err().kind(),
            ErrorKind::Native
        );
        // The bytes before an unmapped address are copied all the same.
        let error =
            copy(Op::Write, this_process, &[range(0, 1, theirs + 99), range(0, 1, 8)]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Native);
        assert_eq!(
            copy(Op::Write, ended(), &[range(0, 9, theirs)]).unwrap_err().kind(),
            ErrorKind::PeerLost
        );
        let wanted = |from: usize, to: usize, of: u8| near[from..to].iter().all(|byte| *byte == of);
        assert!(wanted(0, 20, 2) && wanted(20, 40, 1) && wanted(40, 60, 2) && wanted(60, 100, 1));
        assert_eq!(far[..60], near[20..80]);
        assert!(far[60..99].iter().all(|byte| *byte == 2) && far[99] == 2);
    }

    #[test]
    fn a_copy_continues_where_the_kernel_stopped() {
        let lens =
            |ranges: &[libc::iovec]| ranges.iter().map(|range| range.iov_len).collect::<Vec<_>>();
        let mut ranges = [at(100, 4), at(200, 0), at(300, 6)];
        assert_eq!(lens(behind(&mut ranges.clone(), 0)), [4, 0, 6]);
        assert_eq!(lens(behind(&mut ranges.clone(), 4)), [6]);
        assert_eq!(lens(behind(&mut ranges.clone(), 10)), [0; 0]);
        let left = behind(&mut ranges, 7);
        assert_eq!((left[0].iov_base.addr(), lens(left)), (303, vec![3]));
    }
}
