//! Deadlines, and the thread of an agent that enforces them.
//!
//! The public API has no value for "never". There is no injectable clock: transports wait for
//! sockets, the kernel and libraries, none of which knows virtual time, so tests use short times.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use slab::Slab;

use crate::identity::PeerId;
use crate::sync::{Condvar, Mutex, catch_panic};
use crate::{Error, ErrorKind, RegionId, Result};

/// The time at which a call gives up. Created from a [`Duration`] from now, or from an [`Instant`].
///
/// ```
/// # use kvx_core as kvx;
/// use std::time::Duration;
/// let deadline: kvx::Deadline = Duration::from_secs(2).into();
/// assert!(deadline.left() <= Duration::from_secs(2));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// Returns the deadline of a transfer that sets none: 30 seconds from now.
    pub fn default_for_transfers() -> Self {
        Deadline::default_from(Instant::now())
    }

    /// Returns the deadline of a transfer that is posted at `posted` and sets none.
    pub(crate) fn default_from(posted: Instant) -> Self {
        Deadline(Some(posted + Duration::from_secs(30)))
    }

    pub(crate) fn instant(self) -> Option<Instant> {
        self.0
    }

    /// Returns the earlier of the two.
    pub(crate) fn earlier(self, other: Deadline) -> Self {
        Deadline(self.0.into_iter().chain(other.0).min())
    }

    /// Returns the time that is left; zero once the deadline has passed.
    pub fn left(self) -> Duration {
        self.0.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()))
    }

    /// Returns true if the deadline has passed.
    pub fn passed(self) -> bool {
        self.left().is_zero()
    }
}

impl From<Duration> for Deadline {
    /// Limits `time` to a century, so that the clock can express the deadline.
    fn from(time: Duration) -> Self {
        let century = Duration::from_secs(100 * 365 * 86_400);
        Deadline(Some(Instant::now() + time.min(century)))
    }
}

impl From<Instant> for Deadline {
    fn from(at: Instant) -> Self {
        Deadline(Some(at))
    }
}

/// An operation that ends at its deadline unless it ended before. The clock calls it without
/// holding a lock.
pub(crate) trait Expire: Send + Sync {
    fn expire(self: Arc<Self>);

    /// Notifies the operation of something that may end it early.
    fn interrupt(self: Arc<Self>, reason: &Reason);
}

/// A reason for operations to end early.
pub(crate) enum Reason {
    /// A region of this agent is being revoked.
    Region(RegionId),
    /// The peer of this handle is lost, with this error.
    Lost(PeerId, Error),
    /// The agent is shutting down.
    Shutdown,
}

/// A watched deadline. Its owner drops it when the operation ends, and never under a lock that
/// `expire` takes.
pub(crate) struct Watch {
    shared: Arc<ClockShared>,
    slot: usize,
    serial: u64,
}

impl Drop for Watch {
    fn drop(&mut self) {
        if crate::fork::check().is_err() {
            return; // a parent thread may have held the clock's lock at the fork
        }
        let mut table = self.shared.table.lock();
        let entry = match table.entries.get(self.slot) {
            Some(entry) if entry.serial == self.serial => Some(table.entries.remove(self.slot)),
            _ => None,
        };
        drop(table);
        drop(entry); // may drop an operation, which takes its own locks
    }
}

struct ClockEntry {
    serial: u64,
    at: Instant,
    operation: Arc<dyn Expire>,
}

#[derive(Default)]
struct ClockTable {
    entries: Slab<ClockEntry>,
    serial: u64,
    /// The time until which the clock thread sleeps. Entries that end early do not change it: one
    /// idle wake-up per deadline costs less than an ordered queue that every post touches.
    next: Option<Instant>,
    stop: bool,
}

struct ClockShared {
    table: Mutex<ClockTable>,
    changed: Condvar,
}

