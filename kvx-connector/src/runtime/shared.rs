//! The part of a connector that its handles, its thread and its tasks share.

use std::sync::Arc;
use std::task::Waker;

use kvx_core::backend::Ticket;
use kvx_core::backend::sync::{Condvar, Mutex};
use kvx_core::{Deadline, ErrorKind, Result, Secret};
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;

use super::caches::{RegisteredCaches, caches_are_gone};
use super::clock::Clock;
use super::group::HeadHandle;
use super::link::PeerLink;
use super::listening::PeerSockets;
use super::metrics::Metrics;
use super::mooncake::MooncakeState;
use super::ranks::Ranks;
use super::ranks::WorkerKind;
use super::setup::Setup;
use super::side::SideClient;
use super::state::{State, closed};
use kvx_vllm::engine::mooncake::{Mooncake, MooncakeWorker};
use kvx_vllm::engine::{Connection, MoveId, Outcome, Time, Worker, WorkerRank};
use kvx_vllm::group::ToHead;

/// One connector, shared by its handles, its thread and its tasks.
pub(super) struct Shared {
    pub(super) clock: Clock,
    pub(super) setup: Setup,
    pub(super) secret: Option<Secret>,
    /// The runtime of the connector's thread.
    pub(super) runtime: tokio::runtime::Handle,
    pub(super) side_client: SideClient,
    pub(super) listening: Mutex<Option<PeerSockets>>,
    pub(super) mooncake: MooncakeState,
    pub(super) state: Mutex<State>,
    /// Locked only by the connector's thread, because it calls the program's recorder meanwhile.
    pub(super) metrics: Mutex<Metrics>,
    /// Held while memory is granted, so that a request is granted once.
    pub(super) granting: Mutex<()>,
    /// Held while blocks are published with digests, so that a published block always has its
    /// digest.
    pub(super) digesting: Mutex<()>,
    /// Wakes the connector's thread.
    pub(super) wake_up: Notify,
    /// Wakes engines that await outcomes.
    pub(super) news: Notify,
    /// Wakes engines that wait for outcomes without a runtime.
    pub(super) news_blocking: Condvar,
}

impl Shared {
    /// Creates the state of an engine with all its workers. The address is set before.
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

