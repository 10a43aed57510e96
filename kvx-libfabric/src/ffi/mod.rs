//! libfabric's C interface: generated bindings, the library that is opened, and thin owners of its
//! objects.
//!
//! Few of libfabric's functions are symbols. The others are inline functions in C, which call
//! through tables of functions in each object; the wrappers here do the same. The bindings are
//! those of 1.17. Later versions keep them for programs that request that version's symbols, also
//! if a program requests the behaviour of a later interface.

#[rustfmt::skip]
#[allow(missing_docs, non_camel_case_types, unreachable_pub, dead_code, reason = "generated")]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks, reason = "generated")]
pub mod bindings_1_17;

mod domain;
mod endpoint;
mod errno;
mod info;
mod library;
mod options;
#[cfg(test)]
mod tests;

pub(crate) use domain::{Domain, MemoryDescription, Registration};
pub(crate) use endpoint::{
    CompletedOperation, Endpoint, FailedOperation, MAX_RANGES, PeerNumber, Range, Read,
    RemoteRange, WaitMethod, has_descriptors,
};
pub(crate) use errno::Errno;
pub(crate) use info::{Info, Infos, PciAddress, ProviderQuery};
#[cfg(feature = "raw")]
pub use library::symbol_version;
pub(crate) use library::{LIBRARY, Library, Version};
