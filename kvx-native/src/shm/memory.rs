//! Memory on both sides: local registered regions, and the peer's regions that this end may read.

use std::collections::HashSet;
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvx_backend::control::RegionTable;
use kvx_backend::control::errors::still_shared;
use kvx_core::backend::sync::Mutex;
use kvx_core::backend::{IpcHandle, RegionKey, RegionSpec, Ticket};
use kvx_core::{DeviceAccess, DeviceId, Error, ErrorKind, Memory, MemoryKind, RegionId, Result};
use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::error::{NAME, error};
use super::messages::{Location, RegionAccess};

/// The way in which other processes reach a region, as encoded in the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// A kvx pool all of whose pages exist, whose sealed file is passed on request.
    Pool,
    /// Any other host memory, by `process_vm_readv`.
    Foreign,
    /// Memory of a device, which its driver opens in the other process.
    Device(DeviceId),
}

impl Reach {
    /// Returns how `memory` is reached.
    pub(crate) fn of(memory: &Memory) -> Self {
        // Peers do not map a pool with missing pages, which they would have to pay for.
        let is_filled = memory.pool_properties().is_some_and(|pool| pool.touched);
        match (memory.device_access(), memory.shared_file()) {
            (Some(_), _) => Reach::Device(memory.device()),
            (None, Some(_)) if is_filled => Reach::Pool,
            (None, _) => Reach::Foreign,
        }
    }

    /// Encodes for the metadata how the region is reached.
    pub(crate) fn export(self) -> Vec<u8> {
        match self {
            Reach::Pool => vec![1, 0],
            Reach::Foreign => vec![1, 1],
            Reach::Device(device) => [&[1, 2][..], &device.0].concat(),
        }
    }

    /// Decodes a peer's export. Returns `Malformed` for an invalid one.
    pub(crate) fn import(export: &[u8]) -> Result<Self> {
        match export {
            // Later versions may append more fields.
            [1..=u8::MAX, 0, ..] => Ok(Reach::Pool),
            [1..=u8::MAX, 1, ..] => Ok(Reach::Foreign),
            [1..=u8::MAX, 2, device @ ..] if device.len() >= 16 => {
                Ok(Reach::Device(DeviceId(std::array::from_fn(|at| device[at]))))
            }
            _ => Err(error(
                ErrorKind::Malformed,
                "malformed export of a region: the metadata was altered",
            )),
        }
    }
}

/// A registered region.
#[derive(Debug)]
struct RegionRecord {
    memory: Arc<Memory>,
    /// The driver's handle with which other processes open a device's memory.
    handle: Option<IpcHandle>,
}

/// The local registered regions. The reactor looks them up; any thread may register and revoke.
#[derive(Debug, Default)]
pub(crate) struct Regions(Mutex<RegionTables>);

#[derive(Debug, Default)]
struct RegionTables {
    regions: RegionTable<RegionRecord>,
    /// Regions granted to peers that had not confirmed their release when the transport ended.
    unproven: HashSet<RegionId>,
}

impl Regions {
    pub(crate) fn open(&self, spec: RegionSpec, handle: Option<IpcHandle>) {
        let RegionSpec { id, key, memory } = spec;
        self.0.lock().regions.open(id, key, RegionRecord { memory, handle });
    }

    /// Returns the information that a peer needs to read the memory.
    pub(crate) fn access(&self, id: RegionId, memory: &Memory) -> RegionAccess {
        let handle = self.0.lock().regions.get(id).and_then(|region| region.handle.clone());
        let at = match (Reach::of(memory), handle) {
            (Reach::Device(device), Some(handle)) => Location::Device { device, handle },
            (Reach::Pool, _) => Location::File,
            (Reach::Foreign | Reach::Device(_), _) => Location::Address(memory.address()),
        };
        RegionAccess { len: memory.len() as u64, at }
    }

