//! A mutex without poisoning, and a condition that costs nothing where nobody waits for it.

use std::sync::{PoisonError, TryLockError};
use std::time::Instant;

// Models of this crate (`cargo xtask loom`) run on what tries every order.
#[cfg(all(test, kvx_loom))]
use loom::sync;
#[cfg(not(all(test, kvx_loom)))]
use std::sync;

use super::atomic::{AtomicUsize, Ordering};

pub use sync::MutexGuard;

/// `std::sync::Mutex`, except that a panicked holder does not poison it.
#[derive(Debug, Default)]
pub struct Mutex<T>(sync::Mutex<T>);

impl<T> Mutex<T> {
    /// Holds `value`.
    #[cfg(not(all(test, kvx_loom)))]
    pub const fn new(value: T) -> Self {
        Mutex(sync::Mutex::new(value))
    }

    /// Holds `value`.
    #[cfg(all(test, kvx_loom))]
    pub fn new(value: T) -> Self {
        Mutex(sync::Mutex::new(value))
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value of a mutex that nobody else can reach.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock, if nobody holds it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// `std::sync::Condvar` for [`Mutex`], except that notifying nobody costs no system call.
#[derive(Debug, Default)]
pub struct Condvar {
    inner: sync::Condvar,
    /// Changed under the mutex only: who changes what is waited for, and then notifies, sees all who wait for it.
    waiting: AtomicUsize,
}

impl Condvar {
    /// Nobody waits yet.
    #[cfg(not(all(test, kvx_loom)))]
    pub const fn new() -> Self {
        Condvar { inner: sync::Condvar::new(), waiting: AtomicUsize::new(0) }
    }

    /// Nobody waits yet.
    #[cfg(all(test, kvx_loom))]
    pub fn new() -> Self {
        Condvar { inner: sync::Condvar::new(), waiting: AtomicUsize::new(0) }
    }

    /// Wakes everybody who waits. Returns whether anybody did.
    pub fn notify_all(&self) -> bool {
        let awaited = self.waiting.load(Ordering::Relaxed) > 0;
        if awaited {
            self.inner.notify_all();
        }
        awaited
    }

    /// Waits for a notification, or until `until`; spurious wake-ups happen.
    pub fn wait_until<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        until: Option<Instant>,
    ) -> MutexGuard<'a, T> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let guard = match until {
            None => self.inner.wait(guard).unwrap_or_else(PoisonError::into_inner),
            Some(until) => {
                let left = until.saturating_duration_since(Instant::now());
                self.inner.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0
            }
        };
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }
}
