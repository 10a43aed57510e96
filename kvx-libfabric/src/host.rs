//! Whether memory of another process of this host may be copied: what libfabric's shared memory does it with.

use std::sync::atomic::AtomicU64;

use kvx_core::{Error, Kind, Result};

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
    let local = libc::iovec { iov_base: (&raw mut value).cast(), iov_len: 8 };
    let remote = libc::iovec { iov_base: probe as *mut _, iov_len: 8 };
    // SAFETY: the kernel writes the eight bytes, and reads nothing else here.
    let copied = unsafe { libc::process_vm_readv(process.cast_signed(), &local, 1, &remote, 1, 0) };
    let refused = |why: String| {
        let cure = "check kernel.yama.ptrace_scope, and that both run as one user in one container; or use the backend SHM or TCP";
        Err(Error::new(
            Kind::Unsupported,
            format!("memory of the peer's process cannot be copied ({why}): {cure}"),
        )
        .backend(NAME))
    };
    match (copied, value) {
        (8, VALUE) => Ok(()),
        (8, _) => refused(format!("process {process} is another one here")),
        _ => match std::io::Error::last_os_error() {
            cause if cause.raw_os_error() == Some(libc::ESRCH) => {
                let why = format!("the peer's process {process} has ended");
                Err(Error::os(why, cause).kind_is(Kind::PeerLost).backend(NAME))
            }
            cause => refused(cause.to_string()),
        },
    }
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
}
