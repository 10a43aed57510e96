//! The thread of a reactor: turns while there is work, looks for more for a while, and sleeps.

use std::os::fd::RawFd;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use super::{Armed, Driven, MachineSlot, Outbox, Progress, ReactorShared, Turn, exit};
use kvx_core::backend::sync::pause_between_looks;

/// A machine that was busy for this long, and got nothing done, is not looked at without a pause any more: whom it
/// waits for may need the core. UCX's shared memory is so while a peer's queue is full.
const STUCK: Duration = Duration::from_micros(200);
/// The longest of these pauses, which are an eighth of the time that it has been so.
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// True if the reactor, which has found nothing to do since then, may sleep.
fn has_looked_enough(turn: &Turn, idle_since: Instant) -> bool {
    let now = Instant::now();
    now.saturating_duration_since(idle_since) >= turn.look_for
        || turn.look_until.is_some_and(|until| now >= until)
}

impl<P: Progress> ReactorShared<P> {
    /// The thread of the room with this number, which is there at once.
    pub(super) fn serve(&self, number: usize) {
        let room = loop {
            match self.rooms().nth(number) {
                Some(room) => break room,
                None => std::thread::yield_now(),
            }
        };
        let mut out = Outbox::default();
        if std::panic::catch_unwind(AssertUnwindSafe(|| self.run(room, &mut out))).is_err() {
            self.panicked(room, room.machine.lock(), out);
        }
    }

    pub(super) fn run(&self, room: &MachineSlot<P>, out: &mut Outbox) {
        let (mut idle_since, mut stuck_since): (Option<Instant>, Option<Instant>) = (None, None);
        let mut looks = 0;
        let mut fds: Vec<RawFd> = Vec::new();
        while !self.is_stopping() && !room.is_left() {
            let mut guard = if room.sleep.is_driven() {
                idle_since = None;
                if room.sleep.stay_away(|| self.is_stopping() || room.is_left()) {
                    continue;
                }
                // It is in a long turn, or has gone or lost its core.
                let Some(guard) = room.machine.try_lock() else { continue };
                guard
            } else {
                room.machine.lock()
            };
            if self.is_halted() {
                drop(guard);
                return exit::wait();
            }
            if room.is_left() {
                break; // it had to wait for a turn that hung
            }
            let Some(driven) = guard.as_mut() else { break };
            let (mut sleep, mut pauses, mut looking, mut yields) = (None, false, false, false);
            let turn = self.turn(driven, None, out);
            if room.is_left() {
                break; // it was this turn that hung
            }
            let machine = &mut driven.machine;
            if turn.done > 0 || !out.is_empty() {
                (idle_since, stuck_since) = (None, None);
                yields = turn.yields;
            } else if has_looked_enough(&turn, *idle_since.get_or_insert_with(Instant::now)) {
                match machine.arm() {
                    Ok(Armed::Again) => {}
                    Ok(Armed::Busy) => {
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
                    room.sleep.announce(longest);
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
            let is_queued =
                || self.queue.lock().as_ref().is_some_and(|commands| !commands.is_empty());
            let has_work = || is_queued() || self.is_stopping() || room.is_left();
            if let Some(longest) = sleep
                && room.sleep.sleep_unless(has_work, &fds, longest)
                && !pauses
            {
                (idle_since, stuck_since) = (None, None);
            }
        }
        let mut guard = room.machine.lock();
        if self.is_halted() {
            drop(guard);
            return exit::wait();
        }
        let driven = guard.take();
        if room.is_left() {
            drop(guard);
            drop(driven);
            out.deliver(&*self.events);
        } else if let Some(Driven { mut machine, .. }) = driven {
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
}
