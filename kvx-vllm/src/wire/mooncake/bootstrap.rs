//! The bodies of a bootstrap server: registrations of worker addresses, and answers to queries.

use std::collections::BTreeMap;

use kvx_core::{Error, ErrorKind, Result};
use serde_json::{Map, Value, json};

use crate::ids::MAX_RANKS;
use crate::ids::WorkerRank;

/// `POST /register`: the address of a prefill worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerRegistration {
    /// The worker's engine id, with the data-parallel suffix.
    pub engine_id: String,
    /// The worker's data-parallel rank.
    pub dp_rank: u32,
    /// The worker's rank in the engine.
    pub rank: WorkerRank,
    /// The worker's address: `tcp://10.0.0.1:4711`.
    pub addr: String,
    /// The number of seconds within which the worker registers again; otherwise it is considered
    /// dead. kvx only: vLLM registers once, forever.
    pub kvx_ttl: Option<u32>,
}

/// `GET /query`: the engines of an instance by data-parallel rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Directory {
    /// The engines by data-parallel rank.
    pub engines: BTreeMap<u32, ListedEngine>,
}

/// One engine of a [`Directory`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListedEngine {
    /// The engine id.
    pub engine_id: String,
    /// True for a kvx engine. Only kvx's bootstrap server sets it.
    pub is_kvx: bool,
    /// The addresses of the engine's workers.
    pub workers: BTreeMap<WorkerRank, String>,
}

/// The longest name or address that is read, in bytes.
const MAX_TEXT: usize = 1024;

impl WorkerRegistration {
    /// The longest body that is read, in bytes.
    pub const MAX_LEN: usize = 8 << 10;

    /// Encodes the body.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = json!({
            "engine_id": self.engine_id, "dp_rank": self.dp_rank, "tp_rank": self.rank.tp,
            "pp_rank": self.rank.pp, "addr": self.addr,
        });
        if let Some(ttl) = self.kvx_ttl {
            body["kvx_ttl"] = ttl.into();
        }
        body.to_string().into_bytes()
    }

    /// Decodes a body.
    ///
    /// # Errors
    ///
    /// `Malformed`, with the key.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let body = object("registration", bytes, Self::MAX_LEN)?;
        let rank = |key: &'static str| number(&body, key).and_then(|rank| below_ranks(key, rank));
        Ok(WorkerRegistration {
            engine_id: text("engine_id", body.get("engine_id"))?,
            dp_rank: rank("dp_rank")?,
            rank: WorkerRank { pp: rank("pp_rank")?, tp: rank("tp_rank")? },
            addr: address("addr", body.get("addr"))?,
            kvx_ttl: body.contains_key("kvx_ttl").then(|| number(&body, "kvx_ttl")).transpose()?,
        })
    }
}

impl Directory {
    /// The longest body that is read, in bytes.
    pub const MAX_LEN: usize = 4 << 20;
    /// The most workers that are read.
    pub const MAX_WORKERS: usize = 16_384;

    /// Encodes the body.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Map::new();
        for (dp, engine) in &self.engines {
            let mut workers = Map::new();
            for (rank, addr) in &engine.workers {
                let stages =
                    workers.entry(rank.tp.to_string()).or_insert_with(|| Value::Object(Map::new()));
                stages[rank.pp.to_string()] = addr.as_str().into();
            }
            let mut listed = json!({"engine_id": engine.engine_id, "worker_addr": workers});
            if engine.is_kvx {
                listed["kvx"] = true.into();
            }
            body.insert(dp.to_string(), listed);
        }
        Value::Object(body).to_string().into_bytes()
    }

    /// Decodes a body.
    ///
    /// # Errors
    ///
    /// `Malformed`, with the key.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut directory = Directory::default();
        let mut workers = 0;
        for (dp, listed) in object("answer to /query", bytes, Self::MAX_LEN)? {
            let listed =
                listed.as_object().ok_or_else(|| malformed("an entry is not an object"))?;
            let mut engine = ListedEngine {
                engine_id: text("engine_id", listed.get("engine_id"))?,
                is_kvx: listed.get("kvx").and_then(Value::as_bool).unwrap_or(false),
                workers: BTreeMap::new(),
            };
            let by_tp = listed.get("worker_addr").and_then(Value::as_object);
            for (tp, stages) in by_tp.ok_or_else(|| malformed("worker_addr is not an object"))? {
                let stages = stages
                    .as_object()
                    .ok_or_else(|| malformed("worker_addr lists no pipeline stages"))?;
                for (pp, addr) in stages {
                    let rank = WorkerRank { pp: key("pp_rank", pp)?, tp: key("tp_rank", tp)? };
                    engine.workers.insert(rank, address("worker_addr", Some(addr))?);
                    workers += 1;
                    if workers > Self::MAX_WORKERS {
                        return Err(malformed("it lists too many workers"));
                    }
                }
            }
            directory.engines.insert(key("dp_rank", &dp)?, engine);
        }
        Ok(directory)
    }

    /// Returns the engine with this id.
    pub fn engine(&self, engine_id: &str) -> Option<&ListedEngine> {
        self.engines.values().find(|engine| engine.engine_id == engine_id)
    }
}

