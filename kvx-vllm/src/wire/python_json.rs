//! JSON text as Python's `json.dumps(…, sort_keys=True)` writes it: sorted keys, `", "` and `": "`,
//! only ASCII.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::Value;

/// Returns the text, or the name of a key with a fractional number.
pub(super) fn text(value: &Value) -> Result<String, String> {
    let mut out = String::new();
    put(&mut out, "", value)?;
    Ok(out)
}

fn put(out: &mut String, key: &str, value: &Value) -> Result<(), String> {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Number(number) if number.is_f64() => return Err(key.to_owned()),
        Value::Number(number) => out.push_str(&number.to_string()),
        Value::String(text) => put_text(out, text),
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                put(out, key, item)?;
            }
            out.push(']');
        }
        Value::Object(object) => {
            // Sorted by code points, as in Python, whatever the order of the map.
            let sorted: BTreeMap<_, _> = object.iter().collect();
            out.push('{');
            for (index, (key, item)) in sorted.into_iter().enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                put_text(out, key);
                out.push_str(": ");
                put(out, key, item)?;
            }
            out.push('}');
        }
    }
    Ok(())
}

fn put_text(out: &mut String, text: &str) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            ' '..='~' => out.push(character),
            other => {
                for unit in other.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}").expect("writing to a string does not fail");
                }
            }
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn text_is_what_python_writes() {
        let value = json!({"b": [1, -2, null, true], "a": {"z": "é\u{1F600}\u{7f}\u{1}\n\"\\/", "A": false}, "": []});
        let python = concat!(
            r#"{"": [], "a": {"A": false, "z": "\u00e9\ud83d\ude00\u007f\u0001\n\"\\/"}, "#,
            r#""b": [1, -2, null, true]}"#
        );
        assert_eq!(text(&value).unwrap(), python);
        assert_eq!(text(&json!({"a": {"b": [1.5]}})), Err("b".to_owned()));
    }
}
