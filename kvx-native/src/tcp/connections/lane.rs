//! One end of a lane whose handshake is done, and what it shares with all others of its machine.

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

/// State that all connections of a machine share, each in its turn.
pub(crate) struct Scope {
    pub(crate) context: Arc<AgentContext>,
    /// The state of the turn that has this.
    pub(crate) turn: Arc<AbandonedTurn>,
    pub(crate) bin: Bin,
    /// Scratch for one system call.
    pub(crate) pieces: Vec<libc::iovec>,
    pub(crate) effects: Vec<Effect>,
    /// Bytes of queued descriptions, over all lanes that are served.
    pub(crate) described: usize,
    /// The most payload that is moved at a time now.
    pub(crate) piece: usize,
    /// A small transfer has come.
    pub(crate) small_came: bool,
}

// SAFETY: `pieces` means nothing between two system calls; all else is Send.
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
    /// Another incarnation answered.
    Restarted { link: LinkId },
    /// A request has ended: one of a transfer's, or one that was given up. Another may follow.
    Ended { link: LinkId, transfer: Option<TransferId>, result: Result<()> },
    /// A transfer's local memory cannot be read or written.
    Failed { link: LinkId, transfer: TransferId, why: Error },
    /// A notification has arrived.
    Acked { link: LinkId, id: u64 },
    /// A peer was admitted.
    Entered { key: usize },
    /// A peer cancels a request of another of its lanes.
    Cancelled { link: [u8; 16], lane: u8, id: u64 },
}

/// One end of a lane whose handshake is done: an initiator's requests, or the owner that serves
/// them.
pub(crate) trait LaneEnd {
    /// Handles a frame that is no payload. Errors end the connection.
    fn frame(
        &mut self,
        header: Header,
        body: &[u8],
        output: &mut Output,
        scope: &mut Scope,
    ) -> Result<()>;

    /// Begins payload. Errors end the connection.
    fn data(&mut self, header: Header) -> Result<()>;

    /// Adds the places of the next payload to `chunk`. Returns false if there is none now.
    fn fill(
        &mut self,
        chunk: &mut Chunk,
        max: usize,
        output: &mut Output,
        scope: &mut Scope,
    ) -> bool;

    /// Notes that so many bytes were received where `fill` said.
    fn took(&mut self, count: usize);

    /// Notes that no payload is received now. Returns whether the places of `fill` hold no longer.
    fn pause(&mut self) -> bool;

    /// Ends payload.
    fn data_end(&mut self, output: &mut Output, scope: &mut Scope);

    /// Puts the next frame with payload into the output, if there is one.
    fn next_frame(&mut self, output: &mut Output, scope: &mut Scope);

    /// Returns true if there is one.
    fn has_frames(&self) -> bool;

    /// Returns true if it has blocks of a device to send.
    fn has_streams(&self) -> bool;

    /// Frees what others wait for, as its peer does not read.
    fn make_way(&mut self, output: &mut Output);

    /// Continues a stream for which a device has copied.
    fn woken(&mut self, token: u64, input: &mut Input, output: &mut Output, scope: &mut Scope);

    /// Releases all memory: the lane receives and sends no more.
    fn release(&mut self, deferred: &DeferredCompletions);

    /// Returns true if reading stops until some of the waiting output is sent.
    fn is_paused(&self, _output: &Output, _described_in_all: usize) -> bool {
        false
    }
}
