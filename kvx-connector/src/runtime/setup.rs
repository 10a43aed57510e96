//! The setup of a connector, and the agents that it builds.

use std::net::IpAddr;
use std::sync::Arc;

use kvx_core::{Agent, DeviceAccess, Options, Registry, Result};
use kvx_vllm::config::{BufferDevice, KvTransferConfig};
use serde_json::{Map, Value, json};

use super::caches::RegisteredCaches;
use super::side::tcp_bind;
use crate::nixl::{self, BACKEND as KVX};
use kvx_vllm::engine::{Address, Settings, WorkerRank};
use kvx_vllm::wire::{CompatibilityFactors, CompatibilityHash, NixlAgentMetadata};

/// The name of the backend that talks to plain Mooncake agents.
pub(super) const MOONCAKE: &str = "MOONCAKE";
/// The name of the backend that talks to plain NIXL agents.
pub(super) const RIXL: &str = "RIXL";

/// The setup of a connector.
pub(super) struct Setup {
    pub(super) settings: Settings,
    pub(super) mapping: kvx_vllm::mapping::MappingOptions,
    pub(super) hash: CompatibilityHash,
    pub(super) config: KvTransferConfig,
    pub(super) factors: CompatibilityFactors,
    pub(super) data_parallel: u32,
    /// The setup as a rank in a process of its own receives it.
    pub(super) told: Map<String, Value>,
    /// True if any free port will do, whatever the environment says.
    pub(super) any_port: bool,
    pub(super) registry: Registry,
    pub(super) options: Options,
    pub(super) backends: Option<Vec<String>>,
    /// True if `KVX` is among the backends, so that peers with that backend in their NIXL can load
    /// from this engine.
    pub(super) in_nixl: bool,
}

impl Setup {
    /// Returns the name or address of this host, as peers know it.
    pub(super) fn host(&self) -> &str {
        let environment = self.config.environment();
        match self.settings.mooncake {
            None => &environment.side_channel_host,
            Some(_) => environment.host_ip.as_deref().unwrap_or("127.0.0.1"),
        }
    }

    /// Returns whether plain Mooncake agents, which cannot prove a secret, are served: the option
    /// `unauthenticated` names their backend.
    pub(super) fn admits_mooncake_agents(&self) -> bool {
        let named = self.options.unauthenticated().unwrap_or_default();
        named.iter().any(|name| self.registry.canonical(name).is_ok_and(|name| name == MOONCAKE))
    }

    /// Sets the address that TCP binds. Without `tcp.bind` it is this host's own address, if it
    /// names one of this machine: then peers elsewhere reach both the side channel and the data, or
    /// neither.
    pub(super) async fn bind_beside_the_side_channel(&mut self) {
        let bind = tcp_bind(&self.config, self.host()).await;
        self.options = options(&self.config, bind);
    }

    /// Builds the agent of a worker. `devices` are those on which its pools lie.
    pub(super) fn agent(
        &self,
        rank: WorkerRank,
        devices: &[Arc<dyn DeviceAccess>],
    ) -> Result<Agent> {
        let mut name = format!("{}-pp{}-tp{}", self.settings.engine, rank.pp, rank.tp);
        while name.len() > kvx_core::backend::MAX_NAME {
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
        let agent = builder.registry(self.registry.clone()).build()?;
        let (worker, backends) = (format!("pp {} tp {}", rank.pp, rank.tp), agent.backends());
        if self.settings.mooncake.is_some() {
            let vllm = backends.contains(&MOONCAKE);
            tracing::info!(
                %worker,
                ?backends,
                "{}",
                match vllm {
                    true => "vLLM peers are reached through MOONCAKE, kvx peers through any of \
                         these backends",
                    false => "only kvx peers are reached: to reach vLLM peers, add MOONCAKE to \
                         kv_connector_extra_config.backends",
                }
            );
        } else if backends.contains(&RIXL) {
            tracing::info!(
                %worker,
                ?backends,
                "this engine and vLLM peers can load from each other through RIXL"
            );
        } else if self.in_nixl {
            tracing::info!(
                %worker,
                ?backends,
                "vLLM peers with the backend KVX can load from this engine"
            );
        } else {
            tracing::info!(
                %worker,
                ?backends,
                "only kvx peers are reached, such as KvxConnector: to reach a NixlConnector, add KVX \
                 to kv_connector_extra_config.backends if its NIXL has KVX, otherwise RIXL"
            );
        }
        Ok(agent)
    }

    /// Returns the message for a rank in a process of its own: the setup of the engine, and the
    /// address of its side channel.
    pub(super) fn welcome(&self) -> String {
        let mut told = self.told.clone();
        let Address { host, port } = &self.settings.address;
        told.insert("address".to_owned(), json!([&**host, port]));
        Value::Object(told).to_string()
    }

    /// Returns the side channel's answer for a worker.
    pub(super) fn metadata(&self, registered: &RegisteredCaches) -> Result<NixlAgentMetadata> {
        let version = self.settings.version;
        let mut metadata = NixlAgentMetadata::new(self.settings.engine.as_str(), version);
        registered.caches.advertise(&mut metadata, version)?;
        metadata.attn_backend_name.clone_from(&self.factors.attn_backend_name);
        metadata.dcp_size = self.settings.dcp_size;
        if registered.agent.backends().contains(&RIXL) {
            metadata.agent_metadata = registered.agent.foreign_metadata(RIXL)?;
        } else if self.in_nixl {
            let leases = registered.leases();
            metadata.agent_metadata =
                nixl::blob_with_leases(&registered.agent, registered.pools(), leases)?;
        }
        metadata.kvx_metadata = Some(registered.agent.metadata()?);
        Ok(metadata)
    }
}

/// Returns the backends that agents open, and whether `KVX` is named. `KVX` is not a backend of its
/// own: it is kvx in the NIXL of a peer, which any backend of kvx reaches. For plain NIXL agents,
/// UCX and LIBFABRIC name plugins of NIXL: if one of them is named, RIXL is opened too if it is
/// available.
pub(super) fn backends(
    config: &KvTransferConfig,
    registry: &Registry,
) -> Result<(Option<Vec<String>>, bool)> {
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

/// Returns the options of the agents. TCP binds to `bind` if the configuration has no `tcp.bind`,
/// and the Mooncake engine to `VLLM_HOST_IP`.
pub(super) fn options(config: &KvTransferConfig, bind: Option<IpAddr>) -> Options {
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