    /// Refuses a region from now on. Returns its memory, which the caller keeps until peers have
    /// released it. Returns `StillShared` if the transport ended before they had.
    pub(crate) fn revoke(&self, id: RegionId) -> Result<RevokedRegion> {
        let mut table = self.0.lock();
        if table.unproven.contains(&id) {
            return Err(still_shared(id).with_backend(NAME));
        }
        Ok(RevokedRegion { id, _memory: table.regions.revoke(id).map(|region| region.memory) })
    }

    /// Returns the memory of the region with this id, if the peer shows its key. Returns
    /// `Unregistered`, `Revoked` or `WrongKey` otherwise.
    pub(crate) fn check(&self, id: RegionId, key: &RegionKey) -> Result<Arc<Memory>> {
        self.0.lock().regions.check(id, key).map(|region| Arc::clone(&region.memory))
    }

    /// Releases all memory when the transport ends, except for regions that peers may still read,
    /// which are never freed.
    pub(crate) fn close(&self, unproven: impl IntoIterator<Item = RegionId>) {
        let mut table = self.0.lock();
        for id in unproven {
            table.unproven.insert(id);
            std::mem::forget(table.regions.take(id));
        }
        let open = table.regions.drain();
        drop(table);
        drop(open); // may run the drop of an owner of adopted memory
    }
}

/// A region that is being revoked; keeps its memory alive meanwhile.
#[derive(Debug)]
pub(crate) struct RevokedRegion {
    pub(crate) id: RegionId,
    _memory: Option<Arc<Memory>>,
}

/// Leaks a region whose revocation will never be confirmed, so that its memory is never freed.
pub(crate) fn quarantine(region: RevokedRegion, done: Ticket) {
    drop(done);
    std::mem::forget(region);
}

/// A peer's pool, mapped read-only into this process. Each of its pages exists, so that reading
/// them costs this process no memory.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<c_void>,
    mapped: usize,
    _counted: CountedMapping,
}

/// The limit for mappings of peers' pools in this process, over all its agents: half of those that
/// the kernel allows it.
const MAX_MAPPINGS: usize = 32 << 10;
static MAPPINGS: AtomicUsize = AtomicUsize::new(0);

/// A mapping that counts against [`MAX_MAPPINGS`] as long as this lives.
#[derive(Debug)]
struct CountedMapping;

impl CountedMapping {
    /// Returns `Exhausted` above the limit.
    fn new() -> Result<Self> {
        let counted = CountedMapping;
        let before = MAPPINGS.fetch_add(1, Ordering::Relaxed);
        if before < MAX_MAPPINGS {
            return Ok(counted);
        }
        Err(error(
            ErrorKind::Exhausted,
            format!("this process maps {MAX_MAPPINGS} pools of peers already: register fewer"),
        ))
    }
}

impl Drop for CountedMapping {
    fn drop(&mut self) {
        MAPPINGS.fetch_sub(1, Ordering::Relaxed);
    }
}

// SAFETY: a mapping belongs to the process, and any thread may unmap it.
unsafe impl Send for Mapping {}
// SAFETY: methods of a shared `Mapping` return the address, or touch pages by raw reads.
unsafe impl Sync for Mapping {}

/// The seals that a file must have before it is mapped: a fixed size, because a read beyond the end
/// of a shrunk file would kill this process, and no new writers, which also prevents punching holes
/// into it.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

