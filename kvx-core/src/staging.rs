//! The staging adaptor: device memory for transports that move bytes with the CPU, through pinned bounce buffers.
//!
//! A [`Stager`] belongs to one machine (a [`Progress`](crate::reactor::Progress), on Linux) and one device's
//! [`DeviceAccess`]. The machine makes a [`Fetch`] for blocks that it is to send and a [`Store`] for blocks that it
//! is to receive; both are streams of bytes in the order of their [`Extents`], and neither ever blocks. Several bounce
//! buffers of one stream are in flight at a time, so that copying and sending overlap.
//!
//! Sending, on each turn of the machine; all bytes are sent when nothing is [`left`](Fetch::left):
//!
//! ```text
//! loop {
//!     fetch.resume()?; // an error: the stream has failed; stop it
//!     if fetch.bytes().is_empty() { break }
//!     match socket.write(fetch.bytes()) { Ok(n) => fetch.sent(n), WouldBlock => break }
//! }
//! ```
//!
//! Receiving; all bytes are on the device when nothing is [`left`](Store::left):
//!
//! ```text
//! while let Some(room) = store.room()? {
//!     match socket.read(room) { Ok(n) => store.received(n), WouldBlock => { store.pause(); break } }
//! }
//! ```
//!
//! When a stream can go on, because a copy has ended or a buffer has come free, its token is handed to the function
//! that the stager was made with: it tells the machine to give that stream a turn. It is called on any thread,
//! perhaps in the middle of a call into this module and so of the machine's own turn, without any lock: let it submit
//! a command. It may come for nothing, and once more after a stream is dropped.
//!
//! **Who may settle.** A transfer, or a revocation, that concerns the device memory of a stream may settle only when
//! [`copies`](Fetch::copies) of a stopped or finished stream says [`Settled`](Copies::Settled); at
//! [`Lost`](Copies::Lost) its ticket must be dropped: the device may still touch the memory. Dropping a stream frees
//! nothing early: each copy keeps its buffer and its memory.
//!
//! **Limits.** Fetches and stores have a pool of buffers each. With one pool two agents that read from each other could
//! fill theirs with bytes to be sent and have none left to receive the other's. Streams that wait for a buffer get it
//! in the order in which they asked. A receiving stream whose socket is dry gives its buffer back when others wait
//! ([`Store::pause`]); a sending one keeps at most [`Buffers::depth`] of them while its peer does not read.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Weak};

use crate::memory::{Direction, Piece};
use crate::sync::Mutex;
use crate::ticket::Settle;
use crate::{DeviceAccess, Error, Extent, Extents, Kind, Memory, Result, Ticket, quarantine};

/// The most pieces of one copy: a stream of very small blocks uses its buffers in part.
const MAX_PIECES: usize = 4096;

/// How many bounce buffers there are, and how large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// Bytes of one.
    pub len: usize,
    /// The most of them for fetches, and again for stores. Made when first needed.
    pub count: usize,
    /// The most that one stream has in use at a time.
    pub depth: usize,
}

impl Default for Buffers {
    fn default() -> Self {
        Buffers { len: 1 << 20, count: 16, depth: 4 }
    }
}

/// Where the copies of a stream stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copies {
    /// The device may touch the stream's memory.
    InFlight,
    /// It does not.
    Settled,
    /// A copy's ticket was lost: it may, for ever. Drop the ticket of whatever waits for this.
    Lost,
}

/// Moves the memory of one device through bounce buffers. Cheap to clone.
#[derive(Clone)]
pub struct Stager {
    access: Arc<dyn DeviceAccess>,
    depth: usize,
    fetches: Arc<Pool>,
    stores: Arc<Pool>,
    wake: Arc<dyn Fn(u64) + Send + Sync>,
}

