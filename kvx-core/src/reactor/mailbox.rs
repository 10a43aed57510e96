//! What other threads of a transport have to tell its machine.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use crate::sync::Mutex;
use crate::{Error, Kind, Result};

/// Answers of threads that make a library's blocking calls. Its descriptor, one of
/// [`Progress::fds`](super::Progress::fds), is readable for as long as something lies in it.
pub struct Mailbox<T> {
    letters: Mutex<Vec<T>>,
    /// So that looking into an empty one costs next to nothing.
    is_full: AtomicBool,
    wake: OwnedFd,
}

impl<T> Mailbox<T> {
    /// Errors: `Exhausted` without a descriptor.
    pub fn new() -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|cause| {
            Error::os("no eventfd for a mailbox: raise ulimit -n", cause).kind_is(Kind::Exhausted)
        })?;
        Ok(Mailbox { letters: Mutex::default(), is_full: AtomicBool::new(false), wake })
    }

    /// The descriptor.
    pub fn fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// Puts one in, and wakes the machine.
    pub fn put(&self, letter: T) {
        let mut letters = self.letters.lock();
        letters.push(letter);
        self.is_full.store(true, Ordering::Release);
        // Still under the lock: a descriptor that became readable after the letter was taken would stay so, and the
        // machine would never sleep again.
        rustix::io::write(&self.wake, &1_u64.to_ne_bytes()).ok(); // a full counter wakes as well
    }

    /// Whether nothing lies in it.
    pub fn is_empty(&self) -> bool {
        !self.is_full.load(Ordering::Acquire)
    }

    /// Takes all of them, in the order in which they were put in.
    pub fn take(&self) -> Vec<T> {
        if self.is_empty() {
            return Vec::new();
        }
        let mut letters = self.letters.lock();
        self.is_full.store(false, Ordering::Release);
        let mut count = [0; 8];
        rustix::io::read(&self.wake, &mut count).ok(); // never blocks
        std::mem::take(&mut letters)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::time::{Duration, Instant};

    use rustix::event::{PollFd, PollFlags, Timespec};

    use super::*;

    /// What ends the thread that puts letters in.
    const LAST: u64 = u64::MAX;

    #[test]
    fn what_was_taken_wakes_nobody() {
        let mailbox = Mailbox::new().unwrap();
        let (asked, put) = (AtomicU64::new(0), AtomicU64::new(0));
        let after = |counter: &AtomicU64, round| {
            loop {
                match counter.load(Ordering::Acquire) {
                    now if now > round => return now,
                    _ => std::thread::yield_now(),
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut round = 0;
                loop {
                    round = after(&asked, round);
                    if round == LAST {
                        return;
                    }
                    mailbox.put(round);
                    put.store(round, Ordering::Release);
                }
            });
            // Milliseconds, where two processors do nothing else; elsewhere a round may cost several slices.
            let end = Instant::now() + Duration::from_secs(2);
            let (mut strange, mut awake) = (0, 0);
            for round in 1..=5_000 {
                asked.store(round, Ordering::Release);
                let mut letters = Vec::new();
                while letters.is_empty() {
                    letters = mailbox.take();
                    std::hint::spin_loop();
                }
                strange += u64::from(letters != [round]);
                after(&put, round - 1);
                let now = Timespec { tv_sec: 0, tv_nsec: 0 };
                let readable =
                    rustix::event::poll(&mut [PollFd::new(&mailbox.wake, PollFlags::IN)], Some(&now));
                awake += u64::from(readable == Ok(1));
                if Instant::now() >= end {
                    break;
                }
            }
            asked.store(LAST, Ordering::Release);
            assert_eq!(strange, 0, "rounds whose letter did not come, or not alone");
            assert_eq!(awake, 0, "rounds after which the descriptor stayed readable");
        });
        assert!(mailbox.is_empty());
    }

    #[test]
    fn what_lies_in_it_keeps_its_descriptor_readable_and_its_order() {
        let mailbox = Mailbox::new().unwrap();
        ["one", "two"].into_iter().for_each(|letter| mailbox.put(letter));
        assert_eq!(rustix::event::poll(&mut [PollFd::new(&mailbox.wake, PollFlags::IN)], None), Ok(1));
        assert_eq!(mailbox.take(), ["one", "two"]);
        assert!(mailbox.take().is_empty());
    }
}
