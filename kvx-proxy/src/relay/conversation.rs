//! Bidirectional transfer: remembers the blocks that a turn's decode instance still holds, for the
//! prefill of the next turn.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hyper::header::HeaderValue;
use kvx_vllm::params::recipe::Answer;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

/// The time for which a vLLM decode instance holds the blocks (`decoder_kv_blocks_ttl` is 480 s),
/// minus a margin for latency.
const HELD_FOR: Duration = Duration::from_secs(470);
const KEPT: usize = 16_384;
/// The longest answer text, in bytes, that can be continued.
const TEXT: usize = 1 << 20;

type Hash = [u8; 32];

/// A conversation of one client. Conversations of two clients differ even if their names are equal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key(Hash);

impl Key {
    /// Hashes a conversation's name and the client's original `Authorization` header.
    pub(crate) fn new(conversation: &str, authorization: Option<&HeaderValue>) -> Self {
        let mut hash = Sha256::new();
        hash.update(authorization.map(HeaderValue::as_bytes).unwrap_or_default());
        hash.update([0]);
        hash.update(conversation);
        Key(hash.finalize().into())
    }
}

/// A finished turn of a conversation.
#[derive(Debug)]
struct PastTurn {
    answer: Answer,
    decode: String,
    said: TurnText,
    rest: Hash,
    text: String,
    until: Instant,
}

/// The part of a turn's request that the next turn must repeat. Instances do not compare it, and
/// would use the blocks of a different text.
#[derive(Clone, Debug, PartialEq)]
enum TurnText {
    Messages(usize, Hash),
    Prompt(usize, Hash),
}

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

/// Hashes all other keys of a body. Another model, other tools, template arguments or a cache salt
/// produce other blocks for the same text.
fn hash_of_rest(body: &Value) -> Hash {
    let mut hash = Sha256::new();
    for (key, value) in body.as_object().into_iter().flatten() {
        let is_text = matches!(key.as_str(), "messages" | "prompt");
        if !is_text && !OF_THE_ANSWER.contains(&key.as_str()) {
            hash.update(Value::from(key.as_str()).to_string());
            hash.update(value.to_string());
        }
    }
    hash.finalize().into()
}

fn hash_of(messages: &[Value]) -> Hash {
    // Objects are written in key order, so that equal values give equal texts.
    let mut hash = Sha256::new();
    messages.iter().for_each(|message| hash.update(message.to_string()));
    hash.finalize().into()
}

impl TurnText {
    fn of(body: &Value) -> Option<Self> {
        if let Some(messages) = body.get("messages").and_then(Value::as_array) {
            return Some(TurnText::Messages(messages.len(), hash_of(messages)));
        }
        let prompt = body.get("prompt")?.as_str()?;
        Some(TurnText::Prompt(prompt.len(), Sha256::digest(prompt).into()))
    }

    /// Returns true if this body begins with the turn's request and its answer.
    fn continues(&self, text: &str, body: &Value) -> bool {
        match self {
            TurnText::Messages(count, hash) => {
                let Some(messages) = body.get("messages").and_then(Value::as_array) else {
                    return false;
                };
                let Some(answer) = messages.get(*count) else { return false };
                answer.get("role").and_then(Value::as_str) == Some("assistant")
                    && answer.get("content").and_then(Value::as_str) == Some(text)
                    && hash_of(&messages[..*count]) == *hash
            }
            TurnText::Prompt(length, hash) => {
                let Some(prompt) = body.get("prompt").and_then(Value::as_str) else { return false };
                prompt
                    .get(..*length)
                    .is_some_and(|before| Hash::from(Sha256::digest(before)) == *hash)
                    && prompt[*length..].starts_with(text)
            }
        }
    }
}

/// The turns that may be continued, each at most once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conversations(Arc<Mutex<TurnStore>>);

#[derive(Debug, Default)]
struct TurnStore {
    turns: HashMap<Key, PastTurn>,
    order: VecDeque<(Key, Instant)>,
}

