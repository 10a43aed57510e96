//! Builds a connector from vLLM's configuration.

use std::net::IpAddr;
use std::sync::Arc;

use kvx_config::{BufferDevice, KvTransferConfig};
use kvx_core::{Agent, DeviceAccess, Error, ErrorKind, Options, Registry, Result, Secret};
use serde_json::{Map, Value, json};

use super::connector::Connector;
use super::rank::Registered;
use super::side::{SideSettings, tcp_bind};
use super::thread;
use crate::engine::{Address, ParamsTrust, Settings, WorkerRank};
use crate::mapping::{Clip, GroupKind, window_blocks};
use crate::nixl::{self, BACKEND as KVX};
use crate::params::TransferMode;
use crate::wire::{CompatibilityFactors, CompatibilityHash, NixlAgentMetadata};

/// The name of the backend that speaks to plain Mooncake agents.
pub(super) const MOONCAKE: &str = "MOONCAKE";
/// The name of the backend that speaks to plain NIXL agents.
pub(super) const RIXL: &str = "RIXL";

/// A KV cache group: layers whose blocks are given to requests together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// All tokens of a request.
    Whole,
    /// The last ones.
    Window {
        /// So many.
        tokens: u32,
    },
}

/// Says how a connector shall be: [`Connector::builder`].
#[must_use]
pub struct ConnectorBuilder {
    pub(super) config: KvTransferConfig,
    registry: Registry,
    pub(super) factors: CompatibilityFactors,
    pub(super) groups: Vec<Group>,
    pub(super) data_parallel: u32,
    pub(super) sizes: (u32, u32, u32),
    pub(super) block_size: u32,
    pub(super) prefill_backoff: u32,
    any_port: bool,
}

impl ConnectorBuilder {
    pub(super) fn new(
        config: &KvTransferConfig,
        registry: Registry,
        factors: CompatibilityFactors,
    ) -> Self {
        ConnectorBuilder {
            factors,
            config: config.clone(),
            registry,
            groups: vec![Group::Whole],
            data_parallel: 0,
            sizes: (1, 1, 1),
            block_size: 16,
            prefill_backoff: 0,
            any_port: false,
        }
    }

    /// The KV cache groups, in the order of lists of blocks; one of whole requests if not called.
    pub fn groups(mut self, groups: impl IntoIterator<Item = Group>) -> Self {
        self.groups = groups.into_iter().collect();
        self
    }

    /// Tokens of a logical block; 16 if not called.
    pub fn block_size(mut self, tokens: u32) -> Self {
        self.block_size = tokens;
        self
    }

    /// Workers of the engine: ranks of tensor and of pipeline parallelism. One of each if not called.
    pub fn workers(mut self, tensor_parallel: u32, pipeline_parallel: u32) -> Self {
        (self.sizes.0, self.sizes.1) = (tensor_parallel, pipeline_parallel);
        self
    }

    /// The size of decode context parallelism; 1 if not called.
    pub fn decode_context_parallel(mut self, size: u32) -> Self {
        self.sizes.2 = size;
        self
    }

    /// The rank of data parallelism: its name and port follow from it. 0 if not called.
    pub fn data_parallel_rank(mut self, rank: u32) -> Self {
        self.data_parallel = rank;
        self
    }

    /// Tokens at the end of a prompt that a prefill leaves to the decode; none if not called.
    pub fn prefill_backoff(mut self, tokens: u32) -> Self {
        self.prefill_backoff = tokens;
        self
    }

    /// The side channel listens on a port that is free, whatever `VLLM_NIXL_SIDE_CHANNEL_PORT` says; parameters tell
    /// peers which. With `kv_compat` 0.9 and 0.11, whose workers have a port each, for one worker only.
    pub fn any_port(mut self) -> Self {
        self.any_port = true;
        self
    }

    /// Begins to listen, on a thread of the connector's own.
    ///
    /// # Errors
    /// `Unsupported` for a connector that is no NixlConnector; `Invalid` for sizes, groups and ports that cannot be;
    /// what the system says of the side channel's port, with the variable to set and a port that is free.
    pub async fn build(self) -> Result<Connector> {
        let (setup, side) = self.setup()?;
        let started = thread::start(setup, side)?;
        std::future::poll_fn(|context| started.poll(context)).await
    }

    /// As [`build`](Self::build), without a runtime.
    pub fn build_blocking(self) -> Result<Connector> {
        let (setup, side) = self.setup()?;
        let started = thread::start(setup, side)?;
        started.wait(thread::START_LIMIT.into()).unwrap_or_else(|| {
            Err(Error::new(ErrorKind::TimedOut, "the side channel did not begin to listen in time"))
        })
    }

