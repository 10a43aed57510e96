//! Fetching the blocks of a prefill, for engines without a step loop.

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use kvx_core::Deadline;

use super::connector::{Connector, arrive};
use super::outcomes::{LoadEnd, Released};
use super::requests::{self, AbandonedLoad};
use super::slot::Slot;
use kvx_vllm::engine::{
    Allocation, Arrival, BlockLists, Ending, Kept, LoadFailure, NotLoaded, Outcome, RequestId, Then,
};
use kvx_vllm::params::{OlderMooncakeParams, TransferParams};

/// The decode side of a connector: it loads blocks of a prefill.
#[derive(Clone, Copy, Debug)]
pub struct Decode<'a>(&'a Connector);

/// A load that has filled its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// The tokens of the prompt that arrived: from the first one that the engine did not have to
    /// the last one that the prefill had. The range includes the last token of a prompt that was
    /// loaded whole, which the engine computes again for its output.
    pub tokens: Range<u32>,
}

/// A load that did not fill all its blocks.
#[derive(Debug)]
#[non_exhaustive]
pub struct LoadError {
    /// Why.
    pub failure: LoadFailure,
    /// The next step of the engine with the request, by `kv_load_failure_policy`. `Fail` once its
    /// deadline is past, whatever the policy, and `Recompute` for one that was refused before it
    /// began.
    pub then: Then,
    /// Blocks without the right contents: never to be found in a prefix cache.
    pub invalid: Vec<u32>,
    /// Blocks that a transfer may still touch, if there are any.
    pub held: HeldBlocks,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failure.fmt(f)
    }
}

impl std::error::Error for LoadError {}

impl LoadError {
    /// One before anything was begun.
    pub(super) fn refused(failure: LoadFailure) -> Self {
        LoadError {
            failure,
            then: Then::Recompute { computed: 0 },
            invalid: Vec::new(),
            held: HeldBlocks::nothing(),
        }
    }
}

impl<'a> Decode<'a> {
    /// Returns the decode side of this connector.
    pub fn new(connector: &'a Connector) -> Self {
        Decode(connector)
    }

    /// Loads the prompt that `params` name into `blocks`, from token `computed` on: the engine has
    /// those before it already, whole blocks of them, or the whole prompt. `blocks` are those of
    /// the tokens that it does not have, all of them and in order. If the engine has the whole
    /// prompt and gives no blocks, nothing is loaded, and the prefill is notified that it may free
    /// its own.
    ///
    /// The load starts at once and ends by the deadline, which is that of the request: after it
    /// nobody waits for the answer, and `then` is `Fail`. `load_timeout` of
    /// `kv_connector_extra_config` (120 s by default) limits the load alone. A load that is refused
    /// before it starts, or whose handshake fails, leaves the prefill's blocks to their lease. An
    /// engine whose requests wait for free blocks longer than a lease lasts uses the calls of a
    /// step loop, [`Connector::on_new_request`] first: heartbeats then start with the request.
    ///
    /// # Errors
    /// [`LoadFailure::Refused`] when `computed` and the number of blocks do not add up to the
    /// tokens that the prefill has, and for parameters that cannot be used. The other failures are
    /// those of the transfer.
    pub fn fetch(
        &self,
        request: impl Into<RequestId>,
        params: &TransferParams,
        computed: u32,
        blocks: BlockLists,
        deadline: impl Into<Deadline>,
    ) -> Fetch {
        let (connector, request) = (self.0, request.into());
        let slot = Slot::new();
        let wanted = MissingPart { computed, blocks };
        let early =
            begin(connector, &request, params, wanted, deadline.into(), &slot).map(Box::new);
        Fetch { connector: connector.clone(), request, computed, slot, early, over: false }
    }
}

/// The end of a load that never began.
struct EarlyEnd {
    end: Result<Loaded, LoadError>,
    /// The name is in use: outcomes under it belong to another request.
    known: bool,
}

/// The part of a prompt that an engine does not have.
struct MissingPart {
    /// The first token of it.
    computed: u32,
    blocks: BlockLists,
}

