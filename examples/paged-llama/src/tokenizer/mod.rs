//! Text to tokens and back: `tokenizer.json`, the chat template, and the other files of a model's
//! folder that concern text.

mod decoder;
mod detokenizer;
pub(crate) mod fuzz;
mod generation;
mod template;

use std::path::Path;

use serde_json::{Map, Value};

use self::decoder::Decoder;
pub(crate) use self::decoder::begun;
pub(crate) use self::detokenizer::Detokenizer;
pub use self::generation::Generation;
use self::template::Template;
use crate::model::{Config, ModelError as Error, Result};

/// A model's tokenizer and chat template.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    decoder: Decoder,
    template: Option<Template>,
    generation: Generation,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("generation", &self.generation).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads the folder's `tokenizer.json` and, if they exist, `tokenizer_config.json` and
    /// `chat_template.jinja`.
    ///
    /// # Errors
    ///
    /// Fails if a file is missing or invalid; the message names it.
    pub fn open(folder: &Path, model: &Config) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let bytes = std::fs::read(&path).map_err(|error| {
            Error::new(format!(
                "{}: {error}; save the model's fast tokenizer there",
                path.display()
            ))
        })?;
        let inner = tokenizers::Tokenizer::from_bytes(&bytes)
            .map_err(|error| Error::new(format!("{}: {error}", path.display())))?;
        let config = read_object(&folder.join("tokenizer_config.json"))?;
        let template = Template::open(folder, &config)?;
        Tokenizer::new(inner, template, Generation::of(model))
    }

    fn new(
        inner: tokenizers::Tokenizer,
        template: Option<Template>,
        generation: Generation,
    ) -> Result<Self> {
        let decoder = serde_json::to_value(inner.get_decoder()).map_err(Error::of)?;
        Ok(Tokenizer { decoder: Decoder::of(&decoder), inner, template, generation })
    }

    /// Returns the defaults of requests.
    pub fn generation(&self) -> &Generation {
        &self.generation
    }

    /// Returns the tokens of a text, with the model's special tokens around a prompt if `special`.
    ///
    /// # Errors
    ///
    /// Fails if the tokenizer fails.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, special).map_err(Error::of)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Returns the text of tokens; invalid bytes become `U+FFFD`.
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> String {
        // Some decoders panic without a token.
        if !tokens.iter().any(|token| self.name_to_decode(*token, skip_special).is_some()) {
            return String::new();
        }
        self.inner.decode(tokens, skip_special).unwrap_or_default()
    }

    /// Returns one token as the decoder sees it; `None` for a token that is not in the vocabulary,
    /// and for a special one if `skip_special`.
    fn name_to_decode(&self, token: u32, skip_special: bool) -> Option<String> {
        let name = self.inner.id_to_token(token)?;
        let skipped = skip_special && self.inner.get_added_vocabulary().is_special_token(&name);
        (!skipped).then_some(name)
    }

    /// Returns the text of one token, empty if the token is only a part of a character.
    pub fn piece(&self, token: u32) -> String {
        let text = self.decode(&[token], false);
        if text.ends_with(char::REPLACEMENT_CHARACTER) { String::new() } else { text }
    }

    /// Returns one token as it is in the vocabulary.
    pub fn raw(&self, token: u32) -> Option<String> {
        self.inner.id_to_token(token)
    }

    /// Returns the number of tokens in the vocabulary.
    pub fn size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Renders a conversation with the model's chat template.
    ///
    /// # Errors
    ///
    /// Fails if the model has no template, or the template rejects these messages.
    pub fn chat(&self, messages: &Value, more: &Map<String, Value>) -> Result<String> {
        let template = self.template.as_ref().ok_or_else(|| {
            Error::new("the model has no chat template: put chat_template.jinja into its folder, or send a prompt to /v1/completions")
        })?;
        template.render(messages, more)
    }
}

/// Reads a JSON object from a file; returns an empty one if there is no file.
fn read_object(path: &Path) -> Result<Map<String, Value>> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Map::new()),
        Err(error) => return Err(Error::new(format!("{}: {error}", path.display()))),
    };
    serde_json::from_str(&text).map_err(|error| Error::new(format!("{}: {error}", path.display())))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    pub(crate) use crate::tokenizer::fuzz::{byte_letters, bytes};
    use crate::tokenizer::fuzz::{special, tokenizer};

    /// Returns a tokenizer with these words as tokens 0, 1, …; the first two are special.
    pub(crate) fn words(words: &[String], decoder: &Value) -> Tokenizer {
        let vocab = (0..).zip(words).map(|(id, word)| (word.clone(), Value::from(id)));
        let specials = (0..).zip(&words[..2]).map(|(id, word)| special(id, word));
        tokenizer(&serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "added_tokens": specials.collect::<Vec<_>>(), "decoder": decoder,
            "model": {"type": "WordLevel", "vocab": Map::from_iter(vocab), "unk_token": "<s>"},
        }))
    }

    #[test]
    fn decoding_reverts_encoding() {
        let tokenizer = bytes();
        let text = "Grüße, 世界 🌍\n";
        let tokens = tokenizer.encode(text, false).unwrap();
        assert_eq!(tokens, text.bytes().map(u32::from).collect::<Vec<_>>());
        assert_eq!(tokenizer.decode(&tokens, true), text);
        assert_eq!(
            (tokenizer.piece(0x41), tokenizer.piece(0xc3), tokenizer.piece(256)),
            ("A".into(), String::new(), "<end>".into())
        );
        assert_eq!(tokenizer.decode(&[0x41, 256], true), "A");
        assert_eq!(tokenizer.size(), 258);
    }
}
