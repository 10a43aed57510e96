//! What an engine with the MooncakeConnector is told beside what every engine is.

use std::time::Duration;

use crate::config::{BlockRelease, ConnectorKind, KvTransferConfig, RankNumbers, Role};
use kvx_core::{Error, ErrorKind, Result};

use super::super::settings::{Settings, multi};
use crate::ids::{Address, WorkerRank, bare, is_loopback};

/// How much longer than a prefill keeps blocks and waiting pulls a decode waits for an answer.
const ANSWER_MARGIN: Duration = Duration::from_secs(60);

/// What an engine with the MooncakeConnector is told beside [`Settings`]. Plain data.
#[derive(Clone, Debug, PartialEq)]
pub struct Mooncake {
    /// Which legs it takes.
    pub role: Role,
    /// How long a prefill keeps blocks that nobody asks for, and requests for blocks that nobody prefills:
    /// `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`.
    pub wait: Duration,
    /// How long a bootstrap server may take to answer: `VLLM_MOONCAKE_CONNECTOR_TIMEOUT`.
    pub connect_timeout: Duration,
    /// Where a prefill's workers register.
    pub bootstrap: Bootstrap,
}

/// A bootstrap server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bootstrap {
    /// The prefill instance's own, on this port: its first rank serves it.
    Own(u16),
    /// Another one: `bootstrap_server_address`, or that of the first data-parallel rank's host.
    External(Address),
    /// None, as before vLLM 0.16: each worker listens on a port of its own, and decodes are told the first one's.
    Without,
}

impl Mooncake {
    /// vLLM's defaults, for one role.
    pub fn new(role: Role) -> Self {
        Mooncake {
            role,
            wait: Duration::from_secs(480),
            connect_timeout: Duration::from_secs(30),
            bootstrap: Bootstrap::Own(8998),
        }
    }

    /// Whether it takes prefill legs.
    pub fn prefills(&self) -> bool {
        self.role != Role::Consumer
    }

    /// Whether it takes decode legs.
    pub fn decodes(&self) -> bool {
        self.role != Role::Producer
    }

    /// Whether it speaks the protocol before vLLM 0.16: no bootstrap server, and one answer to a question.
    pub fn is_older(&self) -> bool {
        self.bootstrap == Bootstrap::Without
    }

    /// Whether this worker serves the bootstrap server of its instance: the first rank of a prefill that has no other.
    pub fn serves_bootstrap(&self, dp: u32, rank: WorkerRank) -> bool {
        let first = dp == 0 && rank == WorkerRank::default();
        first && self.prefills() && matches!(self.bootstrap, Bootstrap::Own(_))
    }
}

impl Settings {
    /// As [`new`](Self::new), for a MooncakeConnector.
    pub fn with_mooncake(self, mooncake: Mooncake) -> Self {
        Settings {
            release: BlockRelease::After(mooncake.wait),
            heartbeat: None,
            push_timeout: mooncake.wait.saturating_add(ANSWER_MARGIN),
            mooncake: Some(mooncake),
            ..self
        }
    }

    /// What a configuration of the MooncakeConnector says, for the engine of data-parallel rank `dp`; sizes and groups
    /// are still to be set. `address` is unused by the protocol: it names the engine in logs.
    ///
    /// # Errors
    ///
    /// `Unsupported` for another connector; `Invalid` for a `bootstrap_server_address` that is none.
    pub fn of_mooncake(config: &KvTransferConfig, dp: u32, address: Address) -> Result<Self> {
        if config.connector() == Some(&ConnectorKind::Multi) {
            return Err(multi());
        }
        if config.connector() != Some(&ConnectorKind::Mooncake) {
            let name = config.kv_connector().unwrap_or("no connector").to_owned();
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{name} is not the MooncakeConnector, which these settings are for; take Settings::from_config"
                ),
            ));
        }
        let (given, environment) = (config.mooncake(), config.environment());
        let older = !config.version().has_bootstrap_server();
        let port = config.mooncake_port(RankNumbers::default())?;
        // A loopback address is this host, whose own the first rank's is then.
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

    /// Whether the protocol before vLLM 0.16, if it is chosen, can say what an engine of these sizes has to say.
    pub(super) fn fits_older_mooncake(&self) -> Result<()> {
        if !self.mooncake.as_ref().is_some_and(Mooncake::is_older)
            || (self.groups.len(), self.pp_size) == (1, 1)
        {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{} KV cache groups and {} pipeline stages: the MooncakeConnector before vLLM 0.16 moves blocks of one \
                 group and has no stages; write a kv_compat of 0.16 or later on both sides",
                self.groups.len(),
                self.pp_size
            ),
        ))
    }
}

fn external(text: &str) -> Result<Address> {
    Address::parse(text).ok_or_else(|| {
        let sentence = format!(
            "kv_connector_extra_config.bootstrap_server_address is {text:?}; write host:port"
        );
        Error::new(ErrorKind::Invalid, sentence)
    })
}
