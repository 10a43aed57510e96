//! The listening sockets of a MooncakeConnector: a bootstrap server, and one socket for each worker
//! of a prefill.

use std::collections::HashMap;
use std::sync::Arc;

use kvx_core::backend::sync::Mutex;
use kvx_core::{Error, ErrorKind, Result};
use kvx_vllm::config::RankNumbers;
use tokio::net::TcpListener;
use tokio::task::AbortHandle;

use super::super::setup::Setup;
use super::super::zmtp::{Router, resolve};
use super::bootstrap::BootstrapServer;
use kvx_vllm::engine::mooncake::Bootstrap;
use kvx_vllm::engine::{Address, EngineId, WorkerRank};
use kvx_vllm::ids::{bare, is_loopback};

/// The time limit for the resolution of this host's name.
const TO_RESOLVE: std::time::Duration = std::time::Duration::from_secs(5);
/// The number of attempts to find consecutive free ports.
const TRIES: u32 = 16;

/// Listening sockets that do not answer yet.
pub(in super::super) struct Listeners {
    pub(super) host: Arc<str>,
    pub(super) bootstrap: Option<TcpListener>,
    pub(super) ranks: Vec<(WorkerRank, TcpListener)>,
}

/// The sockets that a connector serves, until this is dropped.
#[derive(Debug)]
pub(in super::super) struct Channels {
    pub(super) host: Arc<str>,
    pub(super) bootstrap: Option<Arc<BootstrapServer>>,
    pub(super) routers: Vec<(WorkerRank, Router)>,
    /// The names by which a bootstrap server knows the workers.
    pub(super) engine: EngineId,
    pub(super) data_parallel: u32,
    /// The tasks that announce workers.
    pub(super) announcements: Mutex<HashMap<WorkerRank, AbortHandle>>,
}

impl Channels {
    /// Stops announcing a worker, so that no decode asks it any more.
    pub(in super::super) fn withdraw(&self, rank: WorkerRank) {
        if let Some(task) = self.announcements.lock().remove(&rank) {
            task.abort();
        }
        if let Some(own) = &self.bootstrap {
            own.forget(self.engine.as_str(), self.data_parallel, rank);
        }
    }
}

impl Listeners {
    /// Opens the sockets of the configuration: the bootstrap server on its port or any free one,
    /// and each worker of a prefill on a free port.
    ///
    /// Errors: `Exhausted`: a port is taken, and the error names the variable to set; `Invalid`: a
    /// host is not of this machine.
    pub(in super::super) async fn bind(setup: &Setup) -> Result<Self> {
        let settings = &setup.settings;
        let Some(mooncake) = &settings.mooncake else {
            return Err(ErrorKind::Invalid.because("these are settings of a NixlConnector"));
        };
        let host: Arc<str> = bare(setup.host()).into();
        let bind = setup.config.nixl().side_channel_bind.as_deref().map_or(&*host, bare);
        if is_loopback(&host) {
            tracing::info!(
                "peers on other machines cannot reach this engine: set VLLM_HOST_IP to an address \
                 of this machine"
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

    /// Returns the address of the bootstrap server, which routers pass to decodes. Without one it
    /// is the address of the first worker.
    pub(in super::super) fn address(&self, bootstrap: &Bootstrap) -> Address {
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
}

/// Opens the sockets of a prefill's workers for the protocol before vLLM 0.16. If any port will do
/// and a following port is taken, tries again elsewhere.
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

/// Opens consecutive ports.
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
                ErrorKind::Exhausted.because(
                    "the free port is too high for consecutive ports of all workers: start again",
                )
            })?,
        };
        ranks.push((WorkerRank { pp: 0, tp }, listen(bind, port).await?));
    }
    Ok(ranks)
}

/// Opens a port at the first address of a host.
async fn listen(host: &str, port: u16) -> Result<TcpListener> {
    let foreign = |why: &dyn std::fmt::Display| {
        ErrorKind::Invalid.because(format!(
            "a MooncakeConnector cannot listen at {host:?}, which is not an address of this \
             machine ({why}): set VLLM_HOST_IP to one, or \
             kv_connector_extra_config.side_channel_bind to the one to listen at"
        ))
    };
    let addresses = resolve(host, port, TO_RESOLVE).await.map_err(|error| foreign(&error))?;
    let address = addresses[0];
    TcpListener::bind(address).await.map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => ErrorKind::Exhausted.because(format!(
            "port {} of {} is taken, so a MooncakeConnector cannot listen there; another prefill \
             may have it: set VLLM_MOONCAKE_BOOTSTRAP_PORT to a free one, or, if it has a \
             bootstrap server, kv_connector_extra_config.bootstrap_server_address to its address",
            address.port(),
            address.ip()
        )),
        std::io::ErrorKind::AddrNotAvailable => foreign(&error),
        _ => Error::os(format!("a MooncakeConnector cannot listen at {address}"), error),
    })
}
