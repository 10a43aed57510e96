//! The bounce buffers of one direction.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Weak};

use super::stream::SharedStream;
use kvx_core::backend::quarantine_for_ever;
use kvx_core::backend::sync::Mutex;
use kvx_core::{DeviceAccess, Error, ErrorKind, Memory, Result};

/// The bounce buffers of one direction.
pub(super) struct Pool {
    pub(super) access: Arc<dyn DeviceAccess>,
    pub(super) len: usize,
    pub(super) count: usize,
    pub(super) state: Mutex<PoolState>,
}

#[derive(Default)]
pub(super) struct PoolState {
    free: Vec<Memory>,
    /// Buffers there are, or that somebody is making.
    made: usize,
    /// Buffers that there may be beyond `count`, as some may never come back.
    more: usize,
    /// Buffers that a lost copy may still touch. They count as made: a device that loses copies
    /// gets no new ones.
    lost: usize,
    /// Those who get the next buffers, in order. While somebody waits, none is free.
    queue: VecDeque<Weak<SharedStream>>,
    /// Stores that keep a buffer although their socket is dry.
    paused: Vec<Weak<SharedStream>>,
}

impl Pool {
    fn make(&self) -> Result<Memory> {
        let memory = self.access.pinned(self.len)?;
        if memory.kind().is_host() && memory.len() >= self.len {
            return Ok(memory);
        }
        Err(Error::new(
            ErrorKind::Invalid,
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
    pub(super) fn fill(self: &Arc<Self>) -> Result<()> {
        loop {
            {
                let mut state = self.state.lock();
                if state.made >= self.count + state.more {
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
        let queue = state.take_waiting();
        drop(state);
        ask_again(queue);
    }

    /// A buffer; or none, and then `stream` gets the next. Errors when there is none and never will
    /// be.
    pub(super) fn take(
        self: &Arc<Self>,
        stream: &Arc<SharedStream>,
    ) -> Result<Option<BounceBuffer>> {
        let mut refused = None;
        loop {
            let mut state = self.state.lock();
            if let Some(memory) = state.free.pop() {
                return Ok(Some(BounceBuffer::new(memory, self)));
            }
            if state.made < self.count + state.more && refused.is_none() {
                state.made += 1;
                drop(state);
                match self.make() {
                    Ok(memory) => return Ok(Some(BounceBuffer::new(memory, self))),
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
                        ErrorKind::Exhausted,
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
        let mut bounce = BounceBuffer::new(memory, self);
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

    /// Some streams may keep for long what they have and are about to get: the others have as much
    /// without that.
    pub(super) fn do_without_some(&self) {
        let mut state = self.state.lock();
        if !state.free.is_empty() || state.made < self.count + state.more {
            return;
        }
        state.more += self.count;
        let queue = std::mem::take(&mut state.queue);
        drop(state);
        ask_again(queue);
    }

    /// A buffer will never come back.
    fn lose(&self, memory: Memory) {
        quarantine_for_ever(
            Arc::new(memory),
            "bounce buffer",
            "a device lost the ticket of a copy",
        );
        let mut state = self.state.lock();
        state.lost += 1;
        let queue = state.take_waiting();
        drop(state);
        ask_again(queue);
    }

    /// Returns whether others wait for a buffer; if not, `stream` is woken once they do.
    pub(super) fn is_scarce(&self, stream: &Arc<SharedStream>) -> bool {
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
    fn take_waiting(&mut self) -> VecDeque<Weak<SharedStream>> {
        if self.lost < self.made { VecDeque::new() } else { std::mem::take(&mut self.queue) }
    }
}

fn ask_again(queue: VecDeque<Weak<SharedStream>>) {
    for stream in queue.iter().filter_map(Weak::upgrade) {
        stream.events.lock().queued = false;
        stream.wake();
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        let all = self.count + state.more;
        write!(f, "{} of {all} buffers", all - state.made + state.free.len())
    }
}

/// A bounce buffer in somebody's hands. No copy touches it; dropped, it goes back to its pool.
pub(super) struct BounceBuffer {
    memory: Option<Memory>,
    pool: Arc<Pool>,
}

impl BounceBuffer {
    fn new(memory: Memory, pool: &Arc<Pool>) -> Self {
        BounceBuffer { memory: Some(memory), pool: Arc::clone(pool) }
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.memory.as_ref().expect("a buffer is taken from its hand only when that ends").as_ptr()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: a buffer holds `len` bytes of host memory, and nobody else touches it while it is
        // in this hand.
        unsafe { std::slice::from_raw_parts(self.base(), self.pool.len) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and the hand is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.base(), self.pool.len) }
    }

    /// A copy that may still touch it was lost.
    pub(super) fn lose(mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.lose(memory);
        }
    }
}

impl Drop for BounceBuffer {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.give(memory);
        }
    }
}
