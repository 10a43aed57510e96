//! The single thread on which every transport is built: a submission queue, an eventfd, and an idle
//! policy.
//!
//! A transport implements [`Progress`], a plain state machine that owns its sockets or its native
//! library. The reactor owns the machine, passes commands to it, lets it work in bounded turns, and
//! sleeps when it permits that. Any other thread may have a turn ([`Reactor::drive`]), or submit a
//! command and run its first turn at once ([`Reactor::submit_and_turn`]), if the machine is free.
//! It never waits for the machine.

pub mod detached;
mod exit;
mod mailbox;
#[cfg(feature = "panic-for-tests")]
pub mod panics;
mod sleep;
mod sync;
mod thread;
mod watch;
mod work_queue;

use std::os::fd::RawFd;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvx_core::backend::sync::catch_panic;
use kvx_core::backend::{Events, LinkId, LinkState, Ticket};
use kvx_core::{Error, ErrorKind, Result};

pub use detached::{DetachedWork, NoWork};
pub(crate) use exit::halt_before_destructors;
pub use kvx_core::backend::Turn;
pub use mailbox::Mailbox;
pub use work_queue::WorkQueue;

use detached::TurnThread;
use sleep::Sleep;
use sync::thread::{self as threads, JoinHandle};
use sync::{AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, fence};
use watch::WatchedTurns;

/// The state machine that a reactor drives.
pub trait Progress: Send + Sized + 'static {
    /// A request from another thread.
    type Command: Send + 'static;

    /// The work of the machine's turns that may hang on an unresolved page fault. [`NoWork`] for a
    /// machine that touches no memory of programs, or only on other threads.
    type Work: DetachedWork<Self>;

    /// Takes a command. Only records it; [`progress`](Progress::progress) follows and does the
    /// work.
    fn command(&mut self, command: Self::Command, out: &mut Outbox);

    /// Returns the next piece of a turn that may hang. The reactor runs it without the machine's
    /// lock, as [`DetachedWork`] describes. If there is none, [`progress`](Progress::progress)
    /// follows and ends the turn.
    fn next_work(&mut self, out: &mut Outbox) -> Option<Self::Work> {
        let _ = out;
        None
    }

    /// Abandons the last piece of work, which hangs and does not rejoin. Operations that depend on
    /// its memory wait for its [`DetachedWork::release`].
    fn abandon(&mut self, out: &mut Outbox) {
        let _ = out;
    }

    /// Does one turn: at most about [`SLICE`] bytes or a few dozen operations. A turn that has done
    /// much may end early if commands are `queued`.
    fn progress(&mut self, queued: &Queued, out: &mut Outbox) -> Turn;

    /// Prepares to sleep. Returns whether that is allowed, and for how long at most.
    fn arm(&mut self) -> Result<Armed>;

    /// Returns the descriptors that wake the machine in addition to commands. They never change and
    /// are watched for reading. A machine with its own sockets returns one epoll descriptor, and one
    /// that only commands wake returns none.
    fn fds(&self) -> &[RawFd];

    /// Fails all remaining work. This is the last call.
    fn stop(&mut self, out: &mut Outbox);

    /// Settles the tickets of a command that arrived after the machine had stopped. Dropping the
    /// command forgets them.
    fn late(command: Self::Command) {
        drop(command);
    }
}

/// Returns the error of a machine that has no descriptor for its epoll, or cannot watch another
/// one.
pub fn no_poller(cause: rustix::io::Errno) -> Error {
    Error::os("cannot create an epoll descriptor, or add one to it: raise ulimit -n", cause)
        .with_kind(ErrorKind::Exhausted)
}

/// The limit in bytes for one turn, so that other turns are not delayed for long.
pub const SLICE: u64 = 1 << 20;

/// The result of [`Progress::arm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Armed {
    /// New work has arrived.
    Again,
    /// The library does not permit sleeping: it has work, or waits for an event that it does not
    /// report, such as capacity at a peer. The reactor polls it less and less often while it makes
    /// no progress.
    Busy,
    /// Sleep until a descriptor or a command wakes the machine, at most this long if given.
    Sleep(Option<Duration>),
}

/// A flag that tells a turn whether commands wait for its end.
#[derive(Debug, Default)]
pub struct Queued(AtomicBool);