impl Conversations {
    /// Removes and returns the previous turn's answer and the name of the instance that holds its
    /// blocks, if this body continues that turn in time.
    pub(crate) fn take(&self, key: &Key, body: &Value, now: Instant) -> Option<(Answer, String)> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A request that only names the conversation does not remove its turn.
        let turn = kept.turns.get(key)?;
        let continues = turn.until > now
            && turn.rest == hash_of_rest(body)
            && turn.said.continues(&turn.text, body);
        let turn = continues.then(|| kept.turns.remove(key))??;
        Some((turn.answer, turn.decode))
    }

    fn keep(&self, key: Key, turn: PastTurn) {
        let kept = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.order.push_back((key.clone(), turn.until));
        kept.turns.insert(key, turn);
        while let Some((oldest, until)) = kept.order.front()
            && (kept.order.len() > KEPT || *until <= Instant::now())
        {
            // Keep a later turn of the same conversation.
            if kept.turns.get(oldest).is_some_and(|turn| turn.until == *until) {
                kept.turns.remove(oldest);
            }
            kept.order.pop_front();
        }
    }
}

/// Reads an answer while it is forwarded, for the next turn.
#[derive(Debug)]
pub(crate) struct Capture {
    conversations: Conversations,
    key: Key,
    said: TurnText,
    rest: Hash,
    streamed: bool,
    answer: Answer,
    text: String,
    body: Vec<u8>,
    failed: bool,
}

impl Capture {
    pub(crate) fn new(
        conversations: &Conversations,
        key: Key,
        body: &Value,
        streamed: bool,
    ) -> Option<Self> {
        Some(Capture {
            conversations: conversations.clone(),
            key,
            said: TurnText::of(body)?,
            rest: hash_of_rest(body),
            streamed,
            answer: Answer::default(),
            text: String::new(),
            body: Vec::new(),
            failed: false,
        })
    }

