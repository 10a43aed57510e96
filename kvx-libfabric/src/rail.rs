//! One endpoint on one domain, with its posted operations: pieces of transfers and, on the first
//! rail, messages.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_backend::fabric::JobId;
use kvx_core::backend::fork::LibraryDescriptors;
use kvx_core::{Op, Result};

use crate::connections::{self, Connections};
use crate::error;
use crate::ffi::{
    CompletedOperation, Domain, Endpoint, Errno, FailedOperation, MAX_RANGES, PeerNumber, Range,
    Read, Registration, RemoteRange, WaitMethod,
};
use crate::keys;
use crate::operations::{Operation, Operations};
use crate::read_back::ScratchMemory;
use crate::subnets::Subnet;

/// The maximum length of a message: shared memory takes longer ones only with the target's CPU.
pub(crate) const MAX_MESSAGE: usize = 4096;
/// The maximum numbers of buffers for received and sent messages.
const MESSAGES: usize = 64;
/// The maximum number of pieces in flight on a rail, and of those to one peer.
const WINDOW: (usize, usize) = (2048, 512);

/// The outcome of a post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PostOutcome {
    Posted,
    /// Not posted: too much is in flight, the peer has no capacity now, or there is no connection
    /// yet.
    Later,
}

/// The operation, job and peer of pieces to post.
#[derive(Clone, Copy)]
pub(crate) struct Post {
    pub(crate) op: Op,
    pub(crate) job: JobId,
    pub(crate) peer: usize,
}

/// The end of an operation on a rail.
pub(crate) enum RailEvent {
    Pieces { job: JobId, peer: usize, count: u32, failed: Option<FailedOperation> },
    Send { peer: usize, failed: Option<FailedOperation> },
    ReadBack { job: JobId, peer: usize, failed: Option<FailedOperation> },
    Message(Vec<u8>),
}

/// The time that `close` waits for a thread that is just registering memory and so holds the
/// endpoint.
const LAST_USE: Duration = Duration::from_millis(40);

/// One rail.
pub(crate) struct Rail {
    /// `None` after `close`.
    endpoint: Option<Arc<Endpoint>>,
    /// The endpoint's sockets, for as long as it is open.
    sockets: Option<LibraryDescriptors>,
    operations: Operations,
    messages: Option<MessagePool>,
    /// Set if writes are proven by reads.
    scratch: Option<Arc<ScratchMemory>>,
    pieces: InFlightPieces,
    /// `None` if unknown.
    subnet: Option<Subnet>,
}

/// The numbers of operations that a rail has in flight at most, by kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Depths {
    pieces: usize,
    sends: usize,
    receives: usize,
}

impl Depths {
    /// Divides what an endpoint takes (operations that it initiates, and receives): at most half of
    /// the former are messages. An endpoint that reports 0 takes any number.
    fn new((transmits, receives): (usize, usize), messages: bool) -> Self {
        let most = |reported: usize| if reported == 0 { usize::MAX } else { reported };
        let (transmits, receives) = (most(transmits), most(receives));
        let messages = if messages { MESSAGES } else { 0 };
        let sends = messages.min((transmits / 2).max(1));
        let pieces = transmits.saturating_sub(sends).clamp(1, WINDOW.0);
        Depths { pieces, sends, receives: messages.min(receives) }
    }

    fn all(self) -> usize {
        self.pieces + self.sends + self.receives
    }
}

/// Counts pieces in flight.
struct InFlightPieces {
    all: usize,
    most: usize,
    /// Indexed by peer.
    of: Vec<usize>,
}

