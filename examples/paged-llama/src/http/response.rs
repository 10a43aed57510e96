//! The bodies of responses, complete and in chunks.

use serde_json::{Map, Value, json};

use super::request::CompletionRequest;
use super::service::Service;
use crate::engine::{Finish, FinishReason, Logprob, Piece};
use crate::kv::TransferParams;
use crate::tokenizer::Tokenizer;

/// The part of an answer that exists so far.
#[derive(Debug, Default)]
pub(crate) struct PartialAnswer {
    text: String,
    tokens: Vec<(u32, Option<Logprob>)>,
    prompt_logprobs: Vec<Logprob>,
    pub(crate) cached: usize,
    end: Option<Finish>,
    /// The offset of the next token's text, in bytes.
    offset: usize,
}

impl PartialAnswer {
    /// Adds a piece.
    pub(crate) fn add(&mut self, piece: Piece) {
        self.text += &piece.text;
        self.tokens.extend(piece.tokens);
        self.prompt_logprobs.extend(piece.prompt_logprobs);
        self.cached = self.cached.max(piece.cached);
        self.end = piece.end;
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.end.is_some()
    }

    fn tokens(&self) -> Vec<u32> {
        self.tokens.iter().map(|(token, _)| *token).collect()
    }

    fn transfer(&self) -> Value {
        self.end.as_ref().and_then(|end| end.transfer.as_ref()).map_or(Value::Null, value_of)
    }
}

fn value_of(params: &TransferParams) -> Value {
    serde_json::to_value(params).unwrap_or_default()
}

impl CompletionRequest {
    /// Returns the body of an answer that is not streamed.
    pub(crate) fn whole(&self, partial: &mut [PartialAnswer], service: &Service) -> Value {
        let tokenizer = &*service.tokenizer;
        let counts: Vec<usize> = partial
            .iter()
            .map(|partial| if self.nothing_new { 0 } else { partial.tokens.len() })
            .collect();
        let usage =
            self.usage(&counts, partial.first().map_or(0, |partial| partial.cached), service);
        let transfer = partial.first().map_or(Value::Null, PartialAnswer::transfer);
        let choices: Vec<Value> = partial
            .iter_mut()
            .enumerate()
            .map(|(index, partial)| self.choice(index, partial, tokenizer))
            .collect();
        let mut body = json!({
            "id": self.id, "object": if self.chat { "chat.completion" } else { "text_completion" },
            "created": self.created, "model": self.model, "choices": choices, "service_tier": null,
            "system_fingerprint": concat!("kvx-", env!("CARGO_PKG_VERSION")), "usage": usage,
            "kv_transfer_params": transfer,
        });
        if self.chat {
            body["prompt_logprobs"] = Value::Null;
            body["prompt_token_ids"] = self.prompt_ids(0);
        }
        body
    }

    fn choice(&self, index: usize, partial: &mut PartialAnswer, tokenizer: &Tokenizer) -> Value {
        let (reason, stop) = ended(partial.end.as_ref());
        let ids = if self.return_token_ids { json!(partial.tokens()) } else { Value::Null };
        let logprobs = self.logprobs_of(index, partial, tokenizer, true);
        if self.chat {
            return json!({
                "index": index, "message": {"role": "assistant", "content": partial.text, "refusal": null},
                "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop, "token_ids": ids,
            });
        }
        let shown = self.echoed(index, tokenizer);
        let new = if self.nothing_new { "" } else { &partial.text };
        json!({
            "index": index, "text": shown + new, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop,
            "token_ids": ids, "prompt_logprobs": null, "prompt_token_ids": self.prompt_ids(index),
        })
    }

    fn prompt_ids(&self, index: usize) -> Value {
        if self.return_token_ids { json!(self.prompt(index).tokens) } else { Value::Null }
    }

    fn echoed(&self, index: usize, tokenizer: &Tokenizer) -> String {
        if !self.echo {
            return String::new();
        }
        let prompt = self.prompt(index);
        prompt.text.clone().unwrap_or_else(|| tokenizer.decode(&prompt.tokens, true))
    }

    /// Returns the chunk for a piece; `first` if it is the answer's first one.
    pub(crate) fn chunk(
        &self,
        index: usize,
        piece: Piece,
        partial: &mut PartialAnswer,
        service: &Service,
    ) -> Value {
        let tokenizer = &*service.tokenizer;
        let first = partial.tokens.is_empty();
        let offset = partial.offset;
        let mut new = PartialAnswer { offset, ..PartialAnswer::default() };
        new.add(piece);
        let (reason, stop) = ended(new.end.as_ref());
        let logprobs = self.logprobs_of(index, &mut new, tokenizer, first);
        partial.offset = new.offset;
        let ids = if self.return_token_ids { json!(new.tokens()) } else { Value::Null };
        let prompt_ids = if first { self.prompt_ids(index) } else { Value::Null };
        let mut choice = json!({
            "index": index, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop, "token_ids": ids,
        });
        if self.chat {
            choice["delta"] = json!({ "content": new.text });
        } else {
            let shown = if first { self.echoed(index, tokenizer) } else { String::new() };
            choice["text"] = (shown + if self.nothing_new { "" } else { &new.text }).into();
            choice["prompt_token_ids"] = prompt_ids;
        }
        let transfer = new.transfer();
        partial.cached = partial.cached.max(new.cached);
        partial.end = new.end;
        partial.tokens.extend(new.tokens);
        let mut chunk = self.bare_chunk(vec![choice]);
        if !transfer.is_null() {
            chunk["kv_transfer_params"] = transfer;
        }
        if self.continuous_usage {
            chunk["usage"] = self.usage(&[partial.tokens.len()], partial.cached, service);
        }
        chunk
    }

