use serde_json::{Value, json};

use super::super::tests::{byte_letters, bytes, words};
use super::*;

/// The fewest random answers that are compared with `tokenizers`.
const COMPARED: usize = 10_000;

fn pieces_of(tokenizer: &Tokenizer, prompt: &[u32], tokens: &[u32], skip: bool) -> Vec<String> {
    let mut detokenizer = Detokenizer::after(tokenizer, prompt, skip);
    let mut pieces = Vec::new();
    for token in tokens {
        pieces.push(detokenizer.push(tokenizer, *token));
        assert!(detokenizer.tokens.len() <= 2 * MOST, "the retained tokens are bounded");
    }
    pieces.push(detokenizer.finish(tokenizer));
    pieces
}

fn pieces(prompt: &[u32], tokens: &[u32]) -> Vec<String> {
    pieces_of(&bytes(), prompt, tokens, true)
}

fn tokens(text: &[u8]) -> Vec<u32> {
    text.iter().copied().map(u32::from).collect()
}

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// Returns the names of these bytes' tokens.
fn byte_names(bytes: &[u8]) -> Vec<String> {
    bytes.iter().map(|byte| format!("<0x{byte:02X}>")).collect()
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
fn a_space_after_a_skipped_special_token_remains() {
    let tokenizer = words(&owned(&["<s>", "</s>", "w238", "w95"]), &Value::Null);
    assert_eq!(pieces_of(&tokenizer, &[], &[2, 1, 3], true), ["w238", "", " w95", ""]);
    assert_eq!(pieces_of(&tokenizer, &[2, 1, 1, 1, 1, 1, 1], &[3], true), [" w95", ""]);
    assert_eq!(pieces_of(&tokenizer, &[2], &[9, 3], true), ["", " w95", ""], "9 is unknown");
    assert_eq!(pieces_of(&tokenizer, &[1], &[3], true), ["w95", ""]);
    assert_eq!(pieces_of(&tokenizer, &[], &[2, 1, 3], false), ["w238", " </s>", " w95", ""]);
}

#[test]
fn an_answer_completes_the_character_in_which_the_prompt_ends() {
    assert_eq!(pieces(&tokens(b"a\xc3"), &tokens(b"\xa9x")), ["é", "x", ""]);
    assert_eq!(pieces(&tokens(b"a\xc3"), &tokens(b"x")), ["x", ""]);
    let mut names = owned(&["<s>", "</s>", "x"]);
    names.extend(byte_names("🌍世".as_bytes()));
    let steps = json!([{"type": "ByteFallback"}, {"type": "Fuse"}]);
    let tokenizer = words(&names, &json!({"type": "Sequence", "decoders": steps}));
    let emoji = [3, 4, 5, 6];
    assert_eq!(pieces_of(&tokenizer, &emoji[..2], &[5, 6, 2], true), ["", "", "🌍x", ""]);
    let long = [7, 8, 9].repeat(20);
    assert_eq!(pieces_of(&tokenizer, &long, &[7, 8, 9], true).concat(), "世");
}

#[test]
fn long_runs_of_byte_tokens_arrive_in_parts() {
    let text = "မြန်မာဘာသာစကားသည် ".repeat(5);
    let letters: Vec<u8> = (0..=255).collect();
    let mut names = owned(&["<s>", "</s>"]);
    names.extend(byte_names(&letters));
    let steps = json!([{"type": "ByteFallback"}, {"type": "Fuse"}]);
    let tokenizer = words(&names, &json!({"type": "Sequence", "decoders": steps}));
    let tokens: Vec<u32> = text.bytes().map(|byte| u32::from(byte) + 2).collect();
    let pieces = pieces_of(&tokenizer, &[], &tokens, true);
    assert_eq!(pieces.concat(), text);
    let waits = pieces.split(|piece| !piece.is_empty()).map(<[String]>::len).max();
    assert!(waits < Some(MOST), "{waits:?}");
    // Invalid bytes are returned and bounded too.
    let invalid = vec![0xff + 2; 200];
    assert_eq!(pieces_of(&tokenizer, &[], &invalid, true).concat(), "\u{fffd}".repeat(200));
}

#[test]
fn tokens_without_text_do_not_accumulate() {
    let ctc =
        json!({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true});
    let tokenizer = words(&owned(&["<s>", "</s>", "<pad>", "a"]), &ctc);
    let tokens = [&[3][..], &[2; 200], &[3]].concat();
    assert_eq!(pieces_of(&tokenizer, &[], &tokens, true).concat(), "aa");
}

/// The decoders, and the tokens of their vocabularies besides the common ones. The last column says
/// which kinds of tokens are added: empty ones, byte tokens, or the letters of `ByteLevel`.
const CASES: &[(&str, &[&str], &[Added])] = &[
    ("null", &[], &[Added::Empty]),
    (r#"{"type": "BPEDecoder", "suffix": "</w>"}"#, &["lo</w>", "</w>", "w</w>"], &[Added::Empty]),
    (r#"{"type": "Fuse"}"#, &[], &[Added::Empty]),
    (
        r###"{"type": "WordPiece", "prefix": "##", "cleanup": true}"###,
        &["##ing", "##", ".", "n't", "'m", "do not", "'"],
        &[Added::Empty],
    ),
    (
        r###"{"type": "WordPiece", "prefix": "##", "cleanup": false}"###,
        &["##ing", "##", "."],
        &[Added::Empty],
    ),
    (
        r#"{"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true}"#,
        &["<pad>", "|", "h", "n't", "'s"],
        &[Added::Empty],
    ),
    (
        r#"{"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": false}"#,
        &["<pad>", "|", "h"],
        &[Added::Empty],
    ),
    (
        r#"{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}"#,
        &["▁▁", "▁x", "x▁"],
        &[Added::Empty],
    ),
    (
        r#"{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true}"#,
        &["▁▁", "▁x"],
        &[Added::Empty],
    ),
    (
        r#"{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": true}"#,
        &["▁▁", "▁x"],
        &[Added::Empty],
    ),
    (
        r#"{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}"#,
        &["▁▁", "▁x"],
        &[Added::Empty],
    ),
    (
        r#"{"type": "Replace", "pattern": {"Regex": "[ab]+"}, "content": "<>"}"#,
        &["xaab", "ab"],
        &[Added::Empty],
    ),
    (r#"{"type": "Strip", "content": "x", "start": 1, "stop": 0}"#, &["xx", "xa"], &[Added::Empty]),
    // The crate panics if it strips the end of an empty text, so there are no empty tokens.
    (
        r#"{"type": "Sequence", "decoders": [{"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 0, "stop": 1}]}"#,
        &["x", " ", "x x", "  "],
        &[],
    ),
    (
        r#"{"type": "Sequence", "decoders": [{"type": "Fuse"},
            {"type": "Strip", "content": "x", "start": 3, "stop": 0}]}"#,
        &["x", " ", "x x", "xx"],
        &[Added::Empty],
    ),
    (
        r#"{"type": "Sequence", "decoders": [{"type": "Fuse"},
            {"type": "Replace", "pattern": {"String": "aab"}, "content": "X"}]}"#,
        &["aa", "ba", "aab"],
        &[Added::Empty],
    ),
    (
        r#"{"type": "Sequence", "decoders": [{"type": "Fuse"},
            {"type": "Replace", "pattern": {"String": "ab"}, "content": ""}]}"#,
        &["aa", "ba"],
        &[Added::Empty],
    ),
    (
        r###"{"type": "Sequence", "decoders": [{"type": "WordPiece", "prefix": "##", "cleanup": false},
            {"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]}"###,
        &["##ing"],
        &[Added::Empty],
    ),
    (r#"{"type": "ByteFallback"}"#, &[], &[Added::Empty, Added::Bytes]),
    // Gemma's and Llama 2's.
    (
        r#"{"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}]}"#,
        &["▁▁", "▁x"],
        &[Added::Empty, Added::Bytes],
    ),
    (
        r#"{"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}"#,
        &["▁▁", "▁x"],
        &[Added::Empty, Added::Bytes],
    ),
    (
        r#"{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}"#,
        &[],
        &[Added::Empty, Added::Letters],
    ),
    (
        r#"{"type": "Sequence", "decoders": [
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            {"type": "Replace", "pattern": {"String": "the"}, "content": "a"}]}"#,
        &[],
        &[Added::Empty, Added::Letters],
    ),
];

