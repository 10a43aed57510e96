//! Parses clients' requests, as far as the proxy needs them.

pub(crate) mod headers;
pub(crate) mod json;
mod prompt;

use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Map, Value};

use self::json::{JsonObject, get, with_text};
use self::prompt::{Prompt, first_two};
use crate::fleet::choice;
use crate::fleet::tokens::PromptTokens;

/// The estimated tokens that a request without a limit generates.
const NEW_TOKENS: u64 = 512;
/// The longest name of a model, and the longest id, in bytes.
const NAME: usize = 1024;
const ID: usize = 256;

/// A completion or chat completion.
#[derive(Clone, Debug)]
pub(crate) struct CompletionRequest {
    /// The body, without parameters that clients must not send.
    pub(crate) body: JsonObject,
    pub(crate) model: Option<String>,
    pub(crate) stream: bool,
    /// The reason that one transfer cannot serve it, if there is one.
    pub(crate) alone: Option<&'static str>,
    /// Estimated length of the prompt.
    pub(crate) prompt_tokens: u64,
    /// Estimated length of the answer.
    pub(crate) new_tokens: u64,
    pub(crate) prompt: PromptKey,
    /// `conversation_id`, if there is one.
    pub(crate) conversation: Option<String>,
}

/// Identifies the beginning of a prompt, for the choice of an instance that has it cached.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PromptKey {
    /// A hash of the prompt's first tokens.
    pub(crate) prefix: u64,
    /// Hashes of the prompt up to the end of each of its whole chunks, and of all other fields from
    /// which the instance makes the prompt.
    pub(crate) chunks: Vec<u64>,
    /// The tokens, once they are known.
    pub(crate) tokens: Option<Arc<PromptTokens>>,
}

/// The key of requests without a prompt that is known.
pub(crate) static NO_PROMPT: PromptKey = PromptKey { prefix: 0, chunks: Vec::new(), tokens: None };

/// Keys that affect the generated answer or its format, but never the blocks of the prompt.
const OF_THE_ANSWER: [&str; 22] = [
    "conversation_id",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "min_p",
    "min_tokens",
    "n",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_logprobs",
    "top_p",
    "user",
];

/// Returns true if a field, besides the prompt, may change the blocks that an instance computes for
/// the same text.
pub(crate) fn changes_the_prompt(key: &str) -> bool {
    !matches!(key, "messages" | "prompt") && !OF_THE_ANSWER.contains(&key)
}

impl CompletionRequest {
    /// Parses a body. Hashes the prompt up to about its first `prefix_tokens` tokens.
    ///
    /// # Errors
    ///
    /// Fails if the body is not a JSON object. The message is for the client.
    pub(crate) fn new(bytes: Bytes, prefix_tokens: usize) -> Result<Self, String> {
        let not_json = |error: serde_json::Error| {
            format!("the body is not JSON ({error}); send a JSON object")
        };
        let Some(mut body) = JsonObject::new(bytes).map_err(not_json)? else {
            return Err("the body is JSON, but not an object; send a JSON object".to_owned());
        };
        drop_transfer_params(&mut body).map_err(not_json)?;
        let sketch = body.sketch();
        let new_tokens = limit(&sketch).and_then(Value::as_u64).unwrap_or(NEW_TOKENS);
        let prompt = Prompt::of(&body);
        Ok(CompletionRequest {
            model: model(&body)?,
            stream: sketch.get("stream") == Some(&Value::Bool(true)),
            alone: alone(&sketch, &body),
            prompt_tokens: prompt.tokens(),
            new_tokens: new_tokens.min(1 << 20),
            prompt: PromptKey {
                prefix: choice::hash(&prompt.beginning(prefix_tokens)),
                chunks: prompt.chunks(body.iter().filter(|(key, _)| changes_the_prompt(key))),
                tokens: None,
            },
            conversation: short_text(&body, "conversation_id", ID).filter(|id| !id.is_empty()),
            body,
        })
    }

    /// Returns true if the prompt is a list of messages.
    pub(crate) fn is_chat(&self) -> bool {
        self.body.get("messages").is_some_and(|messages| messages.starts_with('['))
    }

