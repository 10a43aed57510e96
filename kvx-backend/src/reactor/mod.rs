//! The one thread from which every transport is built: a submission queue, an eventfd, an idle policy.
//!
//! A transport writes a [`Progress`]: a plain state machine that owns its sockets or its native library. The reactor
//! owns the machine, feeds it commands, lets it work in bounded turns, and sleeps when it says that it may. Any other
//! thread may lend a hand ([`Reactor::drive`]) or hand over a command and do its first turn at once
//! ([`Reactor::submit_and_turn`]) if the machine is free; nobody ever waits for it.

mod exit;
mod mailbox;
#[cfg(feature = "panic-for-tests")]
pub mod panics;
mod sleep;
mod sync;
mod thread;
pub mod watch;
mod work_queue;

use std::os::fd::RawFd;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use kvx_core::backend::sync::catch_panic;
use kvx_core::backend::{Events, LinkId, LinkState, Ticket};
use kvx_core::{Error, ErrorKind, Result};

pub(crate) use exit::halt_before_destructors;
pub use kvx_core::backend::Turn;
pub use mailbox::Mailbox;
pub use work_queue::WorkQueue;

use sleep::Sleep;
use sync::{Mutex, MutexGuard};

/// The state machine that a reactor drives.
pub trait Progress: Send + 'static {
    /// A request from another thread.
    type Command: Send + 'static;

    /// Takes a command. Does not work on it beyond noting it; [`progress`](Progress::progress) follows.
    fn command(&mut self, command: Self::Command, out: &mut Outbox);

    /// One turn: at most about [`SLICE`] bytes or a few dozen operations. One that has done much may end early where
    /// commands are `queued` behind it.
    fn progress(&mut self, queued: &Queued, out: &mut Outbox) -> Turn;

    /// Before sleeping: whether that is allowed, and for how long at most.
    fn arm(&mut self) -> Result<Armed>;

    /// The descriptors that wake it beside commands: always the same, watched for reading. A machine with sockets of
    /// its own shows one epoll descriptor.
    fn fds(&self) -> &[RawFd];

    /// The last call: fail what is left.
    fn stop(&mut self, out: &mut Outbox);

    /// A command that came after the machine had stopped: settle its tickets. Dropped, it forgets them.
    fn late(command: Self::Command) {
        drop(command);
    }
}

/// The error of a machine that has no descriptor for its epoll, or may not watch one more.
pub fn no_poller(cause: rustix::io::Errno) -> Error {
    Error::os("no readiness queue: raise ulimit -n", cause).with_kind(ErrorKind::Exhausted)
}

/// The most bytes to move in one turn before others get theirs.
pub const SLICE: u64 = 1 << 20;

/// The answer of [`Progress::arm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Armed {
    /// Work came in meanwhile.
    Again,
    /// A library cannot be slept on: it has work, or waits for what it does not tell, as for room at a peer. As long as
    /// nothing gets done it is looked at less and less often.
    Busy,
    /// Sleep until an fd or a command wakes; at most this long, if given.
    Sleep(Option<Duration>),
}

/// Tells a turn whether commands wait for its end.
#[derive(Debug, Default)]
pub struct Queued(sync::AtomicBool);

impl Queued {
    /// True if there are any.
    pub fn any(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    fn set(&self, any: bool) {
        self.0.store(any, Ordering::Release);
    }
}

/// Collects the results of a turn, which are delivered after the machine is released: tickets run other people's code.
#[derive(Default)]
pub struct Outbox {
    /// The first of the tickets, and the others: most turns that count settle one.
    first: Option<(Ticket, Result<()>)>,
    settled: Vec<(Ticket, Result<()>)>,
    links: Vec<(LinkId, LinkState)>,
}

impl Outbox {
    /// Settles `ticket` once the turn is over.
    pub fn settle(&mut self, ticket: Ticket, result: Result<()>) {
        match self.first {
            None => self.first = Some((ticket, result)),
            Some(_) => self.settled.push((ticket, result)),
        }
    }

    /// Reports a link once the turn is over, after the tickets settled before.
    pub fn link(&mut self, id: LinkId, state: LinkState) {
        self.links.push((id, state));
    }

    /// Takes what another was to tell.
    pub fn append(&mut self, other: &mut Outbox) {
        if self.is_empty() {
            return std::mem::swap(self, other);
        }
        let other = std::mem::take(other);
        for (ticket, result) in other.first.into_iter().chain(other.settled) {
            self.settle(ticket, result);
        }
        self.links.extend(other.links);
    }

