//! What NIXL's agents tell each other: their metadata, and the notifications of those with the backend KVX.

mod blob;
mod parts;

pub use blob::{NixlBlob, NixlDescriptor, NixlMemory, NixlSection};
pub use parts::{Assembly, Got, MAX_NOTE, notes};
