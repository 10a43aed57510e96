//! One endpoint on one domain, with the operations that are posted on it: pieces of transfers, and
//! messages on the first rail.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_backend::fabric::JobId;
use kvx_core::{Op, Result};

use crate::connections::Connections;
use crate::error;
use crate::ffi::{
    CompletedOperation, Domain, Endpoint, Errno, FailedOperation, MAX_RANGES, MemoryDescription,
    PeerNumber, Range, Read, Registration, WaitMethod,
};
use crate::keys;
use crate::operations::{Operation, Operations};

/// The longest message: shared memory takes no longer one without the target's CPU.
pub(crate) const MAX_MESSAGE: usize = 4096;
/// Buffers for messages in and out.
const RECEIVES: usize = 64;
const SENDS: usize = 64;
/// The most pieces that are in flight on a rail, and those of them that lead to one peer.
const WINDOW: (usize, usize) = (2048, 512);

/// Whether something was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PostOutcome {
    Posted,
    /// Too much is in flight, the peer has no capacity now, or there is no connection yet.
    Later,
}

/// The job and the peer of pieces that are posted, and their operation.
#[derive(Clone, Copy)]
pub(crate) struct Post {
    pub(crate) op: Op,
    pub(crate) job: JobId,
    pub(crate) peer: usize,
}

/// An operation that has ended on a rail.
pub(crate) enum RailEvent {
    Pieces { job: JobId, peer: usize, count: u32, failed: Option<FailedOperation> },
    Send { peer: usize, failed: Option<FailedOperation> },
    Message(Vec<u8>),
}

/// How long the end waits for a thread that registers memory just now, and so has the endpoint.
const LAST_USE: Duration = Duration::from_millis(40);

/// One rail.
pub(crate) struct Rail {
    /// `None` after the end.
    endpoint: Option<Arc<Endpoint>>,
    operations: Operations,
    messages: Option<MessagePool>,
    pieces: InFlightPieces,
}

/// The numbers of pieces in flight.
struct InFlightPieces {
    all: usize,
    most: usize,
    /// By the peer's place.
    of: Vec<usize>,
}

impl InFlightPieces {
    /// Returns whether so many more fit. Those of a stopped peer stay in the provider's queue,
    /// which all peers share. So no peer has more than are left for others, at most half of a small
    /// queue, and some ten stopped peers leave capacity.
    #[inline]
    fn fit(&self, peer: usize, count: usize) -> bool {
        let peers = self.of.get(peer).copied().unwrap_or_default();
        peers + count <= WINDOW.1.min(self.most - self.all)
    }

    #[inline]
    fn add(&mut self, peer: usize, count: usize) {
        if self.of.len() <= peer {
            self.of.resize(peer + 1, 0);
        }
        self.of[peer] += count;
        self.all += count;
    }

    #[inline]
    fn end(&mut self, peer: usize, count: usize) {
        self.of[peer] -= count;
        self.all -= count;
    }
}

impl Rail {
    /// An endpoint that can be slept on, if the provider has such. `messages`: it carries messages.
    /// Errors: libfabric's.
    pub(crate) fn open(domain: &Arc<Domain>, messages: bool) -> Result<Rail> {
        let info = domain.info();
        let what = || format!("libfabric does not open {} on {}", info.provider(), info.domain());
        let most = info.depth().clamp(1, WINDOW.0);
        let messages = if messages { Some(MessagePool::new(domain)?) } else { None };
        let operations =
            Operations::new(most + if messages.is_some() { RECEIVES + SENDS } else { 0 });
        let shared = Arc::new((operations.contexts(), messages.as_ref().map(MessagePool::shared)));
        let open = |sleeps| Endpoint::open(domain, sleeps, Arc::clone(&shared) as _);
        let endpoint = open(true).or_else(|errno| {
            tracing::debug!(
                provider = info.provider(),
                ?errno,
                "the provider has nothing to sleep on"
            );
            open(false)
        });
        let endpoint = endpoint.map_err(|errno| error::native(what(), errno))?;
        let endpoint = Some(Arc::new(endpoint));
        let pieces = InFlightPieces { all: 0, most, of: Vec::new() };
        let mut rail = Rail { endpoint, operations, messages, pieces };
        rail.post_receives()
            .map_err(|errno| error::native("libfabric takes no buffers for messages", errno))?;
        Ok(rail)
    }

    pub(crate) fn endpoint(&self) -> &Arc<Endpoint> {
        open(&self.endpoint)
    }

    /// Ends it, and leaves the closing of its endpoint to who else has it.
    pub(crate) fn leave(mut self) {
        self.endpoint = None;
    }

    /// Ends it. Returns whether it is certain that the provider touches nothing any more that it
    /// was given.
    pub(crate) fn close(&mut self) -> bool {
        let Some(mut endpoint) = self.endpoint.take() else { return true };
        let connections = match endpoint.wait_method() {
            WaitMethod::Descriptor(queue) => Connections::of(queue),
            WaitMethod::Never => Connections::default(),
        };
        let until = Instant::now() + LAST_USE;
        let certain = loop {
            match Arc::try_unwrap(endpoint) {
                Ok(endpoint) => break endpoint.close().is_ok(),
                Err(shared) if Instant::now() < until => {
                    endpoint = shared;
                    std::thread::sleep(Duration::from_micros(100));
                }
                Err(_) => break false, // its last owner closes it, at an unknown time
            }
        };
        connections.end();
        certain
    }

