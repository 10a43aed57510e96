//! The primitives of the reactor and its mailboxes; in models (`cargo xtask loom`), those of loom,
//! which tries every order.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, PollFd, Timespec, eventfd};
use rustix::io::Errno;

#[cfg(all(test, kvx_loom))]
#[path = "../../../kvx-core/src/sync/atomic.rs"]
mod atomic;
#[cfg(all(test, kvx_loom))]
mod model;

#[cfg(all(test, kvx_loom))]
pub(super) use self::{
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
    model::{Condvar, Mutex, MutexGuard, thread},
};
#[cfg(not(all(test, kvx_loom)))]
pub(super) use {
    kvx_core::backend::sync::{Condvar, Mutex, MutexGuard},
    std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
    std::thread,
};

/// True in models, in which no time passes.
pub(super) const IS_MODEL: bool = cfg!(all(test, kvx_loom));

/// A descriptor that becomes readable when it is rung, and stays so until the next drain.
pub(super) struct Wake {
    fd: OwnedFd,
    /// The model's knowledge of whether the descriptor is readable: loom switches threads only at
    /// operations that it knows.
    #[cfg(all(test, kvx_loom))]
    rung: (loom::sync::Mutex<bool>, loom::sync::Condvar),
}

impl Wake {
    pub(super) fn new() -> Result<Self, Errno> {
        Ok(Wake {
            fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            #[cfg(all(test, kvx_loom))]
            rung: Default::default(),
        })
    }

    pub(super) fn ring(&self) {
        #[cfg(all(test, kvx_loom))]
        let mut rung = self.rung.0.lock().unwrap();
        rustix::io::write(&self.fd, &1_u64.to_ne_bytes()).ok(); // a full counter wakes as well
        #[cfg(all(test, kvx_loom))]
        {
            *rung = true;
            self.rung.1.notify_all();
        }
    }

    pub(super) fn drain(&self) {
        #[cfg(all(test, kvx_loom))]
        let mut rung = self.rung.0.lock().unwrap();
        let mut count = [0; 8];
        rustix::io::read(&self.fd, &mut count).ok(); // never blocks
        #[cfg(all(test, kvx_loom))]
        {
            *rung = false;
        }
    }

    /// Sleeps until one of the descriptors is readable, the first of which is this one, or for the
    /// given time. Returns true if one is readable.
    #[cfg(not(all(test, kvx_loom)))]
    pub(super) fn poll(
        &self,
        fds: &mut [PollFd<'_>],
        longest: Option<&Timespec>,
    ) -> Result<bool, Errno> {
        rustix::event::poll(fds, longest)?;
        Ok(fds.first().is_some_and(|wake| !wake.revents().is_empty()))
    }

    /// Waits for a ring: in a model no time passes, and only a ring ends a sleep.
    #[cfg(all(test, kvx_loom))]
    pub(super) fn poll(&self, _: &mut [PollFd<'_>], _: Option<&Timespec>) -> Result<bool, Errno> {
        let mut rung = self.rung.0.lock().unwrap();
        while !*rung {
            rung = self.rung.1.wait(rung).unwrap();
        }
        Ok(true)
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