impl Stager {
    /// A stager for memory of `access`; `wake` is called with the token of a stream that can go on.
    pub fn new(
        access: Arc<dyn DeviceAccess>,
        buffers: Buffers,
        wake: impl Fn(u64) + Send + Sync + 'static,
    ) -> Self {
        let pool = || {
            Arc::new(Pool {
                access: Arc::clone(&access),
                len: buffers.len.max(1),
                count: buffers.count.max(1),
                state: Mutex::default(),
            })
        };
        let (fetches, stores) = (pool(), pool());
        Stager { access, depth: buffers.depth.max(1), fetches, stores, wake: Arc::new(wake) }
    }

    /// Makes all buffers now: pinning memory takes time that a machine should not spend in a turn. Call it where
    /// blocking is allowed, as in `register`. Errors: what the device says; `Invalid` if it gives no host memory.
    pub fn prepare(&self) -> Result<()> {
        self.fetches.fill()?;
        self.stores.fill()
    }

    /// The device whose memory it moves.
    pub fn access(&self) -> &Arc<dyn DeviceAccess> {
        &self.access
    }

    /// A stream of bytes from the device: the blocks of `extents`, whose region `i` lies in `memories[i]`.
    ///
    /// # Errors
    /// `Unsupported` for memory of another device.
    pub fn fetch(&self, token: u64, memories: Vec<Arc<Memory>>, extents: Extents) -> Result<Fetch> {
        let stream = self.stream(token, memories, extents, &self.fetches)?;
        Ok(Fetch { stream, copied: VecDeque::new(), at: 0 })
    }

    /// A stream of bytes to the device; see [`fetch`](Stager::fetch).
    ///
    /// # Errors
    /// `Unsupported` for memory of another device.
    pub fn store(&self, token: u64, memories: Vec<Arc<Memory>>, extents: Extents) -> Result<Store> {
        let stream = self.stream(token, memories, extents, &self.stores)?;
        Ok(Store { stream, filling: None })
    }

    fn stream(
        &self,
        token: u64,
        memories: Vec<Arc<Memory>>,
        extents: Extents,
        pool: &Arc<Pool>,
    ) -> Result<Stream> {
        for memory in &memories {
            let ours = memory.device_access().is_some_and(|access| Arc::ptr_eq(access, &self.access));
            if !ours {
                return Err(Error::new(
                    Kind::Unsupported,
                    format!(
                        "{} memory of another device: stage it with the access it was adopted with",
                        memory.kind()
                    ),
                ));
            }
        }
        let shared = Shared { token, wake: Arc::clone(&self.wake), told: Mutex::default() };
        Ok(Stream {
            access: Arc::clone(&self.access),
            depth: self.depth,
            pool: Arc::clone(pool),
            blocks: Blocks { extents, back: VecDeque::new() },
            shared: Arc::new(shared),
            memories: memories.into(),
            planned: Vec::new(),
            pieces: Vec::new(),
            started: VecDeque::new(),
            first: 0,
            failed: None,
        })
    }
}

impl fmt::Debug for Stager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stager({}, {:?} to fetch, {:?} to store)", self.access.kind(), self.fetches, self.stores)
    }
}

/// The bounce buffers of one direction.
struct Pool {
    access: Arc<dyn DeviceAccess>,
    len: usize,
    count: usize,
    state: Mutex<PoolState>,
}

#[derive(Default)]
struct PoolState {
    free: Vec<Memory>,
    /// Buffers there are, or that somebody is making.
    made: usize,
    /// Buffers that a lost copy may still touch. They count as made: a device that loses copies gets no new ones.
    lost: usize,
    /// Those who get the next buffers, in order. While somebody waits, none is free.
    queue: VecDeque<Weak<Shared>>,
    /// Stores that keep a buffer although their socket is dry.
    paused: Vec<Weak<Shared>>,
}

