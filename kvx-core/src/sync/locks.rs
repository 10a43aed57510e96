//! A mutex without poisoning, and a condition variable that costs nothing while no thread waits.

use std::sync::{PoisonError, TryLockError};
use std::time::Instant;

// Loom's types try every order in the models of this crate (`cargo xtask loom`).
#[cfg(all(test, kvx_loom))]
use loom::sync;
#[cfg(not(all(test, kvx_loom)))]
use std::sync;

use super::atomic::{AtomicUsize, Ordering};

pub use sync::MutexGuard;

/// A `std::sync::Mutex` that a panic of its holder does not poison.
#[derive(Debug, Default)]
pub struct Mutex<T>(sync::Mutex<T>);

impl<T> Mutex<T> {
    /// Creates a mutex that holds `value`.
    #[cfg(not(all(test, kvx_loom)))]
    pub const fn new(value: T) -> Self {
        Mutex(sync::Mutex::new(value))
    }

    /// Creates a mutex that holds `value`.
    #[cfg(all(test, kvx_loom))]
    pub fn new(value: T) -> Self {
        Mutex(sync::Mutex::new(value))
    }

    /// Blocks until this thread has the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the value; exclusive access needs no lock.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// A `std::sync::Condvar` for [`Mutex`] that makes no system call to notify if no thread waits.
#[derive(Debug, Default)]
pub struct Condvar {
    inner: sync::Condvar,
    /// Changed only under the mutex. A thread that changes the awaited state under the mutex and
    /// then notifies sees every waiter.
    waiting: AtomicUsize,
}

impl Condvar {
    /// Creates a condition variable without waiters.
    #[cfg(not(all(test, kvx_loom)))]
    pub const fn new() -> Self {
        Condvar { inner: sync::Condvar::new(), waiting: AtomicUsize::new(0) }
    }

    /// Creates a condition variable without waiters.
    #[cfg(all(test, kvx_loom))]
    pub fn new() -> Self {
        Condvar { inner: sync::Condvar::new(), waiting: AtomicUsize::new(0) }
    }

    /// Wakes all waiting threads. Returns false if there were none.
    pub fn notify_all(&self) -> bool {
        let awaited = self.waiting.load(Ordering::Relaxed) > 0;
        if awaited {
            self.inner.notify_all();
        }
        awaited
    }

    /// Waits for a notification, at the latest until `until`; may also wake spuriously.
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
