//! Parses durations and sizes.

use std::time::Duration;

use serde::de::{Deserialize, Deserializer, Error as _};

fn split(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let unit = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(unit);
    Some((number.parse().ok()?, unit.trim()))
}

/// Parses `250ms`, `5s`, `2m` or `1h`; at most 366 days.
pub(super) fn duration(text: &str) -> Option<Duration> {
    let (number, unit) = split(text)?;
    let seconds = match unit {
        "ms" => number / 1e3,
        "s" => number,
        "m" => number * 60.0,
        "h" => number * 3600.0,
        _ => return None,
    };
    (seconds <= 366.0 * 86400.0).then(|| Duration::from_secs_f64(seconds))
}

/// Parses `64KiB`, `32MiB`, `1GiB`, or a number of bytes.
pub(super) fn size(text: &str) -> Option<usize> {
    let (number, unit) = split(text)?;
    let factor = match unit {
        "" | "B" => 1.0,
        "KiB" => 1024.0,
        "MiB" => 1048576.0,
        "GiB" => 1073741824.0,
        _ => return None,
    };
    let bytes = number * factor;
    (bytes <= 1e15).then_some(bytes as usize)
}

pub(super) fn read_duration<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(from)?;
    duration(&text).filter(|duration| !duration.is_zero()).ok_or_else(|| {
        D::Error::custom(format!(
            "{text:?} is not a duration; write \"250ms\", \"5s\", \"2m\" or \"1h\""
        ))
    })
}

pub(super) fn read_size<'de, D: Deserializer<'de>>(from: D) -> Result<usize, D::Error> {
    #[derive(serde::Deserialize)]
    #[serde(untagged, expecting = "not a size; write bytes, \"64KiB\" or \"32MiB\"")]
    enum WrittenSize {
        Bytes(u64),
        Text(String),
    }
    let wrong = |text| {
        D::Error::custom(format!("{text:?} is not a size; write bytes, \"64KiB\" or \"32MiB\""))
    };
    match WrittenSize::deserialize(from)? {
        WrittenSize::Bytes(bytes) => Ok(bytes as usize),
        WrittenSize::Text(text) => size(&text).ok_or_else(|| wrong(text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_read_and_nonsense_is_not() {
        assert_eq!(duration("250ms"), Some(Duration::from_millis(250)));
        assert_eq!(duration("1.5h"), Some(Duration::from_secs(5400)));
        assert_eq!(size("64KiB"), Some(65536));
        assert_eq!(size("17"), Some(17));
        for text in ["", "5", "s", "-5s", "5 days", "1e9h", "999999999h", "1.2.3s"] {
            assert_eq!(duration(text), None, "{text:?}");
        }
        for text in ["", "KiB", "5KB", "-1", "99999999GiB"] {
            assert_eq!(size(text), None, "{text:?}");
        }
    }

    #[test]
    fn an_error_names_what_a_size_may_be() {
        let error = read_size(serde_json::json!([1])).unwrap_err();
        assert_eq!(error.to_string(), "not a size; write bytes, \"64KiB\" or \"32MiB\"");
    }
}
