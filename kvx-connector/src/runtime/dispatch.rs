//! One turn of the connector's thread: it starts a task for everything that is due.

use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use kvx_core::{Agent, Op};
use tokio::time::timeout_at;
use tracing::{Instrument as _, Span};

use super::grants::GrantedWrites;
use super::group::send_grants;
use super::mooncake::{Question, connect_decode, pull, query};
use super::ranks::DeviceFill;
use super::ranks::{WorkerAction, WorkerKind};
use super::shared::Shared;
use super::shutdown::ShutdownWork;
use super::{copies, handshake, notifications, notify, push, shutdown, transfer};
use kvx_vllm::engine::mooncake::MooncakeAction;
use kvx_vllm::engine::{Action, RequestId, WorkerRank};

/// Starts due tasks until the connector has ended.
pub(super) async fn drive(shared: &Arc<Shared>) {
    loop {
        let mut turn = take_turn(shared);
        start(shared, &mut turn);
        if turn.over {
            return;
        }
        match turn.next {
            Some(next) => drop(timeout_at(next.into(), shared.wake_up.notified()).await),
            None => shared.wake_up.notified().await,
        }
    }
}

/// The work of a turn, and the time of the next one if nothing wakes the thread before.
pub(super) struct Turn {
    pub(super) actions: Vec<(WorkerRank, WorkerAction, Span)>,
    new_agents: Vec<(WorkerRank, Agent)>,
    spent: Vec<Arc<GrantedWrites>>,
    /// Ranks in processes of their own that ask for the grants of a request.
    wanted: Vec<(WorkerRank, RequestId)>,
    fills: Vec<DeviceFill>,
    closing: Option<ShutdownWork>,
    next: Option<Instant>,
    over: bool,
}

/// Takes everything that is due.
pub(super) fn take_turn(shared: &Shared) -> Turn {
    let now = shared.clock.now();
    let mut guard = shared.state.lock();
    let state = &mut *guard;
    state.pass_on_ready(now, None);
    let collected = state.collect(now);
    let (mut actions, mut fills) = (Vec::new(), Vec::new());
    for (rank, held) in state.ranks.iter_mut() {
        fills.append(&mut held.take_fills());
        while let Some(action) = held.next_action() {
            match action {
                WorkerAction::Engine(Action::Cancel { id }) => {
                    held.moves.get(&id).into_iter().for_each(|signal| signal.notify_one())
                }
                WorkerAction::Engine(Action::Disconnect { connection }) => {
                    held.links.remove(&connection);
                    shared.mooncake.disconnect(rank, connection);
                }
                action => {
                    let span = match &action {
                        WorkerAction::Engine(action) => state.traces.of(now, action),
                        WorkerAction::Mooncake(_) => Span::none(),
                    };
                    actions.push((rank, action, span));
                }
            }
        }
    }
    let actions = state.defer_early(actions);
    let ranks = &state.ranks;
    let wanted = state.grants.take_wanted(|request| ranks.is_pending(request));
    let deadlines = ranks.iter().filter_map(|(_, held)| held.worker.next_deadline());
    let next = deadlines.chain(state.scheduler.next_deadline(now)).min();
    let closing = state.shutdown.begin().map(|deadline| {
        let (mut agents, mut remote) = (Vec::new(), Vec::new());
        for (_, held) in state.ranks.iter_mut() {
            match &mut held.worker {
                WorkerKind::Remote(rank) => remote.push(rank.shutdown(deadline)),
                here => here.shutdown(now),
            }
            agents.extend(held.agent.as_ref().map(|(agent, _)| agent.clone()));
        }
        ShutdownWork { deadline, agents, remote }
    });
    let mut turn = Turn {
        actions,
        new_agents: std::mem::take(&mut state.new_agents),
        spent: state.grants.take_spent(),
        wanted,
        fills,
        closing,
        next: None,
        over: state.shutdown.result().is_some(),
    };
    drop(guard);
    let line = shared.metrics.lock().write(now, &collected.report);
    turn.next = next.into_iter().chain(line).min().and_then(|next| shared.clock.moment(next));
    collected.wakers.into_iter().for_each(Waker::wake);
    if collected.has_news {
        shared.news_blocking.notify_all();
        shared.news.notify_waiters();
    }
    turn
}

