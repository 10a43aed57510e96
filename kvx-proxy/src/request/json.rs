//! JSON of clients that stays text. Values take many times the memory of their text, so the proxy
//! parses only what it decides by, and keeps slices of the received bytes.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use bytes::Bytes;
use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

/// The most keys of an object, and the longest of them in bytes. OpenAI and vLLM have fewer than
/// 200 short ones.
const KEYS: usize = 1024;
const KEY: usize = 256;
/// The most memory of a key besides its text, here and in copies of the object.
const PER_KEY: usize = 512;

/// A JSON object whose values stay text. Of equal keys, the last one counts.
#[derive(Clone, Debug)]
pub(crate) struct JsonObject {
    /// The received text, unless the object has changed since.
    text: Option<Bytes>,
    fields: BTreeMap<String, Bytes>,
}

impl JsonObject {
    /// Reads an object without its values; `None` if the JSON is another value.
    ///
    /// # Errors
    ///
    /// Fails if [`Value`] would not parse the text, or if it has too many or too long keys.
    pub(crate) fn new(text: Bytes) -> serde_json::Result<Option<Self>> {
        // Engines parse values that stay text here: they must not accept what this parser rejects.
        walk(&text, &mut DiscardingSink)?;
        if !text.trim_ascii_start().starts_with(b"{") {
            return Ok(None);
        }
        let mut object = JsonObject { text: None, fields: BTreeMap::new() };
        let repeats = serde_json::Deserializer::from_slice(&text)
            .deserialize_map(Fields { text: &text, fields: &mut object.fields })?;
        object.text = (!repeats).then_some(text);
        Ok(Some(object))
    }

    /// Returns the text of a value.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        let text = std::str::from_utf8(self.fields.get(key)?);
        debug_assert!(text.is_ok(), "JSON is text");
        text.ok()
    }

    /// Returns the bytes of a value, without a copy.
    pub(crate) fn value(&self, key: &str) -> Option<Bytes> {
        self.fields.get(key).cloned()
    }

    /// Returns the keys with the texts of their values, in the order of the keys.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.fields.iter().map(|(key, value)| (key.as_str(), &value[..]))
    }

    /// Removes a key. Returns false if there was none.
    pub(crate) fn remove(&mut self, key: &str) -> bool {
        let had = self.fields.remove(key).is_some();
        if had {
            self.text = None;
        }
        had
    }

    pub(crate) fn insert(&mut self, key: &str, value: Bytes) {
        self.text = None;
        self.fields.insert(key.to_owned(), value);
    }

    /// Returns the object with empty texts, lists and objects, whose contents decide nothing.
    pub(crate) fn sketch(&self) -> Map<String, Value> {
        let sketched = |value: &Bytes| match value.first() {
            Some(b'"') => Value::String(String::new()),
            Some(b'[') => Value::Array(Vec::new()),
            Some(b'{') => Value::Object(Map::new()),
            _ => serde_json::from_slice(value).unwrap_or_default(),
        };
        self.fields.iter().map(|(key, value)| (key.clone(), sketched(value))).collect()
    }

    /// Returns the text of this object after the changes that were made to its sketch.
    pub(crate) fn with_changes(&self, sketch: &Value, changed: &Value) -> Bytes {
        let (Value::Object(before), Value::Object(after)) = (sketch, changed) else {
            debug_assert!(false, "a sketch is an object, and so is every leg");
            return self.text();
        };
        let mut object = self.clone();
        for key in before.keys().filter(|key| !after.contains_key(*key)) {
            object.remove(key);
        }
        for (key, value) in after.iter().filter(|(key, value)| before.get(*key) != Some(*value)) {
            object.insert(key, value.to_string().into());
        }
        object.text()
    }

    /// Returns the text of this object: as received, unless it has changed since.
    pub(crate) fn text(&self) -> Bytes {
        if let Some(text) = &self.text {
            return text.clone();
        }
        let length = self.fields.iter().map(|(key, value)| key.len() + value.len() + 4);
        let mut text = Vec::with_capacity(length.sum::<usize>() + 2);
        for (key, value) in &self.fields {
            text.push(if text.is_empty() { b'{' } else { b',' });
            text.extend_from_slice(Value::from(key.as_str()).to_string().as_bytes());
            text.push(b':');
            text.extend_from_slice(value);
        }
        if text.is_empty() {
            text.push(b'{');
        }
        text.push(b'}');
        text.into()
    }

    /// Returns the length of the values, and the memory of the keys.
    pub(crate) fn memory(&self) -> (usize, usize) {
        let values = self.fields.values().map(Bytes::len).sum();
        (values, self.fields.keys().map(|key| PER_KEY + 4 * key.len()).sum())
    }
}

