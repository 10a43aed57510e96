//! The text that a tokenizer's decoder may change when more tokens follow.

use serde_json::Value;

pub(super) const MARK: char = char::REPLACEMENT_CHARACTER;
/// The most bytes of an unfinished character; each may decode to one replacement character.
pub(super) const UNFINISHED: usize = 3;

/// The properties of a decoder of `tokenizer.json` by which it changes text at the end.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Decoder {
    /// It decodes runs of byte tokens together.
    byte_fallback: bool,
    /// The texts that it replaces in the joined text of all tokens.
    patterns: Vec<String>,
}

impl Decoder {
    /// Reads the decoder's JSON, null if there is none.
    pub(super) fn of(json: &Value) -> Self {
        let mut decoder = Decoder::default();
        decoder.read(json, &mut false);
        decoder
    }

    /// Reads one step; `joined` says whether an earlier one joins the tokens.
    fn read(&mut self, json: &Value, joined: &mut bool) {
        match json["type"].as_str() {
            Some("Sequence") => {
                let steps = json["decoders"].as_array().into_iter().flatten();
                steps.for_each(|step| self.read(step, joined));
            }
            Some("ByteFallback") => self.byte_fallback = true,
            Some("ByteLevel" | "Fuse") => *joined = true,
            Some("Replace") if *joined => {
                self.patterns.extend(json["pattern"]["String"].as_str().map(str::to_owned));
            }
            _ => {}
        }
    }

    /// Returns the byte that a token such as `<0x0A>` stands for.
    pub(super) fn byte(&self, token: &str) -> Option<u8> {
        let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
        let is_byte = self.byte_fallback && digits.len() == 2;
        is_byte.then(|| u8::from_str_radix(digits, 16).ok()).flatten()
    }

    /// Returns the number of bytes at the beginning of `text` that later tokens do not change,
    /// provided that its last token is no byte token.
    pub(super) fn certain(&self, text: &str) -> usize {
        let whole = text.trim_end_matches(MARK);
        let marks = text[whole.len()..].chars().count().saturating_sub(UNFINISHED);
        let begun = self.patterns.iter().filter_map(|pattern| begun(text, pattern)).max();
        (whole.len() + marks * MARK.len_utf8()).min(text.len() - begun.unwrap_or(0))
    }
}

/// Returns the length of the longest suffix of `text` that is a proper prefix of `pattern`; `None`
/// if there is none.
pub(crate) fn begun(text: &str, pattern: &str) -> Option<usize> {
    let most = pattern.len().min(text.len() + 1);
    let mut lengths = (1..most).rev().filter(|length| pattern.is_char_boundary(*length));
    lengths.find(|length| text.ends_with(&pattern[..*length]))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_steps_that_see_several_tokens_change_text() {
        let replace = json!({"type": "Replace", "pattern": {"String": "ab"}, "content": "c"});
        let of = |steps: &[&Value]| Decoder::of(&json!({"type": "Sequence", "decoders": steps}));
        let (fuse, bytes) = (json!({"type": "Fuse"}), json!({"type": "ByteFallback"}));
        assert_eq!(of(&[&replace, &fuse]), Decoder::default());
        let decoder = of(&[&bytes, &fuse, &replace]);
        assert_eq!(decoder, Decoder { byte_fallback: true, patterns: vec!["ab".into()] });
        assert_eq!((decoder.certain("xa"), decoder.certain("xab"), decoder.certain("")), (1, 3, 0));
        assert_eq!((decoder.byte("<0xE4>"), decoder.byte("<0xE>")), (Some(0xe4), None));
        assert_eq!(Decoder::of(&Value::Null).byte("<0xE4>"), None);
    }

    #[test]
    fn the_last_three_replacement_characters_may_be_one_character() {
        let decoder = Decoder::default();
        assert_eq!(decoder.certain("a\u{fffd}\u{fffd}\u{fffd}"), 1);
        assert_eq!(decoder.certain("a\u{fffd}\u{fffd}\u{fffd}\u{fffd}"), 4);
    }
}
