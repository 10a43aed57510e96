//! The thread of a reactor: turns while there is work, looks for more for a while, and sleeps.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, RawFd};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::{Armed, Driven, LONGEST_PAUSE, Outbox, Progress, ReactorShared, STAYS_AWAY, STUCK, Turn, exit};
use kvx_core::sync::pause_between_looks;

/// True if the reactor, which has found nothing to do since then, may sleep.
fn has_looked_enough(turn: &Turn, idle_since: Instant) -> bool {
    let now = Instant::now();
    now.saturating_duration_since(idle_since) >= turn.look_for
        || turn.look_until.is_some_and(|until| now >= until)
}

impl<P: Progress> ReactorShared<P> {
    /// The thread.
    pub(super) fn serve(&self) {
        let mut out = Outbox::default();
        if std::panic::catch_unwind(AssertUnwindSafe(|| self.run(&mut out))).is_err() {
            self.panicked(self.machine.lock(), out);
        }
    }

    fn run(&self, out: &mut Outbox) {
        let (mut idle_since, mut stuck_since): (Option<Instant>, Option<Instant>) = (None, None);
        let mut looks = 0;
        let mut fds: Vec<RawFd> = Vec::new();
        while !self.stopping.load(Ordering::SeqCst) {
            let mut guard = if self.is_driven() {
                idle_since = None;
                let seen = self.driven_at.load(Ordering::Relaxed);
                self.stay_away();
                if self.driven_at.load(Ordering::Relaxed) != seen {
                    continue;
                }
                // It is in a long turn, or has gone or lost its core.
                let Some(guard) = self.machine.try_lock() else { continue };
                guard
            } else {
                self.machine.lock()
            };
            if self.is_halted() {
                drop(guard);
                return exit::wait();
            }
            let Some(driven) = guard.as_mut() else { break };
            let (mut sleep, mut pauses, mut looking, mut yields) = (None, false, false, false);
            let turn = self.turn(driven, None, out);
            let machine = &mut driven.machine;
            if turn.done > 0 || !out.is_empty() {
                (idle_since, stuck_since) = (None, None);
                yields = turn.yields;
            } else if has_looked_enough(&turn, *idle_since.get_or_insert_with(Instant::now)) {
                match machine.arm() {
                    Ok(Armed::Again) => {
                        let stuck = stuck_since.get_or_insert_with(Instant::now).elapsed();
                        pauses = stuck >= STUCK;
                        sleep = pauses.then(|| Some((stuck / 8).min(LONGEST_PAUSE)));
                    }
                    Ok(Armed::Sleep(longest)) => sleep = Some(longest),
                    Err(error) => {
                        tracing::error!(%error, "a reactor could not arm its wake-up; polling every 10 ms");
                        sleep = Some(Some(Duration::from_millis(10)));
                    }
                }
                if let Some(longest) = sleep {
                    self.wakes_at.store(self.at(longest), Ordering::SeqCst);
                    self.asleep.store(true, Ordering::SeqCst);
                    fds.clear();
                    if !pauses {
                        fds.extend_from_slice(machine.fds()); // else they may be ready all along
                    }
                }
            } else {
                looking = true;
            }
            drop(guard);
            out.deliver(&*self.events);
            looks = if looking { looks + 1 } else { 0 };
            if looking {
                pause_between_looks(looks);
            } else if yields {
                std::thread::yield_now();
            }
            if let Some(longest) = sleep
                && self.queue.lock().as_ref().is_none_or(Vec::is_empty)
                && !self.stopping.load(Ordering::SeqCst)
            {
                self.sleep(&fds, longest);
                if !pauses {
                    (idle_since, stuck_since) = (None, None);
                }
            }
            self.asleep.store(false, Ordering::SeqCst);
        }
        let mut guard = self.machine.lock();
        if self.is_halted() {
            drop(guard);
            return exit::wait();
        }
        if let Some(Driven { mut machine, .. }) = guard.take() {
            let left = self.queue.lock().take().unwrap_or_default(); // and let go of the lock
            for command in left {
                machine.command(command, out);
            }
            machine.stop(out);
            drop(machine); // still under the lock, for which the end of the process waits
            drop(guard);
            out.deliver(&*self.events);
        }
    }

    fn sleep(&self, fds: &[RawFd], longest: Option<Duration>) {
        let mut polled = Vec::with_capacity(fds.len() + 1);
        polled.push(PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN));
        // SAFETY: the machine owns these descriptors and is not dropped before this thread ends; one that it closes
        // meanwhile (on another thread's turn) is at worst another open file, which makes for a spurious wake-up.
        polled.extend(
            fds.iter()
                .map(|fd| PollFd::from_borrowed_fd(unsafe { BorrowedFd::borrow_raw(*fd) }, PollFlags::IN)),
        );
        let timeout = longest.map(|longest| rustix::time::Timespec {
            tv_sec: longest.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: longest.subsec_nanos().into(),
        });
        self.poll(&mut polled, timeout.as_ref());
    }

    /// A thread that drives sees to what comes by itself: stays out of its way, and off its core, while it does.
    fn stay_away(&self) {
        let time = rustix::time::Timespec { tv_sec: 0, tv_nsec: STAYS_AWAY.subsec_nanos().into() };
        self.stays_away.store(true, Ordering::SeqCst);
        self.asleep.store(true, Ordering::SeqCst);
        if !self.stopping.load(Ordering::SeqCst) && self.is_driven() {
            self.poll(&mut [PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN)], Some(&time));
        }
        self.stays_away.store(false, Ordering::SeqCst);
        self.asleep.store(false, Ordering::SeqCst);
    }

    fn poll(&self, fds: &mut [PollFd<'_>], timeout: Option<&rustix::time::Timespec>) {
        if let Err(error) = rustix::event::poll(fds, timeout)
            && error != rustix::io::Errno::INTR
        {
            tracing::error!(%error, fd = self.wake.as_raw_fd(), "a reactor could not sleep; trying again in 10 ms");
            std::thread::sleep(Duration::from_millis(10));
        }
        // Empty after a wake-up by another descriptor.
        if fds.first().is_some_and(|wake| !wake.revents().is_empty()) {
            rustix::io::read(&self.wake, &mut [0; 8]).ok();
        }
    }
}
