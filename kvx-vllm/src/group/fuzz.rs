//! What the fuzz target and the bounded fuzz test call.

use std::fmt::Debug;

use kvx_core::Result;

use super::{ToHead, ToRank};

/// The targets, by the names of their corpora.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[("connector_group", group)];

/// What an engine and a rank in a process of its own say to each other.
pub fn group(bytes: &[u8]) {
    let encoded = "what was read is short enough to be written";
    stable(bytes, ToRank::decode, |message| message.encode().expect(encoded));
    stable(bytes, ToHead::decode, |message| message.encode().expect(encoded));
}

/// Reads, writes, and reads again: the two must be equal, and the second writing must give the bytes of the first.
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
        Err(error) => panic!("{first:?} was read, but not again: {error}"),
    }
}
