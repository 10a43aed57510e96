//! The machine behind the reactor's thread: commands, what happens, turns.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use slab::Slab;

use crate::reactor::{Armed, Outbox, Progress, Queued, SLICE, Turn, WorkQueue, no_poller};
use kvx_core::transport::{Context, Events};
use kvx_core::{Bound, Error, ErrorKind, Identity, LinkId, Result, Ticket, TransferId};

use super::ending::Unproven;
use super::handle::{Import, Wiring, import_of};
use super::handshake::Unheard;
use super::jobs::{Running, Waiting};
use super::lanes::{Stripe, Thread};
use super::notices::ForeignNotices;
use super::regions::{Regions, Registered};
use super::session::{Held, Session};
use super::{EndpointId, Event, Fabric};
use crate::control::errors::{cancelled, still_shared};
use crate::control::proof::Keys;
use crate::control::{ControlMessage, ImportState, Recalls};
use crate::process::ProcessId;
use crate::rate_limit::RateLimited;

/// The most jobs that have a turn before others of the machine's duties.
const WORKS: usize = 32;
/// How long jobs have a turn before messages get theirs: some libraries copy within a post.
const TURN: Duration = Duration::from_micros(50);
/// After so many bytes commands wait no longer, for a notification may be among them: some 20 microseconds of such a
/// library.
const MUCH: u64 = 128 << 10;

/// How often a lane looks whether it holds too much with the others.
const BETWEEN_LANES: Duration = Duration::from_millis(100);

/// Whether one more job has a turn, after so many that took so long. `queued`: commands wait.
fn goes_on(moved: u64, works: usize, time: Duration, queued: bool) -> bool {
    moved < SLICE && works < WORKS && time < TURN && !(queued && moved >= MUCH)
}

/// What other threads ask of the machine.
pub(super) enum Command<L> {
    Connect {
        link: Arc<Wiring>,
        address: Box<[u8]>,
    },
    Update {
        link: Arc<Wiring>,
        address: Box<[u8]>,
    },
    Import {
        link: Arc<Wiring>,
        import: Arc<Import>,
    },
    /// `inline_on`: on this thread a small transfer may be posted at once.
    Post {
        link: Arc<Wiring>,
        plan: Arc<Bound>,
        stripe: Stripe,
        id: TransferId,
        done: Ticket,
        inline_on: Option<Thread>,
    },
    Notify {
        link: Arc<Wiring>,
        bytes: Box<[u8]>,
        done: Ticket,
    },
    Cancel {
        link: Arc<Wiring>,
        id: TransferId,
    },
    Close {
        link: Arc<Wiring>,
    },
    Revoke {
        region: Arc<Registered<L>>,
        done: Ticket,
    },
    Resume,
    Shutdown {
        done: Ticket,
    },
}

pub(super) struct Machine<F: Fabric> {
    pub(super) name: &'static str,
    pub(super) me: Identity,
    /// What peers prove to us by.
    pub(super) keys: Keys,
    pub(super) strangers: RateLimited,
    pub(super) fabric: F,
    pub(super) events: Arc<dyn Events>,
    pub(super) peer_timeout: Duration,
    pub(super) regions: Arc<Regions<F::Local>>,
    pub(super) address: Arc<dyn Fn() -> Result<Vec<u8>> + Send + Sync>,
    pub(super) process: ProcessId,
    pub(super) max_message: usize,
    pub(super) sessions: BTreeMap<u64, Session<F>>,
    pub(super) held: Arc<Held>,
    pub(super) links: BTreeMap<LinkId, u64>,
    /// Peers whose first message is not whole yet, by their numbers.
    pub(super) greetings: HashMap<u64, Unheard>,
    /// In boxes, which are moved instead of them.
    pub(super) jobs: Slab<Box<Running<F>>>,
    pub(super) turns: WorkQueue<usize>,
    /// Jobs that wait for room in the library.
    pub(super) stalled: Vec<usize>,
    /// Sessions with something to be sent.
    pub(super) sending: Vec<u64>,
    /// By the numbers of the sessions whose peers hold the region.
    pub(super) recalls: Recalls<u64, (Arc<Registered<F::Local>>, Ticket)>,
    /// Regions that every peer has let go of, and the library has not.
    pub(super) released: Vec<(Arc<Registered<F::Local>>, Ticket)>,
    /// By the number of the session that was lost.
    pub(super) unproven: HashMap<u64, Unproven>,
    /// Notifications of foreign agents that found no room.
    pub(super) foreign_notices: ForeignNotices,
    fabric_events: Vec<Event>,
    /// Wakes for the library's descriptors, and for the end of peers' processes.
    pub(super) poller: OwnedFd,
    fds: [RawFd; 1],
    pub(super) next_look: Option<Instant>,
    /// Numbers of peers whose processes have ended, seen when there was nobody to tell.
    pub(super) ended: Vec<u64>,
    /// This turn was lent by a thread that posted something small, which is done: nothing more is done on it.
    pub(super) lent_turn: bool,
    /// In this turn, something else was done than transfers that ended as they were posted.
    pub(super) left_something: bool,
    /// How the library wants to be scheduled, as it last said.
    polled: Turn,
    shutdown: Vec<Ticket>,
}

