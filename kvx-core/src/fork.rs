//! Fork detection. A forked child has none of the threads that kvx needs, so its calls return an
//! error instead of hanging.

use crate::{ErrorKind, Result};

#[cfg(all(target_os = "linux", not(kvx_portable)))]
mod imp {
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::mem::MaybeUninit;
    use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd as _, OwnedFd, RawFd};
    use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};
    use std::sync::{Mutex, MutexGuard, Once, PoisonError};

    use crate::fault_injection::injected;

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

    type FindDescriptors = Box<dyn Fn(&mut Vec<RawFd>) + Send + Sync>;
    /// The functions of all [`LibraryDescriptors`], by number.
    static LIBRARIES: Mutex<BTreeMap<u64, FindDescriptors>> = Mutex::new(BTreeMap::new());
    static LIBRARY_NUMBERS: AtomicU64 = AtomicU64::new(0);

    /// The device and inode numbers of an open file.
    type FileId = (libc::dev_t, libc::ino_t);

    thread_local! {
        /// The descriptors of libraries at the fork that this thread performs.
        static FOUND: RefCell<Vec<(RawFd, FileId)>> = const { RefCell::new(Vec::new()) };
    }

    fn libraries() -> MutexGuard<'static, BTreeMap<u64, FindDescriptors>> {
        LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file_of(number: RawFd) -> Option<FileId> {
        let mut stat = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: `stat` is valid for the call, which accepts any number.
        if unsafe { libc::fstat(number, stat.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: the call has succeeded, and so has filled `stat`.
        let stat = unsafe { stat.assume_init() };
        Some((stat.st_dev, stat.st_ino))
    }

    extern "C" fn before_fork() {
        // In a forked child, no thread may ever release the lock.
        if FORKS.load(Ordering::Relaxed) > 0 || injected("fork-keeps") {
            return;
        }
        let mut numbers = Vec::new();
        libraries().values().for_each(|find| find(&mut numbers));
        if numbers.is_empty() {
            return;
        }
        let files = numbers.into_iter().filter_map(|number| Some((number, file_of(number)?)));
        let files = files.collect();
        // Fails only on a thread that ends.
        FOUND.try_with(|found| found.replace(files)).ok();
    }

    extern "C" fn in_parent() {
        FOUND.try_with(RefCell::take).ok();
    }

    extern "C" fn in_child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
        let nowhere = NOWHERE.load(Ordering::Relaxed);
        if nowhere < 0 {
            return;
        }
        let replace_found = |found: &RefCell<Vec<(RawFd, FileId)>>| {
            for (number, file) in &*found.borrow() {
                // Another thread may have closed the descriptor, and opened another file, before
                // the fork.
                if file_of(*number) == Some(*file) {
                    // SAFETY: the number still belongs to the file that the owner of the
                    // library has listed, and names an open file afterwards. `dup3` is
                    // async-signal-safe.
                    unsafe { libc::dup3(nowhere, *number, libc::O_CLOEXEC) };
                }
            }
        };
        FOUND.try_with(replace_found).ok();
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
            // SAFETY: `in_child` uses only atomics, memory that `before_fork` has filled, and
            // async-signal-safe system calls, as a forked child must.
            unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
        });
    }

    /// Opens [`NOWHERE`], if that has not been done.
    fn open_nowhere() {
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
            open_nowhere();
            if let Some((word, bit)) = place(&descriptor).filter(|_| !injected("fork-keeps")) {
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

    /// Descriptors that a library opens and closes itself, which a forked child does not keep open,
    /// like those of [`Private`]. They are found anew before each fork.
    ///
    /// A child that is started without a fork handler (`posix_spawn`) inherits those that are not
    /// closed on exec.
    #[derive(Debug)]
    pub struct LibraryDescriptors(u64);

    impl LibraryDescriptors {
        /// Calls `find` before each fork, on the thread that forks, to append the numbers of the
        /// descriptors. `find` must wait for no other thread, and must not panic.
        pub fn new(find: impl Fn(&mut Vec<RawFd>) + Send + Sync + 'static) -> Self {
            watch();
            open_nowhere();
            let number = LIBRARY_NUMBERS.fetch_add(1, Ordering::Relaxed);
            libraries().insert(number, Box::new(find));
            LibraryDescriptors(number)
        }
    }

    impl Drop for LibraryDescriptors {
        fn drop(&mut self) {
            // In a forked child, no thread may ever release the lock.
            if FORKS.load(Ordering::Relaxed) == 0 {
                libraries().remove(&self.0);
            }
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

        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum Kind {
            Private,
            OfLibrary,
            Inherited,
        }

        #[test]
        fn a_forked_child_does_not_keep_a_private_descriptor_open() {
            for kind in [Kind::Private, Kind::OfLibrary, Kind::Inherited] {
                let (mut reader, writer) = std::io::pipe().unwrap();
                let writer = OwnedFd::from(writer);
                let number = writer.as_raw_fd();
                let _library = (kind == Kind::OfLibrary)
                    .then(|| LibraryDescriptors::new(move |found| found.push(number)));
                let (one, other) = if kind == Kind::Private {
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
                        libc::alarm(if open { 3 } else { 9 });
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
                    kind != Kind::Inherited,
                    took < std::time::Duration::from_millis(2500),
                    "{kind:?}: {took:?}"
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
            assert!(libraries().is_empty() && FOUND.with_borrow(Vec::is_empty));
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

pub use imp::count;
#[cfg(all(target_os = "linux", not(kvx_portable)))]
pub use imp::{LibraryDescriptors, Private};

/// Checks that this process is not a fork.
///
/// # Errors
/// `Forked` in a child of the process in which kvx was first used.
pub fn check() -> Result<()> {
    if count() == 0 {
        return Ok(());
    }
    Err(ErrorKind::Forked.because(
        "this process is a fork of one that uses kvx: start a new program (exec) and build an \
         agent there",
    ))
}
