//! NIXL's C interface: generated bindings, the loaded library, and thin owners of its handles.

#[rustfmt::skip]
#[allow(missing_docs, non_camel_case_types, unreachable_pub, dead_code, reason = "generated")]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks, reason = "generated")]
pub mod bindings;

mod agent;
mod library;
mod lists;
mod plugins;
mod request;
mod status;

pub(crate) use agent::{NixlAgent, Settings, UCX};
pub(crate) use library::{Library, open as open_library};
pub(crate) use lists::{MemorySegment, Range, TransferList};
pub(crate) use plugins::Plugin;
pub(crate) use request::{Request, UnreleasedRequests};
pub(crate) use status::{State, Status};
