//! What the engine's calls and the connector's thread share: both halves of the protocol under one lock, which is held
//! for as long as they decide, and never while anything is waited for.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use kvx_core::sync::{Condvar, Mutex};
use kvx_core::{Agent, Deadline, Error, ErrorKind, Result, Secret};
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;
use tracing::Span;

use super::awaited::Awaited;
use super::builder::Setup;
use super::clock::Clock;
use super::closing::Shutdown;
use super::connect::PeerLink;
use super::group::{Away, Gathering, Granting, HeadHandle};
use super::half::WorkerKind;
use super::host_copies::{Filling, Saving};
use super::listening::Listening;
use super::metrics::Metrics;
use super::mooncake::Room;
use super::push::{Grant, GrantedWrites};
use super::rank::Registered;
use super::register::GivingBack;
use super::side::SideClient;
use super::trace::Traces;
use super::words::{Published, Scratch};
use crate::engine::{
    Action, Allocation, Arrival, BlockLists, Connection, ConnectorMeta, FailureKind, Kept, Matched,
    MoveId, NotLoaded, Outcome, OutputAggregator, PoolBlocks, ReceiveOrder, RequestId, Scheduler,
    Time, WorkerRank,
};
use crate::params::OlderMooncakeParams;
use crate::wire::group::ToHead;

/// One connector, as its handles and its thread see it.
pub(super) struct Shared {
    pub(super) clock: Clock,
    pub(super) setup: Setup,
    pub(super) asker: SideClient,
    pub(super) side: Mutex<Option<Listening>>,
    /// What the workers of a MooncakeConnector have under way.
    pub(super) mooncake: Room,
    pub(super) secret: Option<Secret>,
    pub(super) state: Mutex<State>,
    /// Held while something is granted: once for each request.
    pub(super) granting: Mutex<()>,
    /// Held while blocks are published with digests: who finds a block published finds its digest.
    pub(super) digesting: Mutex<()>,
    /// Wakes the connector's thread.
    pub(super) wake_up: Notify,
    /// Wakes an engine that sleeps.
    pub(super) news: Notify,
    /// The same, for one that waits without a runtime.
    pub(super) told: Condvar,
    /// Of the connector's thread.
    pub(super) runtime: tokio::runtime::Handle,
}

pub(super) struct State {
    pub(super) scheduler: Scheduler,
    pub(super) ranks: BTreeMap<WorkerRank, RankState>,
    pub(super) aggregator: OutputAggregator,
    pub(super) published: Option<Published>,
    pub(super) pool: Option<PoolBlocks>,
    pub(super) outcomes: VecDeque<Outcome>,
    pub(super) awaited: Awaited,
    pub(super) metrics: Metrics,
    pub(super) traces: Traces,
    /// Hosts of engines that do not sign, of whom the log has told: no more than `allow_unsigned_params` names.
    unsigned: BTreeSet<String>,
    /// What peers may write into, or no more, for loads that are pushed.
    pub(super) grants: HashMap<RequestId, Grant>,
    /// Of those that are over: to be ended.
    pub(super) spent: Vec<Arc<GrantedWrites>>,
    pub(super) last_grant: u64,
    pub(super) saving: Saving,
    /// The same of all ranks, where some are in processes of their own.
    pub(super) granting: Granting,
    /// Registrations of loads that some worker has not started yet.
    pub(super) deferred: Vec<(WorkerRank, Action, Span)>,
    /// Kept blocks that are free once ranks on other hosts have raised their words: each rank with the number of the
    /// last that it was asked to raise.
    pub(super) raising: Vec<(Vec<(WorkerRank, u64)>, Outcome)>,
    /// Agents that nobody listens to yet.
    pub(super) unheard: Vec<(WorkerRank, Agent)>,
    /// Ranks in processes of their own, which join here.
    pub(super) gathering: Option<Gathering>,
    /// The engine of this rank, where that is in another process.
    pub(super) head: Option<HeadHandle>,
    pub(super) closing: Option<Shutdown>,
    /// The thread ends: whether nothing touches any block any more.
    pub(super) over: Option<Result<()>>,
}