    /// Returns how many messages may be sent now.
    pub(crate) fn sends(&self) -> usize {
        self.messages.as_ref().map_or(0, |messages| messages.free.len())
    }

    /// Returns whether the provider has no piece and no message to send.
    pub(crate) fn is_quiet(&self) -> bool {
        self.pieces.all == 0
            && self.messages.as_ref().is_none_or(|messages| messages.free.len() == SENDS)
    }

    /// Returns how many pieces may be posted together.
    pub(crate) fn together(&self) -> usize {
        self.endpoint().domain().info().ranges().min(MAX_RANGES).min(self.pieces.most)
    }

    /// Posts pieces that go the same way as one operation: at least one, and at most
    /// [`together`](Rail::together).
    ///
    /// # Safety
    /// The local memory is the pieces' until they are reported as [`RailEvent::Pieces`], or the
    /// rail is dropped.
    #[inline]
    pub(crate) unsafe fn post(
        &mut self,
        post: Post,
        pieces: &[Range],
    ) -> Result<PostOutcome, Errno> {
        let Post { op, job, peer } = post;
        if !self.pieces.fit(peer, pieces.len()) {
            return Ok(PostOutcome::Later);
        }
        let count = pieces.len() as u32;
        let Some(context) = self.operations.add(Operation::Pieces { job, peer, count }) else {
            return Ok(PostOutcome::Later);
        };
        let endpoint = open(&self.endpoint);
        // SAFETY: the caller's promise; the context is the provider's until the provider returns
        // it, and outlives the endpoint.
        let answer = unsafe {
            match pieces {
                [range] => endpoint.transfer(op, *range, context),
                _ => endpoint.transfer_all(op, pieces.iter().copied(), context),
            }
        };
        match answer {
            Ok(()) => {
                self.pieces.add(peer, pieces.len());
                Ok(PostOutcome::Posted)
            }
            Err(errno) => {
                self.operations.take(context);
                if errno == Errno(libc::EAGAIN) { Ok(PostOutcome::Later) } else { Err(errno) }
            }
        }
    }

    /// Sends a message.
    pub(crate) fn send(
        &mut self,
        peer: usize,
        to: PeerNumber,
        message: &[u8],
    ) -> Result<PostOutcome, Errno> {
        let Some(messages) = &mut self.messages else { return Err(Errno(libc::EOPNOTSUPP)) };
        let Some(buffer) = messages.free.pop() else { return Ok(PostOutcome::Later) };
        let Some(context) = self.operations.add(Operation::Send { buffer, peer }) else {
            messages.free.push(buffer);
            return Ok(PostOutcome::Later);
        };
        let bytes = messages.shared.buffers[RECEIVES + buffer].0.get().cast::<u8>();
        let len = message.len().min(MAX_MESSAGE);
        // SAFETY: a free buffer has no other user, and is as long as that; the provider has it
        // until it returns the context.
        let answer = unsafe {
            bytes.copy_from_nonoverlapping(message.as_ptr(), len);
            open(&self.endpoint).send(bytes, len, messages.descriptor(), to, context)
        };
        match answer {
            Ok(()) => Ok(PostOutcome::Posted),
            Err(errno) => {
                messages.free.push(buffer);
                self.operations.take(context);
                if errno == Errno(libc::EAGAIN) { Ok(PostOutcome::Later) } else { Err(errno) }
            }
        }
    }

    /// Lets the provider work, and reports the operations that have ended. Returns whether any had.
    /// Errors: the endpoint cannot be used any more.
    pub(crate) fn read(&mut self, mut report: impl FnMut(RailEvent)) -> Result<bool, Errno> {
        let (operations, messages, pieces) =
            (&mut self.operations, &mut self.messages, &mut self.pieces);
        let read = open(&self.endpoint).read(|CompletedOperation { context, len }| {
            if let Some(operation) = operations.take(context) {
                if let Some(ended) = ended(operation, len, None, messages, pieces) {
                    report(ended);
                }
            } else if !context.is_null() {
                tracing::error!(
                    "libfabric reports the end of an operation that was not posted: report it"
                );
            }
        })?;
        if let Read::Failed(failed) = read {
            match self.operations.take(failed.context) {
                Some(operation) => {
                    let event =
                        ended(operation, 0, Some(failed), &mut self.messages, &mut self.pieces);
                    event.into_iter().for_each(&mut report);
                }
                None => tracing::warn!(
                    ?failed,
                    "libfabric reports a failure of nothing that was posted"
                ),
            }
        }
        self.post_receives()?;
        Ok(!matches!(read, Read::Nothing))
    }

