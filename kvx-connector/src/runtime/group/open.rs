//! An engine's end of a group: it accepts ranks from processes of their own.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use kvx_core::{Completion, Deadline, Error, ErrorKind, Result};
use kvx_vllm::config::KvTransferConfig;
use tokio::time::sleep_until;

use super::super::connector::Connector;
use super::super::rank::Rank;
use super::super::ranks::WorkerKind;
use super::super::shared::Shared;
use super::super::slot::until;
use super::super::state::{State, closed};
use super::gathering::{Gathering, JoinAddress};
use super::members::{self, close_gathering};
use super::remote_rank::RemoteRank;
use super::serving::{RankListener, gather};
use kvx_vllm::params::TransferMode;

impl Connector {
    /// Lets the workers that have not registered their caches here run in processes of their own.
    ///
    /// Each of them joins at this path, a Unix socket, with [`Rank::join`]. The completion is `Ok`
    /// when the last has registered its caches. Until then peers learn of none of them, and nothing
    /// is published or loaded.
    ///
    /// The engine works as before: it calls [`step`](Self::step) and [`Rank::start_load_kv`] in
    /// this process, for these ranks too. The engine loses a rank that ends, that is silent for 10
    /// s, that has not joined by the deadline, or that is started twice. A process that joins as a
    /// rank that does not exist makes the engine lose all ranks. All loads then fail with
    /// [`LoadFailure::Rank`](kvx_vllm::engine::LoadFailure::Rank), which names the rank, and no
    /// other load starts.
    ///
    /// # Errors
    /// At once:
    /// - `Unsupported`: the connector is a MooncakeConnector.
    /// - `Invalid`: all workers have registered their caches here, or ranks join already.
    /// - `Exhausted`: the path is in use.
    /// - `Closed`: the connector was shut down.
    /// - Errors of the operating system for the socket.
    ///
    /// Later `TimedOut`, `PeerLost` and `Invalid`: a rank did not join in time, has gone, or was
    /// started twice.
    pub fn group(&self, path: impl AsRef<Path>, deadline: impl Into<Deadline>) -> Completion<()> {
        open(self.shared(), JoinAddress::Path(path.as_ref().to_owned()), deadline.into())
    }

    /// Lets ranks join over TCP, also from other hosts, as [`group`](Self::group) does for ranks of
    /// this host.
    ///
    /// Each rank joins with [`Rank::join_over_tcp`]. Both ends prove to each other that they have
    /// the fleet's secret (`KVX_SECRET_FILE`), and encrypt their messages. With `0.0.0.0` ranks can
    /// join at any address of this host.
    ///
    /// Two things differ from ranks of one host. Dropping a [`Lease`](crate::runtime::Lease) does
    /// not free its blocks at once: the engine may reuse them when [`outcomes`](Self::outcomes)
    /// returns `Free`, after a round trip to each of these ranks. And only a rank's own report
    /// proves that it has ended: without it, the blocks that it kept or filled are `Lost`.
    ///
    /// # Errors
    /// Those of [`group`](Self::group), and `Invalid` without a secret and for port 0.
    pub fn group_over_tcp(
        &self,
        address: SocketAddr,
        deadline: impl Into<Deadline>,
    ) -> Completion<()> {
        open(self.shared(), JoinAddress::Tcp(address), deadline.into())
    }

    /// Returns why an engine whose workers have processes of their own can load and publish nothing
    /// now, if so: a worker has not joined, has no caches, or is lost for good.
    pub fn missing_rank(&self) -> Option<String> {
        self.shared().state.lock().ranks.missing()
    }
}

impl Rank {
    /// Checks that ranks of an engine with this configuration may run in processes of their own
    /// ([`Connector::group`]).
    ///
    /// # Errors
    /// `Unsupported`: all ranks have to run in the engine's process.
    pub fn may_join(config: &KvTransferConfig) -> Result<()> {
        match config.connector() {
            Some(kvx_vllm::config::ConnectorKind::Mooncake) => Err(ErrorKind::Unsupported.because(
                "only NixlConnector and NixlPushConnector support ranks in processes of their \
                 own: with a MooncakeConnector register all ranks in the engine's process",
            )),
            _ => Ok(()),
        }
    }

    /// Sends a note to the process of this worker, which takes it with
    /// [`JoinedRank::notes`](crate::JoinedRank::notes): up to 1 MiB that kvx does not read. Notes
    /// arrive in their order, after everything that the engine did before.
    ///
    /// # Errors
    /// - `Invalid`: the worker runs in this process.
    /// - `Exhausted`: the note is too long.
    /// - `PeerLost`: the worker has not joined, or is lost.
    pub fn note(&self, note: &[u8]) -> Result<()> {
        members::note(self.connector.shared(), self.rank, note)
    }
}

fn open(shared: &Arc<Shared>, at: JoinAddress, deadline: Deadline) -> Completion<()> {
    let (done, ticket) = Completion::with_ticket();
    let opened = may_gather(shared).and_then(|()| {
        let _entered = shared.runtime.enter();
        RankListener::open(&at, shared.secret.as_ref())
    });
    match opened {
        Ok(listener) => {
            let gathering = Gathering::new(at, ticket);
            if let Err((gathering, error)) = expect_ranks(shared, gathering) {
                gathering.end(error);
                return done;
            }
            shared.runtime.spawn(gather(Arc::clone(shared), listener));
            let to_close = Arc::clone(shared);
            shared.runtime.spawn(async move {
                sleep_until(until(deadline).into()).await;
                close_gathering(&to_close);
            });
        }
        Err(error) => ticket.settle(Err(error)),
    }
    done
}

fn may_gather(shared: &Shared) -> Result<()> {
    Rank::may_join(&shared.setup.config)?;
    check_state(&shared.state.lock())
}

/// Turns all workers without caches into ranks that join. Errors: the state no longer allows it.
/// The gathering is returned.
fn expect_ranks(shared: &Shared, gathering: Gathering) -> Result<(), (Gathering, Error)> {
    // Waits for a registration in progress.
    let _listening = shared.listening.lock();
    let mut state = shared.state.lock();
    if let Err(error) = check_state(&state) {
        return Err((gathering, error));
    }
    state.gathering = Some(gathering);
    if state.ranks.iter().all(|(_, held)| held.registered.is_none()) {
        // Caches that were given back do not limit those that follow.
        (state.publication.pool, state.publication.published) = (None, None);
    }
    let pushes = shared.setup.settings.mode == TransferMode::Push;
    for (rank, held) in state.ranks.iter_mut().filter(|(_, held)| held.registered.is_none()) {
        held.worker = WorkerKind::Remote(Box::new(RemoteRank::new(rank, pushes)));
    }
    Ok(())
}

fn check_state(state: &State) -> Result<()> {
    let refused = |why: &'static str| Err(ErrorKind::Invalid.because(why));
    if state.is_closing() {
        return Err(closed());
    }
    if state.gathering.is_some() {
        return refused("ranks join this connector already: call Connector::group once");
    }
    if state.ranks.iter().all(|(_, held)| held.registered.is_some()) {
        return refused(
            "all workers have registered their caches here, so no rank is left to join",
        );
    }
    Ok(())
}
