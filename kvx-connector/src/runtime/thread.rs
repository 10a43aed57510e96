//! The connector's thread. It does all work that is not part of a call of the engine.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Error, ErrorKind, Result};

use super::clock::Clock;
use super::connector::Connector;
use super::dispatch::drive;
use super::listening::PeerSockets;
use super::mooncake::{Listeners, serve};
use super::setup::Setup;
use super::shared::Shared;
use super::side::{SideServer, SideSettings};
use super::slot::Slot;

/// The name of the thread.
const THREAD: &str = "kvx-connector";
/// The time limit for the start of a side channel, which may have to resolve a name.
pub(super) const START_LIMIT: Duration = Duration::from_secs(30);

/// Starts the thread of an engine. The slot receives the connector once its side channel listens.
pub(super) fn start(setup: Setup, side: SideSettings) -> Result<Arc<Slot<Result<Connector>>>> {
    on_its_own(|started| run(setup, side, started))
}

/// Runs a future on a new thread with a small runtime. Its result goes to the slot.
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

/// Opens the listening sockets, and creates the state that everything else works on.
async fn listening(mut setup: Setup, side: SideSettings, clock: Clock) -> Result<Arc<Shared>> {
    let runtime = tokio::runtime::Handle::current();
    let Some(mooncake) = &setup.settings.mooncake else {
        let server = SideServer::bind(&side, setup.hash.clone(), clock).await?;
        setup.bind_beside_the_side_channel().await;
        setup.settings.address = server.address().clone();
        let shared = Arc::new(Shared::of_engine(setup, clock, side.secret, runtime)?);
        *shared.listening.lock() = Some(PeerSockets::Nixl(server));
        return Ok(shared);
    };
    let listeners = Listeners::bind(&setup).await?;
    let address = listeners.address(&mooncake.bootstrap);
    setup.bind_beside_the_side_channel().await;
    setup.settings.address = address;
    let shared = Arc::new(Shared::of_engine(setup, clock, side.secret, runtime)?);
    let channels = serve(listeners, &shared)?;
    *shared.listening.lock() = Some(PeerSockets::Mooncake(channels));
    Ok(shared)
}
