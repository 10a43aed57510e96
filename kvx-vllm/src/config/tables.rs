//! The keys of `kv_connector_extra_config`, as data: kvx's own tables, and the keys of vLLM's
//! connectors.

use std::time::Duration;

use serde_json::{Map, Value};

use super::fields;
use super::warning::{Concern, Warning};
use crate::Version;
use kvx_core::backend::nearest;
use kvx_core::{ErrorKind, Result};

/// One of kvx's own tables in `kv_connector_extra_config`: a backend's options, under the backend's
/// name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionTable {
    /// The table's key, the backend's name in lower case.
    pub name: &'static str,
    /// Other names of the backend. They are not valid keys; the error names the right one.
    pub aliases: &'static [&'static str],
    /// All keys of the table.
    pub keys: &'static [&'static str],
}

/// All of kvx's own tables. Other keys in them are errors: a backend with a new option must add it
/// to its row.
pub const OPTION_TABLES: &[OptionTable] = &[
    OptionTable {
        name: "tcp",
        aliases: &[],
        keys: &["advertise", "bind", "connections", "max_connections", "ports", "seal"],
    },
    OptionTable { name: "shm", aliases: &[], keys: &["foreign_memory"] },
    OptionTable { name: "ucx", aliases: &[], keys: &["net_devices", "set", "tls"] },
    OptionTable { name: "libfabric", aliases: &["ofi"], keys: &["domain", "provider", "rails"] },
    OptionTable {
        name: "mooncake",
        aliases: &[],
        keys: &[
            "any_version",
            "device_name",
            "host",
            "location",
            "metadata",
            "mooncake_protocol",
            "num_workers",
        ],
    },
    OptionTable {
        name: "rixl",
        aliases: &["nixl"],
        keys: &["any_version", "params", "plugin", "progress_thread"],
    },
];

#[derive(Clone, Copy)]
enum Shape {
    Texts,
    Text,
    Flag,
    Whole,
    Number,
    Seconds,
    Factors,
    Any,
}

struct KnownKey {
    name: &'static str,
    shape: Shape,
    since: Version,
    until: Version,
}

impl KnownKey {
    fn is_read(&self, version: Version) -> bool {
        (self.since..=self.until).contains(&version)
    }
}

const fn known(name: &'static str, shape: Shape) -> KnownKey {
    KnownKey { name, shape, since: Version::V0_9, until: Version::V0_33 }
}

const fn recent(name: &'static str, shape: Shape) -> KnownKey {
    KnownKey { since: Version::V0_22, ..known(name, shape) }
}

/// A key of MooncakeConnector that kvx accepts and does not implement.
const REPLAY: &str = "prefill_side_swa_replay";

/// The top-level keys of `kv_connector_extra_config` that vLLM's connectors and kvx read.
const KNOWN_KEYS: &[KnownKey] = &[
    known("backends", Shape::Texts),
    known("unauthenticated", Shape::Texts),
    known("kv_compat", Shape::Any),
    known("num_threads", Shape::Whole),
    known("load_timeout", Shape::Seconds),
    known("kvx_digest", Shape::Flag),
    known("factors", Shape::Factors),
    known("side_channel_bind", Shape::Text),
    known("allowed_hosts", Shape::Texts),
    known("allow_unsigned_params", Shape::Texts),
    recent("kv_lease_duration", Shape::Seconds),
    recent("decoder_kv_blocks_ttl", Shape::Seconds),
    KnownKey { since: Version::V0_21, ..known("kv_recompute_threshold", Shape::Whole) },
    KnownKey { since: Version::V0_21, ..known("bidirectional_kv_xfer", Shape::Flag) },
    recent("push_registration_timeout", Shape::Seconds),
    recent("engine_ttl", Shape::Number),
    KnownKey { since: Version::V0_16, ..known("enforce_handshake_compat", Shape::Flag) },
    KnownKey {
        since: Version::V0_16,
        until: Version::V0_28,
        ..known("enable_cross_layers_blocks", Shape::Flag)
    },
    known("num_workers", Shape::Whole),
    known("mooncake_protocol", Shape::Text),
    known("device_name", Shape::Text),
    KnownKey { since: Version::V0_16, ..known("bootstrap_server_address", Shape::Text) },
    KnownKey { since: Version::V0_20, ..known(REPLAY, Shape::Flag) },
    known("connectors", Shape::Any),
];

