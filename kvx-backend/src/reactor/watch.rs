//! The watch over detached work, which notices that its thread hangs on an unresolved page fault.
//!
//! A thread hangs if it sleeps at [`LOOKS`] consecutive checks, without a page fault or CPU time in
//! between. These threads do not hang:
//! - A thread that waits for a core, or a thread of a stopped process: neither sleeps.
//! - A thread that sleeps often but works in between: its CPU time increases.
//! - A thread that waits for a lock or a condition variable, which sleeps in `futex`. The lock's
//!   owner may wait for a core. After [`LOOKS_IN_FUTEX`] checks it does count as hung: the owner
//!   may itself hang, in a driver for example.
//!
//! In models, each piece of work that is seen at two checks hangs.

use std::sync::atomic::AtomicI32;
use std::time::{Duration, Instant};

use super::sync::{AtomicBool, AtomicU64, Condvar, IS_MODEL, Mutex, Ordering};

/// The time between two checks.
const LOOK: Duration = if IS_MODEL { Duration::ZERO } else { Duration::from_millis(50) };
/// The number of consecutive checks at which a hung thread is asleep.
const LOOKS: u32 = if IS_MODEL { 1 } else { 4 };
/// The same number for a thread that sleeps in `futex`: 5 s, half of the default `peer_timeout`.
const LOOKS_IN_FUTEX: u32 = 100;

/// The detached work of a machine: one piece at a time, except for abandoned ones.
#[derive(Debug, Default)]
pub(super) struct WatchedTurns {
    count: AtomicU64,
    /// The number of the running piece of work, and its thread; 0 if there is none.
    under_way: AtomicU64,
    thread: AtomicI32,
    /// True if the watch sleeps until a piece of work begins.
    asleep: AtomicBool,
    ended: Mutex<bool>,
    changed: Condvar,
}

thread_local! {
    static THREAD: i32 = rustix::thread::gettid().as_raw_nonzero().get();
}

impl WatchedTurns {
    /// Records that a piece of work begins on this thread, which has the machine's lock. Returns
    /// the number of the piece.
    pub(super) fn begin(&self) -> u64 {
        let number = self.count.load(Ordering::Relaxed) + 1;
        self.count.store(number, Ordering::Relaxed);
        self.thread.store(THREAD.with(|thread| *thread), Ordering::Relaxed);
        // Either the watch sees the piece before it sleeps, or this thread sees that the watch
        // sleeps.
        self.under_way.store(number, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) {
            self.wake();
        }
        number
    }

    /// Records that piece `number` has ended. Does nothing if another piece runs because this one
    /// was abandoned.
    pub(super) fn end(&self, number: u64) {
        self.under_way.compare_exchange(number, 0, Ordering::Relaxed, Ordering::Relaxed).ok();
    }

    /// Returns true if piece `number` runs.
    pub(super) fn is_under_way(&self, number: u64) -> bool {
        self.under_way.load(Ordering::Relaxed) == number
    }

    #[cold]
    fn wake(&self) {
        let _ended = self.ended.lock();
        self.asleep.store(false, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Ends the watch.
    pub(super) fn stop_watching(&self) {
        *self.ended.lock() = true;
        self.changed.notify_all();
    }

    /// Waits until the next check or, without work, until a piece begins. Returns false at the end
    /// of the watch.
    fn rest(&self, is_idle: bool) -> bool {
        let mut ended = self.ended.lock();
        if is_idle {
            self.asleep.store(true, Ordering::SeqCst);
            while !*ended
                && self.asleep.load(Ordering::SeqCst)
                && self.under_way.load(Ordering::SeqCst) == 0
            {
                ended = self.changed.wait_until(ended, None);
            }
            self.asleep.store(false, Ordering::SeqCst);
        }
        let until = Instant::now() + LOOK;
        while !*ended && Instant::now() < until {
            ended = self.changed.wait_until(ended, Some(until));
        }
        !*ended
    }

    /// Calls `hangs` with the number of each turn that hangs, repeatedly while it hangs. Returns
    /// when `hangs` returns false because the machine has ended.
    pub(super) fn watch(&self, mut hangs: impl FnMut(u64) -> bool) {
        let (mut before, mut asleep, mut sample) = (0, 0, None);
        let mut last = None;
        while self.rest(last == Some((self.count.load(Ordering::Relaxed), 0))) {
            let under_way = self.under_way.load(Ordering::Acquire);
            last = Some((self.count.load(Ordering::Relaxed), under_way));
            if under_way == 0 || under_way != before {
                (before, asleep, sample) = (under_way, 0, None);
                continue;
            }
            let now = SleepSample::of(self.thread.load(Ordering::Relaxed));
            asleep =
                if now.is_some() && (now == sample || sample.is_none()) { asleep + 1 } else { 0 };
            sample = now;
            if now.is_some_and(|now| asleep >= now.looks_until_hung())
                && self.under_way.load(Ordering::Relaxed) == before
            {
                if !hangs(before) {
                    return;
                }
                asleep = 0;
            }
        }
    }
}

/// A sample of a sleeping thread. It stays equal while the thread hangs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SleepSample {
    minor_faults: u64,
    major_faults: u64,
    /// The CPU time in clock ticks, so that a signal handler in between hardly counts.
    cpu_time: u64,
    in_futex: bool,
}

impl SleepSample {
    /// Samples a thread of this process. Returns `None` if it does not sleep in the kernel.
    fn of(thread: i32) -> Option<Self> {
        if IS_MODEL {
            return Some(Self::default());
        }
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).ok()?;
        let sample = Self::parse(&stat)?;
        Some(SleepSample { in_futex: is_in_futex(thread), ..sample })
    }

