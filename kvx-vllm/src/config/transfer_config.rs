//! `KVTransferConfig`: the checked fields, with the defaults of the chosen version.

use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use super::connectors::{self, ConnectorKind};
use super::engine_id::random_uuid;
use super::fields::{self, BufferDevice, FIELDS, LoadFailurePolicy, Role};
use super::given::Given;
use super::surroundings::{self, Environment, Surroundings};
use super::tables::{self, MooncakeSettings, NixlSettings};
use super::warning::{self, Concern, Warning};
use crate::Version;
use kvx_core::backend::nearest;
use kvx_core::{AgentBuilder, Error, ErrorKind, Options, Result};

/// vLLM's `KVTransferConfig`, checked as in vLLM, with kvx's additions under
/// `kv_connector_extra_config`.
///
/// ```
/// # use kvx_vllm as kvx;
/// use kvx::config::{KvTransferConfig, LoadFailurePolicy, Surroundings};
/// let config = KvTransferConfig::from_json(
///     r#"{"kv_connector": "NixlConnector", "kv_role": "kv_producer",
///         "kv_connector_extra_config": {"backends": ["UCX", "TCP"], "kv_compat": "0.16"}}"#,
///     &Surroundings::of_process(),
/// )?;
/// config.log_warnings_once();
/// assert!(config.is_kv_producer() && !config.is_kv_consumer());
/// assert_eq!(config.kv_load_failure_policy(), LoadFailurePolicy::Recompute); // the default of vLLM 0.16
/// assert_eq!(config.backends()?.unwrap(), ["UCX", "TCP"]);
/// # Ok::<(), kvx_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct KvTransferConfig {
    pub(super) given: Given,
    pub(super) surroundings: Surroundings,
    version: Version,
    kv_connector: Option<String>,
    connector: Option<ConnectorKind>,
    engine_id: String,
    kv_buffer_device: BufferDevice,
    buffer_device: BufferDevice,
    kv_role: Option<Role>,
    kv_port: u16,
    kv_connector_module_path: Option<String>,
    enable_permute_local_kv: bool,
    kv_load_failure_policy: LoadFailurePolicy,
    kv_buffer_size: f64,
    kv_rank: Option<i64>,
    kv_parallel_size: i64,
    kv_ip: String,
    backends: Option<Vec<String>>,
    nixl: NixlSettings,
    mooncake: MooncakeSettings,
    environment: Environment,
    first_rank_host: Option<String>,
    children: Vec<KvTransferConfig>,
    warnings: Vec<Warning>,
}

impl KvTransferConfig {
    /// Reads JSON text, in which `80m` and `1K` are numbers. Errors: as [`resolve`](Self::resolve).
    pub fn from_json(text: &str, surroundings: &Surroundings) -> Result<Self> {
        Self::resolve(Given::from_json(text)?, surroundings)
    }

    /// Takes the arguments for KV transfer out of a command line. Returns the other arguments for
    /// the program's own parser. Errors: as [`Given::from_arguments`] and
    /// [`resolve`](Self::resolve).
    ///
    /// ```
    /// # use kvx_vllm as kvx;
    /// use kvx::config::{KvTransferConfig, Surroundings};
    /// let command_line = "serve --kv-transfer-config.kv_connector NixlConnector --kv-transfer-config.kv_role kv_both \
    ///                     --kv-transfer-config.kv_connector_extra_config.backends+ LIBFABRIC --port 8100";
    /// let (config, rest) =
    ///     KvTransferConfig::from_arguments(command_line.split_whitespace(), &Surroundings::default())?;
    /// assert_eq!(config.backends()?.unwrap(), ["LIBFABRIC"]);
    /// assert_eq!(rest, ["serve", "--port", "8100"]); // for clap
    /// # Ok::<(), kvx_core::Error>(())
    /// ```
    pub fn from_arguments<T: Into<String>>(
        arguments: impl IntoIterator<Item = T>,
        surroundings: &Surroundings,
    ) -> Result<(Self, Vec<String>)> {
        let (given, rest) = Given::from_arguments(arguments)?;
        Ok((Self::resolve(given, surroundings)?, rest))
    }

    /// Checks the input and fills in the defaults.
    ///
    /// Errors: `Invalid`, with the field and the nearest valid one, for an unknown field, a value
    /// of the wrong type or outside its closed set, a connector without a role, an unknown
    /// connector, an unknown key in one of kvx's own tables, or an invalid environment variable;
    /// `Unsupported` for a connector of vLLM that kvx does not support.
    pub fn resolve(given: Given, surroundings: &Surroundings) -> Result<Self> {
        Self::resolve_within(given, surroundings, None)
    }

