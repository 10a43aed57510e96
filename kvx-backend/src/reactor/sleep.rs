//! Sleeping and waking of the reactor's thread.
//!
//! The thread announces with a flag that it sleeps, and then checks for work once more. Another
//! thread first submits its work, and then checks the flag. So at least one of the two sees the
//! other.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::sync::{AtomicBool, AtomicU64, IS_MODEL, Ordering, Wake};

/// The time that a reactor stays away from a machine that another thread drives: the longest delay
/// of the machine's other work after that thread has left.
const STAYS_AWAY: Duration = Duration::from_micros(400);
/// The time after a turn of another thread within which its next turn is expected.
const DRIVEN: Duration = Duration::from_micros(50);

/// The state by which the reactor's thread and other threads coordinate.
pub(super) struct Sleep {
    /// True from before the last check for work until the reactor is awake again.
    asleep: AtomicBool,
    /// True if the reactor sleeps only for [`STAYS_AWAY`], because another thread drives the
    /// machine.
    stays_away: AtomicBool,
    /// The time at which a sleeping reactor wakes without a wake-up, in nanoseconds since
    /// `started`.
    pub(super) wakes_at: AtomicU64,
    /// The number of threads between [`begin_driving`](Self::begin_driving) and its end; their
    /// turns may take longer than [`STAYS_AWAY`].
    pub(super) drivers: AtomicU64,
    /// The time of the last turn of another thread, in nanoseconds since `started`.
    pub(super) driven_at: AtomicU64,
    started: Instant,
    wake: Wake,
}

/// Methods for the reactor's thread.
impl Sleep {
    /// Returns the state of a thread that is awake.
    pub(super) fn new() -> Result<Self, Errno> {
        Ok(Sleep {
            asleep: AtomicBool::new(false),
            stays_away: AtomicBool::new(false),
            wakes_at: AtomicU64::new(0),
            drivers: AtomicU64::new(0),
            driven_at: AtomicU64::new(0),
            started: Instant::now(),
            wake: Wake::new()?,
        })
    }

    /// Announces that the thread is going to sleep, for at most `longest`. The caller holds the
    /// machine's lock, so that the next turn of another thread sees the announcement.
    pub(super) fn announce(&self, longest: Option<Duration>) {
        self.wakes_at.store(self.at(longest), Ordering::SeqCst);
        self.asleep.store(true, Ordering::SeqCst);
    }

    /// Sleeps, as announced, until it is woken or one of `fds` is readable, unless work has arrived
    /// by now. Returns true if it slept.
    pub(super) fn sleep_unless(
        &self,
        has_work: impl FnOnce() -> bool,
        fds: &[RawFd],
        longest: Option<Duration>,
    ) -> bool {
        let sleeps = !has_work();
        if sleeps {
            self.poll(fds, longest);
        }
        self.asleep.store(false, Ordering::SeqCst);
        sleeps
    }

    /// Stays away from the machine, and off its core, while another thread drives it. Returns true
    /// if a thread has ended a turn meanwhile.
    pub(super) fn stay_away(&self, is_over: impl FnOnce() -> bool) -> bool {
        let seen = self.driven_at.load(Ordering::Relaxed);
        self.stays_away.store(true, Ordering::SeqCst);
        self.asleep.store(true, Ordering::SeqCst);
        if !is_over() && self.is_driven() {
            self.poll(&[], Some(STAYS_AWAY));
        }
        self.stays_away.store(false, Ordering::SeqCst);
        self.asleep.store(false, Ordering::SeqCst);
        self.driven_at.load(Ordering::Relaxed) != seen
    }

    fn poll(&self, fds: &[RawFd], longest: Option<Duration>) {
        let mut polled = Vec::with_capacity(fds.len() + 1);
        polled.push(PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN));
        polled.extend(fds.iter().map(|fd| {
            // SAFETY: the machine owns these descriptors and is not dropped before this thread
            // ends. If it closes one meanwhile, on another thread's turn, the number is at worst
            // another open file, which causes a spurious wake-up.
            let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
            PollFd::from_borrowed_fd(fd, PollFlags::IN)
        }));
        let longest = longest.map(|longest| Timespec {
            tv_sec: longest.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: longest.subsec_nanos().into(),
        });
        match self.wake.poll(&mut polled, longest.as_ref()) {
            Ok(true) => self.wake.drain(),
            Ok(false) | Err(Errno::INTR) => {}
            Err(error) => {
                let fd = self.wake.as_raw_fd();
                tracing::error!(%error, fd, "a reactor could not sleep; trying again in 10 ms");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

/// Methods for other threads.
impl Sleep {
    /// Wakes a sleeping reactor after a command was queued. Leaves a reactor that stays away alone
    /// while the driving thread is likely to return: that thread takes the command, and the wake-up
    /// would preempt it.
    #[inline]
    pub(super) fn wake_if_asleep(&self) {
        if self.is_asleep() && !(self.stays_away.load(Ordering::SeqCst) && self.is_driven()) {
            self.wake();
        }
    }

    /// Returns true if the reactor sleeps as the machine requested. The caller holds the machine's
    /// lock.
    #[inline]
    pub(super) fn is_as_announced(&self) -> bool {
        self.is_asleep() && !self.stays_away.load(Ordering::SeqCst)
    }

    /// Returns true if the reactor wakes without a wake-up only later than `longest` from now.
    #[inline]
    pub(super) fn is_longer_than(&self, longest: Option<Duration>) -> bool {
        self.at(longest) < self.wakes_at.load(Ordering::SeqCst)
    }

    /// Begins a turn during which, and shortly after which, the reactor stays away.
    #[inline]
    pub(super) fn begin_driving(&self) {
        self.drivers.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends the turn that [`begin_driving`](Self::begin_driving) began.
    #[inline]
    pub(super) fn end_driving(&self) {
        self.driven_at.store(self.at(Some(Duration::ZERO)), Ordering::Relaxed);
        self.drivers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Ends a driver's turn that hangs; the reactor returns at once.
    pub(super) fn driver_hangs(&self) {
        self.drivers.fetch_sub(1, Ordering::Relaxed);
        self.driven_at.store(0, Ordering::SeqCst);
    }

    /// Makes the reactor return at once, after the last turn of a thread that goes to sleep.
    #[inline]
    pub(super) fn stop_driving(&self) {
        self.driven_at.store(0, Ordering::SeqCst);
        if self.stays_away.load(Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Returns true if another thread has just had a turn, and so is likely to have the next.
    #[inline]
    pub(super) fn is_driven(&self) -> bool {
        if self.drivers.load(Ordering::Relaxed) > 0 {
            return true;
        }
        let driven = Duration::from_nanos(self.driven_at.load(Ordering::SeqCst));
        !driven.is_zero() && self.now().saturating_sub(driven) < DRIVEN
    }

    #[inline]
    pub(super) fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::SeqCst)
    }

    /// Wakes the reactor, or makes its next sleep end at once.
    pub(super) fn wake(&self) {
        self.wake.ring();
    }

    /// Returns the time `longest` from now, in the unit of `wakes_at`.
    #[inline]
    fn at(&self, longest: Option<Duration>) -> u64 {
        longest.map_or(u64::MAX, |longest| {
            u64::try_from((self.now() + longest).as_nanos()).unwrap_or(u64::MAX)
        })
    }

    /// Returns the time since the start. In a model, time stands still just after the start, so
    /// that a thread that has driven is expected again until it calls `stop_driving`.
    #[inline]
    fn now(&self) -> Duration {
        if IS_MODEL { Duration::from_nanos(1) } else { self.started.elapsed() }
    }
}