impl Mapping {
    /// Maps the first `len` bytes of a file that a peer passed. Returns `PermissionDenied` for a
    /// file that is unsealed or too short, `Unsupported` for one with missing pages, `Exhausted` if
    /// this process has no address space for the mapping.
    pub(crate) fn of(file: &OwnedFd, len: u64) -> Result<Self> {
        let unfit = |why: String| {
            error(
                ErrorKind::PermissionDenied,
                format!("the file that the peer passed for a region {why}: it is not a kvx pool"),
            )
        };
        let seals =
            rustix::fs::fcntl_get_seals(file).map_err(|_| unfit("is not a memory file".into()))?;
        if !seals.contains(SEALS) {
            return Err(unfit(format!("lacks the seals {:?}", SEALS.difference(seals))));
        }
        let stat = rustix::fs::fstat(file)
            .map_err(|cause| Error::os("cannot read the size of a passed file", cause))?;
        // The file is sealed, so its size cannot change.
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if len == 0 || size < len {
            return Err(unfit(format!("has {size} bytes instead of {len}")));
        }
        let huge = rustix::fs::fstatfs(file).is_ok_and(|fs| fs.f_type == HUGETLBFS_MAGIC);
        let page = match huge {
            true => u64::try_from(stat.st_blksize).unwrap_or(1).max(1),
            false => rustix::param::page_size() as u64,
        };
        let mapped = len.checked_next_multiple_of(page).unwrap_or(size).min(size);
        // Reading a missing page allocates it at this process's expense, and a missing huge page
        // would kill this process if none is in reserve. The seals prevent removing pages later.
        // `lseek` would find the holes, but waits for a lock that the peer's writes to the file
        // hold, also while they wait for a page fault.
        if u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512) < size {
            return Err(error(
                ErrorKind::Unsupported,
                "the peer's pool has pages that are not allocated: its owner must build it with \
                 pre_touch",
            ));
        }
        let counted = CountedMapping::new()?;
        let no_room = |cause: Errno| {
            Error::os(format!("cannot map a peer's pool of {len} bytes: raise ulimit -v"), cause)
                .with_kind(ErrorKind::Exhausted)
        };
        let mapped = usize::try_from(mapped).map_err(|_| no_room(Errno::OVERFLOW))?;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps no memory of the
        // program.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                mapped,
                ProtFlags::READ,
                MapFlags::SHARED,
                file,
                0,
            )
        }
        .map_err(no_room)?;
        let base = NonNull::new(base).ok_or_else(|| no_room(Errno::FAULT))?;
        let mapping = Mapping { base, mapped, _counted: counted };
        // Both are optional: a child after fork does not need the mapping, and huge pages make it
        // faster.
        for advice in [Advice::LinuxDontFork, Advice::LinuxHugepage] {
            // SAFETY: the mapping belongs to this value, and neither advice discards content.
            unsafe { rustix::mm::madvise(mapping.base.as_ptr(), mapped, advice) }.ok();
        }
        Ok(mapping)
    }

    /// Returns the address of the mapping's first byte.
    pub(crate) fn base(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Makes `step` bytes of pages from `from` on present, so that no transfer has to. Returns the
    /// next offset, or `None` if it is done or not possible here.
    pub(crate) fn populate(&self, from: usize, step: usize) -> Option<usize> {
        if from >= self.mapped {
            return None;
        }
        let len = step.min(self.mapped - from);
        // SAFETY: `from..from + len` lies in this value's mapping, and the advice discards no
        // content.
        let touched = unsafe {
            rustix::mm::madvise(self.base.as_ptr().byte_add(from), len, Advice::LinuxPopulateRead)
        };
        // Kernels before 5.14 do not know the advice; then the first transfer makes the pages
        // present.
        touched.ok()?;
        Some(from + len)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping; copies out of it hold an `Arc` of this value, so
        // none is in progress.
        if let Err(cause) = unsafe { rustix::mm::munmap(self.base.as_ptr(), self.mapped) } {
            tracing::warn!(
                error = %cause,
                bytes = self.mapped,
                "SHM: cannot unmap a peer's pool"
            );
        }
    }
}

/// A peer's region that this end may read.
#[derive(Clone, Debug)]
pub(crate) struct PeerRegion {
    pub(crate) id: RegionId,
    pub(crate) len: u64,
    pub(crate) place: CopySource,
}

/// The place from which a copy reads.
#[derive(Clone, Debug)]
pub(crate) struct CopySource {
    /// An address in this process if the memory is mapped here, on the device for device memory,
    /// and otherwise in the peer's process.
    pub(crate) base: u64,
    pub(crate) method: CopyMethod,
}

