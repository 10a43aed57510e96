//! Shared memory between processes of one host and one user.
//!
//! Nobody writes into memory that it does not own: the initiator of a read copies from the owner's memory into its
//! own, and a write is pulled by the target's own thread. [`messages`] describes the protocol.

mod address;
mod config;
mod connection;
mod copy;
mod copying;
mod ending;
mod error;
mod flights;
pub(crate) mod fuzz;
mod granting;
mod handshake;
mod host;
#[cfg(test)]
mod hostile;
mod inline;
mod link;
mod memory;
mod messages;
mod notices;
#[cfg(test)]
mod pair;
mod progress;
mod pulls;
mod reads;
mod socket;
mod transport;
mod writes;

pub use transport::Shm;