    pub(super) fn setup(self) -> Result<(Setup, SideSettings)> {
        let invalid = |sentence: &str| Err(Error::new(ErrorKind::Invalid, sentence.to_owned()));
        let (tp_size, pp_size, dcp_size) = self.sizes;
        let most = crate::mapping::MAX_RANKS;
        if tp_size == 0 || pp_size == 0 || dcp_size == 0 || tp_size.saturating_mul(pp_size) > most {
            return invalid("an engine has 1 to 1024 workers: see ConnectorBuilder::workers");
        }
        if self.groups.is_empty() || self.block_size == 0 {
            return invalid(
                "an engine has a KV cache group at least, and blocks of a token at least",
            );
        }
        // Where it listens is known once it does.
        let nowhere = Address { host: "".into(), port: 0 };
        let mut settings = match self.config.connector() {
            Some(kvx_config::ConnectorKind::Mooncake) => {
                Settings::of_mooncake(&self.config, self.data_parallel, nowhere)?
            }
            _ => Settings::from_config(&self.config, self.data_parallel, nowhere)?,
        };
        let writes = settings.mode == TransferMode::Push || settings.mooncake.is_some();
        if self.config.nixl().kvx_digest && writes {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "kvx_digest is for NixlConnector, where the decode reads: other connectors write without digests; \
                 take kvx_digest out of kv_connector_extra_config, or write NixlConnector",
            ));
        }
        let (secret, sizes) = (Secret::from_environment()?, (self.data_parallel, tp_size));
        settings.trust =
            ParamsTrust::new(secret.as_ref(), &self.config.nixl().allow_unsigned_params);
        let mut side = SideSettings::from_config(&self.config, sizes, settings.ports, secret)?;
        if self.any_port {
            side.ports.fill(0);
        }
        (settings.tp_size, settings.pp_size, settings.dcp_size) = (tp_size, pp_size, dcp_size);
        (settings.block_size, settings.prefill_backoff) = (self.block_size, self.prefill_backoff);
        let window = |group: &Group| match group {
            Group::Whole => None,
            Group::Window { tokens } => Some(window_blocks(*tokens, self.block_size)),
        };
        settings.groups = self.groups.iter().map(window).collect();
        let clip = |group: &Group| match group {
            Group::Whole => (GroupKind::Attention, Clip::Whole),
            Group::Window { .. } => (GroupKind::Attention, Clip::Window),
        };
        let mapping = crate::mapping::MappingOptions {
            groups: self.groups.iter().map(clip).collect(),
            permute: self.config.enable_permute_local_kv(),
            host_buffer: false,
        };
        let (hash, told) = (self.factors.hash()?, self.told()?);
        let (backends, in_nixl) = backends(&self.config, &self.registry)?;
        let setup = Setup {
            options: options(&self.config, None),
            settings,
            mapping,
            hash,
            told,
            factors: self.factors,
            data_parallel: self.data_parallel,
            any_port: self.any_port,
            config: self.config,
            registry: self.registry,
            backends,
            in_nixl,
        };
        Ok((setup, side))
    }
}

/// What a connector was built with.
pub(super) struct Setup {
    pub(super) settings: Settings,
    pub(super) mapping: crate::mapping::MappingOptions,
    pub(super) hash: CompatibilityHash,
    pub(super) config: KvTransferConfig,
    pub(super) factors: CompatibilityFactors,
    pub(super) data_parallel: u32,
    /// All of it for a rank in a process of its own.
    pub(super) told: Map<String, Value>,
    /// Peers are told the port, whatever the environment says of it.
    pub(super) any_port: bool,
    registry: Registry,
    options: Options,
    backends: Option<Vec<String>>,
    /// `KVX` is among the backends: peers with that backend in their NIXL load what this engine tells.
    in_nixl: bool,
}

impl Setup {
    /// The name or address of this host that peers are told.
    pub(super) fn host(&self) -> &str {
        let environment = self.config.environment();
        match self.settings.mooncake {
            None => &environment.side_channel_host,
            Some(_) => environment.host_ip.as_deref().unwrap_or("127.0.0.1"),
        }
    }

    /// Where TCP is not told what to bind, a host that is an address of this machine is it: peers elsewhere reach the
    /// side channel and the data, or none.
    pub(super) async fn bind_beside_the_side_channel(&mut self) {
        let bind = tcp_bind(&self.config, self.host()).await;
        self.options = options(&self.config, bind);
    }

