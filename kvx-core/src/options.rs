//! Options as operators write them: the JSON object `kv_connector_extra_config`, with a table per backend.

use std::time::Duration;

use serde_json::{Map, Value};

use crate::names::nearest;
use crate::{Error, ErrorKind, Result};

/// The object `kv_connector_extra_config`. Each backend reads the table of its own name.
///
/// ```
/// # use kvx_core as kvx;
/// let options = kvx::Options::parse(r#"{"tcp": {"bind": "127.0.0.1", "ports": "7000-7010"}}"#)?;
/// let tcp = options.table("tcp", &["bind", "ports"])?;
/// assert_eq!(tcp.text("bind")?, Some("127.0.0.1"));
/// let error = options.table("tcp", &["bnd", "port"]).unwrap_err();
/// assert_eq!(error.to_string(), r#""tcp.bind" is not an option; did you mean "tcp.bnd"? known: bnd, port"#);
/// # Ok::<(), kvx::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options(Map<String, Value>);

impl Options {
    /// No options: every default.
    pub fn new() -> Self {
        Self::default()
    }

    /// From the parsed object.
    pub fn from_json(object: Map<String, Value>) -> Self {
        Options(object)
    }

    /// From JSON text. Errors: `Invalid` with the place of the mistake.
    pub fn parse(text: &str) -> Result<Self> {
        match serde_json::from_str(text) {
            Ok(Value::Object(object)) => Ok(Options(object)),
            Ok(_) => Err(Error::new(
                ErrorKind::Invalid,
                "options are a JSON object: write {\"tcp\": {…}}",
            )),
            Err(error) => {
                Err(Error::new(ErrorKind::Invalid, format!("options are not JSON: {error}")))
            }
        }
    }

    /// Sets `table.key`, replacing what was there.
    pub fn set(&mut self, table: &str, key: &str, value: impl Into<Value>) -> &mut Self {
        let entry = self.0.entry(table).or_insert_with(|| Value::Object(Map::new()));
        if !entry.is_object() {
            *entry = Value::Object(Map::new());
        }
        if let Value::Object(object) = entry {
            object.insert(key.into(), value.into());
        }
        self
    }

    /// The names in `backends`, as written; `None` without the key.
    pub fn backends(&self) -> Result<Option<Vec<String>>> {
        self.top().texts("backends")
    }

    /// The names in `unauthenticated`, as written: backends to be opened although their libraries do not ask for the
    /// fleet's secret.
    pub fn unauthenticated(&self) -> Result<Vec<String>> {
        Ok(self.top().texts("unauthenticated")?.unwrap_or_default())
    }

    /// The keys beside the tables, which vLLM's connectors share (`mooncake_protocol`, `num_workers`): whoever reads
    /// one leaves the others alone.
    pub fn top(&self) -> Table<'_> {
        Table { name: "", object: Some(&self.0) }
    }

    /// The table `name`, empty if absent. Errors: `Invalid` when it is not an object or has a key that is not in
    /// `known`: the nearest known one is named.
    pub fn table(&self, name: &'static str, known: &[&str]) -> Result<Table<'_>> {
        let object = match self.0.get(name) {
            None | Some(Value::Null) => None,
            Some(Value::Object(object)) => Some(object),
            Some(other) => {
                return Err(Error::new(
                    ErrorKind::Invalid,
                    format!("option {name:?} is {other}; write an object {{…}}"),
                ));
            }
        };
        for key in object.into_iter().flat_map(Map::keys) {
            if !known.contains(&key.as_str()) {
                let hint = nearest(key, known.iter().copied())
                    .map_or_else(String::new, |near| format!("did you mean \"{name}.{near}\"? "));
                let known = known.join(", ");
                return Err(Error::new(
                    ErrorKind::Invalid,
                    format!("\"{name}.{key}\" is not an option; {hint}known: {known}"),
                ));
            }
        }
        Ok(Table { name, object })
    }
}

/// One backend's options.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a> {
    name: &'static str,
    object: Option<&'a Map<String, Value>>,
}

impl<'a> Table<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.and_then(|object| object.get(key)).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, found: &Value, wanted: &str) -> Error {
        let dot = if self.name.is_empty() { "" } else { "." };
        Error::new(
            ErrorKind::Invalid,
            format!("option \"{}{dot}{key}\" is {found}; write {wanted}", self.name),
        )
    }

    /// A string.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.get(key)
            .map(|value| value.as_str().ok_or_else(|| self.wrong(key, value, "a string")))
            .transpose()
    }

    /// A list of strings; one string counts as a list of one.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<String>>> {
        let wrong = |value| self.wrong(key, value, "a list of strings");
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(one)) => Ok(Some(vec![one.clone()])),
            Some(value @ Value::Array(items)) => items
                .iter()
                .map(|item| item.as_str().map(str::to_owned).ok_or_else(|| wrong(value)))
                .collect::<Result<_>>()
                .map(Some),
            Some(value) => Err(wrong(value)),
        }
    }

    /// An object whose values are strings, in the order of its keys.
    pub fn pairs(&self, key: &str) -> Result<Option<Vec<(String, String)>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wrong = || self.wrong(key, value, "an object of strings");
        let pairs = value.as_object().ok_or_else(wrong)?.iter();
        pairs
            .map(|(key, value)| Ok((key.clone(), value.as_str().ok_or_else(wrong)?.to_owned())))
            .collect::<Result<_>>()
            .map(Some)
    }

    /// A whole number within `range`.
    pub fn number(&self, key: &str, range: std::ops::RangeInclusive<u64>) -> Result<Option<u64>> {
        self.get(key)
            .map(|value| {
                value.as_u64().filter(|number| range.contains(number)).ok_or_else(|| {
                    self.wrong(
                        key,
                        value,
                        &format!("a whole number from {} to {}", range.start(), range.end()),
                    )
                })
            })
            .transpose()
    }

    /// true or false.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.get(key)
            .map(|value| value.as_bool().ok_or_else(|| self.wrong(key, value, "true or false")))
            .transpose()
    }

    /// A time in seconds, fractions allowed, above zero and at most a day.
    pub fn seconds(&self, key: &str) -> Result<Option<Duration>> {
        self.get(key)
            .map(|value| {
                value
                    .as_f64()
                    .filter(|seconds| *seconds > 0.0 && *seconds <= 86_400.0)
                    .map(Duration::from_secs_f64)
                    .ok_or_else(|| self.wrong(key, value, "seconds, above 0 and at most 86400"))
            })
            .transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_type_names_the_key_and_what_to_write() {
        let options =
            Options::parse(r#"{"tcp": {"connections": "two", "peer_timeout": -1}, "shm": 3}"#)
                .unwrap();
        let tcp = options.table("tcp", &["connections", "peer_timeout"]).unwrap();
        let error = tcp.number("connections", 1..=64).unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"option "tcp.connections" is "two"; write a whole number from 1 to 64"#
        );
        assert!(tcp.seconds("peer_timeout").is_err());
        assert!(options.table("shm", &[]).is_err());
    }

    #[test]
    fn absent_tables_and_keys_are_none() {
        let options = Options::new();
        let table = options.table("tcp", &["bind"]).unwrap();
        assert_eq!(table.text("bind").unwrap(), None);
        assert_eq!(options.backends().unwrap(), None);
    }

    #[test]
    fn backends_keep_their_order() {
        let options = Options::parse(r#"{"backends": ["tcp", "SHM"]}"#).unwrap();
        assert_eq!(options.backends().unwrap().unwrap(), ["tcp", "SHM"]);
    }
}
