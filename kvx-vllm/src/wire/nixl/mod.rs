//! The messages of NIXL's agents: their metadata, and the notifications of agents with the backend
//! KVX.

mod blob;
mod parts;

pub use blob::{NixlBlob, NixlDescriptor, NixlMemory, NixlSection};
pub use parts::{Assembly, Got, MAX_NOTE, notes};
