//! The entry point of the fuzz target and the bounded fuzz test.

use super::{ToHead, ToRank};
use crate::wire::fuzz::stable;

/// The targets, by the names of their corpora.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[("connector_group", group)];

/// Decodes messages between an engine and a rank in another process.
pub fn group(bytes: &[u8]) {
    let encoded = "a decoded message is short enough to encode";
    stable(bytes, ToRank::decode, |message| message.encode().expect(encoded));
    stable(bytes, ToHead::decode, |message| message.encode().expect(encoded));
}
