//! Fetches the blocks of a prefill, for engines without a step loop.

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
    /// The tokens of the prompt whose KV cache the load has filled in.
    ///
    /// The range starts at the `computed` argument of [`Decode::fetch`] and ends with the last
    /// token that the prefill published. If that is the whole prompt, the engine still computes its
    /// last token again, because it needs that token's output.
    pub tokens: Range<u32>,
}

/// A load that did not fill all its blocks.
#[derive(Debug)]
#[non_exhaustive]
pub struct LoadError {
    /// The reason.
    pub failure: LoadFailure,
    /// The next step for the request: fail it, or compute the rest of its prompt here.
    ///
    /// `kv_load_failure_policy` decides (`fail` by default), with these exceptions. It is
    /// [`Then::Fail`] after the deadline of the request and after a shutdown. It is
    /// [`Then::Recompute`] for a load that was refused before it started, or that failed with
    /// [`LoadFailure::Expiring`].
    pub then: Then,
    /// Blocks with wrong contents. They must never enter a prefix cache.
    pub invalid: Vec<u32>,
    /// Blocks that a transfer may still write to. No other request may use them before they are
    /// released.
    pub held: HeldBlocks,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failure.fmt(f)
    }
}

impl std::error::Error for LoadError {}

impl LoadError {
    /// Builds the error of a load that never started. The engine had `computed` tokens before.
    pub(super) fn refused(why: String, computed: u32) -> Self {
        LoadError {
            failure: LoadFailure::Refused(why),
            then: Then::Recompute { computed },
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

    /// Loads the part of a prompt that this engine does not have into `blocks`.
    ///
    /// - `params` come from the prefill ([`Prefill::publish`](super::Prefill::publish)) and name
    ///   its blocks.
    /// - `computed` is the number of tokens that this engine has already: a multiple of the block
    ///   size, or the whole prompt.
    /// - `blocks` receive the tokens after `computed`, in order: one block for each block that holds
    ///   them at the prefill. If this engine has the whole prompt, give no blocks. Nothing is
    ///   transferred then, and the prefill is notified that it may free its own.
    /// - `deadline` is the deadline of the request as a whole. A load that misses it fails with
    ///   [`Then::Fail`]. `load_timeout` of `kv_connector_extra_config` (120 s by default) limits
    ///   the load alone.
    ///
    /// The load starts at once. A load that is refused before it starts, or whose handshake fails,
    /// does not notify the prefill: its blocks stay until their lease ends.
    ///
    /// Heartbeats renew that lease only while the load runs. If requests wait for free blocks
    /// longer than a lease lasts, use the calls of a step loop instead:
    /// [`Connector::on_new_request`] starts the heartbeats when the request arrives.
    ///
    /// # Errors
    /// The fetch itself ends with a [`LoadError`]. Its `failure` is one of these:
    ///
    /// - [`Refused`](LoadFailure::Refused): the load did not start. The parameters cannot be used;
    ///   `computed` and the number of blocks do not add up to the tokens that the prefill
    ///   published; a request of this name has not ended; this engine has no caches registered or
    ///   has lost a rank; or the connector was shut down. After the start it means that the
    ///   parameters do not fit the peer: block numbers beyond its pool, or an old registration.
    /// - [`Handshake`](LoadFailure::Handshake): the prefill could not be reached, has restarted, or
    ///   is incompatible with this engine.
    /// - [`Transfer`](LoadFailure::Transfer): a read, a registration or a notification failed, or
    ///   the connector was shut down.
    ///
    ///   A prefill that has died causes either of these two, depending on the backend and on the
    ///   moment. A prefill that is stopped (SIGSTOP) does not disturb a load over SHM; over other
    ///   backends the load ends at its deadline.
    /// - [`Stale`](LoadFailure::Stale), [`Corrupt`](LoadFailure::Corrupt): the lease had ended, or
    ///   the contents do not match the prefill's digests.
    /// - [`Expiring`](LoadFailure::Expiring), [`NotPushed`](LoadFailure::NotPushed): the peer is
    ///   about to free the blocks, or did not write them in time.
    /// - [`Deadline`](LoadFailure::Deadline): the deadline or `load_timeout` passed.
    /// - [`Rank`](LoadFailure::Rank): this engine lost a rank.
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

/// The result of a load that never started.
struct EarlyEnd {
    end: Result<Loaded, LoadError>,
    /// True if the name is in use. Outcomes under it then belong to another request.
    known: bool,
}

/// The part of a prompt that an engine does not have.
struct MissingPart {
    /// The first token of this part.
    computed: u32,
    blocks: BlockLists,
}

/// Starts a load. Returns its result if it did not start.
fn begin(
    connector: &Connector,
    request: &RequestId,
    params: &TransferParams,
    MissingPart { computed, blocks: fill }: MissingPart,
    deadline: Deadline,
    slot: &Arc<Slot<LoadEnd>>,
) -> Option<EarlyEnd> {
    let early = |end| Some(EarlyEnd { end, known: false });
    let refused = |why: String| early(Err(LoadError::refused(why, computed)));
    let settings = connector.settings();
    if !params.do_remote_prefill {
        return refused("the parameters name no remote prefill (do_remote_prefill)".into());
    }
    let size = settings.block_size;
    let whole = fill.groups().iter().zip(&settings.groups).find(|(_, window)| window.is_none());
    let given = whole.map(|(list, _)| u32::try_from(list.len()).unwrap_or(u32::MAX));
    // The parameters of a MooncakeConnector name no blocks: the prefill has one for each block to
    // fill.
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
            "the engine has {computed} tokens of the prompt, and the prefill has {held}: load \
             nothing"
        ));
    }
    if computed < held && !computed.is_multiple_of(size) {
        return refused(format!(
            "the engine has {computed} tokens of the prompt, which is not a multiple of the block \
             size {size}"
        ));
    }
    let nothing = fill.is_empty();
    let needed = held.div_ceil(size) - computed.div_ceil(size);
    // A window's list does not cover the tokens before the window.
    let given = if nothing { 0 } else { given.unwrap_or(needed) };
    if given != needed {
        return refused(format!(
            "{given} blocks to fill, and tokens {computed} to {held} of the prefill need \
             {needed}: give one block for each of them, and none for the tokens before"
        ));
    }
    let prompt_tokens = held.saturating_add(settings.prefill_backoff);
    let until = connector.time(deadline);
    let arrival = Arrival { request, prompt_tokens, params: Some(params), deadline: Some(until) };
    let shared = connector.shared();
    if let Err(why) = arrive(shared, arrival, |outcomes| outcomes.wait_for_load(request, slot)) {
        let end = Err(LoadError::refused(why.to_string(), computed));
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
        Ok(()) => refused(
            "the parameters name no blocks for the tokens to load: compute the prompt here".into(),
        ),
        Err(why) => refused(why.to_string()),
    }
}