impl<F: Fabric> Machine<F> {
    pub(super) fn new(
        context: Context,
        name: &'static str,
        fabric: F,
        regions: Arc<Regions<F::Local>>,
        address: Arc<dyn Fn() -> Result<Vec<u8>> + Send + Sync>,
        held: Arc<Held>,
    ) -> Result<Self> {
        let poller = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(no_poller)?;
        for fd in fabric.fds() {
            // SAFETY: the fabric keeps its descriptors open for as long as it lives.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(*fd) };
            epoll::add(&poller, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
                .map_err(no_poller)?;
        }
        Ok(Machine {
            name,
            keys: Keys::new(&context.invitation, context.secret.as_ref()),
            strangers: RateLimited::default(),
            me: context.agent,
            events: context.events,
            peer_timeout: context.peer_timeout,
            regions,
            address,
            process: ProcessId::current(),
            max_message: fabric.max_message(),
            fabric,
            sessions: BTreeMap::new(),
            held,
            links: BTreeMap::new(),
            greetings: HashMap::new(),
            jobs: Slab::new(),
            turns: WorkQueue::default(),
            stalled: Vec::new(),
            sending: Vec::new(),
            recalls: Recalls::default(),
            released: Vec::new(),
            unproven: HashMap::new(),
            foreign_notices: ForeignNotices::default(),
            fabric_events: Vec::new(),
            fds: [poller.as_raw_fd()],
            poller,
            next_look: None,
            ended: Vec::new(),
            lent_turn: false,
            left_something: true,
            polled: Turn::did(0),
            shutdown: Vec::new(),
        })
    }

    pub(super) fn error(
        &self,
        kind: ErrorKind,
        sentence: impl Into<std::borrow::Cow<'static, str>>,
    ) -> Error {
        Error::new(kind, sentence).with_backend(self.name)
    }

    /// Sends a message, now or when the library has room.
    pub(super) fn send(&mut self, number: u64, message: &ControlMessage<'_>, out: &mut Outbox) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        match session.send(message, self.max_message) {
            Ok(()) => {
                self.push_out(number, out);
            }
            Err(why) => self.cut_off(number, why, out),
        }
    }

    pub(super) fn push_out(&mut self, number: u64, out: &mut Outbox) -> usize {
        let Some(session) = self.sessions.get_mut(&number) else { return 0 };
        match session.push_out(&mut self.fabric) {
            Ok(taken) => {
                if taken > 0 {
                    session.note_held(&self.held).ok(); // it has less
                }
                if session.has_waiting() {
                    if !self.sending.contains(&number) {
                        self.sending.push(number);
                    }
                } else {
                    self.after_work(number, out);
                }
                taken
            }
            Err(why) => {
                self.lose(number, why, false, out);
                1
            }
        }
    }

