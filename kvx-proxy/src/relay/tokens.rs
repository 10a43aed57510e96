//! A prompt's tokens, which the events of instances name: from the request, or from an instance.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use hyper::Method;
use hyper::header::HeaderMap;
use hyper::http::uri::PathAndQuery;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::core::{Core, LiveSetup};
use crate::fleet::instance::Instance;
use crate::fleet::knowledge::KnowledgeLevel;
use crate::fleet::models::ModelName;
use crate::fleet::tokens::PromptTokens;
use crate::request::{CompletionRequest, changes_the_prompt};
use crate::setup::Choice;
use crate::upstream::{Fault, WHOLE, json_headers, whole};

/// Shorter prompts (estimated) are not worth a question to an instance.
const SHORTEST: u64 = 64;
/// The most tokens that a chat template adds.
const TEMPLATE_TOKENS: usize = 4096;
/// The most bytes of an error that are read.
const ERROR: usize = 16 << 10;
/// The time for an answer. A request waits for it.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The fields of a completion, and of a chat completion, from which an instance makes tokens.
const OF_PROMPT: [&str; 3] = ["model", "prompt", "add_special_tokens"];
const OF_CHAT: [&str; 9] = [
    "model",
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "tools",
];
/// Fields that may change an answer, but no token of its prompt.
const WITHOUT_EFFECT: [&str; 13] = [
    "best_of",
    "echo",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "metadata",
    "parallel_tool_calls",
    "priority",
    "prompt_logprobs",
    "response_format",
    "return_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "store",
];

/// Finds the tokens of a request's prompt, if an instance's events can be compared with them.
/// Otherwise the choice goes by the prompt's text.
pub(crate) async fn find(
    core: &Core,
    live: &LiveSetup,
    headers: &HeaderMap,
    asked: &mut CompletionRequest,
) {
    let knows = |one: &Arc<Instance>| {
        one.setup.events.is_some() && one.state.cache().level() != KnowledgeLevel::History
    };
    if live.setup.choice != Choice::Cached || !live.fleet.all().any(knows) {
        return;
    }
    let model = asked.model.as_deref().map(|model| live.fleet.names.named(model));
    let is_adapter =
        |one: &Arc<Instance>| model.is_some_and(|model| one.state.models.has_adapter(model));
    // Blocks of an adapter are no other request's blocks.
    if live.fleet.all().any(is_adapter) {
        return;
    }
    let ids = match token_source(asked) {
        None => return,
        Some(TokenSource::Request(ids)) => ids,
        Some(TokenSource::Instance(_)) if asked.prompt_tokens < SHORTEST => return,
        Some(TokenSource::Instance(body)) => {
            let is_chat = asked.is_chat();
            let Some(instance) = tokenizer(live, model, is_chat) else { return };
            let pause = instance.state.tokenizer_pause(is_chat);
            let (result, begins, why) = match ask(live, &instance, headers, body).await {
                Ok(ids) => {
                    pause.answered();
                    core.metrics.tokenization("ok");
                    return remember(live, asked, ids);
                }
                Err(NoTokens::Refused(status)) => (
                    "refused",
                    pause.refused(std::time::Instant::now()),
                    format!("it answers {status} to many requests"),
                ),
                Err(NoTokens::Missing(status)) => (
                    "failed",
                    pause.missing(std::time::Instant::now()),
                    format!("it answers {status}: the server has no such endpoint"),
                ),
                Err(NoTokens::Failed(fault)) => {
                    ("failed", pause.failed(std::time::Instant::now()), fault.to_string())
                }
            };
            core.metrics.tokenization(result);
            if begins {
                let why = format!("POST /tokenize: {why}");
                core.errors.add(instance.name(), &why);
                tracing::warn!(
                    instance = instance.name(),
                    why,
                    "it is not asked for the tokens of prompts for some time: others are, or else \
                     instances are chosen by a prompt's text"
                );
            }
            return;
        }
    };
    remember(live, asked, ids);
}