/// A kind of tokens in a vocabulary.
#[derive(Clone, Copy)]
enum Added {
    Empty,
    Bytes,
    Letters,
}

impl Added {
    fn names(self) -> Vec<String> {
        match self {
            Added::Empty => vec![String::new()],
            Added::Bytes => {
                let bytes = b" \nA\x80\x8c\x8d\x96\x9f\xa9\xb8\xc3\xe4\xf0\xff";
                [byte_names(bytes), owned(&["<0xE>", "<0xGG>"])].concat()
            }
            Added::Letters => {
                let parts: [&[u8]; 6] =
                    [b"\xe4\xb8", b"\x96", b" \xf0\x9f", b"\x8c", b"\x8d\xe4", b"\xb8\x96 the"];
                let single = (0..=255u8).step_by(3).map(|byte| vec![byte]);
                let letters = byte_letters();
                let name = |bytes: Vec<u8>| -> String {
                    bytes.iter().map(|byte| letters[usize::from(*byte)]).collect()
                };
                single.chain(parts.map(<[u8]>::to_vec)).map(name).collect()
            }
        }
    }
}

/// A pseudorandom sequence.
struct Random(u32);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 8) as usize % end
    }

    /// Returns up to `most` tokens: any of the vocabulary, one that is not in it, or some that are
    /// a character together.
    fn tokens(&mut self, most: usize, names: &[String]) -> Vec<u32> {
        let whole = ["é", "世", "🌍"].map(|letter| byte_names(letter.as_bytes()));
        let mut tokens = Vec::new();
        for _ in 0..self.below(most + 1) {
            let letter = &whole[self.below(whole.len())];
            let place = |name: &String| names.iter().position(|other| other == name);
            match letter.iter().map(place).collect::<Option<Vec<usize>>>() {
                Some(places) if self.below(4) == 0 => {
                    tokens.extend(places.iter().map(|at| *at as u32));
                }
                _ => tokens.push(self.below(names.len() + 2) as u32),
            }
        }
        tokens
    }
}