    fn is_empty(&self) -> bool {
        self.first.is_none() && self.links.is_empty()
    }

    pub(crate) fn deliver(&mut self, events: &dyn Events) {
        if let Some((ticket, result)) = self.first.take() {
            catch_panic(|| ticket.settle(result));
        }
        for (ticket, result) in self.settled.drain(..) {
            catch_panic(|| ticket.settle(result));
        }
        for (id, state) in self.links.drain(..) {
            catch_panic(|| events.link(id, state));
        }
    }
}

/// A handle to a running reactor. Dropping the last one asks it to stop; [`stop`](Reactor::stop) also waits.
pub struct Reactor<P: Progress> {
    name: String,
    shared: Arc<ReactorShared<P>>,
    /// The last that was started.
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The part that one thread at a time works on.
struct Driven<P: Progress> {
    machine: P,
    /// Empty between turns: the room for the commands of one.
    taken: Vec<P::Command>,
    /// Some turn since the machine was last asked how long to sleep has left something that its sleeping thread may
    /// not know of.
    left_something: bool,
}

/// Commands of one turn for which there is always space.
const SPACE: usize = 64;
/// How often who waits for a machine's thread to end looks whether it has.
const LOOKS_WHETHER_STOPPED: Duration = Duration::from_micros(100);
/// The most machines that take another's place, one after the other: each keeps a descriptor until the end.
const MAX_ROOMS: usize = 64;

/// A machine, and how its thread sleeps.
struct MachineSlot<P: Progress> {
    machine: Mutex<Option<Driven<P>>>,
    sleep: Sleep,
    /// Where work goes on since a turn in this one hangs.
    next: OnceLock<Box<MachineSlot<P>>>,
}

impl<P: Progress> MachineSlot<P> {
    fn around(machine: P) -> Result<Self> {
        let sleep = Sleep::new().map_err(|error| {
            Error::os("no eventfd for a reactor: raise the limit of open files", error)
        })?;
        let driven = Driven { machine, taken: Vec::new(), left_something: true };
        Ok(MachineSlot { machine: Mutex::new(Some(driven)), sleep, next: OnceLock::new() })
    }

    /// Whether work goes on elsewhere.
    #[inline(always)]
    fn is_left(&self) -> bool {
        self.next.get().is_some()
    }
}

struct ReactorShared<P: Progress> {
    first: MachineSlot<P>,
    stopping: AtomicBool,
    /// `None` when the machine takes no more.
    queue: Mutex<Option<Vec<P::Command>>>,
    /// True if the queue is not empty: looking into an empty one costs next to nothing. Before it sleeps, the reactor
    /// looks into the queue itself: this alone could be seen too late.
    queued: Queued,
    /// Of the last turn: only the reactor's own thread may have the next.
    own_thread_only: AtomicBool,
    /// Of the last turn, likewise.
    ends_unannounced: AtomicBool,
    /// The process ends: nobody goes into the machine any more.
    halted: AtomicBool,
    events: Arc<dyn Events>,
}

impl<P: Progress> Reactor<P> {
    /// Starts the thread `name` around `machine`.
    pub fn start(name: String, machine: P, events: Arc<dyn Events>) -> Result<Self> {
        let shared = Arc::new(ReactorShared::around(machine, events)?);
        exit::watch(Arc::downgrade(&shared) as Weak<dyn exit::Halt>);
        let thread = shared.start_thread(&name, 0)?;
        Ok(Reactor { name, shared, thread: Mutex::new(Some(thread)) })
    }

    /// While a turn hangs: from here on `machine`, which shares with that one what both work on, has all turns, and
    /// another thread. The thread that hangs has no further turn. Errors: `Exhausted`, and all is as before.
    pub fn go_on_with(&self, machine: P) -> Result<()> {
        let mut thread = self.thread.lock();
        let (number, last) =
            self.shared.rooms().enumerate().last().unwrap_or((0, &self.shared.first));
        if number >= MAX_ROOMS {
            let why = format!("{MAX_ROOMS} turns of this agent have hung: start its process anew");
            return Err(Error::new(ErrorKind::Exhausted, why));
        }
        let next = Box::new(MachineSlot::around(machine)?);
        let queue = self.shared.queue.lock();
        if queue.is_none() {
            return Err(Error::new(ErrorKind::Closed, "the machine has ended"));
        }
        // It waits for its room, whose number only this thread gives.
        let started = self.shared.start_thread(&self.name, number + 1)?;
        last.next.set(next).ok(); // it was the last
        drop(queue);
        *thread = Some(started);
        last.sleep.wake(); // its thread, if another one hangs, ends
        fence(Ordering::SeqCst);
        if self.shared.is_stopping() {
            self.shared.room().sleep.wake(); // who stops may have seen the last room
        }
        Ok(())
    }

