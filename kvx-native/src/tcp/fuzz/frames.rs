//! Fuzz target for the parts of frames, and for an owner's address in the metadata.

use kvx_backend::control::Refusal;

use crate::tcp::address;
use crate::tcp::frames::{HEADER, Header, Hello, read_end, read_refuse};
use crate::tcp::memory::regions;

/// Decodes a header, and the same bytes as the body of each frame that has one.
pub(crate) fn frames(bytes: &[u8]) {
    if let Some(Ok(header)) = bytes.first_chunk::<HEADER>().map(Header::decode) {
        let mut written = Vec::new();
        header.encode(&mut written);
        assert_eq!(written, bytes[..HEADER]);
    }
    if let Ok(hello) = Hello::decode(bytes) {
        assert_eq!(hello.encode(), bytes);
    }
    if let Ok(Err(error)) = read_end(bytes) {
        check(error.sentence());
    }
    check(read_refuse(bytes).sentence());
    if let Ok(addresses) = address::decode(bytes) {
        assert_eq!(address::decode(&address::encode(&addresses)).ok(), Some(addresses));
    }
    drop(regions::import(bytes));
}

/// Checks a text that will be shown in logs and terminals.
fn check(sentence: &str) {
    assert!(
        sentence.len() <= 2 * Refusal::MAX_BYTES && !sentence.contains(char::is_control),
        "{sentence:?}"
    );
}
