//! UCX's C interface: generated bindings, the library that is opened, and thin owners of its
//! handles.
//!
//! The bindings are those of 1.13, which later versions keep. A second file holds the
//! scatter-gather datatype of 1.22, which only tests use: it was measured to be no faster than
//! single puts. `cargo xtask bindings` generates both.

#[rustfmt::skip]
#[allow(missing_docs, non_camel_case_types, unreachable_pub, dead_code, reason = "generated")]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks, reason = "generated")]
pub mod bindings_1_13;
#[rustfmt::skip]
#[allow(missing_docs, non_camel_case_types, unreachable_pub, dead_code, reason = "generated")]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks, reason = "generated")]
pub mod bindings_1_22;

mod conflict;
mod context;
mod endpoint;
mod library;
#[cfg(test)]
mod lists;
mod log;
mod pad;
mod print;
mod request;
mod status;
#[cfg(test)]
mod tests;
mod transports;
mod worker;

pub(crate) use context::{MapParams, MappedMemory, UcxContext};
pub(crate) use endpoint::{Endpoint, RemoteKey};
pub(crate) use kvx_backend::version::Version;
pub(crate) use library::{LIBRARY, Library};
pub(crate) use pad::pad;
pub(crate) use request::{CompletionHandler, PostOutcome};
pub(crate) use status::Status;
pub(crate) use transports::LaneTransport;
pub(crate) use worker::{ArmOutcome, Message, MessageHandler, Worker};
