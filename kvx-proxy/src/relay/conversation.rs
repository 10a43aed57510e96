//! Bidirectional transfer: remembers the blocks that a turn's decode instance still holds, for the
//! prefill of the next turn.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hyper::header::HeaderValue;
use kvx_vllm::params::recipe::Answer;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::request::changes_the_prompt;
use crate::request::json::{JsonObject, for_each, get, hash_into, with_text};

/// The time for which a vLLM decode instance holds the blocks (`decoder_kv_blocks_ttl` is 480 s),
/// minus a margin for latency.
const HELD_FOR: Duration = Duration::from_secs(470);
const KEPT: usize = 16_384;
/// The longest answer text, in bytes, that can be continued.
const TEXT: usize = 1 << 20;
/// The memory, in bytes, of all turns that are kept and of all answers that are being read.
const BUDGET: usize = 64 << 20;
/// The most memory, in bytes, that one turn or one answer may take.
const LARGEST: usize = 4 * TEXT;
/// The memory of a turn without its parameters.
const TURN: usize = 1024;

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
    text: AnswerText,
    until: Instant,
    _share: Share,
}

/// The length and the hash of an answer's text.
#[derive(Clone, Debug, PartialEq)]
struct AnswerText(usize, Hash);

impl AnswerText {
    fn is(&self, text: &str) -> bool {
        text.len() == self.0 && Hash::from(Sha256::digest(text)) == self.1
    }
}

/// A part of the memory of all conversations, released on drop.
#[derive(Debug)]
struct Share {
    used: Arc<AtomicUsize>,
    bytes: usize,
}

impl Share {
    fn shrink(&mut self, less: usize) {
        let less = less.min(self.bytes);
        self.used.fetch_sub(less, Relaxed);
        self.bytes -= less;
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.shrink(self.bytes);
    }
}

/// Returns the memory that a value takes, at most.
fn memory(value: &Value) -> usize {
    size_of::<Value>()
        + match value {
            Value::String(text) => text.len(),
            Value::Array(list) => list.iter().map(memory).sum(),
            Value::Object(map) => {
                map.iter().map(|(key, value)| 64 + key.len() + memory(value)).sum()
            }
            _ => 0,
        }
}

/// The part of a turn's request that the next turn must repeat. Instances do not compare it, and
/// would use the blocks of a different text.
#[derive(Clone, Debug, PartialEq)]
enum TurnText {
    Messages(usize, Hash),
    Prompt(usize, Hash),
}

/// Hashes all other keys of a body. Another model, other tools, template arguments or a cache salt
/// produce other blocks for the same text.
fn hash_of_rest(body: &JsonObject) -> Hash {
    let mut hash = Sha256::new();
    for (key, value) in body.iter() {
        if changes_the_prompt(key) {
            hash_into(&mut hash, Value::from(key).to_string().as_bytes());
            hash_into(&mut hash, value);
        }
    }
    hash.finalize().into()
}

impl TurnText {
    fn of(body: &JsonObject) -> Option<Self> {
        if let Some(messages) = body.get("messages").filter(|text| text.starts_with('[')) {
            let (mut count, mut hash) = (0, Sha256::new());
            for_each(messages, |message| {
                count += 1;
                hash_into(&mut hash, message.as_bytes());
                true
            });
            return Some(TurnText::Messages(count, hash.finalize().into()));
        }
        let of = |prompt: &str| TurnText::Prompt(prompt.len(), Sha256::digest(prompt).into());
        with_text(body.get("prompt")?, of)
    }

    /// Returns true if this body begins with the turn's request and its answer.
    fn continues(&self, text: &AnswerText, body: &JsonObject) -> bool {
        match self {
            TurnText::Messages(count, hash) => {
                let (mut seen, mut before, mut follows) = (0, Sha256::new(), false);
                for_each(body.get("messages").unwrap_or_default(), |message| {
                    if seen < *count {
                        seen += 1;
                        hash_into(&mut before, message.as_bytes());
                        return true;
                    }
                    let value = |key| get(message, key).unwrap_or_default();
                    follows = with_text(value("role"), |role| role == "assistant") == Some(true)
                        && with_text(value("content"), |said| text.is(said)) == Some(true);
                    false
                });
                follows && Hash::from(before.finalize()) == *hash
            }
            TurnText::Prompt(length, hash) => {
                let follows = |prompt: &str| {
                    prompt.split_at_checked(*length).is_some_and(|(before, after)| {
                        after.get(..text.0).is_some_and(|said| text.is(said))
                            && Hash::from(Sha256::digest(before)) == *hash
                    })
                };
                with_text(body.get("prompt").unwrap_or_default(), follows) == Some(true)
            }
        }
    }
}

