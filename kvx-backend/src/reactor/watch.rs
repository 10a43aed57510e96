//! Notices that a turn hangs: in a page of registered memory that does not come, which no system call on a socket can
//! do without. Another thread goes on with all other connections then.
//!
//! A turn hangs if its thread is asleep whenever one looks, and no page came to it from one look to the next. One that
//! waits for a core is not asleep, nor is one of a process that is stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvx_core::backend::sync::{Condvar, Mutex};
use kvx_core::{Error, ErrorKind, Result};

/// The time between two looks.
const LOOK: Duration = Duration::from_millis(50);
/// A thread that is seen asleep in one turn so often in a row hangs.
const LOOKS: u32 = 4;

/// What is known of the machine's turns of connections; one at a time, but for those that were left behind.
#[derive(Debug, Default)]
pub struct Turns {
    count: AtomicU64,
    /// The number of the one that is under way, and its thread; 0: none.
    under_way: AtomicU64,
    thread: AtomicI32,
    /// Whoever watches sleeps until a turn begins.
    asleep: AtomicBool,
    ended: Mutex<bool>,
    changed: Condvar,
}

thread_local! {
    static THREAD: i32 = rustix::thread::gettid().as_raw_nonzero().get();
}

impl Turns {
    /// A turn begins on this thread, which has the machine's lock. Its number.
    pub fn begin(&self) -> u64 {
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

    /// It has ended, under the machine's lock.
    pub fn end(&self) {
        self.under_way.store(0, Ordering::Relaxed);
    }

    #[cold]
    fn wake(&self) {
        let _ended = self.ended.lock();
        self.asleep.store(false, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Nobody needs to watch any more.
    pub fn stop_watching(&self) {
        *self.ended.lock() = true;
        self.changed.notify_all();
    }

    /// Until the next look; without work, until there is some. False: there is no next.
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

    /// Calls `hangs` with the number of each turn that does, as long as it does.
    fn watch(&self, mut hangs: impl FnMut(u64)) {
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
                hangs(before);
                asleep = 0;
            }
        }
    }
}

/// How many pages a thread of this process had to wait for so far, if it is asleep within the kernel.
fn pages_while_asleep(thread: i32) -> Option<(u64, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).ok()?;
    let (_, after_name) = stat.rsplit_once(") ")?;
    let mut fields = after_name.split(' ');
    let is_asleep = matches!(fields.next()?, "S" | "D");
    let minor = fields.nth(6)?.parse().ok()?;
    let major = fields.nth(1)?.parse().ok()?;
    is_asleep.then_some((minor, major))
}

/// The thread that looks.
pub struct TurnWatch {
    turns: Arc<Turns>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl TurnWatch {
    /// Watches over `turns`, and calls `hangs` with the number of each that hangs, as long as it does.
    ///
    /// # Errors
    /// `Exhausted` without a thread.
    pub fn start(
        name: String,
        turns: Arc<Turns>,
        hangs: impl FnMut(u64) + Send + 'static,
    ) -> Result<Self> {
        let watched = Arc::clone(&turns);
        let thread = std::thread::Builder::new().name(name);
        let thread = thread.spawn(move || watched.watch(hangs)).map_err(|error| {
            Error::os("no thread to watch over turns: raise ulimit -u", error)
                .with_kind(ErrorKind::Exhausted)
        })?;
        Ok(TurnWatch { turns, thread: Mutex::new(Some(thread)) })
    }

    /// Ends it, and waits for that.
    pub fn end(&self) {
        self.turns.stop_watching();
        let thread = self.thread.lock().take(); // without the lock
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            thread.join().ok(); // a panic there has been reported by the panic hook
        }
    }
}

impl Drop for TurnWatch {
    fn drop(&mut self) {
        if kvx_core::backend::fork::count() == 0 {
            self.turns.stop_watching();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Watches turns that `turn` has; the numbers of those that hang.
    fn watched(turn: impl FnOnce(&Turns)) -> Vec<u64> {
        let (turns, (tells, told)) = (Arc::new(Turns::default()), mpsc::channel());
        let watches = Arc::clone(&turns);
        let watch = std::thread::spawn(move || watches.watch(|number| tells.send(number).unwrap()));
        turn(&turns);
        turns.stop_watching();
        watch.join().unwrap();
        told.iter().collect()
    }

    #[test]
    fn a_turn_whose_thread_sleeps_hangs() {
        let hung = watched(|turns| {
            turns.begin();
            turns.end();
            turns.begin();
            std::thread::sleep(20 * LOOK);
            turns.end();
        });
        assert!(hung.iter().all(|number| *number == 2) && !hung.is_empty(), "{hung:?}");
    }

    #[test]
    fn a_turn_that_works_or_has_ended_does_not_hang() {
        let hung = watched(|turns| {
            turns.begin();
            let until = Instant::now() + 8 * LOOK;
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            turns.end();
            std::thread::sleep(8 * LOOK);
            for _ in 0..10 {
                turns.begin();
                std::thread::sleep(LOOK);
                turns.end();
            }
        });
        assert!(hung.is_empty(), "{hung:?}");
    }
}
