//! Time as a clause measures it: what passed, and what of it the machine kept for itself.
//!
//! A clause asks that something ends within a tenth of a second. Where more threads want to run
//! than there are processors, or a processor stands still for a moment, an answer is later than
//! that by no fault of kvx. So threads of the suite's own beat beside what is measured: each sleeps
//! a millisecond at a time, and what it sleeps longer than that it was kept from running. One may
//! run anywhere, as kvx's may: it tells how busy the machine is. The others are bound to one
//! processor each, and tell when that one stands still, perhaps with the one thread of kvx that was
//! to answer. Time in which several were late counts once. On a quiet machine that is nothing, and
//! the bound is the promise itself.
//!
//! The threads are the process's, and sleep while nobody measures. Threads that come and go with
//! each measurement kept the kernel busy for seconds where another clause was reading the list of
//! threads.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The sleep of a beat.
const BEAT: Duration = Duration::from_millis(1);
/// What a sleep may be late on a machine that has nothing else to do: that is no stall.
const USUAL: Duration = Duration::from_millis(1);
/// The same where the thread is bound: others have their turns on its processor, which kvx's
/// threads need not wait for.
const TURNS: Duration = Duration::from_millis(20);

/// The most processors that have a beat of their own.
const MOST_BOUND: usize = 8;
/// The time for which stalls are remembered: longer than any clause may take.
const KEPT: Duration = Duration::from_secs(120);

/// Runs from its start until it is dropped.
pub(crate) struct Stopwatch {
    begun: Instant,
}

/// A time from one moment until another.
type Stall = (Instant, Instant);

/// The beats of this process.
static BEATS: Mutex<Beats> = Mutex::new(Beats::none());
/// Somebody measures again.
static MEASURED: Condvar = Condvar::new();

/// The results of the beats so far.
struct Beats {
    /// Of each thread; none before the first watch.
    running: Vec<Beat>,
    /// When one was late, or several: in their order, none touching the next.
    stalls: VecDeque<Stall>,
    /// The number of watches that run.
    watches: usize,
}

/// A beat that is not over.
#[derive(Clone, Copy)]
struct Beat {
    begun: Instant,
    /// The lateness that is allowed.
    usual: Duration,
}

impl Beat {
    /// Returns the stall of the machine until `now`.
    fn stall(self, now: Instant) -> Option<Stall> {
        let due = self.begun + BEAT;
        (now.saturating_duration_since(due) > self.usual).then_some((due, now))
    }
}

/// Adds a stall that ends no sooner than any before it.
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

    /// A thread's beat is over, and its next begins.
    fn over(&mut self, thread: usize, now: Instant) {
        let beat = &mut self.running[thread];
        let stall = beat.stall(now);
        beat.begun = now;
        stall.into_iter().for_each(|stall| add(&mut self.stalls, stall));
        while self.stalls.front().is_some_and(|(_, until)| now - *until > KEPT) {
            self.stalls.pop_front();
        }
    }

    /// How long one was late, or several, between two moments, of which the later is now: in beats
    /// that are not over yet as well.
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

/// Beats for ever, on that processor or on any.
fn beat(thread: usize, processor: Option<usize>) {
    if let Some(processor) = processor {
        let mut one = CpuSet::new();
        one.set(processor);
        // An error, as of a processor that was taken away, leaves it with all others: it sees less,
        // and excuses less.
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
    /// Starts.
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

/// A time that was measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Took {
    time: Duration,
    stalled: Duration,
}

impl Took {
    /// Returns whether it is no shorter than that.
    pub(crate) fn reaches(self, least: Duration) -> bool {
        self.time >= least
    }

    /// Returns whether it is what was promised, or more by no more than the machine stalled.
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

    /// The beats of threads that begin now and may be so late.
    fn beats_of(begun: Instant, usual: &[Duration]) -> Beats {
        let running = usual.iter().map(|usual| Beat { begun, usual: *usual }).collect();
        Beats { running, ..Beats::none() }
    }

    /// What is measured of beats that end at these milliseconds, on these of two threads, which may
    /// be 1 ms late.
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
        // From 1 to 21 on one; from 1 to 31 on the other; from 22 to 41 on the first, which is not
        // over.
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
        assert_eq!(beats.stalls.len(), 1, "what nobody asks for any more is forgotten");
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
