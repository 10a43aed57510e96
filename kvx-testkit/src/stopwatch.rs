//! Measures the time of an operation, and how much of it the machine stalled.
//!
//! A clause requires that something ends within a tenth of a second. If more threads want to run
//! than there are processors, or if a processor stalls for a moment, an answer is late through no
//! fault of kvx. So threads of the suite run concurrently with what is measured. Each sleeps for a
//! millisecond at a time, and the time that it sleeps longer is time in which the machine kept it
//! from running.
//!
//! One thread may run on any processor, like kvx's threads, and shows how busy the machine is. The
//! others are bound to one processor each, and show when that processor stalls, perhaps together
//! with the thread of kvx that had to answer. Time in which several of them are late counts once.
//! On a quiet machine the stalls are zero, and the bound is the promise itself.
//!
//! The threads belong to the process, and sleep while nothing is measured. Starting threads for
//! each measurement kept the kernel busy for seconds while another clause was reading the list of
//! threads.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The duration of a beat's sleep.
const BEAT: Duration = Duration::from_millis(1);
/// The usual lateness of a sleep on an idle machine, which is not a stall.
const USUAL: Duration = Duration::from_millis(1);
/// The usual lateness of a bound thread: others take turns on its processor, which kvx's threads
/// need not wait for.
const TURNS: Duration = Duration::from_millis(20);

/// The maximum number of processors with their own beat.
const MOST_BOUND: usize = 8;
/// How long stalls are remembered: longer than any clause may take.
const KEPT: Duration = Duration::from_secs(120);

/// A measurement that runs from its start until it is dropped.
pub(crate) struct Stopwatch {
    begun: Instant,
}

/// A period of time, from the first moment to the second.
type Stall = (Instant, Instant);

/// The beats of this process.
static BEATS: Mutex<Beats> = Mutex::new(Beats::none());
/// Notified when a measurement starts.
static MEASURED: Condvar = Condvar::new();

/// The results of the beats so far.
struct Beats {
    /// The current beat of each thread; empty before the first measurement.
    running: Vec<Beat>,
    /// The periods in which at least one thread was late, in order and without overlap.
    stalls: VecDeque<Stall>,
    /// The number of running measurements.
    watches: usize,
}

/// A beat that has not ended.
#[derive(Clone, Copy)]
struct Beat {
    begun: Instant,
    /// The permitted lateness.
    usual: Duration,
}

impl Beat {
    /// Returns the stall of the machine until `now`.
    fn stall(self, now: Instant) -> Option<Stall> {
        let due = self.begun + BEAT;
        (now.saturating_duration_since(due) > self.usual).then_some((due, now))
    }
}

/// Adds a stall that ends no sooner than any stall before it.
fn add(stalls: &mut VecDeque<Stall>, (mut from, until): Stall) {
    while let Some((begun, _)) = stalls.back().filter(|(_, ended)| *ended >= from) {
        from = from.min(*begun);
        stalls.pop_back();
    }
    stalls.push_back((from, until));
}

impl Beats {
    const fn none() -> Self {
        Beats { running: Vec::new(), stalls: VecDeque::new(), watches: 0 }
    }

    /// Ends a thread's beat and starts its next one.
    fn over(&mut self, thread: usize, now: Instant) {
        let beat = &mut self.running[thread];
        let stall = beat.stall(now);
        beat.begun = now;
        stall.into_iter().for_each(|stall| add(&mut self.stalls, stall));
        while self.stalls.front().is_some_and(|(_, until)| now - *until > KEPT) {
            self.stalls.pop_front();
        }
    }

    /// Returns how long at least one thread was late from `since` until `now`, including beats that
    /// have not ended.
    fn stalled(&self, since: Instant, now: Instant) -> Duration {
        let mut stalls = self.stalls.clone();
        self.running
            .iter()
            .filter_map(|beat| beat.stall(now))
            .for_each(|stall| add(&mut stalls, stall));
        stalls
            .into_iter()
            .map(|(from, until)| until.saturating_duration_since(from.max(since)))
            .sum()
    }
}

fn beats() -> MutexGuard<'static, Beats> {
    BEATS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Beats for ever, on this processor or on any.
fn beat(thread: usize, processor: Option<usize>) {
    if let Some(processor) = processor {
        let mut one = CpuSet::new();
        one.set(processor);
        // If this fails, for example because the processor was taken offline, the thread runs on
        // any processor: it then sees, and excuses, less.
        sched_setaffinity(None, &one).ok();
    }
    loop {
        std::thread::sleep(BEAT);
        let mut beats = beats();
        if beats.watches > 0 {
            beats.over(thread, Instant::now());
        } else {
            let unwatched = MEASURED.wait_while(beats, |beats| beats.watches == 0);
            drop(unwatched.unwrap_or_else(PoisonError::into_inner));
        }
    }
}

/// Starts the threads of this process.
fn start(beats: &mut Beats) -> io::Result<()> {
    let allowed = sched_getaffinity(None)?;
    let bound = (0..CpuSet::MAX_CPU)
        .filter(|processor| allowed.is_set(*processor))
        .take(MOST_BOUND)
        .map(Some);
    for processor in std::iter::once(None).chain(bound) {
        let (thread, usual) = (beats.running.len(), processor.map_or(USUAL, |_| TURNS));
        std::thread::Builder::new()
            .name("stopwatch".into())
            .spawn(move || beat(thread, processor))?;
        beats.running.push(Beat { begun: Instant::now(), usual });
    }
    Ok(())
}

