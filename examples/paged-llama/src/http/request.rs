//! Requests for completions and chat completions.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::HeaderMap;
use serde_json::Value;

use super::client::{self, Client};
use super::error::{ApiError, Result};
use super::fields::Fields;
use super::prompt::{self, MOST_ANSWERS, Prompt, too_many};
use super::service::Service;
use crate::engine::{Request, Sampling};
use crate::kv::TransferParams;

/// The most stops per request.
const MOST_STOPS: usize = 64;
/// The longest stop, in bytes.
const LONGEST_STOP: usize = 4096;
/// The most stop tokens per request.
const MOST_STOP_TOKENS: usize = 1024;
/// The most probabilities that one request may report.
const MOST_TOLD: usize = 1 << 19;

/// A parsed and checked request.
pub(crate) struct CompletionRequest {
    pub(crate) chat: bool,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) prompts: Vec<Prompt>,
    pub(crate) n: usize,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) continuous_usage: bool,
    pub(crate) echo: bool,
    /// The response contains only the prompt.
    pub(crate) nothing_new: bool,
    pub(crate) return_token_ids: bool,
    pub(crate) tokens_as_ids: bool,
    pub(crate) logprobs: Option<usize>,
    max_tokens: Option<usize>,
    min_tokens: usize,
    sampling: Sampling,
    seeded: bool,
    ends: Vec<u32>,
    stop_tokens: Vec<u32>,
    stop: Vec<String>,
    include_stop: bool,
    skip_special: bool,
    transfer: Option<TransferParams>,
}