pub(super) struct RankState {
    pub(super) worker: WorkerKind,
    /// Loads of steps that the engine has not started on this worker yet.
    pending: Vec<ConnectorMeta>,
    /// Kept from one registration to the next.
    pub(super) agent: Option<(Agent, Arc<Scratch>)>,
    pub(super) registered: Option<Arc<Registered>>,
    pub(super) links: HashMap<Connection, Arc<PeerLink>>,
    /// Those that may be cancelled: rung when they are.
    pub(super) moves: HashMap<MoveId, Arc<Notify>>,
    /// Caches on their way back to the engine; a shutdown waits for them.
    pub(super) giving_back: Vec<GivingBack>,
    pub(super) filling: Filling,
}

impl Shared {
    /// An engine, which has all workers; where peers ask is still to come.
    pub(super) fn of_engine(
        setup: Setup,
        clock: Clock,
        secret: Option<Secret>,
        runtime: tokio::runtime::Handle,
    ) -> Result<Self> {
        let (pp_size, tp_size) = (setup.settings.pp_size, setup.settings.tp_size);
        let ranks = (0..pp_size).flat_map(|pp| (0..tp_size).map(move |tp| WorkerRank { pp, tp }));
        Self::new(setup, ranks, clock, secret, runtime)
    }

    /// A rank of an engine that is in another process, which hears what the worker has to tell.
    pub(super) fn of_rank(
        setup: Setup,
        rank: WorkerRank,
        head: UnboundedSender<ToHead>,
        secret: Option<Secret>,
        runtime: tokio::runtime::Handle,
    ) -> Result<Self> {
        let shared = Self::new(setup, [rank], Clock::new(), secret, runtime)?;
        shared.state.lock().head = Some(HeadHandle::new(head));
        Ok(shared)
    }

    fn new(
        setup: Setup,
        ranks: impl IntoIterator<Item = WorkerRank>,
        clock: Clock,
        secret: Option<Secret>,
        runtime: tokio::runtime::Handle,
    ) -> Result<Self> {
        let settings = &setup.settings;
        let rank = |rank| {
            let state = RankState {
                worker: WorkerKind::new(settings, rank)?,
                pending: Vec::new(),
                agent: None,
                registered: None,
                links: HashMap::new(),
                moves: HashMap::new(),
                giving_back: Vec::new(),
                filling: Filling::default(),
            };
            Ok((rank, state))
        };
        let ranks: BTreeMap<_, _> = ranks.into_iter().map(rank).collect::<Result<_>>()?;
        let state = State {
            scheduler: Scheduler::new(settings.clone()),
            aggregator: OutputAggregator::new(ranks.len()),
            ranks,
            published: None,
            pool: None,
            outcomes: VecDeque::new(),
            awaited: Awaited::default(),
            traces: Traces::default(),
            unsigned: BTreeSet::new(),
            metrics: Metrics::new(&setup.factors.model, &setup.data_parallel.to_string(), settings),
            grants: HashMap::new(),
            spent: Vec::new(),
            last_grant: 0,
            saving: Saving::default(),
            granting: Granting::default(),
            deferred: Vec::new(),
            raising: Vec::new(),
            unheard: Vec::new(),
            gathering: None,
            head: None,
            closing: None,
            over: None,
        };
        let (state, wake_up, news, told) =
            (Mutex::new(state), Notify::new(), Notify::new(), Condvar::new());
        let asker = SideClient::new(clock, secret.clone(), setup.settings.ports);
        let (side, mooncake) = (Mutex::default(), Room::default());
        let (granting, digesting) = (Mutex::default(), Mutex::default());
        Ok(Shared {
            clock,
            setup,
            asker,
            side,
            mooncake,
            secret,
            state,
            granting,
            digesting,
            wake_up,
            news,
            told,
            runtime,
        })
    }

