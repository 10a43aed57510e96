//! The golden data: the copy in this crate's tests, or another set in the directory that `KVX_VECTORS` names.
#![allow(dead_code, reason = "each test target reads its own part")]

use std::path::PathBuf;

/// The directory with the vectors: `KVX_VECTORS` at run time, else the copy beside this file.
pub(crate) fn directory() -> PathBuf {
    match std::env::var_os("KVX_VECTORS") {
        Some(named) => named.into(),
        None => [env!("CARGO_MANIFEST_DIR"), "tests", "vectors"].iter().collect(),
    }
}

/// Whether these are the vectors that came with the crate: what holds for them alone is asserted of them alone.
pub(crate) fn own() -> bool {
    std::env::var_os("KVX_VECTORS").is_none()
}

/// The bytes of a file, named relative to the directory.
#[track_caller]
pub(crate) fn bytes(name: &str) -> Vec<u8> {
    let path = directory().join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A JSON file, named relative to the directory.
#[track_caller]
pub(crate) fn json(name: &str) -> serde_json::Value {
    serde_json::from_slice(&bytes(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Bytes written as hexadecimal text.
#[track_caller]
pub(crate) fn hex(text: &str) -> Vec<u8> {
    let pairs = text.as_bytes().chunks(2);
    pairs
        .map(|pair| {
            let pair = std::str::from_utf8(pair).expect("hexadecimal text is ASCII");
            u8::from_str_radix(pair, 16).unwrap_or_else(|error| panic!("{pair:?} in {text:?}: {error}"))
        })
        .collect()
}
