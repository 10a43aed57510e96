//! How often NIXL is asked for what has come: the less, the longer nothing has.

use std::thread::ThreadId;
use std::time::{Duration, Instant};

use crate::flow::{self, Flow};

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

/// The plugin has descriptors, and nobody knows yet whether what comes wakes by them: messages over RDMA do not.
const UNPROVEN: Longest = Longest { waiting: BY_THE_CLOCK.waiting, alone: Duration::from_millis(10) };
/// The plugin wakes; the clock is for wakes that are lost.
const WOKEN: Longest = Longest { waiting: Duration::from_millis(1), alone: Duration::from_millis(50) };
/// Nothing wakes: half of it is how long a notification waits on average, where a look is no dearer than [`SHARE`] allows.
const BY_THE_CLOCK: Longest =
    Longest { waiting: Duration::from_micros(250), alone: Duration::from_micros(2_600) };

/// What looks may take of a core where nothing comes: one part in so many, under the hundredth that is promised.
const SHARE: u32 = 160;
/// However dear a look is, nobody waits longer for it.
const LONGEST: Duration = Duration::from_millis(20);
/// The dearest look that leaves the core its share. A dearer one has moved somebody's bytes, and says nothing of idle ones.
const DEAREST: Duration = Duration::from_micros(LONGEST.as_micros() as u64 / SHARE as u64);

/// How long a thread has had a core.
#[derive(Clone, Copy)]
struct Had {
    thread: ThreadId,
    time: Duration,
}

impl Had {
    /// What the calling thread has had.
    fn now() -> Self {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let time = Duration::try_from(time).unwrap_or_default();
        Had { thread: std::thread::current().id(), time }
    }
}

/// When something came last, and whether a sleeper was woken for it.
pub(crate) struct Pace {
    heard: Instant,
    /// Since [`slept`](Pace::slept).
    asleep: bool,
    /// By whether what came after the last sleep had woken the sleeper.
    longest: &'static Longest,
    /// The last message that came to a sleeper had not woken it: once may be chance, as it came just before the look.
    missed: bool,
    /// What a sleep and the look after it cost lately, where there was nothing to do: 20 microseconds on a machine at work, and three
    /// times as much where the core had been asleep.
    price: Duration,
    /// At the last sleep, if there was nothing to do then and nothing has come since.
    had: Option<Had>,
    /// Whether it may stay awake for notifications that flow.
    stays_awake: bool,
    /// Of notifications, while there may be one.
    flow: Option<Flow>,
}

impl Pace {
    /// `wakes`: the plugin has descriptors that may wake. `stays_awake`: it may, for notifications that flow.
    pub(crate) fn new(wakes: bool, stays_awake: bool) -> Self {
        let longest = if wakes { &UNPROVEN } else { &BY_THE_CLOCK };
        Pace {
            heard: Instant::now(),
            asleep: false,
            longest,
            missed: false,
            price: Duration::ZERO,
            had: None,
            stays_awake,
            flow: None,
        }
    }

    /// A sleep follows. `idle`: there is nothing to do.
    pub(crate) fn slept(&mut self, idle: bool) {
        self.asleep = true;
        let had = idle.then(Had::now);
        if let (Some(before), Some(had)) = (std::mem::replace(&mut self.had, had), had)
            && before.thread == had.thread
        {
            let cost = had.time.saturating_sub(before.time);
            if cost <= DEAREST {
                self.price = (self.price * 7 + cost) / 8;
            }
        }
        self.flow.iter_mut().for_each(Flow::slept);
    }

    /// Whether nobody has looked since the last sleep.
    pub(crate) fn is_asleep(&self) -> bool {
        self.asleep
    }

    /// A notification has come, for the program.
    pub(crate) fn notified(&mut self) {
        if !self.stays_awake {
            return;
        }
        let now = Instant::now();
        self.flow.get_or_insert_with(|| Flow::begin(now)).heard(now);
    }

    /// Somebody has looked. `woken`: the plugin had woken the sleeper. `told`: messages have come. `came`: they have, or
    /// something else.
    pub(crate) fn looked(&mut self, woken: bool, told: bool, came: bool) {
        let slept = std::mem::take(&mut self.asleep);
        if told && slept {
            match (woken, std::mem::replace(&mut self.missed, !woken)) {
                (true, _) => self.longest = &WOKEN,
                (false, true) => self.longest = &BY_THE_CLOCK,
                (false, false) => {}
            }
        }
        if came || woken {
            self.had = None;
            self.heard = Instant::now(); // what has woken may be had only a moment later
        }
        if let Some(flow) = &mut self.flow
            && !flow.looked(Instant::now())
        {
            self.flow = None;
        }
    }

    /// How long to sleep.
    pub(crate) fn sleep(&self, in_flight: bool, waiting: bool) -> Duration {
        let longest = match () {
            () if in_flight => IN_FLIGHT,
            () if waiting => self.longest.waiting,
            () => self.longest.alone.max(self.price * SHARE),
        };
        (self.heard.elapsed() / PART).clamp(SHORTEST, longest)
    }

