//! The operator's input: one merged object, and the source of each value.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Map, Value};

use super::arguments::{self, ArgumentPiece};
use super::human;
use super::tables;
use super::warning::{Concern, Warning};
use crate::Version;
use kvx_core::{ErrorKind, Result};

/// The source of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ValueSource {
    /// The JSON object: the given text, or the value of `--kv-transfer-config`.
    Json,
    /// A dotted argument, as it was written.
    Argument(String),
    /// An environment variable.
    Environment(String),
    /// Not written: the default of this version.
    Default(Version),
    /// Not written: kvx's own default, and the version's different default.
    Own(Version, &'static str),
    /// Not written: generated at random.
    Random,
}

impl fmt::Display for ValueSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ValueSource::Json => f.write_str("the JSON object"),
            ValueSource::Argument(written) => f.write_str(written),
            ValueSource::Environment(name) => write!(f, "environment {name}"),
            ValueSource::Default(version) => write!(f, "default of {version}"),
            ValueSource::Own(version, other) => {
                write!(f, "kvx's own default; {version} has {other}")
            }
            ValueSource::Random => f.write_str("drawn at random"),
        }
    }
}

/// The merged input, before it is checked against the fields of `KVTransferConfig`.
///
/// Precedence is vLLM's. The last of several JSON objects counts. Dotted arguments override it,
/// wherever they stand; later ones override earlier ones. Objects merge and lists are appended. Put
/// arguments from a file before those of the command line. In `kv_connector_extra_config` the key
/// `"tcp.seal"` means `{"tcp": {"seal": …}}`; the same holds for all of kvx's own tables.
///
/// ```
/// # use kvx_vllm as kvx;
/// use kvx::config::Given;
/// let (given, rest) = Given::from_arguments([
///     "--port", "8100",
///     "--kv-transfer-config", r#"{"kv_connector": "NixlConnector", "kv_role": "kv_both"}"#,
///     "--kv-transfer-config.kv_connector_extra_config.backends+", "LIBFABRIC",
/// ])?;
/// assert_eq!(rest, ["--port", "8100"]);
/// assert_eq!(given.object()["kv_connector_extra_config"]["backends"][0], "LIBFABRIC");
/// # Ok::<(), kvx_core::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Given {
    object: Map<String, Value>,
    sources: BTreeMap<Vec<String>, Vec<ValueSource>>,
    warnings: Vec<Warning>,
    anything: bool,
}

impl Given {
    /// Reads JSON text, in which `80m` and `1K` are numbers. Errors: `Invalid`, with the text at
    /// the mistake.
    pub fn from_json(text: &str) -> Result<Self> {
        let object = human::object(text)?;
        check_depth(&object)?;
        Ok(Given::from_object(object))
    }

    /// Takes a parsed object.
    pub fn from_object(object: Map<String, Value>) -> Self {
        let mut given = Given { anything: true, ..Given::default() };
        given.merge(object, &ValueSource::Json);
        given
    }

    /// Takes `--kv-transfer-config` and its dotted arguments out of a command line. Returns the
    /// other arguments, in their order, for the program's own parser. Arguments after a bare `--`
    /// are not read.
    ///
    /// Errors: `Invalid` for a missing value, an empty key, a number that does not fit, or invalid
    /// JSON.
    pub fn from_arguments<T: Into<String>>(
        arguments: impl IntoIterator<Item = T>,
    ) -> Result<(Self, Vec<String>)> {
        let taken = arguments::take(arguments.into_iter().map(Into::into).collect())?;
        let mut given = Given { warnings: taken.warnings, ..Given::default() };
        let (mut objects, mut dotted) = (Vec::new(), Vec::new());
        for piece in taken.pieces {
            match piece {
                ArgumentPiece::Object(object) => objects.push(object),
                ArgumentPiece::Dotted { written, keys, value } => {
                    dotted.push((written, keys, value))
                }
            }
        }
        given.anything = !objects.is_empty() || !dotted.is_empty();
        if objects.len() > 1 {
            given.warn(
                Concern::Duplicate,
                format!(
                    "--kv-transfer-config is given {} times; only the last one counts",
                    objects.len()
                ),
            );
        }
        if !objects.is_empty() && !dotted.is_empty() {
            given.warn(
                Concern::Differs,
                "dotted arguments are merged into the JSON object of --kv-transfer-config: objects merge, lists \
                 add up, \
                 other values are replaced; vLLM drops the JSON object in this case: write only one of the two \
                 forms",
            );
        }
        if let Some(object) = objects.pop() {
            given.merge(object, &ValueSource::Json);
        }
        let mut duplicates = Vec::new();
        for (written, keys, value) in dotted {
            duplicates.extend(given.set(keys, value, &ValueSource::Argument(written)));
        }
        if !duplicates.is_empty() {
            duplicates.dedup();
            given.warn(
                Concern::Duplicate,
                format!(
                    "set more than once by dotted arguments: {}; the last one counts",
                    duplicates.join(", ")
                ),
            );
        }
        check_depth(&given.object)?;
        Ok((given, taken.rest))
    }

