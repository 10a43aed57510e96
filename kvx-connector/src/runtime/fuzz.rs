//! What the fuzz target and the bounded fuzz test call: what a socket receives, from anybody.

use super::mooncake::{MAX_HTTP_HEAD, http_head_len};

/// The targets, by the names of their corpora.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[("connector_http", http)];

/// The same bytes as the head of an HTTP message: as long as it is, and no longer, it is read
/// alike.
pub fn http(bytes: &[u8]) {
    if let Some(Some(len)) = http_head_len(bytes) {
        assert!(len <= bytes.len() && len <= MAX_HTTP_HEAD, "{len}");
        assert_eq!(http_head_len(&bytes[..len]), Some(Some(len)));
        assert_eq!(http_head_len(&bytes[..len - 1]), Some(None));
    }
}
