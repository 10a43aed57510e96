//! The answer of an instance.

use serde_json::Value;

use super::bodies::PARAMS;
use crate::params::{ParamsError, TransferParams, fields};

/// The part of an instance's answer that a proxy needs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// The parameters of the answer's KV cache blocks, if any.
    pub params: Option<TransferParams>,
    /// The reason why the answer's first choice ended: `length` for a prefill leg, `stop` if its
    /// one token ended the text.
    pub finish_reason: Option<String>,
}

impl Answer {
    /// Reads the body of an answer that is not streamed. A chunk of a stream has the same form.
    ///
    /// # Errors
    ///
    /// A body that is not an object, a body with an `error` (its message is included), or
    /// parameters of a wrong type.
    pub fn from_body(body: &Value) -> Result<Self, ParamsError> {
        let object = fields::object("response", body)?;
        if let Some(error) = object.get("error").filter(|error| !error.is_null()) {
            let message = error
                .get("message")
                .and_then(Value::as_str)
                .map_or_else(|| error.to_string(), str::to_owned);
            return Err(ParamsError::new(
                "error",
                format!("the instance answered with an error: {message}"),
            ));
        }
        let params = match object.get(PARAMS) {
            None | Some(Value::Null) => None,
            Some(params) => Some(TransferParams::from_value(params)?),
        };
        let finish_reason = object
            .get("choices")
            .and_then(|choices| choices.get(0)?.get("finish_reason")?.as_str())
            .map(str::to_owned);
        Ok(Answer { params, finish_reason })
    }
}
