//! kvx's own pools: sealed and pre-touched memory files, on huge pages and a NUMA node where the
//! machine provides them.

use std::ffi::c_void;
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::{Backing, Memory, MemoryKind};
use crate::memory::DeviceId;
use crate::{Error, ErrorKind, Result, fork};

const HUGE: usize = 2 << 20;

/// The seals that a file needs before peers may map it.
pub(super) const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

/// The pages that a pool should use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// Base pages.
    Never,
    /// Transparent huge pages, if the kernel has them for shared memory. The default.
    Transparent,
    /// Reserved 2 MiB pages if there are enough, otherwise transparent ones; the properties say
    /// which.
    Prefer,
    /// Reserved 2 MiB pages, or an error.
    Require,
}

/// The page size of a pool's mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageSize {
    /// The machine's base pages, some of them on transparent huge pages.
    Base {
        /// The number of bytes that the kernel maps by transparent huge pages.
        transparent_huge: usize,
    },
    /// Reserved 2 MiB pages.
    Huge2M,
}

/// The properties of a pool, and the reasons for those that were not granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolProperties {
    /// The page size.
    pub pages: PageSize,
    /// The reason why reserved huge pages were not granted, if they were preferred.
    pub huge_refused: Option<String>,
    /// The NUMA node that the pool is bound to.
    pub numa_node: Option<u32>,
    /// True if the pages are locked in memory.
    pub locked: bool,
    /// True if every page was touched before the pool was returned, also those of an adopted file
    /// that lie beyond the memory.
    pub touched: bool,
}

/// The configuration of a pool; see [`Memory::pool`].
///
/// ```
/// # use kvx_core as kvx;
/// let pool = kvx::Memory::pool(1 << 20).build()?;
/// assert_eq!(pool.len(), 1 << 20);
/// assert!(pool.pool_properties().is_some_and(|granted| granted.touched));
/// # Ok::<(), kvx::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct PoolBuilder {
    len: usize,
    huge: HugePages,
    numa_node: Option<u32>,
    lock: bool,
    touch: bool,
}

impl PoolBuilder {
    pub(super) fn new(len: usize) -> Self {
        PoolBuilder { len, huge: HugePages::Transparent, numa_node: None, lock: false, touch: true }
    }

    /// Sets the pages to use.
    pub fn huge_pages(mut self, huge: HugePages) -> Self {
        self.huge = huge;
        self
    }

    /// Binds the pool to a NUMA node.
    pub fn numa_node(mut self, node: u32) -> Self {
        self.numa_node = Some(node);
        self
    }

    /// Locks the pages in memory.
    pub fn lock(mut self, lock: bool) -> Self {
        self.lock = lock;
        self
    }

    /// Sets whether to touch every page now, which is the default. A first touch during a transfer
    /// costs two to fifteen times as much as the copy. Peers over SHM do not map a pool whose pages
    /// were not touched, and read it as slowly as other memory.
    pub fn pre_touch(mut self, touch: bool) -> Self {
        self.touch = touch;
        self
    }

    /// Creates the pool.
    ///
    /// # Errors
    /// - `Invalid` for zero bytes, a size beyond the address space or a NUMA node that does not
    ///   exist.
    /// - `Exhausted` if the machine has too little memory, too few huge pages
    ///   ([`Require`](HugePages::Require)) or too low a lock limit. The message names the limit and
    ///   how to raise it.
    /// - `Native` if the kernel cannot seal the file; `Forked`.
    pub fn build(self) -> Result<Memory> {
        fork::check()?;
        if self.len == 0 {
            return Err(ErrorKind::Invalid.because("a pool of 0 bytes: ask for at least one"));
        }
        let (pool, huge_refused) = match self.huge {
            HugePages::Never | HugePages::Transparent => (PoolMapping::map(self.len, false)?, None),
            HugePages::Require => (PoolMapping::map(self.len, true)?, None),
            HugePages::Prefer => match PoolMapping::map(self.len, true) {
                Ok(pool) => (pool, None),
                Err(error) => (PoolMapping::map(self.len, false)?, Some(error.to_string())),
            },
        };
        let mut pool = pool;
        if matches!(self.huge, HugePages::Transparent | HugePages::Prefer) && !pool.huge {
            // The kernel may have no transparent huge pages: the properties show it.
            pool.advise(Advice::LinuxHugepage).ok();
        }
        if let Some(node) = self.numa_node {
            pool.bind(node)?;
        }
        if self.touch {
            pool.touch()?;
        }
        if self.lock {
            pool.lock()?;
        }
        pool.seal()?;
        pool.granted = PoolProperties {
            pages: pool.pages(),
            huge_refused,
            numa_node: self.numa_node,
            locked: self.lock,
            touched: self.touch,
        };
        Ok(pool.into_memory(self.len))
    }
}

/// A mapped memory file.
pub(super) struct PoolMapping {
    file: OwnedFd,
    base: NonNull<c_void>,
    mapped: usize,
    huge: bool,
    granted: PoolProperties,
    forks: u64,
}

