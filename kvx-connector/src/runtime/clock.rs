//! The one clock of an engine: its `Scheduler`, its `Worker`s and its side channel read the same.

use std::time::{Duration, Instant};

use kvx_vllm::engine::Time;

/// A monotonic clock. Copies show the same time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    origin: Instant,
}

impl Clock {
    /// Begins a little after its origin: what a peer names may lie before this process, and has to
    /// be representable.
    const HEAD_START: Duration = Duration::from_secs(1);

    /// A clock that begins now.
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Clock { origin: now.checked_sub(Self::HEAD_START).unwrap_or(now) }
    }

    /// What it shows.
    pub(crate) fn now(&self) -> Time {
        self.at(Instant::now())
    }

    /// What it shows at a moment of this process; its origin for moments before that.
    pub(crate) fn at(&self, moment: Instant) -> Time {
        Time::from_origin(moment.saturating_duration_since(self.origin))
    }

    /// The moment at which it shows this time, for timers; `None` if that is beyond what the system
    /// counts.
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