impl Pool {
    fn make(&self) -> Result<Memory> {
        let memory = self.access.pinned(self.len)?;
        if memory.kind().is_host() && memory.len() >= self.len {
            return Ok(memory);
        }
        Err(Error::new(
            Kind::Invalid,
            format!(
                "the device gave {} bytes of {} memory to bounce through, {} of host memory were asked for: report \
                 this as a bug of its crate",
                memory.len(),
                memory.kind(),
                self.len
            ),
        ))
    }

    /// Makes what is not made yet.
    fn fill(self: &Arc<Self>) -> Result<()> {
        loop {
            {
                let mut state = self.state.lock();
                if state.made >= self.count {
                    return Ok(());
                }
                state.made += 1;
            }
            match self.make() {
                Ok(memory) => self.give(memory),
                Err(error) => {
                    self.not_made();
                    return Err(error);
                }
            }
        }
    }

    /// A buffer could not be made: those who wait for one may do so in vain.
    fn not_made(&self) {
        let mut state = self.state.lock();
        state.made -= 1;
        let queue = state.hopeless();
        drop(state);
        ask_again(queue);
    }

    /// A buffer; or none, and then `stream` gets the next. Errors when there is none and never will be.
    fn take(self: &Arc<Self>, stream: &Arc<Shared>) -> Result<Option<Bounce>> {
        let mut refused = None;
        loop {
            let mut state = self.state.lock();
            if let Some(memory) = state.free.pop() {
                return Ok(Some(Bounce::new(memory, self)));
            }
            if state.made < self.count && refused.is_none() {
                state.made += 1;
                drop(state);
                match self.make() {
                    Ok(memory) => return Ok(Some(Bounce::new(memory, self))),
                    Err(error) => {
                        self.not_made();
                        refused = Some(error);
                        continue; // the buffers there are will do
                    }
                }
            }
            if state.lost == state.made {
                return Err(refused.unwrap_or_else(|| {
                    Error::new(
                        Kind::Exhausted,
                        "the device has lost a copy on each of the bounce buffers: restart the process, and report \
                         this as a bug of its crate",
                    )
                }));
            }
            state.queue.push_back(Arc::downgrade(stream));
            let paused = std::mem::take(&mut state.paused);
            drop(state);
            paused.iter().filter_map(Weak::upgrade).for_each(|holder| holder.wake());
            return Ok(None);
        }
    }

    /// Takes a buffer back: for the first who waits, or to keep.
    fn give(self: &Arc<Self>, memory: Memory) {
        let mut bounce = Bounce::new(memory, self);
        loop {
            let next = {
                let mut state = self.state.lock();
                match (state.queue.pop_front(), bounce.memory.take()) {
                    (None, memory) => return state.free.extend(memory),
                    (Some(next), memory) => {
                        bounce.memory = memory;
                        next
                    }
                }
            };
            let Some(stream) = next.upgrade() else { continue };
            match stream.grant(bounce) {
                None => return stream.wake(),
                Some(back) => bounce = back,
            }
        }
    }

    /// A buffer will never come back.
    fn lose(&self, memory: Memory) {
        quarantine::keep_for_ever(Arc::new(memory), "bounce buffer", "a device lost the ticket of a copy");
        let mut state = self.state.lock();
        state.lost += 1;
        let queue = state.hopeless();
        drop(state);
        ask_again(queue);
    }

    /// Whether others wait for a buffer; if not, `stream` is woken once they do.
    fn is_scarce(&self, stream: &Arc<Shared>) -> bool {
        let mut state = self.state.lock();
        if !state.queue.is_empty() {
            return true;
        }
        if !state.paused.iter().any(|other| other.as_ptr() == Arc::as_ptr(stream)) {
            state.paused.retain(|other| other.strong_count() > 0);
            state.paused.push(Arc::downgrade(stream));
        }
        false
    }
}

impl PoolState {
    /// Those who wait, if no buffer is left that could ever come.
    fn hopeless(&mut self) -> VecDeque<Weak<Shared>> {
        if self.lost < self.made { VecDeque::new() } else { std::mem::take(&mut self.queue) }
    }
}

