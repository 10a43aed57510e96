//! Parses clients' requests, as far as the proxy needs them.

pub(crate) mod headers;

use bytes::Bytes;
use serde_json::{Map, Value};

use crate::fleet::choice;

/// The average number of tokens in a byte of text.
const TOKENS_PER_BYTE: f64 = 0.25;
/// The estimated tokens of a message part that is not text.
const TOKENS_PER_PART: u64 = 1024;
/// The estimated tokens that a request without a limit generates.
const NEW_TOKENS: u64 = 512;

/// A completion or chat completion.
#[derive(Clone, Debug)]
pub(crate) struct CompletionRequest {
    /// The body, without parameters that clients must not send.
    pub(crate) body: Value,
    pub(crate) model: Option<String>,
    pub(crate) stream: bool,
    /// The reason that one transfer cannot serve it, if there is one.
    pub(crate) alone: Option<&'static str>,
    /// Estimated length of the prompt.
    pub(crate) prompt_tokens: u64,
    /// Estimated length of the answer.
    pub(crate) new_tokens: u64,
    /// `conversation_id`, if there is one.
    pub(crate) conversation: Option<String>,
}

impl CompletionRequest {
    /// Parses a body.
    ///
    /// # Errors
    ///
    /// Fails if the body is not a JSON object. The message is for the client.
    pub(crate) fn new(bytes: &[u8]) -> Result<Self, String> {
        let body: Value = serde_json::from_slice(bytes)
            .map_err(|error| format!("the body is not JSON ({error}); send a JSON object"))?;
        let Value::Object(mut map) = body else {
            return Err("the body is JSON, but not an object; send a JSON object".to_owned());
        };
        drop_transfer_params(&mut map);
        let text = |key| map.get(key).and_then(Value::as_str).map(str::to_owned);
        let new_tokens = limit(&map).and_then(Value::as_u64).unwrap_or(NEW_TOKENS);
        Ok(CompletionRequest {
            model: text("model"),
            stream: map.get("stream") == Some(&Value::Bool(true)),
            alone: alone(&map),
            prompt_tokens: Prompt::of(&map).tokens(),
            new_tokens: new_tokens.min(1 << 20),
            conversation: text("conversation_id").filter(|id| !id.is_empty() && id.len() <= 256),
            body: Value::Object(map),
        })
    }

    /// Returns a hash of the prompt's text up to about the first `tokens` tokens.
    pub(crate) fn prefix(&self, tokens: usize) -> u64 {
        let Value::Object(map) = &self.body else { return 0 };
        let mut beginning = Vec::new();
        Prompt::of(map).beginning(tokens, &mut beginning);
        choice::hash(&beginning)
    }

    /// Returns the most memory that the request needs until it has an answer. For token ids this is
    /// many times the received bytes. It includes a leg's body, as values and as bytes.
    pub(crate) fn held(&self) -> usize {
        fn of(value: &Value) -> usize {
            size_of::<Value>()
                + match value {
                    Value::String(text) => text.len(),
                    Value::Array(list) => list.iter().map(of).sum(),
                    Value::Object(map) => {
                        map.iter().map(|(key, value)| 64 + key.len() + of(value)).sum()
                    }
                    _ => 0,
                }
        }
        3 * of(&self.body)
    }

