//! How often NIXL is asked for what has come: the less, the longer nothing has.

use std::time::{Duration, Instant};

/// While requests are in progress: their end wakes nobody.
const IN_FLIGHT: Duration = Duration::from_micros(50);
/// The shortest sleep.
const SHORTEST: Duration = Duration::from_micros(50);
/// A sleep is this part of the time in which nothing has come.
const PART: u32 = 4;
/// How long something that has come makes it likely that more comes at once.
const BUSY: Duration = Duration::from_millis(2);

/// The longest sleeps, by what wakes.
struct Longest {
    /// Answers are awaited.
    waiting: Duration,
    alone: Duration,
}

/// The plugin wakes; the clock is for wakes that are lost. Where NIXL's own thread takes the message first, nothing is
/// there any more when the kernel looks whether this one is to be woken.
const WOKEN: Longest = Longest { waiting: Duration::from_millis(1), alone: Duration::from_millis(50) };
/// Nothing wakes: half of it is how long a notification waits on average, and each time costs some 70 microseconds of a
/// core.
const BY_THE_CLOCK: Longest =
    Longest { waiting: Duration::from_micros(250), alone: Duration::from_millis(20) };

/// When something came last.
pub(crate) struct Pace {
    heard: Instant,
    longest: &'static Longest,
}

impl Pace {
    /// `woken`: the plugin wakes.
    pub(crate) fn new(woken: bool) -> Self {
        let longest = if woken { &WOKEN } else { &BY_THE_CLOCK };
        Pace { heard: Instant::now(), longest }
    }

    /// Something has come, or the plugin has woken the reactor: NIXL's own thread is often first then, and the message can
    /// be had only a moment later.
    pub(crate) fn note(&mut self) {
        self.heard = Instant::now();
    }

    /// How long to sleep.
    pub(crate) fn sleep(&self, in_flight: bool, waiting: bool) -> Duration {
        let longest = match () {
            () if in_flight => IN_FLIGHT,
            () if waiting => self.longest.waiting,
            () => self.longest.alone,
        };
        (self.heard.elapsed() / PART).clamp(SHORTEST, longest)
    }

    /// How long to go on looking before that: not at all when idle, since each look has its price.
    pub(crate) fn patience(&self) -> Duration {
        if self.heard.elapsed() < BUSY { Duration::from_micros(20) } else { Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quiet_for(time: Duration, woken: bool) -> Pace {
        let heard = Instant::now().checked_sub(time).expect("the machine has run for longer");
        Pace { heard, ..Pace::new(woken) }
    }

    #[test]
    fn sleeps_grow_while_nothing_comes_and_end_somewhere() {
        let long = Duration::from_secs(60);
        assert_eq!(Pace::new(true).sleep(false, false), SHORTEST);
        assert!(quiet_for(Duration::from_millis(8), true).sleep(false, false) >= Duration::from_millis(2));
        assert_eq!(quiet_for(long, true).sleep(false, false), WOKEN.alone);
        assert_eq!(quiet_for(long, false).sleep(false, false), BY_THE_CLOCK.alone);
        assert_eq!(quiet_for(long, true).sleep(false, true), WOKEN.waiting);
        assert_eq!(quiet_for(long, true).sleep(true, true), IN_FLIGHT);
    }
}
