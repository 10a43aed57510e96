//! A pair of agents over one backend, in one process or in two.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::Admission;
use kvx_core::{Agent, Capabilities, Memory, Options, Peer, Region, Registry, Secret};

use crate::backing::{Backing, DeviceSource};
use crate::chaos::{Chaos, Gate};
use crate::check::{CUT_OFF, Failure};
use crate::device::Device;
use crate::far::{AgentSpec, FarEnd};
use crate::hosts::Hosts;
use crate::unique::unique;

/// A placeholder in the options for the address of the agent's host.
const ADDRESS: &str = "{address}";
/// The place of the far end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The far end is in this process.
    OneProcess,
    /// The far end is in a separate process.
    TwoProcesses,
}

/// The setup of a clause: a backend of a registry, and the settings of agents.
#[derive(Clone)]
pub struct Setup {
    /// Creates the registry. The far end calls it in its own process with the same variant.
    pub registry: fn(&str) -> Registry,
    /// The variant of the registry; its meaning belongs to the test program.
    pub variant: String,
    /// The backends that the agents may use.
    pub backends: Vec<String>,
    /// The options of both agents, as JSON. `{address}` stands for the address of each agent's
    /// host.
    pub options: String,
    /// The shared secret of both agents.
    pub secret: Option<[u8; 32]>,
    /// The place of the far end.
    pub mode: Mode,
    /// `peer_timeout` of both agents.
    pub peer_timeout: Duration,
    /// The limits of both agents' notification queues: number and bytes.
    pub inbox: (usize, usize),
    /// The memory of regions in this process.
    pub near: Backing,
    /// The memory of regions at the far end.
    pub far: Backing,
    /// The device of both ends, with the suite's label, by which the far end finds it.
    pub device: Option<(&'static str, DeviceSource)>,
    /// A program and its arguments that start the far end's process; empty to start it directly.
    pub through: Vec<String>,
    /// True for shorter measurements (idle for 2 s instead of 10).
    pub quick: bool,
}

impl Setup {
    /// Creates a setup with agents over `backend` of `registry(variant)`.
    pub fn new(registry: fn(&str) -> Registry, variant: &str, backend: &str, mode: Mode) -> Self {
        Setup {
            registry,
            variant: variant.to_owned(),
            backends: vec![backend.to_owned()],
            options: "{}".to_owned(),
            secret: None,
            mode,
            peer_timeout: Duration::from_secs(10),
            inbox: (4096, 64 << 20),
            near: Backing::Pool,
            far: Backing::Pool,
            device: None,
            through: Vec::new(),
            quick: false,
        }
    }

    /// Returns the registry of this process.
    pub fn registry(&self) -> Registry {
        (self.registry)(&self.variant)
    }

    /// Returns the backend's capabilities, which hold for every link.
    ///
    /// # Errors
    /// The backend is not available.
    pub fn capabilities(&self) -> Result<Capabilities, Failure> {
        let registry = self.registry();
        Ok(registry.require(&self.backends[0], &self.options_here()?)?.1.capabilities)
    }

    /// Returns the options of agents in this process.
    pub(crate) fn options_here(&self) -> kvx_core::Result<Options> {
        Options::parse(&self.options_at(1))
    }

    /// Returns the options of the agent on the host with this number.
    fn options_at(&self, number: usize) -> String {
        self.options.replace(ADDRESS, &Hosts::address(number))
    }

    /// Builds an agent of this setup in this process.
    pub fn agent(&self, name: &str) -> Result<Agent, Failure> {
        Ok(self.builder(name)?.registry(self.registry()).build()?)
    }

    /// Returns the builder of such an agent.
    pub fn builder(&self, name: &str) -> Result<kvx_core::AgentBuilder, Failure> {
        let builder = Agent::builder(name)
            .backends(self.backends.clone())
            .options(self.options_here()?)
            .peer_timeout(self.peer_timeout)
            .notifications(self.inbox.0, self.inbox.1);
        let builder = match &self.secret {
            Some(secret) => builder.secret(Secret::from_bytes(*secret)),
            None => builder,
        };
        Ok(match self.device()? {
            Some(device) => builder.device(device.access()),
            None => builder,
        })
    }

    fn device(&self) -> Result<Option<Arc<dyn Device>>, Failure> {
        Ok(self.device.map(|(_, source)| source()).transpose()?)
    }

    /// Allocates memory of this end's kind, filled with content `seed`.
    pub fn memory(&self, len: usize, seed: u64) -> Result<Memory, Failure> {
        Ok(self.near.memory(len, Some(seed), self.device()?.as_deref())?)
    }