impl Queued {
    /// Returns true if commands wait.
    pub fn any(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    fn set(&self, any: bool) {
        self.0.store(any, Ordering::Release);
    }
}

/// The results of a turn, which are delivered after the machine is released, because settling
/// tickets runs code of the program.
#[derive(Default)]
pub struct Outbox {
    /// The first ticket; the others are separate because most latency-critical turns settle exactly
    /// one.
    first: Option<(Ticket, Result<()>)>,
    settled: Vec<(Ticket, Result<()>)>,
    links: Vec<(LinkId, LinkState)>,
}

impl Outbox {
    /// Settles `ticket` after the turn.
    pub fn settle(&mut self, ticket: Ticket, result: Result<()>) {
        match self.first {
            None => self.first = Some((ticket, result)),
            Some(_) => self.settled.push((ticket, result)),
        }
    }

    /// Reports the state of a link after the turn, after the tickets that were settled before.
    pub fn link(&mut self, id: LinkId, state: LinkState) {
        self.links.push((id, state));
    }

    /// Takes over the results of another outbox.
    fn append(&mut self, other: &mut Outbox) {
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

/// A handle to a running reactor. Dropping the last one asks it to stop; [`stop`](Reactor::stop)
/// also waits.
pub struct Reactor<P: Progress> {
    shared: Arc<ReactorShared<P>>,
    /// The thread that watches over detached work, if the machine has such work.
    watch: Mutex<Option<JoinHandle<()>>>,
}

/// The part of the reactor on which one thread at a time works.
struct Driven<P: Progress> {
    machine: P,
    /// Spare capacity for the commands of a turn; empty between turns.
    taken: Vec<P::Command>,
    /// True if, since the machine was last asked how long to sleep, a turn has left work of which
    /// the sleeping thread may not know.
    left_something: bool,
    /// The number of the turn whose work is detached; 0 if there is none. `thread` is the kind of
    /// thread that runs it.
    detached: u64,
    thread: TurnThread,
    /// True if the log already says that this turn hangs and no thread can continue.
    warned: bool,
    /// The results that a turn produced before its work was detached.
    untold: Outbox,
}

/// The number of commands of one turn for which capacity is kept.
const SPACE: usize = 64;
/// The interval at which [`Reactor::stop`] checks whether a machine's thread has ended.
const LOOKS_WHETHER_STOPPED: Duration = Duration::from_micros(100);

struct ReactorShared<P: Progress> {
    name: String,
    machine: Mutex<Option<Driven<P>>>,
    /// Notifies the reactor's own thread, which waits for a detached turn, that a caller's turn has
    /// ended or was abandoned.
    returned: Condvar,
    sleep: Sleep,
    /// The reactor's own thread, and its number. Threads with lower numbers hang, or have hung.
    thread: Mutex<Option<JoinHandle<()>>>,
    own_thread: AtomicU64,
    /// The number of replaced threads that still hang.
    hung_threads: AtomicUsize,
    watched: WatchedTurns,
    stopping: AtomicBool,
    /// `None` once the machine accepts no more commands.
    queue: Mutex<Option<Vec<P::Command>>>,
    /// True if the queue is not empty, so that checking an empty one costs almost nothing. Before
    /// the reactor sleeps it checks the queue itself, because it could see this flag too late.
    queued: Queued,
    /// The value from the last turn: only the reactor's own thread may have the next turn.
    own_thread_only: AtomicBool,
    /// The value from the last turn: see [`Turn::ends_unannounced`].
    ends_unannounced: AtomicBool,
    /// True when the process exits: no more turns begin.
    halted: AtomicBool,
    events: Arc<dyn Events>,
}

/// The access of a turn to the machine: the lock, or the number of its detached work.
struct TurnGuard<'a, P: Progress> {
    machine: Option<MutexGuard<'a, Option<Driven<P>>>>,
    detached: u64,
}

impl<'a, P: Progress> TurnGuard<'a, P> {
    fn of(machine: Option<MutexGuard<'a, Option<Driven<P>>>>) -> Self {
        TurnGuard { machine, detached: 0 }
    }

    /// Returns the machine, if this turn has the lock and the machine has not ended.
    #[inline(always)]
    fn driven(&mut self) -> Option<&mut Driven<P>> {
        self.machine.as_mut()?.as_mut()
    }

    /// Returns true if there is a machine and no turn of it is detached.
    #[inline(always)]
    fn is_free(&mut self) -> bool {
        self.driven().is_some_and(|driven| driven.detached == 0)
    }
}

/// The result of a caller's attempt to have a turn.
enum TurnTaken {
    /// Another thread has the machine.
    Busy,
    Had(Turn),
    /// The turn was abandoned because its work hung.
    Abandoned,
}

impl<P: Progress> Reactor<P> {
    /// Starts the thread `name` around `machine`.
    pub fn start(name: String, machine: P, events: Arc<dyn Events>) -> Result<Self> {
        let shared = Arc::new(ReactorShared::around(name, machine, events)?);
        exit::watch(Arc::downgrade(&shared) as Weak<dyn exit::Halt>);
        *shared.thread.lock() = Some(shared.start_thread(0)?);
        let reactor = Reactor { shared, watch: Mutex::default() };
        if P::Work::MAY_HANG {
            *reactor.watch.lock() = Some(reactor.shared.start_watch()?);
        }
        Ok(reactor)
    }

