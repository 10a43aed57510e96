//! Sources and sinks of DATA frames: the blocks of one side of a request.

use std::sync::Arc;

use crate::staging::{Fetch, Store};
use kvx_core::backend::{BoundPlan, Extents};
use kvx_core::{ErrorKind, Memory, RegionId, Result};

use crate::tcp::memory::deferred::{Concern, DeferredCompletions, LateAnswer, PendingAccess};
use crate::tcp::memory::regions::{ServedRegion, ServedRegions};
use crate::tcp::memory::stages::DeviceStage;
use crate::tcp::socket::chunk::Chunk;

/// The bytes of blocks to send.
pub(crate) enum Source {
    /// Blocks in host memory, from which the kernel reads directly.
    Host(HostBlocks),
    /// Blocks on a device, which are copied through bounce buffers.
    Device(Box<DeviceSource>),
}

/// A fetch of bytes from a device, and how much of it is in the frame that is being sent.
pub(crate) struct DeviceSource {
    token: u64,
    fetch: Fetch,
    out: usize,
    concern: Concern,
}

impl Source {
    /// Creates a source for blocks on a device, and begins the copies.
    pub(crate) fn fetch(token: u64, mut fetch: Fetch, concern: Concern) -> Self {
        fetch.resume().ok(); // an error is returned again for the first frame
        Source::Device(Box::new(DeviceSource { token, fetch, out: 0, concern }))
    }

    /// Returns the number of bytes that are in no frame yet.
    pub(crate) fn left(&self) -> u64 {
        match self {
            Source::Host(blocks) => blocks.left(),
            Source::Device(fetching) => fetching.fetch.left() - fetching.out as u64,
        }
    }

    /// Returns true if the source touches this region of the owner.
    pub(crate) fn touches(&self, region: RegionId) -> bool {
        match self {
            Source::Host(blocks) => blocks.touches(region),
            Source::Device(fetching) => fetching.concern.touches(region),
        }
    }

    /// Returns the owner's regions in host memory that it touches.
    pub(crate) fn regions(&self) -> Option<&ServedRegions> {
        if let Source::Host(blocks) = self { blocks.regions() } else { None }
    }

    /// Returns the token that wakes the source when it waits for a device.
    pub(crate) fn token(&self) -> Option<u64> {
        match self {
            Source::Host(_) => None,
            Source::Device(fetching) => Some(fetching.token),
        }
    }

    /// Continues after the previous frame was sent. Returns true if bytes for the next frame are
    /// available; if not, and some are left, its token arrives when they are. Returns the device's
    /// error.
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

    /// Adds the next pieces to `chunk`: at most `max` bytes and as many pieces as one call takes.
    /// They stay in place until the next [`resume`](Source::resume).
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
                    chunk.push(slice.as_ptr().cast_mut(), len); // read-only: it is sent
                    room -= len;
                }
                fetching.out = max - room;
            }
        }
    }

    /// Releases the bounce buffers of a source whose peer does not read, if others wait for one,
    /// after `spill` has saved the bytes of the frame that is being sent. If others come later, the
    /// source's token arrives.
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

    /// Stops reading the source, except for copies that a device has begun.
    pub(crate) fn stop(self, deferred: &DeferredCompletions) {
        if let Source::Device(fetching) = self {
            let DeviceSource { token, fetch, concern, .. } = *fetching;
            deferred.add(token, PendingAccess::Fetch(fetch), concern, None);
        }
    }
}

/// The place of received bytes.
pub(crate) enum Sink {
    /// Blocks in host memory, to which the kernel writes directly.
    Host(HostBlocks),
    /// Blocks on a device, which are copied through bounce buffers.
    Device(Box<DeviceSink>),
}

/// A store of received bytes on a device, and the memory that it writes to.
pub(crate) struct DeviceSink {
    token: u64,
    store: Store,
    concern: Concern,
}

impl Sink {
    /// Creates a sink for blocks on a device.
    pub(crate) fn store(token: u64, store: Store, concern: Concern) -> Self {
        Sink::Device(Box::new(DeviceSink { token, store, concern }))
    }

    /// Returns true if the sink touches this region of the owner.
    pub(crate) fn touches(&self, region: RegionId) -> bool {
        match self {
            Sink::Host(blocks) => blocks.touches(region),
            Sink::Device(storing) => storing.concern.touches(region),
        }
    }