impl CompletionRequest {
    pub(crate) fn read(
        service: &Service,
        chat: bool,
        client: Client,
        headers: &HeaderMap,
        body: &Value,
    ) -> Result<Self> {
        let fields = Fields::of(body)?;
        let model = service.model(fields.text("model")?)?;
        let stream = fields.flag("stream")?;
        let (include_usage, continuous_usage) = stream_options(&fields, stream)?;
        let generation = service.tokenizer.generation();
        let top_k = match fields.integer("top_k")? {
            Some(-1 | 0) => Some(0),
            Some(least) if least < -1 => {
                return Err(ApiError::of(
                    "top_k",
                    format!("top_k must be 0 (disable), or at least 1, got {least}."),
                ));
            }
            given => given.map(|given| given as usize),
        };
        let top_p = fields.number("top_p", 0.0, 1.0)?;
        if top_p == Some(0.0) {
            return Err(ApiError::of("top_p", "top_p must be in (0, 1], got 0."));
        }
        let seed = fields.integer("seed")?;
        let repetition =
            fields.number("repetition_penalty", 0.0, 100.0)?.or(generation.repetition_penalty);
        let sampling = Sampling {
            temperature: fields
                .number("temperature", 0.0, 100.0)?
                .or(generation.temperature)
                .unwrap_or(1.0),
            top_p: top_p.or(generation.top_p).unwrap_or(1.0),
            top_k: top_k.or(generation.top_k).unwrap_or(0),
            min_p: fields.number("min_p", 0.0, 1.0)?.or(generation.min_p).unwrap_or(0.0),
            frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?.unwrap_or(0.0),
            presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0),
            repetition_penalty: repetition.filter(|penalty| *penalty > 0.0).unwrap_or(1.0),
            seed: seed.map_or_else(random, |seed| seed as u64),
        };
        let n = fields.count("n", 1)?.unwrap_or(1);
        if fields.count("best_of", 1)?.is_some_and(|best| best != n) {
            return Err(ApiError::of("best_of", "this server requires best_of to equal n"));
        }
        let limit = match chat {
            true => fields.count("max_completion_tokens", 1)?.or(fields.count("max_tokens", 1)?),
            false => fields.count("max_tokens", 0)?.or(Some(16)),
        };
        let echo = fields.flag("echo")?;
        if chat && echo {
            return Err(ApiError::of(
                "echo",
                "echo is not supported by this server's chats; leave it out",
            ));
        }
        let nothing_new = limit == Some(0);
        if nothing_new && (chat || !echo) {
            return Err(ApiError::of("max_tokens", "max_tokens must be at least 1, got 0."));
        }
        let min_tokens = fields.count("min_tokens", 0)?.unwrap_or(0);
        if limit.is_some_and(|limit| min_tokens > limit.max(1)) {
            let limit = limit.unwrap_or_default();
            let words = format!(
                "min_tokens must be less than or equal to max_tokens={limit}, got {min_tokens}."
            );
            return Err(ApiError::of("min_tokens", words));
        }
        let stop = fields.texts("stop")?;
        if stop.iter().any(String::is_empty) {
            return Err(ApiError::of("stop", "stop cannot contain an empty string."));
        }
        let stop_tokens = fields.tokens("stop_token_ids")?;
        let longest_stop = stop.iter().map(String::len).max().unwrap_or(0);
        if stop.len() > MOST_STOPS
            || longest_stop > LONGEST_STOP
            || stop_tokens.len() > MOST_STOP_TOKENS
        {
            let words = format!(
                "send at most {MOST_STOPS} stops of {LONGEST_STOP} bytes each and \
                 {MOST_STOP_TOKENS} stop_token_ids"
            );
            return Err(ApiError::of("stop", words));
        }
        let ignores_ends = fields.flag("ignore_eos")?;
        let name = headers
            .get("x-request-id")
            .and_then(|name| name.to_str().ok())
            .filter(|name| name.len() <= 256);
        let name =
            name.map_or_else(|| format!("{:016x}{:016x}", random(), random()), str::to_owned);
        let asked = CompletionRequest {
            chat,
            id: format!("{}-{name}", if chat { "chatcmpl" } else { "cmpl" }),
            created: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
            model,
            prompts: if chat {
                vec![prompt::of_chat(service, &fields)?]
            } else {
                prompt::of_completion(service, &fields)?
            },
            n,
            stream,
            include_usage,
            continuous_usage,
            echo,
            nothing_new,
            return_token_ids: fields.flag("return_token_ids")?,
            tokens_as_ids: fields.flag("return_tokens_as_token_ids")?,
            logprobs: logprobs(service, &fields, chat)?,
            max_tokens: limit,
            min_tokens,
            sampling,
            seeded: seed.is_some(),
            ends: if ignores_ends { Vec::new() } else { generation.ends.clone() },
            stop_tokens,
            stop,
            include_stop: fields.flag("include_stop_str_in_output")?,
            skip_special: fields.flag_or("skip_special_tokens", true)?,
            transfer: fields.get("kv_transfer_params").map(transfer).transpose()?,
        };
        asked.check(service)?;
        if let (Some(trust), Some(params)) = (&service.trust, &asked.transfer) {
            let checked = client::check_params(trust, client, params);
            checked.inspect_err(|refusal| service.refused_params.log(refusal))?;
        }
        Ok(asked)
    }

    fn check(&self, service: &Service) -> Result<()> {
        let answers = self.prompts.len().saturating_mul(self.n);
        if answers > MOST_ANSWERS {
            return Err(too_many(answers));
        }
        if self.transfer.is_some() && answers > 1 {
            let words = "kv_transfer_params are for one prompt and one answer; send the others in separate requests";
            return Err(ApiError::of("kv_transfer_params", words));
        }
        let longest = service.limits().model_len;
        // Each reported probability is kept until the answer is complete, including those of an
        // echoed prompt.
        let new = self.max_tokens.unwrap_or(longest).min(longest);
        let echoed = |prompt: &Prompt| if self.echo { prompt.tokens.len() } else { 0 };
        let tokens =
            self.prompts.iter().map(|prompt| new + echoed(prompt)).fold(0, usize::saturating_add);
        let told = self.logprobs.map_or(0, |top| top + 1);
        let told = tokens.saturating_mul(self.n).saturating_mul(told);
        if told > MOST_TOLD {
            return Err(ApiError::of(
                "logprobs",
                "the response would contain too many probabilities; lower n, max_tokens or \
                 logprobs",
            ));
        }
        for prompt in &self.prompts {
            let tokens = prompt.tokens.len();
            if tokens == 0 {
                return Err(ApiError::of("prompt", "The prompt has no tokens; send at least one"));
            }
            let size = service.vocabulary;
            if let Some(token) = prompt.tokens.iter().find(|token| **token as usize >= size) {
                return Err(ApiError::of(
                    "prompt",
                    format!("Token id {token} is out of vocabulary, which ends at {}", size - 1),
                ));
            }
            let asked = self.max_tokens.unwrap_or(1).max(1);
            if tokens + asked > longest {
                return Err(ApiError::of(
                    if self.chat { "messages" } else { "prompt" },
                    format!(
                        "This model's maximum context length is {longest} tokens. The prompt has \
                         {tokens}, and {asked} more were requested; shorten the prompt or lower \
                         max_tokens."
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Returns the number of answers.
    pub(crate) fn answers(&self) -> usize {
        self.prompts.len() * self.n
    }

    /// Returns the prompt of an answer.
    pub(crate) fn prompt(&self, answer: usize) -> &Prompt {
        &self.prompts[answer / self.n]
    }

    /// Returns the engine's request for an answer.
    pub(crate) fn request(&self, service: &Service, answer: usize) -> Request {
        let (prompt, child) = (answer / self.n, answer % self.n);
        let tokens = self.prompts[prompt].tokens.clone();
        let room = service.limits().model_len - tokens.len();
        let most = service.tokenizer.generation().max_new_tokens.unwrap_or(usize::MAX).min(room);
        let mut name = self.id.clone();
        if !self.chat {
            name += &format!("-{prompt}");
        }
        if self.n > 1 {
            name = format!("{child}_{name}");
        }
        let sampling = Sampling {
            seed: if self.seeded {
                self.sampling.seed.wrapping_add(child as u64)
            } else {
                random()
            },
            ..self.sampling.clone()
        };
        Request {
            // Clients may reuse a request's name; the engine's name must be unique.
            name: format!("{name}-{:08x}", random() as u32),
            prompt: tokens,
            sampling,
            max_tokens: self.max_tokens.unwrap_or(usize::MAX).max(1).min(most),
            min_tokens: self.min_tokens,
            ends: self.ends.clone(),
            stop_tokens: self.stop_tokens.clone(),
            stop: self.stop.clone(),
            include_stop: self.include_stop,
            skip_special: self.skip_special,
            logprobs: self.logprobs,
            prompt_logprobs: self.logprobs.filter(|_| self.echo),
            transfer: self.transfer.clone(),
        }
    }
}

/// Returns a random number.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn stream_options(fields: &Fields<'_>, stream: bool) -> Result<(bool, bool)> {
    let Some(options) = fields.get("stream_options") else { return Ok((false, false)) };
    if !stream {
        return Err(ApiError::of(
            "stream_options",
            "Stream options can only be defined when `stream=True`.",
        ));
    }
    let options = options
        .as_object()
        .ok_or_else(|| ApiError::of("stream_options", "stream_options must be an object"))?;
    let options = Fields(options);
    Ok((options.flag("include_usage")?, options.flag("continuous_usage_stats")?))
}

fn logprobs(service: &Service, fields: &Fields<'_>, chat: bool) -> Result<Option<usize>> {
    let most = service.most_logprobs.min(service.vocabulary);
    let check = |key: &'static str, count: Option<i64>| match count {
        None => Ok(None),
        // All tokens of the vocabulary.
        Some(-1) if most == service.vocabulary => Ok(Some(most)),
        Some(count) => match usize::try_from(count).ok().filter(|count| *count <= most) {
            Some(count) => Ok(Some(count)),
            None => Err(ApiError::of(key, format!("{key} must be in [0, {most}], got {count}."))),
        },
    };
    if !chat {
        return check("logprobs", fields.integer("logprobs")?);
    }
    let top = check("top_logprobs", fields.integer("top_logprobs")?)?;
    match (fields.flag("logprobs")?, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, Some(1..)) => Err(ApiError::of(
            "top_logprobs",
            "when using `top_logprobs`, `logprobs` must be set to true.",
        )),
        (false, _) => Ok(None),
    }
}

fn transfer(value: &Value) -> Result<TransferParams> {
    TransferParams::from_value(value)
        .map_err(|why| ApiError::of("kv_transfer_params", why.to_string()))
}
