//! Wakes the reactor: when the loading thread has a result, when the agent's lock is released, and
//! by UCX's sockets.
//!
//! NIXL wakes no thread: its interface has no descriptor. But UCX watches its sockets with epoll
//! descriptors, which kvx finds by comparing the process's descriptors before and after the plugin
//! is opened. kvx watches them and never reads them; a descriptor that belongs to another component
//! causes spurious wakes. If none is found, or data does not arrive by a socket, kvx polls NIXL at
//! intervals. The same applies with a NIXL thread: if it reads the message before the kernel checks
//! whether to wake this thread, the descriptor is no longer readable.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use kvx_core::{Error, ErrorKind, Result};
use rustix::event::epoll;

/// Returns the epoll descriptors of this process.
fn watchers() -> BTreeSet<RawFd> {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let watchers = entries.filter(|entry| {
        std::fs::read_link(entry.path())
            .is_ok_and(|what| what.as_os_str() == "anon_inode:[eventpoll]")
    });
    watchers.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Runs `start`. Returns its result and the epoll descriptors that it has created.
pub(crate) fn new_watchers<T>(start: impl FnOnce() -> T) -> (T, Vec<RawFd>) {
    let before = watchers();
    let started = start();
    (started, watchers().difference(&before).copied().collect())
}

/// The owner of a descriptor.
const KVX: u64 = 0;
const PLUGIN: u64 = 1;

/// A single descriptor for all wakes.
pub(crate) struct WakeSet {
    set: OwnedFd,
}

impl WakeSet {
    /// Watches `own`, which outlive the set, and the plugin's descriptors. Errors: `Exhausted`.
    pub(crate) fn new(own: &[RawFd], plugins: &[RawFd]) -> Result<Self> {
        let exhausted = |cause| {
            Error::os("could not create an epoll descriptor: raise ulimit -n", cause)
                .with_kind(ErrorKind::Exhausted)
        };
        for plugins in [plugins, &[]] {
            let set = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(exhausted)?;
            for own in own {
                // SAFETY: the fabric owns both the descriptors' owners and the set.
                let own = unsafe { BorrowedFd::borrow_raw(*own) };
                epoll::add(&set, own, epoll::EventData::new_u64(KVX), epoll::EventFlags::IN)
                    .map_err(exhausted)?;
            }
            for fd in plugins {
                // SAFETY: the descriptor is only passed to the kernel, which rejects a closed one
                // and removes it from the set when it is closed later. New data is reported only
                // once, because its owner reads it.
                let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
                let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
                epoll::add(&set, fd, epoll::EventData::new_u64(PLUGIN), flags).ok();
            }
            // The kernel limits the nesting of epolls, and this one is added to another.
            let outer = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(exhausted)?;
            match epoll::add(&outer, &set, epoll::EventData::new_u64(0), epoll::EventFlags::IN) {
                Ok(()) => return Ok(WakeSet { set }),
                Err(cause) if plugins.is_empty() => return Err(exhausted(cause)),
                Err(_) => {}
            }
        }
        Err(ErrorKind::Native.because("could not create a set of descriptors"))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }

    /// Returns whether the plugin has woken since the last call.
    pub(crate) fn take(&self) -> bool {
        let mut events: [epoll::Event; 8] = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 8];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let count = epoll::wait(&self.set, &mut events[..], Some(&now)).unwrap_or(0);
        events[..count].iter().any(|event| event.data.u64() == PLUGIN)
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn a_descriptor_that_was_made_is_found_and_wakes_once() {
        let inner = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let (theirs, made) = new_watchers(|| epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
        assert!(made.contains(&theirs.as_raw_fd()));
        epoll::add(&theirs, &inner, epoll::EventData::new_u64(0), epoll::EventFlags::IN).unwrap();
        let loads = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let wakes = WakeSet::new(&[loads.as_raw_fd()], &[theirs.as_raw_fd()]).unwrap();
        assert!(!wakes.take());
        rustix::io::write(&inner, &1_u64.to_ne_bytes()).unwrap();
        // Nobody reads it, but it wakes only once.
        assert!(wakes.take() && !wakes.take());
        rustix::io::write(&loads, &1_u64.to_ne_bytes()).unwrap();
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let readable = rustix::event::poll(
            &mut [rustix::event::PollFd::from_borrowed_fd(
                wakes.fd(),
                rustix::event::PollFlags::IN,
            )],
            Some(&now),
        );
        assert_eq!(readable, Ok(1), "kvx's own descriptor wakes as well");
        assert!(!wakes.take(), "but does not count as the plugin's");
    }
}