    /// Hands over a command. After the stop it goes to [`Progress::late`].
    pub fn submit(&self, command: P::Command) {
        self.shared.push(command);
        self.shared.room().sleep.wake_if_asleep();
    }

    /// Hands over a command and, if the machine is free, does one turn on this thread: for small work whose latency
    /// counts.
    pub fn submit_and_turn(&self, command: P::Command) {
        let mut command = Some(command);
        if self.try_turn(&mut command).is_none() {
            command.into_iter().for_each(|command| self.shared.push(command));
            self.shared.room().sleep.wake_if_asleep();
        }
    }

    /// One turn on this thread, if the machine is free. For callers that call it until what they wait for has happened:
    /// meanwhile the reactor's own thread stays out of their way.
    pub fn drive(&self) -> Turn {
        let shared = &*self.shared;
        let mut turn = None;
        if !shared.own_thread_only.load(Ordering::Relaxed) {
            turn = shared.room().sleep.driving(|| self.try_turn(&mut None));
        }
        turn.unwrap_or_else(|| {
            let ends_unannounced = shared.ends_unannounced.load(Ordering::Relaxed);
            Turn { ends_unannounced, ..Turn::did(0) }
        })
    }

    /// After the last [`drive`](Reactor::drive) of a thread that goes to sleep: the reactor's own thread is back at
    /// once.
    pub fn stop_driving(&self) {
        self.shared.room().sleep.stop_driving();
    }

    /// Has a turn with the command, which is taken, if the machine is free.
    ///
    /// Inlined, and so is everything between it and the library for a small transfer: a system call leaves the
    /// processor without the addresses to return to, so that each call around one costs some 12 ns.
    #[inline(always)]
    fn try_turn(&self, command: &mut Option<P::Command>) -> Option<Turn> {
        let closed = || self.shared.own_thread_only.load(Ordering::Relaxed);
        if closed() {
            return None;
        }
        let room = self.shared.room();
        let mut machine = room.machine.try_lock()?;
        let driven = machine
            .as_mut()
            .filter(|_| !self.shared.is_halted() && !closed() && !room.is_left())?;
        let mut out = Outbox::default();
        let last = command.take();
        // Not with the caller: what it waits for must end, and others use the machine.
        let turned = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let turn = self.shared.turn(driven, last, &mut out);
            // The thread sleeps by what the machine said before this turn: wake it if there is more to do than one
            // turn, or something to do earlier than it knows.
            let must_wake = turn.done > 0
                && room.sleep.is_as_announced()
                && !room.is_left()
                && std::mem::take(&mut driven.left_something)
                && match driven.machine.arm() {
                    Ok(Armed::Sleep(longest)) => room.sleep.is_longer_than(longest),
                    Ok(Armed::Again | Armed::Busy) | Err(_) => true,
                };
            (turn, must_wake)
        }));
        let Ok((turn, must_wake)) = turned else {
            self.shared.panicked(room, machine, out);
            return Some(Turn::did(0));
        };
        let gone = if room.is_left() { machine.take() } else { None };
        drop(machine);
        drop(gone);
        out.deliver(&*self.shared.events);
        if must_wake {
            room.sleep.wake();
        }
        Some(turn)
    }

    /// Has the machine stop, without waiting for it.
    pub(crate) fn ask_to_stop(&self) {
        self.shared.stop();
    }

    /// Stops the machine and waits for its thread, unless that is the calling one: if that hangs, until another machine
    /// has taken its place.
    pub fn stop(&self) {
        self.ask_to_stop();
        loop {
            let thread = { self.thread.lock().take() }; // without the lock: the thread may take it too
            let Some(thread) = thread else { return };
            if thread.thread().id() == std::thread::current().id() || self.shared.is_halted() {
                return;
            }
            while !thread.is_finished() && self.thread.lock().is_none() {
                std::thread::sleep(LOOKS_WHETHER_STOPPED);
            }
            if thread.is_finished() {
                thread.join().ok(); // a panic there has been reported by the panic hook
            }
        }
    }
}

