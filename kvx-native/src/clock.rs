//! The clock that the machines read.

use std::time::Instant;

/// Returns the current time: the system's, or in a test that runs on virtual time the test's.
pub(crate) fn now() -> Instant {
    #[cfg(test)]
    if let Some(now) = virtual_time::now() {
        return now;
    }
    Instant::now()
}

/// Virtual time, which passes only when a test says so. It applies to the test's thread alone.
#[cfg(test)]
pub(crate) mod virtual_time {
    use std::cell::Cell;
    use std::time::{Duration, Instant};

    thread_local! {
        static TIME: Cell<Option<(Instant, Duration)>> = const { Cell::new(None) };
    }

    /// Ends the virtual time of its thread when it is dropped.
    pub(crate) struct VirtualTime(());

    impl VirtualTime {
        /// Begins virtual time for this thread, at zero.
        pub(crate) fn start() -> Self {
            assert!(!is_running(), "this thread has virtual time already");
            TIME.set(Some((Instant::now(), Duration::ZERO)));
            VirtualTime(())
        }
    }

    impl Drop for VirtualTime {
        fn drop(&mut self) {
            TIME.set(None);
        }
    }

    /// Returns the virtual time of this thread, if it has one.
    pub(crate) fn now() -> Option<Instant> {
        TIME.get().map(|(start, passed)| start + passed)
    }

    /// Returns true if this thread has virtual time.
    pub(crate) fn is_running() -> bool {
        TIME.get().is_some()
    }

    /// Returns the virtual time that has passed on this thread.
    pub(crate) fn passed() -> Duration {
        TIME.get().map_or(Duration::ZERO, |(_, passed)| passed)
    }

    /// Sets the time to `at`, unless it is later already.
    pub(crate) fn advance_to(at: Instant) {
        let (start, passed) = TIME.get().expect("virtual time is running");
        TIME.set(Some((start, passed.max(at.saturating_duration_since(start)))));
    }
}