/// A reader of an object's fields. Returns true if it has equal keys.
struct Fields<'a> {
    text: &'a Bytes,
    fields: &'a mut BTreeMap<String, Bytes>,
}

impl<'de> Visitor<'de> for Fields<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<bool, A::Error> {
        let mut repeats = false;
        while let Some(key) = map.next_key::<String>()? {
            if key.len() > KEY || self.fields.len() >= KEYS {
                return Err(A::Error::custom(format!(
                    "an object with a key of more than {KEY} bytes, or more than {KEYS} keys"
                )));
            }
            let value: &RawValue = map.next_value()?;
            let value = self.text.slice_ref(value.get().as_bytes());
            repeats |= self.fields.insert(key, value).is_some();
        }
        Ok(repeats)
    }
}

/// A receiver of the parts of a value.
trait Sink {
    fn part(&mut self, kind: u8, bytes: &[u8]);
}

/// A receiver that only lets the value be parsed.
struct DiscardingSink;

impl Sink for DiscardingSink {
    fn part(&mut self, _: u8, _: &[u8]) {}
}

impl Sink for Sha256 {
    fn part(&mut self, kind: u8, bytes: &[u8]) {
        self.update([kind]);
        self.update((bytes.len() as u64).to_le_bytes());
        self.update(bytes);
    }
}

/// Adds a value to a hash: without white space, and with escapes resolved. Ignores text that is not
/// JSON.
pub(crate) fn hash_into(hash: &mut Sha256, json: &[u8]) {
    // Bodies have been parsed before.
    let parsed = walk(json, hash);
    debug_assert!(parsed.is_ok(), "{parsed:?}");
}

/// Parses one value as strictly as [`Value`], and keeps nothing of it.
fn walk(json: &[u8], sink: &mut impl Sink) -> serde_json::Result<()> {
    let mut from = serde_json::Deserializer::from_slice(json);
    Walk(sink).deserialize(&mut from)?;
    from.end()
}

struct Walk<'a, S>(&'a mut S);

impl<'de, S: Sink> DeserializeSeed<'de> for Walk<'_, S> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de, S: Sink> Visitor<'de> for Walk<'_, S> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        self.0.part(b'n', &[]);
        Ok(())
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.0.part(b'b', &[value.into()]);
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.0.part(b'i', &value.to_le_bytes());
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        self.0.part(b'u', &value.to_le_bytes());
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        self.0.part(b'f', &value.to_bits().to_le_bytes());
        Ok(())
    }

    fn visit_str<E>(self, value: &str) -> Result<(), E> {
        self.0.part(b's', value.as_bytes());
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        self.0.part(b'[', &[]);
        while list.next_element_seed(Walk(&mut *self.0))?.is_some() {}
        self.0.part(b']', &[]);
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        self.0.part(b'{', &[]);
        while map.next_key_seed(Walk(&mut *self.0))?.is_some() {
            map.next_value_seed(Walk(&mut *self.0))?;
        }
        self.0.part(b'}', &[]);
        Ok(())
    }
}