/// Returns whether `version` reads this key.
pub(super) fn is_read(key: &str, version: Version) -> bool {
    KNOWN_KEYS.iter().any(|known| known.name == key && known.is_read(version))
}

fn extra(key: &str) -> String {
    format!("kv_connector_extra_config.{key}")
}

fn check_shape(key: &str, value: &Value, shape: Shape) -> Result<()> {
    let key = &extra(key);
    match shape {
        Shape::Texts => fields::texts(key, value).map(drop),
        Shape::Text => fields::text(key, value).map(drop),
        Shape::Flag => fields::flag(key, value).map(drop),
        Shape::Whole => fields::whole(key, value, 0..=i64::from(u32::MAX)).map(drop),
        Shape::Number => fields::number(key, value).map(drop),
        Shape::Seconds => fields::seconds(key, value).map(drop),
        Shape::Factors => factors_of(key, value).map(drop),
        Shape::Any => Ok(()),
    }
}

/// Checks all of `kv_connector_extra_config`. Returns warnings for questionable entries that are
/// not errors.
pub(super) fn check(object: &Map<String, Value>, version: Version) -> Result<Vec<Warning>> {
    let mut warnings = Vec::new();
    for (key, value) in object {
        if let Some(table) = OPTION_TABLES.iter().find(|table| table.name == key) {
            check_table(table, value)?;
        } else if let Some(known) = KNOWN_KEYS.iter().find(|known| known.name == key) {
            check_shape(key, value, known.shape)?;
            if let (Shape::Factors, Value::Object(factors)) = (known.shape, value) {
                warnings.extend(unknown_factors(factors));
            }
            if key == REPLAY && value == &Value::Bool(true) {
                let sentence = format!("{} has no effect in kvx; remove it", extra(key));
                warnings.push(Warning::new(Concern::Unknown, sentence));
            }
            if !known.is_read(version) {
                let sentence =
                    format!("{} is not read by {version}; kvx ignores it: remove it", extra(key));
                warnings.push(Warning::new(Concern::Version, sentence));
            }
        } else {
            warnings.push(unknown(key, value)?);
        }
    }
    if object.get("backends").is_some_and(Value::is_string) {
        warnings.push(Warning::new(
            Concern::Differs,
            "kv_connector_extra_config.backends is one string; kvx reads it as a list of one, vLLM as a list of \
             letters: write a list, or backends+ as a dotted argument",
        ));
    }
    Ok(warnings)
}

/// The factors in the compatibility hashes of all vLLM versions.
const FACTORS: &[&str] = &[
    "attn_backend_name",
    "cache_dtype",
    "cross_layers_blocks",
    "dtype",
    "head_size",
    "is_hma_enabled",
    "model",
    "nixl_connector_version",
    "num_hidden_layers",
    "num_kv_heads",
    "speculative_config",
    "transfer_mode",
    "vllm_version",
];

fn factors_of<'a>(key: &str, value: &'a Value) -> Result<&'a Map<String, Value>> {
    fn has_fraction(value: &Value) -> bool {
        match value {
            Value::Number(number) => number.is_f64(),
            Value::Array(items) => items.iter().any(has_fraction),
            Value::Object(object) => object.values().any(has_fraction),
            _ => false,
        }
    }
    let wrong =
        |wanted: &str| ErrorKind::Invalid.because(format!("{key} is {value}; write {wanted}"));
    let Value::Object(object) = value else {
        return Err(wrong("an object of factors, {\"model\": …}"));
    };
    match object.iter().find(|(_, value)| has_fraction(value)) {
        Some((name, _)) => Err(wrong(&format!(
            "{name} without a fraction: kvx cannot hash fractions as vLLM does"
        ))),
        None => Ok(object),
    }
}

/// Returns warnings for factors that no known version has, which may be misspelt. They are hashed
/// all the same.
fn unknown_factors(factors: &Map<String, Value>) -> Vec<Warning> {
    let unknown = factors.keys().filter(|name| !FACTORS.contains(&name.as_str()));
    let warning = |name: &String| {
        let hint = nearest(name, FACTORS.iter().copied())
            .map_or_else(String::new, |near| format!("; did you mean {near}?"));
        let key = extra("factors");
        Warning::new(
            Concern::Unknown,
            format!("{key}.{name} is hashed, but no vLLM up to 0.33 has that factor{hint}"),
        )
    };
    unknown.map(warning).collect()
}

