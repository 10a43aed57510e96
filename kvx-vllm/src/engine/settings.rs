//! What both halves of an engine are told once.

use std::time::Duration;

use crate::config::{BlockRelease, ConnectorKind, KvTransferConfig, LeaseTime, LoadFailurePolicy};
use kvx_core::{Error, ErrorKind};

use super::mooncake::Mooncake;
use super::trust::ParamsTrust;
use crate::Version;
use crate::ids::{Address, EngineId, WorkerRank};
use crate::params::TransferMode;

/// How the number in a completion notification is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConsumerRule {
    /// How many decode ranks read from the prefill rank that is told (vLLM from 0.29 on).
    Readers,
    /// The tensor-parallel size of the decode side; the prefill rank works out its own readers (vLLM up to 0.28).
    DecodeRanks,
}

impl ConsumerRule {
    /// The rule of a version.
    pub fn of(version: Version) -> Self {
        if version.counts_readers() { ConsumerRule::Readers } else { ConsumerRule::DecodeRanks }
    }

    /// What a decode rank of `own_tp` ranks writes when `readers` of them read from the rank it tells.
    pub fn written(self, readers: u32, own_tp: u32) -> u32 {
        match self {
            ConsumerRule::Readers => readers,
            ConsumerRule::DecodeRanks => own_tp,
        }
    }

    /// How many completions a prefill rank of `own_tp` ranks waits for when this number is written.
    pub fn expected(self, written: u32, own_tp: u32) -> u32 {
        match self {
            ConsumerRule::Readers => written.max(1),
            ConsumerRule::DecodeRanks => (written / own_tp.max(1)).max(1),
        }
    }
}

/// The release of a version's blocks where nothing else is configured: leases of 30 s, or 480 s once and for all up
/// to 0.21.
pub fn release_of(version: Version) -> BlockRelease {
    match version.leases() {
        true => BlockRelease::Lease(LeaseTime { duration: Duration::from_secs(30) }),
        false => BlockRelease::After(Duration::from_secs(480)),
    }
}

/// How often an engine of this version renews the leases of its peers, where leases last so long.
fn heartbeat_of(version: Version, lease: Duration) -> Option<Duration> {
    version.leases().then(|| LeaseTime { duration: lease }.heartbeat())
}

/// What the two halves must know of their engine and of the protocol. Plain data: set what differs from the defaults.
#[derive(Clone, Debug)]
pub struct Settings {
    /// This engine, data-parallel suffix included.
    pub engine: EngineId,
    /// Where its side channel listens, as peers reach it.
    pub address: Address,
    /// Whose forms are written.
    pub version: Version,
    /// Who moves the data.
    pub mode: TransferMode,
    /// Tensor-parallel size.
    pub tp_size: u32,
    /// Pipeline-parallel size.
    pub pp_size: u32,
    /// Decode-context-parallel size.
    pub dcp_size: u32,
    /// Tokens of a logical block.
    pub block_size: u32,
    /// For each KV cache group how many blocks of a request's end it keeps; `None`: all (no sliding window).
    pub groups: Vec<Option<u32>>,
    /// When blocks of this engine are freed that nobody came for.
    pub release: BlockRelease,
    /// How often peers are told that their blocks are still wanted; `None`: the version's engines do not read that.
    pub heartbeat: Option<Duration>,
    /// Where the side channels of an engine's workers are.
    pub ports: SideChannels,
    /// The meaning of the count in completions.
    pub consumers: ConsumerRule,
    /// Blocks of a decode may be read by the prefill of the next turn, and the other way round.
    pub bidirectional: bool,
    /// How long a decode keeps blocks for that.
    pub decoder_ttl: Duration,
    /// Fewer tokens than this are computed rather than read back from a decode.
    pub recompute_threshold: u32,
    /// How long a decode waits for a push, from the order on.
    pub push_timeout: Duration,
    /// How long an idle peer is remembered; `None`: for ever.
    pub engine_ttl: Option<Duration>,
    /// What becomes of a request whose load failed.
    pub policy: LoadFailurePolicy,
    /// A load that reads has an outcome so long after its order, where the request has no earlier deadline.
    pub load_timeout: Duration,
    /// Tokens at the end of a prompt that a prefill does not hand over: 1 with state-space layers, or what
    /// speculation looks ahead, less one.
    pub prefill_backoff: u32,
    /// The only hosts that parameters and push registrations may name; `None`: any.
    pub allowed_hosts: Option<Vec<String>>,
    /// The key that signs and checks parameters, and the hosts that need not sign.
    pub trust: ParamsTrust,
    /// What a MooncakeConnector is told beside this; `None`: it is a NixlConnector.
    pub mooncake: Option<Mooncake>,
}

/// Where the side channels of an engine's workers are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SideChannels {
    /// One listener answers for all workers.
    #[default]
    OfEngine,
    /// Each worker has its own, on the engine's port + its tensor-parallel rank: `kv_compat` 0.9 and 0.11.
    OfWorkers,
}

impl SideChannels {
    /// The address at which a worker of the engine at `base` is asked.
    ///
    /// # Errors
    ///
    /// `Invalid` for a port above 65535.
    pub fn of(self, base: &Address, rank: WorkerRank) -> kvx_core::Result<Address> {
        let offset = match self {
            SideChannels::OfEngine => 0,
            SideChannels::OfWorkers => rank.tp,
        };
        match u32::from(base.port).checked_add(offset).and_then(|port| u16::try_from(port).ok()) {
            Some(port) => Ok(Address { host: base.host.clone(), port }),
            None => Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "the side channel of rank {} would be port {} + {offset}, above 65535; lower \
                     VLLM_NIXL_SIDE_CHANNEL_PORT there",
                    rank.tp, base.port
                ),
            )),
        }
    }
}

/// An engine has one connector.
pub(super) fn multi() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "MultiConnector is not served: an engine has one connector. Write the child that moves blocks between engines \
         (NixlConnector, NixlPushConnector or MooncakeConnector) as kv_connector, with its own kv_role and \
         kv_connector_extra_config; to serve decodes of both kinds, run an instance for each",
    )
}

impl Settings {
    /// The defaults of the newest version for one rank of everything and one group of full attention, blocks of 16
    /// tokens.
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

    /// What a configuration says, for the engine of data-parallel rank `dp`; sizes and groups are still to be set.
    /// `address` is that of the engine, or of its tensor-parallel rank 0 where each worker has its own.
    ///
    /// # Errors
    ///
    /// `Unsupported` for a connector that does not speak NixlConnector's protocol, and for push under a `kv_compat`
    /// that had none.
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
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "{version} has no NixlPushConnector; take NixlConnector, or another kv_compat"
                    ),
                ));
            }
            Some(ConnectorKind::Mooncake) => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "MooncakeConnector does not speak NixlConnector's protocol, which these settings are for; write \
                     NixlConnector or NixlPushConnector, or take Settings::of_mooncake",
                ));
            }
            Some(ConnectorKind::Multi) => {
                return Err(multi());
            }
            Some(ConnectorKind::Own(name)) => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "{name} is a connector of this program; write NixlConnector, NixlPushConnector or \
                         MooncakeConnector for one of kvx"
                    ),
                ));
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

    /// Blocks that hold this many tokens.
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_size.max(1))
    }

    /// The lease on this engine's own blocks, unless they are kept a fixed time.
    pub fn lease(&self) -> Option<LeaseTime> {
        match self.release {
            BlockRelease::Lease(lease) => Some(lease),
            BlockRelease::After(_) => None,
        }
    }
}
