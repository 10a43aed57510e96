//! The entry point of the fuzz target and the bounded fuzz test.

use std::fmt::Debug;

use kvx_core::Result;

use super::{ToHead, ToRank};

/// The targets, by the names of their corpora.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[("connector_group", group)];

/// Decodes messages between an engine and a rank in another process.
pub fn group(bytes: &[u8]) {
    let encoded = "a decoded message is short enough to encode";
    stable(bytes, ToRank::decode, |message| message.encode().expect(encoded));
    stable(bytes, ToHead::decode, |message| message.encode().expect(encoded));
}

/// Decodes, encodes and decodes again. Both values must be equal, and both encodings too.
fn stable<T: Debug + PartialEq>(
    bytes: &[u8],
    decode: impl Fn(&[u8]) -> Result<T>,
    encode: impl Fn(&T) -> Vec<u8>,
) {
    let Ok(first) = decode(bytes) else { return };
    let written = encode(&first);
    match decode(&written) {
        Ok(second) => {
            assert_eq!(first, second);
            assert_eq!(written, encode(&second));
        }
        Err(error) => panic!("{first:?} was decoded once, but not again: {error}"),
    }
}
