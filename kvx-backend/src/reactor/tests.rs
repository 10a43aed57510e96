//! Tests of the reactor with machines made for them.

mod detached;

use std::os::fd::AsRawFd as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::Instant;

use super::*;
use kvx_core::Completion;
use kvx_core::Sender;
use kvx_core::backend::QueueFull;

pub(super) struct Nobody;

impl Events for Nobody {
    fn notification(&self, _: Sender<'_>, _: &[u8]) -> Result<(), QueueFull> {
        Ok(())
    }
    fn link(&self, _: LinkId, _: LinkState) {}
}

/// A machine that settles one of its tickets in each turn.
#[derive(Default)]
struct Echo(Vec<Ticket>);

impl Progress for Echo {
    type Command = Ticket;
    type Work = NoWork;
    fn command(&mut self, ticket: Ticket, _: &mut Outbox) {
        self.0.push(ticket);
    }
    fn progress(&mut self, _: &Queued, out: &mut Outbox) -> Turn {
        Turn::did(self.0.pop().map(|ticket| out.settle(ticket, Ok(()))).map_or(0, |()| 1))
    }
    fn arm(&mut self) -> Result<Armed> {
        Ok(if self.0.is_empty() { Armed::Sleep(None) } else { Armed::Again })
    }
    fn fds(&self) -> &[RawFd] {
        &[]
    }
    fn stop(&mut self, out: &mut Outbox) {
        for ticket in self.0.drain(..) {
            out.settle(ticket, Err(ErrorKind::Closed.because("stopped")));
        }
    }
}

/// Polls until the condition is true, for conditions that no lock or ticket signals.
fn until(so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !so() {
        assert!(Instant::now() < end, "it is not so");
        std::thread::yield_now();
    }
}

fn echo() -> Reactor<Echo> {
    Reactor::start("echo".into(), Echo::default(), Arc::new(Nobody)).unwrap()
}

#[test]
fn commands_from_many_threads_are_all_done() {
    let reactor = echo();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let reactor = &reactor;
            scope.spawn(move || {
                for _ in 0..500 {
                    let (done, ticket) = Completion::with_ticket();
                    if thread % 2 == 0 {
                        reactor.submit(ticket)
                    } else {
                        reactor.submit_and_turn(ticket)
                    }
                    done.wait_blocking(Duration::from_secs(10)).unwrap();
                }
            });
        }
    });
    reactor.stop();
}

#[test]
fn a_sleeping_reactor_wakes_for_a_command() {
    let reactor = echo();
    until(|| reactor.shared.sleep.is_asleep());
    let (done, ticket) = Completion::with_ticket();
    reactor.submit(ticket);
    done.wait_blocking(Duration::from_secs(10)).unwrap();
}

/// A machine that permits no sleep and does nothing until it is free. Counts how often it is
/// polled.
struct Stuck {
    echo: Echo,
    free: Arc<AtomicBool>,
    looks: Arc<AtomicUsize>,
    /// A descriptor that is always readable, as a library's may be.
    ready: [RawFd; 1],
}

impl Progress for Stuck {
    type Command = Ticket;
    type Work = NoWork;
    fn command(&mut self, ticket: Ticket, out: &mut Outbox) {
        self.echo.command(ticket, out);
    }
    fn progress(&mut self, queued: &Queued, out: &mut Outbox) -> Turn {
        self.looks.fetch_add(1, Ordering::SeqCst);
        if self.free.load(Ordering::SeqCst) {
            self.echo.progress(queued, out)
        } else {
            Turn::did(0)
        }
    }
    fn arm(&mut self) -> Result<Armed> {
        if self.free.load(Ordering::SeqCst) { self.echo.arm() } else { Ok(Armed::Busy) }
    }
    fn fds(&self) -> &[RawFd] {
        &self.ready
    }
    fn stop(&mut self, out: &mut Outbox) {
        self.echo.stop(out);
    }
}