/// The turns that may be continued, each at most once, within a budget of memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conversations {
    kept: Arc<Mutex<TurnStore>>,
    /// The bytes of all shares.
    used: Arc<AtomicUsize>,
}

#[derive(Debug, Default)]
struct TurnStore {
    turns: HashMap<Key, PastTurn>,
    order: VecDeque<(Key, Instant)>,
}

impl TurnStore {
    /// Forgets the oldest turn. Returns false if there is none.
    fn forget_oldest(&mut self) -> bool {
        let Some((oldest, until)) = self.order.pop_front() else { return false };
        // Keep a later turn of the same conversation.
        if self.turns.get(&oldest).is_some_and(|turn| turn.until == until) {
            self.turns.remove(&oldest);
        }
        true
    }
}

impl Conversations {
    fn kept(&self) -> MutexGuard<'_, TurnStore> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns an empty part of the memory.
    fn share(&self) -> Share {
        Share { used: Arc::clone(&self.used), bytes: 0 }
    }

    /// Removes and returns the previous turn's answer and the name of the instance that holds its
    /// blocks, if this body continues that turn in time.
    pub(crate) fn take(
        &self,
        key: &Key,
        body: &JsonObject,
        now: Instant,
    ) -> Option<(Answer, String)> {
        // The lock is not held while the body is hashed: a long one takes a while.
        let (said, rest, text) = {
            let kept = self.kept();
            let turn = kept.turns.get(key).filter(|turn| turn.until > now)?;
            (turn.said.clone(), turn.rest, turn.text.clone())
        };
        // A request that only names the conversation does not remove its turn.
        if rest != hash_of_rest(body) || !said.continues(&text, body) {
            return None;
        }
        let mut kept = self.kept();
        // Meanwhile another request may have taken the turn, or ended a later one.
        let turn = kept.turns.get(key)?;
        let is_same = turn.said == said && turn.rest == rest && turn.text == text;
        let turn = is_same.then(|| kept.turns.remove(key))??;
        Some((turn.answer, turn.decode))
    }

    fn keep(&self, key: Key, turn: PastTurn) {
        let kept = &mut *self.kept();
        kept.order.push_back((key.clone(), turn.until));
        kept.turns.insert(key, turn);
        while kept.order.len() > KEPT
            || kept.order.front().is_some_and(|(_, until)| *until <= Instant::now())
        {
            kept.forget_oldest();
        }
    }

    /// Grows a share, for which the oldest turns are forgotten. Returns false if it would be too
    /// large, or if answers that are being read use the whole budget.
    fn grow(&self, share: &mut Share, more: usize) -> bool {
        if share.bytes.saturating_add(more) > LARGEST {
            return false;
        }
        let fits = |used: usize| (used + more <= BUDGET).then_some(used + more);
        while self.used.fetch_update(Relaxed, Relaxed, fits).is_err() {
            if !self.kept().forget_oldest() {
                return false;
            }
        }
        share.bytes += more;
        true
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
    text: Sha256,
    text_length: usize,
    body: Vec<u8>,
    share: Share,
    failed: bool,
}

impl Capture {
    pub(crate) fn new(
        conversations: &Conversations,
        key: Key,
        body: &JsonObject,
        streamed: bool,
    ) -> Option<Self> {
        let mut share = conversations.share();
        if !conversations.grow(&mut share, TURN) {
            return None;
        }
        Some(Capture {
            conversations: conversations.clone(),
            key,
            said: TurnText::of(body)?,
            rest: hash_of_rest(body),
            streamed,
            answer: Answer::default(),
            text: Sha256::new(),
            text_length: 0,
            body: Vec::new(),
            share,
            failed: false,
        })
    }

