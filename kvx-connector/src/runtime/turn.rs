//! A turn of the connector's thread: what is due now, and what it lets the workers hear.

use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use kvx_core::Agent;
use tokio::sync::Notify;
use tracing::Span;

use super::closing::Closing;
use super::connect::PeerLink;
use super::half::WorkerKind;
use super::host_copies::Due;
use super::push::GrantedWrites;
use super::rank::Registered;
use super::state::{RankState, Shared};
use crate::engine::mooncake::MooncakeAction;
use crate::engine::{Action, Connection, MoveId, RequestId, Time, Worker, WorkerRank};

/// What the connector's thread has to do now, and when to look again though nothing happens.
#[derive(Default)]
pub(super) struct ConnectorTurn {
    pub(super) actions: Vec<(WorkerRank, Action, Span)>,
    pub(super) mooncake: Vec<(WorkerRank, MooncakeAction)>,
    pub(super) unheard: Vec<(WorkerRank, Agent)>,
    pub(super) spent: Vec<Arc<GrantedWrites>>,
    /// Ranks elsewhere that want to know what may be written into for a request.
    pub(super) wanted: Vec<(WorkerRank, RequestId)>,
    /// Loaded blocks that are to be copied to the device.
    pub(super) due: Vec<Due>,
    pub(super) next: Option<Instant>,
    pub(super) closing: Option<Closing>,
    pub(super) over: bool,
}

impl Shared {
    /// Everything that is due.
    pub(super) fn turn(&self) -> ConnectorTurn {
        let now = self.clock.now();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let ready = state.scheduler.take_ready(now, None);
        state.pass_on(now, ready);
        let (news, wakers) = state.collect(now);
        let unheard = std::mem::take(&mut state.unheard);
        let spent = std::mem::take(&mut state.spent);
        let mut turn = ConnectorTurn {
            over: state.over.is_some(),
            unheard,
            spent,
            ..ConnectorTurn::default()
        };
        for (rank, held) in &mut state.ranks {
            turn.due.append(&mut held.take_due());
            while let Some(action) = held.next_action() {
                match action {
                    WorkerAction::Either(Action::Cancel { id }) => {
                        held.moves.get(&id).into_iter().for_each(|moving| moving.notify_one())
                    }
                    WorkerAction::Either(Action::Disconnect { connection }) => {
                        held.links.remove(&connection);
                        self.mooncake.disconnect(*rank, connection);
                    }
                    WorkerAction::Either(action) => {
                        if let Action::Read(order) | Action::Write(order) = &action {
                            held.moves.insert(order.id, Arc::default());
                        }
                        let span = state.traces.of(now, &action);
                        turn.actions.push((*rank, action, span));
                    }
                    WorkerAction::Mooncake(action) => {
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
        turn.wanted = state.take_wanted();
        let line = state.metrics.line(now);
        let deadlines = state.ranks.values().filter_map(|held| held.worker.next_deadline());
        let next = deadlines.chain(state.scheduler.next_deadline(now)).chain(line).min();
        turn.next = next.and_then(|next| self.clock.moment(next));
        if let Some(closing) = state.closing.as_mut().filter(|closing| !closing.begun) {
            closing.begun = true;
            let (mut agents, mut away) = (Vec::new(), Vec::new());
            for held in state.ranks.values_mut() {
                match &mut held.worker {
                    WorkerKind::Away(rank) => away.push(rank.shutdown(closing.deadline)),
                    here => here.shutdown(now),
                }
                agents.extend(held.agent.as_ref().map(|(agent, _)| agent.clone()));
            }
            turn.closing = Some(Closing { deadline: closing.deadline, agents, away });
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
            if let WorkerKind::Nixl(worker) = half {
                tell(worker, now);
            }
        });
    }

    /// Lets a worker hear what came of something, on its clock; the thread looks at what follows from it.
    pub(super) fn tell_half(&self, rank: WorkerRank, tell: impl FnOnce(&mut WorkerKind, Time)) {
        let now = self.clock.now();
        let mut state = self.state.lock();
        if let Some(held) = state.ranks.get_mut(&rank) {
            tell(&mut held.worker, now);
        }
        drop(state);
        self.wake_up.notify_one();
    }

    /// Notes what was set up for a connection, before its worker hears of it.
    pub(super) fn linked(&self, rank: WorkerRank, connection: Connection, link: Arc<PeerLink>) {
        if let Some(held) = self.state.lock().ranks.get_mut(&rank) {
            held.links.insert(connection, link);
        }
    }

    pub(super) fn link(&self, rank: WorkerRank, connection: Connection) -> Option<Arc<PeerLink>> {
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
enum WorkerAction {
    /// Of the runtime, whatever its protocol.
    Either(Action),
    Mooncake(MooncakeAction),
}

impl RankState {
    fn next_action(&mut self) -> Option<WorkerAction> {
        match &mut self.worker {
            WorkerKind::Nixl(worker) => worker.next_action().map(WorkerAction::Either),
            WorkerKind::Mooncake(worker) => worker.next_action().map(|action| match action {
                MooncakeAction::Engine(action) => WorkerAction::Either(action),
                action => WorkerAction::Mooncake(action),
            }),
            WorkerKind::Away(_) => None,
        }
    }
}