/// Keeps the tokens of a prompt.
fn remember(live: &LiveSetup, asked: &mut CompletionRequest, ids: Vec<u32>) {
    if ids.is_empty() {
        return;
    }
    let tokens = PromptTokens::new(ids);
    // The keys are computed here, and not while a choice holds the lock of an instance's cache.
    for instance in live.fleet.all() {
        let block_size = instance.state.cache().block_size();
        block_size.into_iter().for_each(|size| _ = tokens.keys(size));
    }
    asked.prompt_tokens = tokens.count();
    asked.prompt.tokens = Some(Arc::new(tokens));
}

enum TokenSource {
    /// The request has the tokens.
    Request(Vec<u32>),
    /// An instance has them, by this body for `/tokenize`.
    Instance(bytes::Bytes),
}

/// Returns how to find a prompt's tokens; `None` if they do not determine its blocks, or are made
/// in a way that this proxy does not know.
fn token_source(asked: &CompletionRequest) -> Option<TokenSource> {
    let body = &asked.body;
    let is_set = |value: &[u8]| value != b"null";
    let is_chat = asked.is_chat();
    if is_chat && !body.get("messages").is_some_and(has_texts_only) {
        return None;
    }
    let fields = if is_chat { &OF_CHAT[..] } else { &OF_PROMPT[..] };
    let unknown = |key: &str, value: &[u8]| {
        changes_the_prompt(key)
            && !fields.contains(&key)
            && !WITHOUT_EFFECT.contains(&key)
            && (key, value) != ("tool_choice", b"\"auto\"")
    };
    if body.iter().any(|(key, value)| is_set(value) && unknown(key, value)) {
        return None;
    }
    if !is_chat {
        let prompt = body.get("prompt")?;
        if let Ok(ids) = serde_json::from_str::<Vec<u32>>(prompt) {
            return Some(TokenSource::Request(ids));
        }
        if let Ok([ids]) = serde_json::from_str::<[Vec<u32>; 1]>(prompt) {
            return Some(TokenSource::Request(ids));
        }
    }
    let mut question = String::from("{");
    for (key, value) in body.iter().filter(|(key, value)| fields.contains(key) && is_set(value)) {
        let value = std::str::from_utf8(value).ok()?;
        let value = match serde_json::from_str::<[&RawValue; 1]>(value) {
            // A list of one text is that text.
            Ok([one]) if key == "prompt" => one.get(),
            _ => value,
        };
        let comma = if question.len() > 1 { "," } else { "" };
        question += &format!("{comma}\"{key}\":{value}");
    }
    question.push('}');
    Some(TokenSource::Instance(question.into()))
}

/// Returns true if messages of a chat have no images or other parts than texts.
fn has_texts_only(messages: &str) -> bool {
    #[derive(Deserialize)]
    struct Message<'a> {
        #[serde(borrow)]
        content: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Part<'a> {
        #[serde(borrow, rename = "type")]
        kind: Option<Cow<'a, str>>,
    }
    let Ok(messages) = serde_json::from_str::<Vec<Message<'_>>>(messages) else { return false };
    messages.iter().filter_map(|message| message.content).all(|content| {
        let content = content.get();
        content.starts_with('"')
            || serde_json::from_str::<Vec<Part<'_>>>(content)
                .is_ok_and(|parts| parts.iter().all(|part| part.kind.as_deref() == Some("text")))
    })
}

/// Returns an instance that can make tokens for a model: the least busy prefill instance that is
/// up, or else a decode instance.
fn tokenizer(
    live: &LiveSetup,
    model: Option<ModelName<'_>>,
    is_chat: bool,
) -> Option<Arc<Instance>> {
    let now = std::time::Instant::now();
    let fits = |one: &&Arc<Instance>| {
        one.state.is_sound()
            && !one.state.tokenizer_pause(is_chat).is_on(now)
            && model.is_none_or(|model| one.state.models.serve(model))
    };
    let least = |of: &[Arc<Instance>]| {
        of.iter().filter(fits).min_by_key(|one| one.state.outstanding()).cloned()
    };
    least(&live.fleet.prefill).or_else(|| least(&live.fleet.decode))
}

