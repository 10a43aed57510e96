//! Turns that hang, and work that panics.

use std::io::Read as _;
use std::os::unix::net::UnixStream;

use super::*;

/// A machine that settles its tickets; the work for one of them hangs.
struct Hangs {
    /// The socket on which that work hangs until the other end is closed.
    hangs: Option<UnixStream>,
    /// True once that work hangs.
    hung: Arc<AtomicBool>,
    echo: Echo,
    abandoned: Arc<AtomicUsize>,
}

struct HangingWork {
    ticket: Ticket,
    end: UnixStream,
    hung: Arc<AtomicBool>,
}

impl DetachedWork<Hangs> for HangingWork {
    fn run(&mut self) {
        self.hung.store(true, Ordering::SeqCst);
        // Like a page fault, this sleeps in the kernel, and not in `futex`.
        self.end.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        self.end.read_exact(&mut [0]).ok();
    }
    fn rejoin(self, machine: &mut Hangs, _: &mut Outbox) {
        machine.echo.0.push(self.ticket);
    }
    fn rejoin_late(&mut self, machine: &mut Hangs) {
        machine.abandoned.fetch_sub(1, Ordering::SeqCst);
    }
    fn release(self) {
        self.ticket.settle(Ok(()));
    }
}

impl Progress for Hangs {
    type Command = Ticket;
    type Work = HangingWork;
    fn command(&mut self, ticket: Ticket, out: &mut Outbox) {
        self.echo.command(ticket, out);
    }
    fn next_work(&mut self, _: &mut Outbox) -> Option<HangingWork> {
        self.hangs.as_ref()?;
        let ticket = self.echo.0.pop()?;
        Some(HangingWork { ticket, end: self.hangs.take()?, hung: Arc::clone(&self.hung) })
    }
    fn abandon(&mut self, _: &mut Outbox) {
        self.abandoned.fetch_add(1, Ordering::SeqCst);
    }
    fn progress(&mut self, queued: &Queued, out: &mut Outbox) -> Turn {
        self.echo.progress(queued, out)
    }
    fn arm(&mut self) -> Result<Armed> {
        self.echo.arm()
    }
    fn fds(&self) -> &[RawFd] {
        &[]
    }
    fn stop(&mut self, out: &mut Outbox) {
        self.echo.stop(out);
    }
}

/// A reactor with a turn that hangs, on its own thread or on another; the socket whose closing ends
/// the hang; and the completion of the turn's ticket.
struct HungReactor {
    reactor: Arc<Reactor<Hangs>>,
    abandoned: Arc<AtomicUsize>,
    end: UnixStream,
    first: Completion<()>,
}

impl HungReactor {
    fn new(submit: fn(&Reactor<Hangs>, Ticket)) -> Self {
        let (end, hangs) = UnixStream::pair().unwrap();
        let (hung, abandoned) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let machine = Hangs {
            hangs: Some(hangs),
            hung: Arc::clone(&hung),
            echo: Echo::default(),
            abandoned: Arc::clone(&abandoned),
        };
        let reactor = Arc::new(Reactor::start("hangs".into(), machine, Arc::new(Nobody)).unwrap());
        let (first, ticket) = Completion::with_ticket();
        let submits = Arc::clone(&reactor);
        std::thread::spawn(move || submit(&submits, ticket));
        until(|| hung.load(Ordering::SeqCst));
        HungReactor { reactor, abandoned, end, first }
    }
}

/// Submits the ticket and runs its turn on a thread that drives.
fn submit_and_drive(reactor: &Reactor<Hangs>, ticket: Ticket) {
    until(|| reactor.shared.sleep.is_asleep());
    reactor.shared.push(ticket);
    reactor.drive();
}

