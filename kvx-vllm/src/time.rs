//! Time that the caller passes in: each process has its own monotonic clock.

use std::ops::Add;
use std::time::Duration;

/// A moment on one monotonic clock, counted from any fixed origin. Moments of different clocks do
/// not compare: see [`Time::rebased`] and [`ClockOffset`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(Duration);

impl Time {
    /// Returns the moment `elapsed` after the clock's origin.
    pub const fn from_origin(elapsed: Duration) -> Self {
        Time(elapsed)
    }

    /// Converts seconds as vLLM writes them. Returns `None` for a negative, infinite, NaN or too
    /// large number.
    pub fn from_seconds(seconds: f64) -> Option<Self> {
        Duration::try_from_secs_f64(seconds).ok().map(Time)
    }

    /// Returns the seconds since the clock's origin, as vLLM writes them.
    pub fn seconds(self) -> f64 {
        self.0.as_secs_f64()
    }

    /// Returns the time from `earlier` to this moment, or zero if this moment is not later.
    pub fn since(self, earlier: Time) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Returns whether `deadline` has passed. At exactly the deadline it has: a lease that ends now
    /// has ended.
    pub fn has_reached(self, deadline: Time) -> bool {
        self >= deadline
    }

    /// Converts this moment to another clock, which read `there` when this clock read `here`.
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

/// The offset of a peer's clock from the local clock, as a handshake measured it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClockOffset {
    /// Seconds to add to local time to get the peer's time.
    pub seconds: f64,
    /// The round trip of the sample, which bounds the error.
    pub round_trip: Duration,
}

impl ClockOffset {
    /// Computes the offset from one handshake: `sent` and `answered` on the local clock, and the
    /// peer's reading in between.
    pub fn sampled(sent: Time, answered: Time, peer_seconds: f64) -> Option<Self> {
        let middle = (sent.seconds() + answered.seconds()) / 2.0;
        let seconds = peer_seconds - middle;
        seconds.is_finite().then_some(ClockOffset { seconds, round_trip: answered.since(sent) })
    }

    /// Returns the sample with the shorter round trip.
    #[must_use]
    pub fn better(self, other: ClockOffset) -> ClockOffset {
        if other.round_trip < self.round_trip { other } else { self }
    }

    /// Converts a moment on the peer's clock to the local clock. Moments before the local origin
    /// become the origin.
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