impl Stopwatch {
    /// Starts a measurement.
    pub(crate) fn start() -> io::Result<Self> {
        let mut beats = beats();
        if beats.running.is_empty() {
            start(&mut beats)?;
        }
        let begun = Instant::now();
        if beats.watches == 0 {
            beats.running.iter_mut().for_each(|beat| beat.begun = begun);
            MEASURED.notify_all();
        }
        beats.watches += 1;
        Ok(Stopwatch { begun })
    }

    /// Returns the time since the start.
    pub(crate) fn read(&self) -> Took {
        let beats = beats();
        let now = Instant::now();
        Took { time: now - self.begun, stalled: beats.stalled(self.begun, now) }
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        beats().watches -= 1;
    }
}

/// A measured duration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Took {
    time: Duration,
    stalled: Duration,
}

impl Took {
    /// Returns whether the duration is at least `least`.
    pub(crate) fn reaches(self, least: Duration) -> bool {
        self.time >= least
    }

    /// Returns whether the duration exceeds `promised` by at most the time that the machine
    /// stalled.
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

    /// Creates the beats of threads that begin at `begun`, with these permitted latenesses.
    fn beats_of(begun: Instant, usual: &[Duration]) -> Beats {
        let running = usual.iter().map(|usual| Beat { begun, usual: *usual }).collect();
        Beats { running, ..Beats::none() }
    }

    /// Returns what is measured if the beats of two threads end at these milliseconds. The threads
    /// may be 1 ms late.
    fn stalled(beats: &[(usize, u64)], now: u64) -> Duration {
        let begun = Instant::now();
        let mut of_both = beats_of(begun, &[ms(1); 2]);
        beats.iter().for_each(|(thread, over)| of_both.over(*thread, begun + ms(*over)));
        of_both.stalled(begun, begun + ms(now))
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
        assert_eq!(stalled(&[(0, 2), (1, 2), (0, 4), (1, 4)], 6), Duration::ZERO);
        assert_eq!(stalled(&[(1, 2), (0, 6), (1, 4), (1, 6)], 6), ms(5));
    }

    #[test]
    fn a_beat_that_is_not_over_counts() {
        assert_eq!(stalled(&[(0, 1), (1, 1)], 3), Duration::ZERO);
        assert_eq!(stalled(&[(0, 1), (1, 1)], 21), ms(19));
    }

    #[test]
    fn what_several_threads_are_late_counts_once() {
        // Late from 1 to 21 on one thread, from 1 to 31 on the other, and from 22 to 41 on the
        // first, in a beat that has not ended.
        assert_eq!(stalled(&[(0, 21)], 21), ms(20));
        assert_eq!(stalled(&[(0, 21), (1, 31)], 31), ms(30));
        assert_eq!(stalled(&[(0, 21), (1, 31)], 41), ms(40));
    }

    #[test]
    fn stalls_apart_from_each_other_add_up() {
        let quiet = (0..2).flat_map(|thread| (11..=20).map(move |over| (thread, over)));
        let beats: Vec<_> = quiet.chain([(0, 31), (1, 31)]).collect();
        // From 1 to 11, and from 21 to 31.
        assert_eq!(stalled(&beats, 31), ms(20));
    }

    #[test]
    fn a_turn_of_others_on_one_processor_is_no_stall() {
        let begun = Instant::now();
        let beats = beats_of(begun, &[TURNS]);
        assert_eq!(beats.stalled(begun, begun + BEAT + TURNS), Duration::ZERO);
        assert_eq!(beats.stalled(begun, begun + BEAT + ms(90)), ms(90));
    }

    #[test]
    fn what_was_before_a_watch_excuses_nothing() {
        let begun = Instant::now();
        let mut beats = beats_of(begun, &[ms(1)]);
        beats.over(0, begun + ms(51));
        assert_eq!(beats.stalled(begun + ms(41), begun + ms(52)), ms(10));
        assert_eq!(beats.stalled(begun + ms(51), begun + ms(52)), Duration::ZERO);
        beats.over(0, begun + ms(52) + KEPT);
        assert_eq!(beats.stalls.len(), 1, "old stalls are forgotten");
    }

    #[test]
    fn a_watch_measures_what_passes() {
        let watch = Stopwatch::start().unwrap();
        std::thread::sleep(ms(30));
        let took = watch.read();
        assert!(took.time >= ms(30) && took.stalled <= took.time, "{took}");
    }

    #[test]
    fn each_processor_has_a_beat_of_its_own() {
        let allowed = sched_getaffinity(None).unwrap();
        let _watch = Stopwatch::start().unwrap();
        let is_beaten = |processor: usize| {
            crate::process_state::threads().iter().any(|(tid, name)| {
                let status = std::fs::read_to_string(format!("/proc/self/task/{tid}/status"));
                let bound = format!("Cpus_allowed_list:\t{processor}\n");
                name == "stopwatch" && status.is_ok_and(|status| status.contains(&bound))
            })
        };
        let end = Instant::now() + crate::check::CUT_OFF;
        for processor in
            (0..CpuSet::MAX_CPU).filter(|processor| allowed.is_set(*processor)).take(MOST_BOUND)
        {
            while !is_beaten(processor) {
                assert!(Instant::now() < end, "no thread beats on processor {processor}");
                std::thread::sleep(BEAT);
            }
        }
    }
}
