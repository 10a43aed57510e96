//! An engine's end of a group: it lets ranks join from processes of their own.

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
use super::members::close_gathering;
use super::remote_rank::RemoteRank;
use super::serving::{RankListener, gather};
use kvx_vllm::params::TransferMode;

impl Connector {
    /// Lets the workers that have not registered their caches here run in processes of their own,
    /// each of which joins at this path, a Unix socket, by [`Rank::join`]. Peers hear of all of
    /// them when the last has registered its caches: the completion is `Ok` then, and until then
    /// nothing is published or loaded.
    ///
    /// What the engine does stays as it is: [`step`](Self::step) and [`Rank::start_load_kv`] are
    /// called here, for these ranks too. One that ends, or of which nothing is heard for 10 s, ends
    /// the loads of the engine: each fails with
    /// [`LoadFailure::Rank`](kvx_vllm::engine::LoadFailure::Rank), which names it, and no other
    /// begins. So does one that is not there at the deadline, one that is started twice, and one
    /// that the engine does not have.
    ///
    /// # Errors
    /// `Unsupported` for a MooncakeConnector; `Invalid` when all workers have their caches, or
    /// ranks join already; `Exhausted` for a path that is in use; what the system says of it. Later
    /// `TimedOut`, `PeerLost` and `Invalid`: a rank did not come, has gone, or was started twice.
    pub fn group(&self, path: impl AsRef<Path>, deadline: impl Into<Deadline>) -> Completion<()> {
        open(self.shared(), JoinAddress::Path(path.as_ref().to_owned()), deadline.into())
    }

    /// As [`group`](Self::group), for ranks on other hosts too: each joins by
    /// [`Rank::join_over_tcp`]. Both ends prove to each other that they have the fleet's secret
    /// (`KVX_SECRET_FILE`), and seal what they say. At `0.0.0.0` ranks come in by any address of
    /// this host.
    ///
    /// Two things are other than with ranks of one host. Blocks whose lease is taken back
    /// ([`Lease`](crate::runtime::Lease) dropped) are the engine's when
    /// [`outcomes`](Self::outcomes) says `Free`, after a word to each of these ranks and back. And
    /// nobody can prove that a rank has died unless it has said so: what it kept or filled is
    /// `Lost`.
    ///
    /// # Errors
    /// As [`group`](Self::group); `Invalid` without a secret, and for port 0.
    pub fn group_over_tcp(
        &self,
        address: SocketAddr,
        deadline: impl Into<Deadline>,
    ) -> Completion<()> {
        open(self.shared(), JoinAddress::Tcp(address), deadline.into())
    }
}

impl Rank {
    /// Returns whether ranks of an engine with this configuration may be in processes of their own
    /// ([`Connector::group`]).
    ///
    /// # Errors
    /// `Unsupported`: all of them have to be in the engine's process.
    pub fn may_join(config: &KvTransferConfig) -> Result<()> {
        match config.connector() {
            Some(kvx_vllm::config::ConnectorKind::Mooncake) => Err(Error::new(
                ErrorKind::Unsupported,
                "ranks in processes of their own are for NixlConnector and NixlPushConnector: with a MooncakeConnector \
                 register all of them here",
            )),
            _ => Ok(()),
        }
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

/// All workers without caches are to join. Errors: meanwhile nobody may any more; the gathering
/// comes back.
fn expect_ranks(shared: &Shared, gathering: Gathering) -> Result<(), (Gathering, Error)> {
    // A registration that is under way is waited for.
    let _listening = shared.listening.lock();
    let mut state = shared.state.lock();
    if let Err(error) = check_state(&state) {
        return Err((gathering, error));
    }
    state.gathering = Some(gathering);
    if state.ranks.iter().all(|(_, held)| held.registered.is_none()) {
        // Caches that were given back say nothing of those that come.
        (state.publication.pool, state.publication.published) = (None, None);
    }
    let pushes = shared.setup.settings.mode == TransferMode::Push;
    for (rank, held) in state.ranks.iter_mut().filter(|(_, held)| held.registered.is_none()) {
        held.worker = WorkerKind::Remote(Box::new(RemoteRank::new(rank, pushes)));
    }
    Ok(())
}

fn check_state(state: &State) -> Result<()> {
    let refused = |why: &'static str| Err(Error::new(ErrorKind::Invalid, why));
    if state.is_closing() {
        return Err(closed());
    }
    if state.gathering.is_some() {
        return refused("ranks join this connector already: call Connector::group once");
    }
    if state.ranks.iter().all(|(_, held)| held.registered.is_some()) {
        return refused("all workers have registered their caches here: none is left to join");
    }
    Ok(())
}