/// Calls `each` with the texts of a list's elements until it returns false. Does nothing if the
/// JSON is no list.
pub(crate) fn for_each<'a>(json: &'a str, each: impl FnMut(&'a str) -> bool) {
    struct Elements<F>(F);
    impl<'de, F: FnMut(&'de str) -> bool> Visitor<'de> for Elements<F> {
        type Value = ();

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list")
        }

        fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<(), A::Error> {
            while let Some(element) = list.next_element::<&RawValue>()? {
                if !(self.0)(element.get()) {
                    break;
                }
            }
            Ok(())
        }
    }
    // Expected: an error where `each` wanted no more.
    let _ = serde_json::Deserializer::from_str(json).deserialize_seq(Elements(each));
}

/// Returns the text of a value in an object; `None` if there is none, or the JSON is no object.
pub(crate) fn get<'a>(json: &'a str, key: &str) -> Option<&'a str> {
    struct Field<'k>(&'k str);
    impl<'de> Visitor<'de> for Field<'_> {
        type Value = Option<&'de str>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut found = None;
            while let Some(is_it) = map.next_key_seed(Equals(self.0))? {
                match is_it {
                    true => found = Some(map.next_value::<&RawValue>()?.get()),
                    false => _ = map.next_value::<IgnoredAny>()?,
                }
            }
            Ok(found)
        }
    }
    serde_json::Deserializer::from_str(json).deserialize_map(Field(key)).ok().flatten()
}

/// Calls `each` with the keys and values of an object, in their order.
pub(crate) fn for_each_field<'a>(json: &'a str, each: impl FnMut(&str, &'a str)) {
    struct Pairs<F>(F);
    impl<'de, F: FnMut(&str, &'de str)> Visitor<'de> for Pairs<F> {
        type Value = ();

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
            while let Some((key, value)) = map.next_entry::<Cow<'de, str>, &RawValue>()? {
                (self.0)(&key, value.get());
            }
            Ok(())
        }
    }
    // It fails for another value, which has no fields.
    let _ = serde_json::Deserializer::from_str(json).deserialize_map(Pairs(each));
}

/// A comparison with a text, without a copy.
struct Equals<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Equals<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<bool, D::Error> {
        from.deserialize_str(WithText(|text: &str| text == self.0))
    }
}

/// A reader of a text, without a copy of texts that have no escapes.
struct WithText<F>(F);

impl<R, F: FnOnce(&str) -> R> Visitor<'_> for WithText<F> {
    type Value = R;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text")
    }

    fn visit_str<E>(self, text: &str) -> Result<R, E> {
        Ok((self.0)(text))
    }
}