/// Compares with `tokenizers`' own decoding of all tokens. The answers are shorter than the longest
/// run of byte tokens that is decoded as one.
#[test]
fn pieces_join_to_the_text_of_tokenizers_for_every_decoder() {
    let mut random = Random(1);
    let mut compared = 0;
    for (decoder, more, added) in CASES {
        let mut names =
            owned(&["<s>", "</s>", "the", "▁the", "a", "b", "w1", "é", "\u{fffd}", "▁"]);
        names.extend(owned(more));
        names.extend(added.iter().flat_map(|added| added.names()));
        let tokenizer = words(&names, &serde_json::from_str(decoder).unwrap());
        for at in 0..2 * COMPARED.div_ceil(2 * CASES.len()) {
            let skip = at % 2 == 0;
            let prompt = if at % 4 < 2 { Vec::new() } else { random.tokens(MOST / 2, &names) };
            let answer = random.tokens(10, &names);
            let reference = |count: usize| {
                let all = [&prompt[..], &answer[..count]].concat();
                let text = tokenizer.decode(&all, skip);
                beyond(&text, &tokenizer.decode(&prompt, skip)).to_owned()
            };
            let context = format!("{decoder} {skip} {prompt:?} {answer:?}");
            let pieces = pieces_of(&tokenizer, &prompt, &answer, skip);
            assert_eq!(pieces.concat(), reference(answer.len()), "{context}");
            for count in 0..answer.len() {
                let (text, now) = (pieces[..=count].concat(), reference(count + 1));
                let last = answer[..=count].iter().rev();
                let last = last.filter_map(|token| tokenizer.name_to_decode(*token, skip)).next();
                let in_run = last.is_some_and(|name| tokenizer.decoder.byte(&name).is_some());
                // Only what may change is missing.
                if !in_run && tokenizer.decoder.certain(&now) == now.len() {
                    assert_eq!(text, now, "{context}, after {count}");
                }
            }
            compared += 1;
        }
    }
    assert!(compared >= COMPARED, "{compared}");
}

#[test]
fn pieces_join_to_the_whole_text_for_any_bytes() {
    let mut random = Random(1);
    for _ in 0..300 {
        let high = if random.below(2) == 0 { 0x80 } else { 0 };
        let text: Vec<u8> = (0..60).map(|_| random.below(256) as u8 | high).collect();
        for text in [&text[..24], &text] {
            let whole = bytes().decode(&tokens(text), true);
            assert_eq!(pieces(&tokens(b"p"), &tokens(text)).concat(), whole, "{text:?}");
        }
    }
}
