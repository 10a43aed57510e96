//! Parses JSON into a value of bounded memory, whatever its shape.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// The most memory of a value, in bytes. As many values exist at once as requests are read into
/// tokens.
const MOST_MEMORY: usize = 32 << 20;
/// The bytes counted for a list that is not empty: its smallest capacity.
const LIST: usize = 4 * size_of::<Value>();
/// The bytes counted for each further element of a list, whose capacity may be twice its length.
const ELEMENT: usize = 2 * size_of::<Value>();
/// The bytes counted for a field of an object. The tree's nodes are at least half full.
const FIELD: usize = 2 * (size_of::<String>() + size_of::<Value>());
/// The bytes counted for the first node of an object, which has space for 11 fields.
const OBJECT: usize = 6 * FIELD;
/// The bytes counted for an allocation in addition to its length.
const ALLOCATION: usize = 32;

/// Parses a text.
///
/// # Errors
///
/// Fails if the text is not JSON, or if its value takes more than [`MOST_MEMORY`].
pub(super) fn parse(text: &[u8]) -> serde_json::Result<Value> {
    let left = Cell::new(MOST_MEMORY);
    let mut reader = serde_json::Deserializer::from_slice(text);
    let value = BoundedValue(&left).deserialize(&mut reader)?;
    reader.end()?;
    Ok(value)
}

/// Builds a value while this many bytes are left.
#[derive(Clone, Copy)]
struct BoundedValue<'a>(&'a Cell<usize>);

impl BoundedValue<'_> {
    fn take<E: Error>(self, bytes: usize) -> Result<(), E> {
        let left = self.0.get().checked_sub(bytes).ok_or_else(|| {
            E::custom(format_args!("the value takes more than {MOST_MEMORY} bytes of memory"))
        })?;
        self.0.set(left);
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for BoundedValue<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for BoundedValue<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any valid JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        self.take::<E>(value.len() + ALLOCATION)?;
        Ok(value.into())
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Value, E> {
        self.take::<E>(value.len() + ALLOCATION)?;
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = elements.next_element_seed(self)? {
            self.take::<A::Error>(if values.is_empty() { LIST } else { ELEMENT })?;
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut values = Map::new();
        while let Some(key) = fields.next_key::<String>()? {
            let field = if values.is_empty() { OBJECT } else { FIELD };
            self.take::<A::Error>(field + key.len() + ALLOCATION)?;
            values.insert(key, fields.next_value_seed(self)?);
        }
        Ok(values.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_serde_json() {
        for text in [
            r#"{"a": [1, -2, 3.5, 1e300, true, null, "x\u00e9", {}], "a": {"b": []}, "c": 18446744073709551615}"#,
            "[]",
            "[1e400]",
            " \"text\" ",
            "[1,]",
            "{} {}",
            "{\"a\"}",
            "",
        ] {
            let (ours, theirs) = (parse(text.as_bytes()), serde_json::from_str::<Value>(text));
            match (ours, theirs) {
                (Ok(ours), Ok(theirs)) => assert_eq!(ours, theirs),
                (Err(ours), Err(theirs)) => assert_eq!(ours.to_string(), theirs.to_string()),
                (ours, theirs) => panic!("{text}: {ours:?}, {theirs:?}"),
            }
        }
        assert!(parse("[".repeat(1000).as_bytes()).unwrap_err().to_string().contains("recursion"));
    }

    #[test]
    fn values_of_every_shape_are_bounded() {
        for part in [r#"{"":0},"#, "0,", "[],", r#"[""],"#, r#"{"a":{"b":{}}},"#] {
            let text = format!("[{}0]", part.repeat((4 << 20) / part.len()));
            let error = parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("bytes of memory"), "{part}: {error}");
        }
        let text = format!("\"{}\"", "a".repeat(16 << 20));
        assert!(parse(text.as_bytes()).is_ok());
        let tokens = format!("[{}0]", "12345,".repeat(400_000));
        assert!(parse(tokens.as_bytes()).is_ok());
    }
}
