//! `kv_transfer_params` of the NixlConnector, of every version, typed.

use serde_core::{Deserialize, Deserializer, Serialize, Serializer, de, ser};
use serde_json::{Map, Value};

use super::ParamsError;
use super::fields::{self, Fields};
use super::mooncake::{MooncakeLeg, MooncakeParams};
use super::remote::{RemoteBlocks, TransferMode};
use crate::Version;

/// `kv_transfer_params` of the NixlConnector, in the bodies of requests and answers.
///
/// One type covers a router's request to a prefill instance, its answer, and the input of a decode
/// instance. It reads flat and nested block ids, as vLLM 0.16 and later write them. It does not
/// write parameters that would stop the engine of the instance that reads them. Keys that this
/// version does not know are kept.
///
/// Engines serialize their parameters with serde, in the form of the version that they were created
/// for or read in. Routers choose the [`Version`] of the instance that reads them
/// ([`to_value`](Self::to_value)).
///
/// ```
/// # mod kvx { pub mod connector { pub use kvx_vllm::{Version, params::TransferParams}; } }
/// use kvx::connector::{TransferParams, Version};
/// # fn main() -> Result<(), kvx_vllm::params::ParamsError> {
/// let answer = serde_json::json!({
///     "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[28, 29, 30]],
///     "remote_engine_id": "prefill-0", "remote_request_id": "cmpl-7-0-bbb18847",
///     "remote_host": "10.0.0.1", "remote_port": 5600, "tp_size": 1, "new_in_0.40": true,
/// });
/// let params = TransferParams::from_value(&answer)?;
/// assert_eq!(params.remote_blocks()?.block_ids, [[28, 29, 30]]);
/// assert_eq!(params.to_value(Version::V0_33)?, answer);
/// assert_eq!(serde_json::json!(params), answer);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct TransferParams {
    /// Asks the decode side to load the KV cache of a remote prefill.
    pub do_remote_prefill: bool,
    /// Asks the prefill side to keep the KV cache for a remote decode. With the `remote_…` keys, it
    /// may first load the blocks of an earlier turn from a decode instance.
    pub do_remote_decode: bool,
    /// The logical block ids on the other side, one list for each KV cache group. A flat list (vLLM
    /// 0.16) is read as one group.
    pub remote_block_ids: Option<Vec<Vec<u32>>>,
    /// The form of the block ids that serde writes.
    pub(super) block_id_form: BlockIdForm,
    /// The engine that holds the blocks.
    pub remote_engine_id: Option<String>,
    /// The request's id in that engine. Its notifications must use it.
    pub remote_request_id: Option<String>,
    /// The host of that engine's side channel.
    pub remote_host: Option<String>,
    /// The port of that engine's side channel.
    pub remote_port: Option<u16>,
    /// The number of tensor-parallel ranks that hold the blocks: the larger of the engine's TP and
    /// DCP sizes.
    pub tp_size: Option<u32>,
    /// The engine's decode-context-parallel size.
    pub dcp_size: Option<u32>,
    /// The engine's pipeline-parallel size.
    pub pp_size: Option<u32>,
    /// The number of tokens that the engine's blocks hold.
    pub remote_num_tokens: Option<u64>,
    /// The time at which a decode instance releases its blocks, in seconds on its own monotonic
    /// clock.
    pub remote_blocks_expiry_time: Option<f64>,
    /// The number of changes to the engine's registration. A higher number than in the last
    /// handshake requires a new handshake.
    pub remote_registration_generation: Option<u64>,
    /// The side that moves the data.
    pub transfer_mode: Option<TransferMode>,
    /// The number of prompt tokens that the prefill instance found in its own cache.
    pub remote_prefill_cached_tokens: Option<u64>,
    /// kvx only: the identity of the blocks' contents, which a reader checks after it has the data.
    /// vLLM ignores it.
    pub kvx_block_reference: Option<String>,
    /// kvx only: the signature of the engine that holds the blocks, over all values that a load
    /// needs.
    pub kvx_signature: Option<String>,
    /// Unknown keys, and known ones that were null. They are written unchanged.
    pub rest: Map<String, Value>,
}

