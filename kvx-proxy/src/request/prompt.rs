//! A request's prompt: estimates its length and reads its beginning, without a copy of it.

use std::hash::{BuildHasher as _, DefaultHasher, Hasher as _, RandomState};
use std::sync::LazyLock;

use super::json::{JsonObject, for_each, for_each_field, get, with_text};
use crate::fleet::cache_model::CHUNK_TOKENS;

/// The average number of bytes in a token of text.
const BYTES_PER_TOKEN: usize = 4;
/// The estimated tokens of a message part that is not text.
const TOKENS_PER_PART: u64 = 1024;
/// Lists in a prompt are nested at most this deep: texts, or lists of token ids.
const LISTS: usize = 2;
/// A message, its parts, one of them, and its text.
const OF_A_MESSAGE: usize = 4;

/// The most chunks of a prompt that are hashed: 512 Ki tokens.
const MOST_CHUNKS: usize = 2048;

/// The location of a request's text.
pub(super) enum Prompt<'a> {
    None,
    Value(&'a str),
    /// A list.
    Messages(&'a str),
}

/// Returns the first elements of a list.
pub(super) fn first_two(json: &str) -> [Option<&str>; 2] {
    let (mut found, mut count) = ([None; 2], 0);
    for_each(json, |element| {
        found[count] = Some(element);
        count += 1;
        count < found.len()
    });
    found
}

pub(super) fn is_number(json: &str) -> bool {
    json.starts_with(|first: char| first == '-' || first.is_ascii_digit())
}

impl<'a> Prompt<'a> {
    pub(super) fn of(body: &'a JsonObject) -> Self {
        match (body.get("messages"), body.get("prompt")) {
            (Some(messages), _) if messages.starts_with('[') => Prompt::Messages(messages),
            (_, Some(prompt)) => Prompt::Value(prompt),
            _ => Prompt::None,
        }
    }

    pub(super) fn tokens(&self) -> u64 {
        match self {
            Prompt::None => 1,
            Prompt::Value(value) => tokens_of(value, LISTS).max(1),
            Prompt::Messages(messages) => {
                let mut tokens = 0;
                for_each(messages, |message| {
                    // 4 tokens for each role and the template's markers.
                    tokens += 4 + get(message, "content").map_or(0, tokens_of_content);
                    true
                });
                tokens.max(1)
            }
        }
    }

    /// Returns the text of about the first `tokens` tokens. The length need not be exact, but equal
    /// beginnings must give equal bytes.
    pub(super) fn beginning(&self, tokens: usize) -> Vec<u8> {
        let mut beginning = Vec::new();
        self.read(tokens.saturating_mul(BYTES_PER_TOKEN), &mut beginning);
        beginning
    }

    /// Returns the hashes of the prompt up to the end of each whole chunk. They depend on the
    /// `other` fields of the body, too.
    pub(super) fn chunks<'b>(&self, other: impl Iterator<Item = (&'b str, &'b [u8])>) -> Vec<u64> {
        let mut chunks = ChunkHasher { hasher: KEY.build_hasher(), len: 0, ends: Vec::new() };
        other.for_each(|(key, json)| chunks.other(key, json));
        self.read(MOST_CHUNKS * ChunkHasher::CHUNK, &mut chunks);
        // Texts that instances do not compute, such as a long role, do not count as tokens.
        chunks.ends.truncate(self.tokens() as usize / CHUNK_TOKENS);
        chunks.ends
    }

    /// Passes on the content until `left` bytes of text have been passed.
    fn read(&self, left: usize, into: &mut impl ContentSink) {
        let mut reader = ContentReader { left, into };
        match self {
            Prompt::None => {}
            Prompt::Value(value) => reader.read(value, OF_A_MESSAGE),
            Prompt::Messages(messages) => for_each(messages, |message| {
                reader.read(message, OF_A_MESSAGE);
                reader.left > 0
            }),
        }
    }
}

