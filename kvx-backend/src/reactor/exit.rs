//! The end of the process: machines halt before the libraries that they drive are taken down.
//!
//! `exit` runs the destructors of libraries while threads go on. One that is in a library then,
//! perhaps because its agent was dropped just before, crashes a program that has done everything
//! well.

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{Progress, ReactorShared};
use kvx_core::backend::sync::Mutex;

/// The time that the end of the process waits for machines that are in the midst of something.
const LONGEST: Duration = Duration::from_secs(1);

/// A machine that can be kept from doing anything any more.
pub(super) trait Halt: Send + Sync {
    /// Returns when no thread works on it, apart from abandoned turns, or at `until`. From then on
    /// no turn begins.
    fn halt(&self, until: Instant);
}

/// The machines of this process.
static MACHINES: Mutex<Vec<Weak<dyn Halt>>> = Mutex::new(Vec::new());

/// True if some library has been loaded.
static LOADED: AtomicBool = AtomicBool::new(false);

/// A machine has been made.
pub(super) fn watch(machine: Weak<dyn Halt>) {
    if LOADED.load(Ordering::Relaxed) {
        ask(); // before the destructors of what its library made for it, too
    }
    let mut machines = MACHINES.lock();
    machines.retain(|machine| machine.strong_count() > 0);
    machines.push(machine);
}

/// A library has been loaded: what is asked for now is done before its destructors run.
pub(crate) fn halt_before_destructors() {
    if !LOADED.swap(true, Ordering::Relaxed) {
        ask();
    }
}

/// Exit handlers run last to first: those that a library registers later, while it works, run
/// before this one.
fn ask() {
    // SAFETY: the handler takes no arguments, unwinds into no C code and stays loaded as long as
    // this crate. If the table is full, no handler is registered.
    unsafe { libc::atexit(halt_all) };
}

extern "C" fn halt_all() {
    if kvx_core::backend::fork::count() > 0 {
        return; // a child has none of the threads, and their locks may be held for ever
    }
    let until = Instant::now() + LONGEST;
    let machines = std::mem::take(&mut *MACHINES.lock());
    for machine in machines.iter().filter_map(Weak::upgrade) {
        machine.halt(until);
        std::mem::forget(machine); // its last handle may have gone meanwhile
    }
}

impl<P: Progress> Halt for ReactorShared<P> {
    fn halt(&self, until: Instant) {
        self.halted.store(true, Ordering::Relaxed);
        // A thread that has the lock, or detached work, may have looked before that. One that takes
        // the lock afterwards sees it.
        let is_free = || {
            let machine = self.machine.try_lock();
            machine
                .is_some_and(|machine| machine.as_ref().is_none_or(|driven| driven.detached == 0))
        };
        while !is_free() && Instant::now() < until {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

impl<P: Progress> ReactorShared<P> {
    pub(super) fn is_halted(&self) -> bool {
        self.halted.load(Ordering::Relaxed)
    }
}

/// The thread of a machine that was halted waits for the end of the process, so that nothing of the
/// library's ends with the thread; not for ever, as somebody may be waiting for the thread.
pub(super) fn wait() {
    std::thread::sleep(2 * LONGEST);
}

#[cfg(test)]
mod tests {
    use std::os::fd::RawFd;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    use super::super::tests::Nobody;
    use super::super::{Armed, NoWork, Outbox, Queued, Reactor, Turn};
    use super::*;
    use kvx_core::Result;

    /// Takes its time to stop. Counts: its turns, that it is stopping, that it is gone.
    #[derive(Default)]
    struct Slow(Arc<[AtomicU64; 3]>);

    impl Progress for Slow {
        type Command = ();
        type Work = NoWork;
        fn command(&mut self, (): (), _: &mut Outbox) {}
        fn progress(&mut self, _: &Queued, _: &mut Outbox) -> Turn {
            self.0[0].fetch_add(1, Ordering::SeqCst);
            Turn::did(0)
        }
        fn arm(&mut self) -> Result<Armed> {
            Ok(Armed::Sleep(None))
        }
        fn fds(&self) -> &[RawFd] {
            &[]
        }
        fn stop(&mut self, _: &mut Outbox) {
            self.0[1].store(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    impl Drop for Slow {
        fn drop(&mut self) {
            self.0[2].store(1, Ordering::SeqCst);
        }
    }

    fn slow() -> (Reactor<Slow>, Arc<[AtomicU64; 3]>, Instant) {
        let counts = Arc::default();
        let reactor =
            Reactor::start("slow".into(), Slow(Arc::clone(&counts)), Arc::new(Nobody)).unwrap();
        (reactor, counts, Instant::now() + Duration::from_secs(10))
    }

    #[test]
    fn the_end_of_the_process_waits_for_a_machine_that_ends() {
        let (reactor, counts, until) = slow();
        let [_, stops, gone] = &*counts;
        reactor.ask_to_stop();
        while stops.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        reactor.shared.halt(until);
        assert_eq!(gone.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn nobody_goes_into_a_machine_that_was_halted() {
        let (reactor, counts, until) = slow();
        reactor.shared.halt(until);
        let turns = counts[0].load(Ordering::SeqCst);
        reactor.submit(());
        reactor.submit_and_turn(());
        assert_eq!(reactor.drive().done, 0);
        reactor.stop(); // waits for nobody
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(counts.each_ref().map(|count| count.load(Ordering::SeqCst)), [turns, 0, 0]);
    }
}
