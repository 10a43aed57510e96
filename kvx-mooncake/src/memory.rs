//! Regions: their registration with the engine, and their export to peers.

use std::collections::{BTreeMap, btree_map};
use std::sync::{Arc, Weak};

use kvx_backend::error::closed;
use kvx_backend::fabric::Registrar;
use kvx_core::backend::sync::Mutex;
use kvx_core::backend::wire::Writer;
use kvx_core::{ErrorKind, Memory, MemoryKind, RegionId, Result};

use crate::ffi::Engine;

/// A local region, and the registered range that contains it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Local {
    pub(crate) region: RegionId,
    range: u64,
}

/// Memory that is registered with the engine. The engine rejects overlapping ranges, but kvx's
/// regions may share memory.
#[derive(Debug, Default)]
pub(crate) struct RegisteredRanges {
    /// Held while the engine registers or unregisters a range, which may query a server: another
    /// region of the same memory must wait.
    turn: Mutex<()>,
    /// Held only briefly.
    known: Mutex<RangeTable>,
}

#[derive(Debug, Default)]
struct RangeTable {
    /// By address.
    ranges: BTreeMap<u64, Range>,
    /// The number of unregistered regions that earlier operations may still access.
    ending: usize,
}

#[derive(Debug)]
struct Range {
    end: u64,
    regions: usize,
    /// True if agents that are not kvx may have its metadata.
    is_published: bool,
    /// The memory of the region that the range was registered for, which may end before other
    /// regions in it.
    memory: Arc<Memory>,
}

impl RegisteredRanges {
    /// Registers a region's memory, unless it is within a registered range.
    fn add(
        &self,
        region: RegionId,
        memory: &Arc<Memory>,
        register: impl FnOnce() -> Result<()>,
    ) -> Result<Local> {
        let _turn = self.turn.lock();
        let address = memory.address();
        let end = address.saturating_add(memory.len() as u64);
        let mut known = self.known.lock();
        if let Some((begin, range)) = known.ranges.range_mut(..=address).next_back()
            && end <= range.end
        {
            range.regions += 1;
            return Ok(Local { region, range: *begin });
        }
        if known.ranges.range(..end).next_back().is_some_and(|(_, range)| range.end > address) {
            let why = "Mooncake registers no byte twice, and this region shares bytes with another \
                       without lying within it: register one that contains both first";
            return Err(ErrorKind::Unsupported.because(why));
        }
        drop(known);
        register()?;
        let range = Range { end, regions: 1, is_published: false, memory: Arc::clone(memory) };
        self.known.lock().ranges.insert(address, range);
        Ok(Local { region, range: address })
    }

    /// Records that agents that are not kvx get the metadata of all registered ranges.
    fn publish(&self) {
        self.known.lock().ranges.values_mut().for_each(|range| range.is_published = true);
    }

    /// Returns whether no memory is accessible through the engine.
    pub(crate) fn is_empty(&self) -> bool {
        let known = self.known.lock();
        known.ranges.is_empty() && known.ending == 0
    }

    /// Removes a region, and unregisters its range if no other region is in it. If the engine fails
    /// to unregister the range, the range and its memory stay.
    pub(crate) fn remove(
        self: &Arc<Self>,
        local: &Local,
        unregister: impl FnOnce(u64) -> Result<()>,
    ) -> Result<EndingRegion> {
        let _turn = self.turn.lock();
        if self.known.lock().ranges.get(&local.range).is_some_and(|range| range.regions <= 1) {
            unregister(local.range).inspect_err(|_| {
                // The engine still has the range, so the end of the next region in it retries.
                if let Some(range) = self.known.lock().ranges.get_mut(&local.range) {
                    range.regions = 0;
                }
            })?;
        }
        let mut known = self.known.lock();
        known.ending += 1;
        let mut ending =
            EndingRegion { ranges: Arc::clone(self), is_published: false, memory: None };
        if let btree_map::Entry::Occupied(mut range) = known.ranges.entry(local.range) {
            ending.is_published = range.get().is_published;
            range.get_mut().regions = range.get().regions.saturating_sub(1);
            if range.get().regions == 0 {
                ending.memory = Some(range.remove().memory);
            }
        }
        Ok(ending)
    }
}

/// A region that admits no new operation. It is dropped when earlier operations have ended; until
/// then the engine may access its memory.
#[derive(Debug)]
pub(crate) struct EndingRegion {
    ranges: Arc<RegisteredRanges>,
    is_published: bool,
    memory: Option<Arc<Memory>>,
}