    /// Counts what a peer has us hold. One with too much loses the session.
    pub(super) fn count_held(&mut self, number: u64, out: &mut Outbox) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let was = session.counted;
        let noted = session.note_held(&self.held);
        if session.counted == was {
            return;
        }
        if let Err(why) = noted {
            self.cut_off(number, why, out);
        }
        self.drop_greediest(out);
        self.look_at_lanes();
    }

    /// What is counted here may become too much by what other lanes count, which cannot end it.
    pub(super) fn look_at_lanes(&mut self) {
        if Arc::strong_count(&self.held) > 1
            && self.sessions.values().any(|session| session.counted > 0)
        {
            self.look_by(Instant::now() + BETWEEN_LANES);
        }
    }

    /// A peer has us hold less.
    pub(super) fn held_less(&mut self, number: u64) {
        if let Some(session) = self.sessions.get_mut(&number) {
            session.note_held(&self.held).ok(); // too much is seen when it has more
        }
    }

    /// All peers together hold too much: the one that holds most loses its sessions. Other lanes end theirs.
    pub(super) fn drop_greediest(&mut self, out: &mut Outbox) {
        let held = self.held.lock();
        let Some(greediest) = held.greediest(|_| true) else { return };
        let why = held.too_much();
        drop(held);
        let its = self.sessions.iter().filter(|(_, session)| session.is_counted_for(&greediest));
        for number in its.map(|(number, _)| *number).collect::<Vec<_>>() {
            self.cut_off(number, why.clone(), out);
        }
    }

    /// Tries again to send what waits.
    pub(super) fn send_waiting(&mut self, out: &mut Outbox) -> usize {
        let mut taken = 0;
        for number in std::mem::take(&mut self.sending) {
            if self.sessions.get(&number).is_some_and(|session| session.foreign) {
                taken += self.notify_foreign(number, out);
            } else {
                taken += self.push_out(number, out);
            }
        }
        taken
    }

    fn take(&mut self, event: Event, out: &mut Outbox) {
        match event {
            Event::Message(frame) => self.take_frame(&frame, out),
            Event::Ready(endpoint) => self.ready(endpoint, out),
            Event::Changed(endpoint) => self.changed(endpoint, out),
            Event::Broken { endpoint, why, gone } => self.lose(endpoint.0, why, gone, out),
            Event::Completed { job, pieces, result } => self.moved(job, pieces, result, out),
            Event::Flushed { job, result } => self.flushed(job, result, out),
            Event::Notification { from, bytes } => self.take_foreign_notice(from, bytes),
        }
    }

    /// A transfer was posted; `inline_on`: by this thread.
    #[inline(always)]
    pub(super) fn post(
        &mut self,
        number: u64,
        transfer: Waiting,
        inline_on: Option<Thread>,
        out: &mut Outbox,
    ) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let mut remotes = Vec::with_capacity(transfer.plan.remotes().len());
        for remote in transfer.plan.remotes() {
            let import =
                import_of(&remote.region).and_then(|import| session.imports.get(import.number));
            match import {
                Some(ImportState::Granted((held, _))) => remotes.push(Arc::clone(held)),
                Some(ImportState::Refused(why)) => {
                    return out.settle(transfer.done, Err(why.clone()));
                }
                Some(ImportState::Pending(_)) => {
                    session.waiting.push(transfer);
                    return self.after_work(number, out);
                }
                None => {
                    let why = Error::new(
                        ErrorKind::Closed,
                        "the region was imported when the link was not up",
                    );
                    return out.settle(transfer.done, Err(why.with_backend(self.name)));
                }
            }
        }
        match Running::new(number, transfer, remotes, self.fabric.max_piece()) {
            Ok(running) => self.start(running, inline_on == Some(Thread::this()), out),
            Err((done, why)) => out.settle(done, Err(why)),
        }
    }

    fn cancel(&mut self, number: u64, id: TransferId, out: &mut Outbox) {
        let why = cancelled().with_backend(self.name);
        let Some(session) = self.sessions.get_mut(&number) else { return };
        if let Some(position) = session.waiting.iter().position(|waiting| waiting.id == id) {
            out.settle(session.waiting.swap_remove(position).done, Err(why));
            return self.after_work(number, out);
        }
        self.fail_jobs(|running| running.session == number && running.transfer == id, &why, out);
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
            self.unstall();
        }
        for event in fabric_events.drain(..) {
            self.take(event, out);
        }
        self.fabric_events = fabric_events;
        done
    }

    fn number_of(&self, link: &Wiring) -> Option<u64> {
        let number = *self.links.get(&link.id)?;
        self.sessions.get(&number).is_some_and(Session::is_up).then_some(number)
    }
}

impl<F: Fabric> Progress for Machine<F> {
    type Command = Command<F::Local>;

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
                    Some(number) => {
                        self.post(number, Waiting { plan, stripe, id, done }, inline_on, out)
                    }
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
        let closed = || Error::new(ErrorKind::Closed, "the transport has been shut down");
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
    fn what_the_library_asks_for_reaches_the_reactor_also_after_a_turn_without_it() {
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
    fn a_turn_that_moved_much_ends_for_a_command_and_any_turn_ends() {
        let goes_on = |moved, works, micros, queued| {
            goes_on(moved, works, Duration::from_micros(micros), queued)
        };
        assert!(goes_on(MUCH, 1, 20, false) && !goes_on(MUCH, 1, 20, true));
        assert!(goes_on(MUCH - 1, 8, 20, true), "small ones cost too little to take a turn each");
        assert!(
            !goes_on(SLICE, 1, 20, false)
                && !goes_on(0, WORKS, 20, false)
                && !goes_on(0, 1, 50, false)
        );
    }
}