    /// Returns true if its stream has an event with the usage alone.
    pub(crate) fn streams_usage(&self) -> bool {
        let options = self.body.get("stream_options").unwrap_or_default();
        self.stream && get(options, "include_usage") == Some("true")
    }

    /// Returns the most memory that the request needs until it has an answer: its body, and the
    /// bodies of two legs.
    pub(crate) fn held(&self) -> usize {
        let (values, keys) = self.body.memory();
        3 * values + keys
    }
}

/// Returns the name of the model, if there is one.
///
/// # Errors
///
/// Fails if it is longer than any name. The message is for the client.
fn model(body: &JsonObject) -> Result<Option<String>, String> {
    let is_text = body.get("model").is_some_and(|model| model.starts_with('"'));
    match short_text(body, "model", NAME) {
        None if is_text => Err(format!("the model's name is longer than {NAME} bytes")),
        model => Ok(model),
    }
}

/// Returns a text of at most `most` bytes.
fn short_text(body: &JsonObject, key: &str, most: usize) -> Option<String> {
    let text = |text: &str| (text.len() <= most).then(|| text.to_owned());
    with_text(body.get(key)?, text).flatten()
}

/// Returns true if these bytes may contain the key `kv_transfer_params`. Searches without parsing.
pub(crate) fn names_transfer_params(bytes: &[u8]) -> bool {
    const KEY: &[u8] = b"kv_transfer_params";
    bytes.windows(KEY.len()).any(|some| some == KEY)
}

/// Removes the parameters for the next turn from an instance's complete answer.
pub(crate) fn without_transfer_params(body: Bytes) -> Bytes {
    if !names_transfer_params(&body) {
        return body;
    }
    let Ok(Value::Object(mut map)) = serde_json::from_slice(&body) else { return body };
    match map.get_mut("kv_transfer_params") {
        None | Some(Value::Null) => body,
        Some(params) => {
            *params = Value::Null;
            serde_json::to_vec(&map).unwrap_or_default().into()
        }
    }
}

/// Removes `kv_transfer_params` wherever an engine would read it: it names hosts to connect to.
///
/// # Errors
///
/// Fails if an object that may have it cannot be read.
fn drop_transfer_params(body: &mut JsonObject) -> serde_json::Result<()> {
    body.remove("kv_transfer_params");
    for key in ["vllm_xargs", "extra_args", "extra_body"] {
        let Some(nested) = body.value(key) else { continue };
        if let Some(mut nested) = JsonObject::new(nested)?
            && nested.remove("kv_transfer_params")
        {
            body.insert(key, nested.text());
        }
    }
    Ok(())
}

/// A request that is forwarded unchanged, except for `kv_transfer_params`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PassthroughRequest {
    pub(crate) body: Bytes,
    pub(crate) model: Option<String>,
    /// The id of the response that it continues.
    pub(crate) before: Option<String>,
    pub(crate) stream: bool,
}

impl PassthroughRequest {
    /// Parses a body. Does not parse forms, which begin with their boundary: no engine reads
    /// transfer parameters from them.
    ///
    /// # Errors
    ///
    /// Fails if the body is neither JSON nor the form that its type announces: an engine may accept
    /// what this parser rejects. The message is for the client.
    pub(crate) fn new(body: Bytes, boundary: Option<&str>) -> Result<Self, String> {
        let begins =
            |boundary| body.strip_prefix(b"--").is_some_and(|rest| rest.starts_with(boundary));
        match boundary {
            Some(boundary) if !body.is_empty() && !begins(boundary.as_bytes()) => {
                return Err(format!(
                    "the body is not multipart/form-data: it does not begin with --{boundary}"
                ));
            }
            None if !body.is_empty() => {}
            _ => return Ok(PassthroughRequest { body, ..PassthroughRequest::default() }),
        }
        let not_json = |error: serde_json::Error| {
            format!("the body is not JSON ({error}); send JSON or multipart/form-data")
        };
        let Some(mut object) = JsonObject::new(body.clone()).map_err(not_json)? else {
            return Ok(PassthroughRequest { body, ..PassthroughRequest::default() });
        };
        drop_transfer_params(&mut object).map_err(not_json)?;
        Ok(PassthroughRequest {
            model: model(&object)?,
            before: short_text(&object, "previous_response_id", ID),
            stream: object.get("stream") == Some("true"),
            body: object.text(),
        })
    }
}

