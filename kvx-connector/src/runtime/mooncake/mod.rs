//! The MooncakeConnector's side of the runtime: a bootstrap server, a ROUTER for each worker of a prefill, questions of
//! a decode, and writes into what it grants.
//!
//! Before vLLM 0.16 there is no bootstrap server: a worker's port follows from its rank, and REQ sockets ask it.
//!
//! Toward kvx all of kvx's backends carry the blocks: a decode tells how its agent is reached, and for each request a
//! region that is written to by a key of its own, whose end is the end of all writes. Toward a plain Mooncake agent, as
//! vLLM's workers are, `MOONCAKE` carries them, by address.

mod announce;
mod asking;
mod bootstrap;
mod channel;
mod client;
mod http;
mod proof;
#[cfg(test)]
mod tests;
mod way;

use std::collections::HashMap;
use std::sync::Arc;

use kvx_config::RankNumbers;
use kvx_core::sync::Mutex;
use kvx_core::{Error, ErrorKind, Op, Result};
use tokio::net::TcpListener;
use tokio::task::AbortHandle;

pub(super) use self::announce::Announced;
use self::asking::{IdleClients, Question};
use self::bootstrap::BootstrapServer;
use self::channel::Askers;
pub(super) use self::http::{MAX_HEAD as MAX_HTTP_HEAD, head_len as http_head_len};
pub(super) use self::way::{Way, WayPairs};
use super::builder::Setup;
use super::half::WorkerKind;
use super::state::Shared;
use super::zmtp::{Budget, Router, resolve};
use crate::engine::mooncake::{Bootstrap, MooncakeAction, MooncakeWorker, PullId};
use crate::engine::{Address, Connection, Time, WorkerRank, bare, is_loopback};

/// How long the name of this host may take to resolve.
const TO_RESOLVE: std::time::Duration = std::time::Duration::from_secs(5);
/// How often free ports in a row are looked for.
const TRIES: u32 = 16;

/// What the workers of a MooncakeConnector have under way.
#[derive(Debug)]
pub(super) struct Room {
    /// Ways to the memory of decodes.
    ways: Mutex<HashMap<(WorkerRank, Connection), Arc<Way>>>,
    /// Questions that wait for answers.
    pulls: Mutex<HashMap<(WorkerRank, PullId), AbortHandle>>,
    askers: Askers,
    /// Of answers in memory.
    answers: Arc<Budget>,
    idle: IdleClients,
    announced: Announced,
}

impl Default for Room {
    fn default() -> Self {
        Room {
            ways: Mutex::default(),
            pulls: Mutex::default(),
            askers: Askers::default(),
            answers: Budget::new(asking::BYTES),
            idle: IdleClients::default(),
            announced: Announced::default(),
        }
    }
}

impl Room {
    pub(super) fn way(&self, rank: WorkerRank, connection: Connection) -> Option<Arc<Way>> {
        self.ways.lock().get(&(rank, connection)).cloned()
    }

    pub(super) fn disconnect(&self, rank: WorkerRank, connection: Connection) {
        self.ways.lock().remove(&(rank, connection));
    }
}

/// Sockets that listen, before anybody is answered.
pub(super) struct Listeners {
    host: Arc<str>,
    bootstrap: Option<TcpListener>,
    ranks: Vec<(WorkerRank, TcpListener)>,
}

/// What a connector listens with, until it is dropped.
#[derive(Debug)]
pub(super) struct Channels {
    host: Arc<str>,
    bootstrap: Option<Arc<BootstrapServer>>,
    routers: Vec<(WorkerRank, Router)>,
}

impl Listeners {
    /// Listens where the configuration says: the bootstrap server on its port, or any free one, and each worker of a
    /// prefill on a port that is free. Errors: a port that is taken, with the variable to set; a host that is not of
    /// this machine.
    pub(super) async fn bind(setup: &Setup) -> Result<Self> {
        let settings = &setup.settings;
        let Some(mooncake) = &settings.mooncake else {
            return Err(Error::new(ErrorKind::Invalid, "settings of a NixlConnector"));
        };
        let host: Arc<str> = bare(setup.host()).into();
        let bind = setup.config.nixl().side_channel_bind.as_deref().map_or(&*host, bare);
        if is_loopback(&host) {
            tracing::info!(
                "peers of other machines cannot reach this engine: set VLLM_HOST_IP to its own address"
            );
        }
        let mut listeners =
            Listeners { host: Arc::clone(&host), bootstrap: None, ranks: Vec::new() };
        if mooncake.serves_bootstrap(setup.data_parallel, WorkerRank::default())
            && let Bootstrap::Own(port) = mooncake.bootstrap
        {
            listeners.bootstrap = Some(listen(bind, if setup.any_port { 0 } else { port }).await?);
        }
        if mooncake.prefills() && mooncake.is_older() {
            listeners.ranks = older_ranks(setup, bind).await?;
        } else if mooncake.prefills() {
            for (pp, tp) in
                (0..settings.pp_size).flat_map(|pp| (0..settings.tp_size).map(move |tp| (pp, tp)))
            {
                listeners.ranks.push((WorkerRank { pp, tp }, listen(bind, 0).await?));
            }
        }
        Ok(listeners)
    }