    /// Reads the next complete events, or the next bytes of a body.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if self.failed {
            return;
        }
        if !self.streamed {
            self.failed = !self.conversations.grow(&mut self.share, bytes.len());
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
        if answer.params.is_some() {
            let more = memory(&chunk["kv_transfer_params"]);
            if !self.conversations.grow(&mut self.share, more) {
                return None;
            }
            self.answer.params = answer.params;
        }
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
                let text = said.get(key).and_then(Value::as_str).unwrap_or_default();
                self.text.update(text);
                self.text_length += text.len();
            }
        }
        (self.text_length <= TEXT).then_some(())
    }

    /// Stores the turn after its answer has ended successfully.
    pub(crate) fn keep(mut self, decode: &str) {
        if !self.streamed {
            let body = std::mem::take(&mut self.body);
            self.share.shrink(body.len());
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
            text: AnswerText(self.text_length, self.text.finalize().into()),
            until: Instant::now() + HELD_FOR,
            _share: self.share,
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

    fn body(value: &Value) -> JsonObject {
        JsonObject::new(value.to_string().into()).unwrap().unwrap()
    }

    fn first() -> JsonObject {
        body(&serde_json::json!({"messages": [{"role": "user", "content": "hello"}]}))
    }

    fn next_value(answer: &str) -> Value {
        serde_json::json!({"messages": [{"role": "user", "content": "hello"},
            {"role": "assistant", "content": answer}, {"role": "user", "content": "and?"}]})
    }

    fn next(answer: &str) -> JsonObject {
        body(&next_value(answer))
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
        let mut other = next_value("good day");
        other["messages"][0]["content"] = "hullo".into();
        let mut bodies = vec![
            next("good night"),
            first(),
            body(&other),
            body(&serde_json::json!({"prompt": "hello"})),
        ];
        for key in ["model", "tools", "chat_template_kwargs", "cache_salt", "mm_processor_kwargs"] {
            let mut other = next_value("good day");
            other[key] = "another".into();
            bodies.push(body(&other));
        }
        let conversations = after_one_turn();
        for body in bodies {
            assert!(conversations.take(&key("a"), &body, Instant::now()).is_none(), "{body:?}");
        }
        let mut same = next_value("good day");
        (same["temperature"], same["max_tokens"], same["stream"]) =
            (0.5.into(), 9.into(), true.into());
        assert!(
            conversations.take(&key("a"), &body(&same), Instant::now()).is_some(),
            "the other bodies removed no turn"
        );
        let late = Instant::now() + HELD_FOR + Duration::from_secs(10);
        assert!(after_one_turn().take(&key("a"), &next("good day"), late).is_none());
    }

    #[test]
    fn a_completion_continues_with_prompt_and_text() {
        let conversations = Conversations::default();
        let asked = body(&serde_json::json!({"prompt": "Once"}));
        let mut capture = Capture::new(&conversations, key("a"), &asked, false).unwrap();
        let answer =
            format!("{{\"choices\": [{{\"text\": \" upon\"}}], \"kv_transfer_params\": {PARAMS}}}");
        let (one, other) = answer.split_at(20);
        capture.push(one.as_bytes());
        capture.push(other.as_bytes());
        capture.keep("d:1");
        let next = body(&serde_json::json!({"prompt": "Once upon a time"}));
        assert!(conversations.take(&key("a"), &next, Instant::now()).is_some());
    }

    #[test]
    fn turns_share_one_budget() {
        let conversations = Conversations::default();
        let ids = vec!["1"; 10_000].join(",");
        let params = PARAMS.replace('\n', " ").replace("[[1]]", &format!("[[{ids}]]"));
        let last = format!(
            "data: {{\"choices\": [{{\"delta\": {{\"content\": \"good day\"}}}}], \"kv_transfer_params\": {params}}}\n\n"
        );
        let turns = 2 * BUDGET / (10_000 * size_of::<Value>());
        for turn in 0..turns {
            let key = key(&turn.to_string());
            let mut capture = Capture::new(&conversations, key, &first(), true).unwrap();
            capture.push(last.as_bytes());
            capture.keep("d:1");
            assert!(conversations.used.load(Relaxed) <= BUDGET);
        }
        assert!(conversations.used.load(Relaxed) > BUDGET / 2);
        let take = |turn: usize| {
            conversations.take(&key(&turn.to_string()), &next("good day"), Instant::now())
        };
        assert!(take(0).is_none() && take(turns - 1).is_some(), "the oldest are forgotten");
        let mut share = conversations.share();
        assert!(!conversations.grow(&mut share, LARGEST + 1));
        let mut all: Vec<Share> = Vec::new();
        while conversations.grow(&mut share, LARGEST) {
            all.push(std::mem::replace(&mut share, conversations.share()));
        }
        assert_eq!((all.len(), conversations.kept().turns.len()), (BUDGET / LARGEST, 0));
        let none = Capture::new(&conversations, key("a"), &first(), true);
        assert!(none.is_none(), "answers that are being read keep their memory");
        drop((all, share));
        assert_eq!(conversations.used.load(Relaxed), 0);
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