    /// Returns the first chunk of a chat's answer.
    pub(crate) fn first_chunk(&self, index: usize) -> Value {
        let delta = json!({"role": "assistant", "content": ""});
        self.bare_chunk(vec![
            json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null}),
        ])
    }

    /// Returns the chunk with the usage.
    pub(crate) fn usage_chunk(&self, partial: &[PartialAnswer], service: &Service) -> Value {
        let counts: Vec<usize> = partial.iter().map(|partial| partial.tokens.len()).collect();
        let mut chunk = self.bare_chunk(Vec::new());
        chunk["usage"] =
            self.usage(&counts, partial.first().map_or(0, |partial| partial.cached), service);
        chunk
    }

    fn bare_chunk(&self, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id, "object": if self.chat { "chat.completion.chunk" } else { "text_completion" },
            "created": self.created, "model": self.model, "choices": choices,
        })
    }

    fn usage(&self, counts: &[usize], cached: usize, service: &Service) -> Value {
        let prompt: usize = self.prompts.iter().map(|prompt| prompt.tokens.len()).sum();
        let completion: usize = counts.iter().sum();
        let details =
            if service.prompt_details { json!({ "cached_tokens": cached }) } else { Value::Null };
        json!({
            "prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion,
            "prompt_tokens_details": details,
        })
    }

    /// Returns the probabilities of the tokens in `partial`, if `first` after those of an echoed
    /// prompt.
    fn logprobs_of(
        &self,
        index: usize,
        partial: &mut PartialAnswer,
        tokenizer: &Tokenizer,
        first: bool,
    ) -> Value {
        if self.logprobs.is_none() {
            return Value::Null;
        }
        let name = |token: u32| match self.tokens_as_ids {
            true => format!("token_id:{token}"),
            false => tokenizer.piece(token),
        };
        if self.chat {
            let said = |token: u32, logprob: f32| {
                let name = name(token);
                json!({"token": name, "logprob": logprob.max(-9999.0), "bytes": name.as_bytes()})
            };
            let content = partial.tokens.iter().filter_map(|(token, logprob)| {
                let logprob = logprob.as_ref()?;
                let mut one = said(*token, logprob.logprob);
                one["top_logprobs"] =
                    logprob.top.iter().map(|(token, logprob)| said(*token, *logprob)).collect();
                Some(one)
            });
            return json!({ "content": content.collect::<Vec<_>>() });
        }
        let (mut names, mut logprobs, mut tops, mut offsets) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut offset = partial.offset;
        let mut add = |token: u32, logprob: Option<&Logprob>| {
            let name = name(token);
            offsets.push(offset);
            offset += name.chars().count();
            logprobs.push(logprob.map(|logprob| logprob.logprob.max(-9999.0)));
            tops.push(logprob.map(|logprob| {
                // The token itself is included, however unlikely it is.
                let mut top = Map::from_iter([(name.clone(), json!(logprob.logprob.max(-9999.0)))]);
                for (token, logprob) in &logprob.top {
                    let name = if self.tokens_as_ids {
                        format!("token_id:{token}")
                    } else {
                        tokenizer.piece(*token)
                    };
                    top.entry(name).or_insert_with(|| json!(logprob.max(-9999.0)));
                }
                top
            }));
            names.push(name);
        };
        if self.echo && first {
            for (at, token) in self.prompt(index).tokens.iter().enumerate() {
                add(*token, at.checked_sub(1).and_then(|at| partial.prompt_logprobs.get(at)));
            }
        }
        if !self.nothing_new {
            partial.tokens.iter().for_each(|(token, logprob)| add(*token, logprob.as_ref()));
        }
        partial.offset = offset;
        json!({"text_offset": offsets, "token_logprobs": logprobs, "tokens": names, "top_logprobs": tops})
    }
}

/// Returns `finish_reason` and `stop_reason`.
fn ended(end: Option<&Finish>) -> (Value, Value) {
    match end.map(|end| &end.reason) {
        None => (Value::Null, Value::Null),
        Some(FinishReason::Length) => ("length".into(), Value::Null),
        Some(FinishReason::EndOfText) => ("stop".into(), Value::Null),
        Some(FinishReason::Stop(text)) => ("stop".into(), text.as_str().into()),
        Some(FinishReason::StopToken(token)) => ("stop".into(), (*token).into()),
    }
}