/// The form of block ids in JSON. Parameters that differ only in it are equal: they name the same
/// blocks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum BlockIdForm {
    /// One flat list, as in vLLM 0.16.
    Flat,
    /// A list for each KV cache group.
    #[default]
    PerGroup,
}

impl BlockIdForm {
    /// Returns the form that engines of this version write.
    pub(super) fn of(version: Version) -> Self {
        if version.blocks_per_group() { BlockIdForm::PerGroup } else { BlockIdForm::Flat }
    }
}

impl PartialEq for BlockIdForm {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

const ASKED_AS_NULL: [&str; 4] =
    ["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"];

impl TransferParams {
    /// Creates a router's request to a prefill instance: prefill, and keep the blocks for a remote
    /// decode.
    pub fn ask_prefill() -> Self {
        TransferParams {
            do_remote_decode: true,
            rest: ASKED_AS_NULL.map(|key| (key.to_owned(), Value::Null)).into_iter().collect(),
            ..Self::default()
        }
    }

    /// Creates a prefill instance's answer: blocks for a decode instance to load.
    pub fn prefilled(remote: RemoteBlocks, version: Version) -> Self {
        Self { do_remote_prefill: true, ..remote.into_params(version) }
    }

    /// Creates a decode instance's answer in bidirectional transfer: the prefill of the next turn
    /// may load these blocks.
    pub fn decoded(remote: RemoteBlocks, version: Version) -> Self {
        Self { do_remote_decode: true, ..remote.into_params(version) }
    }

    /// Reads the value of a `kv_transfer_params` key.
    ///
    /// # Errors
    ///
    /// A value that is not an object, or a known key whose value has the wrong type. Missing keys
    /// are not an error here: see [`remote_blocks`](Self::remote_blocks).
    pub fn from_value(value: &Value) -> Result<Self, ParamsError> {
        Self::from_object(fields::object("kv_transfer_params", value)?.clone())
    }

    /// Reads the object under a `kv_transfer_params` key.
    ///
    /// # Errors
    ///
    /// As [`from_value`](Self::from_value).
    pub fn from_object(object: Map<String, Value>) -> Result<Self, ParamsError> {
        let flat = object.get("remote_block_ids").is_some_and(is_flat);
        let mut fields = Fields::new(object);
        let mut params = TransferParams {
            block_id_form: if flat { BlockIdForm::Flat } else { BlockIdForm::PerGroup },
            do_remote_prefill: fields.flag("do_remote_prefill")?,
            do_remote_decode: fields.flag("do_remote_decode")?,
            remote_block_ids: fields.take("remote_block_ids", BLOCK_IDS, groups)?,
            remote_engine_id: fields.text("remote_engine_id")?,
            remote_request_id: fields.text("remote_request_id")?,
            remote_host: fields.text("remote_host")?,
            remote_port: fields.port("remote_port")?,
            tp_size: fields.size("tp_size")?,
            dcp_size: fields.size("dcp_size")?,
            pp_size: fields.size("pp_size")?,
            remote_num_tokens: fields.number("remote_num_tokens")?,
            remote_blocks_expiry_time: fields.take(
                "remote_blocks_expiry_time",
                "seconds",
                Value::as_f64,
            )?,
            remote_registration_generation: fields.number("remote_registration_generation")?,
            transfer_mode: fields.take(
                "transfer_mode",
                "\"pull\" or \"push\"",
                TransferMode::from_value,
            )?,
            remote_prefill_cached_tokens: fields.number("remote_prefill_cached_tokens")?,
            kvx_block_reference: fields.text("kvx_block_reference")?,
            kvx_signature: fields.text("kvx_signature")?,
            rest: Map::new(),
        };
        params.rest = fields.rest();
        Ok(params)
    }