    /// Whether blocks have digests here, and those that are loaded are held against them.
    pub(super) fn digests(&self) -> bool {
        self.setup.config.nixl().kvx_digest
    }

    pub(super) fn has_rank(&self, rank: WorkerRank) -> bool {
        self.state.lock().ranks.contains_key(&rank)
    }

    /// `await_it` says who hears of it, from its first moment on.
    pub(super) fn on_new_request<T>(
        &self,
        arrival: Arrival<'_>,
        await_it: impl FnOnce(&mut Awaited) -> T,
    ) -> Result<T, NotLoaded> {
        let mut state = self.state.lock();
        if state.is_closing() {
            return Err(NotLoaded::Closed);
        }
        let (now, request) = (self.clock.now(), arrival.request);
        let arrived = match (arrival.params, &self.setup.settings.mooncake) {
            (None, _) | (_, None) => state.scheduler.on_new_request(now, arrival),
            (Some(params), Some(mooncake)) if mooncake.is_older() => {
                let params = OlderMooncakeParams::from_params(params).map_err(NotLoaded::Params)?;
                state.scheduler.on_new_older_transfer(arrival, &params)
            }
            (Some(params), Some(_)) => {
                let params = params.mooncake().map_err(NotLoaded::Params)?;
                state.scheduler.on_new_transfer(arrival, &params)
            }
        };
        let arrived = arrived.map(|()| await_it(&mut state.awaited));
        if arrived.is_ok()
            && let Some(params) = arrival.params.filter(|params| params.do_remote_prefill)
        {
            state.traces.arrived(
                now,
                request,
                params.remote_engine_id.as_deref().unwrap_or_default(),
            );
            let trust = &self.setup.settings.trust;
            let names_blocks = params.remote_block_ids.is_some();
            let unsigned = trust.has_secret() && names_blocks && params.kvx_signature.is_none();
            if let Some(host) =
                params.remote_host.clone().filter(|host| unsigned && trust.allows_unsigned(host))
                && state.unsigned.insert(host.clone())
            {
                tracing::warn!(
                    "the engine at {host} does not sign its parameters, and they are taken because \
                     allow_unsigned_params names it: keep this server away from clients that could write their own"
                );
            }
        }
        drop(state);
        self.wake_up.notify_one();
        arrived
    }

    pub(super) fn matched(&self, request: &RequestId, computed: u32) -> Matched {
        self.state.lock().scheduler.get_num_new_matched_tokens(self.clock.now(), request, computed)
    }

    pub(super) fn allocated(&self, request: &RequestId, allocation: Allocation) -> Result<()> {
        let mut state = self.state.lock();
        if allocation.external > 0 {
            state.check_blocks(&allocation.fill, self.setup.settings.groups.len())?;
        }
        state.scheduler.update_state_after_alloc(self.clock.now(), request, allocation);
        drop(state);
        self.wake_up.notify_one();
        Ok(())
    }

    /// Hands what the engine has ordered since the last step to the workers, each of which begins to fill blocks when
    /// it is told.
    pub(super) fn step(&self) {
        let now = self.clock.now();
        let mut state = self.state.lock();
        let ready = state.scheduler.take_ready(now, None);
        state.pass_on(now, ready);
        let meta = state.scheduler.build_connector_meta(now);
        if !meta.is_empty() {
            state.ranks.values_mut().for_each(|rank| rank.pending.push(meta.clone()));
        }
        drop(state);
        self.wake_up.notify_one();
    }

    pub(super) fn start_load_kv(&self, rank: WorkerRank) {
        let now = self.clock.now();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(rank) = state.ranks.get_mut(&rank) else { return };
        let pending = std::mem::take(&mut rank.pending);
        if pending.is_empty() {
            return;
        }
        for meta in pending {
            for order in &meta.receive {
                state.traces.ordered(now, &order.request);
            }
            rank.begin(now, meta);
        }
        drop(guard);
        self.wake_up.notify_one();
    }

