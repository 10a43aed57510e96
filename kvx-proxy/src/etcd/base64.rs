//! Base64 with padding, in which the gateway writes keys and values.

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

pub(super) fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |at: usize| u32::from(group.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for at in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * at) & 63) as usize];
            text.push(if at <= group.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

/// Returns `None` for a text that [`encode`] does not return for any bytes.
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    let padding = digits.iter().rev().take_while(|digit| **digit == b'=').count();
    if !digits.len().is_multiple_of(4) || padding > 2 {
        return None;
    }
    let mut bytes = Vec::with_capacity(digits.len() / 4 * 3);
    for group in digits[..digits.len() - padding].chunks(4) {
        let mut bits = 0;
        for at in 0..4 {
            let value = group.get(at).map_or(Some(0), |digit| value(*digit))?;
            bits = bits << 6 | value;
        }
        let [_, decoded @ ..] = u32::to_be_bytes(bits);
        let (used, rest) = decoded.split_at(group.len() - 1);
        if rest.iter().any(|byte| *byte != 0) {
            return None;
        }
        bytes.extend_from_slice(used);
    }
    Some(bytes)
}

fn value(digit: u8) -> Option<u32> {
    Some(u32::from(match digit {
        b'A'..=b'Z' => digit - b'A',
        b'a'..=b'z' => digit - b'a' + 26,
        b'0'..=b'9' => digit - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vectors_of_rfc_4648_hold_both_ways() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("hi", "aGk="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(encode(bytes.as_bytes()), text);
            assert_eq!(decode(text).as_deref(), Some(bytes.as_bytes()));
        }
        let every: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&every)), Some(every));
    }

    #[test]
    fn other_texts_are_refused() {
        for wrong in
            ["Z", "Zg", "Zg=", "Zg===", "====", "Zh==", "Zm9=", "Z===", "Zm 9", "Zm-v", "=Zg="]
        {
            assert_eq!(decode(wrong), None, "{wrong}");
        }
    }
}
