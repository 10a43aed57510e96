//! Values that each rank of an engine derives from the configuration: its ports, and the release of
//! its blocks.

use std::time::Duration;

use super::defaults::PortRule;
use super::transfer_config::KvTransferConfig;
use kvx_core::{ErrorKind, Result};

/// One worker of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankNumbers {
    /// Data-parallel rank.
    pub dp: u32,
    /// Tensor-parallel rank.
    pub tp: u32,
    /// Tensor-parallel size.
    pub tp_size: u32,
}

impl Default for RankNumbers {
    /// Returns the only worker of an engine.
    fn default() -> Self {
        RankNumbers { dp: 0, tp: 0, tp_size: 1 }
    }
}

/// The time at which a prefill instance releases blocks that no decode instance has fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockRelease {
    /// When the lease ends, unless the decode side renews it.
    Lease(LeaseTime),
    /// When this time has passed since the prefill, regardless of the decode side.
    After(Duration),
}

/// A lease on the blocks of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTime {
    /// The time from the end of the prefill to the end of the lease.
    pub duration: Duration,
}

impl LeaseTime {
    /// Returns the interval between heartbeats of the decode side: a sixth of the lease, in whole
    /// seconds if possible.
    pub fn heartbeat(&self) -> Duration {
        match self.duration.as_secs() / 6 {
            0 => self.duration / 6,
            seconds => Duration::from_secs(seconds),
        }
    }

    /// Returns how long a heartbeat extends the lease, from its arrival: two thirds of the lease.
    pub fn extension(&self) -> Duration {
        self.duration * 2 / 3
    }
}

impl KvTransferConfig {
    /// Returns the port of this rank's side channel. Since vLLM 0.11.1 all workers of an engine
    /// share one port, base + dp rank. Before, each worker has its own, base + dp rank × tp size +
    /// tp rank. A base of 0 stands for any free port, for all ranks.
    ///
    /// Errors: `Invalid` if the rank does not exist, or the port is above 65535.
    pub fn side_channel_port(&self, rank: RankNumbers) -> Result<u16> {
        let base = self.environment().side_channel_port;
        port(base, rank, self.version().defaults().ports, "VLLM_NIXL_SIDE_CHANNEL_PORT")
    }

    /// Returns the port of MooncakeConnector's bootstrap server, which all ranks share. Before vLLM
    /// 0.16 it is the port of this rank's side channel, base + dp rank × tp size + tp rank. Errors:
    /// as [`side_channel_port`](Self::side_channel_port).
    pub fn mooncake_port(&self, rank: RankNumbers) -> Result<u16> {
        let base = self.environment().mooncake_bootstrap_port;
        if self.version().has_bootstrap_server() {
            return port(
                base,
                RankNumbers { dp: 0, ..rank },
                PortRule::PerEngine,
                "VLLM_MOONCAKE_BOOTSTRAP_PORT",
            );
        }
        port(base, rank, PortRule::PerWorker, "VLLM_MOONCAKE_BOOTSTRAP_PORT")
    }

    /// Returns the time at which unfetched blocks are released. `VLLM_NIXL_ABORT_REQUEST_TIMEOUT`
    /// takes precedence if set.
    pub fn block_release(&self) -> BlockRelease {
        match self.environment().abort_request_timeout.or(self.version().defaults().abort_after) {
            Some(after) => BlockRelease::After(after),
            None => BlockRelease::Lease(LeaseTime { duration: self.nixl().kv_lease_duration }),
        }
    }
}

fn port(base: u16, rank: RankNumbers, rule: PortRule, variable: &str) -> Result<u16> {
    let RankNumbers { dp, tp, tp_size } = rank;
    if tp >= tp_size {
        let sentence = format!("tp rank {tp} of {tp_size} does not exist; ranks count from 0");
        return Err(ErrorKind::Invalid.because(sentence));
    }
    if base == 0 {
        return Ok(0);
    }
    let offset = match rule {
        PortRule::PerEngine => u64::from(dp),
        PortRule::PerWorker => u64::from(dp) * u64::from(tp_size) + u64::from(tp),
    };
    u16::try_from(u64::from(base) + offset).map_err(|_| {
        ErrorKind::Invalid.because(format!(
            "port {base} + {offset} for dp rank {dp}, tp rank {tp} is above 65535; lower {variable}"
        ))
    })
}
