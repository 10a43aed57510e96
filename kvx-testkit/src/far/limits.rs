//! Resource limits of a process, and pages whose faults stay unresolved.

use std::fmt;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;

use kvx_core::{Error, ErrorKind, Memory, Result};
use rustix::mm::{Advice, UserfaultfdFlags, madvise, userfaultfd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

/// A resource that a process can be denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Limit {
    /// Open files.
    Files,
    /// Threads. The limit applies only to users without privileges.
    Threads,
    /// Address space: `mmap` fails, and so does everything that needs a stack or a pool.
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

/// Denies this process any more of the resource, or allows it again up to the hard limit.
pub(crate) fn limit(what: Limit, more: bool) -> std::io::Result<()> {
    let resource = match what {
        Limit::Files => Resource::Nofile,
        Limit::Threads => Resource::Nproc,
        Limit::Mappings => Resource::As,
    };
    let limit = getrlimit(resource);
    let current = match (more, what) {
        (true, _) => limit.maximum,
        // The lowest free number becomes the first number above the limit.
        (false, Limit::Files) => Some(rustix::io::dup(std::io::stdin())?.as_raw_fd() as u64),
        (false, Limit::Threads) => Some(0),
        (false, Limit::Mappings) => {
            grow_heap();
            Some(mapped()?)
        }
    };
    setrlimit(resource, Rlimit { current, ..limit })?;
    if what == Limit::Threads && !more && std::thread::Builder::new().spawn(|| ()).is_ok() {
        return Err(std::io::Error::other(
            "threads are not limited: run it as a user without privileges",
        ));
    }
    Ok(())
}

/// The reserve of the heap: a program cannot continue if its `Box::new` fails.
const RESERVE: usize = 32 << 20;
/// The size of one request to the heap: too small to get its own mapping.
const PIECE: usize = 64 << 10;

/// Makes the heap keep a reserve, so that small allocations need no mapping.
fn grow_heap() {
    // SAFETY: the call takes and returns numbers only.
    unsafe { libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX) };
    let pieces: Vec<Vec<u8>> = (0..RESERVE / PIECE).map(|_| Vec::with_capacity(PIECE)).collect();
    drop(pieces);
}

/// Returns the number of bytes of address space that this process has mapped.
fn mapped() -> std::io::Result<u64> {
    let told = std::fs::read_to_string("/proc/self/statm")?;
    let pages = told.split(' ').next().and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0);
    Ok(pages * rustix::param::page_size() as u64)
}

/// A page whose faults stay unresolved: threads that touch it block until this is dropped.
pub struct HungPage {
    /// Faults of the page stay unresolved as long as this is open.
    keeper: OwnedFd,
    address: usize,
    _memory: Arc<Memory>,
}

/// As in `struct uffdio_api`, `uffdio_register` and `uffd_msg`, and their numbers in
/// `linux/userfaultfd.h`.
const API: u64 = 0xaa;
const REQUEST_API: libc::Ioctl = 0xc018_aa3f_u32 as libc::Ioctl;
const REQUEST_REGISTER: libc::Ioctl = 0xc020_aa00_u32 as libc::Ioctl;
const MISSING: u64 = 1;
/// The page exists, but is not mapped.
const MINOR: u64 = 1 << 2;
const MINOR_OF_FILES: u64 = 1 << 10;
const USERS_ONLY: u32 = 1;
const MESSAGE: usize = 32;

impl HungPage {
    /// Hangs a page in the middle of this memory of the program, which loses its content.
    ///
    /// # Errors
    /// `Unavailable`, for example if the user is not root.
    pub fn of(memory: &Arc<Memory>) -> Result<Self> {
        let page = HungPage::at(memory, memory.len() / 2, MISSING)?;
        page.take_away()?;
        Ok(page)
    }

    /// Prepares the page that contains this byte of a kvx pool or an adopted memory file. It keeps
    /// its content. Its faults resolve until [`take_away`](HungPage::take_away) is called. After
    /// that, only threads outside the kernel should touch it, because system calls fail there.
    ///
    /// # Errors
    /// `Unavailable`, for example before Linux 5.14.
    pub fn of_file(memory: &Arc<Memory>, offset: usize) -> Result<Self> {
        // Maps the page before it is registered; otherwise its faults would be unresolved from now
        // on.
        memory.copy_out(offset, &mut [0])?;
        HungPage::at(memory, offset, MINOR)
    }

    fn at(memory: &Arc<Memory>, offset: usize, mode: u64) -> Result<Self> {
        let page = rustix::param::page_size();
        let address = match mode {
            MISSING => (memory.as_ptr() as usize + offset).next_multiple_of(page),
            _ => (memory.as_ptr() as usize + offset) / page * page,
        };
        // Handling faults in the kernel itself requires a privilege.
        let (features, flags) = match mode {
            MISSING => (0, UserfaultfdFlags::empty()),
            _ => (MINOR_OF_FILES, UserfaultfdFlags::from_bits_retain(USERS_ONLY)),
        };
        // SAFETY: the descriptor is only used for pages of `memory`, below.
        let keeper =
            unsafe { userfaultfd(flags | UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }
                .map_err(|cause| refused(cause.into()))?;
        let mut asked = [API, features, 0, 0];
        let mut place = [address as u64, page as u64, mode, 0];
        for (request, words) in [(REQUEST_API, &mut asked), (REQUEST_REGISTER, &mut place)] {
            // SAFETY: each array is as long as the structure that the request reads and writes.
            if unsafe { libc::ioctl(keeper.as_raw_fd(), request, words.as_mut_ptr()) } != 0 {
                return Err(refused(std::io::Error::last_os_error()));
            }
        }
        Ok(HungPage { keeper, address, _memory: Arc::clone(memory) })
    }

    /// Returns why page faults cannot be left unresolved here, or `None` if they can.
    pub fn refused() -> Option<String> {
        let memory = Arc::new(Memory::owned(vec![0; 4 * rustix::param::page_size()]));
        HungPage::of(&memory).err().map(|why| why.to_string())
    }

    /// Leaves faults of the page unresolved from now on.
    ///
    /// # Errors
    /// The error of `madvise`, as `Unavailable`.
    pub fn take_away(&self) -> Result<()> {
        // SAFETY: the page lies within memory that `_memory` keeps alive. It belongs either to the
        // program, which does not rely on its content, or to a file, which keeps the content.
        unsafe {
            madvise(self.address as *mut _, rustix::param::page_size(), Advice::LinuxDontNeed)
        }
        .map_err(|cause| refused(cause.into()))
    }

    /// Returns whether a thread has started to wait for the page since the last call.
    pub fn is_touched(&self) -> bool {
        let mut message = [0_u8; MESSAGE];
        rustix::io::read(&self.keeper, &mut message).is_ok_and(|read| read == MESSAGE)
    }
}

fn refused(cause: std::io::Error) -> Error {
    Error::os("no userfaultfd: run it as root", cause).with_kind(ErrorKind::Unavailable)
}
