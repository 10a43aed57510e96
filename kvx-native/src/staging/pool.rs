//! The bounce buffers of one direction.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Weak};

use super::stream::SharedStream;
use kvx_core::backend::sync::Mutex;
use kvx_core::backend::{MemoryReceiver, quarantine_for_ever};
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
    /// The number of buffers that exist or are being allocated.
    made: usize,
    /// The number of buffers allowed beyond `count`, because some may never be returned.
    more: usize,
    /// The number of buffers that a lost copy may still touch. They count as allocated: a device
    /// that loses copies gets no new ones.
    lost: usize,
    /// The streams that get the next buffers, in order. While one waits, no buffer is free.
    queue: VecDeque<Weak<SharedStream>>,
    /// Stores that keep a buffer although their socket has no bytes.
    paused: Vec<Weak<SharedStream>>,
}

impl Pool {
    fn make(&self) -> Result<Memory> {
        self.check(self.access.pinned(self.len)?)
    }

    /// Allocates a buffer without waiting for the driver. The caller has counted it.
    fn make_later(self: &Arc<Self>) {
        let pool = Arc::clone(self);
        let done: MemoryReceiver =
            Box::new(move |made| match made.and_then(|memory| pool.check(memory)) {
                Ok(memory) => pool.give(memory),
                Err(error) => pool.not_made(&error),
            });
        Arc::clone(&self.access).pinned_later(self.len, done);
    }

    fn check(&self, memory: Memory) -> Result<Memory> {
        if memory.kind().is_host() && memory.len() >= self.len {
            return Ok(memory);
        }
        Err(ErrorKind::Invalid.because(format!(
            "the device provided {} bytes of {} memory as a bounce buffer instead of {} of host \
             memory: report this as a bug of its crate",
            memory.len(),
            memory.kind(),
            self.len
        )))
    }

    /// Allocates the buffers that do not exist yet.
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
                    self.not_made(&error);
                    return Err(error);
                }
            }
        }
    }

    /// Handles a failed allocation: the streams that wait for a buffer may wait in vain.
    fn not_made(&self, error: &Error) {
        let mut state = self.state.lock();
        state.made -= 1;
        let queue = state.take_waiting();
        drop(state);
        ask_again(queue, Some(error));
    }

    /// Returns a buffer, or `None` if `stream` must wait for the next one, which may have to be
    /// allocated first. Returns an error if no buffer exists or will exist.
    pub(super) fn take(
        self: &Arc<Self>,
        stream: &Arc<SharedStream>,
    ) -> Result<Option<BounceBuffer>> {
        let refused = stream.events.lock().refused.take();
        let mut state = self.state.lock();
        if let Some(memory) = state.free.pop() {
            return Ok(Some(BounceBuffer::new(memory, self)));
        }
        // After a refusal the existing buffers must do.
        let makes = state.made < self.count + state.more && refused.is_none();
        if !makes && state.lost == state.made {
            return Err(refused.unwrap_or_else(|| {
                ErrorKind::Exhausted.because(
                    "the device has lost a copy on each of the bounce buffers: restart the \
                     process, and report this as a bug of its crate",
                )
            }));
        }
        state.made += usize::from(makes);
        state.queue.push_back(Arc::downgrade(stream));
        let paused = std::mem::take(&mut state.paused);
        drop(state);
        paused.iter().filter_map(Weak::upgrade).for_each(|holder| holder.wake());
        if makes {
            self.make_later();
        }
        Ok(None)
    }

    /// Returns a buffer to the pool: to the first stream that waits, or as a free one.
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

    /// Allows `count` more buffers if none is free: some streams may keep theirs, and the next ones
    /// that they get, for long.
    pub(super) fn do_without_some(&self) {
        let mut state = self.state.lock();
        if !state.free.is_empty() || state.made < self.count + state.more {
            return;
        }
        state.more += self.count;
        let queue = std::mem::take(&mut state.queue);
        drop(state);
        ask_again(queue, None);
    }

    /// Handles a buffer that will never be returned.
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
        ask_again(queue, None);
    }

    /// Returns true if others wait for a buffer; otherwise `stream` is woken once they do.
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
    /// Removes and returns the waiting streams, if no buffer is left that could ever be returned.
    fn take_waiting(&mut self) -> VecDeque<Weak<SharedStream>> {
        if self.lost < self.made { VecDeque::new() } else { std::mem::take(&mut self.queue) }
    }
}

/// Lets streams ask again, after this error of an allocation for which they waited.
fn ask_again(queue: VecDeque<Weak<SharedStream>>, refused: Option<&Error>) {
    for stream in queue.iter().filter_map(Weak::upgrade) {
        let mut events = stream.events.lock();
        (events.queued, events.refused) = (false, refused.cloned());
        drop(events);
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

/// A bounce buffer in use. No copy touches it; when dropped, it returns to its pool.
pub(super) struct BounceBuffer {
    memory: Option<Memory>,
    pool: Arc<Pool>,
}

impl BounceBuffer {
    fn new(memory: Memory, pool: &Arc<Pool>) -> Self {
        BounceBuffer { memory: Some(memory), pool: Arc::clone(pool) }
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.memory.as_ref().expect("the memory is taken only when this value ends").as_ptr()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: a buffer has `len` bytes of host memory, and only the holder of this value
        // touches it.
        unsafe { std::slice::from_raw_parts(self.base(), self.pool.len) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: a buffer has `len` bytes of host memory, and this value is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.base(), self.pool.len) }
    }

    /// Leaks the buffer, because a copy that may still touch it was lost.
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
