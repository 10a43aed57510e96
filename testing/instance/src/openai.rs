//! OpenAI's bodies, in vLLM's form.

use serde_json::{Value, json};

use crate::model::{self, count_tokens};

/// A requested completion.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) chat: bool,
    pub(crate) model: String,
    pub(crate) prompts: Vec<String>,
    pub(crate) n: u64,
    pub(crate) max_tokens: u64,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) echo: bool,
    pub(crate) logprobs: bool,
}

/// The status and the message of a rejected request.
pub(crate) type Refused = (u16, String);

impl Asked {
    /// Reads the body of a completion or a chat completion.
    pub(crate) fn read(chat: bool, body: &Value, models: &[String]) -> Result<Self, Refused> {
        let wrong = |sentence: &str| (400, sentence.to_owned());
        if !body.is_object() {
            return Err(wrong("the body is not a JSON object"));
        }
        let model = body["model"].as_str().unwrap_or(&models[0]).to_owned();
        if !models.contains(&model) {
            return Err((404, format!("The model `{model}` does not exist.")));
        }
        let prompts = if chat {
            vec![model::chat(&body["messages"]).ok_or_else(|| wrong("messages: Field required"))?]
        } else {
            model::prompts(&body["prompt"]).ok_or_else(|| wrong("prompt: Field required"))?
        };
        let number = |key: &str| match &body[key] {
            Value::Null => Ok(None),
            value => value
                .as_u64()
                .map(Some)
                .ok_or_else(|| (400, format!("{key}: Input should be a valid integer"))),
        };
        let limit = if chat {
            number("max_completion_tokens")?.or(number("max_tokens")?)
        } else {
            number("max_tokens")?
        };
        let max_tokens = limit.unwrap_or(16);
        if let Some(least) = number("min_tokens")?.filter(|least| *least > max_tokens) {
            return Err(wrong(&format!(
                "min_tokens must be less than or equal to max_tokens={max_tokens}, got {least}."
            )));
        }
        let stream = body["stream"].as_bool().unwrap_or(false);
        if !stream && !body["stream_options"].is_null() {
            return Err(wrong("Stream options can only be defined when `stream=True`."));
        }
        Ok(Asked {
            chat,
            model,
            prompts,
            n: number("n")?.unwrap_or(1),
            max_tokens,
            stream,
            include_usage: body["stream_options"]["include_usage"].as_bool().unwrap_or(false),
            echo: body["echo"].as_bool().unwrap_or(false),
            logprobs: body["logprobs"].as_u64().is_some()
                || body["logprobs"].as_bool() == Some(true),
        })
    }

    /// Returns the number of choices.
    pub(crate) fn choices(&self) -> u64 {
        self.prompts.len() as u64 * self.n
    }

    /// Returns the prompt of a choice, and its KV cache if the instance computes it.
    pub(crate) fn prompt(&self, choice: u64) -> (&str, u64) {
        let prompt = &self.prompts[(choice / self.n) as usize];
        (prompt, model::cache(prompt) ^ (choice % self.n).wrapping_mul(0x51_7c_c1_b7_27_22_0a_95))
    }

    pub(crate) fn usage(&self) -> Value {
        let prompt: usize = self.prompts.iter().map(|prompt| count_tokens(prompt)).sum();
        let completion = self.max_tokens * self.choices();
        json!({
            "prompt_tokens": prompt, "total_tokens": prompt as u64 + completion, "completion_tokens": completion,
            "prompt_tokens_details": null,
        })
    }

    /// Returns the body of an answer that is not streamed. `caches` has the KV cache of each
    /// choice. `computed` says whether the prompt was computed here, so that its tokens have
    /// probabilities.
    pub(crate) fn whole(&self, id: &str, caches: &[u64], computed: bool, params: &Value) -> Value {
        let choices: Vec<_> = caches
            .iter()
            .enumerate()
            .map(|(index, cache)| self.choice(index, *cache, computed))
            .collect();
        json!({
            "id": id, "object": if self.chat { "chat.completion" } else { "text_completion" }, "created": 1_795_261_458,
            "model": self.model, "choices": choices, "usage": self.usage(), "system_fingerprint": "kvx-instance",
            "kv_transfer_params": params,
        })
    }