    /// Returns the registry of this process, with transports that settle their tickets only as
    /// `gate` allows.
    pub fn gated_registry(&self, gate: &Gate) -> Registry {
        self.registry().wrapped(|factory| Arc::new(Chaos::gated(factory, gate)))
    }

    /// Creates a pair whose agent in this process has a gate, with which a clause decides when
    /// transfers and revocations settle.
    pub fn gated_pair(&self) -> Result<(AgentPair, Gate), Failure> {
        let gate = Gate::new();
        let near = self.builder(&unique("near"))?.registry(self.gated_registry(&gate)).build()?;
        Ok((AgentPair { near, ..self.pair()? }, gate))
    }

    fn spec(&self, name: &str) -> AgentSpec {
        AgentSpec {
            name: name.to_owned(),
            backends: self.backends.clone(),
            options: self.options_at(2),
            secret: self.secret,
            peer_timeout: self.peer_timeout,
            inbox: self.inbox,
        }
    }

    /// Returns this setup with one more option.
    pub(crate) fn with_option(&self, table: &str, key: &str, value: u16) -> Result<Setup, Failure> {
        let mut options = self.json()?;
        options[table][key] = value.into();
        Ok(Setup { options: options.to_string(), ..self.clone() })
    }

    /// Returns this setup with a secret, even if the library does not check it.
    pub(crate) fn with_secret(&self, secret: [u8; 32]) -> Result<Setup, Failure> {
        let mut options = self.json()?;
        options["unauthenticated"] = self.backends.clone().into();
        Ok(Setup { options: options.to_string(), secret: Some(secret), ..self.clone() })
    }

    fn json(&self) -> Result<serde_json::Value, Failure> {
        let wrong =
            |error: serde_json::Error| Failure::new(format!("options {:?}: {error}", self.options));
        serde_json::from_str(&self.options).map_err(wrong)
    }

    /// Returns the admission class of its backend.
    pub(crate) fn admission(&self) -> Result<Admission, Failure> {
        Ok(self.registry().require(&self.backends[0], &self.options_here()?)?.0.admission())
    }

    /// Creates a far end without agents.
    pub fn far(&self) -> Result<FarEnd, Failure> {
        match self.mode {
            Mode::OneProcess => Ok(FarEnd::in_this_process(self.registry(), self.device()?)),
            Mode::TwoProcesses => {
                FarEnd::there(&self.variant, self.device.map(|(suite, _)| suite), &self.through)
            }
        }
    }

    /// Builds another agent at the far end and returns its number.
    pub fn far_agent(&self, far: &mut FarEnd, name: &str) -> Result<usize, Failure> {
        Ok(self.try_far_agent(far, name)??)
    }

    /// Builds another agent at the far end, which may fail; the inner result is that of kvx.
    pub(crate) fn try_far_agent(
        &self,
        far: &mut FarEnd,
        name: &str,
    ) -> Result<kvx_core::Result<usize>, Failure> {
        far.build(self.spec(name))
    }

    /// Creates a pair of agents, one here and one at the far end. They are not connected yet.
    pub fn pair(&self) -> Result<AgentPair, Failure> {
        let mut far = self.far()?;
        self.far_agent(&mut far, &unique("far"))?;
        Ok(AgentPair { near: self.agent(&unique("near"))?, far, setup: self.clone() })
    }
}

/// Two agents that can connect to each other.
pub struct AgentPair {
    /// The agent in this process, which is the initiator of most clauses.
    pub near: Agent,
    /// The other end, which is the target of most clauses.
    pub far: FarEnd,
    /// The setup that created them.
    pub setup: Setup,
}

impl AgentPair {
    /// Registers `len` bytes of content `seed` in this process.
    pub fn near_region(&self, name: &str, len: usize, seed: u64) -> Result<Region, Failure> {
        Ok(self.near.register(name, self.setup.memory(len, seed)?)?)
    }

    /// Registers `len` bytes of content `seed` at the far end. Returns the region's number there.
    pub fn far_region(&mut self, name: &str, len: usize, seed: u64) -> Result<usize, Failure> {
        self.far.register(name, len, self.setup.far, Some(seed))
    }

    /// Connects near to far with far's current metadata, and waits until the link is up.
    pub async fn connect(&mut self) -> Result<Peer, Failure> {
        let peer = self.near.connect(&self.far.metadata()?)?;
        peer.ready(CUT_OFF).await?;
        Ok(peer)
    }

    /// Connects far to near. Returns the peer's number there.
    pub fn connect_back(&mut self) -> Result<usize, Failure> {
        let metadata = self.near.metadata()?;
        self.far.connect(0, &metadata)
    }
}
