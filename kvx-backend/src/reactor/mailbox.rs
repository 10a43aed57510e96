//! Messages from a transport's other threads to its machine.

use std::os::fd::{AsRawFd as _, RawFd};

use super::sync::{AtomicBool, Mutex, Ordering, Wake};
use kvx_core::{Error, ErrorKind, Result};

/// A queue for the results of threads that make a library's blocking calls. Its descriptor, one of
/// [`Progress::fds`](super::Progress::fds), is readable while the queue is not empty.
pub struct Mailbox<T> {
    messages: Mutex<Vec<T>>,
    /// A hint that makes checking an empty queue almost free.
    is_full: AtomicBool,
    wake: Wake,
}

impl<T> Mailbox<T> {
    /// Creates a mailbox. Returns `Exhausted` without a descriptor.
    pub fn new() -> Result<Self> {
        let wake = Wake::new().map_err(|cause| {
            Error::os("cannot create an eventfd for a mailbox: raise ulimit -n", cause)
                .with_kind(ErrorKind::Exhausted)
        })?;
        Ok(Mailbox { messages: Mutex::default(), is_full: AtomicBool::new(false), wake })
    }

    /// Returns the descriptor.
    pub fn fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// Adds a message and wakes the machine.
    pub fn put(&self, message: T) {
        let mut messages = self.messages.lock();
        messages.push(message);
        self.is_full.store(true, Ordering::Release);
        // The lock is still held: if the descriptor became readable after the message was taken, it
        // would stay so, and the machine would never sleep again.
        self.wake.ring();
    }

    /// Returns true if the mailbox is empty.
    pub fn is_empty(&self) -> bool {
        !self.is_full.load(Ordering::Acquire)
    }

    /// Takes all messages, in the order in which they were added.
    pub fn take(&self) -> Vec<T> {
        if self.is_empty() {
            return Vec::new();
        }
        let mut messages = self.messages.lock();
        self.is_full.store(false, Ordering::Release);
        self.wake.drain();
        std::mem::take(&mut messages)
    }
}

#[cfg(all(test, not(kvx_loom)))]
mod tests {
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use rustix::event::{PollFd, PollFlags, Timespec};

    use super::*;

    /// The number of rounds below which the test proves nothing.
    const ENOUGH: u64 = 500;
    /// The number of checks before a thread sleeps: microseconds, in which the other thread
    /// finishes if it runs.
    const SPINS: u32 = 10_000;

    #[test]
    fn a_message_that_was_taken_leaves_no_wake_up() {
        let mailbox = &Mailbox::new().unwrap();
        let readable = |longest| {
            let longest = Timespec { tv_sec: longest, tv_nsec: 0 };
            rustix::event::poll(&mut [PollFd::new(&mailbox.wake, PollFlags::IN)], Some(&longest))
                == Ok(1)
        };
        std::thread::scope(|scope| {
            // A thread that waits for the other one polls for a while and then sleeps; on a single
            // processor it would otherwise be in the other's way.
            let (ask, asked) = mpsc::channel();
            let (tell, told) = mpsc::channel();
            scope.spawn(move || {
                let next =
                    || (0..SPINS).find_map(|_| asked.try_recv().ok()).or_else(|| asked.recv().ok());
                while let Some(round) = next() {
                    // sometimes before a check, sometimes after it
                    (0..round % 128).for_each(|_| std::hint::spin_loop());
                    mailbox.put(round);
                    tell.send(()).unwrap();
                }
            });
            let begun = Instant::now();
            for round in 1..=5_000 {
                ask.send(round).unwrap();
                // Checks at the very moment at which the message is added, if both threads run in
                // parallel.
                let mut messages =
                    (0..SPINS).map(|_| mailbox.take()).find(|messages| !messages.is_empty());
                if messages.is_none() && readable(10) {
                    messages = Some(mailbox.take());
                }
                assert_eq!(messages, Some(vec![round]), "what was put in");
                told.recv_timeout(Duration::from_secs(10)).unwrap();
                assert!(!readable(0), "round {round}: the descriptor stayed readable");
                if round >= ENOUGH && begun.elapsed() >= Duration::from_secs(2) {
                    break;
                }
            }
        });
        assert!(mailbox.is_empty());
    }

    #[test]
    fn messages_keep_the_descriptor_readable_and_their_order() {
        let mailbox = Mailbox::new().unwrap();
        ["one", "two"].into_iter().for_each(|message| mailbox.put(message));
        assert_eq!(
            rustix::event::poll(&mut [PollFd::new(&mailbox.wake, PollFlags::IN)], None),
            Ok(1)
        );
        assert_eq!(mailbox.take(), ["one", "two"]);
        assert!(mailbox.take().is_empty());
    }
}

#[cfg(all(test, kvx_loom))]
mod models {
    use std::os::fd::AsFd as _;
    use std::sync::Arc;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    #[test]
    fn messages_are_taken_in_order_and_leave_no_wake_up() {
        loom::model(|| {
            let mailbox = Arc::new(Mailbox::new().unwrap());
            let readable = || {
                let now = Timespec { tv_sec: 0, tv_nsec: 0 };
                poll(
                    &mut [PollFd::from_borrowed_fd(mailbox.wake.as_fd(), PollFlags::IN)],
                    Some(&now),
                ) == Ok(1)
            };
            let puts = {
                let mailbox = Arc::clone(&mailbox);
                loom::thread::spawn(move || {
                    [1, 2].into_iter().for_each(|message| mailbox.put(message))
                })
            };
            let mut taken = mailbox.take();
            puts.join().unwrap();
            assert_eq!(readable(), taken.len() < 2, "it is readable while it is not empty");
            taken.extend(mailbox.take());
            assert_eq!(taken, [1, 2]);
            assert!(!readable() && mailbox.is_empty());
        });
    }
}