/// Checks that every server reads this path as it is written: the choice of a route depends on it.
///
/// # Errors
///
/// Fails if a server may read it as another path. The message is for the client.
pub(crate) fn plain_path(path: &str) -> Result<(), String> {
    let escaped = path.split('%').skip(1).any(|rest| {
        let code = rest.get(..2).and_then(|two| u8::from_str_radix(two, 16).ok());
        code.is_none_or(|byte| byte.is_ascii_alphanumeric() || b"-._~/\\%".contains(&byte))
    });
    let dots = path.split('/').any(|part| matches!(part, "." | ".."));
    match escaped || dots || path.contains("//") {
        true => {
            Err(format!("{path} can be read as another path; write it without escapes, // and .."))
        }
        false => Ok(()),
    }
}

fn limit(map: &Map<String, Value>) -> Option<&Value> {
    let set = |key| map.get(key).filter(|value: &&Value| !value.is_null());
    set("max_completion_tokens").or_else(|| set("max_tokens"))
}

/// Returns the reason to send a request to a decode instance alone, if there is one. One transfer
/// serves one answer, so requests that an engine splits go alone. So do requests for data that only
/// a computed prompt has, and requests with errors that only the decode leg would report, after a
/// useless prefill.
fn alone(map: &Map<String, Value>, body: &JsonObject) -> Option<&'static str> {
    let set = |key| map.get(key).filter(|value: &&Value| !value.is_null());
    let several = |key| set(key).is_some_and(|count| count.as_u64() != Some(1));
    if several("n") {
        return Some("n");
    }
    if several("best_of") {
        return Some("best_of");
    }
    if set("use_beam_search").is_some_and(|beam| *beam != Value::Bool(false)) {
        return Some("use_beam_search");
    }
    if set("prompt_logprobs").is_some() {
        return Some("prompt_logprobs");
    }
    if set("echo").is_some_and(|echo| *echo != Value::Bool(false))
        && set("logprobs").is_some_and(|l| *l != Value::Bool(false))
    {
        return Some("echo with logprobs");
    }
    let limit = limit(map);
    if limit.is_some_and(|limit| limit.as_u64().is_none_or(|limit| limit == 0)) {
        return Some("max_tokens");
    }
    if let (Some(least), Some(most)) = (set("min_tokens"), limit.and_then(Value::as_u64))
        && least.as_u64().is_none_or(|least| least > most)
    {
        return Some("min_tokens");
    }
    if set("stream_options").is_some() && set("stream") != Some(&Value::Bool(true)) {
        return Some("stream_options");
    }
    if set("stream").is_some_and(|stream| !stream.is_boolean()) {
        return Some("stream");
    }
    if set("prompt_embeds").is_some() {
        return Some("prompt_embeds");
    }
    let elements = |key| first_two(body.get(key).unwrap_or_default());
    match (set("prompt"), set("messages")) {
        (None, Some(Value::Array(_))) if elements("messages")[0].is_some() => None,
        (Some(Value::String(_)), None) => None,
        (Some(Value::Array(_)), None) => match elements("prompt") {
            [Some(one), _] if prompt::is_number(one) => None,
            [Some(one), None] if one.starts_with(['"', '[']) => None,
            _ => Some("prompt list"),
        },
        _ => Some("no prompt"),
    }
}

