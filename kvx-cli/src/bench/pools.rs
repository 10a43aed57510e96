//! The memory of one side.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use kvx::Memory;
use serde::{Deserialize, Serialize};

use super::points::Backing;
use crate::Result;

/// What a side has of each kind of memory that the points need.
#[derive(Default)]
pub(crate) struct Pools {
    kvx: Option<Arc<Memory>>,
    foreign: Option<Arc<Memory>>,
}

/// How another process of this host reaches a pool without kvx.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Place {
    /// Its process.
    pub(crate) process: u32,
    /// Its file there, for a pool of kvx's own.
    pub(crate) file: Option<i32>,
    /// Its address there.
    pub(crate) base: u64,
    /// Its size.
    pub(crate) len: usize,
}

impl Pools {
    /// Of these sizes, every page present; none of a kind whose size is zero.
    pub(crate) fn of(kvx: u64, foreign: u64) -> Result<Self> {
        let pool = |len| Memory::pool(len as usize).build().map(Arc::new);
        let foreign = if foreign > 0 { Some(Arc::new(anonymous(foreign as usize)?)) } else { None };
        Ok(Pools { kvx: if kvx > 0 { Some(pool(kvx)?) } else { None }, foreign })
    }

    pub(crate) fn get(&self, backing: Backing) -> Result<&Arc<Memory>> {
        let memory = match backing {
            Backing::Kvx => &self.kvx,
            Backing::Foreign => &self.foreign,
        };
        memory.as_ref().ok_or_else(|| "this side has no memory of that kind".into())
    }

    /// Each with the name under which it is registered.
    pub(crate) fn all(&self) -> impl Iterator<Item = (Backing, &Arc<Memory>)> {
        let kvx = self.kvx.iter().map(|memory| (Backing::Kvx, memory));
        kvx.chain(self.foreign.iter().map(|memory| (Backing::Foreign, memory)))
    }

    pub(crate) fn place(&self, backing: Backing) -> Result<Place> {
        let memory = self.get(backing)?;
        let file = memory.shared_file().map(|file| file.as_raw_fd());
        Ok(Place { process: std::process::id(), file, base: memory.address(), len: memory.len() })
    }
}

/// Memory as an engine might bring it along: anonymous, on transparent huge pages where the kernel gives them.
fn anonymous(len: usize) -> Result<Memory> {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(format!("{len} bytes of memory: {}", std::io::Error::last_os_error()).into());
    }
    // SAFETY: advice on the mapping just made. Without huge pages it fails, and nothing depends on it.
    unsafe { libc::madvise(base, len, libc::MADV_HUGEPAGE) };
    // SAFETY: the mapping is `len` bytes that nobody else knows of.
    unsafe { std::ptr::write_bytes(base.cast::<u8>(), 1, len) };
    // SAFETY: the mapping stays until its owner is dropped, and nobody takes references into it.
    Ok(unsafe { Memory::adopt(base.cast(), len, Mapping { base: base as u64, len }) })
}

struct Mapping {
    base: u64,
    len: usize,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `anonymous`, unmapped once, when nobody can touch it any more.
        unsafe { libc::munmap(self.base as *mut libc::c_void, self.len) };
    }
}
