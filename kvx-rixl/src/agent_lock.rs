//! The lock that admits one thread at a time to NIXL, and for which the reactor never waits.

use std::ops::{Deref, DerefMut};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use kvx_backend::reactor::Mailbox;
use kvx_core::Result;
use kvx_core::backend::sync::{Mutex, MutexGuard};

use crate::ffi::NixlAgent;

/// The agent behind kvx's own lock. NIXL holds its locks for a third of a second while it loads a
/// peer's address. The reactor tries this lock first, does other work while another thread holds
/// it, and is woken when that thread releases it.
pub(crate) struct AgentLock {
    agent: Mutex<Option<NixlAgent>>,
    /// The number of waiting threads. The reactor, which takes the lock often and briefly, lets
    /// them go first.
    waiting: AtomicUsize,
    /// Wakes the reactor when another thread has released the agent: that thread may have read the
    /// data that would have woken the reactor.
    released: Mailbox<()>,
    /// True while requests are in progress, so that the agent cannot be destroyed.
    in_progress: AtomicBool,
}

/// The agent; `None` after it was destroyed.
pub(crate) type AgentGuard<'a> = MutexGuard<'a, Option<NixlAgent>>;

/// The locked agent, for threads other than the reactor. Dropping it wakes the reactor.
pub(crate) struct WakingGuard<'a> {
    agent_lock: &'a AgentLock,
    /// `Some` until it is dropped.
    locked: Option<AgentGuard<'a>>,
}

impl Deref for WakingGuard<'_> {
    type Target = Option<NixlAgent>;

    fn deref(&self) -> &Option<NixlAgent> {
        self.locked.as_deref().expect("it is not dropped")
    }
}

impl DerefMut for WakingGuard<'_> {
    fn deref_mut(&mut self) -> &mut Option<NixlAgent> {
        self.locked.as_deref_mut().expect("it is not dropped")
    }
}

impl Drop for WakingGuard<'_> {
    fn drop(&mut self) {
        self.locked = None;
        self.agent_lock.released.put(());
    }
}

impl AgentLock {
    /// Creates the lock. Errors: `Exhausted`.
    pub(crate) fn new(agent: NixlAgent) -> Result<Arc<Self>> {
        let agent_lock = Arc::new(AgentLock::around(Some(agent))?);
        let mut open = OPEN.lock();
        open.retain(|other| other.strong_count() > 0);
        open.push(Arc::downgrade(&agent_lock));
        drop(open);
        AT_EXIT.get_or_init(|| {
            // SAFETY: a function without arguments that does not unwind. NIXL is already loaded, so
            // its own exit handlers run later.
            unsafe { libc::atexit(close_all) };
            std::process::id()
        });
        Ok(agent_lock)
    }

    pub(crate) fn around(agent: Option<NixlAgent>) -> Result<Self> {
        Ok(AgentLock {
            agent: Mutex::new(agent),
            waiting: AtomicUsize::new(0),
            released: Mailbox::new()?,
            in_progress: AtomicBool::new(false),
        })
    }

    /// Returns a descriptor that is readable once another thread has released the agent.
    pub(crate) fn released_fd(&self) -> RawFd {
        self.released.fd()
    }

    /// Makes the descriptor unreadable until the next release, because the reactor polls now.
    pub(crate) fn clear_released(&self) {
        self.released.take();
    }

    /// Records whether requests are in progress.
    pub(crate) fn note_in_progress(&self, in_progress: bool) {
        self.in_progress.store(in_progress, Ordering::SeqCst);
    }

    #[cfg(test)]
    pub(crate) fn is_in_progress(&self) -> bool {
        self.in_progress.load(Ordering::SeqCst)
    }

    /// Waits for the lock.
    pub(crate) fn lock(&self) -> WakingGuard<'_> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let locked = self.agent.lock();
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        WakingGuard { agent_lock: self, locked: Some(locked) }
    }

    /// Takes the lock for the reactor. Returns `None` if another thread holds it or waits for it;
    /// that thread wakes the reactor later.
    pub(crate) fn try_lock(&self) -> Option<AgentGuard<'_>> {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            return None;
        }
        self.agent.try_lock()
    }
}

/// All agents that may be open.
static OPEN: Mutex<Vec<Weak<AgentLock>>> = Mutex::new(Vec::new());
/// The id of the process that has registered the exit handler.
static AT_EXIT: OnceLock<u32> = OnceLock::new();
/// The time that the exit of a program waits for an agent in use.
const LAST_PATIENCE: Duration = Duration::from_secs(1);

/// Closes all agents at the exit of the program. Otherwise NIXL's threads would crash, because the
/// static data of their libraries is already destroyed.
extern "C" fn close_all() {
    if AT_EXIT.get() != Some(&std::process::id()) {
        return; // a forked child has no NIXL threads
    }
    // Another thread is opening an agent during the exit.
    let Some(open) = OPEN.try_lock() else { return };
    let until = Instant::now() + LAST_PATIENCE;
    for agent_lock in open.iter().filter_map(Weak::upgrade) {
        agent_lock.waiting.fetch_add(1, Ordering::SeqCst);
        let mut locked = loop {
            match agent_lock.agent.try_lock() {
                Some(locked) => break locked,
                None if Instant::now() > until => return,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        let agent = locked.take();
        if agent_lock.in_progress.load(Ordering::SeqCst) {
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
    fn a_reactor_that_found_it_locked_is_woken() {
        let agent_lock = AgentLock::around(None).unwrap();
        let wakes = || {
            // SAFETY: the lock has it.
            let fd = unsafe { BorrowedFd::borrow_raw(agent_lock.released_fd()) };
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&now))
                == Ok(1)
        };
        drop(agent_lock.try_lock().expect("nobody holds it"));
        assert!(!wakes(), "the reactor does not wake itself");
        let locked = agent_lock.lock();
        assert!(agent_lock.try_lock().is_none() && !wakes());
        drop(locked);
        assert!(wakes() && agent_lock.try_lock().is_some());
        agent_lock.clear_released();
        assert!(!wakes());
    }
}
