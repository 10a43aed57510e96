//! The messages of NIXL's agents: their metadata, and the notifications and confirmations of agents
//! with the backend KVX.

mod blob;
mod leases;
mod parts;

pub use blob::{NixlBlob, NixlDescriptor, NixlMemory, NixlSection};
pub use leases::{BUCKET_LEN, GENERATIONS_REGION, LEASE_TABLE_WORDS, LeaseKey, LeaseTable};
pub use parts::{Assembly, Got, MAX_NOTE, notes};