fn ask_again(queue: VecDeque<Weak<Shared>>) {
    for stream in queue.iter().filter_map(Weak::upgrade) {
        stream.told.lock().queued = false;
        stream.wake();
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        write!(f, "{} of {} buffers", self.count - state.made + state.free.len(), self.count)
    }
}

/// A bounce buffer in somebody's hands. No copy touches it; dropped, it goes back to its pool.
struct Bounce {
    memory: Option<Memory>,
    pool: Arc<Pool>,
}

impl Bounce {
    fn new(memory: Memory, pool: &Arc<Pool>) -> Self {
        Bounce { memory: Some(memory), pool: Arc::clone(pool) }
    }

    fn base(&self) -> *mut u8 {
        self.memory.as_ref().expect("a buffer is taken from its hand only when that ends").as_ptr()
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: a buffer holds `len` bytes of host memory, and nobody else touches it while it is in this hand.
        unsafe { std::slice::from_raw_parts(self.base(), self.pool.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and the hand is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.base(), self.pool.len) }
    }

    /// A copy that may still touch it was lost.
    fn lose(mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.lose(memory);
        }
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.give(memory);
        }
    }
}

/// The part of a stream that copies and pools know.
struct Shared {
    token: u64,
    wake: Arc<dyn Fn(u64) + Send + Sync>,
    told: Mutex<Told>,
}

/// What a stream was told since its last turn.
#[derive(Default)]
struct Told {
    /// It waits in the pool's queue, or has been granted a buffer.
    queued: bool,
    granted: Option<Bounce>,
    /// Copies that have ended, by number; with their buffer where the stream wants it.
    landed: Vec<(u64, Result<Option<Bounce>>)>,
    in_flight: usize,
    lost: bool,
    /// It takes no more buffers.
    stopped: bool,
}

impl Shared {
    fn wake(&self) {
        (self.wake)(self.token);
    }

    /// Gives it the buffer it waited for; back if it has stopped meanwhile.
    fn grant(&self, bounce: Bounce) -> Option<Bounce> {
        let mut told = self.told.lock();
        if told.stopped {
            return Some(bounce);
        }
        told.granted = Some(bounce);
        None
    }

    fn landed(&self, number: u64, result: Result<Option<Bounce>>) {
        let mut told = self.told.lock();
        told.in_flight -= 1;
        let unwanted = if told.stopped {
            Some(result)
        } else {
            told.landed.push((number, result));
            None
        };
        drop(told);
        drop(unwanted);
        self.wake();
    }
}

/// A copy whose ticket the device holds.
struct InFlight {
    stream: Arc<Shared>,
    number: u64,
    direction: Direction,
    bounce: Mutex<Option<Bounce>>,
    /// Kept alive until the copy has settled.
    memories: Arc<[Arc<Memory>]>,
}

impl Settle for InFlight {
    fn settled(self: Arc<Self>, result: Result<()>) {
        let bounce = self.bounce.lock().take();
        // What has reached the device is wanted no more: the buffer is free at once.
        let bounce = bounce.filter(|_| self.direction == Direction::ToHost);
        self.stream.landed(self.number, result.map(|()| bounce));
    }

    fn forgotten(self: Arc<Self>) {
        // Keeps the device's side; that it never settles is for the stream's owner to say.
        std::mem::forget(Arc::clone(&self.memories));
        let bounce = self.bounce.lock().take();
        self.stream.told.lock().lost = true;
        if let Some(bounce) = bounce {
            bounce.lose();
        }
        let error = Error::new(
            Kind::Forgotten,
            "the device lost a copy: the memory on both sides is quarantined; report this as a bug of its crate",
        );
        self.stream.landed(self.number, Err(error));
    }
}

/// The blocks of a stream that are not in a buffer yet.
struct Blocks {
    extents: Extents,
    /// Taken from the extents and given back: these come first.
    back: VecDeque<Extent>,
}