/// The key of this process's hashes. Clients do not know it, so they cannot choose prompts whose
/// hashes are equal or share a place in a table.
static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// Takes the content of a prompt.
trait ContentSink {
    /// Takes text.
    fn text(&mut self, text: &[u8]);

    /// Takes the JSON of content that is not text.
    fn other(&mut self, key: &str, json: &[u8]);
}

impl ContentSink for Vec<u8> {
    fn text(&mut self, text: &[u8]) {
        self.extend_from_slice(text);
    }

    fn other(&mut self, _: &str, _: &[u8]) {}
}

/// Hashes a prompt in chunks of its text.
struct ChunkHasher {
    hasher: DefaultHasher,
    /// The length of the text so far.
    len: usize,
    ends: Vec<u64>,
}

impl ChunkHasher {
    /// The bytes in a chunk.
    const CHUNK: usize = CHUNK_TOKENS * BYTES_PER_TOKEN;
}

impl ContentSink for ChunkHasher {
    fn text(&mut self, mut text: &[u8]) {
        while !text.is_empty() {
            let left = Self::CHUNK - self.len % Self::CHUNK;
            let (now, later) = text.split_at(left.min(text.len()));
            self.hasher.write(now);
            self.len += now.len();
            if self.len.is_multiple_of(Self::CHUNK) {
                self.ends.push(self.hasher.finish());
            }
            text = later;
        }
    }

    fn other(&mut self, key: &str, json: &[u8]) {
        for part in [key.as_bytes(), json] {
            self.hasher.write_usize(part.len());
            self.hasher.write(part);
        }
    }
}

fn tokens_of(json: &str, lists: usize) -> u64 {
    if json.starts_with('"') {
        let length = with_text(json, str::len).unwrap_or(0);
        return length.div_ceil(BYTES_PER_TOKEN) as u64;
    }
    let mut tokens = u64::from(is_number(json));
    if lists > 0 && json.starts_with('[') {
        for_each(json, |element| {
            tokens += tokens_of(element, lists - 1);
            true
        });
    }
    tokens
}

fn tokens_of_content(content: &str) -> u64 {
    if !content.starts_with('[') {
        return tokens_of(content, 0);
    }
    let mut tokens = 0;
    for_each(content, |part| {
        tokens += get(part, "text").map_or(TOKENS_PER_PART, |text| tokens_of(text, 0));
        true
    });
    tokens
}

/// The keys of messages and their parts that have text.
const WITH_TEXT: [&str; 3] = ["role", "content", "text"];

/// Passes on the content of a prompt until `left` bytes of text have been passed.
struct ContentReader<'a, Sink> {
    left: usize,
    into: &'a mut Sink,
}

impl<Sink: ContentSink> ContentReader<'_, Sink> {
    /// Reads a value. Every level of lists and objects is parsed again, so their number is limited.
    fn read(&mut self, json: &str, levels: usize) {
        match json.as_bytes().first() {
            Some(b'"') => {
                with_text(json, |text| self.pass(text.as_bytes()));
            }
            Some(b'[') if levels > 0 => {
                let mut elements = self.left;
                for_each(json, |element| {
                    self.read(element, levels - 1);
                    elements = elements.saturating_sub(1);
                    elements > 0 && self.left > 0
                });
            }
            Some(b'{') if levels > 0 => {
                let mut texts = [None; WITH_TEXT.len()];
                for_each_field(json, |key, value| {
                    match WITH_TEXT.iter().position(|known| *known == key) {
                        Some(at) => texts[at] = Some(value),
                        None => self.into.other(key, value.as_bytes()),
                    }
                });
                texts.into_iter().flatten().for_each(|text| self.read(text, levels - 1));
            }
            _ if is_number(json) => {
                let id: u64 = serde_json::from_str(json).unwrap_or(0);
                self.pass(&(id as u32).to_le_bytes());
            }
            _ => {}
        }
    }

    fn pass(&mut self, text: &[u8]) {
        let text = &text[..text.len().min(self.left)];
        self.left -= text.len();
        self.into.text(text);
    }
}