    /// Returns the oldest version whose engines write these keys, so that their side channel can be
    /// asked in a form that it survives.
    pub fn version(&self) -> Version {
        let has = |key: &str| self.rest.contains_key(key);
        if matches!(self.block_id_form, BlockIdForm::Flat) {
            Version::V0_16
        } else if self.remote_registration_generation.is_some() {
            Version::V0_33
        } else if self.pp_size.is_some() {
            Version::V0_29
        } else if self.transfer_mode.is_some() {
            Version::V0_28
        } else if self.remote_blocks_expiry_time.is_some() || has("remote_blocks_expiry_time") {
            Version::V0_26
        } else if self.remote_num_tokens.is_some() {
            Version::V0_21
        } else {
            Version::V0_20
        }
    }

    /// Returns the blocks that these parameters name, with everything that a load needs, in the
    /// mode that they name (pull if they name none).
    ///
    /// # Errors
    ///
    /// As [`remote_blocks_for`](Self::remote_blocks_for).
    pub fn remote_blocks(&self) -> Result<RemoteBlocks, ParamsError> {
        self.remote_blocks_for(self.transfer_mode.unwrap_or_default())
    }

    /// Returns the same as [`remote_blocks`](Self::remote_blocks) for an engine that knows its
    /// mode: routers of push connectors do not name it.
    ///
    /// # Errors
    ///
    /// The first missing key: block ids, engine, request, host and port are required; push mode
    /// requires `tp_size` instead of block ids. A mode other than `mode` is rejected.
    pub fn remote_blocks_for(&self, mode: TransferMode) -> Result<RemoteBlocks, ParamsError> {
        if let Some(named) = self.transfer_mode
            && named != mode
        {
            return Err(ParamsError::new(
                "transfer_mode",
                format!(
                    "transfer_mode is {}, but this engine uses {}; give both sides the same connector",
                    named.as_str(),
                    mode.as_str()
                ),
            ));
        }
        let block_ids = match (&self.remote_block_ids, mode) {
            (Some(ids), _) => ids.clone(),
            (None, TransferMode::Push) => Vec::new(),
            (None, TransferMode::Pull) => return Err(missing("remote_block_ids")),
        };
        if mode == TransferMode::Push && self.tp_size.is_none() {
            return Err(missing("tp_size"));
        }
        Ok(RemoteBlocks {
            engine_id: needed(&self.remote_engine_id, "remote_engine_id")?,
            request_id: needed(&self.remote_request_id, "remote_request_id")?,
            host: needed(&self.remote_host, "remote_host")?,
            port: self
                .remote_port
                .filter(|port| *port > 0)
                .ok_or_else(|| missing("remote_port"))?,
            block_ids,
            tp_size: size(self.tp_size, "tp_size")?,
            dcp_size: size(self.dcp_size, "dcp_size")?,
            pp_size: size(self.pp_size, "pp_size")?,
            num_tokens: self.remote_num_tokens,
            expiry_time: self.remote_blocks_expiry_time,
            registration_generation: self.remote_registration_generation.unwrap_or(0),
            mode,
            prefill_cached_tokens: self.remote_prefill_cached_tokens,
            block_reference: self.kvx_block_reference.clone(),
            signature: self.kvx_signature.clone(),
        })
    }

    /// Converts to parameters of the MooncakeConnector. Keys that only that connector has are in
    /// [`rest`](Self::rest).
    ///
    /// # Errors
    ///
    /// As [`MooncakeParams::from_value`].
    pub fn mooncake(&self) -> Result<MooncakeParams, ParamsError> {
        let mut object = self.rest.clone();
        object.insert("do_remote_prefill".into(), self.do_remote_prefill.into());
        object.insert("do_remote_decode".into(), self.do_remote_decode.into());
        object.extend(
            self.remote_engine_id.clone().map(|engine| ("remote_engine_id".into(), engine.into())),
        );
        MooncakeParams::from_value(&Value::Object(object))
    }

    /// Returns whether these are parameters of the MooncakeConnector.
    fn is_of_mooncake(&self) -> bool {
        let others = self.remote_block_ids.is_some() || self.remote_request_id.is_some();
        !others && self.rest.get("transfer_id").is_some_and(|id| !id.is_null())
    }

