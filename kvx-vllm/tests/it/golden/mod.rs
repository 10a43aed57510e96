//! The golden data: the copy in this crate, or another set in the directory that `KVX_VECTORS`
//! names.
#![allow(dead_code, reason = "most of it needs the feature `protocol`")]

#[cfg(feature = "protocol")]
mod compatibility_hash;
#[cfg(feature = "protocol")]
mod dialects;
#[cfg(feature = "events")]
mod events;
#[cfg(feature = "protocol")]
mod handshake;
mod http;
#[cfg(feature = "protocol")]
mod mapping;
#[cfg(feature = "protocol")]
mod msgpack;
#[cfg(feature = "protocol")]
mod notifications;

use std::path::PathBuf;

/// Returns the directory with the vectors: `KVX_VECTORS` at run time, otherwise the copy next to
/// this file.
pub(crate) fn directory() -> PathBuf {
    match std::env::var_os("KVX_VECTORS") {
        Some(named) => named.into(),
        None => [env!("CARGO_MANIFEST_DIR"), "tests", "vectors"].iter().collect(),
    }
}

/// Returns whether these are the crate's own vectors. Some assertions hold only for them.
pub(crate) fn own() -> bool {
    std::env::var_os("KVX_VECTORS").is_none()
}

/// Fails if the crate's own vectors have no cases. If another set has none, skips the current test.
#[track_caller]
pub(crate) fn require(cases: usize, what: &str) {
    if cases == 0 {
        assert!(!own(), "no {what} in the vectors");
        let thread = std::thread::current();
        let reason = format!("no {what} in the vectors that KVX_VECTORS names");
        kvx_testkit::skip(
            thread.name().unwrap(),
            &reason,
            "unset KVX_VECTORS, or add such vectors",
        );
    }
}

/// Asserts that the crate's own vectors have exactly these captures in a folder. Another set needs
/// at least one.
#[track_caller]
pub(crate) fn require_captures<'a>(
    folder: &str,
    found: impl Iterator<Item = &'a str>,
    own_names: &[&str],
) {
    let found: std::collections::BTreeSet<_> = found.collect();
    assert!(!found.is_empty(), "no captures in {}", directory().join(folder).display());
    assert!(!own() || found == own_names.iter().copied().collect(), "{folder}: {found:?}");
}

/// Reads a file, named relative to the directory.
#[track_caller]
pub(crate) fn bytes(name: &str) -> Vec<u8> {
    let path = directory().join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Reads a JSON file, named relative to the directory.
#[track_caller]
pub(crate) fn json(name: &str) -> serde_json::Value {
    serde_json::from_slice(&bytes(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Decodes hexadecimal text.
#[track_caller]
pub(crate) fn hex(text: &str) -> Vec<u8> {
    let pairs = text.as_bytes().chunks(2);
    pairs
        .map(|pair| {
            let pair = std::str::from_utf8(pair).expect("hexadecimal text is ASCII");
            u8::from_str_radix(pair, 16)
                .unwrap_or_else(|error| panic!("{pair:?} in {text:?}: {error}"))
        })
        .collect()
}
