//! Encodes arbitrary bytes for the engine's notifications, which are C strings in JSON: base64,
//! with several frames in one notification.

use kvx_core::{Error, ErrorKind, Result};

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
/// Separates frames.
const GAP: u8 = b' ';
/// The maximum length of a text that is decoded: the engine itself accepts less than a megabyte.
const MAX_TEXT: usize = 1 << 20;

/// Returns the length of a frame's text with the gap after it, for `bytes` bytes.
pub(crate) fn text_len(bytes: usize) -> usize {
    bytes.div_ceil(3) * 4 + 1
}

/// Appends a frame to a text.
pub(crate) fn append(text: &mut Vec<u8>, frame: &[u8]) {
    if !text.is_empty() {
        text.push(GAP);
    }
    text.reserve(text_len(frame.len()));
    for three in frame.chunks(3) {
        let byte = |at: usize| u32::from(three.get(at).copied().unwrap_or(0));
        let word = byte(0) << 16 | byte(1) << 8 | byte(2);
        for at in 0..=three.len() {
            text.push(ALPHABET[(word >> (18 - 6 * at) & 63) as usize]);
        }
    }
}

/// Decodes the frames of a text. Errors: `Malformed`.
pub(crate) fn decode(text: &[u8]) -> Result<Vec<Vec<u8>>> {
    if text.len() > MAX_TEXT {
        return Err(malformed("it is too long"));
    }
    text.split(|byte| *byte == GAP).map(decode_one).collect()
}

fn decode_one(text: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3 + 2);
    for four in text.chunks(4) {
        let mut word = 0;
        for (at, letter) in four.iter().enumerate() {
            let value = value(*letter).ok_or_else(|| malformed("a character is not base64"))?;
            word |= u32::from(value) << (18 - 6 * at);
        }
        if four.len() == 1 {
            return Err(malformed("it is truncated"));
        }
        let [_, a, b, c] = word.to_be_bytes();
        bytes.extend_from_slice(&[a, b, c][..four.len() - 1]);
    }
    if bytes.is_empty() { Err(malformed("a frame is empty")) } else { Ok(bytes) }
}

fn value(letter: u8) -> Option<u8> {
    Some(match letter {
        b'A'..=b'Z' => letter - b'A',
        b'a'..=b'z' => letter - b'a' + 26,
        b'0'..=b'9' => letter - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    })
}

fn malformed(why: &'static str) -> Error {
    ErrorKind::Malformed.because(format!("malformed notification of a kvx agent: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(state: &mut u64) -> u64 {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        *state >> 33
    }

    #[test]
    fn frames_of_any_bytes_and_lengths_are_decoded_unchanged() {
        let mut state = 1;
        for _ in 0..200 {
            let frames: Vec<Vec<u8>> = (0..1 + random(&mut state) % 4)
                .map(|_| {
                    (0..1 + random(&mut state) % 70).map(|_| random(&mut state) as u8).collect()
                })
                .collect();
            let mut text = Vec::new();
            frames.iter().for_each(|frame| append(&mut text, frame));
            assert!(text.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' '));
            assert!(text.len() <= frames.iter().map(|frame| text_len(frame.len())).sum());
            assert_eq!(decode(&text).expect("what was encoded"), frames);
        }
        let mut text = Vec::new();
        append(&mut text, b"any carnal pleas");
        assert_eq!(text, b"YW55IGNhcm5hbCBwbGVhcw", "the standard alphabet, without padding");
    }

    #[test]
    fn invalid_frames_are_rejected_and_lengths_bounded() {
        for bad in [&b""[..], b" ", b"A", b"AA=", b"AAAA ", b"AA\0A", "é".as_bytes()] {
            assert!(decode(bad).is_err(), "{bad:?}");
        }
        assert!(decode(&vec![b'A'; MAX_TEXT + 1]).is_err());
        let mut state = 7;
        for _ in 0..2000 {
            let text: Vec<u8> =
                (0..random(&mut state) % 40).map(|_| random(&mut state) as u8).collect();
            if let Ok(frames) = decode(&text) {
                assert!(frames.iter().map(Vec::len).sum::<usize>() <= text.len());
            }
        }
    }
}
