//! The part of msgpack that these protocols use, byte for byte as msgspec writes it: integers, strings and lengths in
//! their shortest form, floats of 64 bits.
//!
//! Reading trusts nothing: lengths are held against the bytes that are there before anything is allocated, nesting is
//! limited, and extension types are refused.

mod reader;
mod record;
mod writer;

pub(super) use reader::MsgpackReader;
pub(super) use record::{Record, RecordFields, Shape};
pub(super) use writer::MsgpackWriter;
