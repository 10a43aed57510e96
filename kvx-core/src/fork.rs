//! Fork detection. A forked child has none of the threads that kvx needs, so its calls return an
//! error instead of hanging.

use crate::{Error, ErrorKind, Result};

#[cfg(all(target_os = "linux", not(kvx_portable)))]
mod imp {
    use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd as _, OwnedFd, RawFd};
    use std::sync::Once;
    use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};

    static FORKS: AtomicU64 = AtomicU64::new(0);
    static WATCH: Once = Once::new();

    /// The highest descriptor that the kernel assigns, unless `fs.nr_open` was raised. Children
    /// inherit higher ones.
    const DESCRIPTORS: usize = 1 << 20;
    /// One bit for each descriptor that children must not inherit.
    static KEPT: [AtomicU64; DESCRIPTORS / 64] = [const { AtomicU64::new(0) }; DESCRIPTORS / 64];
    /// The number of array elements that were ever used.
    static USED: AtomicUsize = AtomicUsize::new(0);
    /// A descriptor of `/dev/null`, which replaces private descriptors in a child.
    static NOWHERE: AtomicI32 = AtomicI32::new(-1);

    extern "C" fn in_child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
        let nowhere = NOWHERE.load(Ordering::Relaxed);
        if nowhere < 0 {
            return;
        }
        for (word, bits) in KEPT.iter().enumerate().take(USED.load(Ordering::Relaxed)) {
            let mut left = bits.load(Ordering::Relaxed);
            while left != 0 {
                let descriptor = (word * 64) as RawFd + left.trailing_zeros() as RawFd;
                // SAFETY: `descriptor` belongs to a `Private` of kvx, which the child has a copy
                // of, and still names an open file afterwards. `dup3` is async-signal-safe, so a
                // forked child may call it.
                unsafe { libc::dup3(nowhere, descriptor, libc::O_CLOEXEC) };
                left &= left - 1;
            }
        }
    }

    fn watch() {
        WATCH.call_once(|| {
            // SAFETY: `in_child` uses only atomics and async-signal-safe system calls, as a forked
            // child must.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
    }

    /// Returns the number of forks between this process and the first one that called this
    /// function.
    pub fn count() -> u64 {
        watch();
        FORKS.load(Ordering::Relaxed)
    }

    /// A descriptor that a forked child does not keep open: in the child, its number refers to
    /// `/dev/null`. Otherwise a child that was forked without regard to kvx would hide the death of
    /// this process from its peers as long as the child lives.
    ///
    /// A child may still inherit a descriptor if the fork happens while another thread creates or
    /// closes it.
    #[derive(Debug)]
    pub struct Private(OwnedFd);

    impl From<OwnedFd> for Private {
        fn from(descriptor: OwnedFd) -> Self {
            watch();
            if NOWHERE.load(Ordering::Relaxed) < 0
                && let Ok(nowhere) =
                    std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")
            {
                let nowhere = OwnedFd::from(nowhere);
                if NOWHERE
                    .compare_exchange(-1, nowhere.as_raw_fd(), Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok()
                {
                    let _kept = nowhere.into_raw_fd(); // until the process ends
                }
            }
            if let Some((word, bit)) =
                place(&descriptor).filter(|_| !crate::fault_injection::injected("fork-keeps"))
            {
                USED.fetch_max(word + 1, Ordering::Relaxed);
                KEPT[word].fetch_or(bit, Ordering::Relaxed);
            }
            Private(descriptor)
        }
    }

    impl Drop for Private {
        fn drop(&mut self) {
            // Before the descriptor is closed, because its number may then belong to someone else.
            if let Some((word, bit)) = place(&self.0) {
                KEPT[word].fetch_and(!bit, Ordering::Relaxed);
            }
        }
    }

    impl AsFd for Private {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    }

    impl AsRawFd for Private {
        fn as_raw_fd(&self) -> RawFd {
            self.0.as_raw_fd()
        }
    }

    impl Private {
        /// Duplicates the descriptor.
        ///
        /// # Errors
        /// The error of the operating system.
        pub fn try_clone(&self) -> std::io::Result<Self> {
            Ok(self.0.try_clone()?.into())
        }
    }

    /// Returns the array element and the bit of a descriptor in the table, if it has one.
    fn place(descriptor: &OwnedFd) -> Option<(usize, u64)> {
        let number =
            usize::try_from(descriptor.as_raw_fd()).ok().filter(|number| *number < DESCRIPTORS)?;
        Some((number / 64, 1 << (number % 64)))
    }

    #[cfg(test)]
    mod tests {
        use std::io::Read as _;

        use super::*;

        #[test]
        fn a_forked_child_does_not_keep_a_private_descriptor_open() {
            for private in [true, false] {
                let (mut reader, writer) = std::io::pipe().unwrap();
                let writer = OwnedFd::from(writer);
                let number = writer.as_raw_fd();
                let (one, other) = if private {
                    (Some(Private::from(writer)), None)
                } else {
                    (None, Some(writer))
                };
                // SAFETY: the child only makes async-signal-safe system calls until it ends.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: these calls take and return numbers only; the alarm ends the child.
                    unsafe {
                        let open = libc::fcntl(number, libc::F_GETFD) >= 0;
                        libc::alarm(if open { 1 } else { 9 });
                        loop {
                            libc::pause();
                        }
                    }
                }
                let begun = std::time::Instant::now();
                drop((one, other));
                // Ends when no process holds the writer.
                reader.read_to_end(&mut Vec::new()).unwrap();
                let took = begun.elapsed();
                assert_eq!(
                    private,
                    took < std::time::Duration::from_millis(700),
                    "{private}: {took:?}"
                );
                // SAFETY: `child` is this process's child, and only this test waits for it.
                unsafe {
                    libc::kill(child, libc::SIGKILL);
                    libc::waitpid(child, std::ptr::null_mut(), 0);
                }
            }
            assert!(
                KEPT.iter().all(|word| word.load(Ordering::Relaxed) == 0),
                "closed descriptors leave the table"
            );
        }
    }
}

#[cfg(any(not(target_os = "linux"), kvx_portable))]
mod imp {
    /// Returns 0: forks are not detected on this system.
    pub fn count() -> u64 {
        0
    }
}

#[cfg(all(target_os = "linux", not(kvx_portable)))]
pub use imp::Private;
pub use imp::count;

/// Checks that this process is not a fork.
///
/// # Errors
/// `Forked` in a child of the process in which kvx was first used.
pub fn check() -> Result<()> {
    if count() == 0 {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Forked,
        "this process is a fork of one that uses kvx: start a new program (exec) and build an \
         agent there",
    ))
}
