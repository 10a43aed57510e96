//! What the mailbox is made of; in models (`cargo xtask loom`), what tries every order.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

#[cfg(not(all(test, kvx_loom)))]
pub(super) use kvx_core::sync::Mutex;
#[cfg(not(all(test, kvx_loom)))]
pub(super) use std::sync::atomic::{AtomicBool, Ordering};

#[cfg(all(test, kvx_loom))]
pub(super) use loom::sync::atomic::{AtomicBool, Ordering};

#[cfg(all(test, kvx_loom))]
#[derive(Default)]
pub(super) struct Mutex<T>(loom::sync::Mutex<T>);

#[cfg(all(test, kvx_loom))]
impl<T> Mutex<T> {
    pub(super) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
        self.0.lock().unwrap()
    }
}

/// A descriptor that is readable from a ring until the next drain.
pub(super) struct Wake {
    fd: OwnedFd,
    /// A model changes threads at accesses that it knows of.
    #[cfg(all(test, kvx_loom))]
    step: loom::sync::atomic::AtomicUsize,
}

impl Wake {
    pub(super) fn new() -> Result<Self, Errno> {
        Ok(Wake {
            fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            #[cfg(all(test, kvx_loom))]
            step: loom::sync::atomic::AtomicUsize::new(0),
        })
    }

    pub(super) fn ring(&self) {
        #[cfg(all(test, kvx_loom))]
        self.step.fetch_add(1, Ordering::SeqCst);
        rustix::io::write(&self.fd, &1_u64.to_ne_bytes()).ok(); // a full counter wakes as well
    }

    pub(super) fn drain(&self) {
        #[cfg(all(test, kvx_loom))]
        self.step.fetch_add(1, Ordering::SeqCst);
        let mut count = [0; 8];
        rustix::io::read(&self.fd, &mut count).ok(); // never blocks
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Wake {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
