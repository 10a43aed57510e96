//! What both halves of an engine are told once.

use std::time::Duration;

use kvx_config::{BlockRelease, KvTransferConfig, Lease, LoadFailurePolicy};

use super::identity::{Address, EngineId};
use crate::params::{Dialect, TransferMode};

/// How the number in a completion notification is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConsumerRule {
    /// How many decode ranks read from the prefill rank that is told (vLLM after 0.20).
    Readers,
    /// The tensor-parallel size of the decode side; the prefill rank works out its own readers (vLLM up to 0.20).
    DecodeRanks,
}

impl ConsumerRule {
    /// The rule of a version.
    pub fn of(dialect: Dialect) -> Self {
        if dialect <= Dialect::V0_20 { ConsumerRule::DecodeRanks } else { ConsumerRule::Readers }
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
/// to 0.20.
pub fn release_of(dialect: Dialect) -> BlockRelease {
    if dialect <= Dialect::V0_20 {
        BlockRelease::After(Duration::from_secs(480))
    } else {
        BlockRelease::Lease(Lease { duration: Duration::from_secs(30) })
    }
}

/// What the two halves must know of their engine and of the protocol. Plain data: set what differs from the defaults.
#[derive(Clone, Debug)]
pub struct Settings {
    /// This engine, data-parallel suffix included.
    pub engine: EngineId,
    /// Where its side channel listens, as peers reach it.
    pub address: Address,
    /// Whose forms are written.
    pub dialect: Dialect,
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
    /// When blocks are freed that nobody came for.
    pub release: BlockRelease,
    /// The meaning of the count in completions.
    pub consumers: ConsumerRule,
    /// Blocks of a decode may be read by the prefill of the next turn, and the other way round.
    pub bidirectional: bool,
    /// How long a decode keeps blocks for that.
    pub decoder_ttl: Duration,
    /// Fewer tokens than this are computed rather than read back from a decode.
    pub recompute_threshold: u32,
    /// How long a decode waits for a push.
    pub push_timeout: Duration,
    /// How long an idle peer is remembered; `None`: for ever.
    pub engine_ttl: Option<Duration>,
    /// What becomes of a request whose load failed.
    pub policy: LoadFailurePolicy,
    /// A load has an outcome after this time where the request names no earlier deadline.
    pub load_timeout: Duration,
    /// Tokens at the end of a prompt that a prefill does not hand over: 1 with state-space layers, or what
    /// speculation looks ahead, less one.
    pub prefill_backoff: u32,
    /// How often this engine has registered its memory anew.
    pub registration: u64,
}

impl Settings {
    /// The defaults of the newest version for one rank of everything and one group of full attention, blocks of 16
    /// tokens.
    pub fn new(engine: impl Into<EngineId>, address: Address) -> Self {
        let dialect = Dialect::default();
        Settings {
            engine: engine.into(),
            address,
            dialect,
            mode: TransferMode::Pull,
            tp_size: 1,
            pp_size: 1,
            dcp_size: 1,
            block_size: 16,
            groups: vec![None],
            release: release_of(dialect),
            consumers: ConsumerRule::of(dialect),
            bidirectional: false,
            decoder_ttl: Duration::from_secs(480),
            recompute_threshold: 64,
            push_timeout: Duration::from_secs(480),
            engine_ttl: Some(Duration::from_secs(3600)),
            policy: LoadFailurePolicy::Fail,
            load_timeout: Duration::from_secs(120),
            prefill_backoff: 0,
            registration: 0,
        }
    }

    /// What a configuration says, for the engine of data-parallel rank `dp`; sizes and groups are still to be set.
    ///
    /// # Errors
    ///
    /// `Unsupported` for a `kv_compat` whose handshake kvx does not speak.
    pub fn from_config(config: &KvTransferConfig, dp: u32, address: Address) -> kvx_core::Result<Self> {
        let dialect = Dialect::try_from(config.compat())?;
        let nixl = config.nixl();
        Ok(Settings {
            dialect,
            mode: match config.kv_connector() {
                Some("NixlPushConnector") => TransferMode::Push,
                _ => TransferMode::Pull,
            },
            release: config.block_release(),
            consumers: ConsumerRule::of(dialect),
            bidirectional: nixl.bidirectional_kv_xfer,
            decoder_ttl: nixl.decoder_kv_blocks_ttl,
            recompute_threshold: nixl.kv_recompute_threshold,
            push_timeout: nixl.push_registration_timeout,
            engine_ttl: nixl.engine_ttl,
            policy: config.kv_load_failure_policy(),
            ..Settings::new(config.engine_id_of_rank(dp), address)
        })
    }

    /// Blocks that hold this many tokens.
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_size.max(1))
    }

    /// The lease, unless blocks are kept a fixed time.
    pub fn lease(&self) -> Option<Lease> {
        match self.release {
            BlockRelease::Lease(lease) => Some(lease),
            BlockRelease::After(_) => None,
        }
    }
}
