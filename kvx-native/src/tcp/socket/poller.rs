//! The events that wake the machine: one epoll of all its sockets, with a timer in it.
//!
//! The timer is a descriptor and not a limit for the sleep, because a turn on another thread (a
//! post, a drive) may need it while the machine's own thread already sleeps.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use kvx_core::{Error, Result};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};

#[cfg(test)]
use crate::clock::virtual_time;

const LISTENER: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;
/// The number of events taken at a time.
const EVENTS: usize = 256;

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A peer connects.
    Connecting,
    /// The timer has expired.
    Timer,
    /// A connection is ready.
    Conn { key: usize, readable: bool, writable: bool, hung_up: bool },
}

pub(crate) struct Poller {
    epoll: OwnedFd,
    fds: [RawFd; 1],
    timer: OwnedFd,
    armed: Option<Instant>,
    events: Vec<epoll::Event>,
}

// SAFETY: the data of its events are numbers, never pointers; all other fields are `Send`.
unsafe impl Send for Poller {}

fn refused(errno: Errno) -> Error {
    Error::os(
        "cannot create an epoll or timer descriptor for TCP: raise the limit of open files",
        errno,
    )
}

impl Poller {
    pub(crate) fn new(listener: impl AsFd) -> Result<Self> {
        let make = || {
            let epoll = epoll::create(CreateFlags::CLOEXEC)?;
            let timer = rustix::time::timerfd_create(
                TimerfdClockId::Monotonic,
                TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
            )?;
            epoll::add(&epoll, &timer, EventData::new_u64(TIMER), EventFlags::IN)?;
            epoll::add(
                &epoll,
                &listener,
                EventData::new_u64(LISTENER),
                EventFlags::IN | EventFlags::ET,
            )?;
            Ok(Poller {
                fds: [epoll.as_raw_fd()],
                epoll,
                timer,
                armed: None,
                events: Vec::with_capacity(EVENTS),
            })
        };
        make().map_err(refused)
    }

    /// Returns the descriptor that is readable when an event has happened.
    pub(crate) fn fds(&self) -> &[RawFd; 1] {
        &self.fds
    }

    /// Watches a connection; each change is reported once. Closing the socket ends the watch.
    pub(crate) fn watch(&self, key: usize, socket: impl AsFd) -> Result<()> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&self.epoll, socket, EventData::new_u64(key as u64), flags).map_err(refused)
    }

    /// Stops watching a socket that stays open.
    pub(crate) fn unwatch(&self, socket: impl AsFd) {
        epoll::delete(&self.epoll, socket).ok();
    }

    /// Reports the events that have happened, without waiting.
    pub(crate) fn poll(&mut self, mut tell: impl FnMut(Event)) -> Result<()> {
        #[cfg(test)]
        if self.is_due() {
            self.armed = None;
            tell(Event::Timer);
        }
        self.events.clear();
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut self.events), Some(&now))
        {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(refused(errno)),
        }
        for event in &self.events {
            let (data, flags) = (event.data, event.flags);
            tell(match data.u64() {
                LISTENER => Event::Connecting,
                TIMER => {
                    // it is empty if the timer was set again meanwhile
                    rustix::io::read(&self.timer, &mut [0; 8]).ok();
                    self.armed = None;
                    Event::Timer
                }
                key => Event::Conn {
                    key: key as usize,
                    readable: flags.contains(EventFlags::IN),
                    writable: flags.contains(EventFlags::OUT),
                    hung_up: flags
                        .intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR),
                },
            });
        }
        Ok(())
    }

    /// Sets the timer to `at`, or keeps an earlier time.
    pub(crate) fn by(&mut self, at: Instant, now: Instant) -> Result<()> {
        if self.armed.is_some_and(|armed| armed <= at) {
            return Ok(());
        }
        let wait = at.saturating_duration_since(now).max(Duration::from_nanos(1));
        let it_value = Timespec {
            tv_sec: wait.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: wait.subsec_nanos().into(),
        };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value };
        #[cfg(test)]
        if virtual_time::is_running() {
            self.armed = Some(at);
            return Ok(());
        }
        rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)
            .map_err(refused)?;
        self.armed = Some(at);
        Ok(())
    }

    /// Returns the time at which the timer expires, if it is set.
    #[cfg(test)]
    pub(crate) fn timer(&self) -> Option<Instant> {
        self.armed
    }

    /// Returns true if the timer has expired on virtual time, which its descriptor does not know.
    #[cfg(test)]
    fn is_due(&self) -> bool {
        virtual_time::now().is_some_and(|now| self.armed.is_some_and(|armed| armed <= now))
    }

    /// Returns true if its descriptor would wake a thread, or the timer has expired.
    #[cfg(test)]
    pub(crate) fn is_ready(&self) -> bool {
        use rustix::event::{PollFd, PollFlags};

        let mut polled = [PollFd::new(&self.epoll, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        self.is_due() || rustix::event::poll(&mut polled, Some(&now)).expect("it is open") > 0
    }
}