// SAFETY: `Memory` owns this shared mapping and accesses it only by raw copies, which any thread
// may make.
unsafe impl Send for PoolMapping {}
// SAFETY: the methods do not change the mapping's bytes except by atomic accesses, and `Memory`
// copies raw bytes.
unsafe impl Sync for PoolMapping {}

impl PoolMapping {
    fn map(len: usize, huge: bool) -> Result<Self> {
        let page = if huge { HUGE } else { rustix::param::page_size() };
        let mapped = len.checked_next_multiple_of(page).ok_or_else(|| {
            ErrorKind::Invalid
                .because(format!("a pool of {len} bytes is larger than the address space"))
        })?;
        let what = |step: &str| {
            if huge {
                format!(
                    "{step} of {mapped} bytes on 2 MiB pages failed: reserve {} pages with \
                     sysctl vm.nr_hugepages=N, or ask for HugePages::Prefer",
                    mapped / HUGE
                )
            } else {
                format!("{step} of {mapped} bytes failed: free memory, or make the pool smaller")
            }
        };
        let no_room = |step: &str, error: rustix::io::Errno| {
            Error::os(what(step), error).with_kind(ErrorKind::Exhausted)
        };
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        if huge {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        }
        let file = rustix::fs::memfd_create("kvx-pool", flags)
            .map_err(|error| no_room("a memory file", error))?;
        rustix::fs::ftruncate(&file, mapped as u64)
            .map_err(|error| no_room("a memory file", error))?;
        PoolMapping::of(file, mapped, huge).map_err(|error| no_room("a mapping", error))
    }

    /// Maps the first `mapped` bytes of a file, which must be whole pages.
    pub(super) fn of(file: OwnedFd, mapped: usize, huge: bool) -> Result<Self, rustix::io::Errno> {
        // SAFETY: the kernel chooses an unused address, so the new mapping cannot disturb memory of
        // the program.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        }?;
        let base = NonNull::new(base).ok_or(rustix::io::Errno::FAULT)?;
        let granted = PoolProperties {
            pages: PageSize::Base { transparent_huge: 0 },
            huge_refused: None,
            numa_node: None,
            locked: false,
            touched: false,
        };
        let pool = PoolMapping { file, base, mapped, huge, granted, forks: fork::count() };
        // A forked child must not share the pool: a stray write in the child would reach every
        // peer.
        pool.advise(Advice::LinuxDontFork)?;
        Ok(pool)
    }

    pub(super) fn into_memory(self, len: usize) -> Memory {
        Memory {
            base: self.base.as_ptr() as u64,
            len,
            kind: MemoryKind::Host,
            device: DeviceId::HOST,
            read_only: false,
            backing: Backing::Pool(self),
        }
    }

    /// Returns the page size of the mapping.
    fn pages(&self) -> PageSize {
        match self.huge {
            true => PageSize::Huge2M,
            false => PageSize::Base { transparent_huge: self.transparent_huge_bytes() },
        }
    }

    /// Records the properties of an adopted file, whose mapped pages are present now. Pages beyond
    /// them may be missing, and peers do not map such a file.
    pub(super) fn note_found(&mut self) {
        let touched = rustix::fs::fstat(&self.file).is_ok_and(|stat| {
            let bytes = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
            u64::try_from(stat.st_size).is_ok_and(|size| bytes >= size)
        });
        self.granted = PoolProperties { pages: self.pages(), touched, ..self.granted.clone() };
    }

    fn advise(&self, advice: Advice) -> Result<(), rustix::io::Errno> {
        // SAFETY: the range is this pool's own mapping, and no advice that callers pass discards
        // its content.
        unsafe { rustix::mm::madvise(self.base.as_ptr(), self.mapped, advice) }
    }