/// The way in which a peer's memory is read.
#[derive(Clone, Debug)]
pub(crate) enum CopyMethod {
    /// The memory is mapped here as long as this value lives.
    Mapped(Arc<Mapping>),
    /// The memory is only in the peer's process.
    Remote,
    /// The memory is opened on a device as long as this value lives.
    Device(Arc<Memory>),
}

impl PeerRegion {
    /// Maps a region from the file that came with its owner's description. Returns
    /// `PermissionDenied` or `Exhausted`.
    pub(crate) fn of_file(id: RegionId, len: u64, file: Option<OwnedFd>) -> Result<Self> {
        let file = file.ok_or_else(|| {
            error(
                ErrorKind::Exhausted,
                "the file of a peer's pool did not arrive: this process has too many open files; \
                 raise ulimit -n",
            )
        })?;
        let mapping = Mapping::of(&file, len)?;
        let (base, method) = (mapping.base(), CopyMethod::Mapped(Arc::new(mapping)));
        Ok(PeerRegion { id, len, place: CopySource { base, method } })
    }
}

/// Returns the local devices that may be able to open memory of a peer's device: the same device,
/// or otherwise any that may reach it. Returns `Unsupported` if there is none.
pub(crate) fn openers(
    devices: &[Arc<dyn DeviceAccess>],
    kind: Option<MemoryKind>,
    owner: DeviceId,
) -> Result<Vec<&Arc<dyn DeviceAccess>>> {
    let mut openers: Vec<_> =
        devices.iter().filter(|device| kind.is_none_or(|kind| device.kind() == kind)).collect();
    openers.sort_by_key(|device| device.device() != owner);
    if openers.is_empty() {
        return Err(error(
            ErrorKind::Unsupported,
            format!(
                "the peer's memory lies on a device that this agent was not given: build it with \
                 an access to device {:032x} (Builder::device), or use TCP",
                u128::from_be_bytes(owner.0)
            ),
        ));
    }
    Ok(openers)
}