    fn warn(&mut self, concern: Concern, sentence: impl Into<String>) {
        self.warnings.push(Warning::new(concern, sentence));
    }

    /// Returns whether the input sets nothing about KV transfer.
    pub fn is_empty(&self) -> bool {
        !self.anything
    }

    /// Returns the merged object, unchecked.
    pub fn object(&self) -> &Map<String, Value> {
        &self.object
    }

    /// Returns the warnings of the merge.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// Returns the keys and the sources of every value that is not an object. A list that was
    /// appended to has several sources.
    pub fn sources(&self) -> impl Iterator<Item = (&[String], &[ValueSource])> {
        self.sources.iter().map(|(keys, sources)| (keys.as_slice(), sources.as_slice()))
    }

    fn merge(&mut self, mut object: Map<String, Value>, source: &ValueSource) -> Vec<String> {
        if let Some(Value::Object(extra)) = object.get_mut("kv_connector_extra_config") {
            nest_flat_keys(extra);
        }
        let mut merging = Merging { sources: &mut self.sources, source, replaced: Vec::new() };
        merging.object(&mut self.object, object, &mut Vec::new());
        merging.replaced
    }

    /// Sets one value. Returns the keys that earlier dotted arguments had set.
    fn set(&mut self, keys: Vec<String>, value: Value, source: &ValueSource) -> Vec<String> {
        let nested = keys
            .into_iter()
            .rev()
            .fold(value, |value, key| Value::Object(Map::from_iter([(key, value)])));
        match nested {
            Value::Object(object) => self.merge(object, source),
            _ => Vec::new(),
        }
    }
}

/// Moves the values of flat keys such as `tcp.seal` into their tables. A key that its table already
/// has stays.
fn nest_flat_keys(extra: &mut Map<String, Value>) {
    let is_flat =
        |key: &&String| key.split_once('.').is_some_and(|(table, _)| tables::names_table(table));
    let flat: Vec<String> = extra.keys().filter(is_flat).cloned().collect();
    for key in flat {
        let (Some((table, option)), Some(value)) = (key.split_once('.'), extra.get(&key).cloned())
        else {
            continue;
        };
        let table = extra.entry(table).or_insert_with(|| Map::new().into());
        if let Some(table) = table.as_object_mut().filter(|table| !table.contains_key(option)) {
            table.insert(option.to_owned(), value);
            extra.remove(&key);
        }
    }
}

/// The deepest nesting of objects and lists. Deeper input is a mistake and could not be written as
/// one JSON text.
const DEEPEST: usize = 100;

fn check_depth(object: &Map<String, Value>) -> Result<()> {
    fn fits(value: &Value, left: usize) -> bool {
        match value {
            Value::Object(object) => left > 0 && object.values().all(|value| fits(value, left - 1)),
            Value::Array(items) => left > 0 && items.iter().all(|value| fits(value, left - 1)),
            _ => true,
        }
    }
    if object.values().all(|value| fits(value, DEEPEST - 1)) {
        return Ok(());
    }
    let sentence = format!(
        "the KV transfer configuration is nested more than {DEEPEST} deep; write flatter objects"
    );
    Err(ErrorKind::Invalid.because(sentence))
}

struct Merging<'a> {
    sources: &'a mut BTreeMap<Vec<String>, Vec<ValueSource>>,
    source: &'a ValueSource,
    replaced: Vec<String>,
}

impl Merging<'_> {
    fn object(
        &mut self,
        into: &mut Map<String, Value>,
        from: Map<String, Value>,
        path: &mut Vec<String>,
    ) {
        for (key, value) in from {
            path.push(key.clone());
            match (into.get_mut(&key), value) {
                (Some(Value::Object(old)), Value::Object(new)) => {
                    if !new.is_empty() {
                        // The old object may have been empty, with its own source.
                        self.sources.remove(path);
                    }
                    self.object(old, new, path);
                }
                (Some(Value::Array(old)), Value::Array(new)) => {
                    old.extend(new);
                    self.sources.entry(path.clone()).or_default().push(self.source.clone());
                }
                (_, value) => {
                    self.forget(path);
                    self.remember(&value, path);
                    into.insert(key, value);
                }
            }
            path.pop();
        }
    }

    /// Removes the sources at and below `path`, which is about to be replaced.
    fn forget(&mut self, path: &[String]) {
        let below: Vec<Vec<String>> = self
            .sources
            .range(path.to_vec()..)
            .map(|(keys, _)| keys)
            .take_while(|keys| keys.starts_with(path))
            .cloned()
            .collect();
        let mut dotted = false;
        for keys in below {
            let sources = self.sources.remove(&keys).unwrap_or_default();
            dotted |= sources.iter().any(|source| matches!(source, ValueSource::Argument(_)));
        }
        if dotted {
            self.replaced.push(path.join("."));
        }
    }

    fn remember(&mut self, value: &Value, path: &mut Vec<String>) {
        match value {
            Value::Object(object) if !object.is_empty() => {
                for (key, value) in object {
                    path.push(key.clone());
                    self.remember(value, path);
                    path.pop();
                }
            }
            _ => {
                self.sources.insert(path.clone(), vec![self.source.clone()]);
            }
        }
    }
}
