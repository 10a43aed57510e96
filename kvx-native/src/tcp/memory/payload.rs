//! Sources and sinks of DATA frames: the blocks of one side of a request.

use std::sync::Arc;

use crate::staging::{Fetch, Store};
use kvx_core::backend::{BoundPlan, Extents};
use kvx_core::{Error, ErrorKind, Memory, RegionId, Result};

use crate::tcp::memory::deferred::{Concern, DeferredCompletions, LateAnswer, PendingAccess};
use crate::tcp::memory::regions::{ServedRegion, ServedRegions};
use crate::tcp::memory::stages::DeviceStage;
use crate::tcp::socket::chunk::Chunk;

/// The bytes of blocks, to be sent.
pub(crate) enum Source {
    /// In host memory: the kernel takes them from there.
    Host(HostBlocks),
    /// On a device: they come through bounce buffers.
    Device(Box<DeviceSource>),
}

/// A fetch, and how much of it is in the frame that is going out.
pub(crate) struct DeviceSource {
    token: u64,
    fetch: Fetch,
    out: usize,
    concern: Concern,
}

impl Source {
    /// Blocks on a device; the copies begin now.
    pub(crate) fn fetch(token: u64, mut fetch: Fetch, concern: Concern) -> Self {
        fetch.resume().ok(); // what went wrong is said again when the first frame is made
        Source::Device(Box::new(DeviceSource { token, fetch, out: 0, concern }))
    }

    /// Bytes that are in no frame yet.
    pub(crate) fn left(&self) -> u64 {
        match self {
            Source::Host(blocks) => blocks.left(),
            Source::Device(fetching) => fetching.fetch.left() - fetching.out as u64,
        }
    }

    /// Returns true if it touches a region of the owner's.
    pub(crate) fn touches(&self, region: RegionId) -> bool {
        match self {
            Source::Host(blocks) => blocks.touches(region),
            Source::Device(fetching) => fetching.concern.touches(region),
        }
    }

    /// The owner's regions in host memory that it touches.
    pub(crate) fn regions(&self) -> Option<&ServedRegions> {
        if let Source::Host(blocks) = self { blocks.regions() } else { None }
    }

    /// The token that wakes it when it waits for a device.
    pub(crate) fn token(&self) -> Option<u64> {
        match self {
            Source::Host(_) => None,
            Source::Device(fetching) => Some(fetching.token),
        }
    }

    /// The frame before has gone out. Returns whether there is something for the next one now; if
    /// not, and some is left, its token comes when there is. Errors: the device's.
    pub(crate) fn resume(&mut self) -> Result<bool> {
        match self {
            Source::Host(blocks) => Ok(blocks.left() > 0),
            Source::Device(fetching) => {
                let DeviceSource { fetch, out, .. } = &mut **fetching;
                fetch.sent(std::mem::take(out));
                fetch.resume()?;
                Ok(!fetch.bytes().is_empty())
            }
        }
    }

    /// Moves the next pieces into `chunk`: at most `max` bytes and as many pieces as one call
    /// takes. They stay in place until the next [`resume`](Source::resume).
    pub(crate) fn gather(&mut self, chunk: &mut Chunk, max: usize) {
        match self {
            Source::Host(blocks) => blocks.gather(chunk, max),
            Source::Device(fetching) => {
                let mut room = max;
                for slice in fetching.fetch.slices() {
                    let len = slice.len().min(room);
                    if len == 0 || chunk.is_full() {
                        break;
                    }
                    chunk.push(slice.as_ptr().cast_mut(), len); // read only: it is sent
                    room -= len;
                }
                fetching.out = max - room;
            }
        }
    }

    /// Its peer does not read: gives its bounce buffers back if others wait for one, after `spill`
    /// has put the bytes of the frame that is going out elsewhere. If they come later, its token
    /// does too.
    pub(crate) fn make_way(&mut self, spill: impl FnOnce()) {
        let Source::Device(fetching) = self else { return };
        let DeviceSource { fetch, out, .. } = &mut **fetching;
        if fetch.is_in_the_way() {
            if *out > 0 {
                spill();
                fetch.sent(std::mem::take(out));
            }
            fetch.rewind();
        }
    }

    /// Stops reading it, but for copies that a device has begun.
    pub(crate) fn stop(self, deferred: &DeferredCompletions) {
        if let Source::Device(fetching) = self {
            let DeviceSource { token, fetch, concern, .. } = *fetching;
            deferred.add(token, PendingAccess::Fetch(fetch), concern, None);
        }
    }
}

/// The place of bytes that are received.
pub(crate) enum Sink {
    /// In host memory: the kernel puts them there.
    Host(HostBlocks),
    /// On a device: they go through bounce buffers.
    Device(Box<DeviceSink>),
}

/// A store.
pub(crate) struct DeviceSink {
    token: u64,
    store: Store,
    concern: Concern,
}

impl Sink {
    /// Blocks on a device.
    pub(crate) fn store(token: u64, store: Store, concern: Concern) -> Self {
        Sink::Device(Box::new(DeviceSink { token, store, concern }))
    }

    /// Returns true if it touches a region of the owner's.
    pub(crate) fn touches(&self, region: RegionId) -> bool {
        match self {
            Sink::Host(blocks) => blocks.touches(region),
            Sink::Device(storing) => storing.concern.touches(region),
        }
    }

    /// The owner's regions in host memory that it touches.
    pub(crate) fn regions(&self) -> Option<&ServedRegions> {
        if let Sink::Host(blocks) = self { blocks.regions() } else { None }
    }

    /// The token that wakes it when it waits for a device.
    pub(crate) fn token(&self) -> Option<u64> {
        match self {
            Sink::Host(_) => None,
            Sink::Device(storing) => Some(storing.token),
        }
    }