impl<P: Progress> Drop for Reactor<P> {
    fn drop(&mut self) {
        if kvx_core::backend::fork::count() == 0 {
            self.shared.stop();
        }
    }
}

impl<P: Progress> ReactorShared<P> {
    fn around(machine: P, events: Arc<dyn Events>) -> Result<Self> {
        Ok(ReactorShared {
            first: MachineSlot::around(machine)?,
            stopping: AtomicBool::new(false),
            queue: Mutex::new(Some(Vec::new())),
            queued: Queued::default(),
            own_thread_only: AtomicBool::new(false),
            ends_unannounced: AtomicBool::new(false),
            halted: AtomicBool::new(false),
            events,
        })
    }

    fn start_thread(self: &Arc<Self>, name: &str, room: usize) -> Result<JoinHandle<()>> {
        let ours = Arc::clone(self);
        let thread = std::thread::Builder::new().name(name.to_owned());
        thread.spawn(move || ours.serve(room)).map_err(|error| {
            Error::os("a reactor thread could not be started", error)
                .with_kind(ErrorKind::Exhausted)
        })
    }

    fn rooms(&self) -> impl Iterator<Item = &MachineSlot<P>> {
        std::iter::successors(Some(&self.first), |room| room.next.get().map(|next| &**next))
    }

    /// Where work goes on.
    #[inline(always)]
    fn room(&self) -> &MachineSlot<P> {
        let mut room = &self.first;
        while let Some(next) = room.next.get() {
            room = next;
        }
        room
    }

    fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.room().sleep.wake();
    }

    #[inline]
    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    fn push(&self, command: P::Command) {
        let mut queue = self.queue.lock();
        match queue.as_mut() {
            Some(commands) if !self.is_halted() => {
                commands.push(command);
                self.queued.set(true);
            }
            _ => {
                drop(queue);
                P::late(command);
            }
        }
    }

    /// A machine that panics, on whichever thread, is dropped: its tickets are forgotten, which quarantines their
    /// memory, and what is submitted later is answered by [`Progress::late`]. The reactor's thread ends.
    #[cold]
    fn panicked(
        &self,
        room: &MachineSlot<P>,
        mut machine: MutexGuard<'_, Option<Driven<P>>>,
        out: Outbox,
    ) {
        tracing::error!(
            "a transport panicked: its links are gone and its memory is quarantined; report this as a bug"
        );
        let gone = machine.take();
        drop(machine);
        catch_panic(|| drop((gone, out)));
        let mut queue = self.queue.lock();
        if room.is_left() {
            return; // others go on
        }
        let left = queue.take().unwrap_or_default();
        drop(queue); // what a command's end wakes may submit another
        for command in left {
            catch_panic(|| P::late(command));
        }
        room.sleep.wake();
    }

    /// Takes what was submitted, and the last command if there is one, and does one turn.
    #[inline(always)]
    fn turn(
        &self,
        Driven { machine, taken, left_something }: &mut Driven<P>,
        last: Option<P::Command>,
        out: &mut Outbox,
    ) -> Turn {
        #[cfg(feature = "panic-for-tests")]
        panics::take_turn();
        let mut count = usize::from(last.is_some());
        if self.queued.any() {
            if let Some(commands) = self.queue.lock().as_mut() {
                self.queued.set(false);
                std::mem::swap(commands, taken);
            }
            count += taken.len();
            taken.drain(..).for_each(|command| machine.command(command, out));
            taken.shrink_to(SPACE);
        }
        if let Some(command) = last {
            machine.command(command, out);
        }
        let mut turn = machine.progress(&self.queued, out);
        turn.done += count;
        *left_something |= !turn.left_nothing;
        keep(&self.own_thread_only, turn.own_thread_only);
        keep(&self.ends_unannounced, turn.ends_unannounced);
        turn
    }
}

/// Stores what is new: other threads read the same cache line.
fn keep(flag: &AtomicBool, now: bool) {
    if flag.load(Ordering::Relaxed) != now {
        flag.store(now, Ordering::Relaxed);
    }
}

#[cfg(all(test, kvx_loom))]
mod models;
#[cfg(test)]
mod tests;