    /// Returns the body as bytes.
    pub(crate) fn bytes(&self) -> Bytes {
        serde_json::to_vec(&self.body).unwrap_or_default().into()
    }
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
/// Returns true if there was any.
fn drop_transfer_params(map: &mut Map<String, Value>) -> bool {
    let mut dropped = map.remove("kv_transfer_params").is_some();
    for nested in ["vllm_xargs", "extra_args", "extra_body"] {
        if let Some(Value::Object(inner)) = map.get_mut(nested) {
            dropped |= inner.remove("kv_transfer_params").is_some();
        }
    }
    dropped
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
        let value = serde_json::from_slice(&body).map_err(|error| {
            format!("the body is not JSON ({error}); send JSON or multipart/form-data")
        })?;
        let Value::Object(mut map) = value else {
            return Ok(PassthroughRequest { body, ..PassthroughRequest::default() });
        };
        let text = |key| map.get(key).and_then(Value::as_str).map(str::to_owned);
        let (model, before) = (text("model"), text("previous_response_id"));
        let stream = map.get("stream") == Some(&Value::Bool(true));
        let body = match drop_transfer_params(&mut map) {
            true => serde_json::to_vec(&map).unwrap_or_default().into(),
            false => body,
        };
        Ok(PassthroughRequest { body, model, before, stream })
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
fn alone(map: &Map<String, Value>) -> Option<&'static str> {
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
    match (set("prompt"), set("messages")) {
        (None, Some(Value::Array(messages))) if !messages.is_empty() => None,
        (Some(Value::String(_)), None) => None,
        (Some(Value::Array(list)), None) => match list.as_slice() {
            [Value::Number(_), ..] => None,
            [Value::String(_)] => None,
            [Value::Array(_)] => None,
            _ => Some("prompt list"),
        },
        _ => Some("no prompt"),
    }
}

/// The location of a request's text.
enum Prompt<'a> {
    None,
    Value(&'a Value),
    Messages(&'a [Value]),
}

impl<'a> Prompt<'a> {
    fn of(map: &'a Map<String, Value>) -> Self {
        match (map.get("messages"), map.get("prompt")) {
            (Some(Value::Array(messages)), _) => Prompt::Messages(messages),
            (_, Some(prompt)) => Prompt::Value(prompt),
            _ => Prompt::None,
        }
    }

    fn tokens(&self) -> u64 {
        fn of(value: &Value) -> u64 {
            match value {
                Value::String(text) => (text.len() as f64 * TOKENS_PER_BYTE).ceil() as u64,
                Value::Number(_) => 1,
                Value::Array(list) => list.iter().map(of).sum(),
                _ => 0,
            }
        }
        let part = |part: &Value| match part.get("text") {
            Some(text) => of(text),
            None => TOKENS_PER_PART,
        };
        let message = |message: &Value| match message.get("content") {
            Some(Value::Array(parts)) => parts.iter().map(part).sum(),
            Some(text) => of(text),
            None => 0,
        };
        match self {
            Prompt::None => 1,
            Prompt::Value(value) => of(value).max(1),
            // 4 tokens for each role and the template's markers.
            Prompt::Messages(messages) => {
                messages.iter().map(|one| message(one) + 4).sum::<u64>().max(1)
            }
        }
    }

    /// Writes the text of about the first `tokens` tokens. The length need not be exact, but equal
    /// beginnings must give equal bytes.
    fn beginning(&self, tokens: usize, into: &mut Vec<u8>) {
        let most = (tokens as f64 / TOKENS_PER_BYTE) as usize;
        fn text(value: &Value, most: usize, into: &mut Vec<u8>) {
            let left = most.saturating_sub(into.len());
            match value {
                Value::String(text) => {
                    into.extend_from_slice(&text.as_bytes()[..text.len().min(left)])
                }
                Value::Number(id) => {
                    into.extend_from_slice(&(id.as_u64().unwrap_or(0) as u32).to_le_bytes())
                }
                Value::Array(list) => list.iter().take(most).for_each(|one| {
                    if into.len() < most {
                        text(one, most, into);
                    }
                }),
                Value::Object(map) => {
                    for key in ["role", "content", "text"] {
                        if let Some(inner) = map.get(key) {
                            text(inner, most, into);
                        }
                    }
                }
                _ => {}
            }
        }
        match self {
            Prompt::None => {}
            Prompt::Value(value) => text(value, most, into),
            Prompt::Messages(messages) => {
                messages.iter().for_each(|one| {
                    if into.len() < most {
                        text(one, most, into);
                    }
                });
            }
        }
    }
}

/// Checks for the fuzz target: no panic, no parameter is left that clients may not send, and the
/// recipes accept every request that takes two legs.
pub(crate) fn fuzz(bytes: &[u8]) {
    let sent =
        PassthroughRequest::new(Bytes::copy_from_slice(bytes), None).unwrap_or_default().body;
    let clean = |value: &Value| {
        assert!(value.get("kv_transfer_params").is_none());
        assert!(
            value.get("vllm_xargs").is_none_or(|nested| nested.get("kv_transfer_params").is_none())
        );
    };
    if let Ok(value) = serde_json::from_slice::<Value>(&sent) {
        clean(&value);
    }
    let Ok(asked) = CompletionRequest::new(bytes) else { return };
    clean(&asked.body);
    asked.prefix(16);
    let again = CompletionRequest::new(&asked.bytes()).expect("a parsed request is valid JSON");
    assert_eq!((again.alone, again.prompt_tokens), (asked.alone, asked.prompt_tokens));
    if asked.alone.is_none() {
        use kvx_vllm::params::recipe::sequential;
        sequential::prefill_leg(&asked.body).expect("one transfer serves it");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(body: Value) -> CompletionRequest {
        CompletionRequest::new(body.to_string().as_bytes()).unwrap()
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
        let asked = CompletionRequest::new(text).unwrap();
        assert_eq!(asked.body, serde_json::json!({"prompt": "a", "vllm_xargs": {"x": 2}}));
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
        let asked = CompletionRequest::new(text.as_bytes()).unwrap();
        assert_eq!(&asked.bytes()[..], text.as_bytes());
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
        let chat = |last: &str| {
            asked(serde_json::json!({"messages": [
                {"role": "system", "content": "s".repeat(200)}, {"role": "user", "content": last}]}))
        };
        assert_eq!(chat("a").prefix(32), chat("b").prefix(32));
        assert_ne!(chat("a").prefix(256), chat("b").prefix(256));
        let ids = |last: u32| asked(serde_json::json!({"prompt": [1, 2, 3, last]}));
        assert_eq!(ids(4).prefix(3), ids(5).prefix(3));
        assert_ne!(ids(4).prefix(4), ids(5).prefix(4));
    }

    #[test]
    fn a_body_that_is_not_an_object_is_rejected_with_advice() {
        for bytes in [&b""[..], b"[1]", b"{", b"\xff", b"\"a\""] {
            assert!(CompletionRequest::new(bytes).unwrap_err().contains("send a JSON object"));
        }
    }
}
