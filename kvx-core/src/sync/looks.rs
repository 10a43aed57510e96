//! Locks that ThreadSanitizer understands, for `--cfg kvx_tsan`. The standard library's waits are
//! not instrumented, so ThreadSanitizer would report what they order as races. These locks poll
//! instead.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{self, PoisonError};
use std::time::{Duration, Instant};

/// How long a wait sleeps before it looks again.
const PAUSE: Duration = Duration::from_micros(200);

/// The counterpart of the regular `Mutex`.
#[derive(Default)]
pub struct Mutex<T> {
    is_locked: AtomicBool,
    /// Locked only by the thread that has set the flag, so that locking it never blocks.
    value: sync::Mutex<T>,
}

/// The lock, held until the guard is dropped.
pub struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    /// `Some` until the drop.
    value: Option<sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    /// Creates a mutex that holds `value`.
    pub const fn new(value: T) -> Self {
        Mutex { is_locked: AtomicBool::new(false), value: sync::Mutex::new(value) }
    }

    /// Blocks until this thread has the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        loop {
            match self.try_lock() {
                Some(guard) => return guard,
                None => std::thread::yield_now(),
            }
        }
    }

    /// Returns the value; exclusive access needs no lock.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.is_locked.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).ok()?;
        let value = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        Some(MutexGuard { mutex: self, value: Some(value) })
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("it is there until the drop")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("it is there until the drop")
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        drop(self.value.take());
        self.mutex.is_locked.store(false, Ordering::Release);
    }
}

impl<T> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Mutex")
    }
}

/// The counterpart of the regular `Condvar`.
#[derive(Debug, Default)]
pub struct Condvar;

impl Condvar {
    /// Creates a condition variable.
    pub const fn new() -> Self {
        Condvar
    }

    /// Does nothing, because waiters poll. Returns false: no thread was woken.
    pub fn notify_all(&self) -> bool {
        false
    }

    /// Sleeps for `PAUSE`, at the latest until `until`.
    pub fn wait_until<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        until: Option<Instant>,
    ) -> MutexGuard<'a, T> {
        let mutex = guard.mutex;
        drop(guard);
        let left = until.map_or(PAUSE, |until| until.saturating_duration_since(Instant::now()));
        std::thread::sleep(left.min(PAUSE));
        mutex.lock()
    }
}
