//! Parses durations and sizes.

use std::time::Duration;

use serde::de::{Deserialize, Deserializer, Error as _};

fn split(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let unit = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(unit);
    Some((number.parse().ok()?, unit.trim()))
}

/// Parses `250ms`, `5s`, `2m` or `1h`; above 0, and at most 366 days. The error lists the units.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    seconds(text).map(Duration::from_secs_f64).filter(|duration| !duration.is_zero()).ok_or_else(
        || format!("{text:?} is not a duration; write \"250ms\", \"5s\", \"2m\" or \"1h\""),
    )
}

fn seconds(text: &str) -> Option<f64> {
    let (number, unit) = split(text)?;
    let seconds = match unit {
        "ms" => number / 1e3,
        "s" => number,
        "m" => number * 60.0,
        "h" => number * 3600.0,
        _ => return None,
    };
    (seconds <= 366.0 * 86400.0).then_some(seconds)
}

/// Parses `64KiB`, `32MiB`, `1GiB`, or a number of bytes. The error lists the units.
pub(super) fn size(text: &str) -> Result<usize, String> {
    bytes(text).ok_or_else(|| {
        format!("{text:?} is not a size; write bytes, \"64KiB\", \"32MiB\" or \"1GiB\"")
    })
}

fn bytes(text: &str) -> Option<usize> {
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
    duration(&String::deserialize(from)?).map_err(D::Error::custom)
}

pub(super) fn read_size<'de, D: Deserializer<'de>>(from: D) -> Result<usize, D::Error> {
    #[derive(serde::Deserialize)]
    #[serde(untagged, expecting = "not a size; write bytes, \"64KiB\", \"32MiB\" or \"1GiB\"")]
    enum WrittenSize {
        Bytes(u64),
        Text(String),
    }
    match WrittenSize::deserialize(from)? {
        WrittenSize::Bytes(bytes) => Ok(bytes as usize),
        WrittenSize::Text(text) => size(&text).map_err(D::Error::custom),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_read_and_nonsense_is_not() {
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("1.5h"), Ok(Duration::from_secs(5400)));
        assert_eq!(size("64KiB"), Ok(65536));
        assert_eq!(size("1GiB"), Ok(1 << 30));
        assert_eq!(size("17"), Ok(17));
        for text in ["", "5", "s", "-5s", "5 days", "1e9h", "999999999h", "1.2.3s", "0s"] {
            let error = duration(text).expect_err(text);
            assert!(error.contains("is not a duration; write \"250ms\""), "{error}");
        }
        for text in ["", "KiB", "5KB", "-1", "99999999GiB"] {
            let error = size(text).expect_err(text);
            assert!(error.contains("\"32MiB\" or \"1GiB\""), "{error}");
        }
    }

    #[test]
    fn an_error_names_what_a_size_may_be() {
        let error = read_size(serde_json::json!([1])).unwrap_err();
        assert_eq!(error.to_string(), "not a size; write bytes, \"64KiB\", \"32MiB\" or \"1GiB\"");
    }
}
