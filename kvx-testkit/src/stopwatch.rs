//! Time as a clause measures it: what passed, and what of it the machine kept for itself.
//!
//! A clause asks that something ends within a tenth of a second. Where more threads want to run than there are
//! processors, or the whole machine stands still for a moment, an answer is later than that by no fault of kvx. So a
//! thread of the suite's own beats beside what is measured: it sleeps a millisecond at a time, and what it sleeps
//! longer than that it was kept from running, as kvx's threads were. On a quiet machine that is nothing, and the bound
//! is the promise itself.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a beat sleeps.
const BEAT: Duration = Duration::from_millis(1);
/// What a sleep may be late on a machine that has nothing else to do: that is no stall.
const USUAL: Duration = Duration::from_millis(1);

/// What a sleep of `wanted` that took `slept` shows the machine to have stalled.
fn stall(slept: Duration, wanted: Duration) -> Duration {
    let late = slept.saturating_sub(wanted);
    if late > USUAL { late } else { Duration::ZERO }
}

/// Runs from its start until it is dropped.
pub(crate) struct Stopwatch {
    begun: Instant,
    beats: Arc<Mutex<Beats>>,
    beating: Option<JoinHandle<()>>,
}

struct Beats {
    last: Instant,
    stalled: Duration,
    stopped: bool,
}

impl Beats {
    /// The stall until `now`, that of the beat which is not over yet among it.
    fn until(&self, now: Instant) -> Duration {
        self.stalled + stall(now.saturating_duration_since(self.last), BEAT)
    }
}

impl Stopwatch {
    /// Starts.
    pub(crate) fn start() -> std::io::Result<Self> {
        let last = Instant::now();
        let beats = Arc::new(Mutex::new(Beats { last, stalled: Duration::ZERO, stopped: false }));
        let of_thread = Arc::clone(&beats);
        let beat = move || {
            loop {
                std::thread::sleep(BEAT);
                let mut beats = of_thread.lock().unwrap_or_else(PoisonError::into_inner);
                let now = Instant::now();
                beats.stalled = beats.until(now);
                beats.last = now;
                if beats.stopped {
                    return;
                }
            }
        };
        let beating = std::thread::Builder::new().name("stopwatch".into()).spawn(beat)?;
        Ok(Stopwatch { begun: Instant::now(), beats, beating: Some(beating) })
    }

    /// What has passed since the start.
    pub(crate) fn read(&self) -> Took {
        let beats = self.beats.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        Took { time: now.saturating_duration_since(self.begun), stalled: beats.until(now) }
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        self.beats.lock().unwrap_or_else(PoisonError::into_inner).stopped = true;
        if let Some(beating) = self.beating.take() {
            beating.join().ok();
        }
    }
}

/// A time that was measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Took {
    time: Duration,
    stalled: Duration,
}

impl Took {
    /// Whether it is no shorter than that.
    pub(crate) fn reaches(self, least: Duration) -> bool {
        self.time >= least
    }

    /// Whether it is what was promised, or more by no more than the machine stalled.
    pub(crate) fn within(self, promised: Duration) -> bool {
        self.time <= promised + self.stalled
    }
}

impl fmt::Display for Took {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} (the machine stalled for {:?} of it)", self.time, self.stalled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn what_is_late_without_a_stall_is_late() {
        let took = Took { time: ms(401), stalled: Duration::ZERO };
        assert!(took.within(ms(401)) && !took.within(ms(400)));
    }

    #[test]
    fn a_stall_excuses_its_own_length_and_no_more() {
        let took = Took { time: ms(430), stalled: ms(30) };
        assert!(took.within(ms(400)) && !took.within(ms(399)));
    }

    #[test]
    fn small_lateness_of_a_sleep_is_no_stall() {
        assert_eq!(stall(ms(2), ms(1)), Duration::ZERO);
        assert_eq!(stall(ms(6), ms(1)), ms(5));
    }

    #[test]
    fn a_beat_that_is_not_over_counts() {
        let last = Instant::now();
        let beats = Beats { last, stalled: ms(7), stopped: false };
        assert_eq!(beats.until(last + ms(1)), ms(7));
        assert_eq!(beats.until(last + ms(21)), ms(27));
    }

    #[test]
    fn a_watch_measures_what_passes() {
        let watch = Stopwatch::start().unwrap();
        std::thread::sleep(ms(30));
        let took = watch.read();
        assert!(took.time >= ms(30) && took.stalled < took.time, "{took}");
    }
}
