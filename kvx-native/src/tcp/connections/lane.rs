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

/// What the connections of a machine share, each in its turn.
pub(crate) struct Scope {
    pub(crate) context: Arc<AgentContext>,
    /// Whether others went on without the turn that has this.
    pub(crate) left_behind: Arc<AbandonedTurn>,
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
            left_behind: Arc::default(),
            bin,
            pieces: Vec::with_capacity(MAX_PIECES + 2),
            effects: Vec::new(),
            described: 0,
            piece: MAX_DATA,
            small_came: false,
        }
    }

    /// Errors: the turn is one that others went on without.
    pub(crate) fn go_on(&self) -> Result<()> {
        if self.left_behind.is_so() { Err(error::closed("the connection")) } else { Ok(()) }
    }
}

/// What a connection tells the machine.
#[derive(Debug)]
pub(crate) enum Effect {
    /// A lane is up.
    Welcome { link: LinkId, lane: u8, seal: Seal },
    /// Another incarnation answered.
    Restarted { link: LinkId },
    /// A request has ended: one of a transfer's, or one that was given up. There is room for another.
    Ended { link: LinkId, transfer: Option<TransferId>, result: Result<()> },
    /// A transfer's local memory cannot be read or written.
    Failed { link: LinkId, transfer: TransferId, why: Error },
    /// A notification has arrived.
    Acked { link: LinkId, id: u64 },
    /// A peer got in.
    Entered { key: usize },
    /// A peer takes back a request of another of its lanes.
    Cancelled { link: [u8; 16], lane: u8, id: u64 },
}

/// One end of a lane whose handshake is done: an initiator's requests, or the owner that serves them.
pub(crate) trait LaneEnd {
    /// A frame that is no payload. Errors end the connection.
    fn frame(
        &mut self,
        header: Header,
        body: &[u8],
        output: &mut Output,
        scope: &mut Scope,
    ) -> Result<()>;

    /// Payload begins. Errors end the connection.
    fn data(&mut self, header: Header) -> Result<()>;

    /// Where the next of it goes. False: there is no place now.
    fn fill(
        &mut self,
        chunk: &mut Chunk,
        max: usize,
        output: &mut Output,
        scope: &mut Scope,
    ) -> bool;

    /// So many bytes went where `fill` said.
    fn took(&mut self, count: usize);

    /// Nothing comes now. Says whether what `fill` said holds no longer.
    fn pause(&mut self) -> bool;

    /// Payload has ended.
    fn data_end(&mut self, output: &mut Output, scope: &mut Scope);

    /// Puts the next frame with payload into the output, if there is one.
    fn next_frame(&mut self, output: &mut Output, scope: &mut Scope);

    /// Whether there is one.
    fn has_frames(&self) -> bool;

    /// Whether it has blocks of a device to send.
    fn has_streams(&self) -> bool;

    /// Its peer does not read: nobody waits for what it keeps.
    fn make_way(&mut self, output: &mut Output);

    /// A device has copied for one of its streams.
    fn woken(&mut self, token: u64, input: &mut Input, output: &mut Output, scope: &mut Scope);

    /// Nothing comes and goes any more: lets go of all memory.
    fn release(&mut self, deferred: &DeferredCompletions);

    /// Whether nothing more is read before some of what waits has gone out.
    fn is_paused(&self, _output: &Output, _described_in_all: usize) -> bool {
        false
    }
}