/// Returns the handle with which other processes open memory of a device, or `None` for host
/// memory. May block. Returns the device's error, `Unsupported` for memory that its driver does not
/// share.
pub(crate) fn shared_by_device(memory: &Arc<Memory>) -> Result<Option<IpcHandle>> {
    let Some(access) = memory.device_access() else { return Ok(None) };
    let shared = access.share(memory);
    match shared.map_err(|why| why.with_backend(NAME))? {
        handle if handle.bytes.len() <= IpcHandle::LONGEST => Ok(Some(handle)),
        handle => Err(error(
            ErrorKind::Unsupported,
            format!(
                "the device's handle has {} bytes, but {} are allowed: report this as a bug of its \
                 crate",
                handle.bytes.len(),
                IpcHandle::LONGEST
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use rustix::fs::MemfdFlags;

    use super::*;

    fn file(size: u64, seals: SealFlags) -> OwnedFd {
        file_with(size, 0..size, seals)
    }

    /// Returns a memory file that has only the pages of these bytes, which are written.
    fn file_with(size: u64, pages: Range<u64>, seals: SealFlags) -> OwnedFd {
        let file =
            rustix::fs::memfd_create("kvx-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
                .unwrap();
        rustix::fs::ftruncate(&file, size).unwrap();
        let bytes = vec![0u8; (pages.end - pages.start) as usize];
        assert_eq!(rustix::io::pwrite(&file, &bytes, pages.start), Ok(bytes.len()));
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        file
    }

    #[test]
    fn files_that_are_unsealed_or_too_short_are_never_mapped() {
        for missing in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::FUTURE_WRITE] {
            let refused = Mapping::of(&file(8192, SEALS.difference(missing)), 4096).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{refused}");
        }
        assert_eq!(
            Mapping::of(&file(4096, SEALS), 4097).unwrap_err().kind(),
            ErrorKind::PermissionDenied
        );
        assert_eq!(
            Mapping::of(&file(4096, SEALS), 0).unwrap_err().kind(),
            ErrorKind::PermissionDenied
        );
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert_eq!(Mapping::of(&pipe, 1).unwrap_err().kind(), ErrorKind::PermissionDenied);
        Mapping::of(&file(4096, SEALS), 4096).unwrap();
    }

    #[test]
    fn files_with_missing_pages_are_never_mapped() {
        /// The size of a huge page, which the kernel may use.
        const HALF: u64 = 2 << 20;
        let first = 0..HALF;
        // Also if pages are missing only beyond the region's bytes.
        for (pages, len) in
            [(0..0, HALF), (HALF..2 * HALF, HALF), (first.clone(), 2 * HALF), (first, HALF)]
        {
            let sparse = file_with(2 * HALF, pages.clone(), SEALS);
            let refused = Mapping::of(&sparse, len).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Unsupported, "{pages:?}: {refused}");
            assert!(refused.to_string().contains("pre_touch"), "{refused}");
        }
    }

    #[test]
    fn a_pool_with_missing_pages_is_not_passed_as_a_file() {
        let sparse = Memory::pool(4096).pre_touch(false).build().unwrap();
        assert_eq!(Reach::of(&sparse), Reach::Foreign);
        let [whole, part] = [0..4 << 20, 0..2 << 20].map(|pages| {
            let file = file_with(4 << 20, pages, SealFlags::empty());
            Reach::of(&Memory::adopt_file(file, 2 << 20).unwrap())
        });
        assert_eq!((whole, part), (Reach::Pool, Reach::Foreign));
    }

    #[test]
    fn a_mapped_pool_shows_its_owners_writes() {
        let pool = Memory::pool(3 << 20).build().unwrap();
        let passed = pool.shared_file().unwrap().try_clone_to_owned().unwrap();
        let mapping = Mapping::of(&passed, pool.len() as u64).unwrap();
        let mut at = 0;
        while let Some(next) = mapping.populate(at, 1 << 20) {
            at = next;
        }
        pool.copy_in(2 << 20, b"behind the mapping").unwrap();
        let mut seen = [0; 18];
        // SAFETY: the 18 bytes lie inside the mapping, which has 3 MiB.
        unsafe {
            std::ptr::copy_nonoverlapping(
                (mapping.base() as *const u8).add(2 << 20),
                seen.as_mut_ptr(),
                18,
            )
        };
        assert_eq!(&seen, b"behind the mapping");
    }

    #[test]
    fn wrong_keys_unknown_ids_and_revoked_regions_have_different_errors() {
        let regions = Regions::default();
        let memory = Arc::new(Memory::owned(vec![0; 16]));
        regions.open(RegionSpec { id: RegionId(1), key: RegionKey([1; 16]), memory }, None);
        let kind = |id, key| {
            regions.check(RegionId(id), &RegionKey([key; 16])).map_err(|error| error.kind()).err()
        };
        assert_eq!(kind(1, 1), None);
        assert_eq!(kind(1, 2), Some(ErrorKind::WrongKey));
        assert_eq!(kind(2, 1), Some(ErrorKind::Unregistered));
        regions.revoke(RegionId(1)).unwrap();
        assert_eq!(kind(1, 1), Some(ErrorKind::Revoked));
        regions.close([RegionId(3)]);
        assert_eq!(regions.revoke(RegionId(3)).unwrap_err().kind(), ErrorKind::StillShared);
    }

    #[test]
    fn exports_encode_how_memory_is_reached() {
        for (memory, reach) in [
            (Memory::owned(vec![0; 16]), Reach::Foreign),
            (Memory::pool(4096).build().unwrap(), Reach::Pool),
        ] {
            assert_eq!(Reach::of(&memory), reach);
            assert_eq!(Reach::import(&reach.export()).unwrap(), reach);
            super::super::copy::readable_by_others(&memory).unwrap();
        }
        let device = Reach::Device(DeviceId([9; 16]));
        assert_eq!(Reach::import(&device.export()).unwrap(), device);
        for bad in [&[][..], &[1], &[0, 0], &[1, 2], &[1, 3], &device.export()[..17]] {
            assert_eq!(Reach::import(bad).unwrap_err().kind(), ErrorKind::Malformed);
        }
    }
}