impl EndingRegion {
    /// Ends the region. Errors: `StillShared` if agents that are not kvx may have an operation in
    /// flight that accesses it.
    pub(crate) fn end(mut self) -> Result<()> {
        if !self.is_published {
            return Ok(());
        }
        std::mem::forget(self.memory.take()); // it may belong to a region that ended earlier
        let why = "an agent that is not kvx has the metadata of this region, and cannot confirm that it has released \
                   it: its memory is kept";
        Err(ErrorKind::StillShared.because(why))
    }
}

impl Drop for EndingRegion {
    fn drop(&mut self) {
        self.ranges.known.lock().ending -= 1;
        drop(self.memory.take());
    }
}

/// A peer's region.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) address: u64,
}

impl Remote {
    /// Decodes a region from the peer's metadata. Errors: `Malformed`.
    pub(crate) fn read(export: &[u8]) -> Result<Self> {
        match export.try_into() {
            Ok(address) => Ok(Remote { address: u64::from_le_bytes(address) }),
            Err(_) => Err(ErrorKind::Malformed.because(format!(
                "malformed region: Mooncake's regions have 8 bytes, this one has {}",
                export.len()
            ))),
        }
    }
}

/// Registers memory with the engine, which lives as long as the fabric.
pub(crate) struct MemoryRegistrar {
    pub(crate) engine: Weak<Engine>,
    pub(crate) ranges: Arc<RegisteredRanges>,
    /// The node of host memory that the operator has set.
    pub(crate) node: Option<String>,
}

// SAFETY: peers access registered memory by address. Its range keeps it, and core keeps the memory
// of each region in the range, until `Fabric::unregister` has reported that no peer accesses it any
// more.
unsafe impl Registrar<Local> for MemoryRegistrar {
    fn register(&self, region: RegionId, memory: &Arc<Memory>) -> Result<(Local, Vec<u8>)> {
        let engine = self.engine.upgrade().ok_or_else(closed)?;
        let address = memory.address();
        let location = location(memory, self.node.as_deref());
        let local = self.ranges.add(region, memory, || {
            // SAFETY: the range keeps this memory until it has been unregistered, or forever.
            unsafe { engine.register(address, memory.len(), &location) }
        })?;
        let mut export = Vec::with_capacity(8);
        export.put_u64(address);
        Ok((local, export))
    }

    fn foreign_metadata(&self) -> Result<Vec<u8>> {
        let engine = self.engine.upgrade().ok_or_else(closed)?;
        self.ranges.publish();
        Ok(engine.name().as_bytes().to_vec())
    }
}

