#![doc = include_str!("../README.md")]

#[cfg(test)]
mod freed;
mod handshake;
mod seal;

pub use handshake::{KEY, Key, MESSAGE, NoiseHandshake, TAG, derive_key};
pub use seal::{Opener, RECORD, Sealer, Seals};
