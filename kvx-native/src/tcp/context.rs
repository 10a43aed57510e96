//! The context of an agent, which its machine, links and regions share.

use std::sync::Arc;
use std::time::Duration;

use kvx_backend::control::proof::Keys;
use kvx_core::backend::Events;
use kvx_core::{Identity, Secret};

use crate::tcp::config::Config;
use crate::tcp::limit::ConnectionLimit;
use crate::tcp::memory::deferred::DeferredCompletions;
use crate::tcp::memory::regions::Regions;
use crate::tcp::memory::stages::DeviceStages;
use crate::tcp::seal::Seal;

/// The configuration, keys and tables of an agent.
pub(crate) struct AgentContext {
    pub(crate) config: Config,
    /// The limit for connections that peers open.
    pub(crate) limit: Arc<ConnectionLimit>,
    pub(crate) agent: Identity,
    /// The keys that authenticate peers.
    pub(crate) keys: Keys,
    pub(crate) secret: Option<Secret>,
    pub(crate) events: Arc<dyn Events>,
    pub(crate) peer_timeout: Duration,
    /// The process that opened the transport.
    pub(crate) process: u32,
    pub(crate) regions: Regions,
    pub(crate) stages: DeviceStages,
    pub(crate) deferred: Arc<DeferredCompletions>,
}

impl AgentContext {
    /// Returns the weakest seal that this end accepts on a connection.
    pub(crate) fn wish(&self) -> Seal {
        self.config.wish(self.secret.is_some())
    }

    /// Returns true in the process that opened the transport. The machine runs only there, not in a
    /// forked child.
    pub(crate) fn is_owner_process(&self) -> bool {
        std::process::id() == self.process
    }
}
