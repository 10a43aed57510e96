//! The scheduler's side: which blocks to load, which to keep for a peer, and the outcomes of both.

mod heartbeats;
mod outcome;
mod publish;
mod transfer;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use self::heartbeats::Heartbeats;
pub use self::outcome::{Outcome, Then};
pub use self::publish::{Ending, Finished, Status, Withheld};
use super::remote::RemoteEngine;
use super::settings::Settings;
use super::step::{ConnectorMeta, ReceiveOrder, RemoteRequest};
use super::trust::Untrusted;
use crate::engine::deadlines::Deadlines;
use crate::ids::{Address, BlockLists, EngineId, RequestId};
use crate::params::{ParamsError, TransferMode, TransferParams};
use crate::time::{ClockOffset, Time};

/// A load from a decode starts only if the blocks live longer than this.
pub(super) const EXPIRY_MARGIN: Duration = Duration::from_secs(5);

/// A request that arrives.
#[derive(Clone, Copy, Debug)]
pub struct Arrival<'a> {
    /// The engine's name of the request, never used twice.
    pub request: &'a RequestId,
    /// The number of tokens in the request's prompt.
    pub prompt_tokens: u32,
    /// `kv_transfer_params`, if the request has any.
    pub params: Option<&'a TransferParams>,
    /// The time by which the whole request must have ended.
    pub deadline: Option<Time>,
}

/// The reason why the engine computes a request itself although it has parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotLoaded {
    /// The parameters are invalid.
    Params(ParamsError),
    /// The parameters promise tokens, but do not name blocks for them in each KV cache group.
    TooFewBlocks,
    /// A request of that name has not ended yet, or has blocks that a peer may still access.
    Known,
    /// The parameters name a host that is not in [`Settings::allowed_hosts`].
    HostNotAllowed(Arc<str>),
    /// No engine of this fleet has signed the parameters.
    Untrusted(Untrusted),
    /// The connector was shut down.
    Closed,
}

impl fmt::Display for NotLoaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotLoaded::Params(error) => {
                write!(f, "Invalid KVTransferParams: {error}; the prompt is computed here")
            }
            NotLoaded::TooFewBlocks => f.write_str(
                "Invalid KVTransferParams: there are fewer remote blocks than the prompt needs; it \
                 is computed here",
            ),
            NotLoaded::Known => f.write_str(
                "a request with that name has not ended yet; give each request its own name",
            ),
            NotLoaded::Closed => {
                f.write_str("the connector was shut down; the prompt is computed here")
            }
            NotLoaded::HostNotAllowed(host) => write!(
                f,
                "the parameters name the host {host:?}, which is not in \
                 kv_connector_extra_config.allowed_hosts: add it there if it is your prefill; the \
                 prompt is computed here"
            ),
            NotLoaded::Untrusted(why) => write!(f, "{why}; the prompt is computed here"),
        }
    }
}

impl std::error::Error for NotLoaded {}

/// The number of tokens that can be loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Matched {
    /// The number of tokens beyond those that the engine has.
    pub tokens: u32,
    /// True if the tokens arrive while other requests run. The request then waits for an
    /// [`Outcome`].
    pub asynchronous: bool,
}

/// Blocks that the engine has given to a request.
#[derive(Clone, Debug)]
pub struct Allocation {
    /// The blocks that a load fills, group by group in the order of the prompt, without those found
    /// in the prefix cache.
    pub fill: BlockLists,
    /// The number of tokens that the engine already has.
    pub computed: u32,
    /// The number of tokens to load, at most what
    /// [`get_num_new_matched_tokens`](Scheduler::get_num_new_matched_tokens) returned.
    pub external: u32,
}

/// The load of a request.
#[derive(Clone, Debug)]
struct Load {
    source: LoadSource,
    remote: RemoteRequest,
    /// The number of prompt tokens for which the peer has blocks.
    end: u32,
    /// The number of tokens that the peer's blocks hold.
    held_there: u32,
    /// The request's own deadline.
    deadline: Option<Time>,
    stage: LoadStage,
}