/// Orders a load. Returns its end if it never began.
fn begin(
    connector: &Connector,
    request: &RequestId,
    params: &TransferParams,
    MissingPart { computed, blocks: fill }: MissingPart,
    deadline: Deadline,
    slot: &Arc<Slot<LoadEnd>>,
) -> Option<EarlyEnd> {
    let early = |end| Some(EarlyEnd { end, known: false });
    let refused = |why: String| early(Err(LoadError::refused(LoadFailure::Refused(why))));
    let settings = connector.settings();
    if !params.do_remote_prefill {
        return refused("they name no remote prefill (do_remote_prefill)".into());
    }
    let size = settings.block_size;
    let whole = fill.groups().iter().zip(&settings.groups).find(|(_, window)| window.is_none());
    let given = whole.map(|(list, _)| u32::try_from(list.len()).unwrap_or(u32::MAX));
    // The parameters of a MooncakeConnector name no blocks: the prefill has those that are to be
    // filled.
    let at_hand = || (computed.div_ceil(size)).saturating_add(given.unwrap_or(0));
    let theirs = match &settings.mooncake {
        None => params.remote_blocks_for(settings.mode).map(|remote| {
            let longest = remote.block_ids.iter().map(Vec::len).max().unwrap_or(0);
            u32::try_from(longest).unwrap_or(u32::MAX)
        }),
        Some(mooncake) if mooncake.is_older() => {
            OlderMooncakeParams::from_params(params).map(|_| at_hand())
        }
        Some(_) => params.mooncake().map(|_| at_hand()),
    };
    let theirs = match theirs {
        Ok(theirs) => theirs,
        Err(why) => return refused(why.to_string()),
    };
    let all = u64::from(theirs) * u64::from(size);
    let held = u32::try_from(params.remote_num_tokens.unwrap_or(all)).unwrap_or(u32::MAX);
    if computed > held {
        return refused(format!(
            "the engine has {computed} tokens of the prompt, and the prefill has {held}: load nothing"
        ));
    }
    if computed < held && !computed.is_multiple_of(size) {
        return refused(format!(
            "the engine has {computed} tokens of the prompt, which are no whole blocks of {size}"
        ));
    }
    let nothing = fill.is_empty();
    let needed = held.div_ceil(size) - computed.div_ceil(size);
    // A window's list says nothing of the tokens before it.
    let given = if nothing { 0 } else { given.unwrap_or(needed) };
    if given != needed {
        return refused(format!(
            "{given} blocks to fill, and tokens {computed} to {held} of the prefill need {needed}: give a block for \
             each of them, and none for those before"
        ));
    }
    let prompt_tokens = held.saturating_add(settings.prefill_backoff);
    let until = connector.time(deadline);
    let arrival = Arrival { request, prompt_tokens, params: Some(params), deadline: Some(until) };
    let shared = connector.shared();
    if let Err(why) = arrive(shared, arrival, |outcomes| outcomes.wait_for_load(request, slot)) {
        let end = Err(LoadError::refused(LoadFailure::Refused(why.to_string())));
        return Some(EarlyEnd { end, known: why == NotLoaded::Known });
    }
    let external = connector.get_num_new_matched_tokens(request, computed).tokens;
    let ordered =
        connector.update_state_after_alloc(request, Allocation { fill, computed, external });
    if ordered.is_ok() && external > 0 {
        shared.with_state(|state, now| state.pass_on_ready(now, Some(request)));
        return None;
    }
    if let AbandonedLoad::Ended(end) = requests::abandon(shared, request, slot) {
        return early(ended(connector, request, computed, end));
    }
    match ordered {
        Ok(()) if nothing => early(Ok(Loaded { tokens: computed..held })),
        Ok(()) => {
            refused("they name no blocks for what is to be filled: compute the prompt here".into())
        }
        Err(why) => refused(why.to_string()),
    }
}

/// How a load of a prompt from token `first` on has ended.
fn ended(
    connector: &Connector,
    request: &RequestId,
    first: u32,
    end: LoadEnd,
) -> Result<Loaded, LoadError> {
    match end.outcome {
        Outcome::Loaded { computed: last, .. } => Ok(Loaded { tokens: first..last }),
        Outcome::Failed { failure, then, invalid, held, .. } => {
            let held = match end.held {
                None => HeldBlocks::nothing(),
                Some(slot) => HeldBlocks::of(connector, request, slot, held),
            };
            Err(LoadError { failure, then, invalid, held })
        }
        Outcome::Free { .. } | Outcome::Lost { .. } => unreachable!("only loads end by this slot"),
    }
}

/// A load that is under way: a future, or [`join`](Self::join) without a runtime.
///
/// Dropping it before its end aborts it and notifies the prefill. The engine then gets one outcome
/// of its blocks from [`outcomes`](Connector::outcomes), `Free` or `Lost`; [`cancel`](Self::cancel)
/// returns something to wait for instead. A fetch that was refused because its name is in use has
/// no outcome.
#[must_use = "dropping a fetch aborts it"]
pub struct Fetch {
    connector: Connector,
    request: RequestId,
    /// Tokens that the engine had before.
    computed: u32,
    slot: Arc<Slot<LoadEnd>>,
    /// Its end, if it never began.
    early: Option<Box<EarlyEnd>>,
    over: bool,
}

impl Fetch {
    /// The request.
    pub fn request(&self) -> &RequestId {
        &self.request
    }

    /// Blocks until it has ended, which it does by its own deadline.
    pub fn join(self) -> Result<Loaded, LoadError> {
        let mut fetch = self;
        loop {
            match fetch.wait_blocking(Duration::MAX) {
                Ok(end) => return end,
                Err(again) => fetch = again,
            }
        }
    }