#[test]
fn a_busy_machine_without_progress_leaves_the_core_to_others() {
    let (free, looks) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let ready = rustix::event::eventfd(1, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let machine = Stuck {
        echo: Echo::default(),
        free: Arc::clone(&free),
        looks: Arc::clone(&looks),
        ready: [ready.as_raw_fd()],
    };
    let reactor = Reactor::start("stuck".into(), machine, Arc::new(Nobody)).unwrap();
    let looks_within = |time| {
        let before = looks.load(Ordering::SeqCst);
        std::thread::sleep(time);
        looks.load(Ordering::SeqCst) - before
    };
    looks_within(Duration::from_millis(100)); // the pauses are long by now
    let seen = looks_within(Duration::from_millis(200));
    assert!(seen < 100, "it was polled {seen} times within 200 ms");
    // The event is still noticed, and the reactor sleeps again.
    let (done, ticket) = Completion::with_ticket();
    reactor.submit(ticket);
    free.store(true, Ordering::SeqCst);
    done.wait_blocking(Duration::from_secs(10)).unwrap();
    until(|| reactor.shared.sleep.wakes_at.load(Ordering::SeqCst) == u64::MAX);
    reactor.stop();
}

#[test]
fn a_command_submitted_after_a_thread_drove_is_done() {
    let reactor = echo();
    for _ in 0..200 {
        for _ in 0..100 {
            reactor.drive();
        }
        let (done, ticket) = Completion::with_ticket();
        reactor.submit(ticket);
        done.wait_blocking(Duration::from_secs(10)).unwrap();
    }
    reactor.stop();
}

/// A machine that settles its tickets and counts the turns of foreign threads. From its first
/// ticket on it permits none.
struct Alone {
    echo: Echo,
    others: Arc<AtomicU64>,
    met: bool,
}

impl Progress for Alone {
    type Command = Ticket;
    type Work = NoWork;
    fn command(&mut self, ticket: Ticket, out: &mut Outbox) {
        self.met = true;
        self.echo.command(ticket, out);
    }
    fn progress(&mut self, queued: &Queued, out: &mut Outbox) -> Turn {
        let own = std::thread::current().name() == Some("alone");
        self.others.fetch_add(u64::from(!own), Ordering::Relaxed);
        Turn { own_thread_only: self.met, ..self.echo.progress(queued, out) }
    }
    fn arm(&mut self) -> Result<Armed> {
        self.echo.arm()
    }
    fn fds(&self) -> &[RawFd] {
        &[]
    }
    fn stop(&mut self, _: &mut Outbox) {}
}

#[test]
fn a_machine_that_requires_its_own_thread_runs_on_no_other() {
    let others = Arc::new(AtomicU64::new(0));
    let machine = Alone { echo: Echo::default(), others: Arc::clone(&others), met: false };
    let reactor = Reactor::start("alone".into(), machine, Arc::new(Nobody)).unwrap();
    let ask = |submit: fn(&Reactor<Alone>, Ticket)| {
        let (done, ticket) = Completion::with_ticket();
        submit(&reactor, ticket);
        done
    };
    reactor.drive();
    ask(Reactor::submit).wait_blocking(Duration::from_secs(10)).unwrap();
    drop(reactor.shared.machine.lock()); // waits for the end of its turn
    let seen =
        || (others.load(Ordering::Relaxed), reactor.shared.sleep.driven_at.load(Ordering::Relaxed));
    let before = seen();
    for _ in 0..50 {
        let done = ask(Reactor::submit_and_turn);
        assert_eq!(reactor.drive().done, 0);
        done.wait_blocking(Duration::from_secs(10)).unwrap();
    }
    assert_eq!(seen(), before, "no foreign thread had a turn, and the reactor does not stay away");
    reactor.stop();
}

/// Like [`Echo`], but its turns end when a command waits.
#[derive(Default)]
struct Attentive(Echo);

impl Progress for Attentive {
    type Command = Ticket;
    type Work = NoWork;
    fn command(&mut self, ticket: Ticket, out: &mut Outbox) {
        self.0.command(ticket, out);
    }
    fn progress(&mut self, queued: &Queued, out: &mut Outbox) -> Turn {
        let until = Instant::now() + Duration::from_secs(9);
        while !self.0.0.is_empty() && !queued.any() {
            assert!(Instant::now() < until, "the turn does not learn that a command waits");
            std::thread::yield_now();
        }
        self.0.progress(queued, out)
    }
    fn arm(&mut self) -> Result<Armed> {
        self.0.arm()
    }
    fn fds(&self) -> &[RawFd] {
        &[]
    }
    fn stop(&mut self, out: &mut Outbox) {
        self.0.stop(out);
    }
}

#[test]
fn a_turn_sees_that_a_command_waits() {
    let reactor =
        Reactor::start("attentive".into(), Attentive::default(), Arc::new(Nobody)).unwrap();
    let (first, ticket) = Completion::with_ticket();
    reactor.submit(ticket);
    until(|| !reactor.shared.queued.any());
    let (_second, ticket) = Completion::with_ticket();
    reactor.submit(ticket);
    first.wait_blocking(Duration::from_secs(10)).unwrap();
    reactor.ask_to_stop();
    let (_last, ticket) = Completion::with_ticket();
    reactor.submit(ticket);
    reactor.stop();
}

#[test]
fn a_thread_that_lost_its_core_in_a_drive_delays_no_command() {
    let reactor = echo();
    reactor.shared.sleep.drivers.fetch_add(1, Ordering::Relaxed); // and never ends its drive
    let (done, ticket) = Completion::with_ticket();
    reactor.submit(ticket);
    done.wait_blocking(Duration::from_secs(10)).unwrap();
    reactor.stop();
}

/// A machine with the given actions for commands and turns, which sleeps until the next command.
struct Does {
    command: Box<dyn FnMut(Ticket) + Send>,
    turn: Box<dyn FnMut() + Send>,
}

impl Progress for Does {
    type Command = Ticket;
    type Work = NoWork;
    fn command(&mut self, ticket: Ticket, _: &mut Outbox) {
        (self.command)(ticket);
    }
    fn progress(&mut self, _: &Queued, _: &mut Outbox) -> Turn {
        (self.turn)();
        Turn::did(0)
    }
    fn arm(&mut self) -> Result<Armed> {
        Ok(Armed::Sleep(None))
    }
    fn fds(&self) -> &[RawFd] {
        &[]
    }
    fn stop(&mut self, _: &mut Outbox) {}
}

#[test]
fn the_tickets_of_a_machine_that_panics_are_forgotten() {
    let mut held = Vec::new();
    let command = Box::new(move |ticket| {
        held.push(ticket);
        panic!("on purpose");
    });
    let machine = Does { command, turn: Box::new(|| ()) };
    let reactor = Reactor::start("fragile".into(), machine, Arc::new(Nobody)).unwrap();
    for _ in 0..2 {
        let (done, ticket) = Completion::with_ticket();
        reactor.submit(ticket);
        assert_eq!(
            done.wait_blocking(Duration::from_secs(10)).unwrap_err().kind(),
            ErrorKind::Forgotten
        );
    }
    reactor.stop();
}

#[test]
fn a_command_submitted_by_the_end_of_a_lost_command_is_forgotten_too() {
    /// Submits a command when it is dropped, as code that waits for a ticket may do when the ticket
    /// is forgotten.
    struct Submits(Arc<OnceLock<Reactor<Does>>>, Option<Ticket>);

    impl Drop for Submits {
        fn drop(&mut self) {
            self.0.get().unwrap().submit(self.1.take().unwrap());
        }
    }

    let (done, ticket) = Completion::with_ticket();
    let (place, mut left) = (Arc::new(OnceLock::<Reactor<Does>>::new()), Some(ticket));
    // A further command arrives in the turn in which the machine panics.
    let given = Arc::clone(&place);
    let command = Box::new(move |_| {
        let last = Submits(Arc::clone(&given), left.take());
        given.get().unwrap().submit(Ticket::new(move |_| drop(last)));
        panic!("on purpose");
    });
    let machine = Does { command, turn: Box::new(|| ()) };
    let reactor = Reactor::start("refilled".into(), machine, Arc::new(Nobody)).unwrap();
    let reactor = place.get_or_init(|| reactor);
    reactor.submit(Ticket::new(drop));
    assert_eq!(
        done.wait_blocking(Duration::from_secs(10)).unwrap_err().kind(),
        ErrorKind::Forgotten
    );
    reactor.stop();
}

#[test]
fn a_machine_that_panics_in_a_callers_turn_forgets_its_tickets_and_stays_out_of_use() {
    /// Panics in the first turn after its first command, on a foreign thread.
    fn treacherous() -> Does {
        let held = Arc::new(kvx_core::backend::sync::Mutex::new(Vec::new()));
        let holds = Arc::clone(&held);
        let turn = move || {
            let own = std::thread::current().name() == Some("treacherous");
            assert!(own || holds.lock().is_empty(), "on purpose");
        };
        Does { command: Box::new(move |ticket| held.lock().push(ticket)), turn: Box::new(turn) }
    }

    for by_drive in [false, true] {
        let reactor =
            Reactor::start("treacherous".into(), treacherous(), Arc::new(Nobody)).unwrap();
        until(|| reactor.shared.sleep.is_asleep());
        let (done, ticket) = Completion::with_ticket();
        if by_drive {
            reactor.submit(ticket);
            until(|| reactor.shared.sleep.is_asleep());
            let until = Instant::now() + Duration::from_secs(10);
            while reactor.shared.machine.lock().is_some() {
                assert!(Instant::now() < until, "the machine does not panic");
                reactor.drive();
            }
        } else {
            until(|| reactor.shared.machine.try_lock().is_some());
            reactor.submit_and_turn(ticket);
        }
        assert_eq!(
            done.wait_blocking(Duration::from_secs(10)).unwrap_err().kind(),
            ErrorKind::Forgotten
        );
        assert_eq!(reactor.shared.sleep.drivers.load(Ordering::SeqCst), 0);
        // The reactor's thread has ended and does not wake again and again.
        until(|| reactor.shared.thread.lock().as_ref().is_some_and(JoinHandle::is_finished));
        let (done, ticket) = Completion::with_ticket();
        reactor.submit_and_turn(ticket);
        assert_eq!(
            done.wait_blocking(Duration::from_secs(10)).unwrap_err().kind(),
            ErrorKind::Forgotten
        );
        reactor.stop();
    }
}

#[test]
fn the_ticket_of_a_command_after_the_stop_is_forgotten() {
    let reactor = echo();
    reactor.stop();
    let (done, ticket) = Completion::with_ticket();
    reactor.submit(ticket);
    drop(reactor);
    assert_eq!(
        done.wait_blocking(Duration::from_secs(10)).unwrap_err().kind(),
        ErrorKind::Forgotten
    );
}
