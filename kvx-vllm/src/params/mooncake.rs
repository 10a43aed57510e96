//! `kv_transfer_params` of the MooncakeConnector.

use std::fmt;

use serde_json::{Map, Value};

use super::fields::{self, Fields};
use super::{ParamsError, uuid};

/// The id that ties the two legs of a request together. Both legs carry it; the prefill side
/// returns no parameters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MooncakeTransferId(String);

impl MooncakeTransferId {
    /// Creates an id from 16 random bytes, in the form that vLLM's proxies use.
    ///
    /// ```
    /// use kvx_vllm::params::MooncakeTransferId;
    /// assert_eq!(MooncakeTransferId::from_random([7; 16]).as_str(), "xfer-07070707-0707-4707-8707-070707070707");
    /// ```
    pub fn from_random(random: [u8; 16]) -> Self {
        MooncakeTransferId(format!("xfer-{}", uuid::text(random)))
    }

    /// Creates an id from a router's own text.
    ///
    /// # Errors
    ///
    /// An empty text, which vLLM treats as no id.
    pub fn new(text: impl Into<String>) -> Result<Self, ParamsError> {
        let text = text.into();
        if text.is_empty() {
            return Err(ParamsError::new(
                "transfer_id",
                "transfer_id is empty; both legs of a request carry the same one",
            ));
        }
        Ok(MooncakeTransferId(text))
    }

    /// Returns the id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for MooncakeTransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The information that a leg gets about the other leg.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MooncakeLeg {
    /// Prefill the request, and send the blocks to the worker that asks for the transfer id.
    Prefill,
    /// Ask the prefill instance for the blocks.
    Decode {
        /// The engine of the prefill instance's data parallel rank.
        remote_engine_id: String,
        /// The prefill's bootstrap server, with scheme: `http://10.0.0.1:8998`.
        remote_bootstrap_addr: String,
    },
}

/// `kv_transfer_params` of the MooncakeConnector since vLLM 0.16, which has a bootstrap server. See
/// [`OlderMooncakeParams`](super::OlderMooncakeParams) for earlier versions.
///
/// ```
/// use kvx_vllm::params::{MooncakeLeg, MooncakeParams, MooncakeTransferId};
/// # fn main() -> Result<(), kvx_vllm::params::ParamsError> {
/// let params = MooncakeParams::new(MooncakeTransferId::new("xfer-1")?, MooncakeLeg::Prefill);
/// let value = serde_json::json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": "xfer-1"});
/// assert_eq!(params.to_value()?, value);
/// assert_eq!(MooncakeParams::from_value(&value)?, params);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct MooncakeParams {
    /// The transfer that both legs name.
    pub transfer_id: MooncakeTransferId,
    /// The leg that these parameters are for.
    pub leg: MooncakeLeg,
    /// Keys that this version does not know. They are written unchanged.
    pub rest: Map<String, Value>,
}

impl MooncakeParams {
    /// Creates parameters without further keys.
    pub fn new(transfer_id: MooncakeTransferId, leg: MooncakeLeg) -> Self {
        MooncakeParams { transfer_id, leg, rest: Map::new() }
    }

    /// Reads the value of a `kv_transfer_params` key.
    ///
    /// # Errors
    ///
    /// A missing key, a key of the wrong type, or flags of which not exactly one is true.
    pub fn from_value(value: &Value) -> Result<Self, ParamsError> {
        let mut fields = Fields::new(fields::object("kv_transfer_params", value)?.clone());
        let decode = fields.flag("do_remote_prefill")?;
        let prefill = fields.flag("do_remote_decode")?;
        let transfer_id = fields
            .text("transfer_id")?
            .map(MooncakeTransferId)
            .ok_or_else(|| missing("transfer_id"))?;
        let leg = match (prefill, decode) {
            (true, false) => MooncakeLeg::Prefill,
            (false, true) => MooncakeLeg::Decode {
                remote_engine_id: fields
                    .text("remote_engine_id")?
                    .ok_or_else(|| missing("remote_engine_id"))?,
                remote_bootstrap_addr: fields
                    .text("remote_bootstrap_addr")?
                    .ok_or_else(|| missing("remote_bootstrap_addr"))?,
            },
            (false, false) | (true, true) => {
                return Err(ParamsError::new(
                    "do_remote_decode",
                    "one of do_remote_decode (for the prefill leg) and do_remote_prefill (for the decode leg) must \
                     be true",
                ));
            }
        };
        Ok(MooncakeParams { transfer_id, leg, rest: fields.rest() })
    }

    /// Writes the parameters as JSON.
    ///
    /// # Errors
    ///
    /// An empty engine id or bootstrap address, or a known key in [`rest`](Self::rest).
    pub fn to_value(&self) -> Result<Value, ParamsError> {
        let mut object = self.rest.clone();
        if let Some(key) =
            object.iter().find(|(key, value)| KEYS.contains(&key.as_str()) && !value.is_null())
        {
            return Err(ParamsError::new(
                "rest",
                format!("rest holds {}, which has its own field; set the field instead", key.0),
            ));
        }
        let mut put = |key: &str, value: Value| object.insert(key.to_owned(), value);
        put("do_remote_decode", (self.leg == MooncakeLeg::Prefill).into());
        put("do_remote_prefill", (self.leg != MooncakeLeg::Prefill).into());
        put("transfer_id", self.transfer_id.as_str().into());
        if let MooncakeLeg::Decode { remote_engine_id, remote_bootstrap_addr } = &self.leg {
            for (key, text) in [
                ("remote_engine_id", remote_engine_id),
                ("remote_bootstrap_addr", remote_bootstrap_addr),
            ] {
                if text.is_empty() {
                    return Err(missing(key));
                }
                put(key, text.as_str().into());
            }
        }
        Ok(Value::Object(object))
    }
}

const KEYS: [&str; 5] = [
    "do_remote_decode",
    "do_remote_prefill",
    "transfer_id",
    "remote_engine_id",
    "remote_bootstrap_addr",
];

fn missing(key: &'static str) -> ParamsError {
    ParamsError::new(key, format!("kv_transfer_params has no {key}; the router must set it"))
}
