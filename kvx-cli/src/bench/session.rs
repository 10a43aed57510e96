//! Both sides of a bench: the target's process, and this one's agents.

use std::time::Duration;

use kvx::{Registry, Secret};

use super::deadlines::DEADLINE;
use super::initiator::Initiator;
use super::limits::DataLanes;
use super::pools::{Pools, Sizes};
use super::target::TargetProcess;
use crate::Result;

/// The bulk connections of a TCP link, unless the option `tcp.connections` is set.
const TCP_CONNECTIONS: u64 = 2;

/// A target, and an initiator for each backend.
pub(crate) struct Session {
    pub(crate) target: TargetProcess,
    pub(crate) pools: Pools,
    pub(crate) initiators: Vec<(&'static str, Initiator)>,
    /// The address of the target's pool, once the limit has mapped it.
    pub(crate) mapped: Option<u64>,
    pub(crate) data: DataLanes,
}

impl Session {
    /// Starts the target with the given sizes of memory on this side and there, and connects to it.
    /// `about` is the expected time of use.
    pub(crate) fn start(
        backends: &[&'static str],
        registry: &Registry,
        options: &str,
        (ours, theirs): (Sizes, Sizes),
        about: Duration,
    ) -> Result<Self> {
        let life = 10 * about + Duration::from_secs(600);
        // Report a missing device before the target starts.
        let pools = Pools::of(ours)?;
        let target = TargetProcess::start(backends, options, theirs, life, DEADLINE)?;
        let connect = |backend: &&'static str| {
            let label = format!("bench-{backend}");
            Ok((*backend, Initiator::connect(&label, backend, registry, options, &pools, &target)?))
        };
        let initiators = backends.iter().map(connect).collect::<Result<_>>()?;
        let options: serde_json::Value = serde_json::from_str(options)?;
        let data = DataLanes {
            count: options["tcp"]["connections"].as_u64().unwrap_or(TCP_CONNECTIONS) as usize,
            sealed: match options["tcp"]["seal"].as_str() {
                Some(seal) => seal == "all",
                None => Secret::from_environment()?.is_some(),
            },
        };
        Ok(Session { target, pools, initiators, mapped: None, data })
    }

    pub(crate) fn initiator(&self, backend: &str) -> Result<&Initiator> {
        let found = self.initiators.iter().find(|(name, _)| *name == backend);
        Ok(found
            .map(|(_, initiator)| initiator)
            .ok_or_else(|| format!("no agent for {backend} was started"))?)
    }

    /// Shuts both sides down.
    pub(crate) fn end(self) -> Result<()> {
        for (_, initiator) in self.initiators {
            initiator.end()?;
        }
        self.target.end();
        Ok(())
    }
}
