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

/// In options: the address of the host that their agent is on.
const ADDRESS: &str = "{address}";
/// The place of the far end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The far end is in this process.
    OneProcess,
    /// The far end is in a process of its own.
    TwoProcesses,
}

/// The setup that a clause runs on: a backend of a registry, and the way to make agents.
#[derive(Clone)]
pub struct Setup {
    /// Builds the registry; the far end calls it in its own process with the same variant.
    pub registry: fn(&str) -> Registry,
    /// The variant of the registry; the test program gives it a meaning.
    pub variant: String,
    /// Backends that the agents are restricted to.
    pub backends: Vec<String>,
    /// Options of both agents, as JSON, with `{address}` for that of the host of either.
    pub options: String,
    /// The shared secret of both agents.
    pub secret: Option<[u8; 32]>,
    /// The place of the far end.
    pub mode: Mode,
    /// `peer_timeout` of both agents.
    pub peer_timeout: Duration,
    /// Bounds of both agents' queues of notifications: number and bytes.
    pub inbox: (usize, usize),
    /// The memory of regions in this process; `far`: at the far end.
    pub near: Backing,
    /// See `near`.
    pub far: Backing,
    /// The device of both ends: the far end finds it by the suite's label.
    pub device: Option<(&'static str, DeviceSource)>,
    /// A program and its words, behind which the far end's process is started; empty: it is started
    /// as it is.
    pub through: Vec<String>,
    /// Shorter measurements (idle for 2 s instead of 10).
    pub quick: bool,
}

impl Setup {
    /// Agents over `backend` of `registry(variant)`.
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

    /// Returns the backend's promises for every link. Fails when it is not available.
    pub fn capabilities(&self) -> Result<Capabilities, Failure> {
        let registry = self.registry();
        Ok(registry.require(&self.backends[0], &self.options_here()?)?.1.capabilities)
    }

    /// Returns the options of agents in this process.
    pub(crate) fn options_here(&self) -> kvx_core::Result<Options> {
        Options::parse(&self.options_at(1))
    }

    /// Returns the options of the end that is on the host of this number.
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

    /// Allocates memory as this setup wants it at this end, filled with content `seed`.
    pub fn memory(&self, len: usize, seed: u64) -> Result<Memory, Failure> {
        Ok(self.near.memory(len, Some(seed), self.device()?.as_deref())?)
    }

    /// The registry of this process, whose transports give their tickets back as `gate` allows.
    pub fn gated_registry(&self, gate: &Gate) -> Registry {
        self.registry().wrapped(|factory| Arc::new(Chaos::gated(factory, gate)))
    }

    /// A pair whose agent here has a gate: with it a clause decides when transfers and revocations
    /// settle.
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

    /// Returns this setup with a secret, also where the library does not ask for it.
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

    /// Makes a far end without agents.
    pub fn far(&self) -> Result<FarEnd, Failure> {
        match self.mode {
            Mode::OneProcess => Ok(FarEnd::in_this_process(self.registry(), self.device()?)),
            Mode::TwoProcesses => {
                FarEnd::there(&self.variant, self.device.map(|(suite, _)| suite), &self.through)
            }
        }
    }

    /// Builds a further agent at the far end; gives its number.
    pub fn far_agent(&self, far: &mut FarEnd, name: &str) -> Result<usize, Failure> {
        Ok(self.try_far_agent(far, name)??)
    }

    /// Builds a further agent where that may be refused; the inner result is kvx's.
    pub(crate) fn try_far_agent(
        &self,
        far: &mut FarEnd,
        name: &str,
    ) -> Result<kvx_core::Result<usize>, Failure> {
        far.build(self.spec(name))
    }

    /// A pair: an agent here, and an agent at the far end. Not connected yet.
    pub fn pair(&self) -> Result<AgentPair, Failure> {
        let mut far = self.far()?;
        self.far_agent(&mut far, &unique("far"))?;
        Ok(AgentPair { near: self.agent(&unique("near"))?, far, setup: self.clone() })
    }
}

/// Two agents that may talk.
pub struct AgentPair {
    /// The one in this process: the initiator of most clauses.
    pub near: Agent,
    /// The other end: the target of most clauses.
    pub far: FarEnd,
    /// The setup that they were made from.
    pub setup: Setup,
}

impl AgentPair {
    /// Registers `len` bytes of content `seed` here.
    pub fn near_region(&self, name: &str, len: usize, seed: u64) -> Result<Region, Failure> {
        Ok(self.near.register(name, self.setup.memory(len, seed)?)?)
    }

    /// Registers `len` bytes of content `seed` at the far end; gives the region's number there.
    pub fn far_region(&mut self, name: &str, len: usize, seed: u64) -> Result<usize, Failure> {
        self.far.register(name, len, self.setup.far, Some(seed))
    }

    /// Connects near to far with far's metadata of now, and waits until the link is up.
    pub async fn connect(&mut self) -> Result<Peer, Failure> {
        let peer = self.near.connect(&self.far.metadata()?)?;
        peer.ready(CUT_OFF).await?;
        Ok(peer)
    }

    /// Connects far to near; gives the peer's number there.
    pub fn connect_back(&mut self) -> Result<usize, Failure> {
        let metadata = self.near.metadata()?;
        self.far.connect(0, &metadata)
    }
}
