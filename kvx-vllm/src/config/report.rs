//! A report on a configuration for a person: the merged JSON, every value and its source, the
//! backends.

use std::fmt;

use serde_json::{Map, Value, json};

use super::connectors::ConnectorKind;
use super::defaults::PortRule;
use super::given::ValueSource;
use super::ranks::{BlockRelease, RankNumbers};
use super::surroundings::PORT;
use super::tables::{self, DEFAULTS_OF_VLLM, MooncakeSettings, NixlSettings};
use super::transfer_config::KvTransferConfig;
use super::warning::Warning;
use crate::Version;
use crate::ids::is_loopback;

/// The report that `kvx config` prints. `Display` writes its text.
///
/// ```
/// # use kvx_vllm as kvx;
/// use kvx::config::{ConfigReport, KvTransferConfig, Surroundings};
/// let (config, rest) = KvTransferConfig::from_arguments(
///     ["--kv-transfer-config.kv_connector=NixlConnector", "--kv-transfer-config.kv_role=kv_consumer", "-tp", "2"],
///     &Surroundings::default(),
/// )?;
/// let text = ConfigReport::new(&config, &rest).to_string();
/// assert!(text.contains("--kv-transfer-config.kv_role"));
/// # Ok::<(), kvx_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ConfigReport {
    version: Version,
    merged: Map<String, Value>,
    values: Vec<Line>,
    openings: Vec<Opening>,
    derived: Vec<(&'static str, String)>,
    warnings: Vec<Warning>,
    ignored: Vec<String>,
}

#[derive(Clone, Debug)]
struct Line {
    name: String,
    value: String,
    sources: Vec<ValueSource>,
}

/// A backend that would be opened, or a named backend that cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The backend's name.
    pub name: String,
    /// A remark on the backend; empty for none.
    pub note: String,
}

impl ConfigReport {
    /// Creates a report about `config`. `rest` is the rest of the command line, from
    /// [`KvTransferConfig::from_arguments`]. Parallel sizes are read from it; its other arguments
    /// are listed as ignored.
    pub fn new(config: &KvTransferConfig, rest: &[String]) -> Self {
        let (sizes, ignored) = Sizes::read(rest);
        let as_written = |name| Opening { name, note: String::new() };
        ConfigReport {
            version: config.version(),
            merged: config.given().object().clone(),
            values: values(config),
            openings: config
                .backends()
                .ok()
                .flatten()
                .unwrap_or_default()
                .into_iter()
                .map(as_written)
                .collect(),
            derived: derived(config, sizes),
            warnings: config.warnings().to_vec(),
            ignored,
        }
    }

    /// Sets the backends that the program's registry would open, in order of preference. By default
    /// the report lists them as written.
    #[must_use]
    pub fn openings(mut self, openings: Vec<Opening>) -> Self {
        self.openings = openings;
        self
    }

    /// Adds a derived value that the configuration alone does not determine.
    #[must_use]
    pub fn also(mut self, name: &'static str, text: String) -> Self {
        self.derived.push((name, text));
        self
    }

    /// Returns the report as JSON.
    pub fn to_json(&self) -> Value {
        let line = |line: &Line| {
            let sources: Vec<String> = line.sources.iter().map(ValueSource::to_string).collect();
            json!({"name": line.name, "value": line.value, "from": sources})
        };
        let opening = |opening: &Opening| json!({"name": opening.name, "note": opening.note});
        let warning = |warning: &Warning| json!({"concern": warning.concern().as_str(), "text": warning.sentence()});
        json!({
            "kv_compat": self.version.as_str(),
            "merged": self.merged,
            "values": self.values.iter().map(line).collect::<Vec<_>>(),
            "backends": self.openings.iter().map(opening).collect::<Vec<_>>(),
            "derived": self.derived.iter().map(|(name, text)| json!({"name": name, "text": text})).collect::<Vec<_>>(),
            "warnings": self.warnings.iter().map(warning).collect::<Vec<_>>(),
            "ignored": self.ignored,
        })
    }
}

