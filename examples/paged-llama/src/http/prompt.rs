//! The prompts of a request: texts, tokens, or a conversation.

use axum::http::StatusCode;
use serde_json::{Map, Value};

use super::error::{ApiError, Result};
use super::fields::{Fields, tokens};
use super::service::Service;

/// The most answers to one request.
pub(super) const MOST_ANSWERS: usize = 256;

/// A prompt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
    pub(crate) text: Option<String>,
}

/// Reads `prompt`: a text, tokens, or a list of either.
pub(super) fn of_completion(service: &Service, fields: &Fields<'_>) -> Result<Vec<Prompt>> {
    let special = fields.flag_or("add_special_tokens", true)?;
    let wrong = || {
        ApiError::of(
            "prompt",
            "prompt must be a string, a list of strings, a list of tokens or a list of such lists",
        )
    };
    let of_text = |text: &str| -> Result<Prompt> {
        Ok(Prompt { tokens: service.encode(text, special)?, text: Some(text.to_owned()) })
    };
    let of_tokens =
        |value: &Value| tokens(value).map(|tokens| Prompt { tokens, text: None }).ok_or_else(wrong);
    match fields.get("prompt") {
        None => Err(ApiError::new(StatusCode::BAD_REQUEST, "prompt: Field required")),
        Some(Value::String(text)) => Ok(vec![of_text(text)?]),
        Some(whole @ Value::Array(values)) => match values.first() {
            None => Err(ApiError::of("prompt", "prompt is an empty list")),
            Some(Value::Number(_)) => Ok(vec![of_tokens(whole)?]),
            Some(_) if values.len() > MOST_ANSWERS => Err(too_many(values.len())),
            Some(_) => values
                .iter()
                .map(|value| match value {
                    Value::String(text) => of_text(text),
                    value => of_tokens(value),
                })
                .collect(),
        },
        Some(_) => Err(wrong()),
    }
}

pub(super) fn too_many(answers: usize) -> ApiError {
    let words =
        format!("{answers} answers to one request are too many; request at most {MOST_ANSWERS}");
    ApiError::of("n", words)
}

/// Applies the chat template to `messages`.
pub(super) fn of_chat(service: &Service, fields: &Fields<'_>) -> Result<Prompt> {
    let messages =
        fields.get("messages").ok_or_else(|| ApiError::bad("messages: Field required"))?;
    let messages = messages.as_array().filter(|messages| !messages.is_empty());
    let messages = messages.ok_or_else(|| {
        ApiError::of("messages", "messages must be a list of at least one message")
    })?;
    let messages: Vec<Value> = messages.iter().map(message).collect::<Result<_>>()?;
    let continues = fields.flag("continue_final_message")?;
    let mut more = Map::new();
    let adds = fields.flag_or("add_generation_prompt", true)?;
    if continues && adds {
        let words = "continue_final_message and add_generation_prompt cannot both be true: set one of them to false";
        return Err(ApiError::of("continue_final_message", words));
    }
    if continues {
        return Err(ApiError::of(
            "continue_final_message",
            "continue_final_message is not supported by this server",
        ));
    }
    more.insert("add_generation_prompt".into(), adds.into());
    match fields.get("chat_template_kwargs") {
        None => {}
        Some(Value::Object(kwargs)) => more.extend(kwargs.clone()),
        Some(_) => {
            return Err(ApiError::of(
                "chat_template_kwargs",
                "chat_template_kwargs must be an object",
            ));
        }
    }
    let text = service
        .tokenizer
        .chat(&Value::Array(messages), &more)
        .map_err(|error| ApiError::of("messages", error.to_string()))?;
    // The template itself adds the special tokens around a prompt.
    let special = fields.flag("add_special_tokens")?;
    Ok(Prompt { tokens: service.encode(&text, special)?, text: Some(text) })
}

/// Checks a message whose content is text, and joins several parts of text.
fn message(message: &Value) -> Result<Value> {
    let wrong = |words: &str| ApiError::of("messages", words);
    let mut message =
        message.as_object().ok_or_else(|| wrong("a message must be an object"))?.clone();
    if !message.get("role").is_some_and(Value::is_string) {
        return Err(wrong("a message must have a role, which is a string"));
    }
    match message.get("content") {
        Some(Value::String(_)) => {}
        None | Some(Value::Null) => {
            message.insert("content".into(), "".into());
        }
        Some(Value::Array(parts)) => {
            let texts = parts.iter().map(|part| match part {
                Value::String(text) => Some(text.as_str()),
                part if part["type"] == "text" => part["text"].as_str(),
                _ => None,
            });
            let texts: Option<Vec<_>> = texts.collect();
            let text = texts
                .ok_or_else(|| wrong("this model reads text only; leave other parts out"))?
                .join("\n");
            message.insert("content".into(), text.into());
        }
        Some(_) => return Err(wrong("a message's content must be a string or a list of parts")),
    }
    Ok(message.into())
}