    /// Returns the owner's regions in host memory that it touches.
    pub(crate) fn regions(&self) -> Option<&ServedRegions> {
        if let Sink::Host(blocks) = self { blocks.regions() } else { None }
    }

    /// Returns the token that wakes the sink when it waits for a device.
    pub(crate) fn token(&self) -> Option<u64> {
        match self {
            Sink::Host(_) => None,
            Sink::Device(storing) => Some(storing.token),
        }
    }

    /// Adds the places of the next bytes to `chunk`, for at most `max` bytes. Returns false if
    /// there is no place now; its token arrives when there may be one. Returns the device's error.
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

    /// Records that `count` bytes were received in the places of [`fill`](Sink::fill).
    pub(crate) fn took(&mut self, count: usize) {
        if let Sink::Device(storing) = self {
            storing.store.received(count);
        }
    }

    /// Records that no payload is received for the sink now. Returns true if the places that
    /// [`fill`](Sink::fill) returned are invalid from now on.
    pub(crate) fn pause(&mut self) -> bool {
        let Sink::Device(storing) = self else { return false };
        storing.store.pause();
        true
    }

    /// Returns true if all received bytes have landed. Otherwise the stream's token arrives once
    /// they have. Returns the device's error.
    pub(crate) fn has_landed(&mut self) -> Result<bool> {
        let Sink::Device(storing) = self else { return Ok(true) };
        storing.store.room()?; // processes the copies that have ended
        Ok(storing.store.left() == 0)
    }

    /// Stops all writes to the sink's memory, except for copies that a device has begun: `answer`
    /// is sent when they have ended. Returns the answer if it may be sent now.
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

/// Blocks in host memory, which are consumed from the front.
pub(crate) struct HostBlocks {
    memory: BlockMemory,
    cursor: Extents,
}

/// The owner of the blocks' memory, which keeps it alive.
enum BlockMemory {
    /// The initiator's plan.
    Plan(Arc<BoundPlan>),
    /// The owner's regions.
    Served(ServedRegions),
}

impl HostBlocks {
    /// Creates the local side of a part of a plan.
    pub(crate) fn local(plan: Arc<BoundPlan>, cursor: Extents) -> Self {
        HostBlocks { memory: BlockMemory::Plan(plan), cursor }
    }

    /// Creates blocks that a peer requested; the cursor's grids have been checked against the
    /// regions.
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
            // In bounds: grids are checked against their regions before a cursor iterates over
            // them.
            chunk.push(memory.as_ptr().wrapping_add(extent.offset as usize), extent.len as usize);
            room -= extent.len;
        }
    }
}

/// Blocks on one device, to be used as a stream.
pub(crate) struct StagedBlocks {
    stage: Arc<DeviceStage>,
    memories: Vec<Arc<Memory>>,
    extents: Extents,
}

impl StagedBlocks {
    /// Returns the blocks of `extents` in these regions, or `Err(extents)` if they are in host
    /// memory.
    ///
    /// # Errors
    ///
    /// `Unsupported` for regions that do not lie on one stage.
    pub(crate) fn of(
        regions: &[Arc<ServedRegion>],
        extents: Extents,
    ) -> Result<Result<Self, Extents>> {
        let mut numbers =
            regions.iter().map(|served| served.stage.as_ref().map(|stage| stage.number));
        let first = numbers.next().flatten();
        if numbers.any(|number| number != first) {
            return Err(ErrorKind::Unsupported.because(
                "a request names memory of several devices: its initiator must send one request \
                 for each",
            ));
        }
        let Some(stage) = regions.first().and_then(|served| served.stage.clone()) else {
            return Ok(Err(extents));
        };
        let memories = regions.iter().map(|served| Arc::clone(&served.memory)).collect();
        Ok(Ok(StagedBlocks { stage, memories, extents }))
    }

    /// Returns a source for sending on this lane.
    pub(crate) fn source(self, lane: u8, token: u64, concern: Concern) -> Result<Source> {
        let fetch = self.stage.stager(lane).fetch(token, self.memories, self.extents)?;
        Ok(Source::fetch(token, fetch, concern))
    }

    /// Returns a sink for receiving on this lane.
    pub(crate) fn sink(self, lane: u8, token: u64, concern: Concern) -> Result<Sink> {
        let store = self.stage.stager(lane).store(token, self.memories, self.extents)?;
        Ok(Sink::store(token, store, concern))
    }
}
