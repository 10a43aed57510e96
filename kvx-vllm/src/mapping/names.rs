//! The order of layer names.

use std::cmp::Ordering;

/// Compares names in natural order: digits by their value, other text by its characters. `layers.2`
/// comes before `layers.10`. The regions of an engine are in this order of their layers.
pub fn natural_order(a: &str, b: &str) -> Ordering {
    let (mut a, mut b) = (a, b);
    loop {
        let (text, rest_a) = split(a, |c| !c.is_ascii_digit());
        let (other, rest_b) = split(b, |c| !c.is_ascii_digit());
        let by_text = text.cmp(other);
        if by_text.is_ne() {
            return by_text;
        }
        match (rest_a.is_empty(), rest_b.is_empty()) {
            (true, true) => return Ordering::Equal,
            (true, false) => return Ordering::Less,
            (false, true) => return Ordering::Greater,
            (false, false) => {}
        }
        let (digits, after_a) = split(rest_a, |c| c.is_ascii_digit());
        let (others, after_b) = split(rest_b, |c| c.is_ascii_digit());
        let by_value = value(digits).cmp(&value(others));
        if by_value.is_ne() {
            return by_value;
        }
        (a, b) = (after_a, after_b);
    }
}

fn split(name: &str, belongs: impl Fn(char) -> bool) -> (&str, &str) {
    name.split_at(name.find(|c| !belongs(c)).unwrap_or(name.len()))
}

/// Returns a key that orders digits of any length by value: without leading zeros, the longer
/// number is larger.
fn value(digits: &str) -> (usize, &str) {
    let digits = digits.trim_start_matches('0');
    (digits.len(), digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_count_by_value() {
        let mut names = [
            "model.layers.10.attn",
            "model.layers.2.attn",
            "model.layers.2.indexer",
            "mtp.0",
            "a10b2",
            "a10b10",
        ];
        names.sort_by(|a, b| natural_order(a, b));
        assert_eq!(
            names,
            [
                "a10b2",
                "a10b10",
                "model.layers.2.attn",
                "model.layers.2.indexer",
                "model.layers.10.attn",
                "mtp.0"
            ]
        );
        assert_eq!(natural_order("l007", "l7"), Ordering::Equal);
        assert_eq!(
            natural_order("l99999999999999999999998", "l99999999999999999999999"),
            Ordering::Less
        );
        assert_eq!(natural_order("layer", "layer1"), Ordering::Less);
    }
}
