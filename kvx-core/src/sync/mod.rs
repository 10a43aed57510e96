//! A mutex without poisoning, and a fence around the program's code: a panic in user code that runs near a lock (a
//! waker, a recorder) must not turn every later call into another panic.

use std::sync::TryLockError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{self, PoisonError};
use std::time::Instant;

pub use std::sync::MutexGuard;

/// `std::sync::Mutex`, except that a panicked holder does not poison it.
#[derive(Debug, Default)]
pub struct Mutex<T>(sync::Mutex<T>);

impl<T> Mutex<T> {
    /// Holds `value`.
    pub const fn new(value: T) -> Self {
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
    pub const fn new() -> Self {
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
    pub fn wait_until<'a, T>(&self, guard: MutexGuard<'a, T>, until: Option<Instant>) -> MutexGuard<'a, T> {
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

/// Looks in a row without a pause: about as many as fit into a round trip.
const QUICK_LOOKS: u32 = 32;
/// A pause between later ones, in the processor's own: about a microsecond.
const PAUSES: u32 = 32;

/// Between two looks for work, of which the last so many in a row found none: whoever moves the bytes may need this
/// core, or be the other half of it.
pub fn pause_between_looks(looks: u32) {
    if looks > QUICK_LOOKS {
        (0..PAUSES).for_each(|_| std::hint::spin_loop());
    }
    std::thread::yield_now();
}

/// Runs code that may be the program's (wakers, recorders): its panic must not end the thread that serves everybody.
pub fn catch_panic(run: impl FnOnce()) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err() {
        tracing::error!("a waker, a subscriber or a recorder panicked; kvx goes on without it");
    }
}
