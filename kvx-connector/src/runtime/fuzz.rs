//! Entry points for the fuzz target and the bounded fuzz test: bytes that a socket receives from
//! any peer.

use super::mooncake::{MAX_HTTP_HEAD, http_head_len};

/// The targets, with the names of their corpora.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[("connector_http", http)];

/// Parses the bytes as the head of an HTTP message, and checks that the parser finds the same head
/// in exactly its own length and none in one byte less.
pub fn http(bytes: &[u8]) {
    if let Some(Some(len)) = http_head_len(bytes) {
        assert!(len <= bytes.len() && len <= MAX_HTTP_HEAD, "{len}");
        assert_eq!(http_head_len(&bytes[..len]), Some(Some(len)));
        assert_eq!(http_head_len(&bytes[..len - 1]), Some(None));
    }
}
