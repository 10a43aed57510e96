//! Memory on both sides: our registered regions, and what peers let us read.

use std::collections::HashSet;
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

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

/// How other processes reach a region; travels in the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// A kvx pool: its sealed file is passed on request.
    Pool,
    /// Any other host memory: by `process_vm_readv`.
    Foreign,
    /// Memory of a device: its driver opens it in the other process.
    Device(DeviceId),
}

impl Reach {
    /// How `memory` is reached.
    pub(crate) fn of(memory: &Memory) -> Self {
        match (memory.device_access(), memory.shared_file()) {
            (Some(_), _) => Reach::Device(memory.device()),
            (None, Some(_)) => Reach::Pool,
            (None, None) => Reach::Foreign,
        }
    }

    /// As it travels.
    pub(crate) fn export(self) -> Vec<u8> {
        match self {
            Reach::Pool => vec![1, 0],
            Reach::Foreign => vec![1, 1],
            Reach::Device(device) => [&[1, 2][..], &device.0].concat(),
        }
    }

    /// From a peer's metadata. Errors: `Malformed`.
    pub(crate) fn import(export: &[u8]) -> Result<Self> {
        match export {
            // Later versions may say more behind these.
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
    /// How a device's memory is opened elsewhere.
    handle: Option<IpcHandle>,
}

/// Our registered regions. The reactor looks them up; registering and revoking change them from any
/// thread.
#[derive(Debug, Default)]
pub(crate) struct Regions(Mutex<RegionTables>);

#[derive(Debug, Default)]
struct RegionTables {
    regions: RegionTable<RegionRecord>,
    /// Granted to peers that had not confirmed their release when the transport ended.
    unproven: HashSet<RegionId>,
}

impl Regions {
    pub(crate) fn open(&self, spec: RegionSpec, handle: Option<IpcHandle>) {
        let RegionSpec { id, key, memory } = spec;
        self.0.lock().regions.open(id, key, RegionRecord { memory, handle });
    }

    /// What a peer is told about memory that it may read.
    pub(crate) fn access(&self, id: RegionId, memory: &Memory) -> RegionAccess {
        let handle = self.0.lock().regions.get(id).and_then(|region| region.handle.clone());
        let at = match (Reach::of(memory), handle) {
            (Reach::Device(device), Some(handle)) => Location::Device { device, handle },
            (Reach::Pool, _) => Location::File,
            (Reach::Foreign | Reach::Device(_), _) => Location::Address(memory.address()),
        };
        RegionAccess { len: memory.len() as u64, at }
    }

    /// Refuses it from now on, and returns the memory, to be kept until peers have released it.
    /// Errors: `StillShared` if the transport ended before they had.
    pub(crate) fn revoke(&self, id: RegionId) -> Result<RevokedRegion> {
        let mut table = self.0.lock();
        if table.unproven.contains(&id) {
            return Err(still_shared(id).with_backend(NAME));
        }
        Ok(RevokedRegion { id, _memory: table.regions.revoke(id).map(|region| region.memory) })
    }

    /// The memory behind a number and the key that a peer shows. Errors: `Unregistered`,
    /// `RevokedRegion`, `WrongKey`.
    pub(crate) fn check(&self, id: RegionId, key: &RegionKey) -> Result<Arc<Memory>> {
        self.0.lock().regions.check(id, key).map(|region| Arc::clone(&region.memory))
    }

    /// Releases all memory when the transport ends, apart from regions that peers may still read,
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

/// A region that is being revoked, and what keeps its memory meanwhile.
#[derive(Debug)]
pub(crate) struct RevokedRegion {
    pub(crate) id: RegionId,
    _memory: Option<Arc<Memory>>,
}

/// A revocation whose end will never be known: the memory is never freed.
pub(crate) fn quarantine(region: RevokedRegion, done: Ticket) {
    drop(done);
    std::mem::forget(region);
}

/// A peer's pool in our address space, for reading only.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<c_void>,
    mapped: usize,
    /// Whether every page exists, so that looking at them all costs no memory.
    filled: bool,
}

// SAFETY: a mapping belongs to the process, and any thread may unmap it.
unsafe impl Send for Mapping {}
// SAFETY: methods of a shared `Mapping` return the address, or touch pages by raw reads.
unsafe impl Sync for Mapping {}

/// The seals that a file must have before it is mapped: a fixed size (a read beyond a shrunk file
/// would kill this process), and no new writers, which also prevents holes from being punched into
/// it.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

impl Mapping {
    /// Maps the first `len` bytes of a file that a peer passed. Errors: `PermissionDenied` for a
    /// file that is not sealed or too short, `Exhausted` if this process has no address space for
    /// the mapping.
    pub(crate) fn of(file: &OwnedFd, len: u64) -> Result<Self> {
        let unfit = |why: String| {
            error(
                ErrorKind::PermissionDenied,
                format!("the file that the peer passed for a region {why}: it is no kvx pool"),
            )
        };
        let seals =
            rustix::fs::fcntl_get_seals(file).map_err(|_| unfit("is no memory file".into()))?;
        if !seals.contains(SEALS) {
            return Err(unfit(format!("lacks the seals {:?}", SEALS.difference(seals))));
        }
        let stat = rustix::fs::fstat(file)
            .map_err(|cause| Error::os("a passed file cannot be looked at", cause))?;
        // Sealed: what is read here stays true.
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if len == 0 || size < len {
            return Err(unfit(format!("has {size} bytes where {len} were named")));
        }
        let page =
            u64::try_from(stat.st_blksize).unwrap_or(1).max(rustix::param::page_size() as u64);
        let mapped = len.checked_next_multiple_of(page).unwrap_or(size).min(size);
        let huge = rustix::fs::fstatfs(file).is_ok_and(|fs| fs.f_type == HUGETLBFS_MAGIC);
        let filled = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512) >= mapped;
        if huge && !filled {
            // A page that is missing when it is first read would kill this process if none is in
            // reserve.
            return Err(error(
                ErrorKind::Unsupported,
                "the peer's pool lies on huge pages that were never touched: its owner must build it with pre_touch",
            ));
        }
        let no_room = |cause: Errno| {
            Error::os(
                format!("a peer's pool of {len} bytes could not be mapped: raise ulimit -v"),
                cause,
            )
            .with_kind(ErrorKind::Exhausted)
        };
        let mapped = usize::try_from(mapped).map_err(|_| no_room(Errno::OVERFLOW))?;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs no memory of the
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
        let mapping = Mapping { base, mapped, filled };
        // Neither is needed to be right: a child after fork has no use for it, and huge pages make
        // it faster.
        for advice in [Advice::LinuxDontFork, Advice::LinuxHugepage] {
            // SAFETY: our own mapping, and neither advice discards content.
            unsafe { rustix::mm::madvise(mapping.base.as_ptr(), mapped, advice) }.ok();
        }
        Ok(mapping)
    }

    /// Its first byte.
    pub(crate) fn base(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Makes the pages from `from` on present, `step` bytes of them, so that no transfer pays for
    /// that. The offset to go on from; `None`: done, or not possible here.
    pub(crate) fn populate(&self, from: usize, step: usize) -> Option<usize> {
        if !self.filled || from >= self.mapped {
            return None;
        }
        let len = step.min(self.mapped - from);
        // SAFETY: `from..from + len` lies in our own mapping, and the advice discards no content.
        let touched = unsafe {
            rustix::mm::madvise(self.base.as_ptr().byte_add(from), len, Advice::LinuxPopulateRead)
        };
        // Kernels before 5.14 do not know the advice: then the first transfer pays.
        touched.ok()?;
        Some(from + len)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping; copies out of it hold an `Arc` of this, so none is
        // under way.
        if let Err(cause) = unsafe { rustix::mm::munmap(self.base.as_ptr(), self.mapped) } {
            tracing::warn!(error = %cause, bytes = self.mapped, "SHM: a peer's pool could not be unmapped");
        }
    }
}

/// A region of a peer that we may read.
#[derive(Clone, Debug)]
pub(crate) struct PeerRegion {
    pub(crate) id: RegionId,
    pub(crate) len: u64,
    pub(crate) place: CopySource,
}

/// Where a copy reads from.
#[derive(Clone, Debug)]
pub(crate) struct CopySource {
    /// An address in this process if it is mapped here, on the device, else in the peer's process.
    pub(crate) base: u64,
    pub(crate) method: CopyMethod,
}

/// What a peer's memory is for us.
#[derive(Clone, Debug)]
pub(crate) enum CopyMethod {
    /// Mapped here, as long as somebody holds this.
    Mapped(Arc<Mapping>),
    /// The peer's own.
    Remote,
    /// Opened on a device, as long as somebody holds this.
    Device(Arc<Memory>),
}

impl PeerRegion {
    /// From what the owner said, and the file that came with it. Errors: `PermissionDenied`,
    /// `Exhausted`, `Malformed`; what a device says that does not open it, `Unsupported` mostly.
    pub(crate) fn of(
        id: RegionId,
        access: RegionAccess,
        file: Option<&OwnedFd>,
        devices: &[Arc<dyn DeviceAccess>],
    ) -> Result<Self> {
        let len = access.len;
        let place = match (access.at, file) {
            (Location::Address(base), _) => CopySource { base, method: CopyMethod::Remote },
            (Location::Device { device, handle }, _) => {
                let open_device_memory = open_device_memory(devices, device, &handle, len)?;
                CopySource {
                    base: open_device_memory.address(),
                    method: CopyMethod::Device(Arc::new(open_device_memory)),
                }
            }
            (Location::File, Some(file)) => {
                let mapping = Mapping::of(file, len)?;
                CopySource { base: mapping.base(), method: CopyMethod::Mapped(Arc::new(mapping)) }
            }
            (Location::File, None) => {
                return Err(error(
                    ErrorKind::Exhausted,
                    "the file of a peer's pool did not arrive: this process has too many open files, raise ulimit -n",
                ));
            }
        };
        Ok(PeerRegion { id, len, place })
    }
}

/// Returns the local devices that may open memory of a peer's device: the same one, or else any
/// that may reach it. Errors: `Unsupported` if there is none.
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
                "the peer's memory lies on a device that this agent was not given: build it with an access to device \
                 {:032x} (Builder::device), or use TCP",
                u128::from_be_bytes(owner.0)
            ),
        ));
    }
    Ok(openers)
}

