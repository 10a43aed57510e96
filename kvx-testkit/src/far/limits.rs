//! What a process may have no more of, and a page of its memory that does not come.

use std::fmt;
use std::os::fd::{AsRawFd as _, OwnedFd};

use kvx_core::{Error, Kind, Memory, Result};
use rustix::mm::{Advice, UserfaultfdFlags, madvise, userfaultfd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

/// What there is no more of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Limit {
    /// Open files.
    Files,
    /// Threads. Only users without privileges are held to it.
    Threads,
    /// Address space: `mmap` fails, and with it whatever wants a stack or a pool.
    Mappings,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Limit::Files => "descriptors",
            Limit::Threads => "threads",
            Limit::Mappings => "mappings",
        })
    }
}

/// Forbids this process more than it has, or allows it again as far as the hard limit goes.
pub(crate) fn limit(what: Limit, more: bool) -> std::io::Result<()> {
    let resource = match what {
        Limit::Files => Resource::Nofile,
        Limit::Threads => Resource::Nproc,
        Limit::Mappings => Resource::As,
    };
    let limit = getrlimit(resource);
    let current = match (more, what) {
        (true, _) => limit.maximum,
        // The lowest number that is free is the first that is too high.
        (false, Limit::Files) => Some(rustix::io::dup(std::io::stdin())?.as_raw_fd() as u64),
        (false, Limit::Threads) => Some(0),
        (false, Limit::Mappings) => {
            grow_heap();
            Some(mapped()?)
        }
    };
    setrlimit(resource, Rlimit { current, ..limit })?;
    if what == Limit::Threads && !more && std::thread::Builder::new().spawn(|| ()).is_ok() {
        return Err(std::io::Error::other("threads are not limited: run it as a user without privileges"));
    }
    Ok(())
}

/// So much the heap holds in reserve: a program cannot go on whose `Box::new` fails.
const RESERVE: usize = 32 << 20;
/// What it is asked for at a time: less than what gets a mapping of its own.
const PIECE: usize = 64 << 10;

/// Has the heap keep a reserve: what is small does not need a mapping then.
fn grow_heap() {
    // SAFETY: numbers in, a number out.
    unsafe { libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX) };
    let pieces: Vec<Vec<u8>> = (0..RESERVE / PIECE).map(|_| Vec::with_capacity(PIECE)).collect();
    drop(pieces);
}

/// Bytes of address space that this process has.
fn mapped() -> std::io::Result<u64> {
    let told = std::fs::read_to_string("/proc/self/statm")?;
    let pages = told.split(' ').next().and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0);
    Ok(pages * rustix::param::page_size() as u64)
}

/// A page that does not come: whoever touches it waits, until this is dropped.
pub(super) struct HungPage {
    /// Who asks for the page is kept waiting for as long as this is open.
    _keeper: OwnedFd,
}

/// As `struct uffdio_api`, `uffdio_register` and their requests in `linux/userfaultfd.h`.
const API: u64 = 0xaa;
const REQUEST_API: libc::Ioctl = 0xc018_aa3f_u32 as libc::Ioctl;
const REQUEST_REGISTER: libc::Ioctl = 0xc020_aa00_u32 as libc::Ioctl;
const MISSING: u64 = 1;

impl HungPage {
    /// One in the middle of this memory of the program's own, which loses what was there.
    pub(super) fn of(memory: &Memory) -> Result<Self> {
        let page = rustix::param::page_size();
        let middle = (memory.as_ptr() as usize + memory.len() / 2).next_multiple_of(page);
        let refused = |cause: std::io::Error| {
            Error::os("no userfaultfd: run it as root", cause).kind_is(Kind::Unavailable)
        };
        // SAFETY: the descriptor is only asked for pages of `memory`, below.
        let keeper = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }
            .map_err(|cause| refused(cause.into()))?;
        let mut asked = [API, 0, 0, 0];
        let mut place = [middle as u64, page as u64, MISSING, 0];
        for (request, words) in [(REQUEST_API, &mut asked), (REQUEST_REGISTER, &mut place)] {
            // SAFETY: the words are as long as what the request reads and writes.
            if unsafe { libc::ioctl(keeper.as_raw_fd(), request, words.as_mut_ptr()) } != 0 {
                return Err(refused(std::io::Error::last_os_error()));
            }
        }
        // SAFETY: the page lies within memory that lives, is the program's own, and whose content nobody relies on.
        unsafe { madvise(middle as *mut _, page, Advice::LinuxDontNeed) }
            .map_err(|cause| refused(cause.into()))?;
        Ok(HungPage { _keeper: keeper })
    }
}
