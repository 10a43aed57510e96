//! The additional settings of an engine with the MooncakeConnector.

use std::time::Duration;

use crate::config::{BlockRelease, ConnectorKind, KvTransferConfig, RankNumbers, Role};
use kvx_core::{ErrorKind, Result};

use super::super::settings::{Settings, multi};
use crate::ids::{Address, WorkerRank, bare, is_loopback};

/// The time for which a decode waits for an answer beyond the time for which a prefill keeps blocks
/// and waiting pulls.
const ANSWER_MARGIN: Duration = Duration::from_secs(60);

/// The settings of a MooncakeConnector in addition to [`Settings`]. Plain data.
#[derive(Clone, Debug, PartialEq)]
pub struct Mooncake {
    /// The legs that the engine accepts.
    pub role: Role,
    /// The time for which a prefill keeps blocks without a pull, and pulls without blocks:
    /// `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`.
    pub wait: Duration,
    /// The time within which a bootstrap server must answer: `VLLM_MOONCAKE_CONNECTOR_TIMEOUT`.
    pub connect_timeout: Duration,
    /// The bootstrap server at which a prefill's workers register.
    pub bootstrap: Bootstrap,
}

/// A bootstrap server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bootstrap {
    /// The prefill instance's own server on this port, which its first rank runs.
    Own(u16),
    /// Another server: `bootstrap_server_address`, or that of the first data-parallel rank's host.
    External(Address),
    /// No server, as before vLLM 0.16: each worker has its own port, and decodes get the first one.
    Without,
}

impl Mooncake {
    /// Creates vLLM's default settings for a role.
    pub fn new(role: Role) -> Self {
        Mooncake {
            role,
            wait: Duration::from_secs(480),
            connect_timeout: Duration::from_secs(30),
            bootstrap: Bootstrap::Own(8998),
        }
    }

    /// Returns whether the engine accepts prefill legs.
    pub fn prefills(&self) -> bool {
        self.role != Role::Consumer
    }

    /// Returns whether the engine accepts decode legs.
    pub fn decodes(&self) -> bool {
        self.role != Role::Producer
    }

    /// Returns whether the engine uses the protocol before vLLM 0.16, with no bootstrap server and
    /// one answer per pull.
    pub fn is_older(&self) -> bool {
        self.bootstrap == Bootstrap::Without
    }

    /// Returns whether this worker runs the bootstrap server of its instance: it is the first rank
    /// of a prefill without another server.
    pub fn serves_bootstrap(&self, dp: u32, rank: WorkerRank) -> bool {
        let first = dp == 0 && rank == WorkerRank::default();
        first && self.prefills() && matches!(self.bootstrap, Bootstrap::Own(_))
    }
}

impl Settings {
    /// Changes the settings to those of a MooncakeConnector.
    pub fn with_mooncake(self, mooncake: Mooncake) -> Self {
        Settings {
            release: BlockRelease::After(mooncake.wait),
            heartbeat: None,
            push_timeout: mooncake.wait.saturating_add(ANSWER_MARGIN),
            mooncake: Some(mooncake),
            ..self
        }
    }

    /// Creates the settings for data-parallel rank `dp` from a configuration of the
    /// MooncakeConnector. The caller sets the sizes and groups. The protocol does not use
    /// `address`, which names the engine in logs.
    ///
    /// # Errors
    ///
    /// `Unsupported` for another connector; `Invalid` for a malformed `bootstrap_server_address`.
    pub fn of_mooncake(config: &KvTransferConfig, dp: u32, address: Address) -> Result<Self> {
        if config.connector() == Some(&ConnectorKind::Multi) {
            return Err(multi());
        }
        if config.connector() != Some(&ConnectorKind::Mooncake) {
            let name = config.kv_connector().unwrap_or("no connector").to_owned();
            return Err(ErrorKind::Unsupported
                .because(format!("{name} is not MooncakeConnector; use Settings::from_config")));
        }
        let (given, environment) = (config.mooncake(), config.environment());
        let older = !config.version().has_bootstrap_server();
        let port = config.mooncake_port(RankNumbers::default())?;
        // A loopback address means that the first rank's host is this host.
        let first_rank_host = config.first_rank_host().filter(|host| dp > 0 && !is_loopback(host));
        let bootstrap = match (&given.bootstrap_server_address, first_rank_host) {
            _ if older => Bootstrap::Without,
            (Some(text), _) => Bootstrap::External(external(text)?),
            (None, Some(host)) => Bootstrap::External(Address { host: bare(host).into(), port }),
            (None, None) => Bootstrap::Own(port),
        };
        let mooncake = Mooncake {
            role: config.kv_role().unwrap_or(Role::Both),
            wait: environment.mooncake_abort_request_timeout,
            connect_timeout: environment.mooncake_connector_timeout,
            bootstrap,
        };
        let settings = Settings {
            load_timeout: config.nixl().load_timeout,
            allowed_hosts: config.nixl().allowed_hosts.clone(),
            policy: config.kv_load_failure_policy(),
            ..Settings::new(config.engine_id_of_rank(dp), address)
        };
        Ok(settings.with_mooncake(mooncake))
    }

    /// Checks that the protocol before vLLM 0.16, if configured, supports the sizes of this engine.
    pub(super) fn fits_older_mooncake(&self) -> Result<()> {
        if !self.mooncake.as_ref().is_some_and(Mooncake::is_older)
            || (self.groups.len(), self.pp_size) == (1, 1)
        {
            return Ok(());
        }
        Err(ErrorKind::Unsupported.because(format!(
            "{} KV cache groups and {} pipeline stages: before vLLM 0.16 the MooncakeConnector \
             supports one of each; set kv_compat to 0.16 or later on both sides",
            self.groups.len(),
            self.pp_size
        )))
    }
}

fn external(text: &str) -> Result<Address> {
    Address::parse(text).ok_or_else(|| {
        let sentence = format!(
            "kv_connector_extra_config.bootstrap_server_address is {text:?}; it must be host:port"
        );
        ErrorKind::Invalid.because(sentence)
    })
}
