//! Settings that the scheduler and the workers of an engine share.

use std::time::Duration;

use crate::config::{BlockRelease, ConnectorKind, KvTransferConfig, LeaseTime, LoadFailurePolicy};
use kvx_core::{Error, ErrorKind};

use super::mooncake::Mooncake;
use super::trust::ParamsTrust;
use crate::Version;
use crate::ids::{Address, EngineId, WorkerRank};
use crate::params::TransferMode;

/// The meaning of the number in a completion notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConsumerRule {
    /// The number of decode ranks that read from the notified prefill rank (vLLM 0.29 and later).
    Readers,
    /// The tensor-parallel size of the decode side. The prefill rank derives the number of its
    /// readers from it (vLLM up to 0.28).
    DecodeRanks,
}

impl ConsumerRule {
    /// Returns the rule of a version.
    pub fn of(version: Version) -> Self {
        if version.counts_readers() { ConsumerRule::Readers } else { ConsumerRule::DecodeRanks }
    }

    /// Returns the number that a decode rank sends to a prefill rank from which `readers` decode
    /// ranks read. `own_tp` is the decode's tensor-parallel size.
    pub fn written(self, readers: u32, own_tp: u32) -> u32 {
        match self {
            ConsumerRule::Readers => readers,
            ConsumerRule::DecodeRanks => own_tp,
        }
    }

    /// Returns how many completions a prefill rank waits for after it receives the number
    /// `written`. `own_tp` is the prefill's tensor-parallel size.
    pub fn expected(self, written: u32, own_tp: u32) -> u32 {
        match self {
            ConsumerRule::Readers => written.max(1),
            ConsumerRule::DecodeRanks => (written / own_tp.max(1)).max(1),
        }
    }
}

/// Returns a version's default release of blocks: leases of 30 s, or a fixed 480 s for versions up
/// to 0.21.
pub fn release_of(version: Version) -> BlockRelease {
    match version.leases() {
        true => BlockRelease::Lease(LeaseTime { duration: Duration::from_secs(30) }),
        false => BlockRelease::After(Duration::from_secs(480)),
    }
}

/// Returns how often an engine of this version renews its leases at peers, if leases last `lease`.
fn heartbeat_of(version: Version, lease: Duration) -> Option<Duration> {
    version.leases().then(|| LeaseTime { duration: lease }.heartbeat())
}

/// The engine's properties and the protocol's settings. Plain data: set the fields that differ from
/// the defaults.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The engine's identifier, including the data-parallel suffix.
    pub engine: EngineId,
    /// The address at which peers reach the engine's side channel.
    pub address: Address,
    /// The version whose message formats the engine writes.
    pub version: Version,
    /// The transfer mode: decodes read (pull) or prefills write (push).
    pub mode: TransferMode,
    /// Tensor-parallel size.
    pub tp_size: u32,
    /// Pipeline-parallel size.
    pub pp_size: u32,
    /// Decode-context-parallel size.
    pub dcp_size: u32,
    /// Tokens per logical block.
    pub block_size: u32,
    /// For each KV cache group, the number of blocks at a request's end that the group keeps;
    /// `None`: all blocks (no sliding window).
    pub groups: Vec<Option<u32>>,
    /// The time at which this engine frees published blocks that no peer fetches.
    pub release: BlockRelease,
    /// The interval at which the engine renews its leases at peers; `None`: this version has no
    /// heartbeats.
    pub heartbeat: Option<Duration>,
    /// The location of the workers' side channels.
    pub ports: SideChannels,
    /// The meaning of the number in completions.
    pub consumers: ConsumerRule,
    /// True if blocks move in both directions: a prefill may also read a decode's blocks for the
    /// next turn of a conversation.
    pub bidirectional: bool,
    /// The time for which a decode keeps blocks for the next turn.
    pub decoder_ttl: Duration,
    /// The least number of tokens that a prefill reads back from a decode. It computes fewer tokens
    /// itself.
    pub recompute_threshold: u32,
    /// The time for which a decode waits for a push after it ordered the load.
    pub push_timeout: Duration,
    /// The time for which a worker remembers an idle peer; `None`: for ever.
    pub engine_ttl: Option<Duration>,
    /// The policy for a request whose load failed.
    pub policy: LoadFailurePolicy,
    /// The time after its order at which a load that reads fails, unless the request has an earlier
    /// deadline.
    pub load_timeout: Duration,
    /// The number of tokens at the end of a prompt that a prefill leaves to the decode: 1 with
    /// state-space layers, or the number of speculative lookahead tokens less one.
    pub prefill_backoff: u32,
    /// The only hosts that parameters and push registrations may name; `None`: any.
    pub allowed_hosts: Option<Vec<String>>,
    /// The key that signs and checks parameters, and the hosts whose parameters need no signature.
    pub trust: ParamsTrust,
    /// The settings of a MooncakeConnector; `None`: a NixlConnector.
    pub mooncake: Option<Mooncake>,
}

/// The location of the side channels of an engine's workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SideChannels {
    /// One listener serves all workers.
    #[default]
    OfEngine,
    /// Each worker has its own listener, at the engine's port + its tensor-parallel rank
    /// (`kv_compat` 0.9 and 0.11).
    OfWorkers,
}