/// The deadlines of one agent. Its thread sleeps until the nearest one.
pub(crate) struct Clock {
    shared: Arc<ClockShared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Clock {
    pub(crate) fn start(agent: &str) -> Result<Self> {
        let shared = Arc::new(ClockShared { table: Mutex::default(), changed: Condvar::new() });
        let ours = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name(format!("kvx-clock {agent}"))
            .spawn(move || ours.run())
            .map_err(|error| {
                Error::os("the clock thread could not be started", error)
                    .with_kind(ErrorKind::Exhausted)
            })?;
        Ok(Clock { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Watches an operation. Must be called without locks that `expire` takes. On a stopped clock
    /// the operation expires at once.
    pub(crate) fn watch(&self, at: Instant, operation: Arc<dyn Expire>) -> Watch {
        let mut table = self.shared.table.lock();
        if table.stop {
            drop(table);
            operation.expire();
            return Watch { shared: Arc::clone(&self.shared), slot: usize::MAX, serial: 0 };
        }
        table.serial += 1;
        let serial = table.serial;
        let slot = table.entries.insert(ClockEntry { serial, at, operation });
        if table.next.is_none_or(|next| at < next) {
            table.next = Some(at);
            self.shared.changed.notify_all();
        }
        Watch { shared: Arc::clone(&self.shared), slot, serial }
    }

    /// Asks every watched operation whether `reason` ends it.
    pub(crate) fn interrupt(&self, reason: &Reason) {
        let all: Vec<_> = self
            .shared
            .table
            .lock()
            .entries
            .iter()
            .map(|(_, entry)| Arc::clone(&entry.operation))
            .collect();
        for operation in all {
            operation.interrupt(reason);
        }
    }

    /// Stops the thread, expires the operations that are left, and joins the thread unless it is
    /// the calling one.
    pub(crate) fn stop(&self) {
        self.signal_stop();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            thread.join().ok(); // the panic hook has already reported a panic
        }
        let left: Vec<_> =
            self.shared.table.lock().entries.drain().map(|entry| entry.operation).collect();
        for operation in left {
            operation.expire();
        }
    }

    fn signal_stop(&self) {
        self.shared.table.lock().stop = true;
        self.shared.changed.notify_all();
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        if crate::fork::check().is_ok() {
            self.signal_stop();
        }
    }
}

impl ClockShared {
    fn run(&self) {
        let mut table = self.table.lock();
        while !table.stop {
            let now = Instant::now();
            if table.next.is_none_or(|next| next > now) {
                let next = table.next;
                table = self.changed.wait_until(table, next);
                continue;
            }
            let mut due: Vec<(Instant, usize)> = table
                .entries
                .iter()
                .filter(|(_, entry)| entry.at <= now)
                .map(|(slot, entry)| (entry.at, slot))
                .collect();
            due.sort_unstable();
            let due: Vec<_> =
                due.into_iter().map(|(_, slot)| table.entries.remove(slot).operation).collect();
            table.next = table.entries.iter().map(|(_, entry)| entry.at).min();
            drop(table);
            for operation in due {
                catch_panic(|| operation.expire());
            }
            table = self.table.lock();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    struct Ring(mpsc::Sender<u32>, u32);

    impl Expire for Ring {
        fn expire(self: Arc<Self>) {
            self.0.send(self.1).ok();
        }
        fn interrupt(self: Arc<Self>, _: &Reason) {}
    }

    #[test]
    fn deadlines_ring_in_order_and_forgotten_ones_do_not() {
        let clock = Clock::start("test").unwrap();
        let (sender, receiver) = mpsc::channel();
        let at = |ms| Instant::now() + Duration::from_millis(ms);
        let _late = clock.watch(at(600), Arc::new(Ring(sender.clone(), 600)));
        let forgotten = clock.watch(at(500), Arc::new(Ring(sender.clone(), 500)));
        let _soon = clock.watch(at(20), Arc::new(Ring(sender.clone(), 20)));
        drop(forgotten);
        assert_eq!(receiver.recv_timeout(Duration::from_secs(10)).unwrap(), 20);
        assert_eq!(receiver.recv_timeout(Duration::from_secs(10)).unwrap(), 600);
        clock.stop();
    }

    #[test]
    fn the_longest_duration_is_a_deadline() {
        assert!(Deadline::from(Duration::MAX).left() > Duration::from_secs(86_400));
    }
}
