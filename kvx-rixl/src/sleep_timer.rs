//! Chooses how long the thread sleeps before it asks NIXL again: the longer, the longer nothing has
//! come.

use std::time::{Duration, Instant};

/// While requests are in progress: their end wakes nobody.
const IN_FLIGHT: Duration = Duration::from_micros(50);
/// The shortest sleep.
const SHORTEST: Duration = Duration::from_micros(50);
/// A sleep is this part of the time in which nothing has come.
const PART: u32 = 4;
/// How long something that has arrived makes it likely that more comes at once.
const BUSY: Duration = Duration::from_millis(2);

/// The longest sleeps.
struct SleepLimits {
    /// Answers are awaited.
    waiting: Duration,
    idle: Duration,
}

/// The plugin's descriptors wake the thread; the clock is for wakes that are lost.
const WOKEN: SleepLimits =
    SleepLimits { waiting: Duration::from_millis(1), idle: Duration::from_millis(50) };
/// No descriptor wakes it, or that is not known yet: messages over RDMA wake none. A look
/// costs up to 70 microseconds of a core that has slept, and an idle agent may take a hundredth of
/// one.
const BY_THE_CLOCK: SleepLimits =
    SleepLimits { waiting: Duration::from_micros(250), idle: Duration::from_millis(10) };

/// When something came last, and whether the sleeper was woken for it.
pub(crate) struct SleepTimer {
    last_came: Instant,
    /// Since [`slept`](SleepTimer::slept).
    asleep: bool,
    /// By whether what came after the last sleep had woken the sleeper.
    longest: &'static SleepLimits,
    /// The last message that came to a sleeper had not woken it: once may be chance, as it came
    /// just before the look.
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

    /// A sleep follows.
    pub(crate) fn slept(&mut self) {
        self.asleep = true;
    }

    /// Returns whether no look followed the last sleep.
    pub(crate) fn is_asleep(&self) -> bool {
        self.asleep
    }

    /// Notes a look. `woken`: the plugin had woken the sleeper. `messages`: some have arrived.
    /// `came`: they have, or something else has.
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
            self.last_came = Instant::now(); // what has woken may be had only a moment later
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

    /// Returns how long to go on looking before that, and until when at most: not at all when idle,
    /// since each look has its price.
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

    /// However long this test is kept from its core, something has only just come.
    fn just_heard() -> SleepTimer {
        SleepTimer { last_came: Instant::now() + LONG, ..SleepTimer::new() }
    }

    #[test]
    fn sleeps_grow_while_nothing_comes_and_end_somewhere() {
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
    fn whoever_has_just_heard_something_goes_on_looking() {
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
    fn a_plugin_that_does_not_wake_is_asked_by_the_clock_until_it_does() {
        let longest = |sleeps: &SleepTimer| quiet_for(LONG, sleeps.longest).next(false, false);
        let mut sleeps = SleepTimer::new();
        // What comes while nobody sleeps says nothing.
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
        assert_eq!(longest(&sleeps), WOKEN.idle, "once may be chance");
        unwoken(&mut sleeps);
        assert_eq!(longest(&sleeps), BY_THE_CLOCK.idle);
        sleeps.slept();
        sleeps.looked(true, true, true);
        assert_eq!(longest(&sleeps), WOKEN.idle);
        unwoken(&mut sleeps);
        sleeps.slept();
        sleeps.looked(true, true, true);
        unwoken(&mut sleeps);
        assert_eq!(longest(&sleeps), WOKEN.idle, "two, and not one after the other");
    }
}
