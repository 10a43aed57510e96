//! Models of the reactor's own loop and of the other threads' actions, in every order: `cargo xtask
//! loom`. Time stands still in them, so a thread that is not woken waits for ever, which fails the
//! model.

mod takeover;

use loom::sync::{Condvar, Mutex as Locked};
use loom::thread;

use super::tests::Nobody;
use super::*;

/// A counter of events.
#[derive(Default)]
struct Tally {
    count: Locked<usize>,
    changed: Condvar,
}

impl Tally {
    fn add(&self) {
        *self.count.lock().unwrap() += 1;
        self.changed.notify_all();
    }

    fn wait_for(&self, count: usize) {
        let mut now = self.count.lock().unwrap();
        while *now < count {
            now = self.changed.wait(now).unwrap();
        }
    }
}

/// A machine that does one part of its commands in each turn.
struct Works {
    left: usize,
    done: Arc<Tally>,
}

impl Progress for Works {
    /// The number of parts.
    type Command = usize;
    type Work = NoWork;
    fn command(&mut self, parts: usize, _: &mut Outbox) {
        self.left += parts;
    }
    fn progress(&mut self, _: &Queued, _: &mut Outbox) -> Turn {
        let does = self.left.min(1);
        self.left -= does;
        (0..does).for_each(|_| self.done.add());
        Turn { look_for: Duration::ZERO, ..Turn::did(does) }
    }
    fn arm(&mut self) -> Result<Armed> {
        Ok(if self.left == 0 { Armed::Sleep(None) } else { Armed::Again })
    }
    fn fds(&self) -> &[RawFd] {
        &[]
    }
    fn stop(&mut self, _: &mut Outbox) {}
}

/// Runs `act` concurrently with a reactor's loop, which must end afterwards. `preemptions` limits
/// the preemptions in one order, for models that have too many orders.
fn beside_a_reactor(
    preemptions: Option<usize>,
    act: impl Fn(&Arc<Reactor<Works>>, &Tally) + Send + Sync + 'static,
) {
    beside(preemptions, |done| Works { left: 0, done }, act);
}

fn beside<P: Progress>(
    preemptions: Option<usize>,
    machine: fn(Arc<Tally>) -> P,
    act: impl Fn(&Arc<Reactor<P>>, &Tally) + Send + Sync + 'static,
) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = preemptions;
    model.check(move || {
        let done = Arc::new(Tally::default());
        let machine = machine(Arc::clone(&done));
        let shared =
            Arc::new(ReactorShared::around(String::new(), machine, Arc::new(Nobody)).unwrap());
        let ours = Arc::clone(&shared);
        let runs = thread::spawn(move || {
            ours.run(0, &mut TurnGuard::of(None), &mut Outbox::default());
        });
        let reactor = Arc::new(Reactor { shared, watch: Mutex::new(None) });
        act(&reactor, &done);
        reactor.ask_to_stop();
        runs.join().unwrap();
    });
}

#[test]
fn the_reactor_does_not_sleep_on_a_command() {
    beside_a_reactor(None, |reactor, done| {
        reactor.submit(1);
        done.wait_for(1);
    });
}

#[test]
fn the_reactor_does_not_sleep_on_work_that_a_callers_turn_leaves() {
    beside_a_reactor(None, |reactor, done| {
        reactor.submit_and_turn(2);
        done.wait_for(2);
    });
}

#[test]
fn the_reactor_does_not_sleep_on_a_command_submitted_as_a_driver_leaves() {
    beside_a_reactor(Some(3), |reactor, done| {
        let drives = Arc::clone(reactor);
        let driver = thread::spawn(move || {
            drives.drive();
            drives.stop_driving();
        });
        reactor.submit(1);
        done.wait_for(1);
        driver.join().unwrap();
    });
}

#[test]
fn a_reactor_that_stays_away_stops() {
    beside_a_reactor(None, |reactor, _| {
        reactor.drive();
    });
}

/// Like [`Works`], but with detached work.
struct Detaches(Works);

struct OnePart(Arc<Tally>);

impl DetachedWork<Detaches> for OnePart {
    const MAY_HANG: bool = false;

    fn run(&mut self) {
        self.0.add();
    }
    fn rejoin(self, machine: &mut Detaches, _: &mut Outbox) {
        machine.0.left -= 1;
    }
    fn rejoin_late(&mut self, _: &mut Detaches) {}
    fn release(self) {}
}

impl Progress for Detaches {
    type Command = usize;
    type Work = OnePart;
    fn command(&mut self, parts: usize, out: &mut Outbox) {
        self.0.command(parts, out);
    }
    fn next_work(&mut self, _: &mut Outbox) -> Option<OnePart> {
        (self.0.left > 0).then(|| OnePart(Arc::clone(&self.0.done)))
    }
    fn progress(&mut self, _: &Queued, _: &mut Outbox) -> Turn {
        Turn { look_for: Duration::ZERO, ..Turn::did(0) }
    }
    fn arm(&mut self) -> Result<Armed> {
        self.0.arm()
    }
    fn fds(&self) -> &[RawFd] {
        &[]
    }
    fn stop(&mut self, _: &mut Outbox) {}
}

#[test]
fn a_callers_detached_turn_delays_no_command_and_no_stop() {
    beside(
        Some(3),
        |done| Detaches(Works { left: 0, done }),
        |reactor, done| {
            let posts = Arc::clone(reactor);
            let caller = thread::spawn(move || posts.submit_and_turn(1));
            reactor.submit(1);
            done.wait_for(2);
            caller.join().unwrap();
        },
    );
}
