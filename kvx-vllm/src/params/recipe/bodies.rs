//! The changes that every recipe makes to a client's body.

use serde_json::{Map, Value};

use crate::params::{ParamsError, fields};

pub(super) const PARAMS: &str = "kv_transfer_params";

/// Returns the body of a prefill leg: one token, not streamed, with these parameters.
pub(super) fn prefill(request: &Value, params: Value) -> Result<Value, ParamsError> {
    let mut body = checked(request)?.clone();
    for key in ["stream_options", "min_tokens", "min_completion_tokens"] {
        body.remove(key);
    }
    body.insert("stream".to_owned(), false.into());
    body.insert("max_tokens".to_owned(), 1.into());
    if body.contains_key("max_completion_tokens") {
        body.insert("max_completion_tokens".to_owned(), 1.into());
    }
    body.insert(PARAMS.to_owned(), params);
    Ok(Value::Object(body))
}

/// Returns the body of a decode leg: the client's body, with these parameters or none.
pub(super) fn decode(request: &Value, params: Option<Value>) -> Result<Value, ParamsError> {
    let mut body = checked(request)?.clone();
    body.remove(PARAMS);
    if let Some(params) = params {
        body.insert(PARAMS.to_owned(), params);
    }
    Ok(Value::Object(body))
}

/// Rejects a request for several answers. An engine makes several requests of it, all with the same
/// parameters: the first to end would free the blocks of the others, or no request would free them.
fn checked(request: &Value) -> Result<&Map<String, Value>, ParamsError> {
    let body = fields::object("request", request)?;
    let several = |key: &'static str| match body.get(key) {
        Some(count) if count.as_u64().is_none_or(|count| count > 1) && !count.is_null() => {
            Err(ParamsError::new(
                key,
                format!(
                    "{key} is {count}; one transfer serves one answer: send the request to one instance without a \
                     transfer, or as several requests"
                ),
            ))
        }
        _ => Ok(()),
    };
    several("n")?;
    several("best_of")?;
    match body.get("use_beam_search") {
        Some(Value::Bool(true)) => Err(ParamsError::new(
            "use_beam_search",
            "use_beam_search makes several requests of one; send it to one instance without a transfer",
        )),
        _ => Ok(body),
    }
}
