//! The clock of an engine, which its `Scheduler`, `Worker`s and side channel share.

use std::time::{Duration, Instant};

use kvx_vllm::engine::Time;

/// A monotonic clock. Copies show the same time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    origin: Instant,
}

impl Clock {
    /// The age of a new clock. A peer may name a time before this process started, and the clock
    /// has to represent it.
    const HEAD_START: Duration = Duration::from_secs(1);

    /// Starts a clock.
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Clock { origin: now.checked_sub(Self::HEAD_START).unwrap_or(now) }
    }

    /// Returns the current time.
    pub(crate) fn now(&self) -> Time {
        self.at(Instant::now())
    }

    /// Converts a moment of this process to the clock's time. Moments before the origin become the
    /// origin.
    pub(crate) fn at(&self, moment: Instant) -> Time {
        Time::from_origin(moment.saturating_duration_since(self.origin))
    }

    /// Converts a time to a moment, for timers. Returns `None` if the moment is beyond the range of
    /// the system's clock.
    pub(crate) fn moment(&self, time: Time) -> Option<Instant> {
        self.origin.checked_add(time.since(Time::default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_and_its_moment_are_the_same() {
        let clock = Clock::new();
        let now = clock.now();
        assert_eq!(clock.at(clock.moment(now).unwrap()), now);
        assert_eq!(clock.moment(Time::from_origin(Duration::MAX)), None);
        assert!(clock.now() >= now && now >= Time::from_origin(Clock::HEAD_START));
    }
}