    /// Creates the state of a rank whose engine is in another process and receives the worker's
    /// reports.
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
        let state = State::new(&setup, Ranks::new(&setup.settings, ranks)?);
        let engine = setup.data_parallel.to_string();
        let metrics = Metrics::new(&setup.factors.model, &engine, &setup.settings);
        let side_client = SideClient::new(clock, secret.clone(), setup.settings.ports);
        Ok(Shared {
            clock,
            setup,
            secret,
            runtime,
            side_client,
            listening: Mutex::default(),
            mooncake: MooncakeState::default(),
            state: Mutex::new(state),
            metrics: Mutex::new(metrics),
            granting: Mutex::default(),
            digesting: Mutex::default(),
            wake_up: Notify::new(),
            news: Notify::new(),
            news_blocking: Condvar::new(),
        })
    }

    /// Returns whether blocks have digests here, and loaded blocks are compared with the peer's.
    pub(super) fn digests(&self) -> bool {
        self.setup.config.nixl().kvx_digest
    }

    /// Returns whether the protocol is that of MooncakeConnectors before vLLM 0.16.
    pub(super) fn is_older_mooncake(&self) -> bool {
        self.setup.settings.mooncake.as_ref().is_some_and(Mooncake::is_older)
    }

    /// Converts a worker's time to a deadline.
    pub(super) fn deadline(&self, time: Time) -> Deadline {
        self.clock.moment(time).map_or_else(Deadline::default_for_transfers, Deadline::from)
    }

    /// Changes the state, and wakes the thread to act on it.
    pub(super) fn with_state<T>(&self, change: impl FnOnce(&mut State, Time) -> T) -> T {
        let now = self.clock.now();
        let changed = change(&mut self.state.lock(), now);
        self.wake_up.notify_one();
        changed
    }

    /// Changes the state, and wakes the thread if `change` returns true. For calls that an idle
    /// engine makes in each step.
    pub(super) fn wake_if(&self, change: impl FnOnce(&mut State, Time) -> bool) {
        let now = self.clock.now();
        let has_work = change(&mut self.state.lock(), now);
        if has_work {
            self.wake_up.notify_one();
        }
    }

    /// Reports to a worker.
    pub(super) fn report(&self, rank: WorkerRank, report: impl FnOnce(&mut WorkerKind, Time)) {
        self.with_state(|state, now| {
            if let Some(held) = state.ranks.get_mut(rank) {
                report(&mut held.worker, now);
            }
        });
    }

    /// Reports to the worker of a NixlConnector.
    pub(super) fn report_nixl(&self, rank: WorkerRank, report: impl FnOnce(&mut Worker, Time)) {
        self.report(rank, |worker, now| {
            if let WorkerKind::Nixl(worker) = worker {
                report(worker, now);
            }
        });
    }

    /// Reports to the worker of a MooncakeConnector.
    pub(super) fn report_mooncake(
        &self,
        rank: WorkerRank,
        report: impl FnOnce(&mut MooncakeWorker, Time),
    ) {
        self.report(rank, |worker, now| {
            if let WorkerKind::Mooncake(worker) = worker {
                report(worker, now);
            }
        });
    }

    /// Queues an outcome for the engine.
    pub(super) fn queue(&self, outcome: Outcome) {
        self.state.lock().outcomes.push(outcome);
        self.news_blocking.notify_all();
        self.news.notify_waiters();
    }

    /// Returns a connection of a worker. Errors: `Closed`.
    pub(super) fn link(&self, rank: WorkerRank, connection: Connection) -> Result<Arc<PeerLink>> {
        let state = self.state.lock();
        let link = state.ranks.get(rank).and_then(|held| held.links.get(&connection).cloned());
        link.ok_or_else(|| {
            ErrorKind::Closed
                .because("the connection was closed because the caches were given back")
        })
    }

    /// Returns the current caches of a worker in this process.
    pub(super) fn registered(&self, rank: WorkerRank) -> Option<Arc<RegisteredCaches>> {
        self.state.lock().ranks.registered(rank).cloned()
    }

    /// Returns whether a worker still has these caches.
    pub(super) fn still_has(&self, rank: WorkerRank, own: &Arc<RegisteredCaches>) -> bool {
        self.registered(rank).is_some_and(|now| Arc::ptr_eq(&now, own))
    }

    /// Works on these caches if the worker still has them. Giving them back waits for the work.
    /// Blocks the thread.
    pub(super) fn with_caches<T>(
        &self,
        rank: WorkerRank,
        own: &Arc<RegisteredCaches>,
        work: impl FnOnce(&RegisteredCaches) -> Result<T>,
    ) -> Result<T> {
        let _finishing = own.finishing.blocking_read();
        if self.still_has(rank, own) { work(own) } else { Err(caches_are_gone()) }
    }

    /// Returns the signal that cancels a move. It may have been sent already.
    pub(super) fn cancel_signal(&self, rank: WorkerRank, id: MoveId) -> Arc<Notify> {
        let state = self.state.lock();
        state.ranks.get(rank).and_then(|held| held.moves.get(&id).cloned()).unwrap_or_default()
    }

    /// Forgets a move that has ended.
    pub(super) fn forget_move(&self, rank: WorkerRank, id: MoveId) {
        if let Some(held) = self.state.lock().ranks.get_mut(rank) {
            held.moves.remove(&id);
        }
    }

    /// Returns whether a shutdown was requested.
    pub(super) fn is_closed(&self) -> bool {
        self.state.lock().is_closing()
    }

    /// Settles a ticket with the end of the shutdown that was requested.
    pub(super) fn settle_at_end(&self, ticket: Ticket) {
        let settled = self.state.lock().shutdown.settle_with(ticket);
        if let Err((ticket, result)) = settled {
            ticket.settle(result);
        }
    }

    /// Ends the connector: every open load and lease gets its outcome. `result` is `Ok` if nothing
    /// touches any block any more.
    pub(super) fn end(&self, result: Result<()>) {
        let end = self.state.lock().end(&result);
        self.news_blocking.notify_all();
        if let Some(gathering) = end.gathering {
            gathering.end(closed());
        }
        end.wakers.into_iter().for_each(Waker::wake);
        end.tickets.into_iter().for_each(|ticket| ticket.settle(result.clone()));
        self.news.notify_waiters();
        self.wake_up.notify_one();
    }
}