impl InFlightPieces {
    /// Returns whether `count` more pieces fit. Pieces to a stopped peer stay in the provider's
    /// queue, which all peers share. So no peer gets more than the capacity that is left for
    /// others, and at most half of a small queue; about ten stopped peers still leave capacity.
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
    /// Opens an endpoint, with a descriptor to sleep on if the provider has one. `messages`: the
    /// endpoint carries messages. `reads_back`: reads prove that writes have arrived. Errors:
    /// libfabric's.
    pub(crate) fn open(domain: &Arc<Domain>, messages: bool, reads_back: bool) -> Result<Rail> {
        let info = domain.info();
        let depths = Depths::new(info.depths(), messages);
        let messages = if messages { Some(MessagePool::new(domain, depths)?) } else { None };
        let operations = Operations::new(depths.all());
        let scratch = reads_back.then(|| ScratchMemory::new(domain).map(Arc::new)).transpose()?;
        let buffers = messages.as_ref().map(MessagePool::shared);
        let shared = Arc::new((operations.contexts(), buffers, scratch.clone()));
        let open_with =
            |sleeps| Endpoint::open(domain, sleeps, depths.all(), Arc::clone(&shared) as _);
        let endpoint = open_with(true).or_else(|errno| {
            tracing::debug!(
                provider = info.provider(),
                ?errno,
                "the provider has no descriptor to sleep on"
            );
            open_with(false)
        });
        let endpoint = endpoint
            .map_err(|errno| error::endpoint_error(&info.provider(), &info.domain(), errno))?;
        let sockets = match endpoint.wait_method() {
            WaitMethod::Descriptor(queue) => {
                Connections::of(queue).limit_requests();
                Some(connections::kept_from_children(queue))
            }
            WaitMethod::Never => None,
        };
        let address = info.has_socket_addresses().then(|| endpoint.address().ok()).flatten();
        let subnet = address.and_then(|address| Subnet::of_endpoint(&address));
        let endpoint = Some(Arc::new(endpoint));
        let pieces = InFlightPieces { all: 0, most: depths.pieces, of: Vec::new() };
        let pool = messages.as_ref().and_then(|messages| messages.shared.registration.as_ref());
        let scratched = scratch.as_ref().and_then(|scratch| scratch.registration());
        for registration in pool.into_iter().chain(scratched) {
            open(&endpoint).enable(registration).map_err(|errno| {
                error::native("the provider could not enable memory for messages", errno)
            })?;
        }
        let mut rail = Rail { endpoint, sockets, operations, messages, scratch, pieces, subnet };
        rail.post_receives().map_err(|errno| {
            error::native("libfabric could not take buffers for messages", errno)
        })?;
        Ok(rail)
    }

    pub(crate) fn endpoint(&self) -> &Arc<Endpoint> {
        open(&self.endpoint)
    }

    /// Returns the subnet of the endpoint's address, if it is known.
    pub(crate) fn subnet(&self) -> Option<Subnet> {
        self.subnet
    }

    /// Ends the rail, and lets the endpoint's other owners close it.
    pub(crate) fn leave(mut self) {
        self.sockets = None; // its queue may be closed from here on
        self.endpoint = None;
    }

    /// Ends the rail. Returns whether the provider certainly no longer accesses the memory that it
    /// was given.
    pub(crate) fn close(&mut self) -> bool {
        let Some(mut endpoint) = self.endpoint.take() else { return true };
        let connections = match endpoint.wait_method() {
            WaitMethod::Descriptor(queue) => Connections::of(queue),
            WaitMethod::Never => Connections::default(),
        };
        self.sockets = None; // its queue may be closed from here on
        let until = Instant::now() + LAST_USE;
        let certain = loop {
            match Arc::try_unwrap(endpoint) {
                Ok(endpoint) => break endpoint.close().is_ok(),
                Err(shared) if Instant::now() < until => {
                    endpoint = shared;
                    std::thread::sleep(Duration::from_micros(100));
                }
                Err(_) => break false, // its last owner closes it later
            }
        };
        connections.end();
        certain
    }

    /// Returns how many messages can be sent now.
    pub(crate) fn sends(&self) -> usize {
        self.messages.as_ref().map_or(0, |messages| messages.free.len())
    }