/// Why an instance has returned no tokens.
enum NoTokens {
    /// It rejected the request with this status.
    Refused(u16),
    /// It answered with this status that it has no `/tokenize`.
    Missing(u16),
    Failed(Fault),
}

async fn ask(
    live: &LiveSetup,
    instance: &Instance,
    headers: &HeaderMap,
    body: bytes::Bytes,
) -> Result<Vec<u32>, NoTokens> {
    #[derive(Deserialize)]
    struct Tokens {
        tokens: Vec<u32>,
    }
    let broken = |why: String| NoTokens::Failed(Fault::Broken(why));
    let asked = body.len();
    let mut headers = headers.clone();
    json_headers(&mut headers, asked);
    crate::request::headers::readable(&mut headers);
    let until = Instant::now() + TIMEOUT;
    let path = PathAndQuery::from_static("/tokenize");
    let sent = live.upstream.send(&instance.setup, Method::POST, &path, headers, body, until);
    let response = sent.await.map_err(NoTokens::Failed)?;
    let status = response.status().as_u16();
    match status {
        200 => {}
        400 | 413 | 422 => return Err(NoTokens::Refused(status)),
        404 => {
            // vLLM answers so for an unknown model too, which a client may have named.
            let error = whole(response.into_body(), ERROR, until).await;
            let is_about_model =
                error.is_ok_and(|error| String::from_utf8_lossy(&error).contains("model"));
            return Err(match is_about_model {
                true => NoTokens::Refused(status),
                false => NoTokens::Missing(status),
            });
        }
        405 | 501 => return Err(NoTokens::Missing(status)),
        _ => return Err(broken(format!("it answered {status}"))),
    }
    // A token has at least a byte of the request, unless a template adds it, and at most 16 digits
    // and separators.
    let most_tokens = asked + TEMPLATE_TOKENS;
    let answer = whole(response.into_body(), WHOLE.min(16 * most_tokens), until).await;
    let answer = answer.map_err(NoTokens::Failed)?;
    let Tokens { tokens } = serde_json::from_slice(&answer).map_err(|error| {
        // The error's own text may have a part of the prompt.
        broken(format!("its answer has no list of tokens: {:?} error", error.classify()))
    })?;
    if tokens.len() > most_tokens {
        return Err(broken(format!("it answered {} tokens for {asked} bytes", tokens.len())));
    }
    Ok(tokens)
}