impl ListedEngine {
    /// Returns the engine's tensor- and pipeline-parallel sizes.
    ///
    /// # Errors
    ///
    /// Some workers have not registered yet.
    pub fn sizes(&self) -> std::result::Result<(u32, u32), String> {
        let most = |of: fn(&WorkerRank) -> u32| {
            self.workers.keys().map(of).max().map_or(0, |most| most + 1)
        };
        let (tp, pp) = (most(|rank| rank.tp), most(|rank| rank.pp));
        let missing = (0..pp).flat_map(|pp| (0..tp).map(move |tp| WorkerRank { pp, tp }));
        match missing.into_iter().find(|rank| !self.workers.contains_key(rank)) {
            _ if tp == 0 => Err(format!("engine {} has no registered worker", self.engine_id)),
            None => Ok((tp, pp)),
            Some(WorkerRank { pp, tp }) => Err(format!(
                "engine {} has not registered its worker of tensor rank {tp}, pipeline rank {pp}",
                self.engine_id
            )),
        }
    }
}

fn object(what: &str, bytes: &[u8], max: usize) -> Result<Map<String, Value>> {
    if bytes.len() > max {
        return Err(malformed(&format!(
            "a {what} of {} bytes exceeds the limit of {max}",
            bytes.len()
        )));
    }
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(malformed(&format!("the {what} is not a JSON object"))),
        Err(error) => Err(malformed(&format!("the {what} is not JSON: {error}"))),
    }
}

fn text(key: &str, value: Option<&Value>) -> Result<String> {
    match value.and_then(Value::as_str) {
        Some(text) if !text.is_empty() && text.len() <= MAX_TEXT => Ok(text.to_owned()),
        _ => Err(malformed(&format!("{key} must be a string of 1 to {MAX_TEXT} bytes"))),
    }
}

/// Reads `tcp://host:port`. kvx connects to no other form of address.
fn address(key: &str, value: Option<&Value>) -> Result<String> {
    let addr = text(key, value)?;
    let port = addr.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':'));
    match port {
        Some((host, port))
            if !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0) =>
        {
            Ok(addr)
        }
        _ => Err(malformed(&format!("{key} is {addr:?}; expected tcp://host:port"))),
    }
}

fn number(body: &Map<String, Value>, key: &str) -> Result<u32> {
    let number =
        body.get(key).and_then(Value::as_u64).and_then(|number| u32::try_from(number).ok());
    number.ok_or_else(|| malformed(&format!("{key} must be a non-negative integer")))
}

fn key(what: &str, text: &str) -> Result<u32> {
    let number =
        text.parse().map_err(|_| malformed(&format!("{what} {text:?} is not a number")))?;
    below_ranks(what, number)
}

fn below_ranks(key: &str, rank: u32) -> Result<u32> {
    if rank < MAX_RANKS {
        return Ok(rank);
    }
    Err(malformed(&format!("{key} is {rank}; ranks are below {MAX_RANKS}")))
}

fn malformed(why: &str) -> Error {
    ErrorKind::Malformed.because(format!("malformed message of a bootstrap server: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    // vLLM 56: the bodies of `/register` and `/query` equal vLLM's
    #[test]
    fn bodies_are_those_of_vllm() {
        let body = br#"{"engine_id":"e0","dp_rank":1,"tp_rank":3,"pp_rank":2,"addr":"tcp://10.0.0.1:4711"}"#;
        let read = WorkerRegistration::decode(body).unwrap();
        assert_eq!((read.dp_rank, read.rank, read.kvx_ttl), (1, WorkerRank { pp: 2, tp: 3 }, None));
        let (encoded, original): (Value, Value) = (
            serde_json::from_slice(&read.encode()).unwrap(),
            serde_json::from_slice(body).unwrap(),
        );
        assert_eq!(encoded, original);
        let body = br#"{"0":{"engine_id":"e0","worker_addr":
            {"0":{"0":"tcp://a:1","1":"tcp://a:2"},"1":{"0":"tcp://a:3"}}}}"#;
        let read = Directory::decode(body).unwrap();
        let engine = read.engine("e0").unwrap();
        assert_eq!(engine.workers[&WorkerRank { pp: 1, tp: 0 }], "tcp://a:2");
        assert!(engine.sizes().unwrap_err().contains("tensor rank 1, pipeline rank 1"));
        assert_eq!(Directory::decode(&read.encode()).unwrap(), read);
        assert!(read.engine("e1").is_none());
    }

    #[test]
    fn invalid_registrations_are_rejected_with_the_key() {
        let good = json!({"engine_id": "e", "dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "addr": "tcp://h:1"});
        assert!(WorkerRegistration::decode(good.to_string().as_bytes()).is_ok());
        for (key, bad) in [
            ("engine_id", json!("")),
            ("engine_id", json!("e".repeat(2000))),
            ("dp_rank", json!(-1)),
            ("tp_rank", json!(1024)),
            ("pp_rank", json!("0")),
            ("addr", json!("http://h:1")),
            ("addr", json!("tcp://h:0")),
            ("addr", json!("tcp://:1")),
        ] {
            let mut body = good.clone();
            body[key] = bad;
            let error = WorkerRegistration::decode(body.to_string().as_bytes()).unwrap_err();
            assert!(error.to_string().contains(key), "{error}");
        }
        assert!(
            WorkerRegistration::decode(&vec![b' '; 9 << 10])
                .unwrap_err()
                .to_string()
                .contains("exceeds")
        );
        for bad in [
            r#"{"x":{}}"#,
            r#"{"0":1}"#,
            r#"{"0":{"engine_id":"e","worker_addr":{"0":{"0":"udp"}}}}"#,
            "[]",
        ] {
            assert!(Directory::decode(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
