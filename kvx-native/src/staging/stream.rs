//! The common part of fetches and stores: blocks, buffers and copies.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Copies;
use super::pool::{BounceBuffer, Pool};
use kvx_core::backend::sync::Mutex;
use kvx_core::backend::{Direction, Extent, Extents, Piece, Settle, Ticket};
use kvx_core::{DeviceAccess, Error, ErrorKind, Memory, Result};

/// The limit for pieces of one copy; a stream of very small blocks uses its buffers in part.
const MAX_PIECES: usize = 4096;

/// The part of a stream that copies and pools share.
pub(super) struct SharedStream {
    pub(super) token: u64,
    pub(super) wake: Arc<dyn Fn(u64) + Send + Sync>,
    pub(super) events: Mutex<StreamEvents>,
}

/// The events of a stream since its last turn.
#[derive(Default)]
pub(super) struct StreamEvents {
    /// True if the stream waits in the pool's queue, or was granted a buffer.
    pub(super) queued: bool,
    /// The error of the allocation for which the stream waited, until it asks again.
    pub(super) refused: Option<Error>,
    granted: Option<BounceBuffer>,
    /// The copies that have ended, by number, with their buffer if the stream wants it.
    landed: Vec<(u64, Result<Option<BounceBuffer>>)>,
    in_flight: usize,
    lost: bool,
    /// True if the stream takes no more buffers.
    stopped: bool,
}

impl SharedStream {
    pub(super) fn wake(&self) {
        (self.wake)(self.token);
    }

    /// Grants the buffer for which the stream waited. Returns it if the stream has stopped
    /// meanwhile.
    pub(super) fn grant(&self, bounce: BounceBuffer) -> Option<BounceBuffer> {
        let mut events = self.events.lock();
        if events.stopped {
            return Some(bounce);
        }
        events.granted = Some(bounce);
        None
    }

    fn landed(&self, number: u64, result: Result<Option<BounceBuffer>>) {
        let mut events = self.events.lock();
        events.in_flight -= 1;
        let unwanted = if events.stopped {
            Some(result)
        } else {
            events.landed.push((number, result));
            None
        };
        drop(events);
        drop(unwanted);
        self.wake();
    }
}

/// A copy whose ticket the device holds.
struct DeviceCopy {
    stream: Arc<SharedStream>,
    number: u64,
    direction: Direction,
    bounce: Mutex<Option<BounceBuffer>>,
    /// The memories on the device, kept alive until the copy has settled.
    memories: Arc<[Arc<Memory>]>,
}

impl Settle for DeviceCopy {
    fn settled(self: Arc<Self>, result: Result<()>) {
        let bounce = self.bounce.lock().take();
        // A buffer whose bytes have reached the device is not needed any more and is free at once.
        let bounce = bounce.filter(|_| self.direction == Direction::ToHost);
        self.stream.landed(self.number, result.map(|()| bounce));
    }

    fn forgotten(self: Arc<Self>) {
        // Keeps the device's memory alive; the stream's owner handles that the copy never settles.
        std::mem::forget(Arc::clone(&self.memories));
        let bounce = self.bounce.lock().take();
        self.stream.events.lock().lost = true;
        if let Some(bounce) = bounce {
            bounce.lose();
        }
        let error = ErrorKind::Forgotten.because(
            "the device lost a copy: the memory on both sides is quarantined; report this as a bug \
             of its crate",
        );
        self.stream.landed(self.number, Err(error));
    }
}

/// The blocks of a stream that are not in a buffer yet.
pub(super) struct StreamBlocks {
    pub(super) extents: Extents,
    /// Extents that were taken and returned; these come first.
    pub(super) back: VecDeque<Extent>,
}

impl StreamBlocks {
    fn take(&mut self, max: u64) -> Option<Extent> {
        let Some(mut extent) = self.back.pop_front() else { return self.extents.take(max) };
        if extent.len > max {
            self.back.push_front(Extent {
                offset: extent.offset + max,
                len: extent.len - max,
                ..extent
            });
            extent.len = max;
        }
        Some(extent)
    }

