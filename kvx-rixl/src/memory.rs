//! Memory that is registered with NIXL.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvx_backend::checksum;
use kvx_backend::error::closed;
use kvx_backend::fabric::{Registrar, Unregister};
use kvx_core::backend::sync::Mutex;
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{ErrorKind, Memory, RegionId, Result};

use crate::agent_lock::AgentLock;
use crate::blob::{Blob, BlobMemory, malformed};
use crate::error::NAME;
use crate::ffi::{MemorySegment, Range};

/// The local memory that is registered with NIXL. NIXL finds registrations by address: two regions
/// with the same range share a registration. kvx rejects ranges that overlap otherwise, because
/// NIXL could not distinguish them.
pub(crate) struct RegisteredRanges {
    agent_lock: Arc<AgentLock>,
    /// Locked only while the agent's lock is held, so no thread waits for it.
    registered: Mutex<HashMap<Range, RangeUse>>,
    /// True if foreign agents may know a range, for as long as they run.
    any_published: AtomicBool,
}

#[derive(Clone, Copy, Default)]
struct RangeUse {
    regions: usize,
    /// True if foreign agents may know the range; NIXL cannot revoke their access.
    is_published: bool,
}

/// A local region.
pub(crate) struct Local {
    pub(crate) range: Range,
}

/// Returns the range of memory in NIXL's terms: a device has the number that its driver gives it in
/// this process, host memory has 0. Peers use the same number, which is in the exported metadata.
pub(crate) fn range_of(memory: &Memory) -> Range {
    let device = memory.device_access().map_or(0, |device| u64::from(device.ordinal()));
    let segment = if memory.kind().is_host() { MemorySegment::Host } else { MemorySegment::Device };
    Range { segment, address: memory.address(), len: memory.len() as u64, device }
}

impl RegisteredRanges {
    pub(crate) fn new(agent_lock: Arc<AgentLock>) -> Self {
        RegisteredRanges {
            agent_lock,
            registered: Mutex::default(),
            any_published: AtomicBool::new(false),
        }
    }

    fn add(&self, memory: &Arc<Memory>) -> Result<(Range, Vec<u8>)> {
        let range = range_of(memory);
        let locked = self.agent_lock.lock();
        let mut registered = self.registered.lock();
        if !registered.contains_key(&range)
            && let Some(other) = registered.keys().find(|other| other.overlaps(&range))
        {
            return Err(ErrorKind::Unsupported.because(format!(
                "the region overlaps another of {} bytes at {:#x}, and NIXL cannot distinguish \
                 them: register the whole range once, and use grids on it",
                other.len, other.address
            )));
        }
        let agent = locked.as_ref().ok_or_else(closed)?;
        let is_new = !registered.contains_key(&range);
        if is_new {
            agent.register(&range).map_err(|why| match range.segment {
                MemorySegment::Host => why,
                MemorySegment::Device => why.with_kind(ErrorKind::Unsupported),
            })?;
        }
        let blob = agent.export(&range).inspect_err(|_| {
            if is_new && let Err(why) = agent.deregister(&range) {
                tracing::warn!(%why, "a region failed to register, but NIXL keeps its memory: it is quarantined");
                registered.insert(range, RangeUse::default());
                std::mem::forget(Arc::clone(memory));
            }
        })?;
        registered.entry(range).or_default().regions += 1;
        Ok((range, blob))
    }

    /// Ends one region's use of a range, and deregisters the range with its last region. Returns
    /// `Later` while another thread holds the agent; its release wakes the reactor. Errors:
    /// `StillShared` if foreign agents may know the range; NIXL's.
    pub(crate) fn remove(&self, range: &Range) -> Result<Unregister> {
        let Some(locked) = self.agent_lock.try_lock() else { return Ok(Unregister::Later) };
        let mut registered = self.registered.lock();
        let Some(uses) = registered.get_mut(range) else { return Ok(Unregister::Now) };
        if uses.is_published {
            return Err(ErrorKind::StillShared.because(
                "a foreign agent has the metadata of this memory, and NIXL cannot revoke its \
                 access",
            ));
        }
        uses.regions = uses.regions.saturating_sub(1);
        if uses.regions == 0 {
            // On an error the range stays in the table, because NIXL still has it: the end of the
            // next region there retries.
            locked.as_ref().ok_or_else(closed)?.deregister(range)?;
            registered.remove(range);
        }
        Ok(Unregister::Now)
    }

    /// Returns whether foreign agents may know some range.
    pub(crate) fn any_published(&self) -> bool {
        self.any_published.load(Ordering::Acquire)
    }
}

// SAFETY: NIXL uses a registration until `remove`, which the fabric calls when no peer accesses it
// any more; on an error of `remove` the fabric quarantines the memory.
unsafe impl Registrar<Local> for RegisteredRanges {
    fn register(&self, _: RegionId, memory: &Arc<Memory>) -> Result<(Local, Vec<u8>)> {
        let (range, blob) = self.add(memory)?;
        Ok((Local { range }, Export { range, blob: blob.into() }.encode()))
    }

    fn foreign_metadata(&self) -> Result<Vec<u8>> {
        let locked = self.agent_lock.lock();
        let mut registered = self.registered.lock();
        let blob = locked.as_ref().ok_or_else(closed)?.whole()?;
        registered.values_mut().for_each(|uses| uses.is_published = true);
        self.any_published.fetch_or(!registered.is_empty(), Ordering::AcqRel);
        Ok(blob)
    }
}