    /// Takes a step of an engine in another process, whose word to begin has been said there.
    pub(super) fn take_step(&self, rank: WorkerRank, meta: ConnectorMeta) {
        let now = self.clock.now();
        let mut state = self.state.lock();
        if let Some(held) = state.ranks.get_mut(&rank) {
            held.begin(now, meta);
        }
        drop(state);
        self.wake_up.notify_one();
    }

    /// Begins the load of one request on all workers, without a step.
    pub(super) fn begin(&self, request: &RequestId) {
        let now = self.clock.now();
        let mut state = self.state.lock();
        let meta = state.scheduler.take_ready(now, Some(request));
        state.pass_on(now, meta);
        drop(state);
        self.wake_up.notify_one();
    }

    pub(super) fn outcomes(&self) -> Vec<Outcome> {
        self.state.lock().outcomes.drain(..).collect()
    }

    pub(super) fn has_news(&self) -> bool {
        let state = self.state.lock();
        !state.outcomes.is_empty() || state.over.is_some()
    }

    /// Blocks until there is news or the deadline has passed; says whether there is.
    pub(super) fn wait(&self, deadline: Deadline) -> bool {
        let until = super::slot::until(deadline);
        let mut state = self.state.lock();
        loop {
            if !state.outcomes.is_empty() || state.over.is_some() {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
            state = self.told.wait_until(state, Some(until));
        }
    }

    pub(super) fn blocks_held(&self) -> usize {
        self.state.lock().scheduler.blocks_held()
    }

    pub(super) fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.scheduler.is_empty() && state.aggregator.incomplete() == 0 && state.raising.is_empty()
    }

    /// Changes who hears what.
    pub(super) fn awaited<T>(&self, change: impl FnOnce(&mut Awaited) -> T) -> T {
        change(&mut self.state.lock().awaited)
    }

    pub(super) fn tell(&self, outcome: Outcome) {
        let mut state = self.state.lock();
        state.outcomes.push_back(outcome);
        self.told.notify_all();
        drop(state);
        self.news.notify_waiters();
    }
}

impl State {
    /// Why an engine with ranks in processes of their own can load and publish nothing, if so.
    pub(super) fn missing(&self) -> Option<String> {
        self.ranks.values().find_map(|held| held.worker.away()?.missing())
    }