    /// Gives the provider the buffers for messages that it does not have.
    fn post_receives(&mut self) -> Result<(), Errno> {
        let Some(messages) = &mut self.messages else { return Ok(()) };
        while let Some(buffer) = messages.unposted.pop() {
            let Some(context) = self.operations.add(Operation::Receive { buffer }) else {
                messages.unposted.push(buffer);
                return Ok(());
            };
            let bytes = messages.shared.buffers[buffer].0.get().cast();
            // SAFETY: a buffer that is not posted has no user; the provider has it until it returns
            // the context.
            let answer = unsafe {
                open(&self.endpoint).receive(bytes, MAX_MESSAGE, messages.descriptor(), context)
            };
            if let Err(errno) = answer {
                self.operations.take(context);
                messages.unposted.push(buffer);
                return if errno == Errno(libc::EAGAIN) { Ok(()) } else { Err(errno) };
            }
        }
        Ok(())
    }
}

impl Drop for Rail {
    fn drop(&mut self) {
        self.close();
    }
}

#[inline]
fn open(endpoint: &Option<Arc<Endpoint>>) -> &Arc<Endpoint> {
    endpoint.as_ref().expect("nobody uses a rail after its end")
}

/// The meaning of the end of an operation; its buffer is free again.
#[inline]
fn ended(
    operation: Operation,
    len: usize,
    failed: Option<FailedOperation>,
    messages: &mut Option<MessagePool>,
    pieces: &mut InFlightPieces,
) -> Option<RailEvent> {
    match (operation, messages) {
        (Operation::Pieces { job, peer, count }, _) => {
            pieces.end(peer, count as usize);
            Some(RailEvent::Pieces { job, peer, count, failed })
        }
        (Operation::Send { buffer, peer }, Some(messages)) => {
            messages.free.push(buffer);
            Some(RailEvent::Send { peer, failed })
        }
        (Operation::Receive { buffer }, Some(messages)) => {
            messages.unposted.push(buffer);
            if let Some(failed) = failed {
                tracing::debug!(?failed, "a message did not arrive");
                return None;
            }
            let bytes = messages.shared.buffers[buffer].0.get().cast::<u8>();
            // SAFETY: the provider has given it back, with so many bytes in it.
            Some(RailEvent::Message(
                unsafe { std::slice::from_raw_parts(bytes, len.min(MAX_MESSAGE)) }.to_vec(),
            ))
        }
        (_, None) => None,
    }
}

#[repr(C, align(64))]
struct Buffer(UnsafeCell<[u8; MAX_MESSAGE]>);

// SAFETY: only raw copies touch it, by the owner of the rail or by the provider.
unsafe impl Send for Buffer {}
// SAFETY: only raw copies touch it, by the owner of the rail or by the provider.
unsafe impl Sync for Buffer {}

/// Buffers for messages.
struct MessagePool {
    shared: Arc<MessageBuffers>,
    /// Of those for sends, the ones that the provider does not have, counted from the first of
    /// them.
    free: Vec<usize>,
    /// Of those for receives, likewise.
    unposted: Vec<usize>,
}

/// What the endpoint keeps.
struct MessageBuffers {
    /// Ended before the memory goes.
    registration: Option<Registration>,
    /// Those for receives first.
    buffers: Box<[Buffer]>,
}

impl MessagePool {
    fn new(domain: &Arc<Domain>) -> Result<MessagePool> {
        let buffers: Box<[Buffer]> =
            (0..RECEIVES + SENDS).map(|_| Buffer(UnsafeCell::new([0; MAX_MESSAGE]))).collect();
        let registration = if domain.info().wants(crate::ffi::bindings_1_17::FI_MR_LOCAL) {
            Some(MessagePool::register(domain, &buffers)?)
        } else {
            None
        };
        let shared = Arc::new(MessageBuffers { registration, buffers });
        Ok(MessagePool { shared, free: (0..SENDS).collect(), unposted: (0..RECEIVES).collect() })
    }

    fn shared(&self) -> Arc<MessageBuffers> {
        Arc::clone(&self.shared)
    }

    fn register(domain: &Arc<Domain>, buffers: &[Buffer]) -> Result<Registration> {
        let memory = MemoryDescription {
            address: buffers.as_ptr().addr() as u64,
            len: size_of_val(buffers),
            read_only: false,
            device: None,
            file: None,
        };
        // SAFETY: `MessageBuffers` drops its registration before its buffers.
        unsafe { keys::register(domain, memory) }
    }

    fn descriptor(&self) -> *mut c_void {
        self.shared.registration.as_ref().map_or(std::ptr::null_mut(), Registration::descriptor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_that_have_stopped_leave_capacity_for_others() {
        let mut pieces = InFlightPieces { all: 0, most: 2048, of: Vec::new() };
        let mut fill = |peer| {
            while pieces.fit(peer, 4) {
                pieces.add(peer, 4);
            }
            pieces.of[peer]
        };
        let stopped = [0, 1, 2, 3, 4, 5, 6].map(&mut fill);
        assert_eq!(stopped, [512, 512, 512, 256, 128, 64, 32]);
        pieces.end(0, 400);
        assert!(pieces.fit(0, 300) && pieces.fit(7, 432) && !pieces.fit(1, 4));
    }
}