/// A peer's region, from its metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Export {
    pub(crate) range: Range,
    /// NIXL's own description of the region.
    pub(crate) blob: Box<[u8]>,
}

/// The maximum length of the description of one region.
const MAX_EXPORT: usize = 64 << 10;

impl Export {
    const FORM: u8 = 1;

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![Self::FORM, u8::from(self.range.segment == MemorySegment::Device)];
        out.put_u64(self.range.address);
        out.put_u64(self.range.len);
        out.put_u64(self.range.device);
        out.put_block(&self.blob);
        checksum::append(out)
    }

    /// Decodes an export. Errors: `Malformed`, `Incompatible`.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("RIXL region", checksum::strip("RIXL region", bytes)?);
        checksum::check_form(NAME, "region", reader.u8()?, Self::FORM)?;
        let segment = match reader.u8()? {
            0 => MemorySegment::Host,
            1 => MemorySegment::Device,
            other => {
                return Err(
                    reader.malformed(format_args!("no kind of memory has the number {other}"))
                );
            }
        };
        let range =
            Range { segment, address: reader.u64()?, len: reader.u64()?, device: reader.u64()? };
        let blob = reader.block(MAX_EXPORT)?.into();
        reader.end()?;
        Ok(Export { range, blob })
    }

    /// Checks that the blob describes this range of this agent's memory, and nothing else. NIXL
    /// drops an agent when any blob contradicts what it knows of the agent, whichever peer sent the
    /// blob. Errors: `Malformed`.
    pub(crate) fn check(&self, agent: &str) -> Result<()> {
        let said = Blob::read(&self.blob)?;
        let is_it = |there: &BlobMemory<'_>| there.range() == Some(self.range);
        match &said.memory[..] {
            [one] if said.agent == agent && said.connections.is_empty() && is_it(one) => Ok(()),
            _ => Err(malformed("it describes something other than the region")),
        }
    }
}

#[cfg(test)]
mod tests {
    use kvx_core::{DeviceAccess as _, DeviceId, MemoryKind};
    use kvx_testkit::TestDevice;

    use super::*;

    #[test]
    fn an_export_is_decoded_unchanged_or_rejected() {
        let range =
            Range { segment: MemorySegment::Device, address: 1 << 40, len: 4096, device: 3 };
        let export = Export { range, blob: b"nixlSerDes|".as_slice().into() };
        let bytes = export.encode();
        assert_eq!(Export::decode(&bytes).unwrap(), export);
        for at in 0..bytes.len() {
            assert!(Export::decode(&bytes[..at]).is_err());
            let mut altered = bytes.clone();
            altered[at] ^= 4;
            assert!(Export::decode(&altered).is_err(), "{at}");
        }
    }

    #[test]
    fn ranges_overlap_on_one_device_only() {
        let range = |address, len| Range { segment: MemorySegment::Host, address, len, device: 0 };
        assert!(range(0, 10).overlaps(&range(9, 1)) && range(9, 1).overlaps(&range(0, 10)));
        assert!(
            !range(0, 10).overlaps(&range(10, 1))
                && range(u64::MAX - 1, 9).overlaps(&range(0, u64::MAX))
        );
        assert!(!range(0, 10).overlaps(&Range { device: 1, ..range(0, 10) }));
    }

    #[test]
    fn ending_a_region_does_not_wait_for_other_threads() {
        let agent_lock = Arc::new(AgentLock::around(None).unwrap());
        let ranges = RegisteredRanges::new(Arc::clone(&agent_lock));
        let range = Range { segment: MemorySegment::Host, address: 4096, len: 64, device: 0 };
        ranges.registered.lock().insert(range, RangeUse { regions: 2, is_published: false });
        let locked = agent_lock.lock();
        for _ in 0..3 {
            assert_eq!(ranges.remove(&range).unwrap(), Unregister::Later, "the agent is in use");
        }
        drop(locked);
        assert_eq!(ranges.remove(&range).unwrap(), Unregister::Now);
        assert_eq!(ranges.registered.lock()[&range].regions, 1, "a postponed call does not count");
    }

    #[test]
    fn a_range_that_nixl_keeps_is_never_reported_as_unregistered() {
        // Without an agent, deregistering fails.
        let ranges = RegisteredRanges::new(Arc::new(AgentLock::around(None).unwrap()));
        let range = Range { segment: MemorySegment::Host, address: 4096, len: 64, device: 0 };
        ranges.registered.lock().insert(range, RangeUse { regions: 1, is_published: false });
        for _ in 0..3 {
            assert_eq!(ranges.remove(&range).unwrap_err().kind(), ErrorKind::Closed);
        }
        let overlapping = Range { address: 4000, len: 128, ..range };
        let registered = ranges.registered.lock();
        assert!(registered.keys().any(|kept| kept.overlaps(&overlapping)));
    }

    #[test]
    fn a_device_has_its_number_in_this_process() {
        let device = TestDevice::new(MemoryKind::Cuda);
        assert_ne!(device.device(), DeviceId::HOST);
        let memory = device.allocate(4096);
        let number = u64::from(device.ordinal());
        let range = Range {
            segment: MemorySegment::Device,
            address: memory.address(),
            len: 4096,
            device: number,
        };
        assert_eq!(range_of(&memory), range);
        let memory = Memory::owned(vec![0; 64]);
        let range =
            Range { segment: MemorySegment::Host, address: memory.address(), len: 64, device: 0 };
        assert_eq!(range_of(&memory), range);
    }
}