    /// Submits a command. After the stop it goes to [`Progress::late`].
    pub fn submit(&self, command: P::Command) {
        self.shared.push(command);
        self.shared.sleep.wake_if_asleep();
    }

    /// Submits a command and, if the machine is free, runs one turn on this thread, for small
    /// latency-critical work.
    pub fn submit_and_turn(&self, command: P::Command) {
        let mut command = Some(command);
        if let TurnTaken::Busy = self.try_turn(&mut command, TurnThread::Caller) {
            command.into_iter().for_each(|command| self.shared.push(command));
            self.shared.sleep.wake_if_asleep();
        }
    }

    /// Runs one turn on this thread, if the machine is free. A caller repeats this until the event
    /// for which it waits has happened; meanwhile the reactor's own thread stays away.
    pub fn drive(&self) -> Turn {
        let shared = &*self.shared;
        let mut taken = TurnTaken::Busy;
        if !shared.own_thread_only.load(Ordering::Relaxed) {
            shared.sleep.begin_driving();
            taken = self.try_turn(&mut None, TurnThread::Driver);
            if !matches!(taken, TurnTaken::Abandoned) {
                shared.sleep.end_driving(); // otherwise `abandon_turn` has done so
            }
        }
        match taken {
            TurnTaken::Had(turn) => turn,
            TurnTaken::Abandoned => Turn::did(1),
            TurnTaken::Busy => {
                let ends_unannounced = shared.ends_unannounced.load(Ordering::Relaxed);
                Turn { ends_unannounced, ..Turn::did(0) }
            }
        }
    }

    /// Makes the reactor's own thread return at once. A thread that has called
    /// [`drive`](Reactor::drive) calls this before it goes to sleep.
    pub fn stop_driving(&self) {
        self.shared.sleep.stop_driving();
    }

