//! Detached work: parts of a turn that may hang on an unresolved page fault, and how a machine
//! continues without them.
//!
//! A page of a program's memory may never arrive (userfaultfd, a mapped file whose server hangs). A
//! thread that touches such a page sleeps in the kernel until it arrives. A machine therefore hands
//! work that touches memory of programs to the reactor ([`Progress::next_work`]), which runs it
//! without the machine's lock. If the work hangs, the reactor abandons the turn and continues with
//! the machine, on another thread if its own thread hangs.
//!
//! ```text
//!             next_work                run returns: rejoin
//!   attached ───────────► detached(n) ─────────────────────► attached … progress ► over
//!                             │
//!                             │ the watch finds that the thread hangs: abandon
//!                             ▼
//!                         abandoned ──► run returns: rejoin_late, release
//! ```
//!
//! Invariants:
//!
//! 1. A machine has one turn at a time. While its work is detached, the lock is free, and
//!    `Driven::detached` holds the number of the turn. A thread that finds a number there leaves
//!    the machine alone, except for the watch.
//! 2. Detached work owns what it works on, or shares it with an owner that keeps it alive. The
//!    machine may end meanwhile.
//! 3. The watch abandons a turn under the machine's lock, and only if some thread can continue.
//!    Otherwise all peers wait; the watch logs that once and tries again. [`Progress::abandon`]
//!    runs before any other turn.
//! 4. For the machine an abandoned turn is over. The next turn delivers the results that it had
//!    collected. When its thread returns, it calls only [`DetachedWork::rejoin_late`] and
//!    [`DetachedWork::release`]. The thread then ends if it is one of the reactor's own.
//! 5. The machine is responsible for memory that an abandoned turn may still touch: an operation
//!    that waits for this memory does not settle before `release`. Work that is about to touch
//!    memory unknown to the machine first records which, and then checks whether it was abandoned.
//!    `abandon` first marks the work as abandoned, and then reads that record.
//! 6. Work that panics ends the machine, unless it was abandoned before.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use super::sync::Ordering;
use super::sync::thread::{Builder, JoinHandle};
use super::{Driven, Outbox, Progress, ReactorShared, TurnGuard};
use kvx_core::{Error, ErrorKind, Result};

/// A piece of a turn that may hang on an unresolved page fault. See the [module](self).
pub trait DetachedWork<M>: Send + Sized {
    /// False if a machine has no work that may hang, so that no watch is needed.
    const MAY_HANG: bool = true;

    /// Does the work. The machine is not locked.
    fn run(&mut self);

    /// Returns the results of the work to the machine, whose turn continues.
    fn rejoin(self, machine: &mut M, out: &mut Outbox);

    /// Removes abandoned work, which has ended, from the machine's accounts. Not called after the
    /// machine has ended.
    fn rejoin_late(&mut self, machine: &mut M);

    /// Releases everything that abandoned work holds, after it has ended. The machine is not
    /// locked.
    fn release(self);
}

/// The work of a machine whose turns touch no memory of programs.
pub type NoWork = Infallible;

impl<M> DetachedWork<M> for NoWork {
    const MAY_HANG: bool = false;

    fn run(&mut self) {}

    fn rejoin(self, _: &mut M, _: &mut Outbox) {}

    fn rejoin_late(&mut self, _: &mut M) {}

    fn release(self) {}
}

/// The kind of thread that runs a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TurnThread {
    /// The reactor's own thread.
    Own,
    /// A caller's thread that submits a command.
    Caller,
    /// A caller's thread that drives the machine.
    Driver,
}

/// The limit for the reactor's own threads that hang at the same time.
pub(super) const MAX_HUNG_THREADS: usize = 64;

