//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::{MethodRouter, post};
use serde_json::{Value, json};

use super::body::RequestBody;
use super::error::{ApiError, Result, answer};
use super::fields::{Fields, parse_json};
use super::prompt;
use super::service::{Service, Shared};

/// Answers a request with what `read` makes of its body.
pub(super) fn answer_with(
    read: fn(&Service, &Value) -> Result<Value>,
) -> MethodRouter<Arc<Service>> {
    post(move |State(service): Shared, headers: HeaderMap, body: RequestBody| async move {
        let read = move |service: &Service| read(service, &parse_json(&headers, body.bytes())?);
        Ok::<_, ApiError>(answer(StatusCode::OK, &service.read(read).await?))
    })
}

pub(super) fn tokens(service: &Service, body: &Value) -> Result<Value> {
    let fields = Fields::of(body)?;
    service.model(fields.text("model")?)?;
    let tokens = match fields.text("prompt")? {
        Some(prompt) => service.encode(prompt, fields.flag_or("add_special_tokens", true)?)?,
        None if fields.get("messages").is_some() => prompt::of_chat(service, &fields)?.tokens,
        None => return Err(ApiError::bad("prompt: Field required")),
    };
    let names = fields.flag("return_token_strs")?.then(|| -> Vec<String> {
        tokens.iter().map(|token| service.tokenizer.raw(*token).unwrap_or_default()).collect()
    });
    Ok(json!({
        "count": tokens.len(), "max_model_len": service.limits().model_len, "tokens": tokens,
        "token_strs": names,
    }))
}

pub(super) fn text(service: &Service, body: &Value) -> Result<Value> {
    let fields = Fields::of(body)?;
    service.model(fields.text("model")?)?;
    if fields.get("tokens").is_none() {
        return Err(ApiError::bad("tokens: Field required"));
    }
    let tokens = fields.tokens("tokens")?;
    let most = service.limits().model_len;
    if tokens.len() > most {
        let words = format!(
            "{} tokens are more than the model accepts; send at most {most} at once",
            tokens.len()
        );
        return Err(ApiError::of("tokens", words));
    }
    Ok(json!({ "prompt": service.tokenizer.decode(&tokens, false) }))
}