/// Returns the location of memory in the engine's notation: the device's number in this process;
/// the node that the operator has set; or any, which the engine resolves.
fn location(memory: &Memory, node: Option<&str>) -> String {
    match memory.device_access() {
        Some(device) if memory.kind() == MemoryKind::Cuda => format!("cuda:{}", device.ordinal()),
        Some(_) => "*".to_owned(),
        None => node.unwrap_or("*").to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use kvx_core::DeviceAccess as _;
    use kvx_testkit::TestDevice;

    use super::*;

    #[test]
    fn device_memory_has_the_devices_number_and_host_memory_the_configured_node() {
        let device = TestDevice::new(MemoryKind::Cuda);
        let (on_device, on_host) = (device.allocate(4096), Memory::owned(vec![0; 64]));
        for node in [None, Some("cpu:1")] {
            assert_eq!(location(&on_device, node), format!("cuda:{}", device.ordinal()));
            assert_eq!(location(&on_host, node), node.unwrap_or("*"));
        }
    }

    /// Returns some bytes of a page.
    fn part(page: &Arc<Memory>, from: usize, len: usize) -> Arc<Memory> {
        // SAFETY: within the page, which lives as long as this memory.
        Arc::new(unsafe { Memory::adopt(page.as_ptr().add(from), len, Arc::clone(page)) })
    }

    #[test]
    fn memory_of_several_regions_is_registered_once_and_unregistered_last() {
        let ranges = Arc::new(RegisteredRanges::default());
        let page = Arc::new(Memory::owned(vec![0; 4096]));
        let add = |from, len| ranges.add(RegionId(1), &part(&page, from, len), || Ok(()));
        let shared = |from, len| {
            ranges.add(RegionId(2), &part(&page, from, len), || panic!("it is already registered"))
        };
        let whole = add(1000, 100).expect("free");
        let inner = shared(1020, 80).expect("it is within the first");
        let _neighbour = add(1100, 50).expect("it begins where the first ends");
        for (from, len) in [(990, 20), (1090, 20), (900, 1000)] {
            assert_eq!(add(from, len).unwrap_err().kind(), ErrorKind::Unsupported, "{from} {len}");
        }
        let left =
            ranges.remove(&whole, |_| panic!("another region lies in it")).expect("one is left");
        left.end().expect("not published");
        let mut unregistered = None;
        let removed = ranges.remove(&inner, |address| {
            unregistered = Some(address);
            Ok(())
        });
        removed.expect("the last").end().expect("not published");
        assert_eq!(unregistered, Some(page.address() + 1000));
        let known = add(1050, 10).expect("free again");
        ranges.publish();
        let mut unregistered = false;
        let removed = ranges.remove(&known, |_| {
            unregistered = true;
            Ok(())
        });
        assert_eq!(
            removed.expect("the engine gave it up").end().unwrap_err().kind(),
            ErrorKind::StillShared
        );
        assert!(unregistered, "no new operation is admitted");
        let refused =
            ranges.add(RegionId(3), &part(&page, 3000, 1), || Err(ErrorKind::Native.because("no")));
        assert!(refused.is_err());
        add(3000, 1).expect("a rejected region is not kept");
    }

    /// Returns a region within another that has ended, and a reference to that one's memory.
    fn outlived() -> (Arc<RegisteredRanges>, Local, Weak<Memory>) {
        let ranges = Arc::new(RegisteredRanges::default());
        let page = Arc::new(Memory::owned(vec![0; 4096]));
        let (outer, inner) = (part(&page, 0, 4096), part(&page, 1024, 64));
        let whole = ranges.add(RegionId(1), &outer, || Ok(())).expect("free");
        let within = ranges.add(RegionId(2), &inner, || Ok(())).expect("it is within the first");
        ranges.remove(&whole, |_| Ok(())).expect("it ends").end().expect("not published");
        (ranges, within, Arc::downgrade(&outer))
    }

    #[test]
    fn memory_stays_while_the_engine_has_it_or_an_operation_may_be_in_flight() {
        let (ranges, within, kept) = outlived();
        assert_eq!(
            kept.strong_count(),
            1,
            "the engine has all of it registered, for the inner region"
        );
        let kept_by_engine = ranges.remove(&within, |_| Err(ErrorKind::Native.because("no")));
        assert!(kept_by_engine.is_err() && kept.strong_count() == 1 && !ranges.is_empty());
        let ending = ranges.remove(&within, |_| Ok(())).expect("now it does");
        assert!(kept.strong_count() == 1 && !ranges.is_empty(), "an operation may be in flight");
        ending.end().expect("not published");
        assert!(kept.strong_count() == 0 && ranges.is_empty());
    }

    #[test]
    fn a_range_that_the_engine_keeps_is_never_reported_as_unregistered() {
        let (ranges, within, _kept) = outlived();
        let refuse = |_| Err(ErrorKind::Native.because("no"));
        ranges.remove(&within, refuse).expect_err("the engine keeps the range");
        let page = Arc::new(Memory::owned(vec![0; 4096]));
        // SAFETY: never used; only the address matters.
        let same = Arc::new(unsafe { Memory::adopt(within.range as *mut u8, 64, page) });
        let next = ranges
            .add(RegionId(3), &same, || panic!("it is registered"))
            .expect("it is within the range");
        ranges.remove(&next, refuse).expect_err("the engine still keeps the range");
        ranges.remove(&next, |_| Ok(())).expect("unregistered").end().expect("not published");
        assert!(ranges.is_empty());
    }

    #[test]
    fn memory_that_was_published_for_a_region_within_it_is_kept_forever() {
        let (ranges, within, kept) = outlived();
        ranges.publish();
        let why = ranges.remove(&within, |_| Ok(())).expect("it ends").end().unwrap_err();
        assert_eq!((why.kind(), kept.strong_count()), (ErrorKind::StillShared, 1));
    }

    #[test]
    fn an_address_is_encoded_in_eight_bytes() {
        assert_eq!(
            Remote::read(&0x7f00_1234_u64.to_le_bytes()).expect("an address").address,
            0x7f00_1234
        );
        for bad in [&[][..], &[0; 7], &[0; 9]] {
            assert_eq!(Remote::read(bad).unwrap_err().kind(), ErrorKind::Malformed);
        }
    }
}
