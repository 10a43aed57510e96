//! How often NIXL is asked whether something has come.

use std::time::{Duration, Instant};

/// While requests are in progress: their end wakes nobody.
const IN_FLIGHT: Duration = Duration::from_micros(50);
/// For a while after something has come.
const BUSY: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(2));

/// For as long as nothing comes, by what wakes.
struct Idle {
    /// Answers are awaited.
    waiting: Duration,
    alone: Duration,
}

/// The plugin wakes; the clock is for what it might forget.
const WOKEN: Idle = Idle { waiting: Duration::from_millis(1), alone: Duration::from_millis(50) };
/// Nothing wakes: half of it is how long a notification waits on average, and each time costs up to 40 microseconds of a
/// core.
const BY_THE_CLOCK: Idle = Idle { waiting: Duration::from_micros(250), alone: Duration::from_millis(5) };

/// When something came last.
pub(crate) struct Pace {
    busy_at: Instant,
    idle: &'static Idle,
}

impl Pace {
    /// `woken`: the plugin wakes.
    pub(crate) fn new(woken: bool) -> Self {
        Pace { busy_at: Instant::now(), idle: if woken { &WOKEN } else { &BY_THE_CLOCK } }
    }

    /// Something has come.
    pub(crate) fn note(&mut self) {
        self.busy_at = Instant::now();
    }

    /// How long to sleep.
    pub(crate) fn sleep(&self, in_flight: bool, waiting: bool) -> Duration {
        match () {
            () if in_flight => IN_FLIGHT,
            () if self.busy_at.elapsed() < BUSY.1 => BUSY.0,
            () if waiting => self.idle.waiting,
            () => self.idle.alone,
        }
    }

    /// How long to go on looking before that: not at all when idle, since each look has its price.
    pub(crate) fn patience(&self) -> Duration {
        if self.busy_at.elapsed() < BUSY.1 { Duration::from_micros(20) } else { Duration::ZERO }
    }
}
