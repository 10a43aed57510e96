//! Fuzz targets: the messages that a chat template renders, and the texts and tokens of clients.

use std::sync::OnceLock;

use serde_json::{Map, Value};

use super::{Detokenizer, Generation, Template, Tokenizer};

/// Templates in the ways of common models: with a default system prompt, with JSON and the tokens'
/// names, and one that rejects some conversations.
const TEMPLATES: [&str; 3] = [
    "{%- if messages[0].role != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{%- endif %}\
     {%- for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message.content | trim }}\
     <|im_end|>\n{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}",
    "{{ bos_token }}{%- for message in messages if message.content is defined %}\
     {{ loop.index0 ~ ':' ~ message.role.title() }} {{ message.content | tojson(indent=2) }}\
     {{ message.content.split('</think>')[-1].lstrip('\n') if message.content is string }}\
     {%- endfor %}{{ strftime_now('%d %b %Y') }}",
    "{%- for message in messages %}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
     {{ raise_exception('roles must alternate: ' ~ message.role) }}{%- endif %}\
     {%- for part in message.content %}{{ part.text[:20] }}{%- endfor %}{%- endfor %}",
];

/// Renders messages, which are JSON. Their first byte selects the template.
pub(crate) fn chat(bytes: &[u8]) {
    let Some((template, messages)) = bytes.split_first() else { return };
    let Ok(messages) = serde_json::from_slice::<Value>(messages) else { return };
    let source = TEMPLATES[usize::from(*template) % TEMPLATES.len()].to_owned();
    let more = Map::from_iter([("bos_token".into(), "<s>".into())]);
    let template = Template::new(source, &more).expect("the template is valid");
    let more = Map::from_iter([("add_generation_prompt".into(), true.into())]);
    drop(template.render(&messages, &more));
}

/// Encodes a text, and decodes it at once and token by token; does the same with the input as
/// tokens.
pub(crate) fn text(input: &[u8]) {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    let tokenizer = TOKENIZER.get_or_init(bytes);
    if let Ok(text) = std::str::from_utf8(input) {
        let tokens = tokenizer.encode(text, true).expect("every byte has a token");
        assert_eq!(tokenizer.decode(&tokens, false), text);
        check_pieces(tokenizer, &tokens);
    }
    // The vocabulary has 258 tokens.
    let pairs = input.as_chunks::<2>().0.iter().map(|pair| u16::from_le_bytes(*pair) % 260);
    check_pieces(tokenizer, &pairs.map(u32::from).collect::<Vec<_>>());
}

/// Checks that pieces of an answer join to what the decoder returns for all of it.
fn check_pieces(tokenizer: &Tokenizer, tokens: &[u32]) {
    for skip_special in [false, true] {
        let mut detokenizer = Detokenizer::after(tokenizer, &[], skip_special);
        let mut joined = String::new();
        for token in tokens {
            joined += &detokenizer.push(tokenizer, *token);
        }
        joined += &detokenizer.finish(tokenizer);
        assert_eq!(joined, tokenizer.decode(tokens, skip_special));
    }
}

/// Returns a tokenizer with one token per byte; 256 ends a text and 257 begins one.
pub(crate) fn bytes() -> Tokenizer {
    let vocab = (0..).zip(byte_letters()).map(|(id, letter)| (letter.to_string(), id.into()));
    let byte_level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                                        "use_regex": false});
    tokenizer(&serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [special(256, "<end>"), special(257, "<begin>")],
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                  "vocab": Map::from_iter(vocab), "merges": []},
    }))
}

/// Returns the tokenizer of this `tokenizer.json`; 256 ends a text.
pub(super) fn tokenizer(file: &Value) -> Tokenizer {
    let inner =
        tokenizers::Tokenizer::from_bytes(file.to_string()).expect("the tokenizer is valid");
    let generation = Generation { ends: vec![256], ..Generation::default() };
    Tokenizer::new(inner, None, generation).expect("the decoder is valid")
}

/// Returns an entry of `added_tokens`.
pub(super) fn special(id: u32, content: &str) -> Value {
    serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                       "normalized": false, "special": true})
}

/// Returns the letters by which byte-level vocabularies name the bytes 0 to 255.
pub(crate) fn byte_letters() -> Vec<char> {
    let printed = |byte: &u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = (256..).filter_map(char::from_u32);
    let letters = (0..=255u8).map(|byte| match printed(&byte) {
        true => char::from(byte),
        false => others.next().expect("the number is a letter"),
    });
    letters.collect()
}