    pub(super) fn left(&self) -> u64 {
        self.extents.left() + self.back.iter().map(|extent| extent.len).sum::<u64>()
    }
}

/// The common part of fetches and stores: blocks, buffers and copies.
pub(super) struct Stream {
    pub(super) access: Arc<dyn DeviceAccess>,
    pub(super) depth: usize,
    pub(super) pool: Arc<Pool>,
    pub(super) blocks: StreamBlocks,
    pub(super) shared: Arc<SharedStream>,
    pub(super) memories: Arc<[Arc<Memory>]>,
    /// The blocks of the next copy.
    pub(super) planned: Vec<Extent>,
    /// The same blocks in the form for the device; empty between calls.
    pub(super) pieces: Vec<Piece>,
    /// The copies, in the order of their bytes.
    pub(super) started: VecDeque<StreamCopy>,
    /// The number of the first copy in `started`.
    pub(super) first: u64,
    /// Lists of extents for reuse.
    pub(super) spare: Vec<Vec<Extent>>,
    pub(super) failed: Option<Error>,
}

pub(super) struct StreamCopy {
    pub(super) len: usize,
    /// The extents that the copy reads from a device, in case they must be copied again.
    pub(super) extents: Vec<Extent>,
    pub(super) landed: bool,
    pub(super) bounce: Option<BounceBuffer>,
}

