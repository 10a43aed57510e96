//! Human-readable numbers: `1k` is 1,000 and `1K` is 1,024, also inside JSON text.

use serde_json::{Map, Number, Value};

use kvx_core::{ErrorKind, Result};

/// The reason why a text in the shape of a number is not a valid one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Misfit {
    /// `1.5K`: binary suffixes take whole numbers only.
    BinaryFraction,
    /// The number needs more than 64 bits.
    TooLarge,
}

impl Misfit {
    fn sentence(&self, written: &str) -> String {
        match self {
            Misfit::BinaryFraction => format!(
                "{written}: k, m, g, t (powers of 1000) take decimals, K, M, G, T (powers of 1024) do not; write \
                 {} or a whole number",
                written.to_ascii_lowercase()
            ),
            Misfit::TooLarge => {
                format!("{written} does not fit in 64 bits; write a smaller number")
            }
        }
    }
}

fn multiplier(suffix: char) -> Option<(u64, bool)> {
    Some(match suffix {
        'k' => (1_000, false),
        'm' => (1_000_000, false),
        'g' => (1_000_000_000, false),
        't' => (1_000_000_000_000, false),
        'K' => (1 << 10, true),
        'M' => (1 << 20, true),
        'G' => (1 << 30, true),
        'T' => (1 << 40, true),
        _ => return None,
    })
}

/// Reads `digits[.digits]suffix`. Returns `None` if `text` does not have that shape.
fn suffixed(text: &str) -> Option<Result<u64, Misfit>> {
    let (number, (factor, binary)) = text
        .char_indices()
        .next_back()
        .and_then(|(at, last)| Some((&text[..at], multiplier(last)?)))?;
    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) => (whole, Some(fraction)),
        None => (number, None),
    };
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !fraction.is_none_or(digits) {
        return None;
    }
    Some(match fraction {
        None => whole
            .parse::<u64>()
            .ok()
            .and_then(|whole| whole.checked_mul(factor))
            .ok_or(Misfit::TooLarge),
        Some(_) if binary => Err(Misfit::BinaryFraction),
        // As in vLLM: through a double, truncated to an integer.
        Some(_) => match number.parse::<f64>() {
            Ok(number) if number * (factor as f64) < 9.0e18 => {
                Ok((number * (factor as f64)) as u64)
            }
            _ => Err(Misfit::TooLarge),
        },
    })
}

/// Reads an integer as Python's `int` does: with a sign, leading zeros and single underscores.
fn plain(text: &str) -> Option<Result<Number, Misfit>> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let shape = !digits.starts_with('_')
        && !digits.ends_with('_')
        && !digits.contains("__")
        && digits.bytes().any(|byte| byte.is_ascii_digit())
        && digits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'_');
    if !shape {
        return None;
    }
    let digits = digits.replace('_', "");
    let number = if negative {
        format!("-{digits}").parse::<i64>().ok().map(Number::from)
    } else {
        digits.parse::<u64>().ok().map(Number::from)
    };
    Some(number.ok_or(Misfit::TooLarge))
}

/// Reads a number. Returns `None` if `text` does not look like one.
pub(super) fn number(text: &str) -> Option<Result<Number, Misfit>> {
    let text = text.trim();
    suffixed(text).map(|value| value.map(Number::from)).or_else(|| plain(text))
}

/// Returns the error message for an invalid number.
pub(super) fn explain(written: &str, misfit: &Misfit) -> String {
    misfit.sentence(written)
}

/// Replaces every bare number such as `80m` in `text` by its digits. Strings in quotes stay
/// unchanged.
fn expand(text: &str) -> Result<String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        let (length, word) = if next == '"' {
            (quoted(rest), false)
        } else if is_word(next) {
            (rest.find(|c| !is_word(c)).unwrap_or(rest.len()), true)
        } else {
            (next.len_utf8(), false)
        };
        let (token, after) = rest.split_at(length);
        match suffixed(token).filter(|_| word) {
            Some(Ok(number)) => out.push_str(&number.to_string()),
            Some(Err(misfit)) => {
                return Err(ErrorKind::Invalid.because(explain(token, &misfit)));
            }
            None => out.push_str(token),
        }
        rest = after;
    }
    Ok(out)
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_' || c == '.'
}

