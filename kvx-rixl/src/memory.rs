//! Memory that is registered with NIXL.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvx_backend::checksum;
use kvx_backend::error::closed;
use kvx_backend::fabric::{Registrar, Unregister};
use kvx_core::backend::sync::Mutex;
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{Error, ErrorKind, Memory, RegionId, Result};

use crate::agent_lock::AgentLock;
use crate::blob::{Blob, BlobMemory, malformed};
use crate::error::NAME;
use crate::ffi::{MemorySegment, Range};

/// Local memory as NIXL knows it. It finds registrations by address: two regions of one range share
/// one, and ranges that overlap otherwise are refused, because it could not tell them apart.
pub(crate) struct RegisteredRanges {
    agent_lock: Arc<AgentLock>,
    /// Locked by those alone who have the agent's lock, so that nobody waits for it.
    registered: Mutex<HashMap<Range, RangeUse>>,
    /// Foreign agents may know some of it, forever.
    any_told: AtomicBool,
}

#[derive(Clone, Copy, Default)]
struct RangeUse {
    regions: usize,
    /// Foreign agents may have been told of it: nobody can take that back.
    told: bool,
}

/// A local region.
pub(crate) struct Local {
    pub(crate) range: Range,
}

/// The range of some memory, as NIXL understands it: a device by the number that its driver gives
/// it in this process, host memory by 0. Peers name the memory by the same number, which stands in
/// what they are told.
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
            any_told: AtomicBool::new(false),
        }
    }

    fn add(&self, memory: &Arc<Memory>) -> Result<(Range, Vec<u8>)> {
        let range = range_of(memory);
        let locked = self.agent_lock.lock();
        let mut registered = self.registered.lock();
        if !registered.contains_key(&range)
            && let Some(other) = registered.keys().find(|other| other.overlaps(&range))
        {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the region overlaps another of {} bytes at {:#x}, and NIXL cannot tell them apart: register the \
                     whole range once, and use grids on it",
                    other.len, other.address
                ),
            ));
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
                tracing::warn!(%why, "NIXL keeps what it knows of memory that came to no region: so does kvx");
                registered.insert(range, RangeUse::default());
                std::mem::forget(Arc::clone(memory));
            }
        })?;
        registered.entry(range).or_default().regions += 1;
        Ok((range, blob))
    }

    /// A region ends, unless another thread has NIXL: then the reactor is woken when that has let
    /// go. Errors: `StillShared`, if foreign agents may know it; what NIXL answers.
    pub(crate) fn remove(&self, range: &Range) -> Result<Unregister> {
        let Some(locked) = self.agent_lock.try_lock() else { return Ok(Unregister::Later) };
        let mut registered = self.registered.lock();
        let Some(uses) = registered.get_mut(range) else { return Ok(Unregister::Now) };
        if uses.told {
            return Err(Error::new(
                ErrorKind::StillShared,
                "a foreign agent was told of this memory, and NIXL has no way to take that back",
            ));
        }
        uses.regions = uses.regions.saturating_sub(1);
        if uses.regions == 0 {
            // On an error the range stays in the table, because NIXL still has it: the end of the
            // next region there tries again.
            locked.as_ref().ok_or_else(closed)?.deregister(range)?;
            registered.remove(range);
        }
        Ok(Unregister::Now)
    }

    /// Returns whether foreign agents may know some of it.
    pub(crate) fn any_told(&self) -> bool {
        self.any_told.load(Ordering::Acquire)
    }
}

// SAFETY: NIXL keeps what it needs of a registration until `remove`, which the fabric calls when no
// peer reaches it.
unsafe impl Registrar<Local> for RegisteredRanges {
    fn register(&self, _: RegionId, memory: &Arc<Memory>) -> Result<(Local, Vec<u8>)> {
        let (range, blob) = self.add(memory)?;
        Ok((Local { range }, Export { range, blob: blob.into() }.encode()))
    }