/// Rejected parameters, and the blocks that they name, if any.
struct RefusedParams {
    why: NotLoaded,
    remote: Option<RemoteRequest>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoadSource {
    /// A prefill keeps the blocks under a lease, and this engine reads them.
    Prefill,
    /// A prefill writes the blocks.
    Push,
    /// A decode keeps the blocks of an earlier turn for a fixed time.
    Decode,
    /// A prefill of a MooncakeConnector writes the blocks when the decode requests them.
    Transfer,
}

#[derive(Clone, Debug)]
enum LoadStage {
    /// The request has no blocks to fill yet.
    Arrived,
    /// The next step's message contains the order.
    Ordered(Allocation),
    /// The workers have the order.
    Loading(Allocation),
    /// The load has ended or was never started. It does not start again.
    Over,
}

/// The blocks that a finished request leaves for peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Publishes {
    Nothing,
    /// Blocks that a decode fetches, or that are pushed to it.
    ForDecode,
    /// Blocks for the prefill of the next turn.
    ForNextTurn,
    /// Blocks to write to the decode that names the transfer.
    ForTransfer,
}

#[derive(Clone, Debug)]
struct Entry {
    prompt_tokens: u32,
    load: Option<Load>,
    publishes: Publishes,
    announced: bool,
}

/// The scheduler's side of a connector, for an engine with a step loop.
///
/// Its methods have the names of vLLM's `KVConnectorBase_V1`, and return at once. A request that is
/// loaded always gets an [`Outcome`], at its deadline at the latest. For that, the loop calls
/// [`poll`](Self::poll) once per step, and when the time of [`next_deadline`](Self::next_deadline)
/// has passed.
#[derive(Clone, Debug)]
pub struct Scheduler {
    settings: Settings,
    requests: BTreeMap<RequestId, Entry>,
    next: ConnectorMeta,
    heartbeats: Heartbeats,
    deadlines: Deadlines<RequestId>,
    /// Finished requests whose blocks are kept for a peer.
    sending: BTreeSet<RequestId>,
    /// Blocks of cancelled or failed loads that a transfer may still access.
    held: BTreeMap<RequestId, BlockLists>,
    /// The number of blocks of loads that are never released.
    lost: usize,
    /// Clocks of peers, relative to the scheduler's.
    clocks: BTreeMap<EngineId, ClockOffset>,
    /// The number of times that this engine has registered its memory again.
    registration: u64,
}

impl Scheduler {
    /// Creates the scheduler's side for one engine.
    pub fn new(settings: Settings) -> Self {
        Scheduler {
            requests: BTreeMap::new(),
            next: ConnectorMeta::default(),
            heartbeats: Heartbeats::new(settings.heartbeat),
            settings,
            deadlines: Deadlines::default(),
            sending: BTreeSet::new(),
            held: BTreeMap::new(),
            lost: 0,
            clocks: BTreeMap::new(),
            registration: 0,
        }
    }

    /// Returns the settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Records that the engine has registered its memory again, for example after sleep. Parameters
    /// carry the number from now on. The [`Listener`](crate::wire::Listener) counts the
    /// registrations.
    pub fn registered(&mut self, generation: u64) {
        self.registration = generation;
    }

    /// Adds a request that has arrived. From now on, heartbeats renew the lease of its blocks at
    /// the peer.
    ///
    /// # Errors
    ///
    /// Fails if the parameters cannot be used. The engine then computes the request as if it had
    /// none.
    pub fn on_new_request(&mut self, now: Time, arrival: Arrival<'_>) -> Result<(), NotLoaded> {
        let Arrival { request, params, .. } = arrival;
        let mut entry = self.entry(&arrival)?;
        let mut result = Ok(());
        if let Some(params) = params {
            if params.do_remote_decode {
                entry.publishes = Publishes::ForDecode;
            } else if params.do_remote_prefill && self.settings.bidirectional {
                entry.publishes = Publishes::ForNextTurn;
            }
            let source = match (params.do_remote_prefill, self.settings.mode) {
                (true, TransferMode::Pull) => Some(LoadSource::Prefill),
                (true, TransferMode::Push) => Some(LoadSource::Push),
                (false, TransferMode::Pull)
                    if params.do_remote_decode && self.settings.bidirectional =>
                {
                    params.remote_engine_id.is_some().then_some(LoadSource::Decode)
                }
                (false, _) => None,
            };
            if let Some(source) = source {
                match self.load(source, params, arrival) {
                    Ok(load) => entry.load = Some(load),
                    Err(RefusedParams { why, remote }) => {
                        let by = now + self.settings.load_timeout;
                        self.next
                            .receive
                            .extend(remote.map(|remote| release_order(request, remote, by)));
                        result = Err(why);
                    }
                }
            }
        }
        self.enter(request, entry);
        result
    }