impl SideChannels {
    /// Returns the side channel address of worker `rank` of the engine at `base`.
    ///
    /// # Errors
    ///
    /// `Invalid` if the port would be above 65535.
    pub fn of(self, base: &Address, rank: WorkerRank) -> kvx_core::Result<Address> {
        let offset = match self {
            SideChannels::OfEngine => 0,
            SideChannels::OfWorkers => rank.tp,
        };
        match u32::from(base.port).checked_add(offset).and_then(|port| u16::try_from(port).ok()) {
            Some(port) => Ok(Address { host: base.host.clone(), port }),
            None => Err(ErrorKind::Invalid.because(format!(
                "the side channel of rank {} would be port {} + {offset}, above 65535; lower \
                 VLLM_NIXL_SIDE_CHANNEL_PORT there",
                rank.tp, base.port
            ))),
        }
    }
}

/// Returns the error for a `MultiConnector`.
pub(super) fn multi() -> Error {
    ErrorKind::Unsupported.because(
        "MultiConnector is not supported: an engine has one connector. Configure the child that \
         moves blocks between engines (NixlConnector, NixlPushConnector or MooncakeConnector) \
         as kv_connector, with its own kv_role and kv_connector_extra_config; to serve decodes \
         of both kinds, run an instance for each",
    )
}

impl Settings {
    /// Creates the default settings of the newest version: one rank of each kind, one group of full
    /// attention, blocks of 16 tokens.
    pub fn new(engine: impl Into<EngineId>, address: Address) -> Self {
        let version = Version::default();
        Settings {
            engine: engine.into(),
            address,
            version,
            mode: TransferMode::Pull,
            tp_size: 1,
            pp_size: 1,
            dcp_size: 1,
            block_size: 16,
            groups: vec![None],
            release: release_of(version),
            heartbeat: heartbeat_of(version, Duration::from_secs(30)),
            ports: SideChannels::OfEngine,
            consumers: ConsumerRule::of(version),
            bidirectional: false,
            decoder_ttl: Duration::from_secs(480),
            recompute_threshold: 64,
            push_timeout: Duration::from_secs(480),
            engine_ttl: Some(Duration::from_secs(3600)),
            policy: LoadFailurePolicy::Fail,
            load_timeout: Duration::from_secs(120),
            prefill_backoff: 0,
            allowed_hosts: None,
            trust: ParamsTrust::default(),
            mooncake: None,
        }
    }

    /// Creates the settings for data-parallel rank `dp` from a configuration. The caller sets the
    /// sizes and groups. `address` is the engine's address, or that of its tensor-parallel rank 0
    /// if each worker has its own.
    ///
    /// # Errors
    ///
    /// `Unsupported` if the connector does not speak NixlConnector's protocol, or if `kv_compat`
    /// names a version without push and the connector pushes.
    pub fn from_config(
        config: &KvTransferConfig,
        dp: u32,
        address: Address,
    ) -> kvx_core::Result<Self> {
        let version = config.version().spoken();
        let nixl = config.nixl();
        let mode = match config.connector() {
            None | Some(ConnectorKind::NixlPull) => TransferMode::Pull,
            Some(ConnectorKind::NixlPush) if version.leases() => TransferMode::Push,
            Some(ConnectorKind::NixlPush) => {
                return Err(ErrorKind::Unsupported.because(format!(
                    "{version} has no NixlPushConnector; use NixlConnector or another kv_compat"
                )));
            }
            Some(ConnectorKind::Mooncake) => {
                return Err(ErrorKind::Unsupported.because(
                    "MooncakeConnector does not speak NixlConnector's protocol; configure \
                     NixlConnector or NixlPushConnector, or use Settings::of_mooncake",
                ));
            }
            Some(ConnectorKind::Multi) => {
                return Err(multi());
            }
            Some(ConnectorKind::Own(name)) => {
                return Err(ErrorKind::Unsupported.because(format!(
                    "{name} is not a connector of kvx; configure NixlConnector, NixlPushConnector \
                     or MooncakeConnector"
                )));
            }
        };
        Ok(Settings {
            version,
            mode,
            release: config.block_release(),
            heartbeat: heartbeat_of(version, nixl.kv_lease_duration),
            ports: match config.version().has_port_per_worker() {
                true => SideChannels::OfWorkers,
                false => SideChannels::OfEngine,
            },
            consumers: ConsumerRule::of(version),
            bidirectional: nixl.bidirectional_kv_xfer,
            decoder_ttl: nixl.decoder_kv_blocks_ttl,
            recompute_threshold: nixl.kv_recompute_threshold,
            push_timeout: nixl.push_registration_timeout,
            engine_ttl: nixl.engine_ttl,
            load_timeout: nixl.load_timeout,
            allowed_hosts: nixl.allowed_hosts.clone(),
            policy: config.kv_load_failure_policy(),
            ..Settings::new(config.engine_id_of_rank(dp), address)
        })
    }

    /// Returns the number of blocks that hold this many tokens.
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_size.max(1))
    }

    /// Returns the lease on this engine's own blocks, or `None` if it keeps them for a fixed time.
    pub fn lease(&self) -> Option<LeaseTime> {
        match self.release {
            BlockRelease::Lease(lease) => Some(lease),
            BlockRelease::After(_) => None,
        }
    }
}
