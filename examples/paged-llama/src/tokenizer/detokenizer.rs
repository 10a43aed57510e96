//! Text from tokens as they arrive: never a partial character, and in total the text of all tokens.

use super::Tokenizer;

/// The most bytes of an unfinished character; each may decode to one replacement character.
const UNFINISHED: usize = 3;

/// Turns the tokens of one answer into text, piece by piece.
///
/// A tokenizer may decode a token differently at the beginning of a text. So new tokens are decoded
/// after some whose text was already returned, and only the difference is returned.
#[derive(Debug, Default)]
pub(crate) struct Detokenizer {
    tokens: Vec<u32>,
    /// The first token of those that are decoded together.
    window: usize,
    /// The tokens before this one were returned completely.
    told: usize,
    /// The number of bytes after `told` that were already returned.
    shown: usize,
    skip_special: bool,
}

impl Detokenizer {
    /// Begins after a prompt, whose last tokens are the context of the answer's first ones.
    pub(crate) fn after(prompt: &[u32], skip_special: bool) -> Self {
        let context = &prompt[prompt.len().saturating_sub(5)..];
        Detokenizer {
            tokens: context.to_vec(),
            window: 0,
            told: context.len(),
            shown: 0,
            skip_special,
        }
    }

    /// Adds a token, and returns the text that it completes, up to the last whole character.
    pub(crate) fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> String {
        self.tokens.push(token);
        let text = self.pending(tokenizer);
        let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        if whole.len() == text.len() {
            self.window = self.told;
            self.told = self.tokens.len();
            return text[std::mem::take(&mut self.shown).min(text.len())..].to_owned();
        }
        // Bytes that no later token can complete are returned as replacement characters.
        let marks = text[whole.len()..].chars().count().saturating_sub(UNFINISHED);
        let sure = whole.len() + marks * char::REPLACEMENT_CHARACTER.len_utf8();
        let new = text.get(self.shown..sure).unwrap_or_default().to_owned();
        self.shown = self.shown.max(sure);
        new
    }

    /// Returns the remaining text when no token follows.
    pub(crate) fn finish(&mut self, tokenizer: &Tokenizer) -> String {
        let text = self.pending(tokenizer);
        text.get(std::mem::take(&mut self.shown)..).unwrap_or_default().to_owned()
    }

    /// Returns the text of the tokens that were not returned completely.
    fn pending(&self, tokenizer: &Tokenizer) -> String {
        let before = tokenizer.decode(&self.tokens[self.window..self.told], self.skip_special);
        let mut all = tokenizer.decode(&self.tokens[self.window..], self.skip_special);
        if all.starts_with(&before) {
            all.split_off(before.len())
        } else {
            // The prompt ended within a character, which this text completes.
            tokenizer.decode(&self.tokens[self.told..], self.skip_special)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::bytes;
    use super::*;

    fn pieces(prompt: &[u32], tokens: &[u32]) -> Vec<String> {
        let tokenizer = bytes();
        let mut detokenizer = Detokenizer::after(prompt, true);
        let mut pieces: Vec<String> =
            tokens.iter().map(|token| detokenizer.push(&tokenizer, *token)).collect();
        pieces.push(detokenizer.finish(&tokenizer));
        pieces
    }

    fn tokens(text: &[u8]) -> Vec<u32> {
        text.iter().copied().map(u32::from).collect()
    }

    #[test]
    fn characters_are_returned_whole() {
        assert_eq!(
            pieces(&tokens(b"so: "), &tokens("a🌍é".as_bytes())),
            ["a", "", "", "", "🌍", "", "é", ""]
        );
    }

    #[test]
    fn invalid_bytes_are_returned_and_unfinished_characters_are_retained() {
        assert_eq!(pieces(&[], &tokens(b"\xc3a")), ["", "\u{fffd}a", ""]);
        assert_eq!(pieces(&[], &tokens(b"a\xe4\xb8")).concat(), "a\u{fffd}");
        assert_eq!(
            pieces(&[], &tokens(b"\xff\xff\xff\xff\xff")),
            ["", "", "", "\u{fffd}", "\u{fffd}", "\u{fffd}\u{fffd}\u{fffd}"]
        );
    }

    #[test]
    fn special_tokens_are_left_out() {
        assert_eq!(pieces(&[], &[0x61, 257, 0x62]), ["a", "", "b", ""]);
    }

    #[test]
    fn pieces_join_to_the_whole_text_for_any_bytes() {
        let mut seed = 1u32;
        for _ in 0..300 {
            let text: Vec<u8> = (0..24)
                .map(|_| {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (seed >> 24) as u8
                })
                .collect();
            let whole = bytes().decode(&tokens(&text), true);
            assert_eq!(pieces(&tokens(b"p"), &tokens(&text)).concat(), whole, "{text:?}");
        }
    }
}
