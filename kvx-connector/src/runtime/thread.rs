//! The connector's own thread: everything that happens without the engine's doing happens here.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{Agent, Error, ErrorKind, Op, Result};
use tokio::time::timeout_at;
use tracing::{Instrument as _, Span};

use super::builder::Setup;
use super::clock::Clock;
use super::closing::close;
use super::connector::Connector;
use super::listening::Listening;
use super::mooncake::{self, Listeners};
use super::side::{SideServer, SideSettings};
use super::slot::Slot;
use super::state::Shared;
use crate::engine::{Action, WorkerRank};
use crate::wire::EngineNotification;
use crate::wire::nixl::{Assembly, Got};

/// Its name.
const THREAD: &str = "kvx-connector";
/// How long a side channel may take to begin to listen: a name has to be resolved for it.
pub(super) const START_LIMIT: Duration = Duration::from_secs(30);
/// Nobody is waited for longer than this; then one looks again.
const LONG: Duration = Duration::from_secs(3600);
/// Notifications that are of no use are warned of no more often.
const QUIET: Duration = Duration::from_secs(1);

/// Begins the thread of an engine. The slot gets the connector once its side channel listens.
pub(super) fn start(setup: Setup, side: SideSettings) -> Result<Arc<Slot<Result<Connector>>>> {
    on_its_own(|started| run(setup, side, started))
}

/// Runs on a thread of its own, with a small runtime. What it is for goes to the slot.
pub(super) fn on_its_own<T, R>(
    run: impl FnOnce(Arc<Slot<Result<T>>>) -> R + Send + 'static,
) -> Result<Arc<Slot<Result<T>>>>
where
    T: Send + 'static,
    R: Future<Output = ()>,
{
    let started = Slot::new();
    let slot = Arc::clone(&started);
    let body = move || match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_name(THREAD)
        .build()
    {
        Ok(runtime) => runtime.block_on(run(slot)),
        Err(error) => {
            slot.set(Err(Error::os("the connector's runtime could not be started", error)))
        }
    };
    match std::thread::Builder::new().name(THREAD.into()).spawn(body) {
        Ok(_) => Ok(started),
        Err(error) => Err(Error::os("the connector's thread could not be started", error)
            .with_kind(ErrorKind::Exhausted)),
    }
}

async fn run(setup: Setup, side: SideSettings, started: Arc<Slot<Result<Connector>>>) {
    let clock = Clock::new();
    let shared = match listening(setup, side, clock).await {
        Ok(shared) => shared,
        Err(error) => return started.set(Err(error)),
    };
    started.set(Ok(Connector::of(Arc::clone(&shared))));
    drop(started);
    drive(&shared).await;
}

/// Does what is due, until the connector has ended.
pub(super) async fn drive(shared: &Arc<Shared>) {
    loop {
        let turn = shared.turn();
        for spent in turn.spent {
            tokio::spawn(async move { spent.revoked().await });
        }
        for (rank, request) in turn.wanted {
            tokio::spawn(Arc::clone(shared).tell_grants(rank, request));
        }
        for (rank, agent) in turn.unheard {
            tokio::spawn(listen(Arc::clone(shared), rank, agent));
        }
        for (rank, action, span) in turn.actions {
            act(shared, rank, action, span);
        }
        for (rank, action) in turn.mooncake {
            mooncake::act(shared, rank, action);
        }
        for due in turn.due {
            let shared = Arc::clone(shared);
            tokio::task::spawn_blocking(move || shared.fill(due));
        }
        if let Some(closing) = turn.closing {
            tokio::spawn(close(Arc::clone(shared), closing));
        }
        if turn.over {
            return;
        }
        match turn.next {
            Some(next) => drop(timeout_at(next.into(), shared.wake_up.notified()).await),
            None => shared.wake_up.notified().await,
        }
    }
}