/// Returns the length in bytes of the string at the start of `text`, with both quotes.
fn quoted(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Reads any JSON value, with human-readable numbers. The error shows the text at the mistake.
pub(super) fn json(text: &str) -> Result<Value> {
    let expanded = expand(text)?;
    serde_json::from_str(&expanded).map_err(|error| {
        let reason = error.to_string();
        let reason = reason.rsplit_once(" at line ").map_or(reason.as_str(), |(reason, _)| reason);
        let near = near(&expanded, error.line(), error.column());
        ErrorKind::Invalid.because(format!("this is not JSON: {reason}, near `{near}`"))
    })
}

fn near(text: &str, line: usize, column: usize) -> String {
    let line = text.lines().nth(line.saturating_sub(1)).unwrap_or(text);
    let mut start = column.saturating_sub(16).min(line.len());
    while !line.is_char_boundary(start) {
        start -= 1;
    }
    line[start..].chars().take(24).collect()
}

/// Reads a JSON object, with human-readable numbers.
pub(super) fn object(text: &str) -> Result<Map<String, Value>> {
    match json(text)? {
        Value::Object(object) => Ok(object),
        other => Err(ErrorKind::Invalid.because(format!(
            "the KV transfer configuration is {other}; write an object: {{\"kv_connector\": \
             \"NixlConnector\", …}}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(text: &str) -> String {
        expand(text).unwrap()
    }

    #[test]
    fn suffixes_expand_outside_strings_only() {
        for (written, meant) in [
            (r#"{"x": 80m}"#, r#"{"x": 80000000}"#),
            (r#"{"x": 80g}"#, r#"{"x": 80000000000}"#),
            (r#"{"x": 1k, "y": [2t, -5k]}"#, r#"{"x": 1000, "y": [2000000000000, -5000]}"#),
            (r#"{"x": 1K, "y": 1G}"#, r#"{"x": 1024, "y": 1073741824}"#),
            (r#"{"x": 1.5g}"#, r#"{"x": 1500000000}"#),
            (r#"{"80g": "80g", "q\"1k": 1k}"#, r#"{"80g": "80g", "q\"1k": 1000}"#),
            (r#"{"x": 42, "y": 1e5, "z": true}"#, r#"{"x": 42, "y": 1e5, "z": true}"#),
        ] {
            assert_eq!(expanded(written), meant);
        }
    }

    #[test]
    fn a_binary_suffix_takes_no_decimals() {
        let error = expand(r#"{"x": 1.5K}"#).unwrap_err();
        assert_eq!(
            error.to_string(),
            "1.5K: k, m, g, t (powers of 1000) take decimals, K, M, G, T (powers of 1024) do not; write 1.5k or a \
             whole number"
        );
        assert!(expand("{\"x\": 99999999999999T}").is_err());
    }

    #[test]
    fn tokens_that_only_end_like_numbers_are_left_to_the_json_parser() {
        assert_eq!(expanded("1.5.5k x1k 1e5k _1k"), "1.5.5k x1k 1e5k _1k");
        let error = json(r#"{"x": 1.5.5k}"#).unwrap_err().to_string();
        assert!(error.contains("near `") && error.contains("1.5.5k"), "{error}");
    }

    #[test]
    fn plain_numbers_are_read_as_python_reads_them() {
        let parse = |text| number(text).map(|number| number.unwrap().to_string());
        assert_eq!(parse("007").as_deref(), Some("7"));
        assert_eq!(parse(" +1_000 ").as_deref(), Some("1000"));
        assert_eq!(parse("-0012").as_deref(), Some("-12"));
        assert_eq!(parse("1__0"), None);
        assert_eq!(parse("x"), None);
        assert_eq!(parse(""), None);
        assert_eq!(number("99999999999999999999"), Some(Err(Misfit::TooLarge)));
    }
}