    /// Returns whether these are a decode leg's parameters of the MooncakeConnector before vLLM
    /// 0.16: an address, and none of the keys that other prefill instances add.
    pub(crate) fn is_of_older_mooncake(&self) -> bool {
        let address = self.remote_host.is_some() && self.remote_port.is_some();
        let others = self.remote_block_ids.is_some()
            || self.remote_engine_id.is_some()
            || self.remote_request_id.is_some()
            || self.tp_size.is_some()
            || self.transfer_mode.is_some();
        self.do_remote_prefill && address && !others
    }

    /// Returns whether any key names blocks of another engine.
    pub fn names_remote(&self) -> bool {
        self.remote_block_ids.is_some()
            || self.remote_engine_id.is_some()
            || self.remote_request_id.is_some()
            || self.remote_host.is_some()
            || self.remote_port.is_some()
    }

    /// Writes the parameters for an instance that speaks `version`.
    ///
    /// # Errors
    ///
    /// Parameters that would stop the engine that reads them are never written: both flags at once,
    /// a remote that is incomplete or has no block to load, a size of zero, several groups for vLLM
    /// 0.16, an expiry time that is not a number, a known key with another value in
    /// [`rest`](Self::rest). vLLM's engine also stops if there are fewer remote blocks than its
    /// prompt needs. Only code that knows the block size can check that.
    pub fn to_object(&self, version: Version) -> Result<Map<String, Value>, ParamsError> {
        if self.do_remote_prefill && self.do_remote_decode {
            return Err(ParamsError::new(
                "do_remote_decode",
                "do_remote_prefill and do_remote_decode are both true; a prefill leg has the second, a decode leg \
                 the first",
            ));
        }
        if self.is_of_mooncake() {
            self.mooncake()?;
        } else if self.is_of_older_mooncake() {
            super::OlderMooncakeParams::from_params(self)?;
        } else if self.do_remote_prefill || self.names_remote() {
            let remote = self.remote_blocks()?;
            if self.do_remote_prefill
                && remote.mode == TransferMode::Pull
                && remote.block_count() == 0
            {
                return Err(ParamsError::new(
                    "remote_block_ids",
                    "remote_block_ids names no block; a decode leg with nothing to load goes without \
                     kv_transfer_params",
                ));
            }
        }
        let mut object = self.rest.clone();
        for (key, value) in &object {
            if KEYS.contains(&key.as_str()) && !value.is_null() {
                return Err(ParamsError::new(
                    "rest",
                    format!("rest holds {key}, which has its own field; set the field instead"),
                ));
            }
        }
        let mut put = |key: &str, value: Option<Value>| {
            if let Some(value) = value {
                object.insert(key.to_owned(), value);
            }
        };
        put("do_remote_prefill", Some(self.do_remote_prefill.into()));
        put("do_remote_decode", Some(self.do_remote_decode.into()));
        let ids = self
            .remote_block_ids
            .as_ref()
            .map(|groups| written_ids(groups, version))
            .transpose()?;
        put("remote_block_ids", ids);
        put("remote_engine_id", self.remote_engine_id.clone().map(Value::from));
        put("remote_request_id", self.remote_request_id.clone().map(Value::from));
        put("remote_host", self.remote_host.clone().map(Value::from));
        put("remote_port", self.remote_port.map(Value::from));
        for (key, count) in
            [("tp_size", self.tp_size), ("dcp_size", self.dcp_size), ("pp_size", self.pp_size)]
        {
            if count == Some(0) {
                return Err(ParamsError::new(
                    key,
                    format!("{key} is 0; an engine has at least one rank"),
                ));
            }
            put(key, count.map(Value::from));
        }
        put("remote_num_tokens", self.remote_num_tokens.map(Value::from));
        if let Some(time) = self.remote_blocks_expiry_time {
            let number = serde_json::Number::from_f64(time).ok_or_else(|| {
                ParamsError::new(
                    "remote_blocks_expiry_time",
                    format!("remote_blocks_expiry_time is {time}; expected seconds"),
                )
            })?;
            put("remote_blocks_expiry_time", Some(number.into()));
        }
        put("remote_registration_generation", self.remote_registration_generation.map(Value::from));
        put("transfer_mode", self.transfer_mode.map(|mode| mode.as_str().into()));
        put("remote_prefill_cached_tokens", self.remote_prefill_cached_tokens.map(Value::from));
        put("kvx_block_reference", self.kvx_block_reference.clone().map(Value::from));
        put("kvx_signature", self.kvx_signature.clone().map(Value::from));
        Ok(object)
    }

