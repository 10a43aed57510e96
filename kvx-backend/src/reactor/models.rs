//! Models of the reactor's own loop and of what other threads do to it, in every order: `cargo xtask loom`. No time
//! passes in them, so whoever is not woken waits for ever, which fails them.

use loom::sync::{Condvar, Mutex as Locked};
use loom::thread;

use super::tests::Nobody;
use super::*;

/// How often something has happened.
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

/// Does one part of its commands a turn.
struct Works {
    left: usize,
    done: Arc<Tally>,
}

impl Progress for Works {
    /// Has so many parts.
    type Command = usize;
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

/// Has `act` done beside a reactor's loop, which then has to end. `preemptions` is the most in one order, where all
/// orders are too many.
fn beside_a_reactor(
    preemptions: Option<usize>,
    act: impl Fn(&Arc<Reactor<Works>>, &Tally) + Send + Sync + 'static,
) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = preemptions;
    model.check(move || {
        let done = Arc::new(Tally::default());
        let machine = Works { left: 0, done: Arc::clone(&done) };
        let shared = Arc::new(ReactorShared::around(machine, Arc::new(Nobody)).unwrap());
        let ours = Arc::clone(&shared);
        let runs = thread::spawn(move || ours.run(ours.room(), &mut Outbox::default()));
        let reactor = Arc::new(Reactor { name: String::new(), shared, thread: Mutex::new(None) });
        act(&reactor, &done);
        reactor.ask_to_stop();
        runs.join().unwrap();
    });
}

#[test]
fn no_command_is_slept_on() {
    beside_a_reactor(None, |reactor, done| {
        reactor.submit(1);
        done.wait_for(1);
    });
}

#[test]
fn what_a_callers_turn_leaves_is_not_slept_on() {
    beside_a_reactor(None, |reactor, done| {
        reactor.submit_and_turn(2);
        done.wait_for(2);
    });
}

#[test]
fn a_command_that_comes_as_a_driver_goes_is_not_slept_on() {
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