fn open_device_memory(
    devices: &[Arc<dyn DeviceAccess>],
    owner: DeviceId,
    handle: &IpcHandle,
    len: u64,
) -> Result<Memory> {
    let len = usize::try_from(len)
        .map_err(|_| error(ErrorKind::Malformed, "a region beyond the address space"))?;
    let mut refused = None;
    for device in openers(devices, None, owner)? {
        match Arc::clone(device).open(owner, handle, len) {
            Ok(memory) => return Ok(memory),
            // The first is the likeliest: what it says tells most.
            Err(why) => refused = refused.or(Some(why)),
        }
    }
    let why = refused
        .unwrap_or_else(|| error(ErrorKind::Unsupported, "no device opens the peer's memory"));
    Err(why.with_backend(NAME))
}

/// How other processes open memory of a device; `None` for host memory. May block. Errors: the
/// device's, `Unsupported` for memory that its driver does not share.
pub(crate) fn shared_by_device(memory: &Memory) -> Result<Option<IpcHandle>> {
    let Some(access) = memory.device_access() else { return Ok(None) };
    let shared = access.share(memory.address(), memory.len());
    match shared.map_err(|why| why.with_backend(NAME))? {
        handle if handle.bytes.len() <= IpcHandle::LONGEST => Ok(Some(handle)),
        handle => Err(error(
            ErrorKind::Unsupported,
            format!(
                "the device's handle has {} bytes, {} are allowed: report this as a bug of its crate",
                handle.bytes.len(),
                IpcHandle::LONGEST
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::MemfdFlags;

    use super::*;

    fn file(size: u64, seals: SealFlags) -> OwnedFd {
        let file =
            rustix::fs::memfd_create("kvx-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
                .unwrap();
        rustix::fs::ftruncate(&file, size).unwrap();
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        file
    }

    #[test]
    fn files_that_are_not_sealed_or_too_short_are_never_mapped() {
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
    fn a_pool_is_mapped_and_shows_what_its_owner_writes() {
        let pool = Memory::pool(3 << 20).build().unwrap();
        let passed = pool.shared_file().unwrap().try_clone_to_owned().unwrap();
        let mapping = Mapping::of(&passed, pool.len() as u64).unwrap();
        let mut at = 0;
        while let Some(next) = mapping.populate(at, 1 << 20) {
            at = next;
        }
        pool.copy_in(2 << 20, b"behind the mapping").unwrap();
        let mut seen = [0; 18];
        // SAFETY: 18 bytes inside the mapping, which has 3 MiB.
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
    fn keys_numbers_and_revocations_are_told_apart() {
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
    fn exports_say_how_memory_is_reached() {
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
