//! The part of msgpack that these protocols use, byte for byte as msgspec writes it: integers, strings and lengths in
//! their shortest form, floats of 64 bits.
//!
//! Reading trusts nothing: lengths are held against the bytes that are there before anything is allocated, nesting is
//! limited, and extension types are refused.

mod reader;
mod writer;

/// What a reader returns.
pub type Result<T> = std::result::Result<T, crate::DecodeError>;

pub use reader::MsgpackReader;
pub use writer::MsgpackWriter;
