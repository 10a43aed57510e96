//! The end of the process: halts machines before the libraries that they drive are torn down.
//!
//! `exit` runs the destructors of libraries while other threads continue. A thread that is inside a
//! library at that time, for example because its agent was dropped just before, would crash a
//! program that has done nothing wrong.

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{Progress, ReactorShared};
use kvx_core::backend::sync::Mutex;

/// The time that process exit waits for machines that are in a turn.
const LONGEST: Duration = Duration::from_secs(1);

/// A machine that can be halted for good.
pub(super) trait Halt: Send + Sync {
    /// Prevents further turns. Returns when no thread works on the machine, apart from abandoned
    /// turns, or at `until`.
    fn halt(&self, until: Instant);
}

/// The machines of this process.
static MACHINES: Mutex<Vec<Weak<dyn Halt>>> = Mutex::new(Vec::new());

/// True if a library has been loaded.
static LOADED: AtomicBool = AtomicBool::new(false);

/// Registers a machine to be halted at process exit.
pub(super) fn watch(machine: Weak<dyn Halt>) {
    if LOADED.load(Ordering::Relaxed) {
        ask(); // also runs before the destructors that its library has registered for it
    }
    let mut machines = MACHINES.lock();
    machines.retain(|machine| machine.strong_count() > 0);
    machines.push(machine);
}

/// Halts machines before the destructors of the library that was just loaded run.
pub(crate) fn halt_before_destructors() {
    if !LOADED.swap(true, Ordering::Relaxed) {
        ask();
    }
}

/// Registers the exit handler. Exit handlers run last to first: those that a library registers
/// later, while it works, run before this one.
fn ask() {
    // SAFETY: the handler takes no arguments, never unwinds into C code and stays loaded as long as
    // this crate. If the table is full, no handler is registered.
    unsafe { libc::atexit(halt_all) };
}

extern "C" fn halt_all() {
    if kvx_core::backend::fork::count() > 0 {
        return; // a child has no such threads, and their locks may be held for ever
    }
    let until = Instant::now() + LONGEST;
    let machines = std::mem::take(&mut *MACHINES.lock());
    for machine in machines.iter().filter_map(Weak::upgrade) {
        machine.halt(until);
        // This may be the last handle, and dropping it would end the library.
        std::mem::forget(machine);
    }
}

impl<P: Progress> Halt for ReactorShared<P> {
    fn halt(&self, until: Instant) {
        self.halted.store(true, Ordering::Relaxed);
        // A thread that has the lock, or detached work, may have checked the flag before. A thread
        // that takes the lock afterwards sees it.
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

/// Makes the thread of a halted machine wait for process exit, so that no thread-local state of the
/// library is torn down. The wait is bounded because a program may join the thread.
pub(super) fn wait() {
    std::thread::sleep(2 * LONGEST);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    use super::super::tests::Nobody;
    use super::super::{Armed, NoWork, Outbox, Queued, Reactor, Turn};
    use super::*;
    use kvx_core::Result;
    use std::os::fd::RawFd;

    /// A machine that stops slowly. It counts its turns, that it is stopping, and that it was
    /// dropped.
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
    fn a_halted_machine_has_no_more_turns() {
        let (reactor, counts, until) = slow();
        reactor.shared.halt(until);
        let turns = counts[0].load(Ordering::SeqCst);
        reactor.submit(());
        reactor.submit_and_turn(());
        assert_eq!(reactor.drive().done, 0);
        reactor.stop(); // does not wait
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(counts.each_ref().map(|count| count.load(Ordering::SeqCst)), [turns, 0, 0]);
    }
}