    /// The bootstrap server, as routers are to tell decodes; without one the first worker, as they are told.
    pub(super) fn address(&self, bootstrap: &Bootstrap) -> Address {
        match (bootstrap, &self.bootstrap) {
            (Bootstrap::Without, _) => {
                let first = self.ranks.first().and_then(|(_, listener)| listener.local_addr().ok());
                Address {
                    host: Arc::clone(&self.host),
                    port: first.map_or(0, |local| local.port()),
                }
            }
            (Bootstrap::External(address), _) => address.clone(),
            (Bootstrap::Own(port), None) => Address { host: Arc::clone(&self.host), port: *port },
            (Bootstrap::Own(port), Some(listener)) => {
                let port = listener.local_addr().map_or(*port, |local| local.port());
                Address { host: Arc::clone(&self.host), port }
            }
        }
    }

    /// Begins to answer.
    pub(super) fn serve(self, shared: &Arc<Shared>) -> Result<Channels> {
        let secret = shared.secret.clone();
        let bootstrap = self
            .bootstrap
            .map(|listener| Arc::new(BootstrapServer::serve(listener, shared.clock, secret)));
        let router = |(rank, listener)| Ok((rank, channel::serve(listener, shared, rank)?));
        let routers = self.ranks.into_iter().map(router).collect::<Result<_>>()?;
        Ok(Channels { host: self.host, bootstrap, routers })
    }
}

/// Listens for the workers of a prefill before vLLM 0.16. Where any port will do, the ones after it may be taken: then
/// others are tried.
async fn older_ranks(setup: &Setup, bind: &str) -> Result<Vec<(WorkerRank, TcpListener)>> {
    let mut tries = if setup.any_port { TRIES } else { 1 };
    loop {
        tries -= 1;
        match in_a_row(setup, bind).await {
            Err(error) if error.kind() == ErrorKind::Exhausted && tries > 0 => {}
            done => return done,
        }
    }
}

/// One port after the other.
async fn in_a_row(setup: &Setup, bind: &str) -> Result<Vec<(WorkerRank, TcpListener)>> {
    let tp_size = setup.settings.tp_size;
    let mut ranks: Vec<(WorkerRank, TcpListener)> = Vec::new();
    for tp in 0..tp_size {
        let first = ranks.first().and_then(|(_, listener)| listener.local_addr().ok());
        let port = match first {
            _ if !setup.any_port => {
                setup.config.mooncake_port(RankNumbers { dp: setup.data_parallel, tp, tp_size })?
            }
            None => 0,
            Some(first) => u16::try_from(u32::from(first.port()) + tp).map_err(|_| {
                Error::new(
                    ErrorKind::Exhausted,
                    "a free port has too few above it for all workers: start again",
                )
            })?,
        };
        ranks.push((WorkerRank { pp: 0, tp }, listen(bind, port).await?));
    }
    Ok(ranks)
}

/// A port of this host, at the first address of it.
async fn listen(host: &str, port: u16) -> Result<TcpListener> {
    let foreign = |why: &dyn std::fmt::Display| {
        Error::new(
            ErrorKind::Invalid,
            format!(
                "a MooncakeConnector cannot listen at {host:?}, no address of this machine ({why}): set VLLM_HOST_IP \
                 to one, or kv_connector_extra_config.side_channel_bind to the one to listen at"
            ),
        )
    };
    let addresses = resolve(host, port, TO_RESOLVE).await.map_err(|error| foreign(&error))?;
    let address = addresses[0];
    TcpListener::bind(address).await.map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => Error::new(
            ErrorKind::Exhausted,
            format!(
                "port {} of {} is taken, so a MooncakeConnector cannot listen there; another prefill may have it: set \
                 VLLM_MOONCAKE_BOOTSTRAP_PORT to one that is free, or, where there is a bootstrap server, \
                 kv_connector_extra_config.bootstrap_server_address to that of the other",
                address.port(),
                address.ip()
            ),
        ),
        std::io::ErrorKind::AddrNotAvailable => foreign(&error),
        _ => Error::os(format!("a MooncakeConnector cannot listen at {address}"), error),
    })
}

impl Shared {
    /// Lets a worker hear what came of something, on its clock; the thread looks at what follows from it.
    fn tell_mooncake(&self, rank: WorkerRank, tell: impl FnOnce(&mut MooncakeWorker, Time)) {
        self.tell_half(rank, |half, now| {
            if let WorkerKind::Mooncake(worker) = half {
                tell(worker, now);
            }
        });
    }
}

/// Begins what a worker asks for; its answer comes by [`Shared::tell_mooncake`].
pub(super) fn act(shared: &Arc<Shared>, rank: WorkerRank, action: MooncakeAction) {
    let room = &shared.mooncake;
    match action {
        MooncakeAction::Query { query, address, deadline } => {
            tokio::spawn(Arc::clone(shared).query(rank, query, address, deadline));
        }
        MooncakeAction::Ask { pull, address, question, is_kvx, deadline } => {
            let question = Question { pull, address, message: question, is_kvx, deadline };
            let asking = tokio::spawn(Arc::clone(shared).pull(rank, question)).abort_handle();
            if let Some(before) = room.pulls.lock().insert((rank, pull), asking) {
                before.abort();
            }
        }
        MooncakeAction::Hangup { pull } => {
            if let Some(asking) = room.pulls.lock().remove(&(rank, pull)) {
                asking.abort();
            }
        }
        MooncakeAction::Answer { ask, bytes } => room.askers.answer(rank, ask, bytes),
        MooncakeAction::Connect { connection, target } => {
            tokio::spawn(Arc::clone(shared).describe(rank, connection, target));
        }
        MooncakeAction::Write { what, .. } => {
            let cancel = shared.moving(rank, what.id);
            tokio::spawn(Arc::clone(shared).transfer(rank, Op::Write, what, cancel));
        }
        MooncakeAction::Engine(action) => unreachable!("taken in the turn: {action:?}"),
    }
}
