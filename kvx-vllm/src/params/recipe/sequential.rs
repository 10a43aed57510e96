//! NixlConnector: prefill, then decode with what the prefill instance answered.
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

/// The body of the prefill leg.
///
/// # Errors
///
/// A request that is no object, or one that an engine would make several of (`n`, `best_of`, `use_beam_search`).
pub fn prefill_leg(request: &Value) -> Result<Value, ParamsError> {
    // What is asked for is the same in every version.
    bodies::prefill(request, TransferParams::ask_prefill().to_value(Version::default())?)
}

/// The body of the prefill leg of a later turn, for instances with `bidirectional_kv_xfer`: the prefill instance may
/// load what the decode instance of the turn before still holds. `earlier` is that instance's answer; it serves once.
///
/// # Errors
///
/// As [`prefill_leg`]; and an answer whose parameters are not a decode instance's.
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
    /// What to send.
    pub body: Value,
    /// Whether the decode instance will load the prefill instance's blocks. Without, it computes the prompt itself: the
    /// prefill instance has nothing to hand over.
    pub transfers: bool,
}

/// The body of the decode leg: the client's own, with what the prefill instance answered. `version` is what the decode
/// instance speaks.
///
/// # Errors
///
/// As [`prefill_leg`]; and parameters that would stop the decode instance's engine
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