#[test]
fn a_machine_continues_without_a_turn_that_hangs() {
    for submit in [Reactor::<Hangs>::submit, Reactor::<Hangs>::submit_and_turn, submit_and_drive] {
        let HungReactor { reactor, abandoned, end, first } = HungReactor::new(submit);
        let (before, ticket) = Completion::with_ticket();
        reactor.submit(ticket);
        before.wait_blocking(Duration::from_secs(10)).unwrap();
        assert_eq!(abandoned.load(Ordering::SeqCst), 1);
        for submit in [Reactor::<Hangs>::submit, Reactor::<Hangs>::submit_and_turn] {
            until(|| reactor.shared.sleep.is_asleep());
            let (after, ticket) = Completion::with_ticket();
            submit(&reactor, ticket);
            after.wait_blocking(Duration::from_secs(10)).unwrap();
        }
        assert_eq!(reactor.shared.sleep.drivers.load(Ordering::SeqCst), 0);
        drop(end);
        first.wait_blocking(Duration::from_secs(10)).unwrap();
        assert_eq!(abandoned.load(Ordering::SeqCst), 0);
        until(|| Arc::strong_count(&reactor.shared) == 3); // its thread and the watch
        assert_eq!(reactor.shared.sleep.drivers.load(Ordering::SeqCst), 0);
        assert_eq!(reactor.shared.hung_threads.load(Ordering::SeqCst), 0);
        reactor.stop();
        assert!(reactor.shared.machine.lock().is_none());
    }
}

#[test]
fn a_turn_that_is_merely_slow_continues() {
    let HungReactor { reactor, abandoned, end, first } = HungReactor::new(Reactor::submit_and_turn);
    drop(end);
    first.wait_blocking(Duration::from_secs(10)).unwrap();
    assert_eq!(abandoned.load(Ordering::SeqCst), 0);
    reactor.stop();
}

#[test]
fn a_machine_that_hangs_at_its_stop_is_stopped_by_the_replacement_thread() {
    for submit in [Reactor::<Hangs>::submit, Reactor::<Hangs>::submit_and_turn] {
        let HungReactor { reactor, end, .. } = HungReactor::new(submit);
        reactor.ask_to_stop();
        let (left, ticket) = Completion::with_ticket();
        reactor.submit(ticket);
        // The replacement thread may still have a turn before it stops the machine.
        if let Err(error) = left.wait_blocking(Duration::from_secs(10)) {
            assert_eq!(error.kind(), ErrorKind::Closed);
        }
        reactor.stop(); // does not wait for the hung thread
        until(|| reactor.shared.machine.lock().is_none());
        drop(end);
    }
}

#[test]
fn stopping_a_machine_that_hangs_waits_only_for_the_replacement_thread() {
    let HungReactor { reactor, end, .. } = HungReactor::new(Reactor::submit);
    let stops = Arc::clone(&reactor);
    let stopped = std::thread::spawn(move || stops.stop());
    until(|| stopped.is_finished());
    drop(end);
}

#[test]
fn work_that_panics_ends_its_machine() {
    /// A machine whose work panics.
    struct Breaks(Option<Ticket>);
    struct BreakingWork(Option<Ticket>);

    impl DetachedWork<Breaks> for BreakingWork {
        fn run(&mut self) {
            let _ticket = self.0.take();
            panic!("on purpose");
        }
        fn rejoin(self, _: &mut Breaks, _: &mut Outbox) {}
        fn rejoin_late(&mut self, _: &mut Breaks) {}
        fn release(self) {}
    }

    impl Progress for Breaks {
        type Command = Ticket;
        type Work = BreakingWork;
        fn command(&mut self, ticket: Ticket, _: &mut Outbox) {
            self.0 = Some(ticket);
        }
        fn next_work(&mut self, _: &mut Outbox) -> Option<BreakingWork> {
            self.0.take().map(|ticket| BreakingWork(Some(ticket)))
        }
        fn progress(&mut self, _: &Queued, _: &mut Outbox) -> Turn {
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

    for submit in [Reactor::<Breaks>::submit, Reactor::<Breaks>::submit_and_turn] {
        let reactor = Reactor::start("breaks".into(), Breaks(None), Arc::new(Nobody)).unwrap();
        for _ in 0..2 {
            let (done, ticket) = Completion::with_ticket();
            submit(&reactor, ticket);
            assert_eq!(
                done.wait_blocking(Duration::from_secs(10)).unwrap_err().kind(),
                ErrorKind::Forgotten
            );
        }
        reactor.stop();
    }
}