    pub(super) fn check_blocks(&self, blocks: &BlockLists, groups: usize) -> Result<()> {
        let mut away = self.ranks.values().filter_map(|held| held.worker.away());
        if let Some(why) =
            away.clone().filter(|away| !away.has_given_back()).find_map(Away::missing)
        {
            return Err(Error::new(
                ErrorKind::PeerLost,
                format!("a rank of this engine is not there: {why}"),
            ));
        }
        if let Some(why) = away.find_map(Away::missing) {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("{why}: call JoinedRank::register there"),
            ));
        }
        let Some(pool) = &self.pool else {
            return Err(Error::new(
                ErrorKind::Invalid,
                "no caches are registered: call Rank::register first",
            ));
        };
        if blocks.groups().len() != groups {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "{} lists of blocks, and the connector was built for {groups} KV cache groups: give a list for \
                     each, or call ConnectorBuilder::groups",
                    blocks.groups().len()
                ),
            ));
        }
        for (group, list) in blocks.groups().iter().enumerate() {
            let count = pool.of_group(group);
            if let Some(beyond) = list.iter().find(|block| **block >= count) {
                return Err(Error::new(
                    ErrorKind::OutOfBounds,
                    format!(
                        "block {beyond} of KV cache group {group}: the registered caches have {count} blocks"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Whether the engine has not started a load on some worker yet.
    pub(super) fn is_pending(&self, request: &RequestId) -> bool {
        let orders =
            self.ranks.values().flat_map(|held| &held.pending).flat_map(|meta| &meta.receive);
        orders.into_iter().any(|order| order.request == *request)
    }

    pub(super) fn pass_on(&mut self, now: Time, meta: ConnectorMeta) {
        if meta.is_empty() {
            return;
        }
        for order in &meta.receive {
            self.traces.ordered(now, &order.request);
        }
        for held in self.ranks.values_mut() {
            let mut meta = meta.clone();
            // What is cancelled before the engine has started it here does not begin.
            for pending in held.pending.iter_mut().filter(|_| !meta.cancel.is_empty()) {
                let cancelled = |order: &mut ReceiveOrder| meta.cancel.contains(&order.request);
                meta.receive.extend(pending.receive.extract_if(.., cancelled));
            }
            held.begin(now, meta);
        }
    }

    /// What the workers have to tell goes through the scheduler to whoever waits. Says whether the engine has news, and
    /// who is to be woken.
    pub(super) fn collect(&mut self, now: Time) -> (bool, Vec<Waker>) {
        let outputs = self.ranks.iter_mut().enumerate();
        let outputs = outputs.map(|(at, (rank, held))| (at, held.take_said(*rank, now)));
        let mut outputs: Vec<_> = outputs.filter(|(_, output)| !output.is_empty()).collect();
        if self.head.is_some() {
            let over = outputs.iter().flat_map(|(_, output)| &output.finished_recving);
            over.for_each(|request| self.end_grants(request));
            if let Some(head) = &self.head {
                outputs.into_iter().for_each(|(_, output)| head.say(ToHead::Output(output)));
            }
            return (false, Vec::new());
        }
        for (_, output) in &mut outputs {
            // A worker may say it of blocks that were taken back meanwhile.
            output.finished_sending.retain(|request| self.scheduler.is_sending(request));
        }
        let mut output = self.aggregator.add(outputs);
        for failure in std::mem::take(&mut output.failures) {
            if failure.kind == FailureKind::LeaseExpired {
                // Of each worker; and of none whose blocks were taken back meanwhile.
                let is_new =
                    |request| self.scheduler.is_sending(request) && self.awaited.expire(request);
                if !failure.request.as_ref().is_some_and(is_new) {
                    continue;
                }
            }
            tracing::warn!("{failure}");
        }
        let stats = std::mem::take(&mut output.stats);
        if !stats.is_empty() {
            self.metrics.tell(now, &stats);
        }
        let mut outcomes = self.scheduler.update_connector_output(now, output);
        outcomes.extend(self.scheduler.poll(now));
        self.metrics.blocks(self.scheduler.blocks_held(), self.scheduler.blocks_lost());
        let before = self.outcomes.len();
        let mut wakers: Vec<_> =
            outcomes.into_iter().filter_map(|outcome| self.deliver(outcome)).collect();
        wakers.extend(self.take_raised().into_iter().filter_map(|outcome| self.hand_over(outcome)));
        (self.outcomes.len() > before, wakers)
    }

    /// An outcome is the engine's, or that of whoever awaits it, who is to be woken.
    pub(super) fn deliver(&mut self, outcome: Outcome) -> Option<Waker> {
        self.traces.outcome(&outcome);
        if let Some(request) = outcome.ends_load() {
            self.end_grants(request);
        }
        if let Outcome::Free { request, kept: Kept::Request }
        | Outcome::Lost { request, kept: Kept::Request } = &outcome
        {
            self.release(request);
        }
        let outcome = self.unless_read(outcome)?;
        self.hand_over(outcome)
    }

    pub(super) fn hand_over(&mut self, outcome: Outcome) -> Option<Waker> {
        match self.awaited.hear(outcome) {
            Ok(waker) => waker,
            Err(outcome) => {
                self.outcomes.push_back(outcome);
                None
            }
        }
    }
}