    /// Moves the places of the next bytes into `chunk`, for at most `max` bytes. False: there is no
    /// place now, and its token comes when there may be. Errors: the device's.
    pub(crate) fn fill(&mut self, chunk: &mut Chunk, max: usize) -> Result<bool> {
        match self {
            Sink::Host(blocks) => blocks.gather(chunk, max),
            Sink::Device(storing) => {
                let Some(room) = storing.store.room()? else { return Ok(false) };
                chunk.push(room.as_mut_ptr(), room.len().min(max));
            }
        }
        Ok(true)
    }

    /// Notes that so many bytes were received where [`fill`](Sink::fill) said.
    pub(crate) fn took(&mut self, count: usize) {
        if let Sink::Device(storing) = self {
            storing.store.received(count);
        }
    }

    /// Notes that no payload is received for it now. Returns true if the places that it gave are
    /// not its own any more.
    pub(crate) fn pause(&mut self) -> bool {
        let Sink::Device(storing) = self else { return false };
        storing.store.pause();
        true
    }

    /// Returns true if all that was received is where it belongs. If not, its token comes. Errors:
    /// the device's.
    pub(crate) fn has_landed(&mut self) -> Result<bool> {
        let Sink::Device(storing) = self else { return Ok(true) };
        storing.store.room()?; // takes in the copies that have ended
        Ok(storing.store.left() == 0)
    }

    /// Stops all writes into it, apart from copies that a device has begun: `answer` is sent when
    /// they have ended. Returns the answer if it may be sent now.
    pub(crate) fn stop(
        self,
        deferred: &DeferredCompletions,
        answer: Option<LateAnswer>,
    ) -> Option<LateAnswer> {
        match self {
            Sink::Host(_) => answer,
            Sink::Device(storing) => {
                let DeviceSink { token, store, concern } = *storing;
                deferred.add(token, PendingAccess::Store(store), concern, answer)
            }
        }
    }
}

/// Blocks in host memory, worked off from the front.
pub(crate) struct HostBlocks {
    memory: BlockMemory,
    cursor: Extents,
}

/// The owner of the blocks' memory, which keeps it alive.
enum BlockMemory {
    /// The initiator's: the plan.
    Plan(Arc<BoundPlan>),
    /// The owner's.
    Served(ServedRegions),
}

impl HostBlocks {
    /// The local side of a part of a plan.
    pub(crate) fn local(plan: Arc<BoundPlan>, cursor: Extents) -> Self {
        HostBlocks { memory: BlockMemory::Plan(plan), cursor }
    }

    /// Blocks that a peer asked for; the cursor's grids have been checked against the regions.
    pub(crate) fn served(regions: Vec<Arc<ServedRegion>>, cursor: Extents) -> Self {
        HostBlocks { memory: BlockMemory::Served(regions.into()), cursor }
    }

    fn left(&self) -> u64 {
        self.cursor.left()
    }

    fn regions(&self) -> Option<&ServedRegions> {
        match &self.memory {
            BlockMemory::Served(regions) => Some(regions),
            BlockMemory::Plan(_) => None,
        }
    }

    fn touches(&self, region: RegionId) -> bool {
        matches!(&self.memory, BlockMemory::Served(regions) if regions.iter().any(|served| served.id == region))
    }

    fn gather(&mut self, chunk: &mut Chunk, max: usize) {
        let mut room = max as u64;
        while room > 0
            && !chunk.is_full()
            && let Some(extent) = self.cursor.take(room)
        {
            let memory = match &self.memory {
                BlockMemory::Plan(plan) => &plan.local(extent.region).memory,
                BlockMemory::Served(regions) => &regions[extent.region as usize].memory,
            };
            debug_assert!(extent.offset + extent.len <= memory.len() as u64);
            // In bounds: grids are checked against their regions before a cursor walks them.
            chunk.push(memory.as_ptr().wrapping_add(extent.offset as usize), extent.len as usize);
            room -= extent.len;
        }
    }
}

/// Blocks on one device, to become a stream.
pub(crate) struct StagedBlocks {
    stage: Arc<DeviceStage>,
    memories: Vec<Arc<Memory>>,
    extents: Extents,
}

impl StagedBlocks {
    /// The blocks of `extents` in these regions; `Err(extents)`: they are host memory.
    ///
    /// # Errors
    /// `Unsupported` for regions that do not lie on one stage.
    pub(crate) fn of(
        regions: &[Arc<ServedRegion>],
        extents: Extents,
    ) -> Result<Result<Self, Extents>> {
        let mut numbers =
            regions.iter().map(|served| served.stage.as_ref().map(|stage| stage.number));
        let first = numbers.next().flatten();
        if numbers.any(|number| number != first) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "a request names memory of several devices: its initiator should have made several of it",
            ));
        }
        let Some(stage) = regions.first().and_then(|served| served.stage.clone()) else {
            return Ok(Err(extents));
        };
        let memories = regions.iter().map(|served| Arc::clone(&served.memory)).collect();
        Ok(Ok(StagedBlocks { stage, memories, extents }))
    }

    /// To be sent on this lane.
    pub(crate) fn source(self, lane: u8, token: u64, concern: Concern) -> Result<Source> {
        let fetch = self.stage.stager(lane).fetch(token, self.memories, self.extents)?;
        Ok(Source::fetch(token, fetch, concern))
    }

    /// To be received on this lane.
    pub(crate) fn sink(self, lane: u8, token: u64, concern: Concern) -> Result<Sink> {
        let store = self.stage.stager(lane).store(token, self.memories, self.extents)?;
        Ok(Sink::store(token, store, concern))
    }
}
