//! The subset of msgpack that vLLM's protocols use, byte for byte as msgspec writes it. Integers,
//! strings and lengths take their shortest form; floats have 64 bits.
//!
//! The reader does not trust its input. It checks lengths against the remaining bytes before it
//! allocates, limits nesting, and rejects extension types.

mod reader;
#[cfg(feature = "protocol")]
mod value;
mod writer;

/// The result of a reader's methods.
pub type Result<T> = std::result::Result<T, crate::DecodeError>;

pub use reader::MsgpackReader;
#[cfg(feature = "protocol")]
pub(crate) use value::MsgpackValue;
pub use writer::MsgpackWriter;