    /// Returns whether the provider has no pieces and no messages to send.
    pub(crate) fn is_quiet(&self) -> bool {
        self.pieces.all == 0
            && self.messages.as_ref().is_none_or(|messages| messages.free.len() == messages.sends)
    }

    /// Returns the maximum number of pieces per operation.
    pub(crate) fn together(&self) -> usize {
        self.endpoint().domain().info().ranges().min(MAX_RANGES).min(self.pieces.most)
    }

    /// Posts pieces with the same path as one operation: at least one, and at most
    /// [`together`](Rail::together).
    ///
    /// # Safety
    /// The pieces own the local memory until they are reported as [`RailEvent::Pieces`] or the rail
    /// is dropped.
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
        // SAFETY: guaranteed by the caller. The provider owns the context until it returns it; the
        // context outlives the endpoint.
        let answer = unsafe {
            match pieces {
                [range] => endpoint.transfer(op, *range, context),
                _ => endpoint.transfer_all(op, pieces.iter().copied(), context),
            }
        };
        self.count_posted(answer, context, peer, pieces.len())
    }

    /// Counts pieces that were posted with this context, or frees it after a failed post.
    #[inline]
    fn count_posted(
        &mut self,
        answer: Result<(), Errno>,
        context: *mut c_void,
        peer: usize,
        pieces: usize,
    ) -> Result<PostOutcome, Errno> {
        match answer {
            Ok(()) => {
                self.pieces.add(peer, pieces);
                Ok(PostOutcome::Posted)
            }
            Err(errno) => {
                self.operations.take(context);
                if errno == Errno(libc::EAGAIN) { Ok(PostOutcome::Later) } else { Err(errno) }
            }
        }
    }

    /// Reads a byte that a job has written: see [`read_back`](crate::read_back).
    pub(crate) fn read_back(
        &mut self,
        job: JobId,
        peer: usize,
        remote: RemoteRange,
    ) -> Result<PostOutcome, Errno> {
        let Some(scratch) = &self.scratch else { return Err(Errno(libc::EOPNOTSUPP)) };
        if !self.pieces.fit(peer, 1) {
            return Ok(PostOutcome::Later);
        }
        let Some(context) = self.operations.add(Operation::ReadBack { job, peer }) else {
            return Ok(PostOutcome::Later);
        };
        // SAFETY: the endpoint keeps the scratch memory and the context until it is closed, and
        // nobody else accesses the scratch memory.
        let answer =
            unsafe { open(&self.endpoint).transfer(Op::Read, scratch.range(remote), context) };
        self.count_posted(answer, context, peer, 1)
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
        let bytes = messages.shared.buffers[messages.receives + buffer].0.get().cast::<u8>();
        let len = message.len().min(MAX_MESSAGE);
        // SAFETY: a free buffer has no other user and is at least that long; the provider owns it
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

    /// Makes progress, and reports the operations that have ended. Returns whether there were any.
    /// Errors: the endpoint has become unusable.
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
                    "libfabric reports the end of an operation that was not posted: report this \
                     as a bug"
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
                    "libfabric reports a failure of an operation that was not posted"
                ),
            }
        }
        self.post_receives()?;
        Ok(!matches!(read, Read::Nothing))
    }

    /// Posts the buffers for messages that the provider does not have.
    fn post_receives(&mut self) -> Result<(), Errno> {
        let Some(messages) = &mut self.messages else { return Ok(()) };
        while let Some(buffer) = messages.unposted.pop() {
            let Some(context) = self.operations.add(Operation::Receive { buffer }) else {
                messages.unposted.push(buffer);
                return Ok(());
            };
            let bytes = messages.shared.buffers[buffer].0.get().cast();
            // SAFETY: a buffer that is not posted has no user; the provider owns it until it
            // returns the context.
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

#[cfg(test)]
impl Rail {
    /// Counts pieces to a peer until no more fit, as if it had stopped.
    pub(crate) fn fill_window(&mut self, peer: usize) {
        while self.pieces.fit(peer, 1) {
            self.pieces.add(peer, 1);
        }
    }
}

impl Drop for Rail {
    fn drop(&mut self) {
        self.close();
    }
}

#[inline]
fn open(endpoint: &Option<Arc<Endpoint>>) -> &Arc<Endpoint> {
    endpoint.as_ref().expect("a rail is not used after its end")
}

/// Converts the end of an operation to an event, and frees its buffer.
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
        (Operation::ReadBack { job, peer }, _) => {
            pieces.end(peer, 1);
            Some(RailEvent::ReadBack { job, peer, failed })
        }
        (Operation::Send { buffer, peer }, Some(messages)) => {
            messages.free.push(buffer);
            Some(RailEvent::Send { peer, failed })
        }
        (Operation::Receive { buffer }, Some(messages)) => {
            messages.unposted.push(buffer);
            if let Some(failed) = failed {
                tracing::debug!(?failed, "receiving a message failed");
                return None;
            }
            let bytes = messages.shared.buffers[buffer].0.get().cast::<u8>();
            // SAFETY: the provider has returned the buffer, with that many bytes in it.
            Some(RailEvent::Message(
                unsafe { std::slice::from_raw_parts(bytes, len.min(MAX_MESSAGE)) }.to_vec(),
            ))
        }
        (_, None) => None,
    }
}

