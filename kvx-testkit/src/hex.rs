//! Bytes as text, for pipes between processes.

/// Encodes bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Decodes hexadecimal digits.
///
/// # Panics
/// If the text is not what [`hex`] returns.
#[expect(clippy::expect_used, reason = "a test that cannot go on must fail")]
pub fn unhex(text: &str) -> Vec<u8> {
    let digit = |digit: u8| char::from(digit).to_digit(16).expect("a hexadecimal digit") as u8;
    text.as_bytes().chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}
