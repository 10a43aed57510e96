//! The inputs of a configuration besides its text: environment variables, a GPU, registered
//! connectors.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::Value;

use super::fields::{self, KvCacheLayout};
use super::given::ValueSource;
use super::warning::{Concern, Warning};
use crate::Version;
use kvx_core::{ErrorKind, Result};

const HOST: &str = "VLLM_NIXL_SIDE_CHANNEL_HOST";
const HOST_IP: &str = "VLLM_HOST_IP";
pub(super) const PORT: &str = "VLLM_NIXL_SIDE_CHANNEL_PORT";
const ABORT: &str = "VLLM_NIXL_ABORT_REQUEST_TIMEOUT";
const BOOTSTRAP_PORT: &str = "VLLM_MOONCAKE_BOOTSTRAP_PORT";
const MOONCAKE_ABORT: &str = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT";
const MOONCAKE_TIMEOUT: &str = "VLLM_MOONCAKE_CONNECTOR_TIMEOUT";
const LAYOUT: &str = "VLLM_KV_CACHE_LAYOUT";

/// vLLM's environment variables that kvx reads.
pub(super) const VARIABLES: &[&str] =
    &[HOST, PORT, ABORT, HOST_IP, BOOTSTRAP_PORT, MOONCAKE_ABORT, MOONCAKE_TIMEOUT, LAYOUT];

/// The environment in which a configuration is read. It is a plain value, so that tests and tools
/// can set all of it.
///
/// ```
/// # use kvx_vllm as kvx;
/// use kvx::config::{KvTransferConfig, RankNumbers, Surroundings};
/// let surroundings = Surroundings::default().variable("VLLM_NIXL_SIDE_CHANNEL_PORT", "5700");
/// let config = KvTransferConfig::from_json("{}", &surroundings)?;
/// assert_eq!(config.side_channel_port(RankNumbers { dp: 2, ..RankNumbers::default() })?, 5702);
/// # Ok::<(), kvx_core::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    pub(super) variables: BTreeMap<String, String>,
    pub(super) gpu: bool,
    pub(super) connectors: BTreeSet<String>,
    pub(super) engine_id: Option<String>,
}

impl Surroundings {
    /// Takes the environment variables of this process, without a GPU or registered connectors.
    pub fn of_process() -> Self {
        let relevant = |name: &str| VARIABLES.contains(&name) || name.starts_with("NCCL_");
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok().filter(|name| relevant(name))?;
            Some((name, value.to_string_lossy().into_owned()))
        });
        Surroundings { variables: variables.collect(), ..Surroundings::default() }
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn variable(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.variables.insert(name.into(), value.into());
        self
    }

    /// Sets whether this process has GPU memory to transfer. A program with a GPU backend knows.
    #[must_use]
    pub fn gpu(mut self, present: bool) -> Self {
        self.gpu = present;
        self
    }

    /// Registers the program's own connector under this name. `kv_connector_module_path` may be set
    /// only for such a connector: kvx loads no Python module.
    #[must_use]
    pub fn connector(mut self, name: impl Into<String>) -> Self {
        self.connectors.insert(name.into());
        self
    }

    /// Sets the engine id to use if none is written, instead of a random one.
    #[must_use]
    pub fn engine_id(mut self, id: impl Into<String>) -> Self {
        self.engine_id = Some(id.into());
        self
    }
}

/// The values of the environment variables, with vLLM's defaults for those that are not set.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Environment {
    /// `VLLM_NIXL_SIDE_CHANNEL_HOST`: the host on which a prefill instance listens for handshakes,
    /// `localhost`.
    pub side_channel_host: String,
    /// `VLLM_NIXL_SIDE_CHANNEL_PORT`: the base port, 5600 (5557 up to vLLM 0.11.0). 0 selects free
    /// ports; vLLM does not support 0.
    pub side_channel_port: u16,
    /// `VLLM_NIXL_ABORT_REQUEST_TIMEOUT`, if set.
    pub abort_request_timeout: Option<Duration>,
    /// `VLLM_HOST_IP`, if set: this host's address, which a MooncakeConnector sends to its peers.
    pub host_ip: Option<String>,
    /// `VLLM_MOONCAKE_BOOTSTRAP_PORT`: 8998.
    pub mooncake_bootstrap_port: u16,
    /// `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`: 480 s.
    pub mooncake_abort_request_timeout: Duration,
    /// `VLLM_MOONCAKE_CONNECTOR_TIMEOUT`: 30 s.
    pub mooncake_connector_timeout: Duration,
    /// `VLLM_KV_CACHE_LAYOUT`, if set.
    pub kv_cache_layout: Option<KvCacheLayout>,
}

