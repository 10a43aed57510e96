//! The thread of a reactor: it runs turns while there is work, polls for more for a while, and
//! sleeps.

use std::os::fd::RawFd;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use super::detached::TurnThread;
use super::sync::{MutexGuard, Ordering};
use super::{Armed, Driven, Outbox, Progress, ReactorShared, Turn, TurnGuard, exit};
use kvx_core::backend::sync::pause_between_looks;

/// The time after which a machine that was busy without progress is polled with pauses, because the
/// thread for which it waits may need the core. UCX's shared memory behaves like this while a
/// peer's queue is full.
const STUCK: Duration = Duration::from_micros(200);
/// The longest of these pauses; each lasts an eighth of the time without progress.
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// Returns true if the reactor, which has found nothing to do since `idle_since`, may sleep.
fn has_looked_enough(turn: &Turn, idle_since: Instant) -> bool {
    let now = Instant::now();
    now.saturating_duration_since(idle_since) >= turn.look_for
        || turn.look_until.is_some_and(|until| now >= until)
}

impl<P: Progress> ReactorShared<P> {
    /// Runs the reactor's own thread with this number.
    pub(super) fn serve(&self, number: u64) {
        let (mut turn, mut out) = (TurnGuard::of(None), Outbox::default());
        let run = AssertUnwindSafe(|| self.run(number, &mut turn, &mut out));
        if std::panic::catch_unwind(run).is_err() {
            self.panicked(turn, out);
        }
        if self.is_replaced(number) {
            self.hung_threads.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Returns true if another thread has replaced this one because its last turn hung.
    fn is_replaced(&self, number: u64) -> bool {
        self.own_thread.load(Ordering::SeqCst) > number
    }

    /// Locks the machine, and also waits while a turn of another thread is detached.
    fn wait_for_machine(&self) -> MutexGuard<'_, Option<Driven<P>>> {
        let mut machine = self.machine.lock();
        while machine.as_ref().is_some_and(|driven| driven.detached != 0) {
            machine = self.returned.wait_until(machine, None);
        }
        machine
    }

    pub(super) fn run<'a>(&'a self, number: u64, turn: &mut TurnGuard<'a, P>, out: &mut Outbox) {
        let (mut idle_since, mut stuck_since): (Option<Instant>, Option<Instant>) = (None, None);
        let mut looks = 0;
        let mut fds: Vec<RawFd> = Vec::new();
        while !self.is_stopping() {
            if self.sleep.is_driven() {
                idle_since = None;
                if self.sleep.stay_away(|| self.is_stopping()) {
                    continue;
                }
                // The driver is in a long turn, or has left or lost its core.
                let Some(machine) = self.machine.try_lock() else { continue };
                if machine.as_ref().is_some_and(|driven| driven.detached != 0) {
                    continue;
                }
                turn.machine = Some(machine);
            } else {
                turn.machine = Some(self.wait_for_machine());
            }
            if self.is_halted() {
                turn.machine = None;
                return exit::wait();
            }
            if turn.driven().is_none() {
                break;
            }
            let (mut sleep, mut pauses, mut looking, mut yields) = (None, false, false, false);
            let Some(had) = self.turn(turn, None, TurnThread::Own, out) else {
                debug_assert!(self.is_replaced(number));
                return;
            };
            let Some(Driven { machine, .. }) = turn.driven() else { break };
            if had.done > 0 || !out.is_empty() {
                (idle_since, stuck_since) = (None, None);
                yields = had.yields;
            } else if has_looked_enough(&had, *idle_since.get_or_insert_with(Instant::now)) {
                match machine.arm() {
                    Ok(Armed::Again) => {}
                    Ok(Armed::Busy) => {
                        let stuck = stuck_since.get_or_insert_with(Instant::now).elapsed();
                        pauses = stuck >= STUCK;
                        sleep = pauses.then(|| Some((stuck / 8).min(LONGEST_PAUSE)));
                    }
                    Ok(Armed::Sleep(longest)) => sleep = Some(longest),
                    Err(error) => {
                        tracing::error!(
                            %error,
                            "a reactor cannot arm its wake-up; polling every 10 ms"
                        );
                        sleep = Some(Some(Duration::from_millis(10)));
                    }
                }
                if let Some(longest) = sleep {
                    self.sleep.announce(longest);
                    fds.clear();
                    if !pauses {
                        // During a pause they may be ready all along.
                        fds.extend_from_slice(machine.fds());
                    }
                }
            } else {
                looking = true;
            }
            turn.machine = None;
            out.deliver(&*self.events);
            looks = if looking { looks + 1 } else { 0 };
            if looking {
                pause_between_looks(looks);
            } else if yields {
                std::thread::yield_now();
            }
            let is_queued =
                || self.queue.lock().as_ref().is_some_and(|commands| !commands.is_empty());
            let has_work = || is_queued() || self.is_stopping();
            if let Some(longest) = sleep
                && self.sleep.sleep_unless(has_work, &fds, longest)
                && !pauses
            {
                (idle_since, stuck_since) = (None, None);
            }
        }
        turn.machine = None; // the lock may be held if the machine has ended
        turn.machine = Some(self.wait_for_machine());
        if self.is_halted() {
            turn.machine = None;
            return exit::wait();
        }
        let driven = turn.machine.as_mut().and_then(|machine| machine.take());
        if let Some(Driven { mut machine, mut untold, .. }) = driven {
            out.append(&mut untold);
            let left = self.queue.lock().take().unwrap_or_default(); // releases the queue's lock
            for command in left {
                machine.command(command, out);
            }
            machine.stop(out);
            drop(machine); // still under the lock, for which process exit waits
        }
        turn.machine = None;
        self.watched.stop_watching();
        out.deliver(&*self.events);
    }
}