    /// Creates the entry of a new request.
    fn entry(&self, arrival: &Arrival<'_>) -> Result<Entry, NotLoaded> {
        let Arrival { request, prompt_tokens, .. } = *arrival;
        if self.requests.contains_key(request)
            || self.sending.contains(request)
            || self.held.contains_key(request)
        {
            return Err(NotLoaded::Known);
        }
        Ok(Entry { prompt_tokens, load: None, publishes: Publishes::Nothing, announced: false })
    }

    /// Stores a request that loads or publishes blocks.
    fn enter(&mut self, request: &RequestId, entry: Entry) {
        if let Some(load) = &entry.load {
            if load.source != LoadSource::Decode {
                self.heartbeats.start(&load.remote.peer, &load.remote.request);
            }
            if let Some(deadline) = load.deadline {
                self.deadlines.set(request.clone(), deadline);
            }
        }
        if entry.load.is_some() || entry.publishes != Publishes::Nothing {
            self.requests.insert(request.clone(), entry);
        }
    }

    fn load(
        &self,
        source: LoadSource,
        params: &TransferParams,
        arrival: Arrival<'_>,
    ) -> Result<Load, RefusedParams> {
        let remote = params
            .remote_blocks_for(self.settings.mode)
            .map_err(|error| RefusedParams { why: NotLoaded::Params(error), remote: None })?;
        let allowed = self.settings.allowed_hosts.as_ref();
        if allowed.is_some_and(|allowed| !allowed.contains(&remote.host)) {
            return Err(RefusedParams {
                why: NotLoaded::HostNotAllowed(remote.host.into()),
                remote: None,
            });
        }
        let trusted = self.settings.trust.check(&remote);
        trusted.map_err(|why| RefusedParams { why: NotLoaded::Untrusted(why), remote: None })?;
        let reference = remote.block_reference.as_ref().and_then(|text| text.parse().ok());
        let wanted = arrival.prompt_tokens.saturating_sub(self.settings.prefill_backoff);
        let tokens = |tokens: u64| u32::try_from(tokens).unwrap_or(u32::MAX);
        // Old prefills do not report the number: they have prefilled the whole prompt. A decode
        // always reports it.
        let unsaid = if source == LoadSource::Decode { 0 } else { wanted };
        let held_there = remote.num_tokens.map_or(unsaid, tokens);
        let mut end = wanted.min(held_there);
        let blocks = if source == LoadSource::Push {
            BlockLists::default()
        } else {
            BlockLists::new(remote.block_ids)
        };
        let remote = RemoteRequest {
            request: remote.request_id.into(),
            peer: Arc::new(RemoteEngine {
                engine: remote.engine_id.into(),
                address: Address { host: remote.host.into(), port: remote.port },
                tp_size: remote.tp_size,
                pp_size: remote.pp_size,
                dcp_size: remote.dcp_size,
                registration: remote.registration_generation,
            }),
            blocks,
            expires_at_peer: remote.expiry_time,
            reference,
        };
        if source != LoadSource::Push {
            if remote.blocks.is_empty() {
                end = 0;
            }
            // Only the peer's handshake tells how many tokens a block of the peer holds, so the
            // workers check the number of blocks.
            let groups = remote.blocks.groups();
            let whole = groups.iter().zip(&self.settings.groups).filter(|(_, clip)| clip.is_none());
            let none = whole.clone().any(|(blocks, _)| blocks.is_empty());
            if end > 0 && (none || groups.len() != self.settings.groups.len()) {
                return Err(RefusedParams { why: NotLoaded::TooFewBlocks, remote: Some(remote) });
            }
            // The peer has the blocks of a window that ends at its last token, not of an earlier
            // one.
            if end != held_there && self.settings.groups.iter().any(Option::is_some) {
                end = 0;
            }
        }
        let deadline = arrival.deadline;
        Ok(Load { source, remote, end, held_there, deadline, stage: LoadStage::Arrived })
    }

