//! Parses and formats numbers of bytes.

/// Parses `256M`, `64K`, `1G` or a plain number; the units are powers of 1024.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let wrong =
        || format!("{text:?} is not a number of bytes: write, for example, 64K, 256M or 1G");
    let (digits, shift) = match text.trim().char_indices().last() {
        Some((at, unit)) if !unit.is_ascii_digit() => {
            let shift = match unit.to_ascii_uppercase() {
                'K' => 10,
                'M' => 20,
                'G' => 30,
                _ => return Err(wrong()),
            };
            (&text.trim()[..at], shift)
        }
        _ => (text.trim(), 0),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

/// Returns `256 MiB`, `64 KiB`, or plain bytes where no unit divides.
pub(crate) fn show(bytes: u64) -> String {
    for (shift, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes >= 1 << shift && bytes.is_multiple_of(1 << shift) {
            return format!("{} {unit}", bytes >> shift);
        }
    }
    format!("{bytes} bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_powers_of_1024_in_any_case() {
        let cases =
            [("4096", 4096), ("64K", 64 << 10), ("256m", 256 << 20), (" 1G ", 1 << 30), ("0", 0)];
        for (text, bytes) in cases {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn errors_quote_what_is_not_a_number_of_bytes() {
        for text in ["", "K", "12Q", "-1M", "1.5G", "99999999999G", "1MB", "7\u{e4}"] {
            assert!(
                parse(text).unwrap_err().starts_with(&format!("{text:?} is not a number of bytes"))
            );
        }
    }

    #[test]
    fn the_largest_unit_that_divides_is_shown() {
        assert_eq!(
            [show(256 << 20), show(65 << 10), show(1000)],
            ["256 MiB", "65 KiB", "1000 bytes"]
        );
    }
}