    fn resolve_within(
        given: Given,
        surroundings: &Surroundings,
        parent: Option<Version>,
    ) -> Result<Self> {
        let object = given.object();
        check_names(object)?;
        let get = |key: &str| object.get(key);
        let filled = |key: &str| object.get(key).filter(|value| !value.is_null());

        let empty = Map::new();
        let extra = match get("kv_connector_extra_config") {
            None => &empty,
            Some(Value::Object(extra)) => extra,
            Some(other) => {
                return Err(fields::wrong("kv_connector_extra_config", other, "an object, {…}"));
            }
        };
        let version = match extra.get("kv_compat") {
            Some(value) => Version::from_value(value)?,
            None => parent.unwrap_or_default(),
        };
        let defaults = version.defaults();

        let text = |key: &str| filled(key).map(|value| fields::text(key, value)).transpose();
        let kv_connector = text("kv_connector")?;
        let kv_role = filled("kv_role").map(|value| Role::read("kv_role", value)).transpose()?;
        let kv_connector_module_path = text("kv_connector_module_path")?;
        let whole = |key: &str, value: &Value| fields::whole(key, value, i64::MIN..=i64::MAX);
        let connector = match &kv_connector {
            None if kv_connector_module_path.is_some() => {
                return Err(ErrorKind::Invalid.because(
                    "kv_connector_module_path is set without kv_connector; write kv_connector too, or remove it",
                ));
            }
            None => None,
            Some(name) if kv_role.is_none() => {
                return Err(ErrorKind::Invalid.because(format!(
                    "kv_connector is {name:?} without a kv_role; write kv_role, supported roles are {}",
                    fields::roles()
                )));
            }
            Some(name) => {
                Some(connectors::find(name, kv_connector_module_path.as_deref(), surroundings)?)
            }
        };

        let kv_buffer_device = match get("kv_buffer_device") {
            Some(value) => BufferDevice::read("kv_buffer_device", value)?,
            None => defaults.buffer_device.unwrap_or(platform(surroundings)),
        };
        let buffer_device = match kv_buffer_device {
            BufferDevice::Cuda if surroundings.gpu => BufferDevice::Cuda,
            _ => BufferDevice::Cpu,
        };
        let engine_id = match text("engine_id")? {
            Some(id) if id.is_empty() => {
                return Err(ErrorKind::Invalid
                    .because("engine_id is empty; write a name, or remove it for a random one"));
            }
            Some(id) => id,
            None => surroundings.engine_id.clone().unwrap_or_else(random_uuid),
        };

        let mut config = KvTransferConfig {
            version,
            connector,
            engine_id,
            kv_buffer_device,
            buffer_device,
            kv_role,
            kv_port: get("kv_port").map_or(Ok(14579), |value| {
                fields::whole("kv_port", value, 0..=65535)
                    .map(|port| u16::try_from(port).unwrap_or(u16::MAX))
            })?,
            enable_permute_local_kv: get("enable_permute_local_kv")
                .map_or(Ok(false), |value| fields::flag("enable_permute_local_kv", value))?,
            kv_load_failure_policy: get("kv_load_failure_policy")
                .map_or(Ok(defaults.load_failure_policy), |value| {
                    LoadFailurePolicy::read("kv_load_failure_policy", value)
                })?,
            kv_buffer_size: get("kv_buffer_size")
                .map_or(Ok(1e9), |value| fields::number("kv_buffer_size", value))?,
            kv_rank: filled("kv_rank").map(|value| whole("kv_rank", value)).transpose()?,
            kv_parallel_size: get("kv_parallel_size")
                .map_or(Ok(1), |value| whole("kv_parallel_size", value))?,
            kv_ip: get("kv_ip")
                .map_or(Ok("127.0.0.1".into()), |value| fields::text("kv_ip", value))?,
            backends: tables::backends(extra)?,
            nixl: tables::nixl(extra, version)?,
            mooncake: tables::mooncake(extra, version)?,
            environment: Environment::read(surroundings, version)?,
            first_rank_host: None,
            children: Vec::new(),
            warnings: Vec::new(),
            kv_connector,
            kv_connector_module_path,
            surroundings: surroundings.clone(),
            given: Given::default(),
        };
        config.warnings.extend(given.warnings().iter().cloned());
        config.warnings.extend(config.field_warnings(object));
        config.warnings.extend(tables::check(extra, version)?);
        if parent.is_none() {
            config.warnings.extend(config.environment.abort_warning(version));
            let connector = config.kv_connector.as_deref();
            config
                .warnings
                .extend(connector.and_then(|name| surroundings::nccl_hint(surroundings, name)));
        }
        if config.connector == Some(ConnectorKind::Multi) {
            for (at, child) in connectors::children(extra)?.into_iter().enumerate() {
                config.add_child(at, child)?;
            }
        }
        config.given = given;
        Ok(config)
    }