    /// Returns the number of tokens at the end of a prefill leg's prompt that the decode computes.
    /// The engine computes and publishes the prompt without them.
    pub fn prompt_tokens_to_cut(&self, request: &RequestId) -> u32 {
        match self.requests.get(request) {
            Some(entry) if entry.publishes == Publishes::ForDecode => {
                self.settings.prefill_backoff.min(entry.prompt_tokens.saturating_sub(1))
            }
            _ => 0,
        }
    }

    /// Returns how many tokens beyond `computed` can be loaded. Changes no state, so it may be
    /// called repeatedly.
    pub fn get_num_new_matched_tokens(
        &self,
        now: Time,
        request: &RequestId,
        computed: u32,
    ) -> Matched {
        let load = self.requests.get(request).and_then(|entry| entry.load.as_ref());
        let Some(load) = load.filter(|load| matches!(load.stage, LoadStage::Arrived)) else {
            return Matched::default();
        };
        let tokens = load.end.saturating_sub(computed);
        if load.source == LoadSource::Decode
            && tokens > 0
            && (tokens < self.settings.recompute_threshold || self.expiring(now, load))
        {
            return Matched::default();
        }
        Matched { tokens, asynchronous: tokens > 0 }
    }

    /// Returns whether the peer is about to free the blocks, as far as its clock is known.
    fn expiring(&self, now: Time, load: &Load) -> bool {
        let Some(expires) = load.remote.expires_at_peer else { return false };
        let offset = self.clocks.get(&load.remote.peer.engine);
        let ours = offset.and_then(|offset| offset.to_ours(expires));
        ours.is_some_and(|ours| (now + EXPIRY_MARGIN).has_reached(ours))
    }

    /// Orders the load of a request that has been given blocks, for as many of the offered tokens
    /// as the engine takes. A second call for the same load changes nothing.
    pub fn update_state_after_alloc(
        &mut self,
        now: Time,
        request: &RequestId,
        allocation: Allocation,
    ) {
        // Requests without parameters have no entry.
        let Some(entry) = self.requests.get_mut(request) else { return };
        if entry.publishes != Publishes::Nothing && !entry.announced {
            entry.announced = true;
            self.next.prefilling.push(request.clone());
        }
        // Expected race: the load ended before its request was given blocks.
        let Some(load) =
            entry.load.as_mut().filter(|load| matches!(load.stage, LoadStage::Arrived))
        else {
            return;
        };
        if allocation.external == 0 {
            load.stage = LoadStage::Over;
            let order = load.release(request, now + self.settings.load_timeout);
            self.next.receive.extend(order);
            self.over(request);
            return;
        }
        let limit = match load.source {
            LoadSource::Push | LoadSource::Transfer => self.settings.push_timeout,
            LoadSource::Prefill | LoadSource::Decode => self.settings.load_timeout,
        };
        let deadline = load.deadline.map_or(now + limit, |deadline| deadline.min(now + limit));
        self.deadlines.set(request.clone(), deadline);
        load.end = load.end.min(allocation.computed.saturating_add(allocation.external));
        self.next.receive.push(ReceiveOrder {
            request: request.clone(),
            local: allocation.fill.clone(),
            remote: load.remote.clone(),
            computed: allocation.computed,
            end: load.end,
            held_there: load.held_there,
            awaited: true,
            deadline,
        });
        load.stage = LoadStage::Ordered(allocation);
    }

    /// Returns this step's message for the workers, and starts a new one.
    pub fn build_connector_meta(&mut self, now: Time) -> ConnectorMeta {
        let mut meta = std::mem::take(&mut self.next);
        (meta.built_at, meta.registration) = (now, self.registration);
        meta.heartbeats = self.heartbeats.take(now);
        for order in &meta.receive {
            if let Some(load) =
                self.requests.get_mut(&order.request).and_then(|entry| entry.load.as_mut())
                && matches!(load.stage, LoadStage::Ordered(_))
                && let LoadStage::Ordered(allocation) =
                    std::mem::replace(&mut load.stage, LoadStage::Over)
            {
                load.stage = LoadStage::Loading(allocation);
            }
        }
        meta
    }