    /// Reads the next complete events, or the next bytes of a body.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if self.failed {
            return;
        }
        if !self.streamed {
            self.failed = self.body.len() + bytes.len() > 4 * TEXT;
            if !self.failed {
                self.body.extend_from_slice(bytes);
            }
            return;
        }
        for line in bytes.split(|byte| matches!(byte, b'\n' | b'\r')) {
            let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) else { continue };
            if data != b"[DONE]" && self.chunk(data).is_none() {
                self.failed = true;
            }
        }
    }

    /// Returns `None` if the answer cannot be continued: if it has anything but plain text.
    fn chunk(&mut self, data: &[u8]) -> Option<()> {
        let chunk: Value = serde_json::from_slice(data).ok()?;
        let answer = Answer::from_body(&chunk).ok()?;
        self.answer.params = answer.params.or(self.answer.params.take());
        if let Some(choice) = chunk.get("choices").and_then(|choices| choices.get(0)) {
            let said = choice.get("delta").or_else(|| choice.get("message")).unwrap_or(choice);
            let absent = |key| {
                said.get(key)
                    .is_none_or(|value| value.is_null() || *value == Value::Array(Vec::new()))
            };
            if !(absent("tool_calls") && absent("reasoning_content") && absent("reasoning")) {
                return None;
            }
            for key in ["content", "text"] {
                self.text.push_str(said.get(key).and_then(Value::as_str).unwrap_or_default());
            }
        }
        (self.text.len() <= TEXT).then_some(())
    }

    /// Stores the turn after its answer has ended successfully.
    pub(crate) fn keep(mut self, decode: &str) {
        if !self.streamed {
            let body = std::mem::take(&mut self.body);
            self.failed |= self.chunk(&body).is_none();
        }
        let held = self.answer.params.as_ref().is_some_and(|params| params.do_remote_decode);
        if self.failed || !held {
            return;
        }
        let turn = PastTurn {
            answer: self.answer,
            decode: decode.to_owned(),
            said: self.said,
            rest: self.rest,
            text: self.text,
            until: Instant::now() + HELD_FOR,
        };
        self.conversations.keep(self.key, turn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: &str = r#"{"do_remote_decode": true, "do_remote_prefill": false, "remote_block_ids": [[1]],
        "remote_engine_id": "d", "remote_request_id": "r", "remote_host": "h", "remote_port": 5600}"#;

    fn key(who: &str) -> Key {
        Key::new("c", Some(&who.parse().unwrap()))
    }

    fn first() -> Value {
        serde_json::json!({"messages": [{"role": "user", "content": "hello"}]})
    }

    fn next(answer: &str) -> Value {
        serde_json::json!({"messages": [{"role": "user", "content": "hello"},
            {"role": "assistant", "content": answer}, {"role": "user", "content": "and?"}]})
    }

    fn after_one_turn() -> Conversations {
        let conversations = Conversations::default();
        let mut capture = Capture::new(&conversations, key("a"), &first(), true).unwrap();
        capture.push(b"data: {\"choices\": [{\"delta\": {\"content\": \"good \"}}]}\n\n");
        let last = PARAMS.replace('\n', " ");
        let last = format!(
            "data: {{\"choices\": [{{\"delta\": {{\"content\": \"day\"}}}}], \"kv_transfer_params\": {last}}}\n\ndata: [DONE]\n\n"
        );
        capture.push(last.as_bytes());
        capture.keep("d:1");
        conversations
    }

    #[test]
    fn a_turn_is_continued_once_by_its_own_client() {
        let conversations = after_one_turn();
        let now = Instant::now();
        assert!(conversations.take(&key("b"), &next("good day"), now).is_none(), "another client");
        let (answer, decode) = conversations.take(&key("a"), &next("good day"), now).unwrap();
        assert_eq!(
            (answer.params.unwrap().remote_engine_id.as_deref(), &*decode),
            (Some("d"), "d:1")
        );
        assert!(conversations.take(&key("a"), &next("good day"), now).is_none(), "once");
    }

    #[test]
    fn another_text_is_not_continued() {
        let mut other = next("good day");
        other["messages"][0]["content"] = "hullo".into();
        let mut bodies =
            vec![next("good night"), first(), other, serde_json::json!({"prompt": "hello"})];
        for key in ["model", "tools", "chat_template_kwargs", "cache_salt", "mm_processor_kwargs"] {
            let mut other = next("good day");
            other[key] = "another".into();
            bodies.push(other);
        }
        let conversations = after_one_turn();
        for body in bodies {
            assert!(conversations.take(&key("a"), &body, Instant::now()).is_none(), "{body}");
        }
        let mut same = next("good day");
        (same["temperature"], same["max_tokens"], same["stream"]) =
            (0.5.into(), 9.into(), true.into());
        assert!(
            conversations.take(&key("a"), &same, Instant::now()).is_some(),
            "the other bodies removed no turn"
        );
        let late = Instant::now() + HELD_FOR + Duration::from_secs(10);
        assert!(after_one_turn().take(&key("a"), &next("good day"), late).is_none());
    }

    #[test]
    fn a_completion_continues_with_prompt_and_text() {
        let conversations = Conversations::default();
        let asked = serde_json::json!({"prompt": "Once"});
        let mut capture = Capture::new(&conversations, key("a"), &asked, false).unwrap();
        let body =
            format!("{{\"choices\": [{{\"text\": \" upon\"}}], \"kv_transfer_params\": {PARAMS}}}");
        let (one, other) = body.split_at(20);
        capture.push(one.as_bytes());
        capture.push(other.as_bytes());
        capture.keep("d:1");
        let body = serde_json::json!({"prompt": "Once upon a time"});
        assert!(conversations.take(&key("a"), &body, Instant::now()).is_some());
    }

    #[test]
    fn answers_without_plain_text_or_held_blocks_are_not_kept() {
        for last in [
            format!(
                "{{\"choices\": [{{\"message\": {{\"tool_calls\": [1]}}}}], \"kv_transfer_params\": {PARAMS}}}"
            ),
            "{\"choices\": [{\"message\": {\"content\": \"good day\"}}]}".to_owned(),
            "no JSON".to_owned(),
        ] {
            let conversations = Conversations::default();
            let mut capture = Capture::new(&conversations, key("a"), &first(), false).unwrap();
            capture.push(last.as_bytes());
            capture.keep("d:1");
            assert!(
                conversations.take(&key("a"), &next("good day"), Instant::now()).is_none(),
                "{last}"
            );
        }
    }
}
