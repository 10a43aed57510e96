//! A replacement for a model: tokens are four characters, and an answer is a function of the
//! prompt.

use serde_json::Value;

/// Characters per token.
const CHARACTERS: usize = 4;
/// Tokens per block.
const BLOCK: usize = 16;

/// Tokens of the answers. Some of their characters have two, three and four bytes.
const PIECES: [&str; 16] = [
    " the",
    " block",
    " été",
    " of",
    " 雪",
    " cache",
    " 🦀",
    " is",
    " naïve",
    " read",
    " κλειδί",
    " and",
    " 値",
    " then",
    " 🧊🔥",
    " freed",
];

/// Returns the number of tokens of a prompt.
pub fn count_tokens(prompt: &str) -> usize {
    prompt.chars().count().div_ceil(CHARACTERS).max(1)
}

pub(crate) fn count_blocks(tokens: usize) -> usize {
    tokens.div_ceil(BLOCK)
}

/// Returns the KV cache of a prompt, which a decode must have to answer it.
pub(crate) fn cache(prompt: &str) -> u64 {
    prompt.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// Returns the answer's token at `index`, given the KV cache.
pub(crate) fn token(cache: u64, index: u64) -> &'static str {
    let mut mixed = cache ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    PIECES[(mixed >> 60) as usize]
}

/// Returns the answer's token at `index`.
pub fn piece(prompt: &str, index: u64) -> &'static str {
    token(cache(prompt), index)
}

/// Returns an instance's answer of `tokens` tokens to a prompt.
pub fn answer_to(prompt: &str, tokens: u64) -> String {
    let cache = cache(prompt);
    (0..tokens).map(|index| token(cache, index)).collect()
}

/// Returns the prompts of a completion: a text, token ids, or lists of them. `None` if it has no
/// prompt.
pub(crate) fn prompts(prompt: &Value) -> Option<Vec<String>> {
    let ids = |list: &[Value]| {
        list.iter().map(|id| format!("{:>4}", id.as_u64().unwrap_or(0))).collect::<String>()
    };
    match prompt {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Array(list) if list.is_empty() => None,
        Value::Array(list) if list.iter().all(Value::is_u64) => Some(vec![ids(list)]),
        Value::Array(list) => list
            .iter()
            .map(|one| match one {
                Value::String(text) => Some(text.clone()),
                Value::Array(list) => Some(ids(list)),
                _ => None,
            })
            .collect(),
        _ => None,
    }
}

/// Returns the prompt of a chat.
pub(crate) fn chat(messages: &Value) -> Option<String> {
    let messages = messages.as_array().filter(|messages| !messages.is_empty())?;
    let line = |message: &Value| {
        Some(format!("{}: {}\n", message.get("role")?.as_str()?, message.get("content")?))
    };
    messages.iter().map(line).collect()
}
