//! Mooncake's C interface: generated bindings, the library that is opened, and thin owners of its
//! handles.
//!
//! `bindings` are those of `libtransfer_engine.so`, and `adapter_bindings` those of functions that
//! only this crate's adapter has. `cargo xtask bindings` generates both from the headers in this
//! crate.

#[rustfmt::skip]
#[allow(missing_docs, non_camel_case_types, non_snake_case, unreachable_pub, reason = "generated")]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks, reason = "generated")]
pub mod adapter_bindings;
#[rustfmt::skip]
#[allow(missing_docs, non_camel_case_types, non_snake_case, unreachable_pub, dead_code, reason = "generated")]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks, reason = "generated")]
pub mod bindings;

mod engine;
mod incoming;
mod library;
mod self_test;
mod sockets;
#[cfg(test)]
mod tests;

pub(crate) use engine::{Batch, Engine, EngineOptions, EnginePiece, SegmentId, TransferState};
pub(crate) use library::{Library, LoadOptions, block_sigpipe};
