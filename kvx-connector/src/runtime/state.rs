//! What the engine's calls and the connector's thread share: both halves of the protocol under one lock, which is held
//! for as long as they decide, and never while anything is waited for.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use kvx_core::sync::{Condvar, Mutex};
use kvx_core::{Agent, Deadline, Error, Kind, Result, Secret};
use tokio::sync::Notify;
use tracing::Span;

use super::awaited::Awaited;
use super::builder::Setup;
use super::clock::Clock;
use super::closing::{Closing, Shutdown};
use super::connect::Link;
use super::half::Half;
use super::listening::Listening;
use super::metrics::Metrics;
use super::mooncake::Room;
use super::push::{Grant, Granted};
use super::rank::Registered;
use super::side::Asker;
use super::trace::Traces;
use super::words::{Published, Scratch};
use crate::engine::mooncake::MooncakeAction;
use crate::engine::{
    Action, Allocation, Arrival, BlockLists, Connection, ConnectorMeta, Kept, Matched, MoveId, NotLoaded,
    Outcome, OutputAggregator, PoolBlocks, ReceiveOrder, RequestId, Scheduler, Time, Worker, WorkerRank,
};

/// One connector, as its handles and its thread see it.
pub(super) struct Shared {
    pub(super) clock: Clock,
    pub(super) setup: Setup,
    pub(super) asker: Asker,
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
    metrics: Metrics,
    pub(super) traces: Traces,
    /// What peers may write into, or no more, for loads that are pushed.
    pub(super) grants: HashMap<RequestId, Grant>,
    /// Of those that are over: to be ended.
    pub(super) spent: Vec<Arc<Granted>>,
    pub(super) last_grant: u64,
    /// Registrations of loads that some worker has not started yet.
    deferred: Vec<(WorkerRank, Action, Span)>,
    /// Agents that nobody listens to yet.
    pub(super) unheard: Vec<(WorkerRank, Agent)>,
    pub(super) closing: Option<Shutdown>,
    /// The thread ends: whether nothing touches any block any more.
    pub(super) over: Option<Result<()>>,
}

pub(super) struct RankState {
    pub(super) worker: Half,
    /// Loads of steps that the engine has not started on this worker yet.
    pending: Vec<ConnectorMeta>,
    /// Kept from one registration to the next.
    pub(super) agent: Option<(Agent, Arc<Scratch>)>,
    pub(super) registered: Option<Arc<Registered>>,
    pub(super) links: HashMap<Connection, Arc<Link>>,
    /// Those that may be cancelled: rung when they are.
    moves: HashMap<MoveId, Arc<Notify>>,
    /// Caches on their way back to the engine; a shutdown waits for them.
    pub(super) giving_back: Vec<(Arc<Registered>, tokio::task::JoinHandle<()>)>,
}

/// What the connector's thread has to do now, and when to look again though nothing happens.
#[derive(Default)]
pub(super) struct Turn {
    pub(super) actions: Vec<(WorkerRank, Action, Span)>,
    pub(super) mooncake: Vec<(WorkerRank, MooncakeAction)>,
    pub(super) unheard: Vec<(WorkerRank, Agent)>,
    pub(super) spent: Vec<Arc<Granted>>,
    pub(super) next: Option<Instant>,
    pub(super) closing: Option<Closing>,
    pub(super) over: bool,
}

