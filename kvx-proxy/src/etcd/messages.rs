//! The gateway's answers.

use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize, Serializer};

use super::base64;

/// A key or a value: base64 in JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Base64(pub(super) Vec<u8>);

impl<'de> Deserialize<'de> for Base64 {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        base64::decode(&text).map(Base64).ok_or_else(|| D::Error::custom("not base64"))
    }
}

impl Serialize for Base64 {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&base64::encode(&self.0))
    }
}

/// A number of 64 bits: a string in JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Number(pub(super) u64);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let number = String::deserialize(from)?.parse();
        number.map(Number).map_err(|_| D::Error::custom("not a number in a string"))
    }
}

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&self.0)
    }
}

/// A key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeyValue {
    pub(crate) key: Vec<u8>,
    pub(crate) value: Vec<u8>,
    /// The revision at which the key was created.
    pub(crate) created: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Header {
    pub(super) revision: Number,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Entry {
    pub(super) key: Base64,
    value: Base64,
    create_revision: Number,
    pub(super) mod_revision: Number,
}

impl From<Entry> for KeyValue {
    fn from(entry: Entry) -> Self {
        KeyValue { key: entry.key.0, value: entry.value.0, created: entry.create_revision.0 }
    }
}

/// The answer of `/v3/kv/range`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RangeAnswer {
    pub(super) header: Header,
    pub(super) kvs: Vec<Entry>,
    pub(super) more: bool,
}

/// The answer of `/v3/lease/grant`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) struct LeaseAnswer {
    pub(super) id: Number,
    pub(super) ttl: Number,
}

/// The answer of `/v3/lease/keepalive`: without a lifetime the lease is lost.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "UPPERCASE")]
pub(super) struct KeepAliveAnswer {
    pub(super) ttl: Number,
}

/// The answer of `/v3/auth/authenticate`.
#[derive(Debug, Deserialize)]
pub(super) struct TokenAnswer {
    pub(super) token: String,
}

/// An answer whose fields are not needed.
#[derive(Debug, Deserialize)]
pub(super) struct EmptyAnswer {}

/// A line of an answer that is a stream.
#[derive(Debug, Deserialize)]
pub(super) struct Streamed<T> {
    pub(super) result: Option<T>,
    pub(super) error: Option<ErrorAnswer>,
}

/// An error: that of an answer has `error` and `code`, that of a stream `grpc_code`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ErrorAnswer {
    #[serde(alias = "grpc_code")]
    pub(super) code: Option<u32>,
    pub(super) message: Option<String>,
    error: Option<String>,
}

impl ErrorAnswer {
    pub(super) fn text(self) -> Option<String> {
        self.message.or(self.error)
    }
}

/// A line of `/v3/watch`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct WatchAnswer {
    pub(super) header: Header,
    pub(super) created: bool,
    pub(super) canceled: bool,
    pub(super) compact_revision: Number,
    pub(super) cancel_reason: String,
    pub(super) events: Vec<Event>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Event {
    /// `DELETE`, or nothing for a put.
    pub(super) r#type: String,
    pub(super) kv: Entry,
}

pub(super) fn fuzz(bytes: &[u8]) {
    let _ = serde_json::from_slice::<RangeAnswer>(bytes);
    let _ = serde_json::from_slice::<Streamed<KeepAliveAnswer>>(bytes);
    let _ = serde_json::from_slice::<ErrorAnswer>(bytes);
    if let Ok(Streamed { result: Some(answer), .. }) =
        serde_json::from_slice::<Streamed<WatchAnswer>>(bytes)
    {
        for event in answer.events {
            let text = base64::encode(&event.kv.key.0);
            assert_eq!(base64::decode(&text), Some(event.kv.key.0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_etcd_3_4_are_read() {
        let range = r#"{"header":{"cluster_id":"1","revision":"7"},
            "kvs":[{"key":"YQ==","create_revision":"3","mod_revision":"5","version":"2",
            "value":"Yg=="}],"count":"1"}"#;
        let range: RangeAnswer = serde_json::from_str(range).unwrap();
        assert_eq!((range.header.revision.0, range.more), (7, false));
        let entry = KeyValue { key: b"a".into(), value: b"b".into(), created: 3 };
        assert_eq!(range.kvs.into_iter().map(KeyValue::from).collect::<Vec<_>>(), [entry]);
        let line = r#"{"result":{"header":{"revision":"9"},"events":[
            {"kv":{"key":"YQ==","value":"Yg=="}},
            {"type":"DELETE","kv":{"key":"YQ==","mod_revision":"9"}}]}}"#;
        let line: Streamed<WatchAnswer> = serde_json::from_str(line).unwrap();
        let types = line.result.unwrap().events.into_iter().map(|event| event.r#type);
        assert_eq!(types.collect::<Vec<_>>(), ["", "DELETE"]);
        let lost: Streamed<KeepAliveAnswer> =
            serde_json::from_str(r#"{"result":{"header":{},"ID":"4"}}"#).unwrap();
        assert_eq!(lost.result.unwrap().ttl.0, 0);
    }

    #[test]
    fn errors_of_answers_and_of_streams_are_read() {
        let answer = r#"{"error":"lease not found","message":"lease not found","code":5}"#;
        let answer: ErrorAnswer = serde_json::from_str(answer).unwrap();
        assert_eq!(answer.code, Some(5));
        assert_eq!(answer.text().as_deref(), Some("lease not found"));
        let line = r#"{"error":{"grpc_code":14,"http_code":503,"message":"no leader"}}"#;
        let line: Streamed<WatchAnswer> = serde_json::from_str(line).unwrap();
        assert_eq!(line.error.and_then(|error| error.code), Some(14));
    }
}