    /// How long to go on looking before that, and until when at most: not at all when idle, since each look has its price.
    pub(crate) fn looks(&self) -> (Duration, Option<Instant>) {
        if self.flow.as_ref().is_some_and(Flow::is_worth_a_core) {
            return (flow::GAP, None);
        }
        (Duration::from_micros(20), Some(self.heard + BUSY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quiet_for(time: Duration, longest: &'static Longest) -> Pace {
        let heard = Instant::now().checked_sub(time).expect("the machine has run for longer");
        Pace { heard, longest, ..Pace::new(true, true) }
    }

    const LONG: Duration = Duration::from_secs(60);

    impl Pace {
        fn patience(&self) -> Duration {
            let (patience, until) = self.looks();
            if until.is_some_and(|until| until <= Instant::now()) { Duration::ZERO } else { patience }
        }
    }

    /// However long this test is kept from its core, something has only just come.
    fn just_heard() -> Pace {
        Pace { heard: Instant::now() + LONG, ..Pace::new(true, true) }
    }

    #[test]
    fn sleeps_grow_while_nothing_comes_and_end_somewhere() {
        assert_eq!(just_heard().sleep(false, false), SHORTEST);
        assert!(quiet_for(Duration::from_millis(8), &WOKEN).sleep(false, false) >= Duration::from_millis(2));
        for longest in [&UNPROVEN, &WOKEN, &BY_THE_CLOCK] {
            let pace = quiet_for(LONG, longest);
            assert_eq!(pace.sleep(false, false), longest.alone);
            assert_eq!(pace.sleep(false, true), longest.waiting);
            assert_eq!(pace.sleep(true, true), IN_FLIGHT);
        }
    }

    #[test]
    fn whoever_has_just_heard_something_goes_on_looking() {
        let idle = quiet_for(BUSY, &WOKEN);
        assert!(!just_heard().patience().is_zero() && idle.patience().is_zero());
        for (woken, came) in [(false, false), (true, false), (false, true)] {
            let (mut pace, now) = (quiet_for(LONG, &WOKEN), Instant::now());
            pace.looked(woken, false, came);
            assert_eq!(pace.heard >= now, woken || came, "{woken} {came}");
        }
    }

    #[test]
    fn where_notifications_flow_the_next_is_looked_for_until_it_is_late() {
        let mut pace = Pace { flow: Some(Flow::proven()), ..just_heard() };
        pace.looked(false, true, true);
        assert_eq!(pace.patience(), flow::GAP);
        pace.notified();
        pace.slept(true);
        std::thread::sleep(2 * flow::GAP);
        pace.looked(false, false, false);
        assert!(pace.flow.is_none() && pace.patience() < flow::GAP);
        pace.notified();
        pace.looked(false, true, true);
        assert!(pace.patience() < flow::GAP, "one alone is no flow");
    }

    #[test]
    fn a_plugin_that_does_not_wake_is_asked_by_the_clock_until_it_does() {
        let longest = |pace: &Pace| quiet_for(LONG, pace.longest).sleep(false, false);
        assert_eq!(longest(&Pace::new(false, true)), BY_THE_CLOCK.alone);
        let mut pace = Pace::new(true, true);
        // What comes while nobody sleeps says nothing.
        pace.looked(false, true, true);
        assert_eq!(longest(&pace), UNPROVEN.alone);
        pace.slept(true);
        pace.looked(false, false, true);
        assert_eq!(longest(&pace), UNPROVEN.alone);
        pace.slept(true);
        pace.looked(true, true, true);
        assert_eq!(longest(&pace), WOKEN.alone);
        let unwoken = |pace: &mut Pace| {
            pace.slept(true);
            pace.looked(false, true, true);
        };
        unwoken(&mut pace);
        assert_eq!(longest(&pace), WOKEN.alone, "once may be chance");
        unwoken(&mut pace);
        assert_eq!(longest(&pace), BY_THE_CLOCK.alone);
        pace.slept(true);
        pace.looked(true, true, true);
        assert_eq!(longest(&pace), WOKEN.alone);
        unwoken(&mut pace);
        pace.slept(true);
        pace.looked(true, true, true);
        unwoken(&mut pace);
        assert_eq!(longest(&pace), WOKEN.alone, "two, and not one after the other");
    }

    #[test]
    fn dear_looks_are_fewer_and_only_at_idle() {
        let dear = |price| Pace { price, ..quiet_for(LONG, &BY_THE_CLOCK) };
        let us = Duration::from_micros;
        assert_eq!(dear(us(10)).sleep(false, false), BY_THE_CLOCK.alone);
        assert_eq!(dear(us(50)).sleep(false, false), us(8_000));
        assert_eq!(dear(DEAREST).sleep(false, false), LONGEST);
        assert_eq!(dear(DEAREST).sleep(false, true), BY_THE_CLOCK.waiting);
        assert_eq!(dear(DEAREST).sleep(true, false), IN_FLIGHT);
    }

    #[test]
    fn looks_are_priced_by_what_their_own_thread_has_had_of_a_core_at_idle() {
        let work = |time| {
            let begun = Had::now();
            while Had::now().time - begun.time < time {}
        };
        let (little, much) = (DEAREST / 4, 4 * DEAREST);
        // A thread that loses its core works longer than it is asked to, which may be too long to count.
        let mut pace = Pace::new(false, true);
        let priced = (0..1000).any(|_| {
            pace.slept(true);
            work(little);
            pace.looked(false, false, false);
            pace.slept(true);
            !pace.price.is_zero()
        });
        assert!(priced && pace.price >= little / 8, "{:?}", pace.price);
        // Nothing else counts: what moved bytes, what had something to do, what something that came has cost, another thread.
        let price = pace.price;
        work(much);
        pace.slept(true);
        work(little);
        pace.slept(false);
        work(little);
        pace.slept(true);
        work(little);
        pace.looked(false, true, true);
        pace.slept(true);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                work(little);
                pace.slept(true);
            });
        });
        assert_eq!(pace.price, price);
    }

    #[test]
    fn who_is_to_sleep_sleeps_also_while_notifications_flow() {
        let mut pace = Pace { stays_awake: false, ..just_heard() };
        pace.notified();
        assert!(pace.flow.is_none());
    }
}