impl Core {
    /// Compares a prediction with the usage in an instance's answer, if it reports cached tokens.
    pub(crate) fn compare_cached(
        &self,
        instance: &crate::fleet::instance::InFlight,
        answer: &serde_json::Value,
    ) {
        if self.live().setup.choice != Choice::Cached || !instance.instance.has_one_cache() {
            return; // there was no prediction
        }
        let number = |path| answer.pointer(path).and_then(serde_json::Value::as_u64);
        let reported = number("/usage/prompt_tokens_details/cached_tokens");
        let (Some(reported), Some(prompt)) = (reported, number("/usage/prompt_tokens")) else {
            return;
        };
        let instance_name = instance.instance.name();
        let predicted = instance.predicted();
        if instance.instance.state.cache().compare(predicted, reported, prompt) {
            self.metrics.drifts.fetch_add(1, Relaxed);
            let why = format!(
                "its KV events promised {} cached tokens of a prompt, of which it reports \
                 {reported}, and so for half of the latest prompts",
                predicted.tokens
            );
            self.errors.add(instance_name, &why);
            tracing::warn!(
                instance = instance_name,
                why,
                "KV events and answers disagree: the router goes by its history for a minute"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;
    use crate::fleet::knowledge::index::EventIndex;
    use crate::log::AccessLogger;
    use crate::recording::writer::Recorder;
    use crate::setup::{AccessLog, Setup};

    /// Asks an instance, which answers with this status and body, for tokens. Returns its state.
    async fn after(status: &str, body: &str) -> Arc<Instance> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let setup = format!(
            "[[pool]]\ndecode = [{{ url = 'http://127.0.0.1:{port}', events = 'tcp://*:1' }}]"
        );
        let live = LiveSetup::new(Setup::from_toml(&setup).unwrap(), None).unwrap();
        let access = AccessLogger::open(&AccessLog::Off, Box::new(std::io::sink())).unwrap();
        let core = Core::new(live, access, Recorder::off()).0;
        let live = core.live();
        let instance = Arc::clone(&live.fleet.decode[0]);
        instance.state.healthy();
        instance.state.cache().begin(EventIndex::default(), None);
        let length = body.len();
        let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{body}");
        let serving = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut asked = Vec::new();
            while !asked.ends_with(b"\"}") {
                assert_ne!(stream.read_buf(&mut asked).await.unwrap(), 0);
            }
            stream.write_all(answer.as_bytes()).await.unwrap();
            stream
        };
        let body = serde_json::json!({"model": "m", "prompt": "word ".repeat(200)}).to_string();
        let mut asked = CompletionRequest::new(body.into(), 16).unwrap();
        let headers = HeaderMap::new();
        let (_stream, ()) = tokio::join!(serving, find(&core, &live, &headers, &mut asked));
        instance
    }

    #[tokio::test]
    async fn an_instance_without_the_endpoint_is_not_asked_again_for_long() {
        let now = std::time::Instant::now();
        let is_paused = |instance: &Instance, seconds| {
            instance.state.tokenizer_pause(false).is_on(now + Duration::from_secs(seconds))
        };
        for status in ["404 Not Found", "405 Method Not Allowed", "501 Not Implemented"] {
            let instance = after(status, r#"{"detail": "Not Found"}"#).await;
            assert!(is_paused(&instance, 200), "{status}");
        }
        let unknown = r#"{"error": {"message": "The model `m` does not exist.", "code": 404}}"#;
        assert!(!is_paused(&*after("404 Not Found", unknown).await, 0), "clients choose the model");
        let instance = after("500 Internal Server Error", "").await;
        assert!(is_paused(&instance, 3) && !is_paused(&instance, 200));
    }

    fn source_of(body: serde_json::Value) -> Option<Result<Vec<u32>, serde_json::Value>> {
        let asked = CompletionRequest::new(body.to_string().into(), 16).unwrap();
        token_source(&asked).map(|source| match source {
            TokenSource::Request(ids) => Ok(ids),
            TokenSource::Instance(body) => Err(serde_json::from_slice(&body).unwrap()),
        })
    }

    #[test]
    fn the_body_has_all_fields_that_determine_the_tokens() {
        use serde_json::json;
        for ids in [json!([1, 2]), json!([[1, 2]])] {
            assert_eq!(source_of(json!({"prompt": ids, "stream": true})), Some(Ok(vec![1, 2])));
        }
        for prompt in [json!("Once"), json!(["Once"])] {
            let body = json!({"model": "m", "prompt": prompt, "max_tokens": 5, "suffix": null});
            let wanted = json!({"model": "m", "prompt": "Once"});
            assert_eq!(source_of(body), Some(Err(wanted)));
        }
        let chat = json!({
            "messages": [{"role": "user", "content": "a"}], "tools": [{}],
            "chat_template_kwargs": {"enable_thinking": false},
        });
        let mut asked = chat.clone();
        (asked["temperature"], asked["response_format"]) = (0.5.into(), json!({}));
        assert_eq!(source_of(asked), Some(Err(chat.clone())));
        asked = chat.clone();
        asked["tool_choice"] = "auto".into();
        assert_eq!(source_of(asked), Some(Err(chat.clone())), "tools are in the prompt anyway");
        let mut asked = chat.clone();
        asked["messages"][0]["content"] = json!([{"type": "text", "text": "a"}]);
        assert_eq!(source_of(asked.clone()), Some(Err(asked.clone())));
        asked["messages"][0]["content"][0] = json!({"type": "image_url", "image_url": {}});
        assert_eq!(source_of(asked), None, "the image would be loaded twice");
        for unknown in
            ["tool_choice", "cache_salt", "documents", "reasoning_effort", "an_option_of_tomorrow"]
        {
            let mut asked = chat.clone();
            asked[unknown] = "x".into();
            assert_eq!(source_of(asked), None, "{unknown}");
        }
    }
}