impl fmt::Display for ConfigReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "KV transfer configuration, with the defaults of {}", self.version)?;
        writeln!(f, "\nmerged JSON\n{:#}", Value::Object(self.merged.clone()))?;
        writeln!(f, "\nvalues and their sources")?;
        let width = |text: fn(&Line) -> &str| {
            self.values
                .iter()
                .map(|line| text(line).chars().count())
                .filter(|width| *width <= 60)
                .max()
                .unwrap_or(0)
        };
        let (names, texts) = (width(|line| &line.name), width(|line| &line.value));
        for line in &self.values {
            let sources =
                line.sources.iter().map(ValueSource::to_string).collect::<Vec<_>>().join(", then ");
            writeln!(f, "  {:names$}  {:texts$}  {sources}", line.name, line.value)?;
        }
        if !self.derived.is_empty() {
            writeln!(f, "\nderived values")?;
        }
        for (name, text) in &self.derived {
            writeln!(f, "  {name}: {text}")?;
        }
        writeln!(f, "\nbackends to open, in order of preference")?;
        for Opening { name, note } in &self.openings {
            let colon = if note.is_empty() { "" } else { ": " };
            writeln!(f, "  {name}{colon}{note}")?;
        }
        if self.openings.is_empty() {
            writeln!(f, "  none named: kvx chooses")?;
        }
        writeln!(f, "\nwarnings")?;
        for warning in &self.warnings {
            writeln!(f, "  {warning}")?;
        }
        if self.warnings.is_empty() {
            writeln!(f, "  none")?;
        }
        if !self.ignored.is_empty() {
            writeln!(f, "\nnot about KV transfer, ignored\n  {}", self.ignored.join(" "))?;
        }
        if self.ignored.iter().any(|argument| argument.split('=').next() == Some("--config")) {
            writeln!(
                f,
                "  (kvx does not read --config files: write its kv-transfer-config on the command line)"
            )?;
        }
        Ok(())
    }
}

fn values(config: &KvTransferConfig) -> Vec<Line> {
    const EXTRA: &str = "kv_connector_extra_config";
    let version = config.version();
    let written =
        |first: &'static str| config.given().sources().filter(move |(keys, _)| keys[0] == first);
    let mut lines = Vec::new();
    for field in config.fields_of_version() {
        let mut found = false;
        for (keys, sources) in written(field) {
            found = true;
            let value = keys.iter().skip(1).try_fold(
                config.given().object().get(field).unwrap_or(&Value::Null),
                |value, key| value.get(key),
            );
            // Coerced fields show the value that was understood, not the text.
            let value = match value {
                Some(value) if field == EXTRA => value.to_string(),
                _ => config.field_value(field).to_string(),
            };
            lines.push(Line { name: keys.join("."), value, sources: sources.to_vec() });
        }
        if !found {
            let (value, source) = match field {
                "engine_id" => ("(a UUID, new at each start)".to_owned(), ValueSource::Random),
                _ => (config.field_value(field).to_string(), ValueSource::Default(version)),
            };
            lines.push(Line { name: field.to_owned(), value, sources: vec![source] });
        }
        for (key, value) in settings(config).into_iter().filter(|_| field == EXTRA) {
            if !config.extra().contains_key(key) {
                let name = format!("{EXTRA}.{key}");
                let other = DEFAULTS_OF_VLLM.iter().find(|(other, _)| *other == key);
                let source = other.map_or(ValueSource::Default(version), |(_, value)| {
                    ValueSource::Own(version, value)
                });
                lines.push(Line { name, value: value.to_string(), sources: vec![source] });
            }
        }
    }
    for (name, value, source) in config.environment().lines(&config.surroundings, version) {
        let relevant = match config.connector() {
            Some(ConnectorKind::NixlPull | ConnectorKind::NixlPush) => !name.contains("MOONCAKE"),
            Some(ConnectorKind::Mooncake) => !name.contains("NIXL"),
            Some(ConnectorKind::Multi) => true,
            _ => false,
        };
        if relevant || matches!(source, ValueSource::Environment(_)) {
            lines.push(Line { name: name.to_owned(), value, sources: vec![source] });
        }
    }
    lines
}