    /// Reads the content of a `stat` file.
    fn parse(stat: &str) -> Option<Self> {
        let (_, after_name) = stat.rsplit_once(") ")?;
        let mut fields = after_name.split(' ');
        let is_asleep = matches!(fields.next()?, "S" | "D");
        let minor_faults = fields.nth(6)?.parse().ok()?;
        let major_faults = fields.nth(1)?.parse().ok()?;
        let user_time: u64 = fields.nth(1)?.parse().ok()?;
        let system_time: u64 = fields.next()?.parse().ok()?;
        let cpu_time = user_time + system_time;
        is_asleep.then_some(SleepSample { minor_faults, major_faults, cpu_time, in_futex: false })
    }

    fn looks_until_hung(&self) -> u32 {
        if self.in_futex { LOOKS_IN_FUTEX } else { LOOKS }
    }
}

/// Returns true if a sleeping thread of this process is in the system call `futex`. Returns false
/// if `/proc` does not tell: in a process that is not dumpable, and in some sandboxes.
fn is_in_futex(thread: i32) -> bool {
    let syscall = std::fs::read_to_string(format!("/proc/self/task/{thread}/syscall"));
    syscall.is_ok_and(|syscall| {
        // The first field is the system call's number, "-1" outside of one, or "running".
        let number = syscall.split_whitespace().next();
        number.and_then(|number| number.parse().ok()) == Some(libc::SYS_futex)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use super::*;

    /// Watches the turns that `turn` runs. Returns the numbers of those that hang.
    fn watched(turn: impl FnOnce(&WatchedTurns)) -> Vec<u64> {
        let (turns, (tells, told)) = (Arc::new(WatchedTurns::default()), mpsc::channel());
        let watches = Arc::clone(&turns);
        let watch = std::thread::spawn(move || watches.watch(|number| tells.send(number).is_ok()));
        turn(&turns);
        turns.stop_watching();
        watch.join().unwrap();
        told.iter().collect()
    }

    #[test]
    fn a_turn_whose_thread_sleeps_hangs() {
        let hung = watched(|turns| {
            turns.end(turns.begin());
            let second = turns.begin();
            std::thread::sleep(20 * LOOK);
            turns.end(second);
        });
        assert!(hung.iter().all(|number| *number == 2) && !hung.is_empty(), "{hung:?}");
    }

    #[test]
    fn a_turn_that_works_or_has_ended_does_not_hang() {
        let hung = watched(|turns| {
            let first = turns.begin();
            let until = Instant::now() + 8 * LOOK;
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            turns.end(first);
            std::thread::sleep(8 * LOOK);
            for _ in 0..10 {
                let piece = turns.begin();
                std::thread::sleep(LOOK);
                turns.end(piece);
            }
        });
        assert!(hung.is_empty(), "{hung:?}");
    }

    /// Waits for a lock in a turn; `release` determines when the lock is released.
    fn wait_for_lock(turns: &WatchedTurns, release: impl FnOnce()) {
        let lock = std::sync::Mutex::new(());
        std::thread::scope(|scope| {
            let held = lock.lock().unwrap();
            let waits = scope.spawn(|| {
                let piece = turns.begin();
                drop(lock.lock().unwrap());
                turns.end(piece);
            });
            release();
            assert!(!waits.is_finished());
            drop(held);
        });
    }

    #[test]
    fn a_turn_that_waits_for_a_lock_does_not_hang() {
        let hung = watched(|turns| wait_for_lock(turns, || std::thread::sleep(20 * LOOK)));
        assert!(hung.is_empty(), "{hung:?}");
    }

    #[test]
    fn a_turn_that_waits_for_a_lock_for_seconds_hangs() {
        let turns = Arc::new(WatchedTurns::default());
        let (hangs, hung) = mpsc::channel();
        let watches = Arc::clone(&turns);
        let watch = std::thread::spawn(move || watches.watch(|number| hangs.send(number).is_ok()));
        wait_for_lock(&turns, || {
            let begun = Instant::now();
            assert_eq!(hung.recv_timeout(Duration::from_secs(60)), Ok(1));
            assert!(begun.elapsed() >= (LOOKS_IN_FUTEX - 1) * LOOK, "{:?}", begun.elapsed());
        });
        turns.stop_watching();
        watch.join().unwrap();
    }

    #[test]
    fn a_turn_that_works_between_sleeps_does_not_hang() {
        /// Longer than a tick of `/proc`, so that each check sees that the thread has worked.
        const WORK: Duration = Duration::from_millis(15);
        fn cpu_time() -> Duration {
            let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
        }
        let hung = watched(|turns| {
            let piece = turns.begin();
            let until = Instant::now() + 20 * LOOK;
            while Instant::now() < until {
                std::thread::sleep(LOOK - WORK);
                let worked = cpu_time() + WORK;
                while cpu_time() < worked {
                    std::hint::spin_loop();
                }
            }
            turns.end(piece);
        });
        assert!(hung.is_empty(), "{hung:?}");
    }

    #[test]
    fn a_thread_with_any_name_is_sampled_if_it_sleeps() {
        let stat = |state| format!("7 (a) S 1) {state} 1 2 3 4 -1 6 11 8 13 10 5 6 13 14");
        let sample =
            SleepSample { minor_faults: 11, major_faults: 13, cpu_time: 11, in_futex: false };
        for (state, expected) in
            [('S', Some(sample)), ('D', Some(sample)), ('R', None), ('T', None), ('t', None)]
        {
            assert_eq!(SleepSample::parse(&stat(state)), expected, "{state}");
        }
    }
}
