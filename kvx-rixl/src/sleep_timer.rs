//! Chooses how long the thread sleeps before it polls NIXL again: the longer nothing has happened,
//! the longer.

use std::time::{Duration, Instant};

/// The sleep while requests are in progress: their end wakes no thread.
const IN_FLIGHT: Duration = Duration::from_micros(50);
/// The shortest sleep.
const SHORTEST: Duration = Duration::from_micros(50);
/// A sleep is 1 / `PART` of the time without events.
const PART: u32 = 4;
/// The time after an event during which more are likely.
const BUSY: Duration = Duration::from_millis(2);

/// The longest sleeps.
struct SleepLimits {
    /// While answers are awaited.
    waiting: Duration,
    idle: Duration,
}

/// The limits if the plugin's descriptors wake the thread; the timeout is for lost wakes.
const WOKEN: SleepLimits =
    SleepLimits { waiting: Duration::from_millis(1), idle: Duration::from_millis(50) };
/// The limits if no descriptor wakes the thread, or that is not known yet: messages over RDMA wake
/// none. A poll costs up to 70 µs of a core that has slept, and an idle agent may use a hundredth
/// of a core.
const BY_THE_CLOCK: SleepLimits =
    SleepLimits { waiting: Duration::from_micros(250), idle: Duration::from_millis(10) };

/// Records the time of the last event, and whether the thread was woken for it.
pub(crate) struct SleepTimer {
    last_came: Instant,
    /// True since [`slept`](SleepTimer::slept).
    asleep: bool,
    /// Depends on whether the event after the last sleep had woken the thread.
    longest: &'static SleepLimits,
    /// True if the last message during a sleep had not woken the thread. Once may be a coincidence,
    /// if it arrived just before the poll.
    missed: bool,
}

impl SleepTimer {
    pub(crate) fn new() -> Self {
        SleepTimer {
            last_came: Instant::now(),
            asleep: false,
            longest: &BY_THE_CLOCK,
            missed: false,
        }
    }

    /// Records that a sleep follows.
    pub(crate) fn slept(&mut self) {
        self.asleep = true;
    }

    /// Returns whether no poll has followed the last sleep.
    pub(crate) fn is_asleep(&self) -> bool {
        self.asleep
    }

    /// Records a poll. `woken`: the plugin had woken the thread. `messages`: messages have arrived.
    /// `came`: messages or other events have.
    pub(crate) fn looked(&mut self, woken: bool, messages: bool, came: bool) {
        let slept = std::mem::take(&mut self.asleep);
        if messages && slept {
            match (woken, std::mem::replace(&mut self.missed, !woken)) {
                (true, _) => self.longest = &WOKEN,
                (false, true) => self.longest = &BY_THE_CLOCK,
                (false, false) => {}
            }
        }
        if came || woken {
            self.last_came = Instant::now(); // the data that woke the thread may become readable later
        }
    }

    /// Returns how long to sleep.
    pub(crate) fn next(&self, in_flight: bool, waiting: bool) -> Duration {
        let longest = match () {
            () if in_flight => IN_FLIGHT,
            () if waiting => self.longest.waiting,
            () => self.longest.idle,
        };
        (self.last_came.elapsed() / PART).clamp(SHORTEST, longest)
    }

    /// Returns how long to poll before sleeping, and until when at most. An idle thread does not
    /// poll, because each poll has a cost.
    pub(crate) fn looks(&self) -> (Duration, Option<Instant>) {
        (Duration::from_micros(20), Some(self.last_came + BUSY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quiet_for(time: Duration, longest: &'static SleepLimits) -> SleepTimer {
        let last_came = Instant::now().checked_sub(time).expect("the machine has run for longer");
        SleepTimer { last_came, longest, ..SleepTimer::new() }
    }

    const LONG: Duration = Duration::from_secs(60);

    /// Returns a timer with a very recent event, however slowly this test runs.
    fn just_heard() -> SleepTimer {
        SleepTimer { last_came: Instant::now() + LONG, ..SleepTimer::new() }
    }

    #[test]
    fn sleeps_grow_without_events_up_to_a_limit() {
        assert_eq!(just_heard().next(false, false), SHORTEST);
        assert!(
            quiet_for(Duration::from_millis(8), &WOKEN).next(false, false)
                >= Duration::from_millis(2)
        );
        for longest in [&WOKEN, &BY_THE_CLOCK] {
            let sleeps = quiet_for(LONG, longest);
            assert_eq!(sleeps.next(false, false), longest.idle);
            assert_eq!(sleeps.next(false, true), longest.waiting);
            assert_eq!(sleeps.next(true, true), IN_FLIGHT);
        }
    }

    #[test]
    fn polling_continues_after_an_event() {
        let idle = quiet_for(BUSY, &WOKEN);
        let looks =
            |sleeps: &SleepTimer| sleeps.looks().1.is_some_and(|until| until > Instant::now());
        assert!(looks(&just_heard()) && !looks(&idle));
        for (woken, came) in [(false, false), (true, false), (false, true)] {
            let (mut sleeps, now) = (quiet_for(LONG, &WOKEN), Instant::now());
            sleeps.looked(woken, false, came);
            assert_eq!(sleeps.last_came >= now, woken || came, "{woken} {came}");
        }
    }

    #[test]
    fn a_plugin_that_does_not_wake_the_thread_is_polled_until_it_does() {
        let longest = |sleeps: &SleepTimer| quiet_for(LONG, sleeps.longest).next(false, false);
        let mut sleeps = SleepTimer::new();
        // A message that arrives outside of a sleep gives no information.
        sleeps.looked(true, true, true);
        assert_eq!(longest(&sleeps), BY_THE_CLOCK.idle);
        sleeps.slept();
        sleeps.looked(false, false, true);
        assert_eq!(longest(&sleeps), BY_THE_CLOCK.idle);
        sleeps.slept();
        sleeps.looked(true, true, true);
        assert_eq!(longest(&sleeps), WOKEN.idle);
        let unwoken = |sleeps: &mut SleepTimer| {
            sleeps.slept();
            sleeps.looked(false, true, true);
        };
        unwoken(&mut sleeps);
        assert_eq!(longest(&sleeps), WOKEN.idle, "once may be a coincidence");
        unwoken(&mut sleeps);
        assert_eq!(longest(&sleeps), BY_THE_CLOCK.idle);
        sleeps.slept();
        sleeps.looked(true, true, true);
        assert_eq!(longest(&sleeps), WOKEN.idle);
        unwoken(&mut sleeps);
        sleeps.slept();
        sleeps.looked(true, true, true);
        unwoken(&mut sleeps);
        assert_eq!(longest(&sleeps), WOKEN.idle, "two, but not consecutive");
    }
}