/// Returns the connector's settings by key.
fn settings(config: &KvTransferConfig) -> Vec<(&'static str, Value)> {
    match config.connector() {
        Some(ConnectorKind::NixlPull | ConnectorKind::NixlPush) => {
            nixl(config.nixl(), config.version())
        }
        Some(ConnectorKind::Mooncake) => mooncake(config.mooncake(), config.version()),
        _ => Vec::new(),
    }
}

fn nixl(settings: &NixlSettings, version: Version) -> Vec<(&'static str, Value)> {
    let seconds = |time: std::time::Duration| json!(time.as_secs_f64());
    let reads = |key| tables::is_read(key, version);
    let mut out = vec![("num_threads", json!(settings.num_threads))];
    if reads("enforce_handshake_compat") {
        out.push(("enforce_handshake_compat", json!(settings.enforce_handshake_compat)));
    }
    if reads("enable_cross_layers_blocks") {
        out.push(("enable_cross_layers_blocks", json!(settings.enable_cross_layers_blocks)));
    }
    if reads("kv_lease_duration") {
        out.push(("kv_lease_duration", seconds(settings.kv_lease_duration)));
        out.push(("decoder_kv_blocks_ttl", seconds(settings.decoder_kv_blocks_ttl)));
        out.push(("push_registration_timeout", seconds(settings.push_registration_timeout)));
        out.push(("engine_ttl", settings.engine_ttl.map_or(json!(0), seconds)));
    }
    if reads("bidirectional_kv_xfer") {
        out.push(("bidirectional_kv_xfer", json!(settings.bidirectional_kv_xfer)));
        out.push(("kv_recompute_threshold", json!(settings.kv_recompute_threshold)));
    }
    out.push(("load_timeout", seconds(settings.load_timeout)));
    out.push(("kvx_digest", json!(settings.kvx_digest)));
    out
}

fn mooncake(settings: &MooncakeSettings, version: Version) -> Vec<(&'static str, Value)> {
    let mut out = vec![
        ("num_workers", json!(settings.num_workers)),
        ("mooncake_protocol", json!(settings.mooncake_protocol)),
        ("device_name", json!(settings.device_name)),
    ];
    if version.has_bootstrap_server() {
        out.push(("bootstrap_server_address", json!(settings.bootstrap_server_address)));
    }
    out
}

fn derived(config: &KvTransferConfig, sizes: Sizes) -> Vec<(&'static str, String)> {
    let mut out = Vec::new();
    let connector = config.connector();
    if matches!(connector, Some(ConnectorKind::NixlPull | ConnectorKind::NixlPush)) {
        let host = &config.environment().side_channel_host;
        out.push((
            "side channel",
            format!(
                "host {host}, {}; {}",
                ports(sizes, |rank| config.side_channel_port(rank)),
                port_rule(config)
            ),
        ));
        if opens_tcp(config) {
            out.push(("kvx's TCP", tcp(config, host)));
        }
        let release = match config.block_release() {
            BlockRelease::After(after) => format!("{} s after the prefill", after.as_secs_f64()),
            BlockRelease::Lease(lease) => format!(
                "{} s after the prefill, or {} s after the last heartbeat, which is sent every {} s",
                lease.duration.as_secs_f64(),
                lease.extension().as_secs_f64(),
                lease.heartbeat().as_secs_f64()
            ),
        };
        out.push(("unfetched blocks are freed", release));
    }
    // RIXL is opened only by name. An explicit list shows which peers its backends reach.
    let nixl = matches!(connector, None | Some(ConnectorKind::NixlPull | ConnectorKind::NixlPush));
    if nixl && matches!(config.backends(), Ok(None)) {
        out.push((
            "vLLM peers",
            "they cannot load from this engine, and it loads only from peers with KVX in their NIXL: add RIXL to \
             kv_connector_extra_config.backends, or KVX if their NIXL has it"
                .into(),
        ));
    }
    if connector == Some(&ConnectorKind::Mooncake) {
        let external = config.mooncake().bootstrap_server_address.as_deref();
        let text = match external {
            Some(address) => format!("at {address}"),
            None => ports(sizes, |rank| config.mooncake_port(rank)),
        };
        let name = if config.version().has_bootstrap_server() {
            "bootstrap server"
        } else {
            "side channel"
        };
        out.push((name, text));
    }
    if connector.is_some() {
        out.push((
            "memory",
            match config.buffer_device() {
                super::BufferDevice::Cpu => "host".into(),
                device => device.to_string(),
            },
        ));
    }
    out
}

