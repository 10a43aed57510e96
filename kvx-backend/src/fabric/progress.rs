//! The machine behind the reactor's thread: commands, events of the library, turns.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::backend::{BoundPlan, Ticket};
use kvx_core::{Result, TransferId};

use super::job::PendingTransfer;
use super::lanes::{Stripe, Thread};
use super::library::{EndpointId, Event, Fabric};
use super::machine::Machine;
use super::regions::RegionRecord;
use super::session::Session;
use super::shared_link::{Import, SharedLink};
use crate::control::errors::still_shared;
use crate::error::closed;
use crate::reactor::{Armed, NoWork, Outbox, Progress, Queued, SLICE, Turn};

/// The limit for job turns before the machine's other duties.
const WORKS: usize = 32;
/// The time limit for job turns before messages are handled: some libraries copy data within a
/// post.
const TURN: Duration = Duration::from_micros(50);
/// The number of bytes after which waiting commands are handled, because a notification may be
/// among them. Such a library copies this in some 20 microseconds.
const MUCH: u64 = 128 << 10;

/// Returns true if another job may have a turn, after `works` turns that moved `moved` bytes in
/// `time`. `queued` means that commands wait.
fn goes_on(moved: u64, works: usize, time: Duration, queued: bool) -> bool {
    moved < SLICE && works < WORKS && time < TURN && !(queued && moved >= MUCH)
}

/// A request of another thread to the machine.
pub(super) enum Command<L> {
    Connect {
        link: Arc<SharedLink>,
        address: Box<[u8]>,
    },
    Update {
        link: Arc<SharedLink>,
        address: Box<[u8]>,
    },
    Import {
        link: Arc<SharedLink>,
        import: Arc<Import>,
    },
    /// Posts a transfer. A small one may be posted at once on the thread `inline_on`.
    Post {
        link: Arc<SharedLink>,
        plan: Arc<BoundPlan>,
        stripe: Stripe,
        id: TransferId,
        done: Ticket,
        inline_on: Option<Thread>,
    },
    Notify {
        link: Arc<SharedLink>,
        bytes: Box<[u8]>,
        done: Ticket,
    },
    Cancel {
        link: Arc<SharedLink>,
        id: TransferId,
    },
    Close {
        link: Arc<SharedLink>,
    },
    Revoke {
        region: Arc<RegionRecord<L>>,
        done: Ticket,
    },
    Resume,
    Shutdown {
        done: Ticket,
    },
}

impl<F: Fabric> Machine<F> {
    fn take(&mut self, event: Event, out: &mut Outbox) {
        match event {
            Event::Message(frame) => self.take_frame(&frame, out),
            Event::Ready(endpoint) => self.ready(endpoint, out),
            Event::Changed(endpoint) => self.take_change(endpoint, out),
            Event::Broken { endpoint, why, gone } => self.lose(endpoint.0, why, gone, out),
            Event::Completed { job, pieces, result } => {
                self.take_completion(job, pieces, result, out)
            }
            Event::Flushed { job, result } => self.take_flush(job, result, out),
            Event::Notification { from, bytes } => self.take_foreign_notice(from, bytes),
        }
    }

    fn work(&mut self, queued: &Queued, out: &mut Outbox) -> usize {
        if self.turns.is_empty() {
            return 0;
        }
        let (mut moved, mut works, begun) = (0, 0, Instant::now());
        while works == 0 || goes_on(moved, works, begun.elapsed(), queued.any()) {
            let Some(key) = self.turns.next_turn() else { break };
            works += 1;
            moved += self.advance(key, out);
        }
        works
    }

    pub(super) fn poll(&mut self, out: &mut Outbox) -> usize {
        let mut fabric_events = std::mem::take(&mut self.fabric_events);
        self.polled = self.fabric.poll(&mut fabric_events);
        let done = self.polled.done.max(fabric_events.len());
        if !fabric_events.is_empty() {
            self.retry_stalled();
        }
        for event in fabric_events.drain(..) {
            self.take(event, out);
        }
        self.fabric_events = fabric_events;
        done
    }

    fn number_of(&self, link: &SharedLink) -> Option<u64> {
        let number = *self.links.get(&link.id)?;
        self.sessions.get(&number).is_some_and(Session::is_up).then_some(number)
    }
}

impl<F: Fabric> Progress for Machine<F> {
    type Command = Command<F::Local>;
    type Work = NoWork;

