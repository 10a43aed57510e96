//! Models of turns that hang or seem to: the watch abandons them, another thread continues with the
//! machine, and the turn ends at any moment. Every command must end exactly once, no thread may
//! wait for ever, and the machine has one turn at a time.

use std::collections::VecDeque;

use kvx_core::backend::Settle;

use super::*;

/// The commands that have ended, and everything that went wrong. A panic instead would be caught by
/// the reactor.
#[derive(Default)]
struct Observed {
    ended: Tally,
    /// True once work has panicked, which ends the machine unless the work was abandoned.
    panics: std::sync::atomic::AtomicBool,
    abandons: std::sync::atomic::AtomicBool,
    violations: std::sync::Mutex<Vec<&'static str>>,
}

impl Observed {
    fn check(&self, holds: bool, otherwise: &'static str) {
        if !holds {
            self.violations.lock().unwrap().push(otherwise);
        }
    }

    fn ticket(self: &Arc<Self>) -> Ticket {
        Ticket::of(Arc::clone(self) as Arc<dyn Settle>)
    }
}

impl Settle for Observed {
    fn settled(self: Arc<Self>, result: Result<()>) {
        self.check(result.is_ok(), "a command failed");
        self.ended.add();
    }
    fn forgotten(self: Arc<Self>) {
        let ends = self.panics.load(Ordering::Relaxed) && !self.abandons.load(Ordering::Relaxed);
        self.check(ends, "a command was forgotten");
        self.ended.add();
    }
}

enum Command {
    /// Ends at once.
    Quick(Ticket),
    /// Ends after a piece of detached work.
    Detached(Ticket, Run),
}

/// The action of a piece of detached work.
enum Run {
    Ends,
    Hangs(Arc<Hang>),
    /// Settles its ticket and panics. It drops nothing that the model knows while it unwinds.
    Panics(Arc<Observed>),
}

/// Work that hangs tells when it has begun, and waits for its end.
#[derive(Default)]
struct Hang {
    begun: Tally,
    end: Tally,
}

/// A machine with detached work, over which a watch watches if `WATCHED`.
struct Machine<const WATCHED: bool> {
    commands: VecDeque<Work>,
    is_detached: bool,
    /// The pieces of abandoned work that have not ended.
    abandoned: usize,
    observed: Arc<Observed>,
}

impl<const WATCHED: bool> Machine<WATCHED> {
    fn check_attached(&self) {
        self.observed.check(!self.is_detached, "the machine has two turns");
    }
}

struct Work(Option<Ticket>, Run);

impl<const WATCHED: bool> DetachedWork<Machine<WATCHED>> for Work {
    const MAY_HANG: bool = WATCHED;

    fn run(&mut self) {
        match &self.1 {
            Run::Ends => {}
            Run::Hangs(hang) => {
                hang.begun.add();
                hang.end.wait_for(1);
            }
            Run::Panics(observed) => {
                observed.panics.store(true, Ordering::Relaxed);
                self.0.take().into_iter().for_each(|ticket| ticket.settle(Ok(())));
                std::panic::resume_unwind(Box::new("on purpose"));
            }
        }
    }
    fn rejoin(self, machine: &mut Machine<WATCHED>, out: &mut Outbox) {
        machine.observed.check(machine.is_detached, "abandoned work rejoins");
        machine.is_detached = false;
        self.0.into_iter().for_each(|ticket| out.settle(ticket, Ok(())));
    }
    fn rejoin_late(&mut self, machine: &mut Machine<WATCHED>) {
        machine.observed.check(machine.abandoned > 0, "work is late that nobody abandoned");
        machine.abandoned = machine.abandoned.saturating_sub(1);
    }
    fn release(self) {
        self.0.into_iter().for_each(|ticket| ticket.settle(Ok(())));
    }
}