    fn bind(&self, node: u32) -> Result<()> {
        const MPOL_BIND: libc::c_long = 2;
        let mut mask = [0u64; 16];
        let word = node as usize / 64;
        if word >= mask.len() {
            return Err(ErrorKind::Invalid.because(format!(
                "NUMA node {node} does not exist: see /sys/devices/system/node"
            )));
        }
        mask[word] = 1 << (node % 64);
        // SAFETY: the range is this pool's own mapping, `mask` outlives the call, and the size of
        // the mask is given in bits.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base.as_ptr(),
                self.mapped,
                MPOL_BIND,
                mask.as_ptr(),
                mask.len() * 64 + 1,
                0u32,
            )
        };
        if rc == 0 {
            return Ok(());
        }
        let error = std::io::Error::last_os_error();
        Err(Error::os(
            format!(
                "the pool was not bound to NUMA node {node}: see /sys/devices/system/node for the \
                 nodes of this machine"
            ),
            error,
        )
        .with_kind(ErrorKind::Invalid))
    }

    /// Makes every page present without changing a byte, so that no transfer pays for it.
    pub(super) fn touch(&self) -> Result<()> {
        match self.advise(Advice::LinuxPopulateWrite) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::INVAL) => {
                // Kernels before 5.14 do not know the advice.
                let base = self.base.as_ptr().cast::<u8>();
                for offset in (0..self.mapped).step_by(rustix::param::page_size()) {
                    // SAFETY: `offset` lies inside the mapping, whose bytes are only accessed by
                    // raw or atomic accesses.
                    unsafe { AtomicU8::from_ptr(base.add(offset)) }.fetch_or(0, Ordering::Relaxed);
                }
                Ok(())
            }
            Err(error) => Err(Error::os(
                format!(
                    "the machine has no memory for a pool of {} bytes: free memory, raise the \
                     container's memory limit, or make the pool smaller",
                    self.mapped
                ),
                error,
            )
            .with_kind(ErrorKind::Exhausted)),
        }
    }

    fn lock(&self) -> Result<()> {
        // SAFETY: the range is this pool's own mapping.
        let Err(error) = (unsafe { rustix::mm::mlock(self.base.as_ptr(), self.mapped) }) else {
            return Ok(());
        };
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock)
            .current
            .map_or_else(|| "unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
        Err(Error::os(
            format!(
                "a pool of {} bytes cannot be locked: RLIMIT_MEMLOCK is {limit}; raise it with \
                 `ulimit -l`, LimitMEMLOCK= in the systemd unit, or --ulimit memlock=-1 of the \
                 container",
                self.mapped
            ),
            error,
        )
        .with_kind(ErrorKind::Exhausted))
    }

    /// Fixes the size for ever and prevents new writable mappings, so that a shrunk file cannot
    /// make a reader fault, and peers cannot write.
    pub(super) fn seal(&self) -> Result<()> {
        rustix::fs::fcntl_add_seals(&self.file, SEALS | SealFlags::SEAL).map_err(|error| {
            Error::os("the pool's file could not be sealed: kvx needs Linux 5.1 or newer", error)
        })
    }

    /// Returns the size of the file, which other holders of the file can change until it is sealed.
    pub(super) fn file_size(&self) -> Result<usize> {
        let stat = rustix::fs::fstat(&self.file);
        let stat = stat.map_err(|error| Error::os("fstat of the memory file failed", error))?;
        Ok(usize::try_from(stat.st_size).unwrap_or(0))
    }

    /// Returns the bytes of the mapping on transparent huge pages, as the kernel counts them. To
    /// find them, it reads the entries of every mapping up to this one.
    fn transparent_huge_bytes(&self) -> usize {
        if self.mapped < HUGE {
            return 0;
        }
        let Ok(maps) = File::open("/proc/self/smaps") else { return 0 };
        let start = format!("{:x}-", self.base.as_ptr() as usize);
        let lines = BufReader::new(maps).lines().map_while(Result::ok);
        lines
            .skip_while(|line| !line.starts_with(&start))
            .skip(1)
            .take_while(|line| line.split_whitespace().next().is_some_and(|key| key.ends_with(':')))
            .find_map(|line| line.strip_prefix("ShmemPmdMapped:").map(str::to_owned))
            .and_then(|rest| rest.trim().strip_suffix(" kB")?.trim().parse::<usize>().ok())
            .map_or(0, |kib| kib * 1024)
    }

    pub(super) fn pool_properties(&self) -> &PoolProperties {
        &self.granted
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for PoolMapping {
    fn drop(&mut self) {
        if fork::count() != self.forks {
            // A forked child has no such mapping, and its addresses may hold something else.
            return;
        }
        // SAFETY: this is the pool's own mapping, and `Memory` is dropped, so its address is not
        // used any more.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr(), self.mapped) } {
            tracing::warn!(%error, bytes = self.mapped, "a pool could not be unmapped");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_says_what_it_got() {
        let memory = Memory::pool(4 << 20).huge_pages(HugePages::Prefer).build().unwrap();
        let granted = memory.pool_properties().unwrap();
        assert!(granted.touched && !granted.locked);
        match granted.pages {
            PageSize::Huge2M => assert_eq!(granted.huge_refused, None),
            PageSize::Base { transparent_huge } => {
                assert!(transparent_huge <= 4 << 20);
                let why = granted.huge_refused.as_deref().unwrap();
                assert!(why.contains("vm.nr_hugepages"), "{why}");
            }
        }
    }

    #[test]
    fn a_sealed_pool_cannot_be_resized_or_mapped_for_writing() {
        let memory = Memory::pool(8192).build().unwrap();
        let file = memory.shared_file().unwrap();
        assert!(rustix::fs::ftruncate(file, 0).is_err());
        // SAFETY: the kernel chooses the address of the mapping, which is expected to fail.
        let writable = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                8192,
                ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )
        };
        assert!(writable.is_err());
        memory.copy_in(0, b"the owner still writes").unwrap();
    }

    #[test]
    fn a_node_that_does_not_exist_is_named() {
        let error = Memory::pool(4096).numa_node(900).build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("900"), "{error}");
        assert_eq!(Memory::pool(0).build().unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn a_numa_node_that_exists_is_granted() {
        match Memory::pool(4096).numa_node(0).build() {
            Ok(memory) => assert_eq!(memory.pool_properties().unwrap().numa_node, Some(0)),
            // A kernel without NUMA support says so, and the sentence names the node.
            Err(error) => assert!(error.to_string().contains("NUMA node 0"), "{error}"),
        }
    }
}