    /// Runs a turn if the machine is free; the turn takes `command`.
    ///
    /// This function and everything between it and the library is inlined for small transfers:
    /// after a system call the processor mispredicts returns, so that each stack frame around one
    /// costs some 12 ns.
    #[inline(always)]
    fn try_turn(&self, command: &mut Option<P::Command>, thread: TurnThread) -> TurnTaken {
        let shared = &*self.shared;
        let closed = || shared.own_thread_only.load(Ordering::Relaxed);
        if closed() {
            return TurnTaken::Busy;
        }
        let mut turn = TurnGuard::of(shared.machine.try_lock());
        if !turn.is_free() || shared.is_halted() || closed() {
            return TurnTaken::Busy;
        }
        let mut out = Outbox::default();
        let last = command.take();
        // The panic must not reach the caller: its operations must end, and others use the machine.
        let turned = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let had = shared.turn(&mut turn, last, thread, &mut out)?;
            let driven = turn.driven()?;
            // The thread sleeps for the time that the machine requested before this turn. Wake it
            // if more work is left than one turn, or if something is due earlier than it knows.
            let must_wake = had.done > 0
                && shared.sleep.is_as_announced()
                && std::mem::take(&mut driven.left_something)
                && match driven.machine.arm() {
                    Ok(Armed::Sleep(longest)) => shared.sleep.is_longer_than(longest),
                    Ok(Armed::Again | Armed::Busy) | Err(_) => true,
                };
            Some((had, must_wake))
        }));
        let Ok(turned) = turned else {
            let was_its = shared.panicked(turn, out);
            return if was_its { TurnTaken::Had(Turn::did(0)) } else { TurnTaken::Abandoned };
        };
        let Some((had, must_wake)) = turned else { return TurnTaken::Abandoned };
        drop(turn);
        shared.returned.notify_all();
        out.deliver(&*shared.events);
        if must_wake {
            shared.sleep.wake();
        }
        TurnTaken::Had(had)
    }

    /// Asks the machine to stop, without waiting for it.
    pub(crate) fn ask_to_stop(&self) {
        self.shared.stop();
    }

    /// Stops the machine and waits for its thread, unless that is the calling one. If the thread
    /// hangs, waits only until another has taken its place.
    pub fn stop(&self) {
        self.ask_to_stop();
        loop {
            // the lock is released because the thread may take it too
            let thread = { self.shared.thread.lock().take() };
            let Some(thread) = thread else { return };
            if thread.thread().id() == threads::current().id() || self.shared.is_halted() {
                return;
            }
            while !thread.is_finished() && self.shared.thread.lock().is_none() {
                threads::sleep(LOOKS_WHETHER_STOPPED);
            }
            if thread.is_finished() {
                thread.join().ok(); // a panic there has been reported by the panic hook
                let watch = { self.watch.lock().take() };
                watch.into_iter().for_each(|watch| drop(watch.join())); // ends with the machine
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
    fn around(name: String, machine: P, events: Arc<dyn Events>) -> Result<Self> {
        let sleep = Sleep::new().map_err(|error| {
            Error::os("cannot create an eventfd for a reactor: raise ulimit -n", error)
        })?;
        let driven = Driven {
            machine,
            taken: Vec::new(),
            left_something: true,
            detached: 0,
            thread: TurnThread::Own,
            warned: false,
            untold: Outbox::default(),
        };
        Ok(ReactorShared {
            name,
            machine: Mutex::new(Some(driven)),
            returned: Condvar::new(),
            sleep,
            thread: Mutex::new(None),
            own_thread: AtomicU64::new(0),
            hung_threads: AtomicUsize::new(0),
            watched: WatchedTurns::default(),
            stopping: AtomicBool::new(false),
            queue: Mutex::new(Some(Vec::new())),
            queued: Queued::default(),
            own_thread_only: AtomicBool::new(false),
            ends_unannounced: AtomicBool::new(false),
            halted: AtomicBool::new(false),
            events,
        })
    }

    /// Starts the reactor's own thread with this number.
    fn start_thread(self: &Arc<Self>, number: u64) -> Result<JoinHandle<()>> {
        let shared = Arc::clone(self);
        let thread = threads::Builder::new().name(self.name.clone());
        thread.spawn(move || shared.serve(number)).map_err(|error| {
            Error::os("cannot start a reactor thread: raise ulimit -u", error)
                .with_kind(ErrorKind::Exhausted)
        })
    }

    fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.sleep.wake();
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

    /// Drops a machine that panicked, on whichever thread. Its tickets are forgotten, which
    /// quarantines their memory, later commands go to [`Progress::late`], and the reactor's thread
    /// ends. Returns false for abandoned work, in which case the machine continues.
    #[cold]
    fn panicked(&self, turn: TurnGuard<'_, P>, out: Outbox) -> bool {
        let TurnGuard { machine, detached } = turn;
        let mut machine = machine.unwrap_or_else(|| self.machine.lock());
        if detached != 0 && machine.as_ref().is_none_or(|driven| driven.detached != detached) {
            tracing::error!("abandoned work panicked: report this as a bug");
            return false;
        }
        tracing::error!(
            "a transport panicked: its links have ended and its memory is quarantined; report this \
             as a bug"
        );
        let gone = machine.take();
        drop(machine);
        self.returned.notify_all();
        self.watched.stop_watching();
        catch_panic(|| drop((gone, out)));
        // Code that a command's end wakes may submit another one.
        let left = { self.queue.lock().take() };
        for command in left.unwrap_or_default() {
            catch_panic(|| P::late(command));
        }
        self.sleep.wake();
        true
    }

    /// Takes the submitted commands, and `last` if there is one, and does one turn. Returns `None`
    /// if the turn was abandoned.
    #[inline(always)]
    fn turn<'a>(
        &'a self,
        turn: &mut TurnGuard<'a, P>,
        last: Option<P::Command>,
        thread: TurnThread,
        out: &mut Outbox,
    ) -> Option<Turn> {
        #[cfg(feature = "panic-for-tests")]
        panics::take_turn();
        let Driven { machine, taken, untold, .. } = turn.driven()?;
        if !untold.is_empty() {
            out.append(untold); // results of a turn that hangs
        }
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
        while let Some(work) = turn.driven()?.machine.next_work(out) {
            if !self.run_detached(turn, work, thread, out) {
                return None;
            }
        }
        let driven = turn.driven()?;
        let mut had = driven.machine.progress(&self.queued, out);
        had.done += count;
        driven.left_something |= !had.left_nothing;
        keep(&self.own_thread_only, had.own_thread_only);
        keep(&self.ends_unannounced, had.ends_unannounced);
        Some(had)
    }
}

/// Stores a changed value only, because other threads read the same cache line.
fn keep(flag: &AtomicBool, now: bool) {
    if flag.load(Ordering::Relaxed) != now {
        flag.store(now, Ordering::Relaxed);
    }
}

#[cfg(all(test, kvx_loom))]
mod models;
#[cfg(test)]
mod tests;
