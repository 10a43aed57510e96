//! The growing text of an answer, and the texts that end it.

use crate::tokenizer::{Detokenizer, Tokenizer, begun};

/// The text of an answer. It retains text that may be the beginning of a stop.
#[derive(Debug)]
pub(super) struct Text {
    detokenizer: Detokenizer,
    kept: String,
    stops: Vec<String>,
    include_stop: bool,
}

impl Text {
    pub(super) fn new(detokenizer: Detokenizer, stops: Vec<String>, include_stop: bool) -> Self {
        Text { detokenizer, kept: String::new(), stops, include_stop }
    }

    /// Adds a token. Returns the text that no later token can change, and the stop that the token
    /// completes, if `may_stop`.
    pub(super) fn push(
        &mut self,
        tokenizer: &Tokenizer,
        token: u32,
        may_stop: bool,
    ) -> (String, Option<String>) {
        self.kept += &self.detokenizer.push(tokenizer, token);
        if !may_stop || self.stops.is_empty() {
            return (std::mem::take(&mut self.kept), None);
        }
        // A stop counts as soon as it is there, also if the text after it may still change.
        let mut text = self.kept.clone() + &self.detokenizer.retained(tokenizer);
        // The first stop in the text counts; of those at the same place, the one that was named
        // first.
        let found = self.stops.iter().filter_map(|stop| Some((text.find(stop.as_str())?, stop)));
        if let Some((at, stop)) = found.min_by_key(|(at, _)| *at) {
            let stop = stop.clone();
            text.truncate(if self.include_stop { at + stop.len() } else { at });
            self.kept.clear();
            return (text, Some(stop));
        }
        let certain = self.kept.len() - self.begun();
        (self.kept.drain(..certain).collect(), None)
    }

    /// Returns the retained text when the answer ends without a stop.
    pub(super) fn finish(&mut self, tokenizer: &Tokenizer) -> String {
        let mut rest = std::mem::take(&mut self.kept);
        rest += &self.detokenizer.finish(tokenizer);
        rest
    }

    /// Returns how many bytes at the end may be the beginning of a stop.
    fn begun(&self) -> usize {
        self.stops.iter().filter_map(|stop| begun(&self.kept, stop)).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tokenizer::tests::{bytes, words};

    fn run(text: &str, stops: &[&str], include: bool) -> (Vec<String>, Option<String>) {
        let tokenizer = bytes();
        let stops = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut grown = Text::new(Detokenizer::after(&tokenizer, &[], true), stops, include);
        let mut pieces = Vec::new();
        for byte in text.bytes() {
            let (piece, stop) = grown.push(&tokenizer, byte.into(), true);
            pieces.push(piece);
            if stop.is_some() {
                return (pieces, stop);
            }
        }
        pieces.push(grown.finish(&tokenizer));
        (pieces, None)
    }

    #[test]
    fn a_stop_across_tokens_ends_the_text_before_it() {
        let (pieces, stop) = run("one, two, three", &["two"], false);
        assert_eq!((pieces.concat().as_str(), stop.as_deref()), ("one, ", Some("two")));
        let (pieces, stop) = run("one, two, three", &["two"], true);
        assert_eq!((pieces.concat().as_str(), stop.as_deref()), ("one, two", Some("two")));
    }

    #[test]
    fn text_that_turns_out_to_begin_no_stop_is_returned() {
        let (pieces, stop) = run("abac", &["abad"], false);
        assert_eq!(pieces, ["", "", "", "abac", ""]);
        assert_eq!(stop, None);
        assert_eq!(run("xab", &["abc"], false).0, ["x", "", "", "ab"]);
    }

    #[test]
    fn the_first_stop_in_the_text_counts_and_characters_stay_whole() {
        let (pieces, stop) = run("aé世b", &["b", "世"], false);
        assert_eq!((pieces.concat().as_str(), stop.as_deref()), ("aé", Some("世")));
    }

    #[test]
    fn a_stop_counts_before_the_text_after_it_is_certain() {
        let names = ["<s>", "</s>", "a", "<0x0A>", "<0xE4>"].map(str::to_owned);
        let tokenizer = words(&names, &json!({"type": "ByteFallback"}));
        let detokenizer = Detokenizer::after(&tokenizer, &[], true);
        let mut text = Text::new(detokenizer, vec!["\n".into()], false);
        assert_eq!(text.push(&tokenizer, 2, true), ("a".into(), None));
        assert_eq!(text.push(&tokenizer, 4, true), (String::new(), None));
        assert_eq!(text.push(&tokenizer, 2, true), ("\u{fffd}a".into(), None));
        assert_eq!(text.push(&tokenizer, 3, true), (String::new(), Some("\n".into())));
    }
}