    /// The agent of a worker whose pools lie on these devices, if on any.
    pub(super) fn agent(
        &self,
        rank: WorkerRank,
        devices: &[Arc<dyn DeviceAccess>],
    ) -> Result<Agent> {
        let mut name = format!("{}-pp{}-tp{}", self.settings.engine, rank.pp, rank.tp);
        while name.len() > kvx_core::MAX_NAME {
            name.pop();
        }
        let staged = self.config.buffer_device() == BufferDevice::Cpu;
        let mut builder =
            Agent::builder(name).options(self.options.clone()).stage_device_memory(staged);
        for device in devices {
            builder = builder.device(Arc::clone(device));
        }
        if let Some(backends) = &self.backends {
            builder = builder.backends(backends.iter().map(String::as_str));
        }
        let agent = builder.build(&self.registry)?;
        let (worker, backends) = (format!("pp {} tp {}", rank.pp, rank.tp), agent.backends());
        if self.settings.mooncake.is_some() {
            let vllm = backends.contains(&MOONCAKE);
            tracing::info!(
                %worker,
                ?backends,
                "{}",
                match vllm {
                    true => "vLLM peers are reached by MOONCAKE, kvx peers by any of these",
                    false => "kvx peers only: for vLLM's, name MOONCAKE in kv_connector_extra_config.backends",
                }
            );
        } else if backends.contains(&RIXL) {
            tracing::info!(%worker, ?backends, "vLLM peers can load from this engine and it from them, by RIXL");
        } else if self.in_nixl {
            tracing::info!(%worker, ?backends, "vLLM peers with the backend KVX can load from this engine");
        } else {
            tracing::info!(
                %worker,
                ?backends,
                "kvx peers only: for vLLM's, name RIXL in kv_connector_extra_config.backends, or KVX if their NIXL has it"
            );
        }
        Ok(agent)
    }

    /// What the side channel answers for a worker.
    pub(super) fn metadata(&self, registered: &Registered) -> Result<NixlAgentMetadata> {
        let dialect = self.settings.dialect;
        let mut metadata = NixlAgentMetadata::new(self.settings.engine.as_str(), dialect);
        registered.caches.advertise(&mut metadata, dialect)?;
        metadata.attn_backend_name.clone_from(&self.factors.attn_backend_name);
        metadata.dcp_size = self.settings.dcp_size;
        if registered.agent.backends().contains(&RIXL) {
            metadata.agent_metadata = registered.agent.foreign_metadata(RIXL)?;
        } else if self.in_nixl {
            metadata.agent_metadata = nixl::blob(&registered.agent, registered.pools())?;
        }
        metadata.kvx_metadata = Some(registered.agent.metadata()?);
        Ok(metadata)
    }
}

/// The backends that agents open, and whether `KVX` is named, which is none of them: it is kvx in the NIXL of a peer,
/// and reaches it by any of kvx's own. To plain NIXL agents UCX and LIBFABRIC mean that plugin of NIXL: where one of
/// them is named, RIXL is opened too if it is here.
fn backends(config: &KvTransferConfig, registry: &Registry) -> Result<(Option<Vec<String>>, bool)> {
    let Some(mut named) = config.backends()? else { return Ok((None, false)) };
    let all = named.len();
    named.retain(|name| !is_kvx(name));
    let in_nixl = named.len() < all;
    if named.is_empty() {
        return Ok((None, in_nixl));
    }
    let is = |name: &str, of: &[&str]| of.iter().any(|other| name.eq_ignore_ascii_case(other));
    let speaks = named.iter().any(|name| is(name, &[RIXL, "NIXL"]));
    if !speaks && named.iter().any(|name| is(name, &["UCX", "LIBFABRIC"])) {
        match registry.require(RIXL, &Options::from_json(config.extra().clone())) {
            Ok(_) => named.push(RIXL.to_owned()),
            Err(why) => tracing::info!("vLLM peers cannot be reached: {why}"),
        }
    }
    Ok((Some(named), in_nixl))
}

fn is_kvx(name: &str) -> bool {
    name.eq_ignore_ascii_case(KVX)
}

/// The options of the agents, whose TCP binds here unless it is told otherwise, and whose Mooncake engine is where
/// `VLLM_HOST_IP` says.
fn options(config: &KvTransferConfig, bind: Option<IpAddr>) -> Options {
    let mut extra = config.extra().clone();
    if let Some(Value::Array(named)) = extra.get_mut("backends") {
        named.retain(|name| !name.as_str().is_some_and(is_kvx));
        if named.is_empty() {
            extra.remove("backends");
        }
    }
    if let Some(host) = &config.environment().host_ip
        && let Value::Object(mooncake) = extra.entry("mooncake").or_insert_with(|| json!({}))
    {
        mooncake.entry("host").or_insert_with(|| host.as_str().into());
    }
    if let Some(address) = bind
        && let Value::Object(tcp) = extra.entry("tcp").or_insert_with(|| json!({}))
    {
        tcp.insert("bind".to_owned(), address.to_string().into());
    }
    Options::from_json(extra)
}
