//! NixlConnector: prefill first, then decode with the prefill instance's answer.
//!
//! ```
//! use kvx_vllm::Version;
//! use kvx_vllm::params::recipe::{Answer, sequential};
//! # fn main() -> Result<(), kvx_vllm::params::ParamsError> {
//! let request = serde_json::json!({"model": "m", "prompt": "Once", "max_tokens": 24, "stream": true});
//!
//! let prefill = sequential::prefill_leg(&request)?;
//! assert_eq!((&prefill["max_tokens"], &prefill["stream"]), (&1.into(), &false.into()));
//! # let response = serde_json::json!({"choices": [{"finish_reason": "length"}], "kv_transfer_params": {
//! #     "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[28]], "remote_engine_id": "e",
//! #     "remote_request_id": "r", "remote_host": "h", "remote_port": 5600}});
//! // let response = …: POST it to a prefill instance.
//! let answer = Answer::from_body(&response)?;
//!
//! let decode = sequential::decode_leg(&request, &answer, Version::V0_33)?;
//! assert!(decode.transfers);
//! assert_eq!(decode.body["max_tokens"], 24);
//! assert_eq!(decode.body["kv_transfer_params"], response["kv_transfer_params"]);
//! # Ok(())
//! # }
//! ```

use serde_json::Value;

use super::{Answer, bodies};
use crate::Version;
use crate::params::{ParamsError, TransferParams};

/// Returns the body of the prefill leg.
///
/// # Errors
///
/// A request that is not an object, or that asks for several answers (`n`, `best_of`,
/// `use_beam_search`).
pub fn prefill_leg(request: &Value) -> Result<Value, ParamsError> {
    // The request to a prefill instance is the same in every version.
    bodies::prefill(request, TransferParams::ask_prefill().to_value(Version::default())?)
}

/// Returns the body of the prefill leg of a later turn, for instances with `bidirectional_kv_xfer`.
/// The prefill instance may load the blocks that the decode instance of the previous turn still
/// holds. `earlier` is that decode instance's answer; it may be used once.
///
/// # Errors
///
/// As [`prefill_leg`], and an answer whose parameters are not from a decode instance.
pub fn prefill_leg_of_later_turn(
    request: &Value,
    earlier: &Answer,
    version: Version,
) -> Result<Value, ParamsError> {
    let Some(params) = &earlier.params else {
        return prefill_leg(request);
    };
    if !params.do_remote_decode {
        return Err(ParamsError::new(
            "do_remote_decode",
            "do_remote_decode is not true in the earlier answer: it is not from a decode instance with \
             bidirectional_kv_xfer",
        ));
    }
    bodies::prefill(request, params.to_value(version)?)
}

/// The body of a decode leg.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodeLeg {
    /// The body to send.
    pub body: Value,
    /// True if the decode instance will load the prefill instance's blocks. Otherwise it computes
    /// the prompt itself: the prefill instance offers no blocks.
    pub transfers: bool,
}

/// Returns the body of the decode leg: the client's body, with the parameters of the prefill
/// instance's answer. `version` is the decode instance's version.
///
/// # Errors
///
/// As [`prefill_leg`], and parameters that would stop the decode instance's engine
/// ([`to_object`](TransferParams::to_object)).
pub fn decode_leg(
    request: &Value,
    answer: &Answer,
    version: Version,
) -> Result<DecodeLeg, ParamsError> {
    let params = match &answer.params {
        Some(params) if params.do_remote_decode => {
            return Err(ParamsError::new(
                "do_remote_prefill",
                "the answer asks for a remote decode: it is not from a prefill leg",
            ));
        }
        Some(params) if params.is_of_older_mooncake() => Some(params.to_value(version)?),
        Some(params) if params.do_remote_prefill => (params.remote_blocks()?.block_count() > 0)
            .then(|| params.to_value(version))
            .transpose()?,
        _ => None,
    };
    let transfers = params.is_some();
    Ok(DecodeLeg { body: bodies::decode(request, params)?, transfers })
}