impl<const WATCHED: bool> Progress for Machine<WATCHED> {
    type Command = Command;
    type Work = Work;
    fn command(&mut self, command: Command, out: &mut Outbox) {
        self.check_attached();
        match command {
            Command::Quick(ticket) => out.settle(ticket, Ok(())),
            Command::Detached(ticket, run) => self.commands.push_back(Work(Some(ticket), run)),
        }
    }
    fn next_work(&mut self, _: &mut Outbox) -> Option<Work> {
        self.check_attached();
        let work = self.commands.pop_front()?;
        self.is_detached = true;
        Some(work)
    }
    fn abandon(&mut self, _: &mut Outbox) {
        self.observed.check(self.is_detached, "a turn without detached work is abandoned");
        self.is_detached = false;
        self.abandoned += 1;
        self.observed.abandons.store(true, Ordering::Relaxed);
    }
    fn progress(&mut self, _: &Queued, _: &mut Outbox) -> Turn {
        self.check_attached();
        Turn { look_for: Duration::ZERO, ..Turn::did(0) }
    }
    fn arm(&mut self) -> Result<Armed> {
        self.check_attached();
        Ok(if self.commands.is_empty() { Armed::Sleep(None) } else { Armed::Again })
    }
    fn fds(&self) -> &[RawFd] {
        &[]
    }
    fn stop(&mut self, out: &mut Outbox) {
        self.check_attached();
        let tickets = self.commands.drain(..).filter_map(|work| work.0);
        tickets.for_each(|ticket| out.settle(ticket, Ok(())));
    }
}

/// Runs `act` with a reactor that is stopped afterwards. All `commands` must have ended by then.
fn with_reactor<const WATCHED: bool>(
    preemptions: Option<usize>,
    commands: usize,
    act: impl Fn(&Arc<Reactor<Machine<WATCHED>>>, &Arc<Observed>) + Send + Sync + 'static,
) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = preemptions;
    model.check(move || {
        let observed = Arc::new(Observed::default());
        let machine = Machine::<WATCHED> {
            commands: VecDeque::new(),
            is_detached: false,
            abandoned: 0,
            observed: Arc::clone(&observed),
        };
        let reactor = Arc::new(Reactor::start("model".into(), machine, Arc::new(Nobody)).unwrap());
        act(&reactor, &observed);
        reactor.stop();
        assert!(reactor.shared.machine.lock().is_none(), "the machine has ended");
        observed.ended.wait_for(commands);
        assert_eq!(*observed.violations.lock().unwrap(), [""; 0]);
        assert_eq!(*observed.ended.count.lock().unwrap(), commands);
    });
}

/// A thread that has a turn besides the reactor's own.
fn caller<const WATCHED: bool>(
    reactor: &Arc<Reactor<Machine<WATCHED>>>,
    act: impl FnOnce(&Reactor<Machine<WATCHED>>) + Send + 'static,
) -> thread::JoinHandle<()> {
    let reactor = Arc::clone(reactor);
    thread::spawn(move || act(&reactor))
}

#[test]
fn a_machine_continues_while_its_own_turn_hangs() {
    with_reactor::<true>(Some(2), 2, |reactor, observed| {
        let hang = Arc::<Hang>::default();
        reactor.submit(Command::Detached(observed.ticket(), Run::Hangs(Arc::clone(&hang))));
        reactor.submit(Command::Quick(observed.ticket()));
        observed.ended.wait_for(1);
        hang.end.add();
        observed.ended.wait_for(2);
    });
}

#[test]
fn a_machine_continues_while_a_callers_turn_hangs() {
    with_reactor::<true>(Some(1), 2, |reactor, observed| {
        let hang = Arc::<Hang>::default();
        let command = Command::Detached(observed.ticket(), Run::Hangs(Arc::clone(&hang)));
        let caller = caller(reactor, move |reactor| reactor.submit_and_turn(command));
        hang.begun.wait_for(1);
        reactor.submit(Command::Quick(observed.ticket()));
        observed.ended.wait_for(1);
        hang.end.add();
        observed.ended.wait_for(2);
        caller.join().unwrap();
    });
}