fn check_table(table: &OptionTable, value: &Value) -> Result<()> {
    let Value::Object(object) = value else {
        let name = extra(table.name);
        let sentence =
            format!("{name} is {value}; write an object with keys of: {}", table.keys.join(", "));
        return Err(ErrorKind::Invalid.because(sentence));
    };
    let Some(key) = object.keys().find(|key| !table.keys.contains(&key.as_str())) else {
        return Ok(());
    };
    let name = table.name;
    let hint = nearest(key, table.keys.iter().copied())
        .map_or_else(String::new, |near| format!("; did you mean {name}.{near}?"));
    let known = match table.keys {
        [] => format!("; the table {name} has no keys: remove it"),
        keys => format!("; known: {}", keys.join(", ")),
    };
    Err(ErrorKind::Invalid.because(format!("{}.{key} is not an option{hint}{known}", extra(name))))
}

/// Keys that affect security. A misspelt one is an error, since an operator would rely on it.
const SECURITY_KEYS: &[&str] =
    &["allow_unsigned_params", "allowed_hosts", "side_channel_bind", "unauthenticated"];

/// Returns the table with this name or alias, in any letter case.
fn table_called(name: &str) -> Option<&'static OptionTable> {
    let lower = name.to_ascii_lowercase();
    OPTION_TABLES
        .iter()
        .find(|table| table.name == lower || table.aliases.contains(&lower.as_str()))
}

/// Returns whether a key names a table, also in another letter case or by an alias. The error then
/// names the right key.
pub(super) fn names_table(name: &str) -> bool {
    table_called(name).is_some()
}

/// Returns a warning for an unknown key, which is kept. Tables under another name of a backend and
/// misspelt security keys are errors.
fn unknown(key: &str, value: &Value) -> Result<Warning> {
    let refused = |sentence: String| Err(ErrorKind::Invalid.because(sentence));
    if let Some(table) = table_called(key).filter(|_| value.is_object()) {
        return refused(format!("{} is not a table; write {}", extra(key), extra(table.name)));
    }
    if key.split_once('.').is_some_and(|(table, _)| names_table(table)) {
        return refused(format!(
            "{} is set twice, once inside its table: remove one of them",
            extra(key)
        ));
    }
    if key.to_ascii_lowercase().contains("secret") {
        return refused(format!(
            "{} is not read: kvx reads the fleet's secret from the file that KVX_SECRET_FILE names",
            extra(key)
        ));
    }
    if let Some(table) =
        OPTION_TABLES.iter().find(|table| table.name == "tcp" && table.keys.contains(&key))
    {
        return refused(format!(
            "{} is not an option; write {}.{key}",
            extra(key),
            extra(table.name)
        ));
    }
    let names = KNOWN_KEYS
        .iter()
        .map(|known| known.name)
        .chain(OPTION_TABLES.iter().map(|table| table.name));
    let near = nearest(key, names);
    if let Some(near) = near.filter(|near| SECURITY_KEYS.contains(near)) {
        return refused(format!("{} is not an option; did you mean {near}?", extra(key)));
    }
    let hint = near.map_or_else(String::new, |near| format!("; did you mean {near}?"));
    Ok(Warning::new(
        Concern::Unknown,
        format!("{} is kept, but nothing in kvx or vLLM's connectors reads it{hint}", extra(key)),
    ))
}

/// The default of `num_threads`: progress threads of a backend that has this setting. vLLM's
/// default is 4. In kvx each thread is a worker with its own connections, so it must be asked for.
pub const NUM_THREADS: u32 = 1;

/// The keys whose default differs from vLLM's, with vLLM's default.
pub(super) const DEFAULTS_OF_VLLM: &[(&str, &str)] =
    &[("num_threads", "4"), ("load_timeout", "none"), ("kvx_digest", "none")];