impl Blocks {
    fn take(&mut self, max: u64) -> Option<Extent> {
        let Some(mut extent) = self.back.pop_front() else { return self.extents.take(max) };
        if extent.len > max {
            self.back.push_front(Extent { offset: extent.offset + max, len: extent.len - max, ..extent });
            extent.len = max;
        }
        Some(extent)
    }

    fn left(&self) -> u64 {
        self.extents.left() + self.back.iter().map(|extent| extent.len).sum::<u64>()
    }
}

/// What fetches and stores have in common: blocks, buffers, copies.
struct Stream {
    access: Arc<dyn DeviceAccess>,
    depth: usize,
    pool: Arc<Pool>,
    blocks: Blocks,
    shared: Arc<Shared>,
    memories: Arc<[Arc<Memory>]>,
    /// The blocks of the next copy.
    planned: Vec<Extent>,
    /// The same as the device wants it; empty between calls.
    pieces: Vec<Piece>,
    /// Copies in the order of their bytes.
    started: VecDeque<Started>,
    /// The number of the first of them.
    first: u64,
    failed: Option<Error>,
}

struct Started {
    len: usize,
    landed: bool,
    bounce: Option<Bounce>,
}

impl Stream {
    /// Takes in what has ended since the last time. Errors: what failed, again each time.
    fn look(&mut self) -> Result<()> {
        let landed = std::mem::take(&mut self.shared.told.lock().landed);
        for (number, result) in landed {
            match (result, self.started.get_mut((number - self.first) as usize)) {
                (Ok(bounce), Some(copy)) => (copy.landed, copy.bounce) = (true, bounce),
                (Ok(_), None) => {}
                (Err(error), _) => {
                    self.failed.get_or_insert(error);
                }
            }
        }
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// The first copy, once it has landed.
    fn next_landed(&mut self) -> Option<Started> {
        self.started.front().filter(|copy| copy.landed)?;
        self.first += 1;
        self.started.pop_front()
    }

    /// A buffer to work with; none: the stream is woken when it gets one.
    fn buffer(&mut self) -> Result<Option<Bounce>> {
        {
            let mut told = self.shared.told.lock();
            if let Some(granted) = told.granted.take() {
                told.queued = false;
                return Ok(Some(granted));
            }
            if std::mem::replace(&mut told.queued, true) {
                return Ok(None);
            }
        }
        let taken = self.pool.take(&self.shared);
        if !matches!(taken, Ok(None)) {
            self.shared.told.lock().queued = false;
        }
        taken.map_err(|error| self.fail(error))
    }

    /// Plans the blocks of the next buffer and says how many bytes they are. Errors: `OutOfBounds`.
    fn plan(&mut self) -> Result<usize> {
        let (mut at, max) = (0, self.pool.len);
        while at < max && self.planned.len() < MAX_PIECES {
            let Some(extent) = self.blocks.take((max - at) as u64) else { break };
            let len = self.memories.get(extent.region as usize).map_or(0, |memory| memory.len() as u64);
            if extent.offset.checked_add(extent.len).is_none_or(|end| end > len) {
                let Extent { region, offset, len: bytes } = extent;
                return Err(self.fail(Error::new(
                    Kind::OutOfBounds,
                    format!(
                        "bytes {offset}..+{bytes} lie outside the {len} bytes of region {region} of a staged stream"
                    ),
                )));
            }
            self.planned.push(extent);
            at += extent.len as usize;
        }
        Ok(at)
    }

    /// Starts the copy of the first `len` bytes that are planned; the rest is to be planned again.
    fn start(&mut self, direction: Direction, bounce: Bounce, len: usize) {
        let mut at = 0;
        for mut extent in self.planned.drain(..) {
            let now = extent.len.min((len - at) as u64);
            if now > 0 {
                let device = self.memories[extent.region as usize].address() + extent.offset;
                self.pieces.push(Piece { device, host: bounce.base().wrapping_add(at), len: now as usize });
                at += now as usize;
            }
            if now < extent.len {
                (extent.offset, extent.len) = (extent.offset + now, extent.len - now);
                self.blocks.back.push_back(extent);
            }
        }
        let number = self.first + self.started.len() as u64;
        self.started.push_back(Started { len, landed: false, bounce: None });
        self.shared.told.lock().in_flight += 1;
        let copy = InFlight {
            stream: Arc::clone(&self.shared),
            number,
            direction,
            bounce: Mutex::new(Some(bounce)),
            memories: Arc::clone(&self.memories),
        };
        // SAFETY: `plan` has checked the device side, whose memory the copy keeps; the pieces lie one after the other
        // in the bounce buffer, which the copy holds as well and gives away only when it has settled.
        unsafe { self.access.copy(direction, &self.pieces, Ticket::of(Arc::new(copy))) };
        self.pieces.clear();
    }

    fn fail(&mut self, error: Error) -> Error {
        self.failed.get_or_insert(error).clone()
    }

    fn stop(&mut self) {
        self.fail(Error::new(Kind::Cancelled, "the staged stream was stopped"));
        let mut told = self.shared.told.lock();
        told.stopped = true;
        let buffers = (told.granted.take(), std::mem::take(&mut told.landed));
        drop(told);
        drop(buffers); // for others
        self.started.clear();
    }

    fn copies(&self) -> Copies {
        let told = self.shared.told.lock();
        match (told.lost, told.in_flight) {
            (true, _) => Copies::Lost,
            (false, 0) => Copies::Settled,
            (false, _) => Copies::InFlight,
        }
    }

    /// Bytes that are not planned or not copied yet.
    fn left(&self) -> u64 {
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

/// Blocks on their way from a device: a stream of bytes to be sent. See the [module](self).
pub struct Fetch {
    stream: Stream,
    /// What has been copied and not been sent.
    copied: VecDeque<(usize, Bounce)>,
    /// Bytes of the first of these that have been sent.
    at: usize,
}

impl Fetch {
    /// Takes in copies that have ended, and starts as many as there are buffers for.
    ///
    /// # Errors
    /// What a copy said, or the device when asked for a buffer; `OutOfBounds` for blocks outside their memory;
    /// `Forgotten` when a copy was lost; `Cancelled` after [`stop`](Fetch::stop). A stream that has failed stays so.
    pub fn resume(&mut self) -> Result<()> {
        let stream = &mut self.stream;
        loop {
            stream.look()?;
            while let Some(copy) = stream.next_landed() {
                self.copied.extend(copy.bounce.map(|bounce| (copy.len, bounce)));
            }
            if stream.blocks.left() == 0 || self.copied.len() + stream.started.len() >= stream.depth {
                return Ok(());
            }
            let Some(bounce) = stream.buffer()? else { return Ok(()) };
            let len = stream.plan()?;
            stream.start(Direction::ToHost, bounce, len);
        }
    }

    /// The next bytes that lie together. None, with some [`left`](Fetch::left): wait for the stream's token.
    pub fn bytes(&self) -> &[u8] {
        self.slices().next().unwrap_or_default()
    }

    /// All bytes that have come so far, in order, for a vectored send. They stay in place until they are
    /// [`sent`](Fetch::sent) or the stream is stopped or dropped, whatever else is called.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let mut sent = self.at;
        self.copied.iter().map(move |(len, bounce)| &bounce.bytes()[std::mem::take(&mut sent)..*len])
    }

    /// `count` bytes went out: not more than [`slices`](Fetch::slices) has. Buffers that are sent are free again.
    pub fn sent(&mut self, count: usize) {
        self.at += count;
        while let Some((len, _)) = self.copied.front()
            && *len <= self.at
        {
            self.at -= len;
            self.copied.pop_front();
        }
        debug_assert!(self.at == 0 || !self.copied.is_empty());
    }

    /// Bytes that are not sent yet.
    pub fn left(&self) -> u64 {
        let copied: usize = self.copied.iter().map(|(len, _)| len).sum();
        self.stream.left() + (copied - self.at) as u64
    }

    /// Starts nothing any more and gives the buffers back. Copies in flight end by themselves: the token comes for
    /// each that does, and [`copies`](Fetch::copies) tells.
    pub fn stop(&mut self) {
        self.stream.stop();
        self.copied.clear();
        self.at = 0;
    }

    /// Where its copies stand.
    pub fn copies(&self) -> Copies {
        self.stream.copies()
    }
}

impl fmt::Debug for Fetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fetch({}, {} bytes left, {:?})", self.stream.shared.token, self.left(), self.copies())
    }
}