/// Starts a task for each item of a turn.
fn start(shared: &Arc<Shared>, turn: &mut Turn) {
    for spent in turn.spent.drain(..) {
        tokio::spawn(async move { spent.revoked().await });
    }
    for (rank, request) in turn.wanted.drain(..) {
        tokio::spawn(send_grants(Arc::clone(shared), rank, request));
    }
    for (rank, agent) in turn.new_agents.drain(..) {
        tokio::spawn(notifications::receive(Arc::clone(shared), rank, agent));
    }
    for (rank, action, span) in turn.actions.drain(..) {
        start_action(Arc::clone(shared), rank, action, span);
    }
    for fill in turn.fills.drain(..) {
        let shared = Arc::clone(shared);
        tokio::task::spawn_blocking(move || copies::fill(&shared, fill));
    }
    if let Some(closing) = turn.closing.take() {
        tokio::spawn(shutdown::run(Arc::clone(shared), closing));
    }
}

fn spawn(span: &Span, task: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(task.instrument(span.clone()));
}

/// Starts the task for a worker's request. The task reports to the worker.
fn start_action(shared: Arc<Shared>, rank: WorkerRank, action: WorkerAction, span: Span) {
    match action {
        WorkerAction::Engine(action) => match action {
            Action::Handshake { connection, peer, ranks } => {
                spawn(&span, handshake::run(shared, rank, connection, peer, ranks));
            }
            Action::Read(order) => {
                let cancel = shared.cancel_signal(rank, order.id);
                spawn(&span, transfer::run(shared, rank, Op::Read, order, cancel));
            }
            Action::Write(order) => {
                let cancel = shared.cancel_signal(rank, order.id);
                spawn(&span, transfer::run(shared, rank, Op::Write, order, cancel));
            }
            Action::Register { request, connection, ranks, registration } => {
                let peer = (connection, ranks);
                spawn(&span, push::register(shared, rank, request, peer, registration));
            }
            Action::Fence { request } => spawn(&span, push::fence(shared, rank, request)),
            Action::ReadGenerations { id, connection, rank: at, blocks, .. } => {
                let peer = (connection, at);
                spawn(&span, transfer::read_generations(shared, rank, id, peer, blocks));
            }
            Action::CheckDigests { id, connection, blocks, .. } => {
                spawn(&span, transfer::check_digests(shared, rank, id, connection, blocks));
            }
            Action::Notify { connection, rank: at, request, bytes } => {
                spawn(&span, notify::run(shared, rank, (connection, at), request, bytes));
            }
            Action::Finish { request, connection, lists } => {
                let finish = move || {
                    span.in_scope(|| copies::finish(&shared, rank, &request, connection, &lists))
                };
                tokio::task::spawn_blocking(finish);
            }
            Action::Cancel { .. } | Action::Disconnect { .. } => {
                unreachable!("take_turn handles these")
            }
        },
        WorkerAction::Mooncake(action) => match action {
            MooncakeAction::Query { query: id, address, deadline } => {
                spawn(&span, query(shared, rank, id, address, deadline));
            }
            MooncakeAction::Ask { pull: id, address, question, is_kvx, deadline } => {
                let question = Question { pull: id, address, message: question, is_kvx, deadline };
                let task = tokio::spawn(pull(Arc::clone(&shared), rank, question));
                shared.mooncake.asks(rank, id, task.abort_handle());
            }
            MooncakeAction::Hangup { pull } => shared.mooncake.hang_up(rank, pull),
            MooncakeAction::Answer { ask, bytes } => shared.mooncake.answer(rank, ask, bytes),
            MooncakeAction::Connect { connection, target } => {
                spawn(&span, connect_decode(shared, rank, connection, target));
            }
            MooncakeAction::Write { what, .. } => {
                let cancel = shared.cancel_signal(rank, what.id);
                spawn(&span, transfer::run(shared, rank, Op::Write, what, cancel));
            }
            MooncakeAction::Engine(action) => unreachable!("unwrapped by the worker: {action:?}"),
        },
    }
}
