//! A request's prompt: estimates its length and reads its beginning, without a copy of it.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::LazyLock;

use super::json::{JsonObject, for_each, get, with_text};
use crate::fleet::cache_model::CHUNK_TOKENS;
use crate::fleet::choice;

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
        let put = |part: &[u8]| beginning.extend_from_slice(part);
        self.read(&mut TextReader { left: tokens.saturating_mul(BYTES_PER_TOKEN), put });
        beginning
    }

    /// Returns the hashes of the prompt up to the end of each whole chunk, and of `other` content.
    pub(super) fn chunks<'b>(&self, other: impl Iterator<Item = &'b str>) -> Vec<u64> {
        let mut chunks = Chunks { hash: *KEY, word: [0; 8], len: 0, ends: Vec::new() };
        other.for_each(|text| chunks.seed(text.as_bytes()));
        let left = MOST_CHUNKS * Chunks::BYTES;
        self.read(&mut TextReader { left, put: |part: &[u8]| chunks.put(part) });
        chunks.ends
    }

    fn read(&self, into: &mut TextReader<impl FnMut(&[u8])>) {
        match self {
            Prompt::None => {}
            Prompt::Value(value) => into.read(value, OF_A_MESSAGE),
            Prompt::Messages(messages) => for_each(messages, |message| {
                into.read(message, OF_A_MESSAGE);
                into.left > 0
            }),
        }
    }
}

/// The beginning of all hashes of this process. Clients do not know it, so they cannot choose prompts
/// whose hashes share a place in a table.
static KEY: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one("chunks of prompts"));

/// Hashes the text of a prompt in chunks.
struct Chunks {
    hash: u64,
    /// The bytes that are not hashed yet.
    word: [u8; 8],
    /// The number of bytes so far.
    len: usize,
    ends: Vec<u64>,
}

impl Chunks {
    const BYTES: usize = CHUNK_TOKENS * BYTES_PER_TOKEN;

    fn seed(&mut self, text: &[u8]) {
        self.hash = choice::mix(self.hash.rotate_left(1) ^ choice::hash(text));
    }

    fn put(&mut self, text: &[u8]) {
        for byte in text {
            self.word[self.len % 8] = *byte;
            self.len += 1;
            if self.len.is_multiple_of(8) {
                let word = u64::from_le_bytes(self.word);
                self.hash = (self.hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
            }
            if self.len.is_multiple_of(Self::BYTES) {
                self.hash = choice::mix(self.hash);
                self.ends.push(self.hash);
            }
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

/// Passes on the texts in a prompt until `left` bytes have been passed.
struct TextReader<Put> {
    left: usize,
    put: Put,
}

impl<Put: FnMut(&[u8])> TextReader<Put> {
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
                for key in ["role", "content", "text"] {
                    if let Some(inner) = get(json, key) {
                        self.read(inner, levels - 1);
                    }
                }
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
        (self.put)(text);
    }
}
