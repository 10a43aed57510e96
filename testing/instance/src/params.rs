//! Reads `kv_transfer_params` as strictly as vLLM 0.33 behaves: parameters that stop its engine are
//! an error here.

use serde_json::{Map, Value};

use crate::model::count_blocks;
use crate::settings::Connector;

/// The work that a request's parameters ask for.
#[derive(Debug, PartialEq)]
pub(crate) enum Task {
    Alone,
    /// Prefill, and keep the blocks under `transfer_id` or else under the request's own name.
    Prefill {
        transfer_id: Option<String>,
        earlier: Option<Source>,
    },
    Decode(Source),
}

/// The location of blocks.
#[derive(Debug, PartialEq)]
pub(crate) struct Source {
    pub(crate) host: String,
    pub(crate) port: u16,
    /// True if the address is that of a bootstrap server, which lists the engine's address.
    pub(crate) bootstrap: bool,
    pub(crate) engine: String,
    /// The name of the blocks.
    pub(crate) name: String,
    /// True if the blocks may not be computed yet.
    pub(crate) waits: bool,
}

/// A violated rule, and whether the violation stops vLLM's engine.
#[derive(Debug, PartialEq)]
pub(crate) struct Broken {
    pub(crate) sentence: String,
    pub(crate) stops: bool,
}

fn stops(sentence: impl Into<String>) -> Broken {
    Broken { sentence: sentence.into(), stops: true }
}

fn odd(sentence: impl Into<String>) -> Broken {
    Broken { sentence: sentence.into(), stops: false }
}

/// Reads the parameters of a request with `tokens` prompt tokens. `own_name` is the request's local
/// name, without the engine's suffix.
pub(crate) fn read(
    params: &Value,
    connector: Connector,
    tokens: usize,
    own_name: &str,
) -> Result<Task, Broken> {
    let params = match params {
        Value::Null => return Ok(Task::Alone),
        Value::Object(params) => params,
        other => return Err(odd(format!("kv_transfer_params is {other}; vLLM would answer 400"))),
    };
    match (flag(params, "do_remote_prefill")?, flag(params, "do_remote_decode")?) {
        (true, true) => Err(stops("do_remote_prefill and do_remote_decode are both true")),
        (false, false) => Err(odd("kv_transfer_params has neither flag")),
        (false, true) => {
            let transfer_id = match connector {
                Connector::Mooncake => Some(text(params, "transfer_id")?),
                Connector::Pull | Connector::Push => None,
            };
            let names_earlier = params.get("remote_request_id").is_some_and(|id| !id.is_null());
            let earlier = names_earlier.then(|| source(params, 0)).transpose()?;
            Ok(Task::Prefill { transfer_id, earlier })
        }
        (true, false) => match connector {
            Connector::Mooncake => bootstrapped(params).map(Task::Decode),
            Connector::Push => {
                expect_mode(params, "push")?;
                number(params, "tp_size")?;
                let mut source = source(params, 0)?;
                // The prefill identifies the request by the common part of both ids.
                own_name.clone_into(&mut source.name);
                source.waits = true;
                Ok(Task::Decode(source))
            }
            Connector::Pull => {
                expect_mode(params, "pull")?;
                source(params, count_blocks(tokens)).map(Task::Decode)
            }
        },
    }
}

fn source(params: &Map<String, Value>, blocks: usize) -> Result<Source, Broken> {
    if blocks > 0 {
        let groups = params
            .get("remote_block_ids")
            .and_then(Value::as_array)
            .ok_or_else(|| stops("remote_block_ids is not a list"))?;
        for group in groups {
            let ids =
                group.as_array().ok_or_else(|| stops("block ids must be nested per group"))?;
            if !ids.iter().all(Value::is_u64) {
                return Err(stops("a block id is not a number"));
            }
            if ids.len() < blocks {
                return Err(stops(format!(
                    "{} remote blocks, but the prompt needs {blocks}",
                    ids.len()
                )));
            }
        }
        if groups.is_empty() {
            return Err(stops("no remote blocks"));
        }
    }
    Ok(Source {
        host: text(params, "remote_host")?,
        port: number(params, "remote_port")? as u16,
        bootstrap: false,
        engine: text(params, "remote_engine_id")?,
        name: text(params, "remote_request_id")
            .map_err(|broken| Broken { stops: true, ..broken })?,
        waits: false,
    })
}

fn bootstrapped(params: &Map<String, Value>) -> Result<Source, Broken> {
    let address = text(params, "remote_bootstrap_addr")?;
    let wrong = || odd(format!("remote_bootstrap_addr is {address}; it must be http://HOST:PORT"));
    let (host, port) =
        address.strip_prefix("http://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(wrong)?;
    Ok(Source {
        host: host.to_owned(),
        port: port.parse().map_err(|_| wrong())?,
        bootstrap: true,
        engine: text(params, "remote_engine_id")?,
        name: text(params, "transfer_id")?,
        waits: true,
    })
}

fn expect_mode(params: &Map<String, Value>, mode: &str) -> Result<(), Broken> {
    match params.get("transfer_mode") {
        Some(Value::String(named)) if named != mode => {
            Err(odd(format!("transfer_mode is {named}, but the connector's is {mode}")))
        }
        _ => Ok(()),
    }
}

fn flag(params: &Map<String, Value>, key: &str) -> Result<bool, Broken> {
    match params.get(key) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(set)) => Ok(*set),
        Some(other) => Err(odd(format!("{key} is {other}"))),
    }
}

fn text(params: &Map<String, Value>, key: &str) -> Result<String, Broken> {
    let text = params.get(key).and_then(Value::as_str).filter(|text| !text.is_empty());
    text.map(str::to_owned)
        .ok_or_else(|| odd(format!("{key} is missing; vLLM would compute the prompt itself")))
}

fn number(params: &Map<String, Value>, key: &str) -> Result<u64, Broken> {
    let number =
        params.get(key).and_then(Value::as_u64).filter(|number| (1..65_536).contains(number));
    number.ok_or_else(|| odd(format!("{key} is missing; vLLM would compute the prompt itself")))
}
