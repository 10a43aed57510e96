//! A request's prompt: estimates its length and reads its beginning, without a copy of it.

use super::json::{JsonObject, for_each, get, with_text};

/// The average number of bytes in a token of text.
const BYTES_PER_TOKEN: usize = 4;
/// The estimated tokens of a message part that is not text.
const TOKENS_PER_PART: u64 = 1024;
/// Lists in a prompt are nested at most this deep: texts, or lists of token ids.
const LISTS: usize = 2;
/// A message, its parts, one of them, and its text.
const OF_A_MESSAGE: usize = 4;

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
        let most = tokens.saturating_mul(BYTES_PER_TOKEN);
        let mut beginning = Vec::new();
        match self {
            Prompt::None => {}
            Prompt::Value(value) => append_text(value, OF_A_MESSAGE, most, &mut beginning),
            Prompt::Messages(messages) => for_each(messages, |message| {
                append_text(message, OF_A_MESSAGE, most, &mut beginning);
                beginning.len() < most
            }),
        }
        beginning
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

/// Appends texts until there are `most` bytes. Every level of lists and objects is parsed again, so
/// their number is limited.
fn append_text(json: &str, levels: usize, most: usize, into: &mut Vec<u8>) {
    let left = most.saturating_sub(into.len());
    match json.as_bytes().first() {
        Some(b'"') => {
            with_text(json, |text| {
                into.extend_from_slice(&text.as_bytes()[..text.len().min(left)])
            });
        }
        Some(b'[') if levels > 0 => {
            let mut elements = most;
            for_each(json, |element| {
                append_text(element, levels - 1, most, into);
                elements = elements.saturating_sub(1);
                elements > 0 && into.len() < most
            });
        }
        Some(b'{') if levels > 0 => {
            for key in ["role", "content", "text"] {
                if let Some(inner) = get(json, key) {
                    append_text(inner, levels - 1, most, into);
                }
            }
        }
        _ if is_number(json) => {
            let id: u64 = serde_json::from_str(json).unwrap_or(0);
            into.extend_from_slice(&(id as u32).to_le_bytes());
        }
        _ => {}
    }
}
