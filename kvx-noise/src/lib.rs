#![doc = include_str!("../README.md")]

mod handshake;
mod seal;

pub use handshake::{KEY, MESSAGE, NoiseHandshake, TAG, derive_key};
pub use seal::{Opener, RECORD, Sealer, Seals};
