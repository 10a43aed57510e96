//! The watch over detached work: notices that its thread hangs on an unresolved page fault.
//!
//! A thread hangs if it is asleep at several looks in a row and no page came to it between them. A
//! thread that waits for a core is not asleep, nor is one of a stopped process.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvx_core::backend::sync::{Condvar, Mutex};

/// The time between two looks.
const LOOK: Duration = Duration::from_millis(50);
/// A thread that is seen asleep in one turn so often in a row hangs.
const LOOKS: u32 = 4;

/// The detached work of a machine: one piece at a time, but for abandoned ones.
#[derive(Debug, Default)]
pub(super) struct WatchedTurns {
    count: AtomicU64,
    /// The number of the piece that runs, and its thread; 0: none.
    under_way: AtomicU64,
    thread: AtomicI32,
    /// True if the watch sleeps until a piece begins.
    asleep: AtomicBool,
    ended: Mutex<bool>,
    changed: Condvar,
}

thread_local! {
    static THREAD: i32 = rustix::thread::gettid().as_raw_nonzero().get();
}

impl WatchedTurns {
    /// Notes that a piece begins on this thread, which has the machine's lock. Returns its number.
    pub(super) fn begin(&self) -> u64 {
        let number = self.count.load(Ordering::Relaxed) + 1;
        self.count.store(number, Ordering::Relaxed);
        self.thread.store(THREAD.with(|thread| *thread), Ordering::Relaxed);
        // It is seen by who is about to sleep, or sees that he is.
        self.under_way.store(number, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) {
            self.wake();
        }
        number
    }

    /// Notes that the piece of this number has ended, unless it was abandoned and another runs.
    pub(super) fn end(&self, number: u64) {
        self.under_way.compare_exchange(number, 0, Ordering::Relaxed, Ordering::Relaxed).ok();
    }

    /// Returns true if the piece of this number runs.
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

    /// Waits for the next look; without work, until there is some. Returns false at the end.
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

    /// Calls `hangs` with the number of each turn that does, as long as it does, until that says
    /// that there is no machine any more.
    pub(super) fn watch(&self, mut hangs: impl FnMut(u64) -> bool) {
        let (mut before, mut asleep, mut pages) = (0, 0, None);
        let mut last = None;
        while self.rest(last == Some((self.count.load(Ordering::Relaxed), 0))) {
            let under_way = self.under_way.load(Ordering::Acquire);
            last = Some((self.count.load(Ordering::Relaxed), under_way));
            if under_way == 0 || under_way != before {
                (before, asleep, pages) = (under_way, 0, None);
                continue;
            }
            let now = pages_while_asleep(self.thread.load(Ordering::Relaxed));
            asleep =
                if now.is_some() && (now == pages || pages.is_none()) { asleep + 1 } else { 0 };
            pages = now;
            if asleep >= LOOKS && self.under_way.load(Ordering::Relaxed) == before {
                if !hangs(before) {
                    return;
                }
                asleep = 0;
            }
        }
    }
}

/// How many pages a thread of this process had to wait for so far, if it is asleep within the
/// kernel.
fn pages_while_asleep(thread: i32) -> Option<(u64, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).ok()?;
    let (_, after_name) = stat.rsplit_once(") ")?;
    let mut fields = after_name.split(' ');
    let is_asleep = matches!(fields.next()?, "S" | "D");
    let minor = fields.nth(6)?.parse().ok()?;
    let major = fields.nth(1)?.parse().ok()?;
    is_asleep.then_some((minor, major))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use super::*;

    /// Watches turns that `turn` has; the numbers of those that hang.
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
}
