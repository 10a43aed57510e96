//! Time as a number that the caller passes in: each process has its own monotonic clock.

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
}
