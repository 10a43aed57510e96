//! A mutex without poisoning, and a guard against panics of the program's code. A panic in user
//! code near a lock (a waker, a recorder) must not turn every later call into another panic.

#[cfg(all(test, kvx_loom))]
pub(crate) mod atomic;
#[cfg(not(kvx_tsan))]
mod locks;
#[cfg(kvx_tsan)]
mod looks;

#[cfg(not(all(test, kvx_loom)))]
pub(crate) use std::sync::atomic;

#[cfg(not(kvx_tsan))]
pub use locks::{Condvar, Mutex, MutexGuard};
#[cfg(kvx_tsan)]
pub use looks::{Condvar, Mutex, MutexGuard};

/// The number of looks in a row without a pause: about as many as fit into a round trip.
const QUICK_LOOKS: u32 = 32;
/// The number of processor pauses between later looks: about a microsecond.
const PAUSES: u32 = 32;

/// Pauses between two looks for work, of which the last `looks` found none. The thread that moves
/// the bytes may need this core or its sibling hyper-thread.
pub fn pause_between_looks(looks: u32) {
    if looks > QUICK_LOOKS {
        (0..PAUSES).for_each(|_| std::hint::spin_loop());
    }
    std::thread::yield_now();
}

/// Runs code that may belong to the program (wakers, recorders). Its panic must not end a thread
/// that serves all callers.
pub fn catch_panic(run: impl FnOnce()) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err() {
        tracing::error!("a waker, a subscriber or a recorder panicked; kvx continues without it");
    }
}
