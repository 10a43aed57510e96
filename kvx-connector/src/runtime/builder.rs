//! Builds a connector from vLLM's configuration.

use kvx_core::{ErrorKind, Registry, Result, Secret};
use kvx_vllm::config::{BufferDevice, KvTransferConfig};
use serde_json::{Map, Value, json};

use super::connector::Connector;
use super::setup::{Setup, backends, options};
use super::side::SideSettings;
use super::thread;
use kvx_vllm::engine::{Address, ParamsTrust, Settings};
use kvx_vllm::mapping::{Clip, GroupKind, window_blocks};
use kvx_vllm::params::TransferMode;
use kvx_vllm::wire::{CompatibilityFactors, CompatibilityHash};

/// A KV cache group: layers whose blocks are allocated to requests together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// Keeps all tokens of a request.
    Whole,
    /// Keeps the last tokens of a request.
    Window {
        /// The number of tokens.
        tokens: u32,
    },
}

/// A builder of a [`Connector`], made by [`Connector::builder`].
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
    hash: Option<CompatibilityHash>,
}

impl Connector {
    /// Returns a builder for an engine with this configuration, over the backends of `registry`.
    ///
    /// `model` is what this engine and its peers must have in common. A peer whose handshake
    /// differs is refused. The side channel listens at `VLLM_NIXL_SIDE_CHANNEL_HOST`, by default
    /// `localhost`: set it to an address of this host if peers run on others.
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
            hash: None,
        }
    }

    /// Sets the KV cache groups, in the order of lists of blocks. Default: one
    /// [`Whole`](Group::Whole) group.
    pub fn groups(mut self, groups: impl IntoIterator<Item = Group>) -> Self {
        self.groups = groups.into_iter().collect();
        self
    }

    /// Sets the number of tokens in a logical block, the blocks that the engine's lists count. It
    /// is `block_tokens` times `kernel_per_logical` of `Caches::of_layers`. Default: 16.
    pub fn block_size(mut self, tokens: u32) -> Self {
        self.block_size = tokens;
        self
    }

    /// Sets the number of tensor-parallel and pipeline-parallel ranks. Default: one of each.
    pub fn workers(mut self, tensor_parallel: u32, pipeline_parallel: u32) -> Self {
        (self.sizes.0, self.sizes.1) = (tensor_parallel, pipeline_parallel);
        self
    }

    /// Sets the size of decode context parallelism. Default: 1.
    pub fn decode_context_parallel(mut self, size: u32) -> Self {
        self.sizes.2 = size;
        self
    }

    /// Sets the data-parallel rank, which determines the name and port of the engine. Default: 0.
    pub fn data_parallel_rank(mut self, rank: u32) -> Self {
        self.data_parallel = rank;
        self
    }

    /// Sets how many tokens at the end of a prompt a prefill leaves to the decode. Default: none.
    pub fn prefill_backoff(mut self, tokens: u32) -> Self {
        self.prefill_backoff = tokens;
        self
    }

    /// Sets the compatibility hash, in place of the one that the factors of the model result in: for
    /// engines inside a vLLM, which calculates its own.
    pub fn compatibility_hash(mut self, hash: CompatibilityHash) -> Self {
        self.hash = Some(hash);
        self
    }

    /// Lets the side channel listen on any free port, whatever `VLLM_NIXL_SIDE_CHANNEL_PORT` says.
    /// Parameters carry the port to peers. With `kv_compat` 0.9 and 0.11 each worker has its own
    /// port, so this works for one worker only.
    pub fn any_port(mut self) -> Self {
        self.any_port = true;
        self
    }

    /// Starts the connector's thread, and returns once the side channel listens.
    ///
    /// # Errors
    /// - `Unsupported`: the configuration names a connector that kvx does not serve, or combines
    ///   settings that exclude each other.
    /// - `Invalid`: sizes, groups, ports or the host are impossible, or the secret cannot be used.
    /// - `Exhausted`: the port of the side channel is taken. The error names the variable to set
    ///   and a free port.
    /// - Errors of the operating system for the socket, the thread and the secret's file.
    pub async fn build(self) -> Result<Connector> {
        let (setup, side) = self.setup()?;
        let started = thread::start(setup, side)?;
        std::future::poll_fn(|context| started.poll(context)).await
    }

    /// Builds the connector as [`build`](Self::build) does, and blocks the thread meanwhile.
    ///
    /// # Errors
    /// Those of [`build`](Self::build), and `TimedOut` if the side channel does not listen within
    /// 30 s.
    pub fn build_blocking(self) -> Result<Connector> {
        let (setup, side) = self.setup()?;
        let started = thread::start(setup, side)?;
        started.wait(thread::START_LIMIT.into()).unwrap_or_else(|| {
            Err(ErrorKind::TimedOut.because("the side channel did not start to listen within 30 s"))
        })
    }

    /// Returns everything that the builder was given, for ranks in processes of their own.
    fn told(&self) -> Map<String, Value> {
        let groups = self.groups.iter().map(|group| match group {
            Group::Whole => Value::Null,
            Group::Window { tokens } => (*tokens).into(),
        });
        let (tp, pp, dcp) = self.sizes;
        let told = json!({
            "config": self.config.to_json(),
            // The rank's process cannot find out whether there is a GPU.
            "gpu": self.config.buffer_device() == BufferDevice::Cuda,
            "model": self.factors.model,
            "attn_backend_name": self.factors.attn_backend_name,
            "factors": self.factors.map(),
            "groups": groups.collect::<Vec<_>>(),
            "data_parallel": self.data_parallel,
            "sizes": [tp, pp, dcp],
            "block_size": self.block_size,
            "prefill_backoff": self.prefill_backoff,
            "hash": self.hash.as_ref().map(CompatibilityHash::as_str),
        });
        match told {
            Value::Object(told) => told,
            _ => unreachable!("it is an object"),
        }
    }

    pub(super) fn setup(self) -> Result<(Setup, SideSettings)> {
        let invalid = |sentence: &str| Err(ErrorKind::Invalid.because(sentence.to_owned()));
        let (tp_size, pp_size, dcp_size) = self.sizes;
        let most = kvx_vllm::ids::MAX_RANKS;
        if tp_size == 0 || pp_size == 0 || dcp_size == 0 || tp_size.saturating_mul(pp_size) > most {
            return invalid("an engine has 1 to 1024 workers: see ConnectorBuilder::workers");
        }
        if self.groups.is_empty() || self.block_size == 0 {
            return invalid(
                "an engine needs at least one KV cache group, and at least one token in a block",
            );
        }
        // The address is known once the side channel listens.
        let nowhere = Address { host: "".into(), port: 0 };
        let mut settings = match self.config.connector() {
            Some(kvx_vllm::config::ConnectorKind::Mooncake) => {
                Settings::of_mooncake(&self.config, self.data_parallel, nowhere)?
            }
            _ => Settings::from_config(&self.config, self.data_parallel, nowhere)?,
        };
        let writes = settings.mode == TransferMode::Push || settings.mooncake.is_some();
        if self.config.nixl().kvx_digest && writes {
            return Err(ErrorKind::Unsupported.because(
                "kvx_digest is for NixlConnector, where the decode reads: other connectors write \
                 without digests; take kvx_digest out of kv_connector_extra_config, or write \
                 NixlConnector",
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
        let hash = self.hash.clone().map_or_else(|| self.factors.hash(), Ok)?;
        let told = self.told();
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
