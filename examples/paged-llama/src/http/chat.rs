//! The prompt of a conversation.

use serde_json::{Map, Value};

use super::Service;
use super::asked::Prompt;
use super::fields::{Fields, Read};
use super::refusal::Refusal;

/// What a chat template makes of `messages`.
pub(crate) fn prompt(service: &Service, fields: &Fields<'_>) -> Read<Prompt> {
    let messages =
        fields.get("messages").ok_or_else(|| Refusal::bad("messages: Field required"))?;
    let messages = messages.as_array().filter(|messages| !messages.is_empty());
    let messages = messages.ok_or_else(|| {
        Refusal::of("messages", "messages has to be a list with a message at least")
    })?;
    let messages: Vec<Value> = messages.iter().map(message).collect::<Read<_>>()?;
    let continues = fields.flag("continue_final_message")?;
    let mut more = Map::new();
    let adds = fields.flag_or("add_generation_prompt", true)?;
    if continues && adds {
        let words = "continue_final_message and add_generation_prompt cannot both be true: set one of them to false";
        return Err(Refusal::of("continue_final_message", words));
    }
    if continues {
        return Err(Refusal::of(
            "continue_final_message",
            "continue_final_message is not supported by this server",
        ));
    }
    more.insert("add_generation_prompt".into(), adds.into());
    match fields.get("chat_template_kwargs") {
        None => {}
        Some(Value::Object(kwargs)) => more.extend(kwargs.clone()),
        Some(_) => {
            return Err(Refusal::of(
                "chat_template_kwargs",
                "chat_template_kwargs has to be an object",
            ));
        }
    }
    let text = service
        .tokenizer
        .chat(&Value::Array(messages), &more)
        .map_err(|error| Refusal::of("messages", error.to_string()))?;
    // The template says itself what stands around a prompt.
    let special = fields.flag("add_special_tokens")?;
    Ok(Prompt { tokens: service.encode(&text, special)?, text: Some(text) })
}

/// A message whose content is text: several parts of text become one.
fn message(message: &Value) -> Read<Value> {
    let wrong = |words: &str| Refusal::of("messages", words);
    let mut message =
        message.as_object().ok_or_else(|| wrong("a message has to be an object"))?.clone();
    if !message.get("role").is_some_and(Value::is_string) {
        return Err(wrong("a message has a role, which is a string"));
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
                .ok_or_else(|| wrong("this model reads text only: leave other parts out"))?
                .join("\n");
            message.insert("content".into(), text.into());
        }
        Some(_) => return Err(wrong("a message's content has to be a string or a list of parts")),
    }
    Ok(message.into())
}