/// Blocks on their way to a device: a stream of bytes that are received. See the [module](self).
pub struct Store {
    stream: Stream,
    filling: Option<Filling>,
}

/// The buffer that bytes are received into.
struct Filling {
    bounce: Bounce,
    /// How many bytes the blocks planned for it have.
    len: usize,
    /// How many have come.
    at: usize,
}

impl Store {
    /// Takes in copies that have ended, and says where to receive the next bytes. None, with some
    /// [`wanted`](Store::wanted): wait for the stream's token. The room stays in place until bytes are
    /// [`received`](Store::received) into it, or the stream is paused, stopped or dropped.
    ///
    /// # Errors
    /// As [`Fetch::resume`].
    pub fn room(&mut self) -> Result<Option<&mut [u8]>> {
        let stream = &mut self.stream;
        stream.look()?;
        while stream.next_landed().is_some() {}
        if self.filling.is_none() {
            let in_flight = stream.started.iter().filter(|copy| !copy.landed).count();
            if stream.blocks.left() == 0 || in_flight >= stream.depth {
                return Ok(None);
            }
            let Some(bounce) = stream.buffer()? else { return Ok(None) };
            let len = stream.plan()?;
            self.filling = Some(Filling { bounce, len, at: 0 });
        }
        Ok(self.filling.as_mut().map(|filling| &mut filling.bounce.bytes_mut()[filling.at..filling.len]))
    }

