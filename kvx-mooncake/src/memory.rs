//! Regions: what the engine knows of them, and what peers are told.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use kvx_core::fabric::Registrar;
use kvx_core::wire::Writer;
use kvx_core::{Error, Kind, Memory, MemoryKind, RegionId, Result};

use crate::ffi::Engine;

/// A region of ours: the range in which the engine knows it.
#[derive(Debug)]
pub(crate) struct Local {
    range: u64,
}

/// What is registered with the engine, by address. It takes no byte twice, and kvx's regions may share memory.
#[derive(Debug, Default)]
pub(crate) struct Ranges(Mutex<BTreeMap<u64, Range>>);

#[derive(Debug)]
struct Range {
    end: u64,
    regions: usize,
    /// Agents that are not kvx may have been told of it.
    told: bool,
}

impl Ranges {
    /// Registers a range, unless it lies in one that is registered. The lock is held across the engine's call: another
    /// region of the same memory must not come between.
    fn add(&self, address: u64, len: usize, register: impl FnOnce() -> Result<()>) -> Result<Local> {
        let mut ranges = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let end = address.saturating_add(len as u64);
        if let Some((begin, range)) = ranges.range_mut(..=address).next_back()
            && end <= range.end
        {
            range.regions += 1;
            return Ok(Local { range: *begin });
        }
        if ranges.range(..end).next_back().is_some_and(|(_, range)| range.end > address) {
            let why = "Mooncake takes no memory twice, and this overlaps another region's without lying in it: register \
                       the larger one first";
            return Err(Error::new(Kind::Unsupported, why));
        }
        register()?;
        ranges.insert(address, Range { end, regions: 1, told: false });
        Ok(Local { range: address })
    }

    /// Agents that are not kvx may reach what is registered now.
    fn tell(&self) {
        let mut ranges = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ranges.values_mut().for_each(|range| range.told = true);
    }

    /// Whether the engine knows of no memory.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Unregisters the range of a region when no other lies in it. Errors: `StillShared` when agents that are not kvx may
    /// have begun something that reaches it.
    pub(crate) fn remove(&self, local: &Local, unregister: impl FnOnce(u64) -> Result<()>) -> Result<()> {
        let mut ranges = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(range) = ranges.get_mut(&local.range) else { return Ok(()) };
        range.regions -= 1;
        let told = range.told;
        if range.regions == 0 {
            ranges.remove(&local.range);
            unregister(local.range)?;
        }
        if !told {
            return Ok(());
        }
        let why = "an agent that is not kvx was told of this region, and cannot be asked whether it has let go: its memory \
                   is kept";
        Err(Error::new(Kind::StillShared, why))
    }
}

/// A region of the peer.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) address: u64,
}

impl Remote {
    /// From what the peer's metadata says. Errors: `Malformed`.
    pub(crate) fn read(export: &[u8]) -> Result<Self> {
        match export.try_into() {
            Ok(address) => Ok(Remote { address: u64::from_le_bytes(address) }),
            Err(_) => Err(Error::new(
                Kind::Malformed,
                format!("malformed region: Mooncake's have 8 bytes, and this one has {}", export.len()),
            )),
        }
    }
}

/// Registers memory with the engine, which lives as long as the fabric.
pub(crate) struct Enrolment {
    pub(crate) engine: Weak<Engine>,
    pub(crate) ranges: Arc<Ranges>,
    /// Where the operator says that host memory lies.
    pub(crate) node: Option<String>,
}

// SAFETY: what is registered is reached by address; core keeps the memory until `Fabric::unregister` has returned.
unsafe impl Registrar<Local> for Enrolment {
    fn register(&self, _: RegionId, memory: &Arc<Memory>) -> Result<(Local, Vec<u8>)> {
        let engine = self.engine.upgrade();
        let engine = engine.ok_or_else(|| Error::new(Kind::Closed, "the transport has been shut down"))?;
        let address = memory.address();
        let location = location(memory, self.node.as_deref());
        let local = self.ranges.add(address, memory.len(), || {
            // SAFETY: core keeps the memory of each region until it has been unregistered, or for ever.
            unsafe { engine.register(address, memory.len(), &location) }
        })?;
        let mut export = Vec::with_capacity(8);
        export.put_u64(address);
        Ok((local, export))
    }

    fn foreign_metadata(&self) -> Result<Vec<u8>> {
        let engine = self.engine.upgrade();
        let engine = engine.ok_or_else(|| Error::new(Kind::Closed, "the transport has been shut down"))?;
        self.ranges.tell();
        Ok(engine.name().as_bytes().to_vec())
    }
}

/// Where memory lies, in the engine's words: on the device of this number in this process; on the node that the operator
/// names; or wherever the engine finds it.
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
    fn a_device_is_named_by_its_number_and_host_memory_by_the_node_that_the_operator_says() {
        let device = TestDevice::new(MemoryKind::Cuda);
        let (there, here) = (device.allocate(4096), Memory::owned(vec![0; 64]));
        for node in [None, Some("cpu:1")] {
            assert_eq!(location(&there, node), format!("cuda:{}", device.ordinal()));
            assert_eq!(location(&here, node), node.unwrap_or("*"));
        }
    }

    #[test]
    fn memory_of_several_regions_is_registered_once_and_unregistered_last() {
        let ranges = Ranges::default();
        let add = |address, len| ranges.add(address, len, || Ok(()));
        let shared = |address, len| ranges.add(address, len, || panic!("it is registered already"));
        let whole = add(1000, 100).expect("free");
        let inner = shared(1020, 80).expect("it lies in the first");
        let _neighbour = add(1100, 50).expect("it begins where the first ends");
        for (address, len) in [(990, 20), (1090, 20), (900, 1000)] {
            assert_eq!(add(address, len).unwrap_err().kind(), Kind::Unsupported, "{address} {len}");
        }
        ranges.remove(&whole, |_| panic!("another region lies in it")).expect("one is left");
        let mut unregistered = None;
        let removed = ranges.remove(&inner, |address| {
            unregistered = Some(address);
            Ok(())
        });
        removed.expect("the last");
        assert_eq!(unregistered, Some(1000));
        let known = add(1050, 10).expect("free again");
        ranges.tell();
        let mut unregistered = false;
        let removed = ranges.remove(&known, |_| {
            unregistered = true;
            Ok(())
        });
        assert_eq!(removed.unwrap_err().kind(), Kind::StillShared);
        assert!(unregistered, "nothing new is let in");
        assert!(ranges.add(5000, 1, || Err(Error::new(Kind::Native, "no"))).is_err());
        add(5000, 1).expect("what was refused is not kept");
    }

    #[test]
    fn an_address_travels_in_eight_bytes() {
        assert_eq!(Remote::read(&0x7f00_1234_u64.to_le_bytes()).expect("an address").address, 0x7f00_1234);
        for bad in [&[][..], &[0; 7], &[0; 9]] {
            assert_eq!(Remote::read(bad).unwrap_err().kind(), Kind::Malformed);
        }
    }
}