impl<P: Progress> ReactorShared<P> {
    /// Runs a piece of work without the lock. Returns false if the turn was abandoned meanwhile.
    #[inline]
    pub(super) fn run_detached<'a>(
        &'a self,
        turn: &mut TurnGuard<'a, P>,
        mut work: P::Work,
        thread: TurnThread,
        out: &mut Outbox,
    ) -> bool {
        let Some(driven) = turn.driven() else {
            debug_assert!(false, "the machine has just returned this work");
            return false;
        };
        driven.untold.append(out);
        driven.thread = thread;
        driven.detached = self.watched.begin();
        turn.detached = driven.detached;
        turn.machine = None;
        work.run();
        // This comes first: a thread that waits for the lock does not hang on a page.
        self.watched.end(turn.detached);
        let mut machine = self.machine.lock();
        if machine.as_ref().is_some_and(|driven| driven.detached == turn.detached) {
            *turn = TurnGuard::of(Some(machine));
            if let Some(Driven { machine, detached, untold, warned, .. }) = turn.driven() {
                (*detached, *warned) = (0, false);
                out.append(untold);
                work.rejoin(machine, out);
            }
            return true;
        }
        if let Some(driven) = machine.as_mut() {
            work.rejoin_late(&mut driven.machine);
        }
        drop(machine);
        tracing::info!(
            reactor = self.name,
            "an abandoned turn has ended: the page fault that it hung on is resolved"
        );
        work.release();
        false
    }

    /// Abandons turn `number`, which hangs. The watch repeats the call while the turn hangs.
    /// Returns false if the machine has ended.
    pub(super) fn abandon_turn(self: &Arc<Self>, number: u64) -> bool {
        let mut machine = self.machine.lock();
        let Some(driven) = machine.as_mut() else { return false }; // it has ended
        let has_ended = driven.detached != number || !self.watched.is_under_way(number);
        if has_ended || self.is_halted() {
            return true;
        }
        match driven.thread {
            TurnThread::Own => {
                if let Err(why) = self.replace_thread() {
                    if !std::mem::replace(&mut driven.warned, true) {
                        tracing::error!(
                            reactor = self.name, %why,
                            "a thread hangs in an unresolved page fault, and no other thread could \
                             be started in its place: all peers of this backend wait"
                        );
                    }
                    return true;
                }
            }
            TurnThread::Driver => self.sleep.driver_hangs(),
            TurnThread::Caller => {}
        }
        self.watched.end(number);
        let mut turn = TurnGuard::of(Some(machine));
        let abandoned = std::panic::catch_unwind(AssertUnwindSafe(|| {
            if let Some(Driven { machine, untold, detached, warned, .. }) = turn.driven() {
                (*detached, *warned) = (0, false);
                machine.abandon(untold);
            }
        }));
        if abandoned.is_err() {
            self.panicked(turn, Outbox::default());
            return false;
        }
        drop(turn);
        self.returned.notify_all();
        self.sleep.wake();
        true
    }

    /// Starts the thread that watches until the machine ends. Returns `Exhausted` without a thread.
    pub(super) fn start_watch(self: &Arc<Self>) -> Result<JoinHandle<()>> {
        let shared = Arc::clone(self);
        let thread = Builder::new().name(format!("{} watch", self.name));
        let watch = move || shared.watched.watch(|number| shared.abandon_turn(number));
        thread.spawn(watch).map_err(|error| {
            Error::os("cannot start the thread that watches for hung turns: raise ulimit -u", error)
                .with_kind(ErrorKind::Exhausted)
        })
    }

    /// Starts a replacement for the reactor's own thread. It waits for the machine's lock, which
    /// the caller holds.
    fn replace_thread(self: &Arc<Self>) -> Result<()> {
        if self.hung_threads.load(Ordering::Relaxed) >= MAX_HUNG_THREADS {
            return Err(ErrorKind::Exhausted.because(format!(
                "{MAX_HUNG_THREADS} turns of this agent hang: restart its process"
            )));
        }
        let next = self.own_thread.load(Ordering::Relaxed) + 1;
        let started = self.start_thread(next)?;
        self.own_thread.store(next, Ordering::SeqCst);
        self.hung_threads.fetch_add(1, Ordering::Relaxed);
        *self.thread.lock() = Some(started);
        Ok(())
    }
}
