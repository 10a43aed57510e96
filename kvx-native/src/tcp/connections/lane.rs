//! One end of a lane whose handshake is done, and the state that all lanes of its machine share.

use std::sync::Arc;

use kvx_core::backend::LinkId;
use kvx_core::{Error, Result, TransferId};

use crate::tcp::context::AgentContext;
use crate::tcp::error;
use crate::tcp::frames::input::Input;
use crate::tcp::frames::output::Output;
use crate::tcp::frames::{Header, MAX_DATA};
use crate::tcp::memory::deferred::{AbandonedTurn, DeferredCompletions};
use crate::tcp::seal::Seal;
use crate::tcp::socket::chunk::{Bin, Chunk, MAX_PIECES};

/// State that all connections of a machine share, each during its turn.
pub(crate) struct Scope {
    pub(crate) context: Arc<AgentContext>,
    /// The state of the turn that uses this.
    pub(crate) turn: Arc<AbandonedTurn>,
    pub(crate) bin: Bin,
    /// Scratch space for one system call.
    pub(crate) pieces: Vec<libc::iovec>,
    pub(crate) effects: Vec<Effect>,
    /// The bytes of queued descriptions, over all lanes of peers.
    pub(crate) described: usize,
    /// The current limit for payload that is moved at a time.
    pub(crate) piece: usize,
    /// True if a small transfer has arrived.
    pub(crate) small_came: bool,
}

// SAFETY: `pieces` is only used within a system call; all other fields are `Send`.
unsafe impl Send for Scope {}

impl Scope {
    pub(crate) fn new(context: Arc<AgentContext>, bin: Bin) -> Self {
        Scope {
            context,
            turn: Arc::default(),
            bin,
            pieces: Vec::with_capacity(MAX_PIECES + 2),
            effects: Vec::new(),
            described: 0,
            piece: MAX_DATA,
            small_came: false,
        }
    }

    /// Returns an error if the turn was abandoned.
    pub(crate) fn go_on(&self) -> Result<()> {
        if self.turn.is_abandoned() { Err(error::closed("the connection")) } else { Ok(()) }
    }
}

/// A report of a connection to the machine.
#[derive(Debug)]
pub(crate) enum Effect {
    /// A lane is up.
    Welcome { link: LinkId, lane: u8, seal: Seal },
    /// Another incarnation of the peer answered.
    Restarted { link: LinkId },
    /// A request has ended: one of a transfer, or one that was given up. Another may be sent.
    Ended { link: LinkId, transfer: Option<TransferId>, result: Result<()> },
    /// A transfer's local memory cannot be read or written.
    Failed { link: LinkId, transfer: TransferId, why: Error },
    /// A notification was acknowledged.
    Acked { link: LinkId, id: u64 },
    /// A peer was admitted.
    Entered { key: usize },
    /// A peer cancels a request on another of its lanes.
    Cancelled { link: [u8; 16], lane: u8, id: u64 },
}

/// One end of a lane whose handshake is done: an initiator with its requests, or the owner that
/// serves them.
pub(crate) trait LaneEnd {
    /// Handles a frame that is not payload. An error ends the connection.
    fn frame(
        &mut self,
        header: Header,
        body: &[u8],
        output: &mut Output,
        scope: &mut Scope,
    ) -> Result<()>;

    /// Begins payload. An error ends the connection.
    fn data(&mut self, header: Header) -> Result<()>;

    /// Adds the places of the next payload to `chunk`. Returns false if there is none now.
    fn fill(
        &mut self,
        chunk: &mut Chunk,
        max: usize,
        output: &mut Output,
        scope: &mut Scope,
    ) -> bool;

    /// Records that `count` bytes were received in the places of `fill`.
    fn took(&mut self, count: usize);

    /// Records that no payload is received now. Returns true if the places of `fill` become
    /// invalid.
    fn pause(&mut self) -> bool;

    /// Ends payload.
    fn data_end(&mut self, output: &mut Output, scope: &mut Scope);

    /// Writes the next frame with payload to the output, if there is one.
    fn next_frame(&mut self, output: &mut Output, scope: &mut Scope);

    /// Returns true if there are frames with payload.
    fn has_frames(&self) -> bool;

    /// Returns true if the lane has blocks of a device to send.
    fn has_streams(&self) -> bool;

    /// Releases resources for which others wait, because its peer does not read.
    fn make_way(&mut self, output: &mut Output);

    /// Continues a stream for which a device has copied.
    fn woken(&mut self, token: u64, input: &mut Input, output: &mut Output, scope: &mut Scope);

    /// Releases all memory: the lane neither receives nor sends any more.
    fn release(&mut self, deferred: &DeferredCompletions);

    /// Returns true if reading stops until some of the waiting output is sent.
    fn is_paused(&self, _output: &Output, _described_in_all: usize) -> bool {
        false
    }
}