impl Shared {
    pub(super) fn new(
        setup: Setup,
        clock: Clock,
        secret: Option<Secret>,
        runtime: tokio::runtime::Handle,
    ) -> Result<Self> {
        let settings = &setup.settings;
        let ranks =
            (0..settings.pp_size).flat_map(|pp| (0..settings.tp_size).map(move |tp| WorkerRank { pp, tp }));
        let rank = |rank| {
            let state = RankState {
                worker: Half::new(settings, rank)?,
                pending: Vec::new(),
                agent: None,
                registered: None,
                links: HashMap::new(),
                moves: HashMap::new(),
                giving_back: Vec::new(),
            };
            Ok((rank, state))
        };
        let ranks: BTreeMap<_, _> = ranks.map(rank).collect::<Result<_>>()?;
        let state = State {
            scheduler: Scheduler::new(settings.clone()),
            aggregator: OutputAggregator::new(ranks.len()),
            ranks,
            published: None,
            pool: None,
            outcomes: VecDeque::new(),
            awaited: Awaited::default(),
            traces: Traces::default(),
            metrics: Metrics::new(&setup.factors.model, &setup.data_parallel.to_string(), settings),
            grants: HashMap::new(),
            spent: Vec::new(),
            last_grant: 0,
            deferred: Vec::new(),
            unheard: Vec::new(),
            closing: None,
            over: None,
        };
        let (state, wake_up, news, told) = (Mutex::new(state), Notify::new(), Notify::new(), Condvar::new());
        let asker = Asker::new(clock, secret.clone(), setup.settings.ports);
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

    // The engine's side.

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
        let arrived = match arrival.params.filter(|_| self.setup.settings.mooncake.is_some()) {
            None => state.scheduler.on_new_request(now, arrival),
            Some(params) => {
                let params = params.mooncake().map_err(NotLoaded::Params)?;
                state.scheduler.on_new_transfer(arrival, &params)
            }
        };
        let arrived = arrived.map(|()| await_it(&mut state.awaited));
        if arrived.is_ok()
            && let Some(params) = arrival.params.filter(|params| params.do_remote_prefill)
        {
            state.traces.arrived(now, request, params.remote_engine_id.as_deref().unwrap_or_default());
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
            rank.worker.start_load_kv(now, meta);
        }
        drop(guard);
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
        state.scheduler.is_empty() && state.aggregator.incomplete() == 0
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

    // The thread's side.

    /// Everything that is due.
    pub(super) fn turn(&self) -> Turn {
        let now = self.clock.now();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let ready = state.scheduler.take_ready(now, None);
        state.pass_on(now, ready);
        let (news, wakers) = state.collect(now);
        let unheard = std::mem::take(&mut state.unheard);
        let spent = std::mem::take(&mut state.spent);
        let mut turn = Turn { over: state.over.is_some(), unheard, spent, ..Turn::default() };
        for (rank, held) in &mut state.ranks {
            while let Some(action) = held.next_action() {
                match action {
                    Asked::Either(Action::Cancel { id }) => {
                        held.moves.get(&id).into_iter().for_each(|moving| moving.notify_one())
                    }
                    Asked::Either(Action::Disconnect { connection }) => {
                        held.links.remove(&connection);
                        self.mooncake.disconnect(*rank, connection);
                    }
                    Asked::Either(action) => {
                        if let Action::Read(order) | Action::Write(order) = &action {
                            held.moves.insert(order.id, Arc::default());
                        }
                        let span = state.traces.of(now, &action);
                        turn.actions.push((*rank, action, span));
                    }
                    Asked::Mooncake(action) => {
                        if let MooncakeAction::Write { what, .. } = &action {
                            held.moves.insert(what.id, Arc::default());
                        }
                        turn.mooncake.push((*rank, action));
                    }
                }
            }
        }
        // What is pushed may be written to all workers at once: all of them have to have started it.
        let mut actions = std::mem::take(&mut state.deferred);
        actions.append(&mut turn.actions);
        let early = |(_, action, _): &(WorkerRank, Action, Span)| match action {
            Action::Register { request, .. } => state.is_pending(request),
            _ => false,
        };
        (state.deferred, turn.actions) = actions.into_iter().partition(early);
        let line = state.metrics.line(now);
        let deadlines = state.ranks.values().filter_map(|held| held.worker.next_deadline());
        let next = deadlines.chain(state.scheduler.next_deadline(now)).chain(line).min();
        turn.next = next.and_then(|next| self.clock.moment(next));
        if let Some(closing) = state.closing.as_mut().filter(|closing| !closing.begun) {
            closing.begun = true;
            let agents = state.ranks.values_mut().filter_map(|held| {
                held.worker.shutdown(now);
                held.agent.as_ref().map(|(agent, _)| agent.clone())
            });
            turn.closing = Some(Closing { deadline: closing.deadline, agents: agents.collect() });
        }
        if news {
            self.told.notify_all();
        }
        drop(guard);
        wakers.into_iter().for_each(Waker::wake);
        if news {
            self.news.notify_waiters();
        }
        turn
    }

    /// As [`tell_half`](Self::tell_half), for the worker of a NixlConnector.
    pub(super) fn tell_worker(&self, rank: WorkerRank, tell: impl FnOnce(&mut Worker, Time)) {
        self.tell_half(rank, |half, now| {
            if let Half::Nixl(worker) = half {
                tell(worker, now);
            }
        });
    }

    /// Lets a worker hear what came of something, on its clock; the thread looks at what follows from it.
    pub(super) fn tell_half(&self, rank: WorkerRank, tell: impl FnOnce(&mut Half, Time)) {
        let now = self.clock.now();
        let mut state = self.state.lock();
        if let Some(held) = state.ranks.get_mut(&rank) {
            tell(&mut held.worker, now);
        }
        drop(state);
        self.wake_up.notify_one();
    }

    /// Notes what was set up for a connection, before its worker hears of it.
    pub(super) fn linked(&self, rank: WorkerRank, connection: Connection, link: Arc<Link>) {
        if let Some(held) = self.state.lock().ranks.get_mut(&rank) {
            held.links.insert(connection, link);
        }
    }

    pub(super) fn link(&self, rank: WorkerRank, connection: Connection) -> Option<Arc<Link>> {
        self.state.lock().ranks.get(&rank)?.links.get(&connection).cloned()
    }

    pub(super) fn registered(&self, rank: WorkerRank) -> Option<Arc<Registered>> {
        self.state.lock().ranks.get(&rank)?.registered.clone()
    }

    /// What rings when a move is to be cancelled: maybe it has already.
    pub(super) fn moving(&self, rank: WorkerRank, id: MoveId) -> Arc<Notify> {
        let state = self.state.lock();
        state.ranks.get(&rank).and_then(|held| held.moves.get(&id).cloned()).unwrap_or_default()
    }

    pub(super) fn moved(&self, rank: WorkerRank, id: MoveId) {
        if let Some(held) = self.state.lock().ranks.get_mut(&rank) {
            held.moves.remove(&id);
        }
    }
}

/// What a worker asks for.
enum Asked {
    /// Of the runtime, whatever its protocol.
    Either(Action),
    Mooncake(MooncakeAction),
}

impl RankState {
    fn next_action(&mut self) -> Option<Asked> {
        match &mut self.worker {
            Half::Nixl(worker) => worker.next_action().map(Asked::Either),
            Half::Mooncake(worker) => worker.next_action().map(|action| match action {
                MooncakeAction::Engine(action) => Asked::Either(action),
                action => Asked::Mooncake(action),
            }),
        }
    }
}

impl State {
    pub(super) fn check_blocks(&self, blocks: &BlockLists, groups: usize) -> Result<()> {
        let Some(pool) = &self.pool else {
            return Err(Error::new(Kind::Invalid, "no caches are registered: call Rank::register first"));
        };
        if blocks.groups().len() != groups {
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "{} lists of blocks, and the connector was built for {groups} KV cache groups: give a list for \
                     each, or call Builder::groups",
                    blocks.groups().len()
                ),
            ));
        }
        for (group, list) in blocks.groups().iter().enumerate() {
            let count = pool.of_group(group);
            if let Some(beyond) = list.iter().find(|block| **block >= count) {
                return Err(Error::new(
                    Kind::OutOfBounds,
                    format!(
                        "block {beyond} of KV cache group {group}: the registered caches have {count} blocks"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Whether the engine has not started a load on some worker yet.
    fn is_pending(&self, request: &RequestId) -> bool {
        let orders = self.ranks.values().flat_map(|held| &held.pending).flat_map(|meta| &meta.receive);
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
            held.worker.start_load_kv(now, meta);
        }
    }

    /// What the workers have to tell goes through the scheduler to whoever waits. Says whether the engine has news, and
    /// who is to be woken.
    fn collect(&mut self, now: Time) -> (bool, Vec<Waker>) {
        let outputs =
            self.ranks.values_mut().enumerate().map(|(at, held)| (at, held.worker.get_finished(now)));
        let mut outputs: Vec<_> = outputs.filter(|(_, output)| !output.is_empty()).collect();
        for (_, output) in &mut outputs {
            // A worker may say it of blocks that were taken back meanwhile.
            output.finished_sending.retain(|request| self.scheduler.is_sending(request));
        }
        let mut output = self.aggregator.add(outputs);
        for failure in std::mem::take(&mut output.failures) {
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
        let wakers = outcomes.into_iter().filter_map(|outcome| self.deliver(outcome)).collect();
        (self.outcomes.len() > before, wakers)
    }

    /// An outcome is the engine's, or that of whoever awaits it, who is to be woken.
    pub(super) fn deliver(&mut self, outcome: Outcome) -> Option<Waker> {
        self.traces.outcome(&outcome);
        if let Some(request) = outcome.ends_load()
            && let Some(grant) = self.grants.remove(request)
        {
            self.spent.push(Arc::clone(grant.granted()));
        }
        if let Outcome::Free { request, kept: Kept::Request } | Outcome::Lost { request, kept: Kept::Request } =
            &outcome
            && let Some(published) = &mut self.published
        {
            published.release(request);
        }
        match self.awaited.hear(outcome) {
            Ok(waker) => waker,
            Err(outcome) => {
                self.outcomes.push_back(outcome);
                None
            }
        }
    }
}
