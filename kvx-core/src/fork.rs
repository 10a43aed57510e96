//! After `fork`, a child has none of the threads that kvx needs: its calls say so instead of hanging.

use crate::{Error, Kind, Result};

#[cfg(all(target_os = "linux", not(kvx_portable)))]
mod imp {
    use std::sync::Once;
    use std::sync::atomic::{AtomicU64, Ordering};

    static FORKS: AtomicU64 = AtomicU64::new(0);
    static WATCH: Once = Once::new();

    extern "C" fn in_child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of forks between this process and the first one that asked.
    pub fn count() -> u64 {
        WATCH.call_once(|| {
            // SAFETY: `in_child` only adds to an atomic, which is allowed in a forked child.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        FORKS.load(Ordering::Relaxed)
    }
}

#[cfg(any(not(target_os = "linux"), kvx_portable))]
mod imp {
    /// Other systems are not watched.
    pub fn count() -> u64 {
        0
    }
}

pub use imp::count;

/// Fails in a process that is a fork of the one in which kvx was first used.
pub fn check() -> Result<()> {
    if count() == 0 {
        return Ok(());
    }
    Err(Error::new(
        Kind::Forked,
        "this process is a fork of one that uses kvx: start a new program (exec) and build an agent there",
    ))
}