    fn add_child(&mut self, at: usize, child: &Map<String, Value>) -> Result<()> {
        let prefix = format!("kv_connector_extra_config.connectors[{at}]");
        let surroundings = self.surroundings.clone().engine_id(self.engine_id.clone());
        let child = Self::resolve_within(
            Given::from_object(child.clone()),
            &surroundings,
            Some(self.version),
        )
        .map_err(|error| Error::new(error.kind(), format!("{prefix}: {}", error.sentence())))?;
        self.warnings.extend(child.warnings.iter().cloned().map(|warning| warning.within(&prefix)));
        self.children.push(child);
        Ok(())
    }

    fn field_warnings(&self, object: &Map<String, Value>) -> Vec<Warning> {
        let version = self.version;
        let mut warnings = Vec::new();
        let mut warn = |concern, sentence: String| warnings.push(Warning::new(concern, sentence));
        let written = |wanted: &dyn Fn(&fields::Field) -> bool| -> Vec<&str> {
            let names = FIELDS.iter().filter(|field| wanted(field)).map(|field| field.name);
            names.filter(|name| object.contains_key(*name)).collect()
        };
        let removed = written(&|field| field.removed && !field.is_in(version));
        if !removed.is_empty() {
            warn(
                Concern::Version,
                format!(
                    "{}: no longer in {version}, and not used by kvx; remove it, or set kv_compat \
                     to \"0.31\"",
                    removed.join(", ")
                ),
            );
        }
        let added = written(&|field| field.added && !field.is_in(version));
        if !added.is_empty() {
            warn(
                Concern::Version,
                format!(
                    "{}: {version} does not know this field yet; kvx uses it",
                    added.join(", ")
                ),
            );
        }
        let nixl =
            matches!(self.connector, Some(ConnectorKind::NixlPull | ConnectorKind::NixlPush));
        if nixl && version.has_port_per_worker() {
            warn(
                Concern::Version,
                format!(
                    "kv_compat {}: kvx uses the defaults and ports of {version} with peers that run kvx; it \
                     does not \
                     speak the protocol of a vLLM before 0.16",
                    version.as_str()
                ),
            );
        }
        if self.kv_role == Some(Role::Both) && nixl && version.deprecates_kv_both() {
            warn(
                Concern::Version,
                format!(
                    "kv_role kv_both is deprecated in {version}; write kv_producer or kv_consumer: for NixlConnector all \
                     roles are the same, the request decides"
                ),
            );
        }
        let active = |key: &str| self.connector.is_some() || object.contains_key(key);
        if self.kv_load_failure_policy == LoadFailurePolicy::Recompute
            && active("kv_load_failure_policy")
        {
            warn(
                Concern::Recompute,
                "kv_load_failure_policy recompute: after a failed load the decode instance does prefill work, for \
                 which \
                 it is not set up, and its other decodes are delayed (vLLM's guide: jitter and higher tail \
                 latency); \
                 write fail unless that is better than an error"
                    .into(),
            );
        }
        if self.kv_buffer_device != self.buffer_device && active("kv_buffer_device") {
            let reason = match self.kv_buffer_device {
                BufferDevice::Xpu => "kvx does not transfer memory of Intel GPUs",
                _ => "there is no GPU here",
            };
            warn(
                Concern::HostMemory,
                format!(
                    "kv_buffer_device is {}, but {reason}: host memory is used; write cpu to avoid this warning",
                    self.kv_buffer_device
                ),
            );
        }
        warnings
    }

    /// Returns the version whose defaults apply: `kv_compat`, or the newest.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Returns `kv_connector`, as written.
    pub fn kv_connector(&self) -> Option<&str> {
        self.kv_connector.as_deref()
    }

    /// Returns the connector that `kv_connector` names, if it is set.
    pub fn connector(&self) -> Option<&ConnectorKind> {
        self.connector.as_ref()
    }