fn opens_tcp(config: &KvTransferConfig) -> bool {
    let is = |name: &str, wanted: &str| name.eq_ignore_ascii_case(wanted);
    match config.backends() {
        Ok(Some(names)) => {
            names.iter().any(|name| is(name, "TCP")) || names.iter().all(|name| is(name, "KVX"))
        }
        Ok(None) => true,
        Err(_) => false,
    }
}

/// Describes where kvx's TCP listens. Only the engine's machine knows its addresses.
fn tcp(config: &KvTransferConfig, host: &str) -> String {
    match config.extra().get("tcp").and_then(|tcp| tcp.get("bind")?.as_str()) {
        Some(bind) => format!("listens at {bind} (tcp.bind)"),
        None if is_loopback(host) => "listens at 127.0.0.1; for peers on other hosts set \
             VLLM_NIXL_SIDE_CHANNEL_HOST, or tcp.bind"
            .to_owned(),
        None => {
            format!("listens at {host} if that is an address of this machine, else at 127.0.0.1")
        }
    }
}

/// Returns the rule that derives a rank's port, and the source of the base port.
fn port_rule(config: &KvTransferConfig) -> String {
    let base = config.environment().side_channel_port;
    let offset = match config.version().defaults().ports {
        PortRule::PerEngine => "dp rank",
        PortRule::PerWorker => "dp rank x tp size + tp rank",
    };
    let origin = match config.surroundings.variables.contains_key(PORT) {
        true => format!("set by {PORT}"),
        false if base == 5557 => "vLLM's default up to 0.11.0 (5600 since)".into(),
        false => "vLLM's default since 0.11.1 (5557 before)".into(),
    };
    format!("{base} + {offset}; {base} is {origin}")
}

/// Returns `port 5600`, or the port of each rank if they differ.
fn ports(sizes: Sizes, port: impl Fn(RankNumbers) -> kvx_core::Result<u16>) -> String {
    let mut found: Vec<u16> = Vec::new();
    for dp in 0..sizes.dp {
        for tp in 0..sizes.tp {
            match port(RankNumbers { dp, tp, tp_size: sizes.tp }) {
                Ok(port) if found.contains(&port) => {}
                Ok(port) => found.push(port),
                Err(error) => return error.to_string(),
            }
        }
    }
    match found.as_slice() {
        [port] => format!("port {port}"),
        several => {
            let ports = several.iter().map(u16::to_string).collect::<Vec<_>>().join(" ");
            format!("ports {ports} (by dp rank, then by tp rank)")
        }
    }
}

/// The parallel sizes of a vLLM command line.
#[derive(Clone, Copy)]
struct Sizes {
    dp: u32,
    tp: u32,
}

impl Sizes {
    fn read(rest: &[String]) -> (Self, Vec<String>) {
        let (mut sizes, mut ignored) = (Sizes { dp: 1, tp: 1 }, Vec::new());
        let mut arguments = rest.iter();
        while let Some(argument) = arguments.next() {
            let (name, inline) = match argument.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (argument.as_str(), None),
            };
            let size = match name.replace('_', "-").as_str() {
                "--tensor-parallel-size" | "-tp" => &mut sizes.tp,
                "--data-parallel-size" | "-dp" => &mut sizes.dp,
                _ => {
                    ignored.push(argument.clone());
                    continue;
                }
            };
            let mut ahead = arguments.clone();
            let value = inline.or_else(|| ahead.next().map(String::as_str));
            match value.and_then(|value| value.parse().ok()).filter(|size| (1..=64).contains(size))
            {
                Some(read) => {
                    *size = read;
                    if inline.is_none() {
                        arguments = ahead;
                    }
                }
                None => ignored.push(argument.clone()),
            }
        }
        (sizes, ignored)
    }
}