/// Converts the end of a load that started at token `first`.
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

/// A load in progress. Await it, or call [`join`](Self::join) without a runtime.
///
/// Dropping it before its end aborts the load and notifies the prefill.
/// [`outcomes`](Connector::outcomes) then returns one outcome for its blocks, `Free` or `Lost`.
/// [`cancel`](Self::cancel) aborts the load too, and returns a handle to wait on instead. A fetch
/// that was refused because its name is in use has no outcome.
#[must_use = "dropping a fetch aborts it"]
pub struct Fetch {
    connector: Connector,
    request: RequestId,
    /// The number of tokens of the prompt that the engine had before the load.
    computed: u32,
    slot: Arc<Slot<LoadEnd>>,
    /// The result, if the load never started.
    early: Option<Box<EarlyEnd>>,
    over: bool,
}

impl Fetch {
    /// Returns the name of the request.
    pub fn request(&self) -> &RequestId {
        &self.request
    }

    /// Blocks the thread until the load has ended, at the latest by its own deadline.
    ///
    /// # Errors
    /// Those of [`Decode::fetch`].
    pub fn join(self) -> Result<Loaded, LoadError> {
        let mut fetch = self;
        loop {
            match fetch.wait_blocking(Duration::MAX) {
                Ok(end) => return end,
                Err(again) => fetch = again,
            }
        }
    }

    /// Blocks the thread until the load has ended or this deadline has passed. To wait for the
    /// load's own deadline, call [`join`](Self::join): here either of two equal deadlines may pass
    /// first.
    ///
    /// # Errors
    /// The outer `Err` returns the fetch, which continues, if it has not ended by the deadline. The
    /// inner errors are those of [`Decode::fetch`].
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

    /// Aborts the load and returns the blocks that a transfer may still write to. The engine may
    /// reuse the blocks of the load once these are released.
    ///
    /// Treat the blocks' contents as wrong, even if the load had already ended. In either case the
    /// prefill's lease ends as fetched, because this decode does not want the blocks any more.
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
        // The engine receives the outcome of the held blocks.
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

/// Blocks that a transfer may still write to.
///
/// If it is dropped, [`outcomes`](Connector::outcomes) returns the release of the blocks.
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

    /// Returns whether no blocks are held, so that the engine may reuse all blocks of the load.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Returns the blocks. After [`Fetch::cancel`] the lists are empty, and all blocks of the load
    /// are held.
    pub fn blocks(&self) -> BlockLists {
        self.0.as_ref().map(|held| held.blocks.clone()).unwrap_or_default()
    }

    /// Waits until no transfer can touch the blocks any more. Returns at once if none are held.
    pub async fn released(mut self) -> Released {
        let Some(held) = &self.0 else { return Released::Free };
        let released = std::future::poll_fn(|context| held.slot.poll(context)).await;
        self.0 = None;
        released
    }

    /// Blocks the thread until the blocks are released, as [`released`](Self::released) does
    /// without blocking.
    ///
    /// # Errors
    /// Returns the held blocks if they are not released by the deadline.
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
        // Expected race: the blocks were released in the meantime.
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
        f.debug_tuple("HeldBlocks").field(&self.0.as_ref().map(|held| &held.request)).finish()
    }
}