/// The values of `kv_connector_extra_config` that NixlConnector reads, with their defaults. Keys
/// with a duration take a number of seconds.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct NixlSettings {
    /// `num_threads`: threads of a UCX backend, [`NUM_THREADS`]; 4 in vLLM.
    pub num_threads: u32,
    /// `kv_lease_duration`: how long a prefill instance keeps blocks without a heartbeat, 30 s.
    pub kv_lease_duration: Duration,
    /// `decoder_kv_blocks_ttl`: how long a decode instance keeps blocks for the next turn, 480 s.
    pub decoder_kv_blocks_ttl: Duration,
    /// `push_registration_timeout`: how long a decode instance waits for a push, by default as
    /// `decoder_kv_blocks_ttl`.
    pub push_registration_timeout: Duration,
    /// `kv_recompute_threshold`: fewer tokens than this are recomputed rather than read from a
    /// decode instance, 64.
    pub kv_recompute_threshold: u32,
    /// `bidirectional_kv_xfer`: the prefill side also reads from the decode side, false.
    pub bidirectional_kv_xfer: bool,
    /// `engine_ttl`: how long an idle peer is remembered, an hour; `None` (0 or less): forever.
    pub engine_ttl: Option<Duration>,
    /// `enforce_handshake_compat`: reject a peer whose compatibility hash differs, true.
    pub enforce_handshake_compat: bool,
    /// `enable_cross_layers_blocks`: one region for all layers, false; vLLM 0.16 to 0.28 only.
    pub enable_cross_layers_blocks: bool,
    /// `load_timeout`: the longest time of a load after its order, 120 s; kvx only.
    pub load_timeout: Duration,
    /// `kvx_digest`: publish and load blocks with a digest of each block and layer, false; kvx
    /// only.
    pub kvx_digest: bool,
    /// `factors`: hash factors that override those that kvx derives from the model; kvx only.
    pub factors: Map<String, Value>,
    /// `side_channel_bind`: the address on which the side channel listens, if it differs from the
    /// one that peers get; kvx only.
    pub side_channel_bind: Option<String>,
    /// `allowed_hosts`: the only hosts that request parameters may name; `None`: any. kvx only.
    pub allowed_hosts: Option<Vec<String>>,
    /// `allow_unsigned_params`: hosts of engines whose parameters are accepted without a signature;
    /// kvx only.
    pub allow_unsigned_params: Vec<String>,
}

/// The values of `kv_connector_extra_config` that MooncakeConnector reads, with their defaults.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct MooncakeSettings {
    /// `num_workers`: sender threads, 10.
    pub num_workers: u32,
    /// `mooncake_protocol`: `rdma`.
    pub mooncake_protocol: String,
    /// `device_name`: RDMA devices, comma separated; empty: all.
    pub device_name: String,
    /// `bootstrap_server_address`: host and port of a bootstrap server outside the prefill
    /// instance.
    pub bootstrap_server_address: Option<String>,
    /// `prefill_side_swa_replay`: false.
    pub prefill_side_swa_replay: bool,
}

/// A reader of known keys. Keys that the chosen version does not read are treated as absent.
struct KeyReader<'a> {
    object: &'a Map<String, Value>,
    version: Version,
}

impl KeyReader<'_> {
    fn read<T>(
        &self,
        key: &str,
        read: impl FnOnce(&str, &Value) -> Result<T>,
    ) -> Result<Option<T>> {
        let known = KNOWN_KEYS.iter().find(|known| known.name == key);
        let applies =
            known.is_some_and(|known| (known.since..=known.until).contains(&self.version));
        self.object.get(key).filter(|_| applies).map(|value| read(&extra(key), value)).transpose()
    }

    fn whole(&self, key: &str, default: u32) -> Result<u32> {
        let read = |key: &str, value: &Value| fields::whole(key, value, 0..=i64::from(u32::MAX));
        Ok(self.read(key, read)?.and_then(|number| u32::try_from(number).ok()).unwrap_or(default))
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool> {
        Ok(self.read(key, fields::flag)?.unwrap_or(default))
    }

    fn seconds(&self, key: &str, default: Duration) -> Result<Duration> {
        Ok(self.read(key, fields::seconds)?.unwrap_or(default))
    }
}