/// What everything else works on, once peers can ask.
async fn listening(mut setup: Setup, side: SideSettings, clock: Clock) -> Result<Arc<Shared>> {
    let runtime = tokio::runtime::Handle::current();
    let Some(mooncake) = &setup.settings.mooncake else {
        let server = SideServer::bind(&side, setup.hash.clone(), clock).await?;
        setup.bind_beside_the_side_channel().await;
        setup.settings.address = server.address().clone();
        let shared = Arc::new(Shared::of_engine(setup, clock, side.secret, runtime)?);
        *shared.side.lock() = Some(Listening::Nixl(server));
        return Ok(shared);
    };
    let listeners = Listeners::bind(&setup).await?;
    let address = listeners.address(&mooncake.bootstrap);
    setup.bind_beside_the_side_channel().await;
    setup.settings.address = address;
    let shared = Arc::new(Shared::of_engine(setup, clock, side.secret, runtime)?);
    let channels = listeners.serve(&shared)?;
    *shared.side.lock() = Some(Listening::Mooncake(channels));
    Ok(shared)
}

/// Begins what a worker asks for; its answer comes by [`Shared::tell_worker`].
fn act(shared: &Arc<Shared>, rank: WorkerRank, action: Action, span: Span) {
    let shared = Arc::clone(shared);
    match action {
        Action::Handshake { connection, peer, ranks } => {
            tokio::spawn(shared.shake_hands(rank, connection, peer, ranks));
        }
        Action::Read(order) => {
            let cancel = shared.moving(rank, order.id);
            tokio::spawn(shared.transfer(rank, Op::Read, order, cancel).instrument(span));
        }
        Action::Write(order) => {
            let cancel = shared.moving(rank, order.id);
            tokio::spawn(shared.transfer(rank, Op::Write, order, cancel).instrument(span));
        }
        Action::Register { request, connection, ranks, registration } => {
            let registered = shared.register_push(rank, request, (connection, ranks), registration);
            tokio::spawn(registered.instrument(span));
        }
        Action::Fence { request } => {
            drop(tokio::spawn(shared.fence(rank, request).instrument(span)))
        }
        Action::ReadGenerations { id, connection, rank: at, blocks, .. } => {
            tokio::spawn(
                shared.read_generations(rank, id, (connection, at), blocks).instrument(span),
            );
        }
        Action::CheckDigests { id, connection, blocks, .. } => {
            tokio::spawn(shared.check_digests(rank, id, connection, blocks).instrument(span));
        }
        Action::Notify { connection, rank: at, request, bytes } => {
            tokio::spawn(shared.notify(rank, (connection, at), request, bytes).instrument(span));
        }
        Action::Finish { request, connection, lists } => {
            let finish =
                move || span.in_scope(|| shared.finish(rank, &request, connection, &lists));
            tokio::task::spawn_blocking(finish);
        }
        Action::Cancel { .. } | Action::Disconnect { .. } => unreachable!("done in the turn"),
    }
}

/// Tells a worker what a peer has said: read before the lock, as it may be long.
fn hear(shared: &Shared, rank: WorkerRank, from: &str, bytes: &[u8]) -> Result<()> {
    let notification = EngineNotification::decode(bytes)?;
    let mut heard = Ok(());
    shared.tell_worker(rank, |worker, now| heard = worker.heard(now, from, notification));
    heard
}

/// Hears what peers send to a worker.
async fn listen(shared: Arc<Shared>, rank: WorkerRank, agent: Agent) {
    let mut warned: Option<Instant> = None;
    let mut unsaid = 0_u64;
    let mut parts = Assembly::default();
    loop {
        // A peer that sends without end lets everything else on this thread have its turn.
        tokio::task::coop::consume_budget().await;
        match agent.notification(LONG).await {
            Ok(notification) => {
                let from = format!("{:?}", notification.from);
                let heard = match parts.take(notification.from.incarnation, &notification.bytes) {
                    Got::Part => continue,
                    Got::Whole(bytes) => hear(&shared, rank, &from, &bytes),
                    Got::Nonsense => hear(&shared, rank, &from, &notification.bytes),
                    Got::Instead(bytes) => Err(Error::new(
                        ErrorKind::Exhausted,
                        format!(
                            "another one, of which {bytes} bytes had come, was dropped to make room"
                        ),
                    )),
                };
                let Err(error) = heard else { continue };
                if warned.is_some_and(|last| last.elapsed() < QUIET) {
                    unsaid += 1;
                    continue;
                }
                tracing::warn!(%from, %error, unsaid, "a notification that is of no use here");
                (warned, unsaid) = (Some(Instant::now()), 0);
            }
            Err(error) if error.kind() == ErrorKind::TimedOut => {}
            Err(_) => return,
        }
    }
}