    fn choice(&self, index: usize, cache: u64, computed: bool) -> Value {
        let pieces: Vec<_> = (0..self.max_tokens).map(|token| model::token(cache, token)).collect();
        let text = pieces.concat();
        if self.chat {
            let content: Vec<_> = pieces.iter().map(|piece| chat_logprob(piece)).collect();
            let logprobs = if self.logprobs { json!({ "content": content }) } else { Value::Null };
            return json!({
                "index": index, "message": {"role": "assistant", "content": text, "refusal": null}, "logprobs": logprobs,
                "finish_reason": "length", "stop_reason": null,
            });
        }
        let (prompt, _) = self.prompt(index as u64);
        let shown = if self.echo { prompt } else { "" };
        let mut tokens: Vec<(String, Value)> = Vec::new();
        if self.echo {
            let characters: Vec<_> = prompt.chars().collect();
            for (at, token) in characters.chunks(4).enumerate() {
                let logprob = if computed && at > 0 { json!(-0.5) } else { Value::Null };
                tokens.push((token.iter().collect(), logprob));
            }
        }
        tokens.extend(pieces.iter().map(|piece| ((*piece).to_owned(), json!(-0.25))));
        let (tokens, token_logprobs): (Vec<_>, Vec<_>) = tokens.into_iter().unzip();
        let logprobs = if self.logprobs {
            json!({"tokens": tokens, "token_logprobs": token_logprobs})
        } else {
            Value::Null
        };
        json!({
            "index": index, "text": format!("{shown}{text}"), "logprobs": logprobs, "finish_reason": "length",
            "stop_reason": null,
        })
    }

    /// Returns the chunk of a stream with a token; the last one has the finish reason.
    pub(crate) fn chunk(
        &self,
        id: &str,
        index: u64,
        piece: &str,
        last: bool,
        params: &Value,
    ) -> Value {
        let finish = if last { json!("length") } else { Value::Null };
        let mut choice =
            json!({"index": index, "logprobs": null, "finish_reason": finish, "stop_reason": null});
        if self.chat {
            choice["delta"] = json!({ "content": piece });
            if self.logprobs {
                choice["logprobs"] = json!({ "content": [chat_logprob(piece)] });
            }
        } else {
            choice["text"] = piece.into();
            if self.logprobs {
                choice["logprobs"] = json!({"tokens": [piece], "token_logprobs": [-0.25]});
            }
        }
        let mut chunk = self.bare_chunk(id, vec![choice]);
        if last && !params.is_null() {
            chunk["kv_transfer_params"] = params.clone();
        }
        chunk
    }

    /// Returns the first chunk of a chat's stream.
    pub(crate) fn first_chunk(&self, id: &str, index: u64) -> Value {
        let delta = json!({"role": "assistant", "content": ""});
        self.bare_chunk(
            id,
            vec![json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null})],
        )
    }

    /// Returns the chunk with the usage.
    pub(crate) fn usage_chunk(&self, id: &str) -> Value {
        let mut chunk = self.bare_chunk(id, Vec::new());
        chunk["usage"] = self.usage();
        chunk
    }

    fn bare_chunk(&self, id: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": id, "object": if self.chat { "chat.completion.chunk" } else { "text_completion" },
            "created": 1_795_261_458, "model": self.model, "choices": choices,
        })
    }
}

fn chat_logprob(piece: &str) -> Value {
    json!({"token": piece, "logprob": -0.25, "bytes": piece.as_bytes(), "top_logprobs": []})
}

/// Returns an error in vLLM's form.
pub(crate) fn error(status: u16, sentence: &str) -> Value {
    let kind = match status {
        400 => "BadRequestError",
        401 => "Unauthorized",
        404 => "NotFoundError",
        503 => "ServiceUnavailableError",
        _ => "InternalServerError",
    };
    json!({"error": {"message": sentence, "type": kind, "param": null, "code": status}})
}