    /// Blocks until it has ended. `Err`: not by this deadline; it continues. With the fetch's own
    /// deadline either may be first: [`join`](Self::join) waits for that.
    pub fn wait_blocking(
        mut self,
        deadline: impl Into<Deadline>,
    ) -> Result<Result<Loaded, LoadError>, Fetch> {
        if let Some(early) = self.early.take() {
            self.over = true;
            return Ok(early.end);
        }
        match self.slot.wait(deadline.into()) {
            Some(end) => Ok(self.ended(end)),
            None => Err(self),
        }
    }

    /// Aborts it. Its blocks are the engine's again once the held ones are free.
    pub fn cancel(mut self) -> HeldBlocks {
        self.abandon()
    }

    fn abandon(&mut self) -> HeldBlocks {
        self.over = true;
        let end = match self.early.take() {
            Some(early) => early.end,
            None => match requests::abandon(self.connector.shared(), &self.request, &self.slot) {
                AbandonedLoad::Ended(end) => {
                    ended(&self.connector, &self.request, self.computed, end)
                }
                AbandonedLoad::Held(slot) => {
                    return HeldBlocks::of(
                        &self.connector,
                        &self.request,
                        slot,
                        BlockLists::default(),
                    );
                }
                AbandonedLoad::NotBegun => return HeldBlocks::nothing(),
            },
        };
        end.err().map_or_else(HeldBlocks::nothing, |error| error.held)
    }

    fn ended(&mut self, end: LoadEnd) -> Result<Loaded, LoadError> {
        self.over = true;
        self.connector.request_finished(&self.request, Ending::aborted());
        ended(&self.connector, &self.request, self.computed, end)
    }
}

impl Future for Fetch {
    type Output = Result<Loaded, LoadError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(early) = self.early.take() {
            self.over = true;
            return Poll::Ready(early.end);
        }
        match self.slot.poll(context) {
            Poll::Ready(end) => Poll::Ready(self.ended(end)),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let known = self.early.as_ref().is_some_and(|early| early.known);
        // The outcome of the held blocks goes to the engine.
        if self.abandon().is_empty() && !known {
            let request = self.request.clone();
            self.connector.shared().queue(Outcome::Free { request, kept: Kept::Load });
        }
    }
}

impl fmt::Debug for Fetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fetch({:?})", self.request)
    }
}

/// Blocks that a transfer may still touch. After a drop, [`outcomes`](Connector::outcomes) has
/// their release.
#[must_use = "no request gets these blocks before they are free"]
pub struct HeldBlocks(Option<HeldParts>);

struct HeldParts {
    connector: Connector,
    request: RequestId,
    slot: Arc<Slot<Released>>,
    blocks: BlockLists,
}

impl HeldBlocks {
    pub(super) fn nothing() -> Self {
        HeldBlocks(None)
    }

    fn of(
        connector: &Connector,
        request: &RequestId,
        slot: Arc<Slot<Released>>,
        blocks: BlockLists,
    ) -> Self {
        HeldBlocks(Some(HeldParts {
            connector: connector.clone(),
            request: request.clone(),
            slot,
            blocks,
        }))
    }

    /// Returns whether there are none: then all blocks are the engine's already.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// The blocks. After [`Fetch::cancel`] they are all that the load was to fill, and the lists
    /// are empty.
    pub fn blocks(&self) -> BlockLists {
        self.0.as_ref().map(|held| held.blocks.clone()).unwrap_or_default()
    }

    /// Ends when nothing touches them any more; at once if there are none.
    pub async fn released(mut self) -> Released {
        let Some(held) = &self.0 else { return Released::Free };
        let released = std::future::poll_fn(|context| held.slot.poll(context)).await;
        self.0 = None;
        released
    }

    /// As [`released`](Self::released), without a runtime. `Err`: not by the deadline.
    pub fn wait_blocking(mut self, deadline: impl Into<Deadline>) -> Result<Released, HeldBlocks> {
        let Some(held) = &self.0 else { return Ok(Released::Free) };
        match held.slot.wait(deadline.into()) {
            Some(released) => {
                self.0 = None;
                Ok(released)
            }
            None => Err(self),
        }
    }
}

impl Drop for HeldBlocks {
    fn drop(&mut self) {
        let Some(HeldParts { connector, request, slot, .. }) = self.0.take() else { return };
        let mut state = connector.shared().state.lock();
        state.outcomes.forget_release(&request, Kept::Load, &slot);
        drop(state);
        // Expected race: they were released just now.
        match slot.take() {
            Some(Released::Lost) => {
                connector.shared().queue(Outcome::Lost { request, kept: Kept::Load })
            }
            Some(_) => connector.shared().queue(Outcome::Free { request, kept: Kept::Load }),
            None => {}
        }
    }
}

impl fmt::Debug for HeldBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Held").field(&self.0.as_ref().map(|held| &held.request)).finish()
    }
}
