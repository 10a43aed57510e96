//! `kv_transfer_params` of the MooncakeConnector before vLLM 0.16.

use serde_json::{Map, Value};

use super::{ParamsError, TransferParams};

const ENGINE: &str = "kvx_engine_id";
const REQUEST: &str = "kvx_request_id";

/// The information that a leg gets about the other leg.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OlderMooncakeLeg {
    /// Prefill the request, and send the blocks to the worker that asks for the request.
    Prefill,
    /// Ask the prefill instance for the blocks.
    Decode {
        /// The host of the prefill instance's first worker.
        remote_host: String,
        /// The port of the first worker; each further worker has the next port.
        remote_port: u16,
        /// The identity of the prefill instance, if it runs kvx.
        kvx: Option<KvxPrefill>,
    },
}

/// The identity of a kvx prefill instance, in keys that vLLM ignores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvxPrefill {
    /// The engine id: `kvx_engine_id`.
    pub engine_id: String,
    /// The engine's own name of the request: `kvx_request_id`. `None`: both sides use the same
    /// name.
    pub request_id: Option<String>,
}

/// `kv_transfer_params` of the MooncakeConnector before it had a bootstrap server. The prefill
/// instance returns its address, and only the request id identifies the request. A proxy sends one
/// `X-Request-Id` to both legs.
///
/// ```
/// use kvx_vllm::params::{OlderMooncakeLeg, OlderMooncakeParams, TransferParams};
/// # fn main() -> Result<(), kvx_vllm::params::ParamsError> {
/// let answer = serde_json::json!({
///     "do_remote_prefill": true, "do_remote_decode": false, "remote_host": "10.0.0.1", "remote_port": 8998,
/// });
/// let params = TransferParams::from_value(&answer)?;
/// let OlderMooncakeLeg::Decode { remote_port, kvx, .. } = OlderMooncakeParams::from_params(&params)?.leg else {
///     panic!("it is for a decode")
/// };
/// assert_eq!((remote_port, kvx), (8998, None));
/// assert_eq!(params.to_value(Default::default())?, answer);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct OlderMooncakeParams {
    /// The leg that these parameters are for.
    pub leg: OlderMooncakeLeg,
    /// The number of tokens that the blocks hold. Only kvx sets it.
    pub remote_num_tokens: Option<u64>,
    /// Keys that this version does not know.
    pub rest: Map<String, Value>,
}

impl OlderMooncakeParams {
    /// Creates parameters without further keys.
    pub fn new(leg: OlderMooncakeLeg) -> Self {
        OlderMooncakeParams { leg, remote_num_tokens: None, rest: Map::new() }
    }

    /// Converts parameters that were read from JSON.
    ///
    /// # Errors
    ///
    /// A missing key, a key of the wrong type, or flags of which not exactly one is true.
    pub fn from_params(params: &TransferParams) -> Result<Self, ParamsError> {
        let mut rest = params.rest.clone();
        let mut text = |key: &'static str| match rest.remove(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) if !text.is_empty() => Ok(Some(text)),
            Some(_) => Err(ParamsError::new(key, format!("{key} must be a non-empty string"))),
        };
        let leg = match (params.do_remote_decode, params.do_remote_prefill) {
            (true, false) => OlderMooncakeLeg::Prefill,
            (false, true) => {
                let (engine_id, request_id) = (text(ENGINE)?, text(REQUEST)?);
                OlderMooncakeLeg::Decode {
                    remote_host: params
                        .remote_host
                        .clone()
                        .ok_or_else(|| missing("remote_host"))?,
                    remote_port: params.remote_port.ok_or_else(|| missing("remote_port"))?,
                    kvx: engine_id.map(|engine_id| KvxPrefill { engine_id, request_id }),
                }
            }
            (false, false) | (true, true) => {
                return Err(ParamsError::new(
                    "do_remote_decode",
                    "one of do_remote_decode (for the prefill leg) and do_remote_prefill (for the decode leg) must \
                     be true",
                ));
            }
        };
        Ok(OlderMooncakeParams { leg, remote_num_tokens: params.remote_num_tokens, rest })
    }
}

impl From<OlderMooncakeParams> for TransferParams {
    fn from(params: OlderMooncakeParams) -> Self {
        let mut read = TransferParams {
            rest: params.rest,
            remote_num_tokens: params.remote_num_tokens,
            ..TransferParams::default()
        };
        match params.leg {
            OlderMooncakeLeg::Prefill => read.do_remote_decode = true,
            OlderMooncakeLeg::Decode { remote_host, remote_port, kvx } => {
                read.do_remote_prefill = true;
                (read.remote_host, read.remote_port) = (Some(remote_host), Some(remote_port));
                if let Some(KvxPrefill { engine_id, request_id }) = kvx {
                    read.rest.insert(ENGINE.into(), engine_id.into());
                    read.rest
                        .extend(request_id.map(|request| (REQUEST.to_owned(), request.into())));
                }
            }
        }
        read
    }
}

fn missing(key: &'static str) -> ParamsError {
    ParamsError::new(
        key,
        format!(
            "kv_transfer_params has no {key}, which a prefill instance with the MooncakeConnector before vLLM 0.16 returns: \
             forward its answer unchanged, or give both sides the same kv_compat"
        ),
    )
}
