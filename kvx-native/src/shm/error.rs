//! Converts reports of the kernel and the peer into errors that a person can act on.

use kvx_backend::control::Refusal;
use kvx_core::{Error, ErrorKind};
use rustix::io::Errno;

/// The backend's name.
pub(crate) const NAME: &str = "SHM";

/// Returns an error of this backend.
pub(crate) fn error(kind: ErrorKind, sentence: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(kind, sentence).with_backend(NAME)
}

/// Returns the error of a peer's refusal.
pub(crate) fn refused(why: Refusal) -> Error {
    why.into_error().with_backend(NAME)
}

/// Returns the error of a connection that failed because of a temporary shortage or for another
/// reason.
pub(crate) fn no_connection(cause: Errno) -> Error {
    match cause {
        Errno::MFILE | Errno::NFILE => {
            let why = "cannot create a socket to connect to the peer: raise ulimit -n, then post \
                       or connect again";
            Error::os(why, cause).with_kind(ErrorKind::Exhausted)
        }
        Errno::NOMEM | Errno::NOBUFS => {
            let why = "this machine has no memory for a connection: free some, then post or \
                       connect again";
            Error::os(why, cause).with_kind(ErrorKind::Exhausted)
        }
        _ => Error::os("cannot connect to the peer", cause),
    }
}

/// Returns the error of a refused `process_vm_readv`, with the cause and what to do.
pub(crate) fn readv_refused(whom: &str, errno: Errno) -> Error {
    let cause = match errno {
        Errno::PERM => {
            let scope =
                std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
            match scope.trim() {
                "" | "0" => {
                    "the processes differ in user, capabilities or user namespace, the peer is not \
                     dumpable, or a seccomp filter forbids it: run both alike, or give the reader \
                     CAP_SYS_PTRACE"
                        .to_owned()
                }
                scope => format!(
                    "kernel.yama.ptrace_scope is {scope}: set it to 0, or give the reader \
                     CAP_SYS_PTRACE"
                ),
            }
        }
        Errno::SRCH => {
            "the peer runs in another process namespace: share it (hostPID, --pid=host)".to_owned()
        }
        Errno::NOSYS => {
            "this kernel, or a seccomp filter, has no process_vm_readv: allow the call".to_owned()
        }
        _ => "the call failed".to_owned(),
    };
    error(
        ErrorKind::Unsupported,
        format!(
            "{whom}: process_vm_readv is refused; {cause}; or use kvx pools (Memory::pool), or TCP"
        ),
    )
    .with_native(i64::from(errno.raw_os_error()), std::io::Error::from(errno).to_string())
}

/// Returns the error of foreign memory that is switched off.
pub(crate) fn foreign_off(whose: &str) -> Error {
    error(
        ErrorKind::Unsupported,
        format!("shm.foreign_memory is off {whose}: use kvx pools (Memory::pool), or TCP"),
    )
}