impl Stream {
    /// Processes the events since the last call. Returns the stream's error, each time again.
    pub(super) fn look(&mut self) -> Result<()> {
        let landed = std::mem::take(&mut self.shared.events.lock().landed);
        for (number, result) in landed {
            // A copy that was given up may be older than the first.
            let at = number.checked_sub(self.first).and_then(|at| usize::try_from(at).ok());
            match (result, at.and_then(|at| self.started.get_mut(at))) {
                (Ok(bounce), Some(copy)) => (copy.landed, copy.bounce) = (true, bounce),
                (Ok(_), None) => {}
                (Err(error), _) => {
                    self.failed.get_or_insert(error);
                }
            }
        }
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Removes and returns the first copy, once it has landed.
    pub(super) fn next_landed(&mut self) -> Option<StreamCopy> {
        self.started.front().filter(|copy| copy.landed)?;
        self.first += 1;
        self.started.pop_front()
    }

    /// Returns a buffer, or `None`, in which case the stream is woken when it gets one.
    pub(super) fn buffer(&mut self) -> Result<Option<BounceBuffer>> {
        {
            let mut events = self.shared.events.lock();
            if let Some(granted) = events.granted.take() {
                events.queued = false;
                return Ok(Some(granted));
            }
            if std::mem::replace(&mut events.queued, true) {
                return Ok(None);
            }
        }
        let taken = self.pool.take(&self.shared);
        {
            let mut events = self.shared.events.lock();
            if let Ok(None) = taken {
                // It was allocated at once, or returned meanwhile. `queued` stays as it is: the
                // pool may have told the stream to ask again.
                let granted = events.granted.take();
                events.queued &= granted.is_none();
                return Ok(granted);
            }
            events.queued = false;
        }
        taken.map_err(|error| self.fail(error))
    }

    /// Plans the blocks of the next buffer. Returns the number of their bytes, or `OutOfBounds`.
    pub(super) fn plan(&mut self) -> Result<usize> {
        let (mut at, max) = (0, self.pool.len);
        while at < max && self.planned.len() < MAX_PIECES {
            let Some(extent) = self.blocks.take((max - at) as u64) else { break };
            let len =
                self.memories.get(extent.region as usize).map_or(0, |memory| memory.len() as u64);
            if extent.offset.checked_add(extent.len).is_none_or(|end| end > len) {
                let Extent { region, offset, len: bytes } = extent;
                return Err(self.fail(ErrorKind::OutOfBounds.because(format!(
                    "bytes {offset}..+{bytes} lie outside the {len} bytes of region {region} of a \
                     staged stream"
                ))));
            }
            self.planned.push(extent);
            at += extent.len as usize;
        }
        Ok(at)
    }

    /// Starts the copy of the first `len` planned bytes; the rest is planned again.
    pub(super) fn start(&mut self, direction: Direction, bounce: BounceBuffer, len: usize) {
        let mut at = 0;
        let mut extents = self.spare.pop().unwrap_or_default();
        for mut extent in self.planned.drain(..) {
            let now = extent.len.min((len - at) as u64);
            if now > 0 {
                if direction == Direction::ToHost {
                    extents.push(Extent { len: now, ..extent });
                }
                let device = self.memories[extent.region as usize].address() + extent.offset;
                self.pieces.push(Piece {
                    device,
                    host: bounce.base().wrapping_add(at),
                    len: now as usize,
                });
                at += now as usize;
            }
            if now < extent.len {
                (extent.offset, extent.len) = (extent.offset + now, extent.len - now);
                self.blocks.back.push_back(extent);
            }
        }
        let number = self.first + self.started.len() as u64;
        self.started.push_back(StreamCopy { len, extents, landed: false, bounce: None });
        self.shared.events.lock().in_flight += 1;
        let copy = DeviceCopy {
            stream: Arc::clone(&self.shared),
            number,
            direction,
            bounce: Mutex::new(Some(bounce)),
            memories: Arc::clone(&self.memories),
        };
        // SAFETY: `plan` checked the device side, whose memory the copy keeps alive. The pieces are
        // consecutive in the bounce buffer, which the copy also holds and releases only when it has
        // settled.
        unsafe { self.access.copy(direction, &self.pieces, Ticket::of(Arc::new(copy))) };
        self.pieces.clear();
    }

    /// Gives up all copies, and releases the landed and granted buffers. Their pieces and `copied`
    /// are planned again, before all others.
    pub(super) fn rewind(&mut self, copied: impl Iterator<Item = Vec<Extent>>) {
        let (granted, landed) = {
            let mut events = self.shared.events.lock();
            let granted = events.granted.take();
            events.queued &= granted.is_none();
            (granted, std::mem::take(&mut events.landed))
        };
        for (_, result) in landed {
            if let Err(error) = result {
                self.fail(error);
            }
        }
        drop(granted);
        self.first += self.started.len() as u64;
        let mut again: VecDeque<Extent> = copied.flatten().collect();
        again.extend(self.started.drain(..).flat_map(|copy| copy.extents));
        again.append(&mut self.blocks.back);
        self.blocks.back = again;
    }

    fn fail(&mut self, error: Error) -> Error {
        self.failed.get_or_insert(error).clone()
    }

    pub(super) fn stop(&mut self) {
        self.fail(ErrorKind::Cancelled.because("the staged stream was stopped"));
        let mut events = self.shared.events.lock();
        events.stopped = true;
        let buffers = (events.granted.take(), std::mem::take(&mut events.landed));
        drop(events);
        drop(buffers); // for others
        self.started.clear();
    }

    pub(super) fn copies(&self) -> Copies {
        let events = self.shared.events.lock();
        match (events.lost, events.in_flight) {
            (true, _) => Copies::Lost,
            (false, 0) => Copies::Settled,
            (false, _) => Copies::InFlight,
        }
    }

    /// Returns the number of bytes that are not planned or not copied yet.
    pub(super) fn left(&self) -> u64 {
        let started = self.started.iter().filter(|copy| !copy.landed || copy.bounce.is_some());
        self.blocks.left()
            + self.planned.iter().map(|extent| extent.len).sum::<u64>()
            + started.map(|copy| copy.len as u64).sum::<u64>()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.stop();
    }
}
