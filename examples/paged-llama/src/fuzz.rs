//! Entry points of the fuzz targets, and a bounded run of each: no bytes of a client or of another
//! host may cause a panic, or take much more memory than they have.

/// The targets, by the names of their corpora.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[
    ("serve_body", crate::http::fuzz::body),
    ("serve_join", crate::http::fuzz::join),
    ("serve_chat", crate::tokenizer::fuzz::chat),
    ("serve_text", crate::tokenizer::fuzz::text),
];

#[cfg(test)]
mod tests {
    kvx_testkit::replay_test!(super::TARGETS);
}