pub(super) fn nixl(object: &Map<String, Value>, version: Version) -> Result<NixlSettings> {
    let reader = KeyReader { object, version };
    let decoder_kv_blocks_ttl =
        reader.seconds("decoder_kv_blocks_ttl", Duration::from_secs(480))?;
    let engine_ttl = match reader.read("engine_ttl", fields::number)?.unwrap_or(3600.0) {
        seconds if seconds <= 0.0 => None,
        seconds => Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)),
    };
    Ok(NixlSettings {
        num_threads: reader.whole("num_threads", NUM_THREADS)?,
        kv_lease_duration: reader.seconds("kv_lease_duration", Duration::from_secs(30))?,
        decoder_kv_blocks_ttl,
        push_registration_timeout: reader
            .seconds("push_registration_timeout", decoder_kv_blocks_ttl)?,
        kv_recompute_threshold: reader.whole("kv_recompute_threshold", 64)?,
        bidirectional_kv_xfer: reader.flag("bidirectional_kv_xfer", false)?,
        engine_ttl,
        enforce_handshake_compat: reader.flag("enforce_handshake_compat", true)?,
        enable_cross_layers_blocks: reader.flag("enable_cross_layers_blocks", false)?,
        load_timeout: reader.seconds("load_timeout", Duration::from_secs(120))?,
        kvx_digest: reader.flag("kvx_digest", false)?,
        factors: reader
            .read("factors", |key, value| factors_of(key, value).cloned())?
            .unwrap_or_default(),
        side_channel_bind: reader.read("side_channel_bind", fields::text)?,
        allowed_hosts: reader.read("allowed_hosts", fields::texts)?,
        allow_unsigned_params: reader
            .read("allow_unsigned_params", fields::texts)?
            .unwrap_or_default(),
    })
}

pub(super) fn mooncake(object: &Map<String, Value>, version: Version) -> Result<MooncakeSettings> {
    let reader = KeyReader { object, version };
    Ok(MooncakeSettings {
        num_workers: reader.whole("num_workers", 10)?,
        mooncake_protocol: reader
            .read("mooncake_protocol", fields::text)?
            .unwrap_or_else(|| "rdma".into()),
        device_name: reader.read("device_name", fields::text)?.unwrap_or_default(),
        bootstrap_server_address: reader.read("bootstrap_server_address", fields::text)?,
        prefill_side_swa_replay: reader.flag("prefill_side_swa_replay", false)?,
    })
}

/// Reads `backends`, as written. An empty list or an empty name is an error.
pub(super) fn backends(object: &Map<String, Value>) -> Result<Option<Vec<String>>> {
    let Some(value) = object.get("backends") else { return Ok(None) };
    let names = fields::texts(&extra("backends"), value)?;
    if names.is_empty() || names.iter().any(|name| name.trim().is_empty()) {
        let sentence = format!(
            "{} is {value}: it names no backend; remove the key for the default order, or write [\"TCP\"]",
            extra("backends")
        );
        return Err(ErrorKind::Invalid.because(sentence));
    }
    Ok(Some(names))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_and_known_keys_do_not_share_names() {
        for table in OPTION_TABLES {
            assert!(KNOWN_KEYS.iter().all(|known| known.name != table.name), "{}", table.name);
            assert!(table.keys.is_sorted(), "{}: {:?}", table.name, table.keys);
        }
    }

    /// Returns the names in the first column of the table in this section of the page.
    fn documented(page: &str, section: &str) -> Vec<String> {
        let (_, rest) = page.split_once(&format!("\n## {section}\n")).unwrap();
        let section = rest.split("\n## ").next().unwrap_or_default();
        let keys = section.lines().filter(|line| line.starts_with("| `"));
        let mut keys: Vec<_> =
            keys.filter_map(|line| line.split('`').nth(1)).map(str::to_owned).collect();
        keys.sort();
        keys
    }

    #[test]
    fn the_page_of_the_configuration_has_every_key_and_no_other() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/operations/configuration.md");
        let page = std::fs::read_to_string(page).unwrap();
        let mut known: Vec<_> = KNOWN_KEYS.iter().map(|known| known.name.to_owned()).collect();
        known.sort();
        assert_eq!(documented(&page, "kv_connector_extra_config"), known);
        let options = OPTION_TABLES
            .iter()
            .flat_map(|table| table.keys.iter().map(|key| format!("{}.{key}", table.name)));
        let mut options: Vec<_> = options.collect();
        options.sort();
        assert_eq!(documented(&page, "Backends"), options);
        let (_, secure) = page.split_once("\n## kv_connector_extra_config\n").unwrap();
        for key in SECURITY_KEYS {
            assert!(secure.contains(&format!("| `{key}` (S) |")), "{key}");
        }
    }
}