#[test]
fn a_machine_continues_while_a_drivers_turn_hangs() {
    with_reactor::<true>(Some(1), 3, |reactor, observed| {
        let hang = Arc::<Hang>::default();
        reactor.submit(Command::Detached(observed.ticket(), Run::Hangs(Arc::clone(&hang))));
        let driver = caller(reactor, |reactor| {
            reactor.drive();
            reactor.stop_driving();
        });
        hang.begun.wait_for(1);
        reactor.submit(Command::Quick(observed.ticket()));
        observed.ended.wait_for(1);
        hang.end.add();
        observed.ended.wait_for(2);
        driver.join().unwrap();
        // The driver no longer keeps the reactor's own thread away.
        reactor.submit(Command::Quick(observed.ticket()));
        observed.ended.wait_for(3);
    });
}

#[test]
fn a_turn_that_hangs_delays_no_stop() {
    with_reactor::<true>(Some(3), 1, |reactor, observed| {
        let hang = Arc::<Hang>::default();
        reactor.submit(Command::Detached(observed.ticket(), Run::Hangs(Arc::clone(&hang))));
        reactor.stop();
        hang.end.add();
    });
}

#[test]
fn an_own_turn_abandoned_at_any_moment_ends_once() {
    with_reactor::<false>(Some(3), 3, |reactor, observed| {
        reactor.submit(Command::Detached(observed.ticket(), Run::Ends));
        reactor.submit(Command::Detached(observed.ticket(), Run::Ends));
        reactor.submit(Command::Quick(observed.ticket()));
        reactor.shared.abandon_turn(1);
        observed.ended.wait_for(3);
    });
}

#[test]
fn the_end_of_an_abandoned_turn_does_not_hide_that_the_next_one_hangs() {
    with_reactor::<false>(Some(3), 3, |reactor, observed| {
        let hang = Arc::<Hang>::default();
        reactor.submit(Command::Detached(observed.ticket(), Run::Ends));
        reactor.submit(Command::Detached(observed.ticket(), Run::Hangs(Arc::clone(&hang))));
        reactor.submit(Command::Quick(observed.ticket()));
        reactor.shared.abandon_turn(1);
        hang.begun.wait_for(1);
        reactor.shared.abandon_turn(2);
        observed.ended.wait_for(2);
        hang.end.add();
    });
}

#[test]
fn work_that_panics_after_it_was_abandoned_at_any_moment_loses_no_command() {
    with_reactor::<false>(Some(3), 2, |reactor, observed| {
        let run = Run::Panics(Arc::clone(observed));
        reactor.submit(Command::Detached(observed.ticket(), run));
        reactor.submit(Command::Quick(observed.ticket()));
        reactor.shared.abandon_turn(1);
        observed.ended.wait_for(2);
    });
}

#[test]
fn a_callers_turn_abandoned_at_any_moment_ends_once() {
    with_reactor::<false>(Some(3), 2, |reactor, observed| {
        let command = Command::Detached(observed.ticket(), Run::Ends);
        let caller = caller(reactor, move |reactor| reactor.submit_and_turn(command));
        reactor.submit(Command::Quick(observed.ticket()));
        reactor.shared.abandon_turn(1);
        observed.ended.wait_for(2);
        caller.join().unwrap();
    });
}

#[test]
fn a_drivers_turn_abandoned_at_any_moment_ends_once() {
    with_reactor::<false>(Some(3), 2, |reactor, observed| {
        let driver = caller(reactor, |reactor| {
            reactor.drive();
            reactor.stop_driving();
        });
        reactor.submit(Command::Detached(observed.ticket(), Run::Ends));
        reactor.submit(Command::Quick(observed.ticket()));
        reactor.shared.abandon_turn(1);
        observed.ended.wait_for(2);
        driver.join().unwrap();
    });
}

#[test]
fn the_watch_does_not_sleep_on_a_piece_of_work() {
    loom::model(|| {
        let turns = Arc::new(WatchedTurns::default());
        let (watches, hung) = (Arc::clone(&turns), Arc::new(Tally::default()));
        let hangs = Arc::clone(&hung);
        let watch = thread::spawn(move || {
            watches.watch(|number| {
                watches.end(number);
                hangs.add();
                true
            });
        });
        turns.begin();
        hung.wait_for(1);
        turns.stop_watching();
        watch.join().unwrap();
    });
}
