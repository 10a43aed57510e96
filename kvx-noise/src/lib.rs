#![doc = include_str!("../README.md")]

mod handshake;
mod seal;

pub use handshake::{Handshake, KEY, MESSAGE, TAG};
pub use seal::{Opener, RECORD, Sealer, Seals};
