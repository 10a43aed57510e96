//! The sans-IO handshake of a lane: authenticates both ends, and agrees on the seal.
//!
//! It uses Noise (see kvx-noise for the pattern) with a key of 256 bits that both ends derive from
//! the owner's invitation, and from the secret if there is one. The initiator's first message
//! proves that its sender had the key. Without that proof an owner computes no Diffie-Hellman, and
//! sends one constant answer or its versions. The owner's message proves the same, and that it is
//! not a replay. The initiator's next message, with fresh keys, names the initiator. The first
//! message of an initiator with a secret contains a second hello with the secret alone. An owner
//! that can verify only this one is not the agent that the metadata names: it proves that it has
//! the secret, and the initiator reports that the peer has restarted.

mod initiator;
mod owner;
#[cfg(test)]
mod tests;

use kvx_backend::control::proof::Keys;
use kvx_core::{Error, ErrorKind};
use kvx_noise::{Key, Seals};

use crate::tcp::frames::{Header, Versions};
use crate::tcp::seal::Seal;

pub(crate) use initiator::{InitiatorHandshake, InitiatorVerdict};
pub(crate) use owner::{OwnerHandshake, Step};

const INVITED: &str = "kvx tcp 3: the key by invitation and secret";
const MISTAKEN: &str = "kvx tcp 3: the key by the secret alone";

/// The first byte of an owner's WELCOME.
const COME_IN: u8 = 0;
const NO_ROOM: u8 = 1;

/// The agreed seal and its keys, after a handshake.
pub(crate) type Agreement = (Seal, Box<Seals>);

fn unexpected(header: Header) -> Error {
    ErrorKind::Malformed.because(format!("malformed handshake: unexpected {:?}", header.frame))
}

fn no_version(owner: Versions, initiator: Versions) -> Error {
    ErrorKind::Incompatible.because(format!(
        "the owner speaks versions {owner} of the TCP protocol, the initiator {initiator}: update \
         kvx on both ends to releases with a common version"
    ))
}

fn invited_key(keys: &Keys) -> Key {
    Key::new(keys.both(INVITED, &[]).proof())
}

fn mistaken_key(keys: &Keys) -> Option<Key> {
    Some(Key::new(keys.secret(MISTAKEN, &[])?.proof()))
}

/// Returns the prologue of the hello with the secret alone: all bytes before it.
fn before_mistaken(head: &[u8], invited: &[u8]) -> Vec<u8> {
    [head, invited].concat()
}