    fn foreign_metadata(&self) -> Result<Vec<u8>> {
        let locked = self.agent_lock.lock();
        let mut registered = self.registered.lock();
        let blob = locked.as_ref().ok_or_else(closed)?.whole()?;
        registered.values_mut().for_each(|uses| uses.told = true);
        self.any_told.fetch_or(!registered.is_empty(), Ordering::AcqRel);
        Ok(blob)
    }
}

/// A peer's region, as its metadata tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Export {
    pub(crate) range: Range,
    /// NIXL's own description of it.
    pub(crate) blob: Box<[u8]>,
}

/// The longest description of one region.
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

    /// Errors: `Malformed`, `Incompatible`.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("RIXL region", checksum::strip("RIXL region", bytes)?);
        checksum::check_form(NAME, "region", reader.u8()?, Self::FORM)?;
        let segment = match reader.u8()? {
            0 => MemorySegment::Host,
            1 => MemorySegment::Device,
            other => return Err(reader.malformed(format_args!("no memory has the number {other}"))),
        };
        let range =
            Range { segment, address: reader.u64()?, len: reader.u64()?, device: reader.u64()? };
        let blob = reader.block(MAX_EXPORT)?.into();
        reader.end()?;
        Ok(Export { range, blob })
    }

    /// Returns whether NIXL may be shown it: it speaks of this range of this agent's memory, and of
    /// nothing else. What contradicts what NIXL knows of an agent makes it drop that agent, whoever
    /// said so. Errors: `Malformed`.
    pub(crate) fn is_of(&self, agent: &str) -> Result<()> {
        let said = Blob::read(&self.blob)?;
        let is_it = |there: &BlobMemory<'_>| there.range() == Some(self.range);
        match &said.memory[..] {
            [one] if said.agent == agent && said.connections.is_empty() && is_it(one) => Ok(()),
            _ => Err(malformed("it speaks of something else than the region")),
        }
    }
}

#[cfg(test)]
mod tests {
    use kvx_core::{DeviceAccess as _, DeviceId, MemoryKind};
    use kvx_testkit::TestDevice;

    use super::*;

    #[test]
    fn an_export_travels_whole_or_not_at_all() {
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
    fn nobody_is_kept_waiting_by_the_end_of_a_region() {
        let agent_lock = Arc::new(AgentLock::around(None).unwrap());
        let ranges = RegisteredRanges::new(Arc::clone(&agent_lock));
        let range = Range { segment: MemorySegment::Host, address: 4096, len: 64, device: 0 };
        ranges.registered.lock().insert(range, RangeUse { regions: 2, told: false });
        let locked = agent_lock.lock();
        for _ in 0..3 {
            assert_eq!(ranges.remove(&range).unwrap(), Unregister::Later, "somebody else has NIXL");
        }
        drop(locked);
        assert_eq!(ranges.remove(&range).unwrap(), Unregister::Now);
        assert_eq!(
            ranges.registered.lock()[&range].regions,
            1,
            "what came to nothing has not counted"
        );
    }

    #[test]
    fn a_range_that_nixl_keeps_is_never_reported_as_unregistered() {
        // Without an agent, deregistering fails.
        let ranges = RegisteredRanges::new(Arc::new(AgentLock::around(None).unwrap()));
        let range = Range { segment: MemorySegment::Host, address: 4096, len: 64, device: 0 };
        ranges.registered.lock().insert(range, RangeUse { regions: 1, told: false });
        for _ in 0..3 {
            assert_eq!(ranges.remove(&range).unwrap_err().kind(), ErrorKind::Closed);
        }
        let overlapping = Range { address: 4000, len: 128, ..range };
        let registered = ranges.registered.lock();
        assert!(registered.keys().any(|kept| kept.overlaps(&overlapping)));
    }

    #[test]
    fn a_device_goes_by_its_number_in_this_process() {
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