    #[inline(always)]
    fn command(&mut self, command: Self::Command, out: &mut Outbox) {
        self.left_something |= !matches!(command, Command::Post { inline_on: Some(_), .. });
        match command {
            Command::Connect { link, address } => self.connect(link, &address, out),
            Command::Update { link, address } => {
                if let Some(number) = self.number_of(&link)
                    && let Err(why) = self.fabric.update(EndpointId(number), &address)
                {
                    self.lose(number, why.with_backend(self.name), false, out);
                }
            }
            Command::Import { link, import } => self.import(&link, &import, out),
            Command::Post { link, plan, stripe, id, done, inline_on } => {
                match self.number_of(&link) {
                    Some(number) => self.post(
                        number,
                        PendingTransfer { plan, stripe, id, done },
                        inline_on,
                        out,
                    ),
                    None => {
                        drop(plan);
                        out.settle(done, Err(link.gone()));
                    }
                }
            }
            Command::Notify { link, bytes, done } => match self.number_of(&link) {
                Some(number) => self.notify(number, bytes, done, out),
                None => out.settle(done, Err(link.gone())),
            },
            Command::Cancel { link, id } => {
                if let Some(number) = self.number_of(&link) {
                    self.cancel(number, id, out);
                }
            }
            Command::Close { link } => self.close(&link, out),
            Command::Revoke { region, done } => self.revoke(region, done, out),
            Command::Resume => self.resume(out),
            Command::Shutdown { done } => self.shutdown.push(done),
        }
    }

    fn progress(&mut self, queued: &Queued, out: &mut Outbox) -> Turn {
        let left_something = std::mem::take(&mut self.left_something);
        if std::mem::take(&mut self.lent_turn) {
            return Turn { done: 0, left_nothing: !left_something, ..self.polled };
        }
        let done = self.poll(out) + self.take_ends(out) + self.send_waiting(out) + self.look(out);
        let done = done + self.unregister(out) + self.work(queued, out);
        Turn { done, left_nothing: false, ..self.polled }
    }

    fn arm(&mut self) -> Result<Armed> {
        if !self.turns.is_empty() {
            return Ok(Armed::Again);
        }
        self.see_ends();
        if !self.ended.is_empty() {
            return Ok(Armed::Again);
        }
        let waiting = !self.jobs.is_empty()
            || !self.sending.is_empty()
            || self.sessions.values().any(|session| {
                !session.is_up()
                    || session.imports.awaits_answer()
                    || session.to_peer.awaits_answer()
            });
        let armed = self.fabric.arm(waiting)?;
        let look = self.next_look.map(|at| at.saturating_duration_since(Instant::now()));
        Ok(match armed {
            Armed::Again | Armed::Busy => armed,
            Armed::Sleep(longest) => Armed::Sleep(match (longest, look) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            }),
        })
    }

    fn fds(&self) -> &[RawFd] {
        &self.fds
    }

    fn stop(&mut self, out: &mut Outbox) {
        self.end_all(out);
        for done in self.shutdown.drain(..) {
            out.settle(done, Ok(()));
        }
    }

    fn late(command: Self::Command) {
        match command {
            Command::Post { plan, done, .. } => {
                drop(plan);
                done.settle(Err(closed()));
            }
            Command::Notify { done, .. } => done.settle(Err(closed())),
            Command::Shutdown { done } => done.settle(Ok(())),
            Command::Revoke { region, done } => {
                let id = region.id;
                region.quarantine();
                done.settle(Err(still_shared(id)));
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::hostile::machine;
    use super::*;

    #[test]
    fn the_library_scheduling_request_reaches_the_reactor_after_a_turn_without_a_poll() {
        let (mut machine, queued, mut out) = (machine(), Queued::default(), Outbox::default());
        assert!(!machine.progress(&queued, &mut out).own_thread_only);
        machine.fabric.alone = true;
        let turn = machine.progress(&queued, &mut out);
        assert!(turn.own_thread_only && !turn.left_nothing);
        machine.lent_turn = true;
        let turn = machine.progress(&queued, &mut out);
        assert!(turn.own_thread_only && turn.left_nothing && turn.done == 0);
    }

    #[test]
    fn a_turn_that_moved_much_ends_for_a_command_and_every_turn_ends() {
        let goes_on = |moved, works, micros, queued| {
            goes_on(moved, works, Duration::from_micros(micros), queued)
        };
        assert!(goes_on(MUCH, 1, 20, false) && !goes_on(MUCH, 1, 20, true));
        assert!(goes_on(MUCH - 1, 8, 20, true), "small jobs cost too little to end the turn");
        assert!(
            !goes_on(SLICE, 1, 20, false)
                && !goes_on(0, WORKS, 20, false)
                && !goes_on(0, 1, 50, false)
        );
    }
}