/// Checks for the fuzz target: no panic, no parameter is left that clients may not send, and the
/// recipes accept every request that takes two legs.
pub(crate) fn fuzz(bytes: &[u8]) {
    let bytes = Bytes::copy_from_slice(bytes);
    let sent = PassthroughRequest::new(bytes.clone(), None).unwrap_or_default().body;
    let clean = |value: &Value| {
        assert!(value.get("kv_transfer_params").is_none());
        assert!(
            value.get("vllm_xargs").is_none_or(|nested| nested.get("kv_transfer_params").is_none())
        );
    };
    if let Ok(value) = serde_json::from_slice::<Value>(&sent) {
        clean(&value);
    }
    let parsed = serde_json::from_slice::<Value>(&bytes);
    let Ok(asked) = CompletionRequest::new(bytes, 16) else { return };
    let value: Value = serde_json::from_slice(&asked.body.text()).expect("it is valid JSON");
    clean(&value);
    let mut parsed = parsed.expect("what is taken is valid JSON");
    for object in ["", "/vllm_xargs", "/extra_args", "/extra_body"] {
        if let Some(Value::Object(object)) = parsed.pointer_mut(object) {
            object.remove("kv_transfer_params");
        }
    }
    assert_eq!(value, parsed, "nothing else is changed");
    let again = CompletionRequest::new(asked.body.text(), 16).expect("it is valid JSON");
    assert_eq!(
        (again.alone, again.prompt_tokens, again.prompt),
        (asked.alone, asked.prompt_tokens, asked.prompt)
    );
    if asked.alone.is_none() {
        use kvx_vllm::params::recipe::sequential;
        let sketch = Value::Object(asked.body.sketch());
        let leg = sequential::prefill_leg(&sketch).expect("one transfer serves it");
        let leg = asked.body.with_changes(&sketch, &leg);
        let leg: Value = serde_json::from_slice(&leg).expect("it is valid JSON");
        assert_eq!(leg, sequential::prefill_leg(&value).expect("one transfer serves it"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(body: Value) -> CompletionRequest {
        CompletionRequest::new(body.to_string().into(), 32).unwrap()
    }

    #[test]
    fn requests_that_one_transfer_cannot_serve_go_to_decode_alone() {
        let cases = [
            (serde_json::json!({"prompt": "a"}), None),
            (serde_json::json!({"prompt": ["a"]}), None),
            (serde_json::json!({"prompt": [1, 2]}), None),
            (serde_json::json!({"prompt": [[1, 2]]}), None),
            (serde_json::json!({"messages": [{"role": "user", "content": "a"}], "n": 1}), None),
            (serde_json::json!({"prompt": "a", "n": null, "echo": true, "logprobs": null}), None),
            (
                serde_json::json!({"prompt": "a", "min_tokens": 5, "max_tokens": 5, "logprobs": 3}),
                None,
            ),
            (serde_json::json!({"prompt": ["a", "b"]}), Some("prompt list")),
            (serde_json::json!({"prompt": [[1], [2]]}), Some("prompt list")),
            (serde_json::json!({"prompt": []}), Some("prompt list")),
            (serde_json::json!({"prompt": "a", "n": 2}), Some("n")),
            (serde_json::json!({"prompt": "a", "n": "x"}), Some("n")),
            (serde_json::json!({"prompt": "a", "best_of": 4}), Some("best_of")),
            (serde_json::json!({"prompt": "a", "use_beam_search": true}), Some("use_beam_search")),
            (serde_json::json!({"prompt": "a", "prompt_logprobs": 0}), Some("prompt_logprobs")),
            (
                serde_json::json!({"prompt": "a", "echo": true, "logprobs": 0}),
                Some("echo with logprobs"),
            ),
            (serde_json::json!({"prompt": "a", "max_tokens": 0}), Some("max_tokens")),
            (serde_json::json!({"prompt": "a", "max_tokens": "x"}), Some("max_tokens")),
            (
                serde_json::json!({"prompt": "a", "max_tokens": 4, "min_tokens": 5}),
                Some("min_tokens"),
            ),
            (serde_json::json!({"prompt": "a", "stream_options": {}}), Some("stream_options")),
            (serde_json::json!({"prompt": "a", "stream": 1}), Some("stream")),
            (serde_json::json!({"messages": []}), Some("no prompt")),
            (serde_json::json!({"model": "m"}), Some("no prompt")),
        ];
        for (body, alone) in cases {
            assert_eq!(asked(body.clone()).alone, alone, "{body}");
        }
    }

    #[test]
    fn parameters_of_a_client_are_dropped_however_they_are_written() {
        let text = br#"{"prompt": "a", "kv_transfer_param\u0073": {"remote_host": "evil"}, "vllm_xargs": {"kv_transfer_params": 1, "x": 2}}"#;
        let asked = CompletionRequest::new(Bytes::from_static(text), 32).unwrap();
        let body: Value = serde_json::from_slice(&asked.body.text()).unwrap();
        assert_eq!(body, serde_json::json!({"prompt": "a", "vllm_xargs": {"x": 2}}));
        let sent = PassthroughRequest::new(Bytes::from_static(text), None).unwrap();
        assert!(!String::from_utf8_lossy(&sent.body).contains("evil"));
        let other = Bytes::from_static(b"{ \"input\":  1.50 , \"model\": \"m\" }");
        let sent = PassthroughRequest::new(other.clone(), None).unwrap();
        assert_eq!(sent.model.as_deref(), Some("m"));
        assert_eq!(sent.body, other, "otherwise it is forwarded byte for byte");
    }

    #[test]
    fn bodies_that_only_an_engine_can_parse_are_rejected() {
        let deep = [&b"{\"x\": "[..], &[b'['; 200], &[b']'; 200], b", \"kv_transfer_params\": 1}"]
            .concat();
        let utf16: Vec<u8> =
            r#"{"kv_transfer_params": 1}"#.encode_utf16().flat_map(u16::to_le_bytes).collect();
        let lone = br#"{"x": "\ud800", "kv_transfer_params": 1}"#;
        let nan = br#"{"x": NaN, "kv_transfer_params": 1}"#;
        for body in [&nan[..], br#"{"x": Infinity, "kv_transfer_params": 1}"#, lone, &utf16, &deep]
        {
            let body = Bytes::copy_from_slice(body);
            for boundary in [None, Some("x")] {
                let parsed = PassthroughRequest::new(body.clone(), boundary);
                assert!(parsed.is_err(), "{boundary:?}: {}", body.escape_ascii());
            }
        }
        assert!(PassthroughRequest::new(Bytes::new(), None).is_ok(), "an empty body");
    }

    #[test]
    fn forms_begin_with_their_boundary() {
        let form = Bytes::from_static(
            b"--x\r\ncontent-disposition: form-data; name=\"a\"\r\n\r\n\xff\r\n--x--\r\n",
        );
        assert_eq!(PassthroughRequest::new(form.clone(), Some("x")).unwrap().body, form);
        for other in [&b"{\"kv_transfer_params\": {}}"[..], b"-x\r\n", b"--y\r\n", b" --x\r\n"] {
            let other = Bytes::from_static(other);
            assert!(PassthroughRequest::new(other.clone(), Some("x")).is_err(), "{other:?}");
        }
    }

    #[test]
    fn a_path_that_reads_as_another_is_refused() {
        for path in ["/v1/responses/resp_1", "/v1/files/a%20b", "/v1/x..y", "/v1/x%C3%A4"] {
            assert_eq!(plain_path(path), Ok(()), "{path}");
        }
        for path in [
            "/v1/%63hat/completions",
            "/v1/%6coad_lora_adapter",
            "/v1/x%2F..%2Fy",
            "/v1//chat",
            "/v1/../sleep",
            "/v1/%2e%2e/sleep",
            "/v1/x%2",
            "/v1/%2563hat",
        ] {
            assert!(plain_path(path).is_err(), "{path}");
        }
    }

    #[test]
    fn numbers_travel_as_they_are() {
        let text = r#"{"prompt":"a","seed":18446744073709551615,"temperature":0.30000000000000004,"top_p":0.1}"#;
        let asked = CompletionRequest::new(text.into(), 32).unwrap();
        assert_eq!(asked.body.text(), text);
    }

    #[test]
    fn prompts_with_the_same_beginning_share_their_first_chunks() {
        let chunks = |body: serde_json::Value| asked(body).prompt.chunks;
        let text = |len: usize, rest: &str| "One token or so. ".repeat(len) + rest;
        let chat = |text: String, tools: serde_json::Value| {
            let messages = [
                serde_json::json!({"role": "system", "content": text}),
                serde_json::json!({"role": "user", "content": "Hello"}),
            ];
            chunks(serde_json::json!({"model": "m", "messages": messages, "tools": tools}))
        };
        let none = || serde_json::Value::Null;
        let short = chat(text(200, "a"), none());
        assert_eq!(short.len(), 200 * 17 / 1024, "whole chunks only");
        let long = chat(text(300, "b"), none());
        assert_eq!(long[..3], short[..]);
        let middle = chat(text(100, "X") + &text(100, ""), none());
        assert!(middle[0] == short[0] && middle[1] != short[1], "they differ in the second chunk");
        let tools = chat(text(200, "a"), serde_json::json!([{"type": "function"}]));
        assert!(tools.iter().all(|chunk| !short.contains(chunk)), "the template writes them first");
        let with_image = |image: &str| {
            let parts = serde_json::json!([
                {"type": "image_url", "image_url": {"url": image}},
                {"type": "text", "text": text(200, "")},
            ]);
            chunks(serde_json::json!({"messages": [{"role": "user", "content": parts}]}))
        };
        let (one, other) = (with_image("data:1"), with_image("data:2"));
        assert!(one.iter().all(|chunk| !other.contains(chunk)), "images are a part of the prompt");
        let role = serde_json::json!([{"role": text(2000, ""), "content": text(100, "")}]);
        assert_eq!(
            chunks(serde_json::json!({"messages": role})).len(),
            1,
            "a role is not computed"
        );
        let ids: Vec<u32> = (0..600).collect();
        let of_ids = chunks(serde_json::json!({"prompt": ids}));
        assert_eq!(of_ids.len(), 2, "a token has one number");
        assert_eq!(chunks(serde_json::json!({"prompt": ids[..520]})), of_ids);
        assert_eq!(chunks(serde_json::json!({"prompt": "short"})), [0; 0]);
    }

    #[test]
    fn lengths_are_estimated() {
        assert_eq!(asked(serde_json::json!({"prompt": "x".repeat(400)})).prompt_tokens, 100);
        assert_eq!(
            asked(serde_json::json!({"prompt": [[5, 6, 7]], "max_tokens": 9})).new_tokens,
            9
        );
        assert_eq!(asked(serde_json::json!({"prompt": [5, 6, 7]})).prompt_tokens, 3);
        let image = serde_json::json!({"messages": [{"role": "user", "content": [
            {"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "x".repeat(9999)}}]}]});
        assert_eq!(asked(image).prompt_tokens, 4 + 4 + 1024);
    }

    #[test]
    fn the_same_beginning_is_the_same_prefix() {
        let prefix = |body: Value, tokens| {
            CompletionRequest::new(body.to_string().into(), tokens).unwrap().prompt.prefix
        };
        let chat = |last: &str| {
            serde_json::json!({"messages": [
                {"role": "system", "content": "s".repeat(200)}, {"role": "user", "content": last}]})
        };
        assert_eq!(prefix(chat("a"), 32), prefix(chat("b"), 32));
        assert_ne!(prefix(chat("a"), 256), prefix(chat("b"), 256));
        let ids = |last: u32| serde_json::json!({"prompt": [1, 2, 3, last]});
        assert_eq!(prefix(ids(4), 3), prefix(ids(5), 3));
        assert_ne!(prefix(ids(4), 4), prefix(ids(5), 4));
    }

    #[test]
    fn a_body_that_is_not_an_object_is_rejected_with_advice() {
        for bytes in [&b""[..], b"[1]", b"{", b"\xff", b"\"a\""] {
            let error = CompletionRequest::new(Bytes::from_static(bytes), 32).unwrap_err();
            assert!(error.contains("send a JSON object"), "{error}");
        }
    }
}
