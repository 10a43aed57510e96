//! Detection of peers that are silent although they owe an answer.

use std::time::{Duration, Instant};

/// The longest time between two checks.
const LONGEST_STEP: Duration = Duration::from_secs(1);

/// The record of a peer's silence.
///
/// A peer is lost after several consecutive checks without a sign of life; the checks have equal
/// intervals and together fill the timeout. Elapsed time alone is not enough: to a process that was
/// stopped every peer seems silent, but it counts a single check, however long it was stopped.
#[derive(Debug)]
pub struct Silence {
    /// True if an answer is outstanding.
    awaits: bool,
    /// The last time that a message arrived, that the wait for an answer began, or that a check saw
    /// no sign of life.
    seen: Instant,
    /// The number of consecutive checks without a sign of life.
    in_vain: u32,
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SilenceStatus {
    /// No answer is outstanding.
    Idle,
    /// The time of the next check.
    Until(Instant),
    /// The peer must be asked for a sign of life, and checked again at this time.
    Ask(Instant),
    /// The peer has been silent for too long.
    Lost,
}

impl Silence {
    /// Creates a record without an outstanding answer.
    pub fn new(now: Instant) -> Self {
        Silence { awaits: false, seen: now, in_vain: 0 }
    }

    /// Returns the time between two checks: a quarter of the timeout, and at most a second.
    pub fn step(timeout: Duration) -> Duration {
        (timeout / 4).clamp(Duration::from_millis(1), LONGEST_STEP)
    }

    /// Returns true if an answer is outstanding.
    pub fn awaits_answer(&self) -> bool {
        self.awaits
    }

    /// Returns the time at which the peer last sent something or was last checked.
    pub fn since(&self) -> Instant {
        self.seen
    }

    /// Records that the peer sent something.
    pub fn note_activity(&mut self, now: Instant) {
        (self.seen, self.in_vain) = (now, 0);
    }

    /// Records whether an answer is outstanding. Returns the time if the wait has just begun: the
    /// first check is due a step later.
    pub fn note(&mut self, awaits: bool, now: impl FnOnce() -> Instant) -> Option<Instant> {
        let awaited = std::mem::replace(&mut self.awaits, awaits);
        (awaits && !awaited).then(|| {
            let now = now();
            self.note_activity(now);
            now
        })
    }

    /// Checks the peer.
    pub fn look(&mut self, now: Instant, timeout: Duration) -> SilenceStatus {
        let step = Self::step(timeout);
        if !self.awaits {
            return SilenceStatus::Idle;
        }
        if now < self.seen + step {
            return SilenceStatus::Until(self.seen + step);
        }
        (self.seen, self.in_vain) = (now, self.in_vain.saturating_add(1));
        match self.in_vain {
            looks if step.saturating_mul(looks) >= timeout => SilenceStatus::Lost,
            1 => SilenceStatus::Ask(now + step),
            _ => SilenceStatus::Until(now + step),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(4);

    /// A peer that owes an answer since `now`, on a clock that the test moves.
    struct SilentPeer {
        silence: Silence,
        now: Instant,
    }

    impl SilentPeer {
        fn new() -> Self {
            let now = Instant::now();
            let mut silence = Silence::new(now);
            assert_eq!(silence.look(now + TIMEOUT * 100, TIMEOUT), SilenceStatus::Idle);
            assert_eq!(silence.note(true, || now), Some(now));
            assert_eq!(silence.note(true, || unreachable!("the wait has begun already")), None);
            SilentPeer { silence, now }
        }

        fn after(&mut self, time: Duration) -> SilenceStatus {
            self.now += time;
            self.silence.look(self.now, TIMEOUT)
        }
    }

    #[test]
    fn a_silent_peer_is_asked_once_and_lost_after_the_timeout() {
        let mut waiting = SilentPeer::new();
        let (step, lost_at) = (TIMEOUT / 4, waiting.now + TIMEOUT);
        assert_eq!(waiting.after(step / 2), SilenceStatus::Until(waiting.now + step / 2));
        assert_eq!(waiting.after(step / 2), SilenceStatus::Ask(waiting.now + step));
        for _ in 0..2 {
            assert_eq!(waiting.after(step / 2), SilenceStatus::Until(waiting.now + step / 2));
            assert_eq!(waiting.after(step / 2), SilenceStatus::Until(waiting.now + step));
        }
        assert_eq!(waiting.after(step), SilenceStatus::Lost);
        assert_eq!(waiting.now, lost_at);
    }

    #[test]
    fn long_and_short_timeouts_are_kept() {
        for (timeout, looks) in [(10_000, 10), (10_500, 11), (1_000, 4), (20, 4), (2, 2), (0, 1)] {
            let (timeout, start) = (Duration::from_millis(timeout), Instant::now());
            let mut silence = Silence::new(start);
            silence.note(true, || start);
            let step = Silence::step(timeout);
            let lost = (1..20)
                .find(|look| silence.look(start + step * *look, timeout) == SilenceStatus::Lost);
            assert_eq!(lost, Some(looks), "{timeout:?}");
        }
    }

    #[test]
    fn a_process_that_was_stopped_does_not_lose_its_peer() {
        // The process is stopped before it asks, just after that, and in the middle of the peer's
        // time.
        for looks in 0..3 {
            let mut waiting = SilentPeer::new();
            let step = TIMEOUT / 4;
            (0..looks).for_each(|_| assert_ne!(waiting.after(step), SilenceStatus::Lost));
            for look in looks..3 {
                let next = waiting.now + TIMEOUT * 10 + step;
                let found =
                    if look == 0 { SilenceStatus::Ask(next) } else { SilenceStatus::Until(next) };
                assert_eq!(waiting.after(TIMEOUT * 10), found, "{looks}");
            }
            assert_eq!(waiting.after(step), SilenceStatus::Lost);
        }
    }

    #[test]
    fn a_message_or_a_new_wait_restarts_the_timeout() {
        let mut waiting = SilentPeer::new();
        let step = TIMEOUT / 4;
        (0..3).for_each(|_| assert_ne!(waiting.after(step), SilenceStatus::Lost));
        waiting.silence.note_activity(waiting.now);
        assert_eq!(waiting.after(step), SilenceStatus::Ask(waiting.now + step));
        assert_eq!(waiting.silence.note(false, || unreachable!("nothing begins")), None);
        assert_eq!(waiting.after(TIMEOUT), SilenceStatus::Idle);
        let now = waiting.now;
        assert_eq!(waiting.silence.note(true, || now), Some(now));
        assert_eq!(waiting.after(step), SilenceStatus::Ask(waiting.now + step));
    }
}
