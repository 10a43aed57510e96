//! The clients of a listener, which work while it is attacked.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::check::{Check, Failure, ensure};
use crate::stopwatch::Stopwatch;

/// The pause between two rounds, so that the clients do not take a processor.
const PAUSE: Duration = Duration::from_millis(5);

/// An authenticated client. Its work shows that it is served: over a connection that it keeps, or
/// over a new one.
pub struct Client<'a> {
    name: &'static str,
    work: Box<dyn FnMut() -> Check + Send + 'a>,
}

impl<'a> Client<'a> {
    /// Creates a client from its name and its work, which fails if it is not served.
    pub fn new(name: &'static str, work: impl FnMut() -> Check + Send + 'a) -> Self {
        Client { name, work: Box::new(work) }
    }

    /// Works once. Returns the time that it took.
    pub(super) fn work(&mut self, deadline: Duration) -> Result<Duration, Failure> {
        let (began, watch) = (Instant::now(), Stopwatch::start()?);
        (self.work)().map_err(|why| Failure::new(format!("{} is not served: {why}", self.name)))?;
        let took = watch.read();
        ensure!(took.within(deadline), "{} took {took} instead of {deadline:?}", self.name);
        Ok(began.elapsed())
    }
}

/// The rounds in which each client works once.
#[derive(Default)]
pub(super) struct Rounds {
    state: Mutex<RoundState>,
    changed: Condvar,
}

#[derive(Default)]
struct RoundState {
    begun: u64,
    ended: u64,
    slowest: Duration,
    failure: Option<Failure>,
    /// True if there are no more rounds.
    over: bool,
}

impl Rounds {
    fn state(&self) -> MutexGuard<'_, RoundState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut RoundState)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    /// Waits until a round that has not begun yet has ended.
    ///
    /// Errors: a client was not served.
    pub(super) fn next(&self, limit: Duration) -> Check {
        let state = self.state();
        let next = state.begun + 1;
        let waits = |state: &mut RoundState| state.ended < next && !state.over;
        let waited = self.changed.wait_timeout_while(state, limit, waits);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match &state.failure {
            Some(failure) => Err(failure.clone()),
            None if state.ended < next => {
                Err(Failure::new(format!("the clients have not worked within {limit:?}")))
            }
            None => Ok(()),
        }
    }

    /// Returns the longest time that a client has worked.
    pub(super) fn slowest(&self) -> Duration {
        self.state().slowest
    }
}

/// Ends the rounds when it is dropped, also by a panic of a client.
struct Over<'a>(&'a Rounds);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.change(|state| state.over = true);
    }
}

/// Lets the clients work one after the other until `end`, or until one of them is not served.
pub(super) fn work_until(
    clients: &mut [Client<'_>],
    deadline: Duration,
    rounds: &Rounds,
    end: &AtomicBool,
) {
    let _over = Over(rounds);
    while !end.load(Ordering::Relaxed) {
        rounds.change(|state| state.begun += 1);
        for client in &mut *clients {
            match client.work(deadline) {
                Ok(took) => rounds.change(|state| state.slowest = state.slowest.max(took)),
                Err(why) => return rounds.change(|state| state.failure = Some(why)),
            }
        }
        rounds.change(|state| state.ended += 1);
        std::thread::sleep(PAUSE);
    }
}