    /// `count` bytes came into the [`room`](Store::room): not more than it has. A buffer that is full is copied.
    pub fn received(&mut self, count: usize) {
        let Some(filling) = &mut self.filling else { return debug_assert_eq!(count, 0) };
        filling.at += count;
        debug_assert!(filling.at <= filling.len);
        if filling.at >= filling.len {
            self.copy();
        }
    }

    /// No bytes are there to be received now. If others wait for a buffer, this stream's is copied as far as it is
    /// filled, and theirs next; if they come later, the stream's token does too.
    pub fn pause(&mut self) {
        if self.filling.is_some() && self.stream.pool.is_scarce(&self.stream.shared) {
            self.copy();
        }
    }

    fn copy(&mut self) {
        let Some(Filling { bounce, at, .. }) = self.filling.take() else { return };
        if at > 0 {
            self.stream.start(Direction::ToDevice, bounce, at);
        } else {
            self.stream.blocks.back.extend(self.stream.planned.drain(..));
        }
    }

    /// Bytes that are not on the device yet; of those that have come, as [`room`](Store::room) last saw it.
    pub fn left(&self) -> u64 {
        self.stream.left()
    }

    /// Bytes that are still to be received.
    pub fn wanted(&self) -> u64 {
        let filling = self.filling.as_ref().map_or(0, |filling| filling.len - filling.at);
        self.stream.blocks.left() + filling as u64
    }

    /// As [`Fetch::stop`].
    pub fn stop(&mut self) {
        self.stream.stop();
        self.filling = None;
    }

    /// Where its copies stand.
    pub fn copies(&self) -> Copies {
        self.stream.copies()
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({}, {} bytes left, {:?})", self.stream.shared.token, self.left(), self.copies())
    }
}