    /// Returns `engine_id`: as written, or a random UUID that is the same for this value and its
    /// clones. It names one incarnation of one engine. If two live engines share an id, or an
    /// engine restarts with the same id within a lease, peers reject what they cannot tell apart.
    /// It is best left out.
    pub fn engine_id(&self) -> &str {
        &self.engine_id
    }

    /// Returns the engine id of one data-parallel rank, as vLLM spells it.
    pub fn engine_id_of_rank(&self, dp: u32) -> String {
        format!("{}_dp{dp}", self.engine_id)
    }

    /// Returns `kv_buffer_device`: as written, or the default. See
    /// [`buffer_device`](Self::buffer_device) for the device in use.
    pub fn kv_buffer_device(&self) -> BufferDevice {
        self.kv_buffer_device
    }

    /// Returns the device in use: host memory if the configured device does not exist.
    pub fn buffer_device(&self) -> BufferDevice {
        self.buffer_device
    }

    /// Returns `kv_role`. NixlConnector behaves the same in all roles.
    pub fn kv_role(&self) -> Option<Role> {
        self.kv_role
    }

    /// Returns `kv_port`: 14579. No connector of kvx uses it.
    pub fn kv_port(&self) -> u16 {
        self.kv_port
    }

    /// Returns `kv_connector_extra_config` with all keys, also unknown ones.
    pub fn extra(&self) -> &Map<String, Value> {
        static EMPTY: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);
        self.given
            .object()
            .get("kv_connector_extra_config")
            .and_then(Value::as_object)
            .unwrap_or(&EMPTY)
    }

    /// Applies this configuration to an agent: its options, and whether device memory is staged
    /// through the host (`kv_buffer_device`).
    ///
    /// ```no_run
    /// # mod kvx {
    /// #     pub use kvx_vllm::config;
    /// #     pub fn agent(name: &str) -> kvx_core::AgentBuilder { kvx_core::Agent::builder(name) }
    /// # }
    /// use kvx::config::{KvTransferConfig, Surroundings};
    /// let json = r#"{"kv_connector": "NixlConnector", "kv_role": "kv_both"}"#;
    /// let config = KvTransferConfig::from_json(json, &Surroundings::of_process())?;
    /// let agent = config.apply(kvx::agent("decode-0")).build()?;
    /// # Ok::<(), kvx_core::Error>(())
    /// ```
    pub fn apply(&self, builder: AgentBuilder) -> AgentBuilder {
        let staged = self.buffer_device == BufferDevice::Cpu;
        builder.options(Options::from_json(self.extra().clone())).stage_device_memory(staged)
    }

    /// Returns `kv_connector_module_path`. It is set only for `KvxConnector`, and for a connector that
    /// the program registered.
    pub fn kv_connector_module_path(&self) -> Option<&str> {
        self.kv_connector_module_path.as_deref()
    }

    /// Returns `enable_permute_local_kv`: false.
    pub fn enable_permute_local_kv(&self) -> bool {
        self.enable_permute_local_kv
    }

    /// Returns `kv_load_failure_policy`: `fail`; `recompute` up to vLLM 0.16.
    pub fn kv_load_failure_policy(&self) -> LoadFailurePolicy {
        self.kv_load_failure_policy
    }

    /// Returns `kv_buffer_size`, a field until vLLM 0.31: 1e9.
    pub fn kv_buffer_size(&self) -> f64 {
        self.kv_buffer_size
    }

    /// Returns `kv_rank`, a field until vLLM 0.31.
    pub fn kv_rank(&self) -> Option<i64> {
        self.kv_rank
    }

    /// Returns `kv_parallel_size`, a field until vLLM 0.31: 1.
    pub fn kv_parallel_size(&self) -> i64 {
        self.kv_parallel_size
    }

    /// Returns `kv_ip`, a field until vLLM 0.31: 127.0.0.1.
    pub fn kv_ip(&self) -> &str {
        &self.kv_ip
    }

    /// Returns `kv_connector_extra_config.backends` as written: any letter case, in order of
    /// preference. `None`: not written, so kvx chooses. The list is not empty:
    /// [`resolve`](Self::resolve) rejects an empty one.
    pub fn backends(&self) -> Result<Option<Vec<String>>> {
        Ok(self.backends.clone())
    }

    /// Returns the settings of NixlConnector in `kv_connector_extra_config`.
    pub fn nixl(&self) -> &NixlSettings {
        &self.nixl
    }

    /// Returns the settings of MooncakeConnector in `kv_connector_extra_config`.
    pub fn mooncake(&self) -> &MooncakeSettings {
        &self.mooncake
    }

    /// Sets the host of the first data-parallel rank (vLLM's `--data-parallel-address`). The
    /// prefill workers of a MooncakeConnector's other ranks register at the bootstrap server on
    /// that host.
    #[must_use]
    pub fn with_first_rank_at(self, host: &str) -> Self {
        KvTransferConfig { first_rank_host: Some(host.to_owned()), ..self }
    }

    /// Returns the host of the first data-parallel rank, if it was set.
    pub fn first_rank_host(&self) -> Option<&str> {
        self.first_rank_host.as_deref()
    }

    /// Returns the values of the environment variables.
    pub fn environment(&self) -> &Environment {
        &self.environment
    }

    /// Returns the children of a MultiConnector.
    pub fn children(&self) -> &[KvTransferConfig] {
        &self.children
    }

    /// Returns whether this instance takes part in KV transfer.
    pub fn is_kv_transfer_instance(&self) -> bool {
        self.kv_connector.is_some() && self.kv_role.is_some()
    }

    /// Returns whether this instance produces KV cache.
    pub fn is_kv_producer(&self) -> bool {
        self.kv_connector.is_some() && matches!(self.kv_role, Some(Role::Producer | Role::Both))
    }

    /// Returns whether this instance consumes KV cache.
    pub fn is_kv_consumer(&self) -> bool {
        self.kv_connector.is_some() && matches!(self.kv_role, Some(Role::Consumer | Role::Both))
    }

    /// Returns whether the connector, or a child of a MultiConnector, has this name.
    pub fn has_connector(&self, name: &str) -> bool {
        self.kv_connector() == Some(name)
            || self.children.iter().any(|child| child.has_connector(name))
    }

    /// Returns the warnings for the operator, in the order of the input.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// Logs each warning that this process has not logged yet. Returns their number.
    pub fn log_warnings_once(&self) -> usize {
        warning::log_once(&self.warnings)
    }

    /// Returns the input and the sources of its values.
    pub fn given(&self) -> &Given {
        &self.given
    }

    /// Returns every field of the chosen version with its value, as vLLM would print it. Reading
    /// the result gives the same configuration.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut out = Map::new();
        for field in self.fields_of_version() {
            out.insert(field.to_owned(), self.field_value(field));
        }
        out
    }

    /// Returns the fields of the chosen version, and any others that were written.
    pub(super) fn fields_of_version(&self) -> impl Iterator<Item = &'static str> + '_ {
        let written = |field: &fields::Field| self.given.object().contains_key(field.name);
        FIELDS
            .iter()
            .filter(move |field| field.is_in(self.version) || written(field))
            .map(|field| field.name)
    }

    pub(super) fn field_value(&self, field: &str) -> Value {
        match field {
            "kv_connector" => json!(self.kv_connector),
            "engine_id" => json!(self.engine_id),
            "kv_buffer_device" => json!(self.kv_buffer_device.as_str()),
            "kv_buffer_size" => json!(self.kv_buffer_size),
            "kv_role" => json!(self.kv_role.map(Role::as_str)),
            "kv_rank" => json!(self.kv_rank),
            "kv_parallel_size" => json!(self.kv_parallel_size),
            "kv_ip" => json!(self.kv_ip),
            "kv_port" => json!(self.kv_port),
            "kv_connector_extra_config" => Value::Object(self.extra().clone()),
            "kv_connector_module_path" => json!(self.kv_connector_module_path),
            "enable_permute_local_kv" => json!(self.enable_permute_local_kv),
            "kv_load_failure_policy" => json!(self.kv_load_failure_policy.as_str()),
            _ => Value::Null,
        }
    }
}

fn check_names(object: &Map<String, Value>) -> Result<()> {
    let names = FIELDS.iter().map(|field| field.name);
    let Some(key) = object.keys().find(|key| !names.clone().any(|name| name == key.as_str()))
    else {
        return Ok(());
    };
    let hint = nearest(key, names.clone())
        .map_or_else(String::new, |near| format!("; did you mean {near}?"));
    let current = FIELDS
        .iter()
        .filter(|field| !field.removed)
        .map(|field| field.name)
        .collect::<Vec<_>>()
        .join(", ");
    Err(ErrorKind::Invalid.because(format!(
        "unexpected keyword argument {key:?}: KVTransferConfig has no such field{hint}; fields: {current}"
    )))
}

fn platform(surroundings: &Surroundings) -> BufferDevice {
    if surroundings.gpu { BufferDevice::Cuda } else { BufferDevice::Cpu }
}
