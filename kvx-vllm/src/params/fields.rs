//! Typed values from JSON objects. Absent, null and wrongly typed values are distinguished.

use serde_json::{Map, Value};

use super::ParamsError;

/// An object whose known keys are removed as they are read. The keys that remain are unknown to
/// this version.
///
/// A known key that is null remains, so that it is written as null again.
pub(super) struct Fields {
    left: Map<String, Value>,
}

impl Fields {
    pub(super) fn new(object: Map<String, Value>) -> Self {
        Fields { left: object }
    }

    pub(super) fn rest(self) -> Map<String, Value> {
        self.left
    }

    pub(super) fn take<T>(
        &mut self,
        key: &'static str,
        wanted: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ParamsError> {
        match self.left.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                let read = read(value).ok_or_else(|| wrong(key, wanted, value))?;
                self.left.remove(key);
                Ok(Some(read))
            }
        }
    }

    /// Reads a flag. A flag is always written, so null is read as false.
    pub(super) fn flag(&mut self, key: &'static str) -> Result<bool, ParamsError> {
        let flag = self.take(key, "true or false", Value::as_bool)?.unwrap_or(false);
        self.left.remove(key);
        Ok(flag)
    }

    pub(super) fn text(&mut self, key: &'static str) -> Result<Option<String>, ParamsError> {
        self.take(key, "a non-empty string", |value| {
            value.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
        })
    }

    pub(super) fn number(&mut self, key: &'static str) -> Result<Option<u64>, ParamsError> {
        self.take(key, "a non-negative integer", Value::as_u64)
    }

    /// Reads a number of ranks, at least one.
    pub(super) fn size(&mut self, key: &'static str) -> Result<Option<u32>, ParamsError> {
        self.take(key, "a positive integer", |value| {
            value.as_u64().and_then(|size| u32::try_from(size).ok()).filter(|size| *size > 0)
        })
    }

    pub(super) fn port(&mut self, key: &'static str) -> Result<Option<u16>, ParamsError> {
        self.take(key, "a port number from 1 to 65535", |value| {
            value.as_u64().and_then(|port| u16::try_from(port).ok()).filter(|port| *port > 0)
        })
    }
}

/// Returns the error for a value of the wrong type. A long value is cut.
pub(super) fn wrong(key: &'static str, wanted: &str, value: &Value) -> ParamsError {
    let mut shown = value.to_string();
    if let Some((end, _)) = shown.char_indices().nth(80) {
        shown.truncate(end);
        shown.push('…');
    }
    ParamsError::new(key, format!("{key} is {shown}; expected {wanted}"))
}

/// Returns a value as an object.
pub(super) fn object<'a>(
    what: &'static str,
    value: &'a Value,
) -> Result<&'a Map<String, Value>, ParamsError> {
    value.as_object().ok_or_else(|| wrong(what, "a JSON object", value))
}