    /// Returns the result of [`to_object`](Self::to_object) as a JSON value.
    ///
    /// # Errors
    ///
    /// As [`to_object`](Self::to_object).
    pub fn to_value(&self, version: Version) -> Result<Value, ParamsError> {
        self.to_object(version).map(Value::Object)
    }
}

/// Serializes with [`to_object`](TransferParams::to_object), in the version that the parameters
/// were created for or read in.
impl Serialize for TransferParams {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let version = match self.block_id_form {
            BlockIdForm::Flat => Version::V0_16,
            BlockIdForm::PerGroup => Version::default(),
        };
        self.to_object(version).map_err(ser::Error::custom)?.serialize(serializer)
    }
}

/// Deserializes with [`from_object`](TransferParams::from_object).
impl<'de> Deserialize<'de> for TransferParams {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::from_object(Map::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

impl From<MooncakeParams> for TransferParams {
    fn from(params: MooncakeParams) -> Self {
        let mut read = TransferParams { rest: params.rest, ..TransferParams::default() };
        read.rest.insert("transfer_id".into(), params.transfer_id.as_str().into());
        match params.leg {
            MooncakeLeg::Prefill => read.do_remote_decode = true,
            MooncakeLeg::Decode { remote_engine_id, remote_bootstrap_addr } => {
                read.do_remote_prefill = true;
                read.remote_engine_id = Some(remote_engine_id);
                read.rest.insert("remote_bootstrap_addr".into(), remote_bootstrap_addr.into());
            }
        }
        read
    }
}

const BLOCK_IDS: &str = "a list of block ids for each KV cache group, or one flat list";

const KEYS: [&str; 17] = [
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "remote_registration_generation",
    "transfer_mode",
    "remote_prefill_cached_tokens",
    "kvx_block_reference",
    "kvx_signature",
];

fn block_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// Returns whether block ids are one flat list, as vLLM 0.16 writes them.
fn is_flat(value: &Value) -> bool {
    let first = value.as_array().and_then(|list| list.first());
    first.is_some_and(|first| !first.is_array())
}

/// Reads a list of lists, or a flat list as one group. An empty list has no group.
fn groups(value: &Value) -> Option<Vec<Vec<u32>>> {
    let list = value.as_array()?;
    if is_flat(value) {
        return Some(vec![list.iter().map(block_id).collect::<Option<_>>()?]);
    }
    list.iter().map(|group| group.as_array()?.iter().map(block_id).collect()).collect()
}

fn written_ids(groups: &[Vec<u32>], version: Version) -> Result<Value, ParamsError> {
    if version.blocks_per_group() {
        return Ok(groups.to_vec().into());
    }
    match groups {
        [] => Ok(Value::Array(Vec::new())),
        [one] => Ok(one.clone().into()),
        several => Err(ParamsError::new(
            "remote_block_ids",
            format!(
                "{version} takes one flat list of block ids, but there are {} KV cache groups",
                several.len()
            ),
        )),
    }
}

fn needed(value: &Option<String>, key: &'static str) -> Result<String, ParamsError> {
    value.clone().filter(|text| !text.is_empty()).ok_or_else(|| missing(key))
}

fn size(value: Option<u32>, key: &'static str) -> Result<u32, ParamsError> {
    match value {
        Some(0) => {
            Err(ParamsError::new(key, format!("{key} is 0; an engine has at least one rank")))
        }
        other => Ok(other.unwrap_or(1)),
    }
}

fn missing(key: &'static str) -> ParamsError {
    ParamsError::new(
        key,
        format!(
            "kv_transfer_params has no {key}; forward what the prefill instance answered, unchanged"
        ),
    )
}
