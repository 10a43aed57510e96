//! One caller of NIXL at a time, and none on the reactor that waits.

use std::ops::{Deref, DerefMut};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use kvx_backend::reactor::Mailbox;
use kvx_core::Result;

use crate::ffi::Agent;

/// The agent behind a lock of kvx's own. NIXL's locks are held for a third of a second while a peer's address is loaded;
/// the reactor asks here first, does something else meanwhile, and is called back when it may pass.
pub(crate) struct Turnstile {
    agent: Mutex<Option<Agent>>,
    /// Threads that wait: the reactor, which comes often and briefly, lets them pass.
    waiting: AtomicUsize,
    /// Rings when another thread has let go: it may have read what would have woken the reactor.
    bell: Mailbox<()>,
    /// Whether requests are in progress: then it cannot be destroyed.
    in_progress: AtomicBool,
}

/// The agent; `None` once it is gone.
pub(crate) type Passed<'a> = MutexGuard<'a, Option<Agent>>;

/// The agent, for a thread that may wait for it.
pub(crate) struct Waited<'a> {
    turnstile: &'a Turnstile,
    /// There until it is dropped.
    passed: Option<Passed<'a>>,
}

impl Deref for Waited<'_> {
    type Target = Option<Agent>;

    fn deref(&self) -> &Option<Agent> {
        self.passed.as_deref().expect("it is not dropped")
    }
}

impl DerefMut for Waited<'_> {
    fn deref_mut(&mut self) -> &mut Option<Agent> {
        self.passed.as_deref_mut().expect("it is not dropped")
    }
}

impl Drop for Waited<'_> {
    fn drop(&mut self) {
        self.passed = None;
        self.turnstile.bell.put(());
    }
}

impl Turnstile {
    /// Errors: `Exhausted`.
    pub(crate) fn new(agent: Agent) -> Result<Arc<Self>> {
        let turnstile = Arc::new(Turnstile::around(Some(agent))?);
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|other| other.strong_count() > 0);
        open.push(Arc::downgrade(&turnstile));
        drop(open);
        AT_EXIT.get_or_init(|| {
            // SAFETY: a function without arguments that unwinds nowhere. NIXL is loaded, so its own end comes later.
            unsafe { libc::atexit(close_all) };
            std::process::id()
        });
        Ok(turnstile)
    }

    pub(crate) fn around(agent: Option<Agent>) -> Result<Self> {
        Ok(Turnstile {
            agent: Mutex::new(agent),
            waiting: AtomicUsize::new(0),
            bell: Mailbox::new()?,
            in_progress: AtomicBool::new(false),
        })
    }

    /// Readable once another thread has let go.
    pub(crate) fn bell(&self) -> RawFd {
        self.bell.fd()
    }

    /// It was heard.
    pub(crate) fn silence(&self) {
        self.bell.take();
    }

    /// Notes whether requests are in progress.
    pub(crate) fn note_in_progress(&self, in_progress: bool) {
        self.in_progress.store(in_progress, Ordering::SeqCst);
    }

    #[cfg(test)]
    pub(crate) fn is_in_progress(&self) -> bool {
        self.in_progress.load(Ordering::SeqCst)
    }

    /// Waits for its turn.
    pub(crate) fn pass(&self) -> Waited<'_> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let passed = self.agent.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        Waited { turnstile: self, passed: Some(passed) }
    }

    /// For the reactor: passes if nobody is there or waits; else the bell rings later.
    pub(crate) fn try_pass(&self) -> Option<Passed<'_>> {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            return None;
        }
        match self.agent.try_lock() {
            Ok(passed) => Some(passed),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// All agents that may be open.
static OPEN: Mutex<Vec<Weak<Turnstile>>> = Mutex::new(Vec::new());
/// Set once their end at the program's exit is arranged: by this process.
static AT_EXIT: OnceLock<u32> = OnceLock::new();
/// How long the exit of a program waits for an agent that is at work.
const LAST_PATIENCE: Duration = Duration::from_secs(1);

/// A program that exits while an agent is open would end in NIXL's threads, whose libraries' tables are gone.
extern "C" fn close_all() {
    if AT_EXIT.get() != Some(&std::process::id()) {
        return; // a fork has no threads of NIXL's
    }
    let Ok(open) = OPEN.try_lock() else { return };
    let until = Instant::now() + LAST_PATIENCE;
    for turnstile in open.iter().filter_map(Weak::upgrade) {
        turnstile.waiting.fetch_add(1, Ordering::SeqCst);
        let mut passed = loop {
            match turnstile.agent.try_lock() {
                Ok(passed) => break passed,
                Err(_) if Instant::now() > until => return,
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        let agent = passed.take();
        if turnstile.in_progress.load(Ordering::SeqCst) {
            std::mem::forget(agent);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::BorrowedFd;

    use rustix::event::{PollFd, PollFlags, Timespec};

    use super::*;

    #[test]
    fn who_is_turned_away_is_called_back() {
        let turnstile = Turnstile::around(None).unwrap();
        let rings = || {
            // SAFETY: the turnstile has it.
            let bell = unsafe { BorrowedFd::borrow_raw(turnstile.bell()) };
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut [PollFd::from_borrowed_fd(bell, PollFlags::IN)], Some(&now)) == Ok(1)
        };
        drop(turnstile.try_pass().expect("nobody is there"));
        assert!(!rings(), "the reactor does not call itself");
        let passed = turnstile.pass();
        assert!(turnstile.try_pass().is_none() && !rings());
        drop(passed);
        assert!(rings() && turnstile.try_pass().is_some());
        turnstile.silence();
        assert!(!rings());
    }
}
