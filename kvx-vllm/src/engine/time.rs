//! Time as a number that the caller passes in: each process has its own monotonic clock.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Add;
use std::time::Duration;

/// A moment on one monotonic clock, counted from any fixed origin. Moments of two clocks do not compare: see
/// [`Time::rebased`] and [`ClockOffset`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(Duration);

impl Time {
    /// The moment so long after the clock's origin.
    pub const fn from_origin(elapsed: Duration) -> Self {
        Time(elapsed)
    }

    /// From seconds as vLLM writes them. `None`: not a moment (negative, infinite or not a number).
    pub fn from_seconds(seconds: f64) -> Option<Self> {
        Duration::try_from_secs_f64(seconds).ok().map(Time)
    }

    /// Seconds since the clock's origin, as vLLM writes them.
    pub fn seconds(self) -> f64 {
        self.0.as_secs_f64()
    }

    /// How long after `earlier` this is; nothing if it is not after it.
    pub fn since(self, earlier: Time) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Whether a deadline has come. The moment itself is too late: a lease that ends now has ended.
    pub fn has_reached(self, deadline: Time) -> bool {
        self >= deadline
    }

    /// The same moment on another clock, of which `there` was read when this one showed `here`.
    #[must_use]
    pub fn rebased(self, here: Time, there: Time) -> Time {
        if self >= here {
            there + self.since(here)
        } else {
            Time(there.0.saturating_sub(here.since(self)))
        }
    }
}

impl Add<Duration> for Time {
    type Output = Time;

    fn add(self, duration: Duration) -> Time {
        Time(self.0.saturating_add(duration))
    }
}

/// How far a peer's clock is ahead of ours, as a handshake showed it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClockOffset {
    /// Seconds to add to our time to get the peer's.
    pub seconds: f64,
    /// The round trip of the sample, which bounds the error.
    pub round_trip: Duration,
}

impl ClockOffset {
    /// From one handshake: sent and answered on our clock, the peer's reading in between.
    pub fn sampled(sent: Time, answered: Time, peer_seconds: f64) -> Option<Self> {
        let middle = (sent.seconds() + answered.seconds()) / 2.0;
        let seconds = peer_seconds - middle;
        seconds.is_finite().then_some(ClockOffset { seconds, round_trip: answered.since(sent) })
    }

    /// The sample with the shorter round trip.
    #[must_use]
    pub fn better(self, other: ClockOffset) -> ClockOffset {
        if other.round_trip < self.round_trip { other } else { self }
    }

    /// A moment that the peer named, on our clock. One before our origin is our origin.
    pub fn to_ours(self, peer_seconds: f64) -> Option<Time> {
        let ours = peer_seconds - self.seconds;
        if ours < 0.0 { Some(Time::default()) } else { Time::from_seconds(ours) }
    }
}

/// Deadlines by key, each key with at most one: the earliest comes first, wherever it was set.
#[derive(Debug)]
pub(crate) struct Deadlines<K> {
    by_key: BTreeMap<K, Time>,
    by_time: BTreeSet<(Time, K)>,
}

impl<K> Default for Deadlines<K> {
    fn default() -> Self {
        Deadlines { by_key: BTreeMap::new(), by_time: BTreeSet::new() }
    }
}

impl<K: Ord + Clone> Deadlines<K> {
    /// Sets or moves a deadline.
    pub(crate) fn set(&mut self, key: K, at: Time) {
        if let Some(old) = self.by_key.insert(key.clone(), at) {
            self.by_time.remove(&(old, key.clone()));
        }
        self.by_time.insert((at, key));
    }

    /// Takes a deadline away, if there is one.
    pub(crate) fn clear(&mut self, key: &K) {
        if let Some(at) = self.by_key.remove(key) {
            self.by_time.remove(&(at, key.clone()));
        }
    }

    /// The next deadline.
    pub(crate) fn next(&self) -> Option<Time> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// Takes the next one away, though it has not come.
    pub(crate) fn take_next(&mut self) -> Option<K> {
        let (_, key) = self.by_time.pop_first()?;
        self.by_key.remove(&key);
        Some(key)
    }

    /// Takes one that has come.
    pub(crate) fn take_reached(&mut self, now: Time) -> Option<K> {
        let (at, _) = self.by_time.first()?;
        if !now.has_reached(*at) {
            return None;
        }
        self.take_next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time::from_origin(Duration::from_secs(seconds))
    }

    #[test]
    fn a_deadline_is_rebased_to_another_clock_both_ways() {
        assert_eq!(at(110).rebased(at(100), at(7)), at(17));
        assert_eq!(at(95).rebased(at(100), at(7)), at(2));
        assert_eq!(at(10).rebased(at(100), at(7)), at(0));
    }

    #[test]
    fn a_peers_clock_is_read_in_the_middle_of_the_round_trip() {
        let offset = ClockOffset::sampled(at(10), at(12), 1011.0).unwrap();
        assert_eq!((offset.seconds, offset.round_trip), (1000.0, Duration::from_secs(2)));
        assert_eq!(offset.to_ours(1500.0), Some(at(500)));
        assert_eq!(offset.to_ours(3.0), Some(at(0)));
        assert_eq!(ClockOffset::sampled(at(10), at(12), f64::NAN), None);
        let quick = ClockOffset { seconds: 1.0, round_trip: Duration::from_millis(1) };
        assert_eq!(offset.better(quick), quick);
        assert_eq!(quick.better(offset), quick);
    }

    #[test]
    fn the_earliest_deadline_comes_first_also_after_it_was_moved() {
        let mut deadlines = Deadlines::default();
        deadlines.set("a", at(5));
        deadlines.set("b", at(6));
        deadlines.set("a", at(9));
        assert_eq!(deadlines.next(), Some(at(6)));
        assert_eq!(deadlines.take_reached(at(5)), None);
        assert_eq!(deadlines.take_reached(at(6)), Some("b"), "the moment itself is too late");
        deadlines.clear(&"a");
        assert_eq!((deadlines.next(), deadlines.take_reached(at(100))), (None, None));
    }
}
