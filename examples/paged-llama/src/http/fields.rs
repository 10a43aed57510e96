//! Reads the fields of a request's body strictly: a wrong type is an error, and so is a feature
//! that this server does not have.

use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode};
use serde_json::{Map, Value};

use super::error::{ApiError, Result};
use super::json;

/// Fields that change vLLM's answers but are not supported here. The server rejects them instead of
/// ignoring them.
const UNSUPPORTED: &[&str] = &[
    "suffix",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "use_beam_search",
    "prompt_embeds",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "tools",
    "functions",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "logits_processors",
    "chat_template",
    "documents",
    "cache_salt",
    "reasoning_effort",
    "mm_processor_kwargs",
    "function_call",
    "tool_choice",
    "priority",
];

/// The fields of a request's body.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a>(pub(crate) &'a Map<String, Value>);

impl<'a> Fields<'a> {
    /// Returns the fields, or an error if one of them requests an unsupported feature.
    pub(crate) fn of(body: &'a Value) -> Result<Self> {
        let object =
            body.as_object().ok_or_else(|| ApiError::bad("the body must be a JSON object"))?;
        let fields = Fields(object);
        for field in UNSUPPORTED {
            let wanted = match fields.get(field) {
                None | Some(Value::Bool(false)) => false,
                // These values mean the same as a missing field.
                Some(Value::String(none)) if none == "none" && field.ends_with("_choice") => false,
                Some(Value::String(none)) if none == "none" && *field == "function_call" => false,
                Some(Value::Number(number)) if *field == "priority" => number.as_f64() != Some(0.0),
                Some(Value::Array(values)) => !values.is_empty(),
                Some(Value::Object(values)) => !values.is_empty(),
                Some(Value::String(text)) => !text.is_empty(),
                Some(_) => true,
            };
            if wanted {
                return Err(ApiError::of(
                    field,
                    format!("{field} is not supported by this server; leave it out"),
                ));
            }
        }
        let format = fields.get("response_format").map(|format| &format["type"]);
        if format.is_some_and(|format| format != "text") {
            return Err(ApiError::of(
                "response_format",
                "this server supports only a response_format of type text",
            ));
        }
        Ok(fields)
    }

    /// Returns a field's value, unless it is missing or null.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn read<T>(
        &self,
        key: &'static str,
        kind: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match read(value) {
                Some(value) => Ok(Some(value)),
                None => Err(ApiError::of(
                    key,
                    format!("{key}: Input should be a valid {kind}, got {}", short(value)),
                )),
            },
        }
    }

    pub(crate) fn flag(&self, key: &'static str) -> Result<bool> {
        Ok(self.read(key, "boolean", Value::as_bool)?.unwrap_or(false))
    }

    pub(crate) fn flag_or(&self, key: &'static str, default: bool) -> Result<bool> {
        Ok(self.read(key, "boolean", Value::as_bool)?.unwrap_or(default))
    }

    pub(crate) fn integer(&self, key: &'static str) -> Result<Option<i64>> {
        // Like Python, accept 5.0 as 5.
        let whole = |value: &Value| {
            value.as_i64().or_else(|| {
                value.as_f64().filter(|number| number.fract() == 0.0).map(|number| number as i64)
            })
        };
        self.read(key, "integer", whole)
    }

    /// Reads a count of at least `least`.
    pub(crate) fn count(&self, key: &'static str, least: i64) -> Result<Option<usize>> {
        match self.integer(key)? {
            Some(number) if number < least => {
                Err(ApiError::of(key, format!("{key} must be at least {least}, got {number}.")))
            }
            number => Ok(number.map(|number| number as usize)),
        }
    }

    /// Reads a number within these bounds.
    pub(crate) fn number(&self, key: &'static str, from: f64, to: f64) -> Result<Option<f32>> {
        match self.read(key, "number", Value::as_f64)? {
            Some(number) if !(from..=to).contains(&number) => {
                Err(ApiError::of(key, format!("{key} must be in [{from}, {to}], got {number}.")))
            }
            number => Ok(number.map(|number| number as f32)),
        }
    }

    pub(crate) fn text(&self, key: &'static str) -> Result<Option<&'a str>> {
        self.read(key, "string", Value::as_str)
    }

    pub(crate) fn tokens(&self, key: &'static str) -> Result<Vec<u32>> {
        Ok(self.read(key, "list of integers", tokens)?.unwrap_or_default())
    }

    /// Reads one text or several.
    pub(crate) fn texts(&self, key: &'static str) -> Result<Vec<String>> {
        let texts = self.read(key, "string or list of strings", |value| match value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(texts) => {
                texts.iter().map(|text| text.as_str().map(str::to_owned)).collect()
            }
            _ => None,
        })?;
        Ok(texts.unwrap_or_default())
    }
}

/// Returns a list of tokens.
pub(crate) fn tokens(value: &Value) -> Option<Vec<u32>> {
    value
        .as_array()?
        .iter()
        .map(|token| token.as_u64().and_then(|token| u32::try_from(token).ok()))
        .collect()
}

/// Parses a body whose content type is JSON.
pub(crate) fn parse_json(headers: &HeaderMap, body: &[u8]) -> Result<Value> {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if kind != "application/json" {
        let words = "Unsupported Media Type: Only 'application/json' is allowed";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, words));
    }
    json::parse(body).map_err(|error| ApiError::bad(format!("JSON decode error: {error}")))
}

fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}