    /// Returns the part of the next step's message that need not wait for a step: all but loads
    /// that fill blocks. `load` names a request whose load may start too.
    ///
    /// A caller with a timer next to its step loop sends this part when the time of
    /// [`next_deadline`](Self::next_deadline) has passed. That keeps leases alive during long
    /// steps.
    pub fn take_ready(&mut self, now: Time, load: Option<&RequestId>) -> ConnectorMeta {
        let later = |order: &ReceiveOrder| !order.local.is_empty() && load != Some(&order.request);
        let (wait, ready) = std::mem::take(&mut self.next.receive).into_iter().partition(later);
        self.next.receive = ready;
        let meta = self.build_connector_meta(now);
        self.next.receive = wait;
        meta
    }

    /// Returns the next time at which [`poll`](Self::poll) or a step is due, even without other
    /// events.
    pub fn next_deadline(&self, now: Time) -> Option<Time> {
        self.deadlines.next().into_iter().chain(self.heartbeats.next(now)).min()
    }

    /// Returns whether requests wait to be pushed, so that the engine must continue its step loop.
    pub fn has_pending_push_work(&self) -> bool {
        let writes = self.settings.mode == TransferMode::Push || self.settings.mooncake.is_some();
        writes && !self.sending.is_empty()
    }

    /// Returns whether blocks will be freed without a preemption, so that the engine can wait for
    /// them.
    pub fn has_pending_block_frees(&self) -> bool {
        !self.sending.is_empty() || !self.held.is_empty()
    }

    /// Returns whether the workers are loading blocks of a request that is still wanted.
    pub fn is_loading(&self, request: &RequestId) -> bool {
        let load = self.requests.get(request).and_then(|entry| entry.load.as_ref());
        load.is_some_and(|load| matches!(load.stage, LoadStage::Loading(_)))
    }

    /// Returns whether the blocks of a request are kept for a peer.
    pub fn is_sending(&self, request: &RequestId) -> bool {
        self.sending.contains(request)
    }

    /// Returns the number of blocks of cancelled or failed loads that a transfer may still access.
    pub fn blocks_held(&self) -> usize {
        self.held.values().map(BlockLists::len).sum()
    }

    /// Returns the number of blocks of loads that a transfer may access until the process exits.
    pub fn blocks_lost(&self) -> usize {
        self.lost
    }

    /// Returns the number of requests that the scheduler's side still knows.
    pub fn len(&self) -> usize {
        self.requests.len() + self.sending.len() + self.held.len()
    }

    /// Returns whether the scheduler's side knows no request.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ends the heartbeats and the deadline of a load. Called once for each load, as another
    /// request may load the same blocks.
    fn over(&mut self, request: &RequestId) {
        self.deadlines.clear(request);
        if let Some(load) = self.requests.get(request).and_then(|entry| entry.load.as_ref())
            && load.source != LoadSource::Decode
        {
            self.heartbeats.stop(&load.remote.peer.engine, &load.remote.request);
        }
    }
}

impl Load {
    /// Returns the order to notify the peer, until `by`, that it may free its blocks. In push mode
    /// there is no such notification: a prefill without a registration waits for its lease to end.
    fn release(&self, request: &RequestId, by: Time) -> Option<ReceiveOrder> {
        (self.source != LoadSource::Push).then(|| release_order(request, self.remote.clone(), by))
    }

    /// Returns whether the deadline of the request itself has passed.
    fn is_too_late(&self, now: Time) -> bool {
        self.deadline.is_some_and(|deadline| now.has_reached(deadline))
    }
}

/// Creates an order that loads nothing.
fn release_order(request: &RequestId, remote: RemoteRequest, by: Time) -> ReceiveOrder {
    ReceiveOrder {
        request: request.clone(),
        local: BlockLists::default(),
        remote,
        computed: 0,
        end: 0,
        held_there: 0,
        awaited: false,
        deadline: by,
    }
}
