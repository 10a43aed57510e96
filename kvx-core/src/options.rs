//! Options as operators write them: the JSON object `kv_connector_extra_config`, with one table per
//! backend.

use std::time::Duration;

use serde_json::{Map, Value};

use crate::names::nearest;
use crate::{Error, ErrorKind, Result};

/// The object `kv_connector_extra_config`. Each backend reads the table with its own name.
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
    /// Creates empty options, which select every default.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates options from a parsed JSON object.
    pub fn from_json(object: Map<String, Value>) -> Self {
        Options(object)
    }

    /// Parses options from JSON text.
    ///
    /// # Errors
    /// `Invalid`, with the position of the mistake, if the text is not a JSON object.
    pub fn parse(text: &str) -> Result<Self> {
        match serde_json::from_str(text) {
            Ok(Value::Object(object)) => Ok(Options(object)),
            Ok(_) => {
                Err(ErrorKind::Invalid.because("options are a JSON object: write {\"tcp\": {…}}"))
            }
            Err(error) => Err(ErrorKind::Invalid.because(format!("options are not JSON: {error}"))),
        }
    }

    /// Sets `table.key`, replacing any previous value.
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

    /// Returns the names in `backends`, as written; `None` without the key.
    ///
    /// # Errors
    /// `Invalid` if the value is neither a string nor a list of strings.
    pub fn backends(&self) -> Result<Option<Vec<String>>> {
        self.top().texts("backends")
    }

    /// Returns the names in `unauthenticated`, as written: the backends that may be opened although
    /// their libraries do not check the fleet's secret.
    ///
    /// # Errors
    /// `Invalid` if the value is neither a string nor a list of strings.
    pub fn unauthenticated(&self) -> Result<Vec<String>> {
        Ok(self.top().texts("unauthenticated")?.unwrap_or_default())
    }

    /// Returns the keys outside the backends' tables. vLLM's connectors share them
    /// (`mooncake_protocol`, `num_workers`), so readers ignore the keys that they do not know.
    pub fn top(&self) -> Table<'_> {
        Table { name: "", object: Some(&self.0) }
    }

    /// Returns the table `name`; it is empty if absent.
    ///
    /// # Errors
    /// `Invalid` if it is not an object, or if it has a key that is not in `known`. The message
    /// then suggests the nearest known key.
    pub fn table(&self, name: &'static str, known: &[&str]) -> Result<Table<'_>> {
        let object = match self.0.get(name) {
            None | Some(Value::Null) => None,
            Some(Value::Object(object)) => Some(object),
            Some(other) => {
                return Err(ErrorKind::Invalid
                    .because(format!("option {name:?} is {other}; write an object {{…}}")));
            }
        };
        for key in object.into_iter().flat_map(Map::keys) {
            if !known.contains(&key.as_str()) {
                let hint = nearest(key, known.iter().copied())
                    .map_or_else(String::new, |near| format!("did you mean \"{name}.{near}\"? "));
                let known = known.join(", ");
                return Err(ErrorKind::Invalid
                    .because(format!("\"{name}.{key}\" is not an option; {hint}known: {known}")));
            }
        }
        Ok(Table { name, object })
    }
}

/// The options of one backend.
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
        ErrorKind::Invalid
            .because(format!("option \"{}{dot}{key}\" is {found}; write {wanted}", self.name))
    }

    /// Returns a string; `None` if the key is absent or null.
    ///
    /// # Errors
    /// `Invalid` if the value is not a string.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.get(key)
            .map(|value| value.as_str().ok_or_else(|| self.wrong(key, value, "a string")))
            .transpose()
    }

    /// Returns a list of strings. A single string counts as a list of one.
    ///
    /// # Errors
    /// `Invalid` if the value is neither a string nor a list of strings.
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

    /// Returns an object whose values are strings, in the order of its keys.
    ///
    /// # Errors
    /// `Invalid` if the value is not such an object.
    pub fn pairs(&self, key: &str) -> Result<Option<Vec<(String, String)>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wrong = || self.wrong(key, value, "an object of strings");
        let pairs = value.as_object().ok_or_else(wrong)?.iter();
        pairs
            .map(|(key, value)| Ok((key.clone(), value.as_str().ok_or_else(wrong)?.to_owned())))
            .collect::<Result<_>>()
            .map(Some)
    }

    /// Returns a whole number within `range`.
    ///
    /// # Errors
    /// `Invalid` if the value is not a whole number or lies outside `range`.
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

    /// Returns a boolean.
    ///
    /// # Errors
    /// `Invalid` if the value is neither `true` nor `false`.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.get(key)
            .map(|value| value.as_bool().ok_or_else(|| self.wrong(key, value, "true or false")))
            .transpose()
    }

    /// Returns a duration, written in seconds (fractions are allowed).
    ///
    /// # Errors
    /// `Invalid` if the value is not a number above 0 and at most 86,400 (a day).
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
