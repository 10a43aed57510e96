//! Builds a connector from vLLM's configuration.

use kvx_core::{Error, ErrorKind, Registry, Result, Secret};
use kvx_vllm::config::{BufferDevice, KvTransferConfig};
use serde_json::{Map, Value, json};

use super::connector::Connector;
use super::setup::{Setup, backends, options};
use super::side::SideSettings;
use super::thread;
use kvx_vllm::engine::{Address, ParamsTrust, Settings};
use kvx_vllm::mapping::{Clip, GroupKind, window_blocks};
use kvx_vllm::params::TransferMode;
use kvx_vllm::wire::CompatibilityFactors;

/// A KV cache group: layers whose blocks are given to requests together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// All tokens of a request.
    Whole,
    /// The last tokens of a request.
    Window {
        /// The number of them.
        tokens: u32,
    },
}

/// Builds a [`Connector`]: [`Connector::builder`] returns it.
#[must_use]
pub struct ConnectorBuilder {
    config: KvTransferConfig,
    registry: Registry,
    factors: CompatibilityFactors,
    groups: Vec<Group>,
    data_parallel: u32,
    sizes: (u32, u32, u32),
    block_size: u32,
    prefill_backoff: u32,
    any_port: bool,
}

impl Connector {
    /// Returns a builder for an engine with this configuration, over the backends of `registry`.
    /// `model` is what this engine and its peers must have in common: a peer whose handshake says
    /// otherwise is refused.
    pub fn builder(
        config: &KvTransferConfig,
        registry: Registry,
        model: CompatibilityFactors,
    ) -> ConnectorBuilder {
        ConnectorBuilder::new(config, registry, model)
    }
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

    /// Workers of the engine: ranks of tensor and of pipeline parallelism. One of each if not
    /// called.
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

    /// The side channel listens on a port that is free, whatever `VLLM_NIXL_SIDE_CHANNEL_PORT`
    /// says; parameters tell peers which. With `kv_compat` 0.9 and 0.11, whose workers have a port
    /// each, for one worker only.
    pub fn any_port(mut self) -> Self {
        self.any_port = true;
        self
    }

    /// Begins to listen, on a thread of the connector's own.
    ///
    /// # Errors
    /// `Unsupported` for a connector that is no NixlConnector; `Invalid` for sizes, groups and
    /// ports that cannot be; what the system says of the side channel's port, with the variable to
    /// set and a port that is free.
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

    /// Everything that the builder was given, for ranks in processes of their own.
    fn told(&self) -> Map<String, Value> {
        let groups = self.groups.iter().map(|group| match group {
            Group::Whole => Value::Null,
            Group::Window { tokens } => (*tokens).into(),
        });
        let (tp, pp, dcp) = self.sizes;
        let told = json!({
            "config": self.config.to_json(),
            // The rank's process does not know whether there is a GPU.
            "gpu": self.config.buffer_device() == BufferDevice::Cuda,
            "model": self.factors.model,
            "attn_backend_name": self.factors.attn_backend_name,
            "factors": self.factors.map(),
            "groups": groups.collect::<Vec<_>>(),
            "data_parallel": self.data_parallel,
            "sizes": [tp, pp, dcp],
            "block_size": self.block_size,
            "prefill_backoff": self.prefill_backoff,
        });
        match told {
            Value::Object(told) => told,
            _ => unreachable!("it is an object"),
        }
    }

    pub(super) fn setup(self) -> Result<(Setup, SideSettings)> {
        let invalid = |sentence: &str| Err(Error::new(ErrorKind::Invalid, sentence.to_owned()));
        let (tp_size, pp_size, dcp_size) = self.sizes;
        let most = kvx_vllm::ids::MAX_RANKS;
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
            Some(kvx_vllm::config::ConnectorKind::Mooncake) => {
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
        let mapping = kvx_vllm::mapping::MappingOptions {
            groups: self.groups.iter().map(clip).collect(),
            permute: self.config.enable_permute_local_kv(),
            host_buffer: false,
        };
        let (hash, told) = (self.factors.hash()?, self.told());
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
