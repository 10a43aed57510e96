//! Locks that ThreadSanitizer sees all of, with `--cfg kvx_tsan`: the standard library's own waits are not
//! instrumented, and what they order would be reported as races. These wait by looking again.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{self, PoisonError};
use std::time::{Duration, Instant};

/// How long a wait sleeps before it looks again.
const PAUSE: Duration = Duration::from_micros(200);

/// As the other `Mutex` of this name.
#[derive(Default)]
pub struct Mutex<T> {
    is_locked: AtomicBool,
    /// Locked by whoever has set the flag: nobody ever waits for it.
    value: sync::Mutex<T>,
}

/// The lock, until it is dropped.
pub struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    /// There until the drop.
    value: Option<sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    /// Holds `value`.
    pub const fn new(value: T) -> Self {
        Mutex { is_locked: AtomicBool::new(false), value: sync::Mutex::new(value) }
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        loop {
            match self.try_lock() {
                Some(guard) => return guard,
                None => std::thread::yield_now(),
            }
        }
    }

    /// The value of a mutex that nobody else can reach.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock, if nobody holds it.
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

/// As the other `Condvar` of this name.
#[derive(Debug, Default)]
pub struct Condvar;

impl Condvar {
    /// Nobody waits yet.
    pub const fn new() -> Self {
        Condvar
    }

    /// Who waits looks by itself. Returns that nobody was woken.
    pub fn notify_all(&self) -> bool {
        false
    }

    /// Wakes up a while later, or at `until`.
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