/// Calls `then` with a text, and returns what it returns; `None` if the JSON is no text.
pub(crate) fn with_text<R>(json: &str, then: impl FnOnce(&str) -> R) -> Option<R> {
    serde_json::Deserializer::from_str(json).deserialize_str(WithText(then)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(text: &str) -> JsonObject {
        JsonObject::new(Bytes::copy_from_slice(text.as_bytes())).unwrap().unwrap()
    }

    #[test]
    fn an_object_is_its_text_until_it_changes() {
        let text = r#" {"b": [1, {"c": 1.50}], "a" : "\u0061"} "#;
        let mut read = object(text);
        assert_eq!(read.text(), text);
        assert_eq!(
            (read.get("a"), read.get("b")),
            (Some(r#""\u0061""#), Some(r#"[1, {"c": 1.50}]"#))
        );
        assert!(!read.remove("c") && read.text() == text);
        read.insert("c", Bytes::from_static(b"null"));
        assert!(read.remove("a"));
        assert_eq!(read.text(), r#"{"b":[1, {"c": 1.50}],"c":null}"#);
        assert_eq!(object("{}").text(), "{}");
        let mut last = object(r#"{"a": 1}"#);
        last.remove("a");
        assert_eq!(last.text(), "{}");
    }

    #[test]
    fn of_equal_keys_the_last_one_is_left() {
        let read = object(r#"{"a": 1, "\u0061": 2, "b\n": 3}"#);
        assert_eq!(read.text(), r#"{"a":2,"b\n":3}"#);
    }

    #[test]
    fn changes_of_a_sketch_are_changes_of_the_object() {
        let read = object(
            r#"{"text": "long", "list": [1], "map": {"a": 1}, "n": 2, "stream": true, "gone": [2]}"#,
        );
        let sketch = Value::Object(read.sketch());
        let expected = serde_json::json!({"text": "", "list": [], "map": {}, "n": 2, "stream": true, "gone": []});
        assert_eq!(sketch, expected);
        assert_eq!(read.with_changes(&sketch, &sketch), read.text());
        let mut changed = sketch.clone();
        changed["stream"] = false.into();
        changed["added"] = serde_json::json!({"x": [1]});
        changed.as_object_mut().unwrap().remove("gone");
        let text =
            r#"{"added":{"x":[1]},"list":[1],"map":{"a": 1},"n":2,"stream":false,"text":"long"}"#;
        assert_eq!(read.with_changes(&sketch, &changed), text);
    }

    #[test]
    fn what_values_reject_is_rejected() {
        let deep = [[b'['; 200], [b']'; 200]].concat();
        let wide = format!(
            "{{{}\"x\":0}}",
            (0..KEYS).map(|key| format!("\"{key}\":0,")).collect::<String>()
        );
        let long = format!("{{\"{}\":0}}", "x".repeat(KEY + 1));
        for text in [
            &b""[..],
            b"{",
            b"{} x",
            b"[1,]",
            b"nul",
            b"NaN",
            b"1e999",
            b"\xff",
            b"\"\xff\"",
            br#""\ud800""#,
            br#"{"x": "\ud800"}"#,
            br#"{"\ud800": 1}"#,
            &deep,
            wide.as_bytes(),
            long.as_bytes(),
        ] {
            let read = JsonObject::new(Bytes::copy_from_slice(text));
            assert!(read.is_err(), "{}", text.escape_ascii());
        }
        for other in ["[1]", " \"a\"", "5", "null"] {
            assert!(JsonObject::new(other.into()).unwrap().is_none(), "{other}");
        }
    }

    #[test]
    fn equal_values_have_equal_hashes() {
        let hash = |text: &str| {
            let mut hash = Sha256::new();
            hash_into(&mut hash, text.as_bytes());
            <[u8; 32]>::from(hash.finalize())
        };
        assert_eq!(
            hash(r#"{"a": ["b", 1, -1, 0.5, null]}"#),
            hash(r#"{"\u0061":["b",1,-1,5e-1,null]}"#)
        );
        let texts = [
            r#"["a","b"]"#,
            r#"["ab"]"#,
            r#"[["a"],"b"]"#,
            r#"{"a":"b"}"#,
            "1",
            "1.0",
            "\"1\"",
            "true",
        ];
        let hashes: std::collections::HashSet<_> = texts.iter().map(|text| hash(text)).collect();
        assert_eq!(hashes.len(), texts.len());
    }

    #[test]
    fn parts_are_read_without_the_rest() {
        let list = r#"[1, "a", {"b": [2]}]"#;
        let mut elements = Vec::new();
        for_each(list, |element| {
            elements.push(element);
            elements.len() < 2
        });
        assert_eq!(elements, ["1", "\"a\""]);
        for_each("{}", |_| panic!("an object has no elements"));
        let text = r#"{"a": 1, "\u0062": {"a": 2}, "a": [3]}"#;
        assert_eq!((get(text, "a"), get(text, "b")), (Some("[3]"), Some(r#"{"a": 2}"#)));
        assert_eq!((get(text, "c"), get("[]", "a")), (None, None));
        assert_eq!(with_text(r#""\u0061b""#, str::len), Some(2));
        assert_eq!(with_text("5", str::len), None);
    }
}
