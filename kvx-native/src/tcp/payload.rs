//! Where the bytes of DATA frames come from and go to: the blocks of one side of a request.

use std::sync::Arc;

use crate::staging::{Fetch, Store};
use kvx_core::{Bound, Extents, RegionId, Result};

use super::chunk::Chunk;
use super::ending::{Concern, DeferredCompletions, LateAnswer, Streaming};
use super::memory::Served;

/// The bytes of blocks, to be sent.
pub(super) enum Source {
    /// In host memory: the kernel takes them from there.
    Host(HostBlocks),
    /// On a device: they come through bounce buffers.
    Device(Box<Fetching>),
}

/// A fetch, and how much of it is in the frame that is going out.
pub(super) struct Fetching {
    token: u64,
    fetch: Fetch,
    out: usize,
    concern: Concern,
}

impl Source {
    /// Blocks on a device; the copies begin now.
    pub(super) fn fetch(token: u64, mut fetch: Fetch, concern: Concern) -> Self {
        fetch.resume().ok(); // what went wrong is said again when the first frame is made
        Source::Device(Box::new(Fetching { token, fetch, out: 0, concern }))
    }

    /// Bytes that are in no frame yet.
    pub(super) fn left(&self) -> u64 {
        match self {
            Source::Host(blocks) => blocks.left(),
            Source::Device(fetching) => fetching.fetch.left() - fetching.out as u64,
        }
    }

    /// Whether it touches a region of the owner's.
    pub(super) fn touches(&self, region: RegionId) -> bool {
        match self {
            Source::Host(blocks) => blocks.touches(region),
            Source::Device(fetching) => fetching.concern.touches(region),
        }
    }

    /// The owner's regions in host memory that it goes to.
    pub(super) fn regions(&self) -> Option<&ServedRegions> {
        if let Source::Host(blocks) = self { blocks.regions() } else { None }
    }

    /// What wakes it when it waits for a device.
    pub(super) fn token(&self) -> Option<u64> {
        match self {
            Source::Host(_) => None,
            Source::Device(fetching) => Some(fetching.token),
        }
    }

    /// The frame before has gone out. Says whether there is something for the next one now; if not, and some is left,
    /// its token comes when there is. Errors: the device's.
    pub(super) fn resume(&mut self) -> Result<bool> {
        match self {
            Source::Host(blocks) => Ok(blocks.left() > 0),
            Source::Device(fetching) => {
                let Fetching { fetch, out, .. } = &mut **fetching;
                fetch.sent(std::mem::take(out));
                fetch.resume()?;
                Ok(!fetch.bytes().is_empty())
            }
        }
    }

    /// Moves the next pieces into `chunk`: at most `max` bytes and as many pieces as one call takes. They stay in place
    /// until the next [`resume`](Source::resume).
    pub(super) fn gather(&mut self, chunk: &mut Chunk, max: usize) {
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

    /// Its peer does not read: gives its bounce buffers back if others wait for one, after `spill` has put the bytes of
    /// the frame that is going out elsewhere. If they come later, its token does too.
    pub(super) fn make_way(&mut self, spill: impl FnOnce()) {
        let Source::Device(fetching) = self else { return };
        let Fetching { fetch, out, .. } = &mut **fetching;
        if fetch.is_in_the_way() {
            if *out > 0 {
                spill();
                fetch.sent(std::mem::take(out));
            }
            fetch.rewind();
        }
    }

    /// Nothing of it is read any more, but for copies that a device has begun.
    pub(super) fn stop(self, ending: &DeferredCompletions) {
        if let Source::Device(fetching) = self {
            let Fetching { token, fetch, concern, .. } = *fetching;
            ending.add(token, Streaming::Fetch(fetch), concern, None);
        }
    }
}

/// Where bytes belong that are received.
pub(super) enum Sink {
    /// In host memory: the kernel puts them there.
    Host(HostBlocks),
    /// On a device: they go through bounce buffers.
    Device(Box<Storing>),
}

/// A store.
pub(super) struct Storing {
    token: u64,
    store: Store,
    concern: Concern,
}

impl Sink {
    /// Blocks on a device.
    pub(super) fn store(token: u64, store: Store, concern: Concern) -> Self {
        Sink::Device(Box::new(Storing { token, store, concern }))
    }

    /// Whether it touches a region of the owner's.
    pub(super) fn touches(&self, region: RegionId) -> bool {
        match self {
            Sink::Host(blocks) => blocks.touches(region),
            Sink::Device(storing) => storing.concern.touches(region),
        }
    }

    /// The owner's regions in host memory that it goes to.
    pub(super) fn regions(&self) -> Option<&ServedRegions> {
        if let Sink::Host(blocks) = self { blocks.regions() } else { None }
    }

    /// What wakes it when it waits for a device.
    pub(super) fn token(&self) -> Option<u64> {
        match self {
            Sink::Host(_) => None,
            Sink::Device(storing) => Some(storing.token),
        }
    }

    /// Moves the places of the next bytes into `chunk`, for at most `max` bytes. False: there is no place now, and its
    /// token comes when there may be. Errors: the device's.
    pub(super) fn fill(&mut self, chunk: &mut Chunk, max: usize) -> Result<bool> {
        match self {
            Sink::Host(blocks) => blocks.gather(chunk, max),
            Sink::Device(storing) => {
                let Some(room) = storing.store.room()? else { return Ok(false) };
                chunk.push(room.as_mut_ptr(), room.len().min(max));
            }
        }
        Ok(true)
    }

    /// So many bytes came to where [`fill`](Sink::fill) said.
    pub(super) fn took(&mut self, count: usize) {
        if let Sink::Device(storing) = self {
            storing.store.received(count);
        }
    }

    /// Nothing comes for it now. Says whether the chunk that it filled names places that are another's by now.
    pub(super) fn pause(&mut self) -> bool {
        let Sink::Device(storing) = self else { return false };
        storing.store.pause();
        true
    }

    /// Whether all that was received is where it belongs. If not, its token comes. Errors: the device's.
    pub(super) fn has_landed(&mut self) -> Result<bool> {
        let Sink::Device(storing) = self else { return Ok(true) };
        storing.store.room()?; // takes in the copies that have ended
        Ok(storing.store.left() == 0)
    }

    /// Nothing more goes into it, but for copies that a device has begun: `answer` goes out when they have ended. It
    /// comes back when it may go out now.
    pub(super) fn stop(
        self,
        ending: &DeferredCompletions,
        answer: Option<LateAnswer>,
    ) -> Option<LateAnswer> {
        match self {
            Sink::Host(_) => answer,
            Sink::Device(storing) => {
                let Storing { token, store, concern } = *storing;
                ending.add(token, Streaming::Store(store), concern, answer)
            }
        }
    }
}

/// Blocks in host memory, worked off from the front.
pub(super) struct HostBlocks {
    memory: BlockMemory,
    cursor: Extents,
}

/// Regions of the owner's, in the order of a request.
pub(super) type ServedRegions = Arc<[Arc<Served>]>;

/// What keeps the blocks' memory alive.
enum BlockMemory {
    /// The initiator's: the plan.
    Plan(Arc<Bound>),
    /// The owner's.
    Served(ServedRegions),
}

impl HostBlocks {
    /// The local side of a part of a plan.
    pub(super) fn local(plan: Arc<Bound>, cursor: Extents) -> Self {
        HostBlocks { memory: BlockMemory::Plan(plan), cursor }
    }

    /// Blocks that a peer asked for; the cursor's grids have been checked against the regions.
    pub(super) fn served(regions: Vec<Arc<Served>>, cursor: Extents) -> Self {
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