#[repr(C, align(64))]
struct Buffer(UnsafeCell<[u8; MAX_MESSAGE]>);

// SAFETY: only raw copies access it, by the owner of the rail or by the provider.
unsafe impl Send for Buffer {}
// SAFETY: only raw copies access it, by the owner of the rail or by the provider.
unsafe impl Sync for Buffer {}

/// The buffers for messages.
struct MessagePool {
    shared: Arc<MessageBuffers>,
    sends: usize,
    receives: usize,
    /// Send buffers that the provider does not have, by index among the send buffers.
    free: Vec<usize>,
    /// Receive buffers that the provider does not have.
    unposted: Vec<usize>,
}

/// The buffers, which the endpoint keeps for the provider.
struct MessageBuffers {
    /// Dropped before the memory.
    registration: Option<Registration>,
    /// The receive buffers come first.
    buffers: Box<[Buffer]>,
}

impl MessagePool {
    fn new(domain: &Arc<Domain>, depths: Depths) -> Result<MessagePool> {
        let Depths { sends, receives, .. } = depths;
        let buffers: Box<[Buffer]> =
            (0..receives + sends).map(|_| Buffer(UnsafeCell::new([0; MAX_MESSAGE]))).collect();
        let (address, len) = (buffers.as_ptr().cast(), size_of_val(&*buffers));
        // SAFETY: `MessageBuffers` drops its registration before its buffers.
        let registration = unsafe { keys::register_local(domain, address, len) }?;
        let shared = Arc::new(MessageBuffers { registration, buffers });
        let (free, unposted) = ((0..sends).collect(), (0..receives).collect());
        Ok(MessagePool { shared, sends, receives, free, unposted })
    }

    fn shared(&self) -> Arc<MessageBuffers> {
        Arc::clone(&self.shared)
    }

    fn descriptor(&self) -> *mut c_void {
        self.shared.registration.as_ref().map_or(std::ptr::null_mut(), Registration::descriptor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depths_follow_what_the_endpoint_takes() {
        let depths = |taken, messages| {
            let Depths { pieces, sends, receives } = Depths::new(taken, messages);
            (pieces, sends, receives)
        };
        assert_eq!(depths((4096, 4096), true), (2048, 64, 64));
        assert_eq!(depths((1024, 1024), true), (960, 64, 64));
        assert_eq!(depths((1024, 1024), false), (1024, 0, 0));
        assert_eq!(depths((256, 16), true), (192, 64, 16));
        assert_eq!(depths((8, 8), true), (4, 4, 8));
        assert_eq!(depths((1, 1), true), (1, 1, 1), "one at a time");
        assert_eq!(depths((0, 0), true), (2048, 64, 64), "no limit is reported");
    }

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
