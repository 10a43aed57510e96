//! Text from tokens as they arrive: in total the text that `tokenizers` decodes from all of them.

use super::Tokenizer;
use super::decoder::{MARK, UNFINISHED};

/// The most tokens whose text is retained because a later token may change it, and the most tokens
/// before them that are decoded again as their context.
const MOST: usize = 32;

/// Turns the tokens of one answer into text, piece by piece.
///
/// The pieces join to the text that `tokenizers` decodes from the prompt and the answer together,
/// after what that text has in common with the prompt's. This agrees with transformers' `decode`
/// and, except below, with vLLM.
///
/// A decoder may treat the first token of a text differently, and omits special tokens before it
/// decodes the others. So new tokens are decoded after some whose text was already returned, and
/// only tokens that the decoder sees count as such a context.
///
/// Text that a later token may change is retained for up to 32 tokens:
///
/// - **Unfinished characters.** `ByteLevel` and `ByteFallback` decode them to `U+FFFD`.
/// - **Byte tokens of `ByteFallback`** (`<0xE4>`), until another token follows. One invalid byte
///   makes all bytes next to it invalid, whole characters included.
/// - **The beginning of a `Replace` pattern**, if the decoder replaces in the joined text.
///
/// No other decoder changes earlier text: `WordPiece` and `CTC` clean up each token separately, and
/// `Strip` at the end of a text returns what it stripped when more text follows. Regular
/// expressions that match in the joined text are the exception: text before such a match remains
/// as it was returned.
///
/// Beyond 32 tokens, characters that are whole are returned, and a run of byte tokens counts as
/// divided there. vLLM returns each of a run's characters when it is whole, loses the invalid bytes
/// after them, and never returns an unfinished character at the end of an answer. transformers and
/// this type return it as `U+FFFD`.
#[derive(Debug)]
pub(crate) struct Detokenizer {
    /// The context, followed by the tokens whose text was not returned completely.
    tokens: Vec<u32>,
    /// The number of tokens in the context.
    context: usize,
    /// The context's text.
    before: String,
    /// The text after the context that was already returned.
    returned: String,
    skip_special: bool,
}

impl Detokenizer {
    /// Begins after a prompt, whose last tokens are the context of the answer's first ones.
    pub(crate) fn after(tokenizer: &Tokenizer, prompt: &[u32], skip_special: bool) -> Self {
        let seen = |token: &u32| tokenizer.name_to_decode(*token, skip_special).is_some();
        let mut tokens: Vec<u32> = prompt.iter().rev().copied().filter(seen).take(MOST).collect();
        tokens.reverse();
        if tokens.len() == MOST {
            // The context must not begin within a character.
            let continues = |token: &&u32| {
                let token = tokenizer.name_to_decode(**token, skip_special);
                let byte = token.and_then(|token| tokenizer.decoder.byte(&token));
                byte.is_some_and(|byte| byte & 0xc0 == 0x80)
            };
            tokens.drain(..tokens.iter().take_while(continues).count());
        }
        Detokenizer {
            context: tokens.len(),
            before: tokenizer.decode(&tokens, skip_special),
            tokens,
            returned: String::new(),
            skip_special,
        }
    }

    /// Adds a token, and returns the text that no later token can change.
    pub(crate) fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> String {
        let Some(name) = tokenizer.name_to_decode(token, self.skip_special) else {
            return String::new();
        };
        self.tokens.push(token);
        let byte = tokenizer.decoder.byte(&name).is_some();
        if byte && !self.is_full() {
            return String::new();
        }
        let text = self.pending(tokenizer, self.tokens.len());
        let certain = tokenizer.decoder.certain(&text);
        if certain == text.len() && !byte {
            return self.accept(tokenizer, self.tokens.len(), &text);
        }
        if self.is_full() {
            let end = self.last_boundary(tokenizer);
            let text = self.pending(tokenizer, end);
            return self.accept(tokenizer, end, &text);
        }
        let new = beyond(&text[..certain], &self.returned).to_owned();
        if !new.is_empty() {
            self.returned = text[..certain].to_owned();
        }
        new
    }

    /// Returns the retained text as it is now, without an unfinished character.
    pub(crate) fn retained(&self, tokenizer: &Tokenizer) -> String {
        let text = self.pending(tokenizer, self.tokens.len());
        beyond(text.trim_end_matches(MARK), &self.returned).to_owned()
    }

    /// Returns the remaining text when no token follows.
    pub(crate) fn finish(&mut self, tokenizer: &Tokenizer) -> String {
        let text = self.pending(tokenizer, self.tokens.len());
        self.accept(tokenizer, self.tokens.len(), &text)
    }

    /// Returns whether no more tokens may be retained.
    fn is_full(&self) -> bool {
        self.tokens.len() - self.context >= MOST
    }

    /// Returns the text of the tokens from the context to `end`.
    fn pending(&self, tokenizer: &Tokenizer, end: usize) -> String {
        if end == self.context {
            return String::new();
        }
        let text = tokenizer.decode(&self.tokens[..end], self.skip_special);
        beyond(&text, &self.before).to_owned()
    }

    /// Returns the rest of `text`, the text of the tokens up to `end`, and makes them the context.
    fn accept(&mut self, tokenizer: &Tokenizer, end: usize, text: &str) -> String {
        if text.is_empty() && !self.is_full() {
            // The decoder would treat a token after these as the first of a text.
            return String::new();
        }
        let new = beyond(text, &self.returned).to_owned();
        self.returned.clear();
        let alone = tokenizer.decode(&self.tokens[self.context..end], self.skip_special);
        // Tokens without text of their own need those before them.
        let unneeded = if alone.is_empty() { end.saturating_sub(MOST) } else { self.context };
        self.tokens.drain(..unneeded);
        self.context = end - unneeded;
        self.before = if alone.is_empty() {
            tokenizer.decode(&self.tokens[..self.context], self.skip_special)
        } else {
            alone
        };
        new
    }

    /// Returns the last place where the retained tokens can be divided without breaking a
    /// character, or their end if there is none.
    fn last_boundary(&self, tokenizer: &Tokenizer) -> usize {
        let (start, end) = (self.context, self.tokens.len());
        let text =
            |from: usize, to: usize| tokenizer.decode(&self.tokens[from..to], self.skip_special);
        let whole = text(start, end);
        let is_whole = |at: &usize| !text(start, *at).ends_with(MARK);
        let divides = |at: &usize| text(start, *at) + &text(*at, end) == whole;
        let unfinished = (end - UNFINISHED..=end).rev().find(is_whole);
        unfinished.or_else(|| (start + 1..end).rev().find(divides)).unwrap_or(end)
    }
}

/// Returns the part of `text` after what it has in common with `known`.
fn beyond<'a>(text: &'a str, known: &str) -> &'a str {
    let pairs = text.chars().zip(known.chars());
    let common: usize =
        pairs.take_while(|(a, b)| a == b).map(|(letter, _)| letter.len_utf8()).sum();
    &text[common..]
}

#[cfg(test)]
mod tests;
