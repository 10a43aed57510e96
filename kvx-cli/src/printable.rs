//! Texts of others, for a terminal.

/// Returns a text with its control characters escaped: a terminal obeys them.
pub(crate) fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter.is_control() {
            true => shown.extend(letter.escape_default()),
            false => shown.push(letter),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_and_other_text_stays() {
        assert_eq!(printable("a\u{1b}[2J\nü"), "a\\u{1b}[2J\\nü");
    }
}