impl Environment {
    pub(super) fn read(surroundings: &Surroundings, version: Version) -> Result<Self> {
        let variables = Variables(&surroundings.variables);
        let layout = variables.read(LAYOUT, |key, text| {
            let layout = KvCacheLayout::read(key, &Value::String(text.to_owned()))?;
            let new_name = !matches!(layout, KvCacheLayout::Nhd | KvCacheLayout::Hnd);
            if new_name && !version.reads_layout_names() {
                return Err(ErrorKind::Invalid.because(format!(
                    "{key} is {layout}; {version} knows NHD and HND: write one of them"
                )));
            }
            Ok(layout)
        })?;
        Ok(Environment {
            side_channel_host: variables
                .read(HOST, |_, text| Ok(text.to_owned()))?
                .unwrap_or("localhost".into()),
            side_channel_port: variables
                .read(PORT, port_or_any)?
                .unwrap_or(version.defaults().side_channel_port),
            abort_request_timeout: variables.read(ABORT, whole_seconds)?,
            host_ip: variables.read(HOST_IP, |_, text| Ok(text.to_owned()))?,
            mooncake_bootstrap_port: variables.read(BOOTSTRAP_PORT, port)?.unwrap_or(8998),
            mooncake_abort_request_timeout: variables
                .read(MOONCAKE_ABORT, whole_seconds)?
                .unwrap_or(Duration::from_secs(480)),
            mooncake_connector_timeout: variables
                .read(MOONCAKE_TIMEOUT, |key, text| {
                    fields::seconds(key, &Value::String(text.to_owned()))
                })?
                .unwrap_or(Duration::from_secs(30)),
            kv_cache_layout: layout,
        })
    }

    /// Returns a warning if the abort timeout replaces leases in a version that no longer has the
    /// timeout.
    pub(super) fn abort_warning(&self, version: Version) -> Option<Warning> {
        let timeout =
            self.abort_request_timeout.filter(|_| version.defaults().abort_after.is_none())?;
        let sentence = format!(
            "{ABORT} is set: blocks are kept for {} s and not leased; {version} has no such variable, so unset it \
             and use \
             kv_connector_extra_config.kv_lease_duration",
            timeout.as_secs()
        );
        Some(Warning::new(Concern::Version, sentence))
    }

    /// Returns each value as text, and its source.
    pub(super) fn lines(
        &self,
        surroundings: &Surroundings,
        version: Version,
    ) -> Vec<(&'static str, String, ValueSource)> {
        let seconds = |time: Duration| format!("{} s", time.as_secs_f64());
        let values = [
            (HOST, Some(self.side_channel_host.clone())),
            (PORT, Some(self.side_channel_port.to_string())),
            (ABORT, self.abort_request_timeout.map(seconds)),
            (HOST_IP, self.host_ip.clone()),
            (BOOTSTRAP_PORT, Some(self.mooncake_bootstrap_port.to_string())),
            (MOONCAKE_ABORT, Some(seconds(self.mooncake_abort_request_timeout))),
            (MOONCAKE_TIMEOUT, Some(seconds(self.mooncake_connector_timeout))),
            (LAYOUT, self.kv_cache_layout.map(|layout| layout.to_string())),
        ];
        let line = |(name, value): (&'static str, Option<String>)| {
            let source = match surroundings.variables.get(name) {
                Some(_) => ValueSource::Environment(name.into()),
                None => ValueSource::Default(version),
            };
            value.map(|value| (name, value, source))
        };
        values.into_iter().filter_map(line).collect()
    }
}

/// Returns a hint if NCCL is configured: KV transfer does not use NCCL, but the variables may be
/// meant for it.
pub(super) fn nccl_hint(surroundings: &Surroundings, connector: &str) -> Option<Warning> {
    let set: Vec<&str> = surroundings
        .variables
        .keys()
        .map(String::as_str)
        .filter(|name| name.starts_with("NCCL_"))
        .collect();
    (!set.is_empty()).then(|| {
        Warning::new(
            Concern::Nccl,
            format!(
                "{} set, but {connector} does not use NCCL; choose network cards with UCX_NET_DEVICES, transports with \
                 UCX_TLS, or set kv_connector_extra_config.tcp.bind",
                match set.as_slice() {
                    [one] => format!("{one} is"),
                    several => format!("{} are", several.join(", ")),
                }
            ),
        )
    })
}

struct Variables<'a>(&'a BTreeMap<String, String>);

impl Variables<'_> {
    fn read<T>(&self, name: &str, read: impl FnOnce(&str, &str) -> Result<T>) -> Result<Option<T>> {
        let Some(value) = self.0.get(name) else { return Ok(None) };
        match value.trim() {
            "" => {
                Err(ErrorKind::Invalid
                    .because(format!("{name} is empty; give it a value or unset it")))
            }
            value => read(name, value).map(Some),
        }
    }
}

fn port(name: &str, text: &str) -> Result<u16> {
    let port = text.parse::<u16>().ok().filter(|port| *port > 0);
    port.ok_or_else(|| {
        ErrorKind::Invalid.because(format!("{name} is {text:?}; write a port from 1 to 65535"))
    })
}

fn port_or_any(name: &str, text: &str) -> Result<u16> {
    let any = "or 0 for any free port";
    text.parse().map_err(|_| {
        ErrorKind::Invalid
            .because(format!("{name} is {text:?}; write a port from 1 to 65535, {any}"))
    })
}

fn whole_seconds(name: &str, text: &str) -> Result<Duration> {
    let seconds = text.parse::<u32>().ok().filter(|seconds| *seconds > 0);
    seconds.map(|seconds| Duration::from_secs(seconds.into())).ok_or_else(|| {
        ErrorKind::Invalid
            .because(format!("{name} is {text:?}; write a whole number of seconds above 0"))
    })
}
