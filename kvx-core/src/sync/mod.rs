//! A mutex without poisoning, and a fence around the program's code: a panic in user code that runs near a lock (a
//! waker, a recorder) must not turn every later call into another panic.

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
